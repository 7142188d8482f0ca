"""The sidecar in a process of its own, and what attaches a driver to it.

``python -m headgate sidecar module:factory`` runs it; ``AttachedSidecar`` is the driver's half. The process holds
coordinators, gateways and checkpoints; the driver gives it Spark's facts, through the listener in its JVM. When the
process dies, tasks and JVM look for it until it is started again; it then goes on from its storage.
"""

from __future__ import annotations
