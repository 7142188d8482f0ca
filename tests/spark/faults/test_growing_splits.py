# SPDX-License-Identifier: Apache-2.0

"""Splits that are found while others are read, with output lost within an action and between two actions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.coordination import SubtaskGateway
from protocol.facts import ExecutorLost, TaskEnded, TaskOutcome
from tests.spark.faults.bench import Bench
from tests.spark.faults.executors import kill_the_executor
from tests.spark.faults.file_gates import open_gates, wait_for_files
from tests.spark.growing import NODES, TreeReader, TreeSource
from tests.spark.recorder import Recorder

pytestmark = pytest.mark.spark

SUBTASKS = 4  # one for each slot: two hosts with two cores each
ALL = range(SUBTASKS)


class NotingTree(TreeSource):
    """Records which task each attempt is, and what each attempt has read, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Recorder()
        self.tasks: dict[tuple[int, int], int] = {}

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.tasks[subtask, gateway.attempt.attempt] = gateway.attempt.task_attempt_id
        await super().subtask_ready(subtask, gateway)
        await self.notes.subtask_ready(subtask, gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if isinstance(event[0], int):
            self.notes.record("read", subtask, attempt, event[0])
        await super().handle_event_from_operator(subtask, attempt, event)

    def read_by(self, subtask: int, attempt: int) -> list[int]:
        return [node for _, *life, node in self.notes.named("read") if life == [subtask, attempt]]

    def wait_until_all_is_read(self) -> None:
        """Also waits until every subtask is registered."""
        wanted = {("ready", subtask, 0) for subtask in ALL}
        self.notes.wait_for(
            lambda story: (
                len({entry[3] for entry in story if entry[0] == "read"}) == NODES
                and wanted <= {*self.notes.named("ready")}
            )
        )


class GatedTreeReader(TreeReader):
    """Waits at its end until its subtask's gate is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self, records: Iterator[Any]) -> Iterator[int]:
        yield from super().process(records)
        wait_for_files(self._folder, f"open-{self.context.subtask}", 1)


def test_a_success_is_revoked_while_the_splits_of_others_are_still_found(bench: Bench, tmp_path: Path) -> None:
    """H56, H68: the successful subtask reads the same nodes again; the next two actions begin at the root."""
    source = NotingTree()
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(source, SUBTASKS) as handle:
        read = bench.numbers(SUBTASKS).through(handle, GatedTreeReader, tmp_path)
        action = bench.start_collecting(read.shuffled(2, lambda node: node))
        source.wait_until_all_is_read()
        first = {subtask: heard.start_of(source.tasks[subtask, 0]) for subtask in ALL}
        open_gates(tmp_path, [0])
        assert heard.end_of(first[0].task_attempt_id).outcome is TaskOutcome.SUCCESS
        kill_the_executor(bench, first[0].host)
        heard.wait_for(TaskEnded, lambda fact: fact.outcome is TaskOutcome.RESUBMITTED)
        open_gates(tmp_path, ALL)
        assert sorted(action.result()) == list(range(NODES))
        assert source.read_by(0, 1) == source.read_by(0, 0)
        assert len(source.built) == 1
        for actions in (2, 3):
            assert sorted(read.collect()) == list(range(NODES))
            assert len(source.built) == actions
    bench.wait_for_executors()


@pytest.mark.parametrize("kept_in", ["the cache", "shuffle files"])
def test_output_that_is_lost_between_two_actions_is_read_again_as_it_was(
    bench: Bench, tmp_path: Path, kept_in: str
) -> None:
    """H56, H68: the enumeration goes on in that run; another RDD begins a new one."""
    source = NotingTree()
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(source, SUBTASKS) as handle:
        rows = bench.numbers(SUBTASKS).through(handle, GatedTreeReader, tmp_path)
        kept = rows.cached() if kept_in == "the cache" else rows.shuffled(2, lambda node: node)
        action = bench.start_collecting(kept)
        source.wait_until_all_is_read()
        open_gates(tmp_path, ALL)
        assert sorted(action.result()) == list(range(NODES))
        hosts = [heard.start_of(source.tasks[subtask, 0]).host for subtask in ALL]
        kill_the_executor(bench, hosts[0])
        heard.wait_for(ExecutorLost)
        assert sorted(kept.collect()) == list(range(NODES))
        again = [life for life in source.tasks if life[1] > 0]
        assert len(again) == 2, "only the lost half ran again"
        assert [source.read_by(*life) for life in again] == [source.read_by(life[0], 0) for life in again]
        assert len(source.built) == 1

        other = bench.numbers(SUBTASKS).through(handle, GatedTreeReader, tmp_path)
        assert sorted(other.collect()) == list(range(NODES))
        assert len(source.built) == 2
        kept.uncache()
    bench.wait_for_executors()
