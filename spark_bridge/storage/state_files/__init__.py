# SPDX-License-Identifier: Apache-2.0

"""States that are folders of files: what changed is uploaded, and what is restored is verified (H190, H191, H193).

``values`` is what users see. In a task, ``snapshot`` freezes a folder, ``uploading`` stores it, and ``restoring`` makes
a folder of it again. ``folder`` is the place in the storage, and what the driver does there. ``manifest`` is the list
of a state's files.

Nothing is loaded here, because executors import it.
"""
