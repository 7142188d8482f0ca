# SPDX-License-Identifier: Apache-2.0

"""Async stages on real loops and threads, at the moments that a scripted sidecar and a scripted service choose."""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from protocol.errors import AttemptOver
from protocol.parts import split_states
from protocol.wire.codec import decode_event
from protocol.wire.messages import (
    AttemptEnded,
    CheckpointAcknowledged,
    Confirm,
    EventMessage,
    OperatorPart,
    RestoreMode,
    SubtaskState,
)
from protocol.wire.state import decode_entry, decode_state
from spark_bridge.subtask import SubtaskOperator, TaskIdentity, run_subtask
from spark_bridge.subtask.coroutines.calls import AsyncOperator, Failed, RecordContext
from spark_bridge.subtask.coroutines.concurrently import Concurrently, concurrently
from spark_bridge.subtask.coroutines.retry import Retry
from spark_bridge.subtask.coroutines.stage import STATE
from spark_bridge.subtask.operator import operator_factory
from spark_bridge.subtask.parts import current_part
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, RunningTask, barrier
from tests.spark_bridge.subtask.test_checkpoints import put_into_mailbox


class Service:
    """What coroutines call; the test takes each call and answers it."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Any, asyncio.AbstractEventLoop, asyncio.Future[Any]]] = queue.Queue()
        self.loop: asyncio.AbstractEventLoop

    async def call(self, record: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._calls.put((record, loop, answer))
        return await answer

    def next(self) -> tuple[Any, Callable[[Any], object]]:
        """Wait for the next call; return its record, and what answers it."""
        record, loop, answer = self._calls.get(timeout=PATIENCE_S)
        self.loop = loop
        return record, lambda result: loop.call_soon_threadsafe(answer.set_result, result)

    def settle(self) -> None:
        """Wait until the loop has gone on with what was answered, and has told the stage of it."""
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(PATIENCE_S)

    @property
    def is_idle(self) -> bool:
        return self._calls.empty()


IDENTITY = TaskIdentity(task_attempt_id=TASK_ID, subtask=2, run_id=5, attempt_number=1)


def stage(make_operator: Callable[[], SubtaskOperator]) -> Callable[[], SubtaskOperator]:
    """It does not wait for ``subtask_ready``, because the peer numbers its items by hand."""

    def make() -> SubtaskOperator:
        made = make_operator()
        made.waits_for_subtask_ready = False
        return made

    return make


def run(
    peer: Peer,
    settings: Concurrently,
    records: Iterable[Any],
    *,
    restored: bytes | None = None,
    **answer: Any,
) -> tuple[RunningTask, PeerConnection]:
    if restored is not None:
        answer |= {"checkpoint_id": 1, "states": (SubtaskState(2, restored),)}
    return peer.run(stage(settings), records, answer=answer, mode=RestoreMode.STREAMING)


def flights(state: bytes) -> list[Any]:
    """The records in flight, each with None or its result and effects."""
    return [
        [decode_entry(encoded) if encoded else "left", result]
        for encoded, result in decode_state(STATE, state)["flights"]
    ]


def snapshot(connection: PeerConnection, seq: int = 1, checkpoint_id: int = 1) -> bytes:
    """Take a checkpoint, which the task must not decline."""
    connection.close_for(seq, checkpoint_id)
    connection.send(barrier(seq + 1, checkpoint_id, 0))
    return connection.next_item(CheckpointAcknowledged).state


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_no_record_is_taken_before_there_is_a_place_for_it(peer: Peer) -> None:  # H180
    service, pulled = Service(), list[int]()

    def records() -> Iterator[int]:
        for number in range(3):
            pulled.append(number)
            yield number

    task, connection = run(peer, concurrently(service.call, limit=1), records())
    _, answer = service.next()
    state = snapshot(connection)
    assert pulled == [0]
    assert (decode_state(STATE, state)["taken"], flights(state)) == (1, [[0, None]])
    answer("A")
    for result in "BC":
        service.next()[1](result)
    assert peer.finish(task) == ["A", "B", "C"]


def test_a_result_that_is_held_is_never_computed_again_and_has_its_effects_once(peer: Peer) -> None:  # H180
    service = Service()

    async def call(context: Any, record: str) -> Any:
        context.send_event(f"event of {record}")
        return await service.call(record)

    settings = concurrently(call, limit=2, ordered=True)
    task, connection = run(peer, settings, ["a", "b"])
    calls = dict(service.next() for _ in range(2))
    calls["b"]("B")
    service.settle()
    state = snapshot(connection)
    assert flights(state) == [["a", None], ["b", [True, "B", [["event", "event of b"]]]]]
    connection.send(AttemptEnded(TASK_ID, "lost"))
    with pytest.raises(AttemptOver):
        task.outputs()

    task, connection = run(peer, settings, ["a", "b", "c"], restored=state, input_begins_again=True)
    calls = dict([service.next()])
    assert [*calls] == ["a"]  # "b" is known, and there is no place for "c"
    calls["a"]("A")
    assert [decode_event(connection.next_item(EventMessage).payload) for _ in range(2)] == ["event of a", "event of b"]
    record, answer = service.next()
    assert record == "c"
    answer("C")
    assert decode_event(connection.next_item(EventMessage).payload) == "event of c"
    assert peer.finish(task) == ["A", "B", "C"]


def test_a_result_that_was_taken_is_in_no_checkpoint_before_the_stage_goes_on(peer: Peer) -> None:  # H180
    async def call(record: int) -> int:
        return -record

    taken, go_on = threading.Event(), threading.Event()
    endpoint = peer.endpoint(mode=RestoreMode.STREAMING)

    def outputs() -> Iterator[Any]:
        for output in run_subtask(stage(concurrently(call, limit=1)), endpoint, IDENTITY, [1, 2]):
            yield output
            if not taken.is_set():
                taken.set()
                assert go_on.wait(PATIENCE_S)

    task = RunningTask(SubtaskOperator, endpoint, body=outputs)
    connection = peer.take_task()
    assert taken.wait(PATIENCE_S)
    connection.close_for(1, 1)
    put_into_mailbox(connection, barrier(2, 1, 0))
    go_on.set()
    state = connection.next_item(CheckpointAcknowledged).state
    assert (decode_state(STATE, state)["taken"], flights(state)) == (1, [])
    assert peer.finish(task) == [-1, -2]


def test_a_snapshot_while_an_event_waits_has_the_effects_that_are_left(peer: Peer) -> None:  # H180
    async def call(context: Any, record: str) -> str:
        for number in range(2):
            context.send_event([record, number])
        return record.upper()

    settings = concurrently(call, limit=1)
    task, connection = run(peer, settings, ["a"], window_events=1)
    first = connection.next_item(EventMessage)
    state = snapshot(connection)
    assert decode_event(first.payload) == ["a", 0]
    assert flights(state) == [["left", [True, "A", [["event", ["a", 1]]]]]]
    connection.send(AttemptEnded(TASK_ID, "lost"))
    with pytest.raises(AttemptOver):
        task.outputs()
    task, connection = run(peer, settings, ["a"], restored=state, input_begins_again=True)
    assert decode_event(connection.next_item(EventMessage).payload) == ["a", 1]
    assert peer.finish(task) == ["A"]


def test_a_barrier_that_can_only_be_met_upstream_is_met_there(peer: Peer) -> None:  # H180
    """A plain function feeds the stage, and is in the middle of a record while the limit is reached."""
    service = Service()

    def twice(records: Iterator[str]) -> Iterator[str]:
        for record in records:
            yield from (record, record * 2)

    parts = {"twice": stage(operator_factory(twice)), "calls": stage(concurrently(service.call, limit=1))}
    peer._parts = tuple(OperatorPart(name) for name in ("", *parts))
    endpoint = peer.endpoint(mode=RestoreMode.STREAMING)
    task = RunningTask(
        SubtaskOperator, endpoint, body=lambda: run_subtask(None, endpoint, IDENTITY, ["a", "b"], parts, [*parts])
    )
    connection = peer.take_task()
    record, answer = service.next()
    assert record == "a"
    state = snapshot(connection)
    _, states = split_states(state, parts)
    assert flights(states["calls"]) == [["a", None], ["aa", None]]
    for given in ("a", "aa", "b", "bb"):
        answer(given.upper())
        if given != "bb":
            _, answer = service.next()
    assert peer.finish(task) == ["A", "AA", "B", "BB"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_what_other_subtasks_had_in_flight_is_taken_over(peer: Peer, before: int, after: int) -> None:  # H52, H180
    service = Service()
    settings = concurrently(service.call, limit=1)
    states = {}
    for subtask in range(before):
        task, connection = run(peer, settings, [f"of {subtask}"])
        service.next()
        states[subtask] = snapshot(connection)
        connection.send(AttemptEnded(TASK_ID, "the job ends"))
        with pytest.raises(AttemptOver):
            task.outputs()
    restored = tuple(SubtaskState(subtask, state) for subtask, state in states.items())
    outputs = []
    for subtask in range(after):
        its = restored if subtask == 0 else ()
        task, connection = run(peer, settings, [], checkpoint_id=1, states=its)
        for _ in its:
            record, answer = service.next()
            answer(record)
        outputs += peer.finish(task)
    assert outputs == [f"of {subtask}" for subtask in range(before)]


# --- order and limit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_results_leave_in_the_order_that_was_asked_for_and_the_limit_holds(peer: Peer, ordered: bool) -> None:  # H181
    service = Service()
    task, _ = run(peer, concurrently(service.call, limit=2, ordered=ordered), range(4))
    calls = dict(service.next() for _ in range(2))
    assert sorted(calls) == [0, 1]
    assert service.is_idle
    calls[1]("B")
    service.settle()
    if ordered:
        assert service.is_idle  # "B" waits for "A", and has a place
        calls[0]("A")
        calls |= dict(service.next() for _ in range(2))
    else:
        calls |= dict([service.next()])
        calls[0]("A")
        calls |= dict([service.next()])
    calls[2]("C")
    calls[3]("D")
    assert peer.finish(task) == (["A", "B", "C", "D"] if ordered else ["B", "A", "C", "D"])


# --- the end of an attempt -------------------------------------------------------------------------------------------


def test_calls_end_with_the_attempt_while_its_thread_is_away(peer: Peer) -> None:  # H26
    cancelled, go_on = threading.Event(), threading.Event()
    began = threading.Event()

    async def call(record: int) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def records() -> Iterator[int]:
        yield 1
        assert go_on.wait(PATIENCE_S)  # it waits for nothing of Headgate

    task, connection = run(peer, concurrently(call), records())
    assert began.wait(PATIENCE_S)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    assert cancelled.wait(PATIENCE_S)
    go_on.set()
    with pytest.raises(AttemptOver, match="superseded"):
        task.outputs()


# --- what a coroutine finds ------------------------------------------------------------------------------------------

_variable: ContextVar[str] = ContextVar("of one record", default="nothing")


def test_each_record_has_its_own_context_variables(peer: Peer) -> None:  # H180: a restore finds what it found
    async def call(record: str) -> str:
        found = _variable.get()
        _variable.set(record)
        await asyncio.sleep(0)
        return f"{found}, then {_variable.get()}"

    task, _ = run(peer, concurrently(call, limit=3), "abcdefgh")
    assert peer.finish(task) == [f"nothing, then {record}" for record in "abcdefgh"]


def test_a_record_finds_the_context_variables_of_the_tasks_thread(peer: Peer) -> None:  # H180
    async def call(record: str) -> str:
        return _variable.get()

    def records() -> Iterator[str]:
        for record in "abc":
            _variable.set(f"set for {record}")
            yield record

    task, _ = run(peer, concurrently(call, limit=1), records())
    assert peer.finish(task) == ["set for a", "set for b", "set for c"]


@pytest.mark.parametrize("late", [False, True])
def test_a_record_that_the_program_cancels_fails_the_task(peer: Peer, late: bool) -> None:  # H180: and is not lost
    """Late: what it cancels has landed, and its task of asyncio may have the next record."""
    service, tasks = Service(), list[asyncio.Task[Any]]()

    async def call(record: str) -> Any:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        return await service.call(record)

    task, connection = run(peer, concurrently(call, limit=1), "ab")
    _, answer = service.next()
    if late:
        answer("A")
        service.next()
    service.loop.call_soon_threadsafe(tasks[0].cancel)
    finished = connection.finish()
    assert isinstance(task.error(), asyncio.CancelledError)
    assert "CancelledError" in finished.failure


def test_a_cancellation_between_two_records_of_a_task_fails_the_stage(peer: Peer) -> None:  # H180
    """The task of asyncio has been given its next record, and has not gone on with it."""
    service, tasks = Service(), list[asyncio.Task[Any]]()
    go_on, release = threading.Event(), threading.Event()

    async def call(record: str) -> Any:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        return await service.call(record)

    def records() -> Iterator[str]:
        yield "a"
        assert go_on.wait(PATIENCE_S)
        yield "b"
        service.loop.call_soon_threadsafe(tasks[0].cancel)
        release.set()

    task, connection = run(peer, concurrently(call, limit=2), records())
    service.next()[1]("A")
    service.settle()
    service.loop.call_soon_threadsafe(release.wait, PATIENCE_S)  # so that both happen in one turn
    go_on.set()
    connection.finish()
    assert isinstance(task.error(), asyncio.CancelledError)
    assert len(tasks) == 1


def test_records_in_flight_are_in_the_final_state_of_an_abandoned_task(peer: Peer) -> None:  # H180
    service = Service()
    task, connection = peer.run(
        stage(concurrently(service.call, limit=2, ordered=False)), "abc", limit=1, mode=RestoreMode.STREAMING
    )
    calls = dict(service.next() for _ in range(2))
    calls["a"]("A")
    finished = connection.finish()
    assert task.outputs() == ["A"]
    assert (finished.failure, [record for record, _ in flights(finished.state)]) == ("", ["b"])


class Input:
    """A record that can be referred to weakly."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_what_has_left_is_not_kept(peer: Peer) -> None:
    """Three places are used in turn."""
    inputs: list[weakref.ref[Input]] = []

    def records() -> Iterator[Input]:
        for number in range(9):
            record = Input(number)
            inputs.append(weakref.ref(record))
            yield record

    async def number_of(record: Input) -> int:
        return record.number

    kept = stage(concurrently(number_of, limit=3))()
    task, _ = peer.run(kept, records())
    assert peer.finish(task) == list(range(9))
    gc.collect()
    assert not any(one() for one in inputs), f"{kept} has some"


