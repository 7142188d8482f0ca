"""Exactly-once files out of a streaming operator: sealed at the snapshot, visible when the checkpoint completes.

Two halves. In the task, ``SinkWriter`` (or ``FileSinkOperator`` around it) writes rows into part files under a
directory that readers do not look at, and sends the list of what it sealed as an event inside its snapshot. On the
driver, ``SinkCommitter`` (or ``FileSinkCoordinator`` around it) moves the listed files to where readers look, once the
checkpoint that covers them is complete. ``books`` explains why nothing is lost or doubled.

Imported in executors too, so nothing is loaded before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.sink.committer import SinkCommitter
    from spark_bridge.sink.coordinator import FileSinkCoordinator
    from spark_bridge.sink.errors import SinkBroken, SinkFileLost, SinkMisused, SinkPublishError
    from spark_bridge.sink.files import SealedFile
    from spark_bridge.sink.operator import FileSinkOperator
    from spark_bridge.sink.writer import SinkWriter

_ROOMS = {
    "FileSinkCoordinator": ".coordinator",
    "FileSinkOperator": ".operator",
    "SealedFile": ".files",
    "SinkBroken": ".errors",
    "SinkCommitter": ".committer",
    "SinkFileLost": ".errors",
    "SinkMisused": ".errors",
    "SinkPublishError": ".errors",
    "SinkWriter": ".writer",
}

__all__ = [
    "FileSinkCoordinator",
    "FileSinkOperator",
    "SealedFile",
    "SinkBroken",
    "SinkCommitter",
    "SinkFileLost",
    "SinkMisused",
    "SinkPublishError",
    "SinkWriter",
]


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(room, __name__), name)
