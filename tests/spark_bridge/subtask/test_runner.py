# SPDX-License-Identifier: Apache-2.0

"""One task from its first message to its last, against a peer that plays the sidecar."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AttemptEnded,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointDeclined,
    EventMessage,
    Finished,
    HeldEvent,
    Opened,
    Register,
    RestoredEventMessage,
    RestoredRequestMessage,
    SubtaskState,
)
from spark_bridge.subtask import (
    AttemptOver,
    CheckpointDeclinedByOperator,
    SubtaskContext,
    SubtaskOperator,
    TaskIdentity,
    TimedOut,
    run_subtask,
    runner,
)
from spark_bridge.subtask.channel import SubtaskChannel
from tests.protocol.test_describing import Unnamed
from tests.spark_bridge.subtask.operators import Calling, EventSource, Recorder, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, barrier, registered


def test_a_task_registers_opens_yields_its_records_and_says_goodbye(peer: Peer) -> None:  # H10, H11
    operator = Recorder()
    task = peer.start(operator, [1, 2, 3])
    connection = peer.accept()
    register = connection.expect(Register)
    assert (register.task_attempt_id, register.operator_id, register.subtask) == (TASK_ID, "words", 2)
    assert (register.run_id, register.attempt_number, register.parallelism) == (5, 1, 4)
    connection.send(registered(attempt=3, checkpoint_id=8, states=(SubtaskState(2, b"before"),)))
    assert connection.expect(Opened).seq == 1
    finished = connection.finish()
    assert (finished.failure, finished.state) == ("", b"state at -1")
    assert task.outputs() == [1, 2, 3]
    assert operator.calls == [("open", b"before"), 1, 2, 3, ("snapshot", -1), "close"]
    assert (operator.context.attempt, operator.context.checkpoint_id) == (3, 8)


def test_events_are_handled_before_the_next_record_in_their_order(peer: Peer) -> None:  # H22
    operator = Recorder()
    may_go_on = threading.Event()

    def records() -> Iterator[int]:
        yield 1
        assert may_go_on.wait(PATIENCE_S)
        yield 2
        yield 3

    task, connection = peer.run(operator, records())
    connection.send_events(1, "a", "b")
    may_go_on.set()
    peer.finish(task)
    calls = [call for call in operator.calls if call in (1, 2, 3) or call[0] == "event"]
    assert calls.index(("event", "b")) == calls.index(("event", "a")) + 1
    assert calls.index(("event", "b")) < calls.index(3)


def test_what_is_in_the_mailbox_at_the_end_is_still_handled(peer: Peer) -> None:
    # H23: confirmed means that it is handled
    operator = Recorder()
    may_end = threading.Event()

    def records() -> Iterator[int]:
        assert may_end.wait(PATIENCE_S)
        yield from ()

    task, connection = peer.run(operator, records())
    connection.send_events(1, "late")
    may_end.set()
    peer.finish(task)
    assert ("event", "late") in operator.calls


def test_a_task_that_passes_between_records_takes_what_has_come_itself(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H23, spark-facts 23: it need not wait for the I/O thread to run, which never reads here."""
    monkeypatch.setattr(SubtaskChannel, "interests", 0)
    operator = Recorder()

    def records() -> Iterator[int]:
        while ("event", "seen") not in operator.calls:
            yield 0

    task, connection = peer.run(operator, records())
    connection.send_events(1, "seen")
    monkeypatch.undo()
    channel_of(operator).waker.wake()  # from now on the I/O thread reads
    peer.finish(task)
    assert ("event", "seen") in operator.calls


def test_a_task_that_ends_well_waits_until_everything_is_taken(peer: Peer) -> None:  # H30: a success loses no event
    task, connection = peer.run(Calling(lambda context: context.send_event("precious")), finish_timeout_s=0.2)
    connection.expect(EventMessage)
    connection.expect(Finished)
    with pytest.raises(TimedOut, match="not taken"):
        task.outputs()