def test_young_objects_are_collected_less_often_while_many_calls_are_in_flight(peer: Peer) -> None:
    before = gc.get_threshold()
    seen: list[int] = []

    async def look(record: int) -> int:
        seen.append(gc.get_threshold()[0])
        return record

    task, _ = peer.run(stage(concurrently(look, limit=before[0])), [1])
    assert peer.finish(task) == [1]
    assert seen == [5 * before[0]]
    assert gc.get_threshold() == before


def test_calls_that_never_wait_let_others_go_on(peer: Peer) -> None:
    others = threading.Event()

    async def call(record: int) -> int:
        if not record:
            for _ in range(5):
                await asyncio.sleep(0)
            others.set()
        return record

    def records() -> Iterator[int]:
        for record in range(10_000_000):
            if others.is_set():
                return
            yield record

    task, _ = run(peer, concurrently(call, limit=10, ordered=False), records())
    assert 0 in peer.finish(task)


def test_a_coroutine_finds_the_parts_of_the_task_it_runs_in(peer: Peer) -> None:  # H180: not those of a neighbour
    part = Recorder()

    async def call(record: int) -> bool:
        return current_part("part", "mine") is part

    other = run_beside(peer)
    task = peer.start(stage(concurrently(call)), [1], parts={"mine": lambda: part}, mode=RestoreMode.STREAMING)
    peer.take_task()
    assert peer.finish(task) == [True]
    other()


