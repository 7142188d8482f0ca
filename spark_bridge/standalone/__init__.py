# SPDX-License-Identifier: Apache-2.0

"""The sidecar in a separate process, and the class that attaches a driver to it.

``headgate sidecar module:factory`` runs it, and ``AttachedSidecar`` is the driver's half. The process holds
coordinators, gateways and checkpoints. The driver sends it Spark's facts, through the listener in its JVM. If the
process dies, tasks and JVM look for it until it is started again. It then continues from its storage.
"""

from __future__ import annotations
