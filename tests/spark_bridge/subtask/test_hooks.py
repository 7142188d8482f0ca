# SPDX-License-Identifier: Apache-2.0

"""The table "what happens if a method of an operator fails": each method, kind of failure and end of an attempt (H178).

What has to happen is what the docstring of ``SubtaskOperator`` says. An exception in any method except ``close`` fails
the task: the coordinator gets its text, Spark the exception itself. ``close`` comes once for each operator that was
created, and what it raises is only logged.

    method that fails     success   failure  ended by the driver  abandoned
    close                 succeeds  its own  its own              succeeds
    process' ``finally``  fails     fails    fails                succeeds
    final_state           fails     -        -                    succeeds
    every other           fails     -        -                    -

"its own": the error that ended the attempt reaches Spark. An exit is treated like an exception, everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol.wire.codec import encode_event
from protocol.wire.messages import (
    AttemptEnded,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    Confirm,
    Finished,
    Opened,
    SubtaskState,
    UrgentEventMessage,
)
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.subtask import AttemptOver, SubtaskContext, SubtaskOperator, TaskIdentity, run_subtask
from spark_bridge.subtask.parts import COUNTERS
from spark_bridge.subtask.source import SplitReader
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, RunningTask, barrier


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nobody can say")


class Odd(BaseException):
    """Neither an exception nor an exit, as libraries have them."""


FAILURES: dict[str, Callable[[], BaseException]] = {
    "an exception": lambda: ValueError("boom"),
    "an exception without a text": Unspeakable,
    "an exit": lambda: SystemExit(3),
    "an interrupt": lambda: KeyboardInterrupt("boom"),
    "neither": lambda: Odd("boom"),
}


class Hooked(SubtaskOperator):
    """Calls ``act`` in the method ``at``; counts its calls of ``close``. It handles events until ``go_on`` is set."""

    snapshot_anywhere = True
    waits_for_subtask_ready = False

    def __init__(self, at: str, act: Callable[[], None]) -> None:
        self.at, self.act, self.closed = at, act, 0
        self.go_on: threading.Event | None = None
        self._hook("__init__")

    def _hook(self, name: str) -> None:
        if name == self.at:
            self.act()

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        self._hook("merge_states")
        return b""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self._hook("open")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        try:
            self._hook("process")
            while self.go_on is not None and not self.go_on.is_set():
                self.context.wait_for_event(timeout_s=0.01)
            yield from records
        finally:
            self._hook("finally")

    def handle_event(self, event: Any) -> None:
        self._hook("handle_event")

    def handle_urgent(self, event: Any) -> None:
        self._hook("handle_urgent")

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        self._hook("snapshot_state")
        return b""

    def final_state(self) -> bytes:
        self._hook("final_state")
        return b""

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._hook("notify_checkpoint_complete")

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._hook("notify_checkpoint_aborted")

    def close(self) -> None:
        self.closed += 1
        self._hook("close")


class Attempt:
    """One attempt of a ``Hooked`` operator, with the test as its coordinator."""

    def __init__(self, peer: Peer, at: str, act: Callable[[], None]) -> None:
        self.made: list[Hooked] = []
        self.go_on = threading.Event()

        def make() -> SubtaskOperator:
            operator = Hooked.__new__(Hooked)
            self.made.append(operator)
            operator.__init__(at, act)  # type: ignore[misc]
            operator.go_on = self.go_on
            return operator

        several = tuple(SubtaskState(n, b"x") for n in (0, 1)) if at == "merge_states" else ()
        self.task: RunningTask = peer.start(make, ["record"], failure_timeout_s=PATIENCE_S)
        self.connection: PeerConnection = peer.register(states=several, hold_events=False)

    def finished(self) -> Finished:
        """The report of its end. Everything else that the task sends is read over."""
        while not isinstance(message := self.connection.receive(), Finished):
            pass
        self.connection.send(Confirm(TASK_ID, message.seq))
        return message


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def send_what_calls(at: str, connection: PeerConnection) -> None:
    """Send the items that make the operator call the method, once it is open."""
    while at not in ("__init__", "merge_states", "open") and not isinstance(connection.receive(), Opened):
        pass
    if at == "handle_event":
        connection.send(connection.event(1, "event"))
    elif at == "handle_urgent":
        connection.send(UrgentEventMessage(TASK_ID, 1, encode_event("urgent")))
        while not isinstance(connection.receive(), Confirm):
            pass
    elif at == "snapshot_state":
        connection.send(barrier(1, 5, 0))
    elif at in ("notify_checkpoint_complete", "notify_checkpoint_aborted"):
        connection.send(barrier(1, 5, 0))
        while not isinstance(connection.receive(), CheckpointAcknowledged):
            pass
        kind = CheckpointCompleted if at == "notify_checkpoint_complete" else CheckpointAborted
        connection.send(kind(TASK_ID, 2, 5))


FAILING = (
    "__init__",
    "merge_states",
    "open",
    "process",
    "handle_event",
    "handle_urgent",
    "snapshot_state",
    "final_state",
    "notify_checkpoint_complete",
    "notify_checkpoint_aborted",
)


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("at", FAILING)
def test_a_failure_in_any_method_but_close_fails_the_task_with_itself(peer: Peer, at: str, kind: str) -> None:  # H178
    error = FAILURES[kind]()
    attempt = Attempt(peer, at, raising(error))
    send_what_calls(at, attempt.connection)
    attempt.go_on.set()
    said = attempt.finished().failure
    assert attempt.task.error() is error
    assert said.startswith(f"{type(error).__name__}: ")
    assert said.endswith(("boom", "3", "<its __str__ raised RuntimeError>"))
    (operator,) = attempt.made
    assert operator.closed == (0 if at == "__init__" else 1)


def test_a_failure_in_close_takes_the_place_of_no_other(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    """Both fail: the first one reaches Spark."""

    class Both(Hooked):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield from records
            raise ValueError("the cause")

    operator = Both("close", raising(SystemExit(3)))
    task, connection = peer.run(operator)
    assert connection.next_item(Finished).failure == "ValueError: the cause"
    connection.send(Confirm(TASK_ID, 2))
    assert str(task.error()) == "the cause"
    assert "Both.close() raised" in caplog.text


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize(
    ("at", "end"),
    [
        *(("close", end) for end in ("success", "abandoned", "own exception", "ended by the driver")),
        ("finally", "abandoned"),  # otherwise the generator itself raises what its finally raises
    ],
)
def test_a_failure_in_close_is_only_logged(
    peer: Peer, at: str, end: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cause = LookupError("the cause")

    def records() -> Iterator[Any]:
        yield "first"
        if end == "own exception":
            raise cause
        if end == "ended by the driver":
            operator.context.wait_for_event()

    operator = Hooked(at, raising(FAILURES[kind]()))
    limit = 1 if end == "abandoned" else None
    task, connection = peer.run(operator, records(), limit=limit, failure_timeout_s=PATIENCE_S)
    if end == "ended by the driver":
        connection.send(AttemptEnded(TASK_ID, "the job was cancelled"))
        assert isinstance(task.error(), AttemptOver)
    else:
        finished = connection.finish()
        assert finished.failure == ("LookupError: the cause" if end == "own exception" else "")
        if end == "own exception":
            assert task.error() is cause
        else:
            assert task.outputs() == ["first"]
    assert operator.closed == 1
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert lines[0].exc_info is not None
    assert isinstance(lines[0].exc_info[1], type(FAILURES[kind]()))


@pytest.mark.parametrize("kind", FAILURES)
def test_a_final_state_that_fails_does_not_fail_an_abandoned_task(peer: Peer, kind: str) -> None:
    """Spark counts it as a success already: ``take(1)`` has what it needs."""
    operator = Hooked("final_state", raising(FAILURES[kind]()))
    task, _ = peer.run(operator, ["first", "second"], limit=1)
    assert task.outputs() == ["first"]
    assert operator.closed == 1


HANGING = ("open", "process", "handle_event", "snapshot_state", "final_state", "close", "notify_checkpoint_complete")


@pytest.mark.parametrize("at", HANGING)
def test_an_attempt_that_ends_while_a_method_hangs_ends_after_it(peer: Peer, at: str) -> None:
    """Nothing can interrupt the method. The operator learns that the attempt is over, and is closed when it returns."""
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    attempt = Attempt(peer, at, hang)
    send_what_calls(at, attempt.connection)
    attempt.go_on.set()
    assert entered.wait(PATIENCE_S)
    (operator,) = attempt.made
    attempt.connection.send(AttemptEnded(TASK_ID, "the job was cancelled"))
    while not operator.context.cancelled:
        threading.Event().wait(0.001)
    release.set()
    assert isinstance(attempt.task.error(), AttemptOver)
    assert operator.closed == 1


def test_a_hang_in_close_comes_after_the_report_of_the_end(peer: Peer) -> None:
    """So the coordinator has everything, whatever becomes of the process then."""
    release = threading.Event()

    def hang() -> None:
        assert release.wait(PATIENCE_S)

    operator = Hooked("close", hang)
    task, connection = peer.run(operator, ["first"])
    connection.finish()
    release.set()
    assert task.outputs() == ["first"]


# --- chains and hybrid sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAILURES)
def test_all_parts_of_a_chain_are_closed_and_the_task_succeeds(
    peer: Peer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:  # H80
    operators = [Hooked("close", raising(FAILURES[kind]())) for _ in range(3)]
    main, *parts = operators
    task, connection = peer.run(main, ["first"], parts={"a": lambda: parts[0], "b": lambda: parts[1]})
    connection.finish()
    assert task.outputs() == ["first"]
    assert [operator.closed for operator in operators] == [1, 1, 1]
    assert caplog.text.count("Hooked.close() raised") == 3


@pytest.mark.parametrize("parts_made", [1, 2])
def test_a_part_that_cannot_be_made_closes_those_that_were(peer: Peer, parts_made: int) -> None:
    """The last one is the user's own operator, which is made after the parts that it may use."""
    made = [Hooked("", lambda: None) for _ in range(parts_made)]
    makers: list[Callable[[], SubtaskOperator]] = [lambda one=one: one for one in made]  # type: ignore[misc]

    def fail() -> SubtaskOperator:
        raise ValueError("cannot be made")

    first, second, own = [*makers, fail, fail][:3]
    task = peer.start(own, ["first"], parts={COUNTERS: first, "other": second})
    connection = peer.register()
    connection.finish()
    assert str(task.error()) == "cannot be made"
    assert [one.closed for one in made] == [1] * parts_made