def run_beside(peer: Peer) -> Callable[[], None]:
    """Another task of the same process, so that its parts are not the only ones."""
    service = Service()
    task = RunningTask(
        stage(concurrently(service.call)),
        peer.endpoint(mode=RestoreMode.STREAMING),
        [1],
        task_attempt_id=TASK_ID + 1,
    )
    connection = peer.take_task(parts=(OperatorPart(""),))
    _, answer = service.next()

    def end() -> None:
        answer(1)
        connection.finish()
        assert task.outputs() == [1]

    return end


# --- failures --------------------------------------------------------------------------------------------------------


class Limited(Exception):
    """An error of a client of HTTP."""

    status = 429


async def fail_at_one(record: int) -> int:
    if record == 1:
        raise ValueError(f"no {record}")
    return record


def test_a_failure_ends_the_task_with_the_record(peer: Peer) -> None:
    task, connection = run(peer, concurrently(fail_at_one, limit=1), range(3))
    finished = connection.finish()
    error = task.error()
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["in fail_at_one, for the record 1"]
    assert "no 1" in finished.failure
    assert "fail_at_one" in "".join(frame.name for frame in __import__("traceback").extract_tb(error.__traceback__))


@pytest.mark.parametrize(
    ("on_error", "results"), [("skip", [0, 2]), ("yield", [0, Failed(1, "ValueError: no 1", 1), 2])]
)
def test_a_failure_has_no_result_or_one_that_says_so(peer: Peer, on_error: str, results: list[Any]) -> None:
    part = Recorder()
    task = peer.start(
        stage(concurrently(fail_at_one, limit=1, on_error=on_error)),
        range(3),
        parts={"headgate.counters": lambda: counting(part)},
        mode=RestoreMode.STREAMING,
    )
    peer.take_task()
    assert peer.finish(task) == results
    assert part.calls.count(("count", "failed", 1)) == 1


