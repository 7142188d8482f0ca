# SPDX-License-Identifier: Apache-2.0

"""A process that stores states in files until it is killed: ``python -m tests.spark_bridge.storage.state_uploader``.

Its arguments are the folders of the storage and of the task, and a number that makes its names different. It prints a
line for each piece, and "stored HANDLE" after each state.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from protocol.wire.state_handles import pack_handle
from spark_bridge.storage.files import Files
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import StateFiles


def main() -> None:
    storage, task, attempt = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    r = random.Random(attempt)
    state = task / "state"
    state.mkdir(parents=True)
    folder = StateFolder.of_operator(Files(storage), "words")
    uploader = StateUploader(folder, task / "private", epoch=1, token="ab", subtask=0, task_attempt_id=attempt)
    for checkpoint_id in itertools.count(1):
        for number in range(4):
            (state / f"{checkpoint_id}-{number}.sst").write_bytes(r.randbytes(3_000_000))
        (state / "CURRENT").write_bytes(r.randbytes(100))
        snapshot = uploader.freeze(StateFiles(state), checkpoint_id)
        handle = uploader.upload(snapshot, progress=lambda done, total: print("piece", done, total, flush=True))
        print("stored", pack_handle(handle).hex(), flush=True)


if __name__ == "__main__":
    main()
