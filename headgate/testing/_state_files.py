# SPDX-License-Identifier: Apache-2.0

"""Where the operators of tests store states in files: real files, in one temporary folder for each process."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from functools import cache
from hashlib import sha256

from spark_bridge.common.endpoint import StateStorage
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.subtask.state_files import TaskFiles


@cache
def storage_of_tests() -> StateStorage:
    """The storage of this process. A checkpoint of one world may be restored in another, so it stays until the end."""
    folder = tempfile.mkdtemp(prefix="headgate-testing-")
    atexit.register(_remove, folder, os.getpid())
    return StateStorage(folder, None, 1, secrets.token_hex(8))


def _remove(folder: str, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked process that ends like a program comes here, too
        shutil.rmtree(folder, ignore_errors=True)


class FilesOfTests(TaskFiles):
    """The folder of a savepoint is only a name in a test. Its files are in the same temporary folder as all others."""

    def _savepoint(self, storage: StateStorage, url: str) -> StateFolder:
        return super()._savepoint(storage, f"{storage.url}/{sha256(url.encode()).hexdigest()}.state")
