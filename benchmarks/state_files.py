# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.state_files [MIB [SUBTASKS]]``: what states in files cost; two subtasks with 256 MiB each.

Each subtask is a process, as on an executor. Its state is a hundred files that are declared immutable. Printed are, for
each subtask: how fast it counts during its first upload, relative to before; what of the state a second checkpoint
uploads after one file has changed; how many bytes the driver gets; and the seconds that a restore takes, from the
storage and from the folder of the attempt before. The storage is a local directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from protocol.wire.state_handles import StateHandle, pack_handle
from spark_bridge.storage.files import Files
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.restoring import restore
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import StateFiles
from spark_bridge.subtask.uploads import give_way

SUBTASKS = 2
FILES = 100
STEPS = 2_000  # between two looks at the clock


class Figures(NamedTuple):
    """Of one subtask. Shares are of one, times are seconds."""

    throughput_share: float
    uploaded_share: float
    handle_bytes: int
    upload_s: float
    restore_s: float
    local_restore_s: float


def measure(root: str, subtask: int, mib: float, before_s: float) -> Figures:
    """The figures of one subtask. ``before_s``: for how long it counts without an upload."""
    place = Path(root, f"subtask-{subtask}")
    state = place / "state"
    state.mkdir(parents=True)
    file_bytes = int(mib * 2**20) // FILES
    for number in range(FILES):
        (state / f"{number}.sst").write_bytes(os.urandom(file_bytes))
    os.sync()  # or the first upload would wait for the writes of this
    folder = StateFolder.of_operator(Files(f"{root}/storage"), "words")
    uploader = StateUploader(folder, place / "private", epoch=1, token="ab", subtask=subtask, task_attempt_id=subtask)

    end = time.perf_counter() + before_s
    without = _count_while(lambda: time.perf_counter() < end)
    began = time.perf_counter()
    first, handles = uploader.freeze(StateFiles(state), 1), list[StateHandle]()

    def store() -> None:
        give_way()
        handles.append(uploader.upload(first))

    upload = threading.Thread(target=store)
    upload.start()
    during = _count_while(upload.is_alive)
    upload_s = time.perf_counter() - began
    uploader.completed(1)

    (state / "0.sst").unlink()
    (state / "new.sst").write_bytes(os.urandom(file_bytes))
    uploaded = uploader.uploaded_bytes
    handle = uploader.upload(uploader.freeze(StateFiles(state), 2))
    began = time.perf_counter()
    restore(folder, handle, place / "restored")
    restored = time.perf_counter()
    restore(folder, handle, place / "restored from here", local=state)
    return Figures(
        during / without,
        (uploader.uploaded_bytes - uploaded) / handle.total_bytes,
        len(pack_handle(handle)),
        upload_s,
        restored - began,
        time.perf_counter() - restored,
    )


def _count_while(goes_on: Callable[[], bool]) -> float:
    """Count words, as a task does; return how many a second."""
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    while goes_on():
        for number in range(STEPS):
            counts[f"word {number % 997}"] += 1
    return counts.total() / (time.perf_counter() - began)


def figures(mib: float, before_s: float = 5.0, subtasks: int = SUBTASKS) -> list[Figures]:
    """The figures of each subtask; all of them run concurrently."""
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(subtasks, mp_context=get_context("spawn")) as processes,
    ):
        waiting: list[Any] = [processes.submit(measure, root, k, mib, before_s) for k in range(subtasks)]
        return [one.result() for one in waiting]


def main() -> None:
    """Print the figures as a table."""
    mib = float(sys.argv[1]) if len(sys.argv) > 1 else 256.0
    subtasks = int(sys.argv[2]) if len(sys.argv) > 2 else SUBTASKS
    print(f"subtasks: {subtasks}, with {mib:g} MiB each; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    for subtask, one in enumerate(figures(mib, subtasks=subtasks)):
        print(
            f"subtask {subtask}: throughput during an upload {one.throughput_share:.2f} of without, second checkpoint "
            f"{one.uploaded_share:.2%} of the bytes, driver {one.handle_bytes} bytes, upload {one.upload_s:.2f} s, "
            f"restore {one.restore_s:.2f} s, from here {one.local_restore_s:.2f} s"
        )


if __name__ == "__main__":
    main()
