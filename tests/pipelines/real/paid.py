# SPDX-License-Identifier: Apache-2.0

"""A paid service between source and sink of the soak test, and what its log says at the end.

``python -m tests.pipelines.real.paid PORT LOG``: the service. Each connection asks for one row, and each call is one
line of the log. Some calls fail, and some take long. It may be killed and started again.

The stage notes when a result has landed, and its coordinator when a checkpoint begins and what an attempt restores.
So it is known which results an attempt has restored: those that had landed before its checkpoint began, in the attempt
of then, or were restored by that. It pays for none of them again.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow

from headgate import OperatorCoordinator, Permits, Retry, SubtaskGateway, concurrently
from headgate.types import RecordContext

__all__ = ["BURST", "PER_S", "TASKS", "PaidCalls", "batches_of", "rows_of"]

TASKS = 2
PER_S, BURST = 100, 20
IN_FLIGHT = 16
SLACK_S = 1.0
"""How much later than its permit a call may reach the service on a loaded machine, at most."""


def note(file: Path, *values: object) -> None:
    """Append a line, in one write, so that processes that are killed leave whole lines."""
    descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(descriptor, (" ".join(map(str, values)) + "\n").encode())
    finally:
        os.close(descriptor)


class ServiceError(Exception):
    """The service has answered with a status of HTTP."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class PaidCoordinator(OperatorCoordinator):
    """Notes when checkpoints begin, what is restored, and which attempts begin after that."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _note(self, *values: object) -> None:
        note(self._file, time.time(), os.getpid(), *values)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._note("begins", checkpoint_id)
        return b""

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        for subtask in range(TASKS):
            self._note("reset", subtask, checkpoint_id)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._note("reset", subtask, checkpoint_id)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self._note("ready", subtask, gateway.attempt.attempt)


@dataclass(frozen=True)
class PaidCalls:
    """The stage of one run, in one folder."""

    folder: str
    port: int
    ordered: bool

    def stage(self, permits: Permits) -> tuple[Any, Any]:
        call = concurrently(
            partial(paid, self, permits),
            limit=IN_FLIGHT,
            ordered=self.ordered,
            timeout_s=5.0,
            retry=Retry(tries=200, pause_s=0.05, pause_s_max=0.5),
        )
        return partial(PaidCoordinator, self.file("cuts")), call

    def file(self, name: str) -> Path:
        return Path(self.folder, name)

    def notes(self, name: str) -> list[list[str]]:
        file = self.file(name)
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def wrong(self) -> Counter[str]:
        """What the notes say against the promise."""
        wrong: Counter[str] = Counter()
        landed, calls = (
            [(int(row), (int(subtask), int(attempt)), float(at)) for row, subtask, attempt, at in self.notes(name)]
            for name in ("landed", "calls")
        )
        held: dict[tuple[int, int], set[int]] = {}  # by checkpoint and subtask: the rows with a result in it
        base: dict[tuple[str, int], set[int]] = {}  # by process and subtask: those of what was restored last
        live: dict[tuple[str, int], tuple[int, float]] = {}  # the attempt that is ready, and since when
        attempts: list[tuple[float, tuple[int, int], set[int]]] = []  # each one, and what it has restored
        for at, process, kind, *values in self.notes("cuts"):
            match kind, *map(int, values):
                case "begins", int(checkpoint_id):
                    for subtask in range(TASKS):
                        attempt, since = live.get((process, subtask), (-1, 0.0))
                        now = {row for row, of, when in landed if of == (subtask, attempt) and since < when < float(at)}
                        held[checkpoint_id, subtask] = base.get((process, subtask), set()) | now
                case "reset", int(subtask), int(checkpoint_id):
                    base[process, subtask] = held.get((checkpoint_id, subtask), set())
                    live.pop((process, subtask), None)
                case "ready", int(subtask), int(attempt):
                    live[process, subtask] = attempt, float(at)
                    attempts.append((float(at), (subtask, attempt), base.get((process, subtask), set())))
        for row, of, when in calls:
            restored = [rows for since, one, rows in attempts if one == of and since <= when]
            wrong["paid twice"] += bool(restored) and row in restored[-1]
        times = sorted(at for _, _, at in calls)
        for first, begin in enumerate(times):
            for window_s in (0.5, 2.0):
                many = sum(1 for at in times[first : first + 2 * PER_S * 4] if at <= begin + window_s)
                wrong["over the limit"] += many > BURST + PER_S * (window_s + SLACK_S)
        return wrong


async def paid(calls: PaidCalls, permits: Permits, context: RecordContext, row: int) -> int:
    """Ask the service about a row."""
    whose = f"{context.subtask} {context.attempt}"
    async with permits:
        reader, writer = await asyncio.open_connection("127.0.0.1", calls.port)
        try:
            writer.write(f"{row} {whose}\n".encode())
            answer = (await reader.readline()).split()
        finally:
            writer.close()
    if not answer:
        raise ConnectionError("the service is gone")
    if answer[0] != b"200":
        raise ServiceError(int(answer[0]))
    note(calls.file("landed"), row, whose, time.time())
    return int(answer[1])


def rows_of(batches: Iterator[Any]) -> Iterator[int]:
    """A plain function between the source and the paid stage: a barrier is met upstream of it."""
    for batch in batches:
        yield from batch["id"].to_pylist()


def batches_of(rows: Iterator[int]) -> Iterator[pyarrow.RecordBatch]:
    for row in rows:
        yield pyarrow.RecordBatch.from_pydict({"id": [row], "name": [f"row {row}"]})


async def serve(port: int, log: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = (await reader.readline()).decode().strip()
            note(log, asked, time.time())
            chance = random.random()
            await asyncio.sleep(0.5 if chance > 0.97 else 0.02 * chance)
            writer.write(f"{503 if chance < 0.05 else 200} {asked.split()[0]}\n".encode())
            await writer.drain()
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