def test_an_exception_of_the_operator_is_told_and_passes_unchanged(peer: Peer) -> None:  # H12
    cause = ValueError("bad record 7")

    class Failing(Recorder):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield next(records)
            raise cause

    operator = Failing()
    task, connection = peer.run(operator, [1, 2])
    assert connection.finish().failure == "ValueError: bad record 7"
    assert task.error() is cause
    assert operator.calls[-1] == "close"


@pytest.mark.parametrize("place", ["text", "cause", "note"])
def test_an_exception_that_sparks_worker_could_not_encode_passes_with_an_escaped_text(peer: Peer, place: str) -> None:
    """H178: Spark would wait for it without end."""
    cause = LookupError("begins \udc80 ends" if place == "text" else "plain")
    if place == "cause":
        cause.__cause__ = ValueError("begins \udc80 ends")
    if place == "note":
        cause.add_note("begins \udc80 ends")

    class Failing(Recorder):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield next(records)
            raise cause

    task, connection = peer.run(Failing(), [1, 2])
    assert connection.finish().failure.startswith("LookupError: ")
    error = task.error()
    shown = "".join(traceback.format_exception(error)).encode().decode()
    assert "begins \\udc80 ends" in shown
    assert "in process" in shown


def test_an_exception_that_sparks_worker_could_not_write_is_replaced_by_one_that_describes_it(peer: Peer) -> None:
    """H178: Spark would wait for it without end."""

    def fail(context: SubtaskContext) -> None:
        raise Unnamed("no")

    task, connection = peer.run(Calling(fail))
    assert connection.finish().failure == "Unnamed: no"
    error = task.error()
    assert str(error) == "raised an exception that Python cannot show: Unnamed: no"
    assert "Unnamed: no" in "".join(traceback.format_exception(error))


