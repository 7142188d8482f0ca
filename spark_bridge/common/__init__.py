# SPDX-License-Identifier: Apache-2.0

"""What both halves import, the driver's and the task's, and what imports neither.

Executors have it too, so nothing here needs more than Python, unless its first lines say so.
"""
