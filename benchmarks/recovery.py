# SPDX-License-Identifier: Apache-2.0

"""``recovery``: milliseconds from the search for the newest checkpoint until the operator is restored from it.

Restored means that ``coordinate`` has returned. The file was found, read, verified and decoded, the coordinator's
``reset_to_checkpoint`` and ``start`` have been called, and each subtask's state is ready for its registration. The
storage is the real one, a directory; the file was read before, so neither side measures a disk. A subtask's state has
1 KiB.

The raw baseline reads the bytes of the same file and unpacks the msgpack values in it; it verifies nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path

import msgpack

from actors.coordination import OperatorCoordinator
from benchmarks.crowd import PretendedSpark
from benchmarks.harness import Figure, Progress, interleave_async
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import RestoreMode, SubtaskState
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.storage import CheckpointStorage

STATE_BYTES = 1024
PLAN = {1: (10, 10), 100: (10, 10), 10_000: (10, 2)}
"""For each number of subtasks, the number of rounds and of restores per round."""
QUICK_PLAN = {1: (2, 2), 100: (2, 2)}
HEAD_BYTES, DIGEST_BYTES = 20, 32
"""The bytes before and after the msgpack values in a checkpoint's file."""


class RestoredCoordinator(OperatorCoordinator):
    """Records the checkpoint that it was restored from."""

    def __init__(self) -> None:
        self.state: bytes | None = None

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.state = state


def recovery(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the search for the newest checkpoint to the restored operator."""
    with tempfile.TemporaryDirectory(prefix="headgate-recovery-") as folder:
        plan = QUICK_PLAN if quick else PLAN
        files = {subtasks: _store(folder, subtasks) for subtasks in plan}
        return asyncio.run(_measure(folder, files, plan, progress))


def _operator(subtasks: int) -> str:
    return f"restored-{subtasks}"


def _store(folder: str, subtasks: int) -> Path:
    """Write a checkpoint as another application would have left it; return its file."""
    storage = CheckpointStorage(folder)
    storage.prepare()
    (checkpoint_id,) = storage.reserve_ids(1)
    parts = {
        subtask: SubtaskSnapshot((SubtaskState(subtask, subtask.to_bytes(4) * (STATE_BYTES // 4)),))
        for subtask in range(subtasks)
    }
    checkpoint = CompletedCheckpoint(checkpoint_id, subtasks, b"c" * STATE_BYTES, parts)
    return Path(storage.store(_operator(subtasks), checkpoint))


async def _measure(
    folder: str, files: dict[int, Path], plan: dict[int, tuple[int, int]], progress: Progress
) -> list[Figure]:
    figures = []
    async with SidecarRuntime(PretendedSpark(), SidecarConfig(storage=folder)) as runtime:
        for subtasks, (rounds, count) in plan.items():
            progress(f"{subtasks} subtasks: {files[subtasks].stat().st_size} bytes")
            samples, baseline = await interleave_async(
                rounds,
                partial(_unpacked, files[subtasks], count),
                partial(_restored, runtime, subtasks, count),
                progress,
            )
            params = {"case": {"subtasks": subtasks}, "rounds": rounds, "restores": count, "state_bytes": STATE_BYTES}
            params |= {"file_bytes": files[subtasks].stat().st_size, "baseline": "the same file read and unpacked"}
            figures.append(Figure("recovery", "ms", samples, baseline, params))
    return figures


async def _restored(runtime: SidecarRuntime, subtasks: int, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        coordinator = RestoredCoordinator()
        began = time.perf_counter()
        await runtime.coordinate(
            _operator(subtasks), coordinator, parallelism=subtasks, mode=RestoreMode.STREAMING, restore="latest"
        )
        samples.append((time.perf_counter() - began) * 1e3)
        assert coordinator.state == b"c" * STATE_BYTES
        await runtime.release(_operator(subtasks))
    return samples


async def _unpacked(file: Path, count: int) -> list[float]:
    return [_unpack(file) for _ in range(count)]


def _unpack(file: Path) -> float:
    """Milliseconds to read and unpack it."""
    began = time.perf_counter()
    data = file.read_bytes()
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(memoryview(data)[HEAD_BYTES:-DIGEST_BYTES])
    values = list(unpacker)
    took_ms = (time.perf_counter() - began) * 1e3
    assert b"c" * STATE_BYTES in values
    return took_ms
