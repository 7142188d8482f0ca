# SPDX-License-Identifier: Apache-2.0

"""A paid service between source and sink of the soak test, and what its log says at the end.

``python -m tests.pipelines.real.paid PORT LOG``: the service. Each connection asks for one row, and each call is one
line of the log. Some calls fail, and some take long. It may be killed and started again.

The stage notes when a result has landed, and its coordinator when a checkpoint begins and what an attempt restores.
So it is known which results an attempt has restored: those that had landed before its checkpoint began, in the attempt
of then, or were restored by that. It pays for none of them again.

Some runs have a budget, of which each call takes 1. It is too small at first: when it is exhausted, no more calls may
have reached the service, and the user raises it. Some runs ask through a cache, in which two rows have the same
question. A question is asked by one attempt at a time, unless that is lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from headgate import Budget, Cache, OperatorCoordinator, Permits, Retry, SubtaskGateway, concurrently
from headgate.types import RecordContext

__all__ = ["BURST", "TASKS", "PaidCalls", "PaidParts", "batches_of", "rows_of"]

TASKS = 2
BURST = 20
BEGIN, END = "<", ">"
"""Around the values of a note."""
IN_FLIGHT = 16
TOTAL_RAISED = 100_000
SLACK_S = 1.0
"""How much later than its permit a call may reach the service on a loaded machine, at most."""
STEADY_CALLS = 50
"""How many calls without a fault say how much of the limit is used."""


def note(file: Path, *values: object) -> None:
    """Append a line. A process that is killed may leave a part of it: Linux ends a write between two pages."""
    descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(descriptor, (" ".join(map(str, (BEGIN, *values, END))) + "\n").encode())
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

    async def subtask_failed(self, subtask: int, attempt: int, reason: object) -> None:
        self._note("lost", subtask, attempt)


class PaidParts(NamedTuple):
    """What the calls need: permits, and in some runs a budget and a cache."""

    permits: Permits
    budget: Budget | None
    cache: Cache | None

    def used(self) -> list[Permits | Budget | Cache]:
        return [part for part in self if part is not None]


@dataclass(frozen=True)
class PaidCalls:
    """The stage of one run, in one folder.

    ``per_s``: the limit. ``total``: of the budget, at first; 0: there is none.
    """

    folder: str
    port: int
    ordered: bool
    per_s: int = 100
    total: int = 0
    cached: bool = False

    def stage(self, parts: PaidParts) -> tuple[Any, Any]:
        call = concurrently(
            partial(paid, self, parts),
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
        lines = file.read_text().splitlines() if file.exists() else []
        return [words[:-1] for line in lines if (words := line.rpartition(BEGIN)[2].split())[-1:] == [END]]

    @property
    def total_now(self) -> int:
        """The total of the budget, after the user has raised it perhaps."""
        return TOTAL_RAISED if self.notes("raised") else self.total

    def raise_total(self) -> None:
        note(self.file("raised"), time.time())

    def used(self, since: float) -> float | None:
        """How much of the limit was used at least after ``since``, when no fault came any more; None: unknown."""
        since = max([since, *(float(at) for at, _, kind, *_ in self.notes("cuts") if kind in ("ready", "lost"))])
        times = [at for at in sorted(float(at) for *_, at in self.notes("calls")) if at > since]
        if len(times) < STEADY_CALLS:
            return None
        return len(times) / (BURST + self.per_s * (times[-1] - times[0]))

    def wrong(self) -> Counter[str]:
        """What the notes say against the promises."""
        times = sorted(float(at) for *_, at in self.notes("calls"))
        return Counter(
            {
                "paid twice": self._paid_twice(),
                "over the limit": self._over_the_limit(times),
                "over the budget": self._over_the_budget(times),
                "asked twice": self._asked_twice(),
            }
        )

    def _paid_twice(self) -> int:
        """How many calls asked for a result that their attempt had restored."""
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
        twice = 0
        for row, of, when in calls:
            restored = [rows for since, one, rows in attempts if one == of and since <= when]
            twice += bool(restored) and row in restored[-1]
        return twice

    def _over_the_limit(self, times: list[float]) -> int:
        """How many windows had more calls than permits."""
        windows = ((begin, window_s) for begin in times for window_s in (0.5, 2.0))
        return sum(
            bisect_right(times, begin + window_s) - bisect_left(times, begin)
            > BURST + self.per_s * (window_s + SLACK_S)
            for begin, window_s in windows
        )

    def _over_the_budget(self, times: list[float]) -> int:
        """How many calls were made beyond the budget, until the user raised it."""
        if not self.total:
            return 0
        raised = min((float(at) for (at,) in self.notes("raised")), default=inf)
        return max(0, sum(at <= raised for at in times) - self.total)

    def _asked_twice(self) -> int:
        """How often a question was asked while an attempt that lived on had begun to ask it, and had no answer yet."""
        asking: dict[str, tuple[list[str], float]] = {}
        lost, drivers = self._losses()
        twice = 0
        for question, subtask, attempt, kind, at in sorted(self.notes("asked"), key=lambda one: float(one[-1])):
            whose, now = [subtask, attempt], float(at)
            if kind == "begins":
                earlier, since = asking.get(question, (whose, 0.0))
                ends = [when for of, when in lost if of == earlier] + drivers
                was_lost = any(since <= when <= now + SLACK_S for when in ends)
                twice += earlier != whose and not was_lost
                asking[question] = whose, now
            elif asking.get(question, ([], 0.0))[0] == whose:
                del asking[question]
        return twice

    def _losses(self) -> tuple[list[tuple[list[str], float]], list[float]]:
        """When each attempt was lost, and when other coordinators began."""
        notes = self.notes("cuts")
        lost = [(values, float(at)) for at, _, kind, *values in notes if kind == "lost"]
        begins: dict[str, float] = {}
        for at, process, *_ in notes:
            begins.setdefault(process, float(at))
        return lost, list(begins.values())[1:]


async def paid(calls: PaidCalls, parts: PaidParts, context: RecordContext, row: int) -> int:
    """Ask the service about a row."""
    whose = f"{context.subtask} {context.attempt}"
    if parts.cache is None:
        await ask(calls, parts, row, whose)
    else:
        question = row // 2
        await parts.cache.get_async(question, partial(ask_once, calls, parts, row, whose))
    note(calls.file("landed"), row, whose, time.time())
    return row


async def ask_once(calls: PaidCalls, parts: PaidParts, row: int, whose: str) -> int:
    """Ask a question for the cache, and note from when to when; an attempt that is lost notes no end."""
    question = row // 2
    note(calls.file("asked"), question, whose, "begins", time.time())
    try:
        await ask(calls, parts, row, whose)
    finally:
        note(calls.file("asked"), question, whose, "ends", time.time())
    return question


async def ask(calls: PaidCalls, parts: PaidParts, row: int, whose: str) -> None:
    """One call, for which a budget has 1 less."""
    async with nullcontext() if parts.budget is None else parts.budget.reserve(1) as spent, parts.permits:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", calls.port)
        except ConnectionError:
            if spent is not None:
                spent.refund()  # the service did not even answer
            raise
        try:
            writer.write(f"{row} {whose}\n".encode())
            answer = (await reader.readline()).split()
        finally:
            writer.close()
    if not answer:
        raise ConnectionError("the service is gone")
    if answer[0] != b"200":
        raise ServiceError(int(answer[0]))


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
