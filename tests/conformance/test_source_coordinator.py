# SPDX-License-Identifier: Apache-2.0

"""The source coordinator, with the assertions of Flink's own tests. R and S numbers are those of the parity list.

S126 (an interrupted worker thread) has no counterpart: a thread's late result is dropped at close. The intermediate
"no more splits" of S127 and the backlog status of S128 are not offered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.coordination import SourceCoordinator, SplitEnumerator, SplitEnumeratorContext, StaticSplitEnumerator
from actors.coordination.engine.messages import StartOperator
from actors.coordination.sources.source import STATIC
from protocol.attempts import FailureKind, FailureReason, GlobalFailureRaised
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.source_events import decode_split
from protocol.wire.messages import RestoreMode
from protocol.wire.state import decode_state
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask


class RecordingEnumerator(SplitEnumerator):
    """Does nothing by itself; records its calls."""

    def __init__(self, state: bytes | None = None) -> None:
        self.state = state
        self.calls: list[tuple[Any, ...]] = []
        self.raises: dict[str, Exception] = {}
        self.context: SplitEnumeratorContext

    def last_call(self) -> tuple[Any, ...]:
        return self.calls[-1]

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.raises:
            raise self.raises[call[0]]

    async def start(self, context: SplitEnumeratorContext) -> None:
        self.context = context
        self._called("start")

    async def add_reader(self, subtask: int) -> None:
        self._called("add_reader", subtask)

    async def handle_split_request(self, subtask: int) -> None:
        self._called("handle_split_request", subtask)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self._called("add_splits_back", splits, subtask)

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        self._called("handle_source_event", subtask, attempt, event)

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        self._called("snapshot_state", checkpoint_id)
        return b"enumerator"

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._called("notify_checkpoint_complete", checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._called("notify_checkpoint_aborted", checkpoint_id)

    async def close(self) -> None:
        self._called("close")


class Source:
    """A source coordinator around recording enumerators, and the readers of its world."""

    def __init__(self) -> None:
        self.built: list[RecordingEnumerator] = []
        self.coordinator = SourceCoordinator(self._build)

    def _build(self, state: bytes | None) -> RecordingEnumerator:
        self.built.append(RecordingEnumerator(state))
        return self.built[-1]

    @property
    def enumerator(self) -> RecordingEnumerator:
        return self.built[-1]

    @property
    def context(self) -> SplitEnumeratorContext:
        return self.enumerator.context


async def readers(world: World, *subtasks: int) -> list[ReaderTask]:
    world.task_type = ReaderTask
    tasks = await world.running(*subtasks)
    return [task for task in tasks if isinstance(task, ReaderTask)]


@asynccontextmanager
async def a_source(*subtasks: int) -> AsyncIterator[tuple[Source, World, list[ReaderTask]]]:
    """Yield a source in an operator of three subtasks, and the readers of those that run."""
    source = Source()
    async with running_operator(source.coordinator, parallelism=3) as world:
        yield source, world, await readers(world, *subtasks)


# --- readers ------------------------------------------------------------------------------------------------------


async def test_the_enumerator_learns_of_each_reader() -> None:  # S119, R114
    source = Source()
    async with running_operator(source.coordinator, parallelism=3) as world:
        await readers(world, 0, 1, 2)
        assert source.context.registered_readers() == [0, 1, 2]
        assert source.enumerator.calls[0] == ("start",)
        assert sorted(source.enumerator.calls[1:]) == [("add_reader", 0), ("add_reader", 1), ("add_reader", 2)]
        assert source.context.parallelism == 3


async def test_a_failed_reader_is_not_a_reader_any_more() -> None:  # S120, R114
    async with a_source(0, 1, 2) as (source, world, (task, *_)):
        world.fail(task, reset=False)
        await world.settle()
        assert source.context.registered_readers() == [1, 2]


async def test_the_failure_of_an_attempt_that_was_never_a_reader_does_nothing() -> None:  # S121, R114
    async with a_source() as (source, world, _):
        task = world.accept(0)
        task.opens_immediately = False
        await world.settle()
        world.fail(task)
        await world.settle()
        assert source.context.registered_readers() == []
        assert not world.failures


async def test_only_the_first_attempt_of_a_subtask_is_a_new_reader() -> None:  # R115
    async with a_source() as (source, world, _):
        first, *_ = await readers(world, 0)
        await readers(world, 0)
        assert source.context.attempts(0) == [0, 1]
        world.fail(first, reset=False)
        await world.settle()
        assert source.context.attempts(0) == [1]
        assert source.enumerator.calls.count(("add_reader", 0)) == 1


# --- assignments --------------------------------------------------------------------------------------------------


async def test_assigned_splits_are_recorded_and_sent_in_one_event_each() -> None:  # S122, R118
    async with a_source(0, 1) as (source, world, (one, two)):
        await source.context.assign_splits(0, ["0"])
        await source.context.assign_splits(1, ["1", "2"])
        await world.settle()
        assert (one.batches, two.batches) == ([["0"]], [["1", "2"]])
        assert source.coordinator.splits_assigned == 3


async def test_splits_can_be_assigned_from_another_thread() -> None:  # S123, R117
    async with a_source(0) as (source, world, (reader,)):
        source.context.coordinator.call_soon_threadsafe(lambda: source.context.assign_splits(0, ["a"]))
        await world.settle()
        assert reader.batches == [["a"]]


async def test_splits_for_a_subtask_without_a_reader_are_refused_and_nothing_is_assigned() -> None:  # S124, R117
    async with a_source() as (source, world, _):
        with pytest.raises(ValueError, match=r"cannot assign splits to subtask .* Assign them when it asks"):
            await source.context.assign_splits(0, ["a"])
        (reader,) = await readers(world, 0)
        assert reader.batches == []
        assert source.coordinator.splits_assigned == 0


async def test_an_empty_list_sends_nothing() -> None:  # R118
    async with a_source(0) as (source, world, (reader,)):
        await source.context.assign_splits(0, [])
        await world.settle()
        assert reader.batches == []


async def test_an_assignment_is_recorded_before_it_is_sent() -> None:  # R118
    async with a_source(0) as (source, world, (reader,)):
        reader.unresponsive = True
        await source.context.assign_splits(0, ["a", "b"])
        world.fail(reader)  # it never got them
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["a", "b"], 0)


async def test_equal_splits_are_as_many_as_were_assigned() -> None:  # R118, R122
    async with a_source(0) as (source, world, (reader,)):
        await source.context.assign_splits(0, ["a", "a"])
        await source.context.assign_splits(0, ["a"])
        world.fail(reader)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["a", "a", "a"], 0)


# --- failures of the enumerator -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["add_reader", "handle_split_request", "handle_source_event"])
async def test_an_exception_of_the_enumerator_fails_the_job(method: str) -> None:  # S125, R111
    async with a_source() as (source, world, _):
        source.enumerator.raises[method] = ValueError("no such partition")
        (reader,) = await readers(world, 0)
        reader.request_split()
        reader.send("its own event")
        await world.settle()
        (failure,) = world.reported(GlobalFailureRaised)
        assert "no such partition" in failure.cause


async def test_an_enumerator_that_cannot_be_built_fails_the_start() -> None:  # R110; here start itself fails (H6)
    def build(state: bytes | None) -> SplitEnumerator:
        raise ValueError("no such topic")

    async with running_operator(SourceCoordinator(build), started=False) as world:
        with pytest.raises(ValueError, match="no such topic"):
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))


async def test_an_enumerator_that_fails_to_close_does_not_stand_in_the_way_of_the_next() -> None:  # R113
    async with a_source() as (source, world, _):
        source.enumerator.raises["close"] = OSError("already closed")
        world.reset()
        await world.settle()
        assert len(source.built) == 2
        assert not world.failures


async def test_an_enumerator_that_cannot_be_rebuilt_fails_the_job_and_the_next_reset_tries_again() -> None:  # R111
    refuse = False
    built: list[RecordingEnumerator] = []

    def build(state: bytes | None) -> SplitEnumerator:
        if refuse:
            raise ValueError("not now")
        built.append(RecordingEnumerator(state))
        return built[-1]

    async with running_operator(SourceCoordinator(build)) as world:
        refuse = True
        world.reset()
        await world.settle()
        assert "not now" in str(world.failures[0])
        refuse = False
        world.reset()
        await world.settle()
        assert [enumerator.calls for enumerator in built] == [[("start",), ("close",)], [("start",)]]


async def test_the_enumerator_is_closed_at_the_end() -> None:  # R113
    async with a_source() as (source, world, _):
        await world.stop()
        assert source.enumerator.calls == [("start",), ("close",)]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("handle_event_from_operator", (0, 0, {})),
        ("subtask_ready", (0, None)),
        ("subtask_failed", (0, 0, FailureReason(FailureKind.FAILED, "by the test"))),
        ("subtask_reset", (0, -1)),
        ("checkpoint_coordinator", (1,)),
        ("notify_checkpoint_complete", (1,)),
        ("notify_checkpoint_aborted", (1,)),
        ("notify_checkpoint_discarded", (1,)),
        ("run_ended", (1, True, "")),
    ],
)
async def test_a_call_before_start_is_refused_by_name(method: str, args: tuple[Any, ...]) -> None:  # H6
    coordinator = SourceCoordinator(lambda state: RecordingEnumerator())
    with pytest.raises(RuntimeError, match=f"SourceCoordinator.{method} was called before start"):
        await getattr(coordinator, method)(*args)


async def test_a_source_coordinator_that_is_closed_has_no_enumerator() -> None:  # R113
    async with a_source() as (source, world, _):
        await world.stop()
    with pytest.raises(RuntimeError, match=r"has no enumerator: it is closed, .* the log says why"):
        source.coordinator.enumerator  # noqa: B018


async def test_a_coordinator_that_never_started_can_be_closed() -> None:  # R113
    source = Source()
    async with running_operator(source.coordinator, started=False) as world:
        await world.stop()
        assert source.built == []
        assert not world.failures


# --- checkpoints and resets ---------------------------------------------------------------------------------------


async def test_a_reset_subtask_gives_back_what_it_was_assigned_in_order() -> None:  # R122
    async with a_source(0, 1) as (source, world, (one, _two)):
        for split in "cab":
            await source.context.assign_splits(0, [split])
        await source.context.assign_splits(1, ["of another"])
        world.fail(one, reset=False)
        await world.settle()
        assert source.enumerator.last_call()[0] == "add_reader"  # nothing on the failure, everything on the reset
        world.reset_subtask(0)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["c", "a", "b"], 0)
        assert source.coordinator.splits_given_back == 3
        await readers(world, 0)
        assert source.enumerator.last_call() == ("add_reader", 0)  # it is a new reader


async def test_splits_are_given_back_also_where_there_are_none() -> None:  # R122
    async with a_source(0) as (source, world, (reader,)):
        world.fail(reader)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", [], 0)


async def test_only_what_came_after_the_restored_checkpoint_is_given_back() -> None:  # R119, R120, R121
    async with a_source(0) as (source, world, (reader,)):
        await source.context.assign_splits(0, ["before"])
        await world.checkpoint()
        assert source.enumerator.calls[-2:] == [("snapshot_state", 1), ("notify_checkpoint_complete", 1)]
        await source.context.assign_splits(0, ["after"])
        world.fail(reader)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["after"], 0)
        assert world.stored[0].coordinator_state == b"enumerator"


async def test_what_an_aborted_checkpoint_has_seen_is_given_back_too() -> None:  # R121
    async def fail(checkpoint: Any) -> None:
        raise OSError("no space left")

    async with a_source(0) as (source, world, (reader,)):
        await source.context.assign_splits(0, ["before"])
        world.on_store = fail
        await world.checkpoint()
        assert source.enumerator.last_call() == ("notify_checkpoint_aborted", 1)
        await source.context.assign_splits(0, ["after"])
        world.fail(reader)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["before", "after"], 0)


async def test_in_batch_mode_a_checkpoint_covers_no_split() -> None:  # H18, H56
    source = Source()
    async with running_operator(source.coordinator, mode=RestoreMode.BATCH) as world:
        (reader,) = await readers(world, 0)
        await source.context.assign_splits(0, ["before"])
        await world.checkpoint()
        assert len(world.stored) == 1
        await source.context.assign_splits(0, ["after"])
        world.fail(reader)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["before", "after"], 0)


async def test_a_reset_of_the_whole_builds_a_new_enumerator_from_the_checkpoint() -> None:  # R109, R123
    async with a_source(0) as (source, world, (reader,)):
        await source.context.assign_splits(0, ["a"])
        await world.checkpoint()
        world.fail(reader, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset()
        await world.settle()
        assert [enumerator.state for enumerator in source.built] == [None, b"enumerator"]
        assert source.built[0].calls[-1] == ("close",)
        assert source.built[1].calls == [("start",)]
        assert source.context.registered_readers() == []  # R123
        (again,) = await readers(world, 0)
        assert again.batches == []  # its state has them


async def test_a_reset_before_start_is_what_the_first_enumerator_restores() -> None:  # R109
    source = Source()
    restored = CompletedCheckpoint(7, 2, b"of an earlier application")
    async with running_operator(source.coordinator, started=False, restored=restored) as world:
        assert source.built == []
        await world.start()
        assert source.enumerator.state == b"of an earlier application"


# --- the end of input, events -------------------------------------------------------------------------------------


async def test_no_more_splits_is_sent_to_all_attempts_and_again_on_each_request() -> None:  # S127, R125, R116
    async with a_source() as (source, world, _):
        (first,) = await readers(world, 0)
        (second,) = await readers(world, 0)
        await source.context.signal_no_more_splits(0)
        await world.settle()
        assert (first.no_more, second.no_more) == (1, 1)
        first.request_split()
        await world.settle()
        assert first.no_more == 2
        assert ("handle_split_request", 0) not in source.enumerator.calls
        with pytest.raises(ValueError, match="no more follow"):
            await source.context.assign_splits(0, ["late"])
        (third,) = await readers(world, 0)
        assert third.no_more == 1  # R126


async def test_after_a_reset_the_input_of_a_subtask_has_not_ended() -> None:  # R122
    async with a_source(0) as (source, world, (reader,)):
        await source.context.signal_no_more_splits(0)
        world.fail(reader)
        (again,) = await readers(world, 0)
        assert again.no_more == 0
        again.request_split()
        await world.settle()
        assert source.enumerator.last_call() == ("handle_split_request", 0)


async def test_concurrent_attempts_get_the_same_splits() -> None:  # R126
    async with a_source() as (source, world, _):
        (first,) = await readers(world, 0)
        await source.context.assign_splits(0, ["a"])
        await source.context.assign_splits(0, ["b", "c"])
        (second,) = await readers(world, 0)
        assert second.batches == [["a", "b", "c"]]  # the recorded splits, in one event
        await source.context.assign_splits(0, ["d"])
        await world.settle()
        assert first.batches == [["a"], ["b", "c"], ["d"]]
        assert second.batches == [["a", "b", "c"], ["d"]]


async def test_events_of_ones_own_go_both_ways_with_the_number_of_the_attempt() -> None:  # R127
    async with a_source() as (source, world, _):
        (first,) = await readers(world, 0)
        (second,) = await readers(world, 0)
        second.send({"watermark": 7})
        await source.context.send_event(0, {"align": 3})
        await source.context.send_event(1, "nobody is there")
        await world.settle()
        assert source.enumerator.last_call() == ("handle_source_event", 0, 1, {"watermark": 7})
        assert first.handled == second.handled == [{"align": 3}]


# --- a recomputed success (H56) -----------------------------------------------------------------------------------


async def finished_reader(world: World, source: Source, splits: list[list[str]]) -> ReaderTask:
    """A reader of subtask 0 that has read ``splits`` and succeeded."""
    (reader,) = await readers(world, 0)
    for batch in splits:
        await source.context.assign_splits(0, batch)
    await source.context.signal_no_more_splits(0)
    await world.settle()
    while not reader.is_over:
        reader.step()
        await world.settle()
    world.finish(reader)
    await world.settle()
    return reader


async def test_a_revoked_success_is_handed_the_same_splits_in_the_same_order_and_no_others() -> None:  # H56
    source = Source()
    async with running_operator(source.coordinator, mode=RestoreMode.BATCH) as world:
        reader = await finished_reader(world, source, [["b", "a"], ["c"]])
        world.fail(reader, FailureKind.REVOKED)
        (again,) = await readers(world, 0)
        assert not [call for call in source.enumerator.calls if call[0] == "add_splits_back"]
        assert (again.batches, again.no_more) == ([["b", "a", "c"]], 1)
        with pytest.raises(ValueError, match="no more follow"):
            await source.context.assign_splits(0, ["another"])


async def test_a_recomputing_attempt_that_fails_plainly_keeps_the_splits_too() -> None:  # H56
    source = Source()
    async with running_operator(source.coordinator, mode=RestoreMode.BATCH) as world:
        reader = await finished_reader(world, source, [["a"], ["b"]])
        world.fail(reader, FailureKind.REVOKED)
        for _ in range(3):
            (again,) = await readers(world, 0)
            assert (again.batches, again.no_more) == ([["a", "b"]], 1)
            world.fail(again, FailureKind.FAILED)
        await world.settle()
        assert not [call for call in source.enumerator.calls if call[0] == "add_splits_back"]


async def test_an_attempt_that_runs_beside_a_revoked_success_gets_no_other_splits() -> None:  # H56, H13
    source = Source()
    async with running_operator(source.coordinator, mode=RestoreMode.BATCH) as world:
        (winner,) = await readers(world, 0)
        await source.context.assign_splits(0, ["a"])
        (other,) = await readers(world, 0)
        world.finish(winner)  # it had enough, before it was told that no more follow
        world.fail(winner, FailureKind.REVOKED, reset=False)
        await world.settle()
        assert (other.batches, other.no_more) == ([["a"]], 1)


async def test_the_reset_of_the_whole_frees_the_splits_of_a_revoked_success() -> None:  # H55, H56
    source = Source()
    async with running_operator(source.coordinator, mode=RestoreMode.BATCH) as world:
        reader = await finished_reader(world, source, [["a"]])
        world.fail(reader, FailureKind.REVOKED)
        world.reset("a new run")
        (again,) = await readers(world, 0)
        assert (again.batches, again.no_more) == ([], 0)


async def test_in_streaming_mode_a_revoked_success_is_a_failure_like_any_other() -> None:  # H56
    async with a_source() as (source, world, _):
        reader = await finished_reader(world, source, [["a"]])
        world.fail(reader, FailureKind.REVOKED)
        await world.settle()
        assert source.enumerator.last_call() == ("add_splits_back", ["a"], 0)


# --- the ready-made enumerator ------------------------------------------------------------------------------------


async def test_the_static_enumerator_hands_out_its_splits_in_batches_and_then_no_more() -> None:
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(list("abcde"), state, batch_size=2))
    async with running_operator(coordinator) as world:
        (reader,) = await readers(world, 0)
        for _ in range(4):
            reader.request_split()
            await world.settle()
        assert reader.batches == [["a", "b"], ["c", "d"], ["e"]]
        assert reader.no_more == 1


async def test_the_static_enumerator_takes_splits_back_to_its_front_and_keeps_its_place() -> None:
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(list("abcde"), state, batch_size=2))
    async with running_operator(coordinator) as world:
        one, two = await readers(world, 0, 1)
        one.request_split()
        await world.settle()
        await world.checkpoint()
        fields = decode_state(STATIC, world.stored[0].coordinator_state)
        assert list(map(decode_split, fields["pending"])) == ["c", "d", "e"]
        one.request_split()
        await world.settle()
        world.fail(one)
        await world.settle()
        two.request_split()
        await world.settle()
        assert two.batches == [["c", "d"]]
        world.fail(two, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset()
        (one,) = await readers(world, 0)
        one.request_split()
        await world.settle()
        assert one.batches == [["c", "d"]]
        assert list(one.pending) == ["a", "b", "c", "d"]  # the splits in its snapshot, and those assigned since
        enumerator = coordinator.enumerator
        assert isinstance(enumerator, StaticSplitEnumerator)
        assert enumerator.pending_count == 1


async def test_a_restored_enumerator_with_nothing_left_does_not_begin_again() -> None:
    enumerator = StaticSplitEnumerator(list("abc"), await StaticSplitEnumerator([]).snapshot_state(1))
    assert enumerator.pending_count == 0


def test_a_batch_has_at_least_one_split() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StaticSplitEnumerator(list("abc"), batch_size=0)
