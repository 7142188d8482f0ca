# SPDX-License-Identifier: Apache-2.0

"""Durable checkpoints: files in a directory or behind a URL, and how the event loop uses them (H4, H50 to H52).

Needs neither Spark nor a JVM.
"""

from spark_bridge.storage.errors import CheckpointUnreadable, StorageError, StorageFenced
from spark_bridge.storage.interface import RESTORE, CheckpointFile, CheckpointInfo, Restore, Storage, WriteOptions
from spark_bridge.storage.memory import MemoryStorage
from spark_bridge.storage.port import StoragePort, StorageSession
from spark_bridge.storage.single_files import read_file
from spark_bridge.storage.store import CheckpointStorage

__all__ = [
    "RESTORE",
    "CheckpointFile",
    "CheckpointInfo",
    "CheckpointStorage",
    "CheckpointUnreadable",
    "MemoryStorage",
    "Restore",
    "Storage",
    "StorageError",
    "StorageFenced",
    "StoragePort",
    "StorageSession",
    "WriteOptions",
    "read_file",
]
