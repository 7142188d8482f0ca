# SPDX-License-Identifier: Apache-2.0

"""A ``TwoPhaseSink`` in a ``SinkModel``: real halves on a real target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.logs import get_logger
from headgate.testing._sink_model import Checkpoint, ModelAttempt, Row, SinkModel
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.wire.codec import decode_event, encode_event
from spark_bridge.sinks.two_phase.driver import SinkCommits
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseSink, TwoPhaseWriter
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from spark_bridge.subtask.context import SubtaskContext


class SinkTarget:
    """A target that a sink is tested with: what the test supplies. The server behind it should be a real one.

    The suite calls ``clear`` before each history, and ``read`` many times, so both should be fast.
    """

    def sink(self, name: str) -> TwoPhaseSink[Any]:
        """Return the sink under test, with this name, for a new application. It writes to the same target each time."""
        raise NotImplementedError

    def record(self, subtask: int, number: int) -> Any:
        """Return the record to write for a row."""
        return {"subtask": subtask, "number": number}

    def read(self) -> Sequence[Row]:
        """Return the rows, each a subtask and a number, that a reader of the target sees now, doubled ones included."""
        raise NotImplementedError

    def clear(self) -> None:
        """Empty the target: no rows, and nothing prepared."""
        raise NotImplementedError

    def other(self, kind: str = "") -> SinkTarget:
        """Return another, empty target at the same place, such as another table of the same database.

        ``kind``: one of ``types``, of which the numbers of its rows are then. Empty for numbers as in this target.
        """
        raise NotImplementedError

    def types(self) -> Mapping[str, Sequence[Any]]:
        """Return the types that a column can have, by name, each with values that it keeps, such as the largest.

        The suite tries many other values with each: a sink keeps a value as it was, or refuses it while it is written.
        """
        return {}

    def schema_changes(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return what may happen to the schema after rows were prepared, by name: the change, and what undoes it.

        A sink goes on with every row, or refuses with ``ValueError`` or a ``HeadgateError`` until it is undone.
        """
        return {}

    def kill(self, writer: TwoPhaseWriter[Any]) -> None:
        """The writer's process has died: close its connections, as the kernel would, and do nothing else."""

    def leftovers(self, name: str) -> list[str]:
        """What is prepared for the sink of this name, and neither committed nor destroyed."""
        committer = self.sink(name).committer(SinkCommitterContext(name, name, get_logger("headgate.testing")))
        committer.open()
        try:
            return list(committer.prepared())
        finally:
            committer.close()


class _TaskContext(SubtaskContext[Any]):
    """The part of a context that the operator uses, without a task; keeps what is sent."""

    def __init__(self, operator_id: str, subtask: int, attempt: int, checkpoint_id: int, parallelism: int) -> None:
        self.operator_id = operator_id
        self.subtask, self.attempt = subtask, attempt
        self.checkpoint_id = checkpoint_id
        self.parallelism = parallelism
        self._input_begins_again = True
        self.sent: list[bytes] = []

    def send_event(self, event: Any) -> None:
        self.sent.append(encode_event(event))


class Attempt(ModelAttempt):
    """One attempt of a subtask, with its operator."""

    def __init__(self, world: SinkWorld, subtask: int, number: int, restored: Checkpoint) -> None:
        part = restored.parts[subtask]
        super().__init__(subtask, number, part)
        self.context = _TaskContext(world.name, subtask, number, restored.checkpoint_id, len(world.subtasks))
        self._world = world
        self.operator = TwoPhaseSinkOperator(world.target.sink(world.name))
        self._world.in_task(self, self.operator.open, self.context, part.state)

    @property
    def position(self) -> int:
        return self.operator.records_written

    def write(self, record: Any) -> None:
        self._world.in_task(self, self.operator.write, record)

    def prepare(self, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT) -> bytes:
        self.context.sent.clear()
        state: bytes = self._world.in_task(self, self.operator.snapshot_state, checkpoint_id)
        self.channel.extend(self.context.sent)
        self._world.prepared_at.add((self.subtask, self.position))
        return state

    def final_state(self) -> bytes:
        return self.operator.snapshot_position()


def call(who: object, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``; the default of ``SinkWorld.in_task`` and ``in_driver``."""
    return function(*args)


class SinkWorld(SinkModel[Attempt, SinkCommits]):
    """Consecutive applications with one ``TwoPhaseSink`` on one target.

    ``in_task(attempt, function, *args)`` calls an operator, and ``in_driver(world, function, *args)`` a committer: the
    places for faults.
    """

    def __init__(
        self, target: SinkTarget, *, name: str = "sink", subtasks: Sequence[int] = (0, 1), rows: int = 6
    ) -> None:
        super().__init__(subtasks, rows, name)
        self.target = target
        self.prepared_at = {(subtask, 0) for subtask in self.subtasks}
        """The positions at which subtasks have prepared."""
        self.in_task: Callable[..., Any] = call
        self.in_driver: Callable[..., Any] = call
        self.atomic = target.sink(name).atomic
        self.retry_delays_s: tuple[float, ...] = (0.0, 0.0)

    def new_commits(self) -> SinkCommits:
        return SinkCommits(
            self.target.sink(self.name),
            retry_delays_s=self.retry_delays_s,
            run_blocking=lambda function, *args: self.in_driver(self, function, *args),
        )

    def new_attempt(self, subtask: int, number: int) -> Attempt:
        return Attempt(self, subtask, number, self.completed)

    def write_row(self, attempt: Attempt) -> None:
        attempt.write(self.target.record(attempt.subtask, attempt.position))

    async def receive(self, attempt: Attempt, event: Any) -> None:
        prepared = decode_event(event)
        assert await self.commits.prepared(attempt.subtask, attempt.number, prepared), prepared

    def kill(self, attempt: Attempt) -> None:
        if attempt.operator.writer is not None:
            self.target.kill(attempt.operator.writer)

    async def end(self) -> None:
        await super().end()
        for attempts in self.attempts.values():
            for attempt in attempts:
                attempt.operator.close()

    # --- what must hold -----------------------------------------------------------------------------------

    @property
    def all_rows(self) -> list[Row]:
        """Every row that the application writes in its life."""
        return [(subtask, number) for subtask in self.subtasks for number in range(self.rows)]

    def own(self, rows: Sequence[Row]) -> list[Row]:
        """Those of ``rows`` that this application writes."""
        return sorted(row for row in rows if row[0] in self.subtasks)

    def check(self) -> None:
        """No row is visible twice or too early, and no half of a checkpoint is."""
        rows = self.own(self.target.read())
        assert len(set(rows)) == len(rows), f"rows are doubled: {rows}"
        durable = self._newest()
        covered = (self.completed if durable is None else durable.checkpoint()).rows
        early = set(rows) - covered
        assert not early, f"rows are visible that no complete checkpoint covers: {sorted(early)}"
        if self.atomic:
            wholes = [*self.covered, *(one.checkpoint().rows for one in self._unanswered() if one.there)]
            assert set(rows) in wholes, (
                f"half a checkpoint is visible: {rows}, and whole are {list(map(sorted, wholes))}"
            )

    def check_end(self) -> None:
        """Every row is visible once, and nothing else is left."""
        rows = self.own(self.target.read())
        lost, doubled = set(self.all_rows) - set(rows), len(rows) - len(set(rows))
        assert not lost, f"rows are lost: {sorted(lost)}"
        assert not doubled, f"rows are doubled: {rows}"
        assert rows == self.all_rows, f"there are other rows: {rows}"
        leftovers = self.target.leftovers(self.name)
        assert leftovers == [], f"orphans are left: {leftovers}"