def counting(part: Recorder) -> SubtaskOperator:
    part.count = lambda name, by: part.calls.append(("count", name, by))  # type: ignore[attr-defined]
    part.observe = lambda name, value: None  # type: ignore[attr-defined]
    return part


def test_a_call_is_tried_again_with_the_effects_of_the_last_try_alone(peer: Peer) -> None:
    async def call(context: Any, record: str) -> int:
        context.send_event([record, context.tries])
        if context.tries < 3:
            raise Limited
        return int(context.tries)

    task, connection = run(peer, concurrently(call, retry=Retry(3, pause_s=0)), ["a"])
    assert decode_event(connection.next_item(EventMessage).payload) == ["a", 3]
    assert peer.finish(task) == [3]


def test_a_try_that_takes_too_long_is_given_up(peer: Peer) -> None:
    async def call(record: int) -> None:
        await asyncio.Event().wait()

    task, connection = run(peer, concurrently(call, timeout_s=0.001, retry=Retry(2, pause_s=0)), [1])
    connection.finish()
    error = task.error()
    assert isinstance(error, TimeoutError)
    assert str(error) == "no result within 0.001 s, 2 times"


# --- start and stop --------------------------------------------------------------------------------------------------


class Story(AsyncOperator):
    calls: list[Any]
    fails_in = ""

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name))
        if self.fails_in == what:
            raise ValueError(what)

    async def start(self) -> None:
        self._note("start")

    async def process_record(self, context: Any, record: int) -> int:
        self._note("process")
        return record

    async def stop(self) -> None:
        self._note("stop")