def test_all_readers_of_a_hybrid_source_are_closed() -> None:
    closed = []

    class Reader(SplitReader):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def read_from(self, split: Any, position: Any) -> Iterator[Any]:
            yield from ()

        def close(self) -> None:
            closed.append(self.number)
            raise SystemExit

    HybridReader([lambda: Reader(1), lambda: Reader(2)]).close()
    assert closed == [1, 2]


# --- several subtasks in one task -----------------------------------------------------------------------------------


def test_operators_of_one_name_of_two_sidecars_run_in_one_task(peer: Peer) -> None:  # H58
    """``zip`` or two ``mapPartitions`` put them there; each sidecar knows only its own."""
    with Peer() as other:
        identity = TaskIdentity(task_attempt_id=TASK_ID, subtask=2, run_id=5, attempt_number=1)

        def body() -> Iterator[Any]:
            inner = run_subtask(lambda: Hooked("", lambda: None), peer.endpoint(), identity, ["record"])
            yield from run_subtask(lambda: Hooked("", lambda: None), other.endpoint(), identity, inner)

        task = RunningTask(lambda: Hooked("", lambda: None), peer.endpoint(), body=body)
        outer = other.take_task()
        inner = peer.take_task()
        inner.finish()
        outer.finish()
        assert task.outputs() == ["record"]


def test_a_second_subtask_of_one_operator_in_a_task_is_refused_with_what_to_do(peer: Peer) -> None:
    identity = TaskIdentity(task_attempt_id=TASK_ID, subtask=2, run_id=5, attempt_number=1)

    def body() -> Iterator[Any]:
        inner = run_subtask(lambda: Hooked("", lambda: None), peer.endpoint(), identity, ["record"])
        yield from run_subtask(lambda: Hooked("", lambda: None), peer.endpoint(), identity, inner)

    task = RunningTask(lambda: Hooked("", lambda: None), peer.endpoint(), body=body)
    connection = peer.take_task()
    connection.finish()
    with pytest.raises(
        RuntimeError, match=r"coordinate\(\) another operator .* or put both functions into one operator"
    ):
        task.outputs()
