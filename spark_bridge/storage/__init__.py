# SPDX-License-Identifier: Apache-2.0

"""Durable checkpoints: files in a directory or behind a URL, and how the event loop uses them (H4, H50 to H52).

Needs neither Spark nor a JVM. A name is loaded when it is first used, because executors, which have only what is
shipped to them, import ``state_files`` and what that needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.storage.errors import CheckpointUnreadable as CheckpointUnreadable
    from spark_bridge.storage.errors import StorageError as StorageError
    from spark_bridge.storage.errors import StorageFenced as StorageFenced
    from spark_bridge.storage.interface import RESTORE as RESTORE
    from spark_bridge.storage.interface import CheckpointFile as CheckpointFile
    from spark_bridge.storage.interface import CheckpointInfo as CheckpointInfo
    from spark_bridge.storage.interface import Restore as Restore
    from spark_bridge.storage.interface import Storage as Storage
    from spark_bridge.storage.interface import WriteOptions as WriteOptions
    from spark_bridge.storage.memory import MemoryStorage as MemoryStorage
    from spark_bridge.storage.port import StoragePort as StoragePort
    from spark_bridge.storage.port import StorageSession as StorageSession
    from spark_bridge.storage.single_files import read_file as read_file
    from spark_bridge.storage.store import CheckpointStorage as CheckpointStorage

_MODULES = {
    "errors": ("CheckpointUnreadable", "StorageError", "StorageFenced"),
    "interface": ("RESTORE", "CheckpointFile", "CheckpointInfo", "Restore", "Storage", "WriteOptions"),
    "memory": ("MemoryStorage",),
    "port": ("StoragePort", "StorageSession"),
    "single_files": ("read_file",),
    "store": ("CheckpointStorage",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
