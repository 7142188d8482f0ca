# SPDX-License-Identifier: Apache-2.0

"""``FileSinkOperator`` and ``FileSinkCoordinator``, together and without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.attempts import FailureKind, FailureReason
from protocol.wire.messages import RestoreMode
from spark_bridge.sink.coordinator import FileSinkCoordinator
from spark_bridge.sink.errors import SinkMisused
from spark_bridge.sink.operator import FileSinkOperator
from tests.spark_bridge.sink.kit import TaskContext, a_driver, as_context, rows_of, staged, visible


class Json(FileSinkOperator):
    """Records that are not lines."""

    def encode(self, record: Any) -> bytes | str:
        return json.dumps(record)


def opened(operator: FileSinkOperator, state: bytes | None = None, **fields: Any) -> TaskContext:
    context = TaskContext(**fields)
    operator.open(as_context(context), state)
    return context


def until(operator: FileSinkOperator, records: Iterable[Any], count: int) -> None:
    """Let it take ``count`` records and request one more."""

    class Enough(Exception):
        pass

    def given() -> Iterator[Any]:
        for number, record in enumerate(records):
            if number == count:
                raise Enough
            yield record
        raise Enough

    with pytest.raises(Enough):
        operator.process(given())


async def test_lines_appear_checkpoint_by_checkpoint_and_the_rest_with_the_final_one(tmp_path: Path) -> None:
    """H40, H47: a coordinator without other duties, and an operator that writes the records it is given."""
    url = str(tmp_path / "out")
    coordinator, operator = FileSinkCoordinator(url), FileSinkOperator(url, suffix=".txt")
    await coordinator.start(a_driver())
    context = opened(operator)

    until(operator, ["a", b"b", "c"], 2)
    await coordinator.checkpoint_coordinator(1)
    operator.snapshot_state(1)
    await coordinator.handle_event_from_operator(0, 0, context.sent.pop())
    assert visible(url) == {}
    await coordinator.notify_checkpoint_complete(1)
    assert rows_of(visible(url)) == ["a", "b"]

    operator.process(iter(["x", "x", "c"]))  # the first two were written before
    operator.final_state()
    await coordinator.handle_event_from_operator(0, 0, context.sent.pop())
    operator.close()
    await coordinator.run_ended(0, True, "")
    await coordinator.checkpoint_coordinator(2)
    await coordinator.notify_checkpoint_complete(2)
    await coordinator.close()
    assert rows_of(visible(url)) == ["a", "b", "c"]
    assert staged(url) == []


async def test_a_retried_attempt_goes_on_behind_what_the_checkpoint_covers(tmp_path: Path) -> None:
    """H10, H18: the rows that the dead attempt wrote after it are deleted, and its successor writes them again."""
    url = str(tmp_path / "out")
    coordinator, operator = FileSinkCoordinator(url), FileSinkOperator(url)
    await coordinator.start(a_driver())
    context = opened(operator)
    until(operator, "abcd", 2)
    state = operator.snapshot_state(1)
    await coordinator.handle_event_from_operator(0, 0, context.sent.pop())
    await coordinator.notify_checkpoint_complete(1)
    operator.write("lost")
    await coordinator.subtask_failed(0, 0, FailureReason(FailureKind.FAILED, "died"))
    await coordinator.subtask_reset(0, 1)
    assert staged(url) == []

    successor = FileSinkOperator(url)
    context = opened(successor, state, attempt=1, checkpoint_id=1)
    until(successor, "abcd", 1)
    assert successor.snapshot_state(2) == state  # still skipping the rows that were written before
    successor.process(iter("abcd"))
    successor.snapshot_state(3)
    await coordinator.handle_event_from_operator(0, 1, context.sent.pop())
    await coordinator.notify_checkpoint_complete(3)
    assert rows_of(visible(url)) == ["a", "b", "c", "d"]


async def test_a_new_coordinator_goes_on_from_the_state_of_the_old_one(tmp_path: Path) -> None:
    """H52: it is reset before its start."""
    url = str(tmp_path / "out")
    old, operator = FileSinkCoordinator(url, name="mine"), Json(url, name="mine")
    await old.start(a_driver())
    context = opened(operator)
    operator.process(iter([{"a": 1}]))
    operator.snapshot_state(1)
    await old.handle_event_from_operator(0, 0, context.sent.pop())
    state = await old.checkpoint_coordinator(2)

    new = FileSinkCoordinator(url, name="mine")
    await new.reset_to_checkpoint(2, state)
    await new.start(a_driver())
    assert rows_of(visible(url)) == ['{"a": 1}']


async def test_batch_mode_fails_the_start(tmp_path: Path) -> None:
    """H6."""
    with pytest.raises(SinkMisused, match="STREAMING"):
        await FileSinkCoordinator(str(tmp_path)).start(a_driver(mode=RestoreMode.BATCH))


async def test_an_event_that_is_no_list_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    """H7: it may be the list of a writer with another name, whose rows would never appear."""
    coordinator = FileSinkCoordinator(str(tmp_path / "out"))
    await coordinator.start(a_driver())
    with pytest.raises(SinkMisused, match="same name"):
        await coordinator.handle_event_from_operator(0, 0, ["headgate/sealed-files", "other", "x", []])


@pytest.mark.parametrize("record", [1, {"a": 1}, b"two\nlines"])
def test_a_record_that_is_no_line_says_what_to_override(record: Any, tmp_path: Path) -> None:
    operator = FileSinkOperator(str(tmp_path))
    opened(operator)
    with pytest.raises(TypeError, match="encode"):
        operator.process(iter([record]))


def test_a_number_of_records_means_nothing_with_other_partitions(tmp_path: Path) -> None:
    """H52."""
    operator = FileSinkOperator(str(tmp_path))
    opened(operator)
    state = operator.snapshot_state(1)
    with pytest.raises(ValueError, match=r"2 partitions, and now there are 3.*snapshot_position"):
        opened(FileSinkOperator(str(tmp_path)), state, parallelism=3)
    with pytest.raises(TypeError, match="merge_states"):
        FileSinkOperator(str(tmp_path)).merge_states({0: state, 1: state})


def test_the_position_is_one_in_a_micro_batch(tmp_path: Path) -> None:
    """A checkpoint of an earlier batch never makes a record be skipped, whatever its parallelism."""
    operator = FileSinkOperator(str(tmp_path), batch_id=4)
    opened(operator)
    operator.process(iter(["a", "b"]))
    state = operator.snapshot_state(1)
    again, after = (FileSinkOperator(str(tmp_path), batch_id=batch_id) for batch_id in (4, 5))
    opened(again, state)
    opened(after, state, parallelism=3)
    assert (again.records_written, after.records_written) == (2, 0)


def test_an_operator_that_could_not_open_can_be_closed(tmp_path: Path) -> None:
    FileSinkOperator(str(tmp_path)).close()
