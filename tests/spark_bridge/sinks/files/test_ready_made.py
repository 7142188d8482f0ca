# SPDX-License-Identifier: Apache-2.0

"""``FileSink`` with its operator and its coordinator, without Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headgate.testing import running_operator
from protocol.wire.messages import RestoreMode
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkWriterContext
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from tests.spark_bridge.sinks.files.kit import TaskContext, a_driver, as_context, rows_of, staged, visible


def opened(operator: TwoPhaseSinkOperator, state: bytes | None = None, **fields: Any) -> TaskContext:
    context = TaskContext(**fields)
    operator.open(as_context(context), state)
    return context


async def test_what_no_checkpoint_covers_goes_with_its_attempt_and_nothing_else_is_left_at_the_end(
    tmp_path: Path,
) -> None:
    """H13, H18, H47, H57."""
    url = str(tmp_path / "out")
    sink = FileSink(url)
    async with running_operator(TwoPhaseSinkCoordinator(sink), parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, lambda: TwoPhaseSinkOperator(sink))
        task.feed("a", "b")
        await world.settle()
        await world.checkpoint()
        task.feed("lost")
        await world.settle()
        sink.writer(SinkWriterContext("operator", 0, 0, 1)).write("by a process that was killed")
        await world.kill(task)
        assert staged(url) == []
        sink.writer(SinkWriterContext("operator", 0, 0)).write("a part that no list will name")
        task = await world.retry(task, ["a", "b", "c"])
        assert task.outcome == "success"
    assert (rows_of(visible(url)), staged(url)) == (["a", "b", "c"], [])


async def test_a_sink_without_rows_leaves_an_empty_directory(tmp_path: Path) -> None:
    async with running_operator(TwoPhaseSinkCoordinator(FileSink(str(tmp_path))), parallelism=1, mode="streaming"):
        pass
    assert os.listdir(tmp_path) == []


def test_rows_that_were_not_sealed_go_with_their_operator(tmp_path: Path) -> None:
    operator = TwoPhaseSinkOperator(FileSink(str(tmp_path)))
    opened(operator)
    operator.write("a")
    operator.close()
    assert staged(str(tmp_path)) == []


async def test_batch_mode_fails_the_start(tmp_path: Path) -> None:
    """H6."""
    with pytest.raises(SinkMisused, match=r'batch mode.*mode="streaming"'):
        await TwoPhaseSinkCoordinator(FileSink(str(tmp_path))).start(a_driver(mode=RestoreMode.BATCH))


async def test_an_event_that_is_not_a_list_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    """H7: it may be the list of a writer with another name, whose rows would never appear."""
    coordinator = TwoPhaseSinkCoordinator(FileSink(str(tmp_path / "out")))
    await coordinator.start(a_driver())
    with pytest.raises(SinkMisused, match="same name"):
        await coordinator.handle_event_from_operator(0, 0, ["headgate/sealed-files", "other", "x", []])


def test_a_sink_counts_records_unless_it_has_another_position(tmp_path: Path) -> None:  # H174
    class OwnPosition(TwoPhaseSinkOperator):
        def snapshot_position(self) -> bytes:
            return b"my own"

    assert TwoPhaseSinkOperator(FileSink(str(tmp_path))).counts_records
    assert not OwnPosition(FileSink(str(tmp_path))).counts_records
    with pytest.raises(TypeError, match="merge_states"):
        OwnPosition(FileSink(str(tmp_path))).merge_states({0: b"a", 1: b"b"})


def test_a_position_counts_the_records_of_one_input_only(tmp_path: Path) -> None:  # H174
    """A checkpoint of an earlier input never makes a record be skipped, whatever its parallelism."""
    operator = TwoPhaseSinkOperator(FileSink(str(tmp_path)))
    opened(operator)
    operator.process(iter(["a", "b"]))
    state = operator.snapshot_state(1)
    again, after = TwoPhaseSinkOperator(FileSink(str(tmp_path))), TwoPhaseSinkOperator(FileSink(str(tmp_path)))
    opened(again, state)
    opened(after, state, parallelism=3, input_begins_again=False)
    assert (again.records_written, after.records_written) == (2, 0)


def test_a_position_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    operator = TwoPhaseSinkOperator(FileSink(str(tmp_path)))
    opened(operator, b'{"records": 2, "parallelism": 2, "batch": 4}')
    assert operator.records_written == 2


def test_an_operator_that_could_not_open_can_be_closed(tmp_path: Path) -> None:
    TwoPhaseSinkOperator(FileSink(str(tmp_path))).close()