@pytest.mark.parametrize(
    ("fails_in", "story"),
    [("", ["start", "process", "stop"]), ("start", ["start"]), ("process", ["start", "process", "stop"])],
)
def test_an_operator_stops_if_it_has_started(peer: Peer, fails_in: str, story: list[str]) -> None:
    calls: list[Any] = []
    made = type("Made", (Story,), {"calls": calls, "fails_in": fails_in})
    task, connection = run(peer, concurrently(made), [1])
    connection.finish()
    if fails_in:
        assert str(task.error()) == fails_in
    else:
        assert task.outputs() == [1]
    assert [what for what, _ in calls] == story
    assert {thread for _, thread in calls} == {f"headgate-loop-{TASK_ID}"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_lifespan_ends_after_the_calls(peer: Peer, fails: bool) -> None:
    story = []

    class Session:  # a generator that nobody ends would end with the loop
        async def __aenter__(self) -> str:
            story.append("opened")
            return "the session"

        async def __aexit__(self, *raised: object) -> None:
            story.append("closed")

    async def call(given: str, record: int) -> str:
        story.append(f"{record} with {given}")
        if fails:
            raise ValueError
        return given

    task, connection = run(peer, concurrently(call, lifespan=Session), [1])
    connection.finish()
    if fails:
        assert isinstance(task.error(), ValueError)
    else:
        assert task.outputs() == ["the session"]
    assert story == ["opened", "1 with the session", "closed"]


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "no uvloop"])
def test_a_record_knows_its_task_whatever_the_loop_is(
    peer: Peer, uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)

    async def call(context: RecordContext, record: int) -> list[Any]:
        return [context.operator_id, context.subtask, context.attempt, context.parallelism, context.tries]

    task, connection = run(peer, concurrently(call), [1])
    connection.finish()
    assert task.outputs() == [["words", 2, 0, 4, 1]]


def test_events_are_handled_on_the_loop(peer: Peer) -> None:
    class Waiting(AsyncOperator):
        async def start(self) -> None:
            self.rules: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def handle_event(self, event: Any) -> None:
            self.rules.set_result((event, asyncio.get_running_loop() is self.rules.get_loop()))

        async def process_record(self, context: Any, record: int) -> Any:
            began.set()
            return list(await self.rules)

    began = threading.Event()
    task, connection = run(peer, concurrently(Waiting), [1])
    assert began.wait(PATIENCE_S)
    connection.send(connection.event(1, "rules"))
    assert isinstance(connection.receive(), Confirm)
    assert peer.finish(task) == [["rules", True]]