def test_a_failure_that_the_driver_answers_by_ending_the_attempt_is_not_a_warning(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:  # H59: Spark shows a worker's warnings on standard error
    def fail(context: SubtaskContext) -> None:
        raise ValueError("no")

    task, connection = peer.run(Calling(fail))
    connection.expect(Finished)
    connection.send(AttemptEnded(TASK_ID, "failed: ValueError: no"))
    assert isinstance(task.error(), ValueError)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_an_exception_does_not_wait_long_for_a_silent_sidecar(peer: Peer) -> None:  # H48
    def fail(context: SubtaskContext) -> None:
        raise ValueError("no")

    task = peer.start(Calling(fail), failure_timeout_s=0.05)
    peer.take_task()
    assert isinstance(task.error(), ValueError)


def test_an_operator_that_cannot_be_built_is_a_failure_of_the_task(peer: Peer) -> None:
    def build() -> SubtaskOperator:
        raise KeyError("no such file")

    task = peer.start(build)
    connection = peer.register()
    assert "no such file" in connection.finish().failure
    assert isinstance(task.error(), KeyError)


def test_an_exception_while_restoring_fails_the_task_before_it_is_ready(peer: Peer) -> None:  # H11
    class Failing(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            raise RuntimeError("cannot restore")

    task = peer.start(Failing)
    connection = peer.register()
    assert connection.finish().failure == "RuntimeError: cannot restore"  # not Opened
    assert isinstance(task.error(), RuntimeError)


def test_an_abandoned_iterator_ends_the_task_well(peer: Peer) -> None:  # H57, spark-facts 18: take(1) is a success
    operator = Recorder()
    task, connection = peer.run(operator, range(1000), limit=1)
    assert connection.finish().failure == ""
    connection.expect_end()
    assert task.outputs() == [0]
    assert operator.calls[-1] == "close"


def test_a_generator_that_was_never_started_leaves_nothing_and_connects_to_nobody(peer: Peer) -> None:
    identity = TaskIdentity(task_attempt_id=1, subtask=0, run_id=0, attempt_number=0)
    run_subtask(Recorder, peer.endpoint(), identity, []).close()


def test_the_end_of_the_attempt_wakes_a_waiting_task(
    peer: Peer, until_it_waits: Callable[[Recorder], None]
) -> None:  # H26; spark-facts 16
    operator = EventSource()
    task, connection = peer.run(operator)
    until_it_waits(operator)
    connection.send(AttemptEnded(TASK_ID, "superseded by attempt 4"))
    connection.expect_end()
    with pytest.raises(AttemptOver, match="superseded by attempt 4"):
        task.outputs()


def test_an_attempt_that_is_over_takes_no_more_events_and_no_goodbye(peer: Peer) -> None:
    # spark-facts 16: unresponsive, ignored
    ended = threading.Event()

    def body(context: SubtaskContext) -> None:
        assert ended.wait(PATIENCE_S)
        while not context.cancelled:
            pass
        context.send_event("from the grave")

    operator = Calling(body)
    task, connection = peer.run(operator)
    connection.send(connection.event(1, "unread"), AttemptEnded(TASK_ID, "killed"))
    ended.set()
    connection.expect_end()
    assert isinstance(task.error(), AttemptOver)
    assert operator.calls == [("open", None), "close"]


def test_an_attempt_that_was_given_up_leaves_spark_time_to_kill_it(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """spark-facts 16: an exception that came before the kill would count towards spark.task.maxFailures."""
    waited: list[float] = []
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    task, connection = peer.run(Recorder, kill_wait_s=2.5)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    assert isinstance(task.error(), AttemptOver)
    assert waited == [2.5]


def test_restored_requests_leave_as_requests_and_the_operator_can_see_them(peer: Peer) -> None:  # H73, H31, H52
    asked: list[object] = []

    class Asking(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            asked.append(context.restored_requests)

    task = peer.start(Asking)
    held = (
        HeldEvent(6, encode_event(["which", 1]), is_request=True),
        HeldEvent(2, encode_event("an event")),
        HeldEvent(2, encode_event(["which", 2]), is_request=True),
    )
    connection = peer.register(held=held, events_sent=(7,))
    first = connection.next_item(RestoredRequestMessage)
    assert (first.sender, decode_event(first.payload)) == (6, ["which", 1])
    connection.next_item(RestoredEventMessage)
    assert connection.next_item(RestoredRequestMessage).sender == 2
    connection.next_item(Opened)
    assert connection.finish().events_sent == (10,)
    task.outputs()
    assert asked == [(["which", 1], ["which", 2])]


def test_an_operator_may_decline_a_checkpoint_and_go_on(peer: Peer) -> None:  # H45
    class Declining(EventSource):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            if checkpoint_id == 6:
                raise CheckpointDeclinedByOperator("in the middle of a commit")
            return b""

    task, connection = peer.run(Declining)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    declined = connection.next_item(CheckpointDeclined)
    assert declined.reason == "in the middle of a commit"
    connection.send(CheckpointAborted(TASK_ID, 3, 6), connection.event(4, "end"))
    peer.finish(task)


def test_a_snapshot_that_is_not_bytes_is_an_error_that_says_so(peer: Peer) -> None:  # H46
    class Forgetful(EventSource):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return None  # type: ignore[return-value]

    task, connection = peer.run(Forgetful)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert "must return bytes, not NoneType" in connection.finish().failure
    assert isinstance(task.error(), TypeError)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_checkpoint_between_the_outputs_of_one_record_waits_unless_allowed(peer: Peer, allowed: bool) -> None:
    in_the_record, barrier_sent = threading.Event(), threading.Event()

    class TwoOutputs(Recorder):
        snapshot_anywhere = allowed

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                in_the_record.set()
                yield record
                self.calls.append("first half")
                assert barrier_sent.wait(PATIENCE_S)
                yield record
                self.calls.append("second half")

    operator = TwoOutputs()
    task, connection = peer.run(operator, [1])
    assert in_the_record.wait(PATIENCE_S)
    connection.close_for(1, 6)
    again = barrier(2, 6, 0)
    connection.send(again, again)  # a duplicate is confirmed immediately
    connection.confirmed(2)
    barrier_sent.set()
    connection.next_item(CheckpointAcknowledged)
    peer.finish(task)
    snapshot, half = operator.calls.index(("snapshot", 6)), operator.calls.index("second half")
    assert (snapshot < half) == allowed
