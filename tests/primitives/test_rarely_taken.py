# SPDX-License-Identifier: Apache-2.0

"""Branches of the ready-made parts that no other quick test takes: refusals, old states, and what rarely happens.

`make coverage` lists those that remain.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from struct import pack
from threading import Barrier, Event
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headgate import (
    Budget,
    Cache,
    Group,
    OperatorCoordinator,
    Permits,
    SharedValue,
    SubtaskContext,
    SubtaskOperator,
    WorkQueue,
    chain,
    concurrently,
)
from headgate.errors import PeerLost, RequestFailed, TimedOut
from headgate.testing import running_operator
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.facts import StageLook
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import encode_event
from protocol.wire.keys import Key
from protocol.wire.messages import RestoreMode
from protocol.wire.state import encode_state
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.primitives.chain import Chain, composed
from spark_bridge.primitives.counters import book as counters_book
from spark_bridge.primitives.counters.book import BUCKETS_A_STEP, Book, bucket_of
from spark_bridge.primitives.counters.driver import CountersCoordinator
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.primitives.group.arrays import direct_bytes
from spark_bridge.primitives.group.messages import (
    Admitted,
    Broken,
    Call,
    Fetch,
    GiveUp,
    Join,
    Leave,
    Question,
    Values,
    Yours,
    parse_event,
    parse_request,
)
from spark_bridge.primitives.group.ring import Ring, _send, _Stranger
from spark_bridge.primitives.group.task import GroupPart, free_address
from spark_bridge.primitives.permits import driver as permits_driver
from spark_bridge.primitives.permits.schedule import RateSchedule
from spark_bridge.primitives.permits.task import PermitsPart, PermitUse
from spark_bridge.primitives.shared_value import driver as shared_driver
from spark_bridge.primitives.shared_value.files import FOLDER, ValueFiles
from spark_bridge.primitives.shared_value.task import SharedValuePart
from spark_bridge.primitives.waiting import finished
from spark_bridge.subtask.parts import current_part
from tests.primitives.histories import until_done
from tests.primitives.stand_ins import open_alone
from tests.spark_bridge.sinks.memory import MemorySink, Server

pytestmark = pytest.mark.anyio

KEY = bytes(32)


# --- chains and names ---------------------------------------------------------------------------------------------


class Passing(SubtaskOperator):
    """Passes its records on."""


async def an_asynchronous_function(records: Iterator[Any]) -> None:
    """No stage is one."""


@pytest.mark.parametrize(
    ("stages", "error", "text"),
    [
        ({}, ValueError, "at least one stage"),
        ({"a": (None, Passing, 3)}, TypeError, "stage 'a' has 3 values, but it is a pair"),
        ({"a": Passing()}, TypeError, "stage 'a' has an operator, but each task makes its own: pass the class"),
        ({"a": Passing, "b": 5}, TypeError, "stage 'b' is 5: pass"),
        ({"a": dict}, TypeError, "stage 'a' is <class 'dict'>: pass"),
        ({"a": partial(an_asynchronous_function)}, TypeError, "stage 'a' is functools.partial"),
        ({"headgate.a": Passing}, ValueError, "names that begin with 'headgate.' are reserved"),
        ({"x" * 201: Passing}, ValueError, "a str of 1 to 200 characters"),
    ],
)
def test_what_is_not_a_chain_is_refused_with_what_to_pass(
    stages: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        chain(**stages)


def test_a_stage_is_a_pair_or_an_object_with_both_halves_or_an_operator_alone() -> None:
    both = SimpleNamespace(coordinator="the driver's", operator=Passing)
    pair: Any = ("of the pair", Passing)
    made = chain(pair=pair, ready=both, alone=partial(Passing), function=lambda records: records)
    assert isinstance(made, Chain)
    assert repr(made) == "<chain pair -> ready -> alone -> function>"
    given: dict[str, Any] = dict(made.coordinators)
    assert (given["pair"], given["ready"]) == ("of the pair", "the driver's")


# --- groups -------------------------------------------------------------------------------------------------------


async def test_a_task_that_could_not_say_that_it_has_left_joins_as_if_for_the_first_time() -> None:  # H102
    group = Group("train")

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        if context.subtask == 0:
            with pytest.raises(TimedOut):
                current_part("group", "train").context.request(Join("h", 1).as_event(), timeout_s=1.0)
        with group as member:
            yield member.all_gather(member.rank)

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(0, run, [])]
        await world.advance(2.0)
        tasks.append(await world.launch_operator(1, run, []))
        await until_done(world, tasks)
    assert [task.outputs for task in tasks] == [[[0, 1]]] * 2
    assert group.generation == 1


async def test_a_call_that_is_out_of_turn_fails_and_leaves_no_open_reply() -> None:  # H103
    group = Group("train", 1)

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with group as member:
            with pytest.raises(RequestFailed, match="called in round 5"):
                current_part("group", "train").context.request(Call(1, 5, "barrier()", None).as_event())
            with pytest.raises(RequestFailed, match="the checkpoint of step 7 was replaced by a later one"):
                current_part("group", "train").context.request(Fetch(7, 0).as_event())
            with member.guard(), pytest.raises(LocalProtocolError, match=r"inside guard\(\) already"):
                member.xgboost()
            assert repr(member) == "<GroupMember rank=0 world_size=1 generation=1>"
            yield None

    async with running_operator(parallelism=1, uses=[group]) as world:
        await until_done(world, [await world.launch_operator(0, run, [])])
        assert group._latest is not None
        assert group._latest._replies == {}


def a_half(group: Group, *looks: StageLook) -> tuple[Any, list[str]]:
    """The driver's half of a group, whose runs compute this, and the reasons for which it fails the job."""
    failures: list[str] = []
    following = iter(looks)

    async def look_at_run() -> StageLook:
        return next(following)

    half: Any = group.coordinator("op")
    context = SimpleNamespace(parallelism=2, mode=RestoreMode.BATCH, look_at_run=look_at_run, fail_job=failures.append)
    context.clock, context.handles_restored = SimpleNamespace(now=lambda: 0.0), False
    context.log, context.call_later = SimpleNamespace(info=lambda *args, **more: None), lambda *args: None
    asyncio.run(half.start(context))
    return half, failures


BOTH = frozenset({0, 1})


def test_a_state_of_another_part_is_refused() -> None:  # H80 H164
    half, _ = a_half(Group("train", 2))
    for state in (b"rubbish", encode_state("a group", {"of another": 1})):
        with pytest.raises(LocalProtocolError, match="a state of 'train' that is not that of a group"):
            asyncio.run(half._decoded(state))


def test_an_action_that_computes_too_few_partitions_for_a_group_fails_and_says_so() -> None:  # H102
    half, failures = a_half(Group("train", 2), StageLook(frozenset({0}), 2))
    asyncio.run(half.subtask_ready(0, None))
    assert len(failures) == 1
    assert "computes only 1 of 2 partitions, as take() and first() do" in failures[0]


def test_an_elastic_group_needs_only_its_least_size_of_partitions() -> None:  # H102 H109
    half, failures = a_half(Group("train", min_size=1, max_size=2), StageLook(frozenset({0}), 2))
    asyncio.run(half.subtask_ready(0, None))
    assert failures == []


def test_a_task_that_computes_again_what_spark_has_lost_is_a_member_alone() -> None:  # H105 H106
    lost = StageLook(frozenset({1}), 2, frozenset({5}), frozenset({5}))
    half, failures = a_half(Group("train", 2), StageLook(BOTH, 2, frozenset({5})), lost)
    asyncio.run(half.subtask_ready(0, None))
    half.checkpoint = checkpoint = object()
    asyncio.run(half.run_ended(1, True, ""))
    asyncio.run(half.subtask_ready(1, None))
    assert (failures, half.checkpoint) == ([], checkpoint)
    half.checkpoint = None
    asyncio.run(half.handle_request(1, 7, Join("h", 1).as_event()))
    assert half._replies == {}, "it waits for nobody"


def test_a_worker_of_xgboost_leaves_what_it_has_joined_and_is_woken_unless_it_has_left_properly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H104
    from spark_bridge.primitives.group import xgboost_group

    calls: list[str] = []
    given: list[dict[str, Any]] = []

    def leave() -> None:
        calls.append("left")
        if broken:
            raise OSError("the tracker is gone")

    def make(**arguments: Any) -> Any:
        given.append(arguments)
        return context

    broken = False
    context = SimpleNamespace(__enter__=lambda: calls.append("joined"), __exit__=leave)
    monkeypatch.setattr(xgboost_group, "CommunicatorContext", make)
    monkeypatch.setattr(xgboost_group, "get_rank", lambda: 1)
    guard: Any = SimpleNamespace(wake=lambda: calls.append("woken"))

    def work(*steps: str, rank: int = 1) -> list[str]:
        calls.clear()
        with xgboost_group.Worker({"dmlc_tracker_port": 7}, rank, 4.5, guard) as worker:
            for step in steps:
                getattr(worker, step)()
        return list(calls)

    assert work("begin", "end") == ["joined", "left"]
    assert work("begin") == ["joined", "left", "woken"]
    assert work() == ["woken"]
    with pytest.raises(LocalProtocolError, match="XGBoost has given rank 1 to the member of rank 0"):
        work("begin", rank=0)
    assert calls == ["joined", "left", "woken"]
    broken = True
    with pytest.raises(OSError, match="the tracker is gone"):
        work("begin", "end")
    assert calls == ["joined", "left", "woken"]
    arguments = {"dmlc_tracker_port": 7, "dmlc_retry": 1, "dmlc_timeout": 5, "dmlc_task_id": "0000000001"}
    assert given == [arguments] * 3 + [{**arguments, "dmlc_task_id": "0000000000"}, arguments]


def test_with_tls_no_other_library_connects_members() -> None:
    part = GroupPart("train", 60.0)
    endpoint = TaskEndpoint("127.0.0.1", 9, Key(bytes(16), bytes(32)), "op", 1, certificate_sha256=b"x" * 32)
    open_alone(part, SimpleNamespace(endpoint=endpoint))
    with pytest.raises(
        LocalProtocolError, match=r"xgboost\(\) would send the data of this group over connections that"
    ):
        part.check_foreign("xgboost()")
    assert part.listen() is None


class Meeting:
    """The driver's half of a group whose members are threads here: all come, and nobody is lost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[Any] = []
        self.asked: list[Any] = []
        self.admits = True
        self.silent = False
        self._values: dict[tuple[int, int], Any] = {}
        self._together = Barrier(size)

    def part(self, rank: int) -> GroupPart:
        endpoint = TaskEndpoint("127.0.0.1", 9, Key(bytes(16), bytes(32)), "op", 1)
        context = SimpleNamespace(
            endpoint=endpoint, request=partial(self._request, rank), send_event=self._hear, now=monotonic
        )
        part = GroupPart("train", 60.0)
        open_alone(part, context)
        return part

    def _hear(self, event: Any) -> None:
        self.events.append(parse_event(event))

    def _request(self, rank: int, event: Any, timeout_s: float) -> Any:
        self.asked.append(event)
        if self.silent:
            raise TimedOut("no answer")
        match parse_request(event):
            case Join() if not self.admits:
                return Broken(1, "the driver says so").as_event()
            case Join(host, port):
                assert (host, port > 0) == ("127.0.0.1", True)
                return Admitted(1, rank, self.size, host, port, KEY, -1, 0).as_event()
            case Call(_, round_, _, value):
                self._values[round_, rank] = value
                self._together.wait(60.0)
                return Values(tuple(self._values[round_, one] for one in range(self.size)), 0).as_event()
            case Question():
                return Yours().as_event()
            case other:
                raise AssertionError(other)


def in_threads(size: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, range(size), timeout=60.0))


def test_members_reduce_large_arrays_over_their_connections_and_close_them_when_they_leave() -> None:  # H108
    meeting = Meeting(2)
    parts = [meeting.part(rank) for rank in range(2)]

    def work(rank: int) -> list[socket.socket]:
        member = parts[rank].enter()
        for _ in range(2):
            total = member.all_reduce(np.full(direct_bytes(2), rank + 1))
            assert (total == 3).all()
        ring = member._ring
        assert ring is not None
        parts[rank].leave(None)
        parts[rank].leave(None)  # it has left
        return ring._sockets

    for sockets in in_threads(2, work):
        assert [one.fileno() for one in sockets] == [-1, -1]
    assert meeting.events == [Leave(1, ""), Leave(1, "")]


def test_each_collective_has_its_whole_time() -> None:
    meeting = Meeting(2)
    parts = [meeting.part(rank) for rank in range(2)]
    members = in_threads(2, lambda rank: parts[rank].enter())
    for _ in range(2):
        in_threads(2, lambda rank: members[rank].all_reduce(np.zeros(1_000_000)))
        for member in members:
            assert member._ring is not None
            member._ring._until = 0.0  # the time of this one is over
    for part in parts:
        part.leave(None)


def test_a_member_that_waits_for_data_of_a_lost_one_raises_peer_lost_and_its_later_calls_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H104 H176
    meeting, waits, exchange = Meeting(2), Event(), Ring.exchange
    parts = [meeting.part(rank) for rank in range(2)]
    members = in_threads(2, lambda rank: parts[rank].enter())
    in_threads(2, lambda rank: members[rank].all_reduce(np.zeros(direct_bytes(2))))

    def watched(ring: Ring, out: memoryview, into: memoryview) -> None:
        waits.set()
        exchange(ring, out, into)

    monkeypatch.setattr(Ring, "exchange", watched)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(members[0].all_reduce, np.zeros(direct_bytes(2)))
        waits.wait(60.0)
        parts[0].handle_urgent(Broken(1, "subtask 1 is gone").as_event())
        lost = future.exception(60.0)
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.__cause__, OSError)
    assert meeting.events == [], "its generation is broken, so it need not say that it has given up"
    with pytest.raises(LocalProtocolError, match="an earlier call ended with "):
        members[0].barrier()
    for part in parts:
        part.leave(None)


def test_a_ring_in_which_nothing_comes_times_out_and_says_what_to_do() -> None:
    one, peer = socket.socketpair()
    ring = Ring(0, 2, KEY, 0.1)
    ring._left = ring._right = one
    ring.begin()
    with (
        one,
        peer,
        pytest.raises(TimedOut, match="rank 0 of the group waits for rank 1 to send the rest"),
    ):
        ring.exchange(memoryview(b""), memoryview(bytearray(1)))


def test_a_ring_whose_neighbour_does_not_come_times_out_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(0, 2, KEY, 0.3)
    one, peer = socket.socketpair()
    monkeypatch.setattr(ring, "_dial", lambda address: one)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, one, peer, pytest.raises(TimedOut, match="rank 1 of the group did not connect to rank 0 within"):
        ring.connect(listener, [("127.0.0.1", 1)] * 2)


def test_a_stranger_that_has_said_nothing_yet_stays_and_one_whose_connection_is_gone_does_not() -> None:  # H158
    one, peer = socket.socketpair()
    one.setblocking(False)
    with one, peer:
        stranger = _Stranger(one, Ring(0, 2, KEY, 1.0)._handshake(one))
        assert stranger.read()
        one.close()
        assert not stranger.read()
    with pytest.raises(ConnectionError, match="which does not read"):
        _send(cast("socket.socket", SimpleNamespace(send=lambda data: len(data) - 1)), b"some bytes")


def test_what_must_not_wait_says_so_if_it_does() -> None:
    with pytest.raises(RuntimeError, match="an async function was suspended, although its waits block"):
        finished(asyncio.sleep(0))


def test_a_sink_of_failures_is_a_part_beside_the_stages() -> None:
    async def work(record: Any) -> Any: ...

    sink = MemorySink(Server(), "failed")
    made = chain(work=concurrently(work, on_error=sink), write=MemorySink(Server(), "rows"))
    assert made.stages == ("work", "write")
    assert list(made.coordinators) == ["work", "work.failures", "write"]
    assert list(made.beside) == ["work.failures"]
    assert cast("Any", made.operators["work"]).func.failures_to == "work.failures"


def test_an_address_is_free_and_that_of_a_simulated_task_is_none() -> None:
    host, port = free_address("127.0.0.1", 9)
    with socket.create_server((host, port)) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_an_answer_that_is_none_is_an_error_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="unexpected answer of the group 'train'"):
        GroupPart("train", 1.0).lose(Yours())


# --- counters -----------------------------------------------------------------------------------------------------


def test_counters_that_cannot_look_at_a_run_count_it_as_a_new_one_and_fail_nothing() -> None:  # H101
    half: Any = CountersCoordinator()
    warnings: list[str] = []

    async def fails() -> StageLook:
        raise OSError("Spark does not answer")

    log = SimpleNamespace(warning=lambda event, **more: warnings.append(f"{event}: {more['error']}"))
    half._context = SimpleNamespace(mode=RestoreMode.BATCH, look_at_run=fails, log=log)
    half._run_over, half._attempts = True, {"of the run before": 1}
    asyncio.run(half._meet_run())
    assert half._attempts == {}
    assert warnings == ["counters restarted, partitions of the run unknown: OSError: Spark does not answer"]


def test_counts_that_find_no_capacity_leave_with_the_next_report() -> None:  # H101
    sent: list[Any] = []
    full = [True]

    def send(event: Any) -> None:
        if full[0]:
            raise GatewayFull("no capacity")
        sent.append(event)

    part = CountersPart()
    now = [100.0]
    part.open(cast("SubtaskContext", SimpleNamespace(now=lambda: now[0], send_event_nowait=send)), None)
    part.count("rows", 3)
    full[0], now[0] = False, 200.0
    part.count("others", 1)
    ((_, reported),) = sent
    assert "rows" in str(reported)
    assert "others" in str(reported)


# --- shared values ------------------------------------------------------------------------------------------------


def test_an_earlier_version_that_was_applied_is_not_the_one_that_is_waited_for() -> None:  # H110
    half = shared_driver._Coordinator(SharedValue("rules", 1), "op")
    half._context = cast("Any", SimpleNamespace(handles_restored=False))
    applied = shared_driver._Applied(3, [])
    applied.expect(half, [ExecutionAttempt("op", 0, 0, 7)])
    half._waiting.append(applied)
    for version, is_over in ((2, False), (3, True)):
        asyncio.run(half.handle_event_from_operator(0, 0, ["applied", version]))
        assert applied.is_over is is_over


def test_a_folder_that_cannot_be_made_is_as_if_there_were_no_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "blockmgr-1"
    local.mkdir()
    (local / FOLDER).write_text("a file is in the way")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    assert ValueFiles.of_executor() is None


def test_a_chunk_out_of_order_is_refused() -> None:
    part = SharedValuePart("model")
    part.handle_urgent(["chunk", 1, False, 0, 3, b"a"])
    with pytest.raises(ValueError, match="chunk 2 of shared value 'model' arrived instead of chunk 1"):
        part.handle_urgent(["chunk", 1, False, 2, 3, b"c"])


def test_a_value_that_a_program_elsewhere_sets_is_the_next_version() -> None:
    shared: SharedValue[Any] = SharedValue("rules", 1)
    half = shared_driver._Coordinator(shared, "op")
    assert asyncio.run(half.handle_client_request("new")) == 2
    assert shared.get() == "new"


class Full(list[Any]):
    """The gateways of an operator one of whose tasks is slow."""

    def broadcast_nowait(self, event: Any, *, urgent: bool) -> None:
        raise GatewayFull("a task is slow")

    def broadcast(self, event: Any, *, urgent: bool) -> Any:
        return event, urgent


def told_in_the_background(tell: Callable[[Any], object]) -> Any:
    """Let a half of an operator tell its tasks something, and return what it sends, after a look at its handler."""
    begun: list[Any] = []
    tell(SimpleNamespace(gateways=Full(), run_in_background=lambda act, handler: begun.append((act(), handler))))
    (((event, urgent), handler),) = begun
    assert urgent
    asyncio.run(handler(None, None))
    with pytest.raises(OSError, match="gone"):
        asyncio.run(handler(None, OSError("gone")))
    return event


def test_a_value_for_a_slow_task_is_sent_in_the_background_and_a_failure_there_is_raised() -> None:
    shared = SharedValue("rules", 1)

    def publish(context: Any) -> None:
        half = shared_driver._Coordinator(shared, "op")
        half._context = context
        asyncio.run(half._publish(shared.attach(half), None))

    assert told_in_the_background(publish)[:2] == ["value", 1]


def test_that_slots_are_wanted_is_told_in_the_background_if_a_task_is_slow() -> None:
    def tell(context: Any) -> None:
        half = permits_driver._Coordinator("slots", cast("Any", SimpleNamespace(changes=3, contended=True)), "op")
        half.context = context
        half.tell_contended()

    assert told_in_the_background(tell) == ["contended", 3, True]


def test_files_that_cannot_be_used_are_as_if_there_were_none(tmp_path: Path) -> None:
    files = ValueFiles(tmp_path / "removed by Spark")
    assert files.begin(b"digest") is None
    assert files.read(b"digest") is None
    assert files.progress(b"digest") == 0
    files.remove_old()


# --- work queues --------------------------------------------------------------------------------------------------


def test_a_state_of_before_that_ends_too_early_is_refused() -> None:  # H164
    queue: WorkQueue[Any] = WorkQueue("tree", ["root"])
    value = encode_event("an item")
    state = pack(">IIQQqI", 1, 0, 3, 3, 0, len(value)) + value  # one id that was seen, and its item
    queue._enumerator(state)
    for cut in (1, 8, len(state) - 9):
        with pytest.raises(LocalProtocolError, match="a state of 'tree' that is not that of a work queue"):
            queue._enumerator(state[:-cut])


# --- numbers that no task sends -----------------------------------------------------------------------------------


def cache_half() -> OperatorCoordinator:
    return Cache("geocode").coordinator("words")


def permits_half() -> OperatorCoordinator:
    return Permits("api", per_s=1.0, burst=5).coordinator("words")


def budget_half() -> OperatorCoordinator:
    return Budget("tokens", 100).coordinator("words")


@pytest.mark.parametrize(
    ("half", "message"),
    [
        (cache_half, ["get", 0, b""]),
        (cache_half, ["put", 0, b"", b""]),
        (permits_half, ["acquire", 0, False, 1.0, 1]),
        (permits_half, ["acquire", 1, False, -0.1, 1]),
        (permits_half, ["acquire", 1, False, 1.0, 0]),
        (permits_half, ["acquire", 1, False, 1.0, 6]),
        (budget_half, ["reserve", 0, 1, 1.0]),
        (budget_half, ["reserve", 1, 1, -0.1]),
        (budget_half, ["reserve", 1, 0, 1.0]),
    ],
)
async def test_a_request_with_numbers_that_no_task_sends_is_refused(
    half: Callable[[], OperatorCoordinator], message: list[Any]
) -> None:
    with pytest.raises(RemoteProtocolError, match="not a request for"):
        await half().handle_request(0, 0, message)


@pytest.mark.parametrize(
    ("half", "message"),
    [
        (cache_half, ["end", 0, False]),
        (cache_half, ["hits", -1]),
        (cache_half, ["hits", 2**40]),
        (permits_half, ["give up", 0]),
        (permits_half, ["correct", 0, 1, 1]),
        (permits_half, ["correct", 1, 0, 1]),
        (permits_half, ["correct", 1, 6, 1]),
        (permits_half, ["correct", 1, 1, -1]),
    ],
)
async def test_an_event_with_numbers_that_no_task_sends_is_refused(
    half: Callable[[], OperatorCoordinator], message: list[Any]
) -> None:
    with pytest.raises(RemoteProtocolError, match="not an event of"):
        await half().handle_event_from_operator(0, 0, message)


@pytest.mark.parametrize("is_over", [False, True], ids=["waits", "is over"])
async def test_a_correction_serves_a_request_that_waits_and_one_that_is_over_takes_nothing(is_over: bool) -> None:
    half: Any = Permits("tokens", per_s=1.0, burst=10).coordinator("op")
    half.context = half.clock = SimpleNamespace(now=lambda: 0.0, call_later=lambda *_: None, gateways=None)
    await half._desk.attach(half)
    replies = [
        await half.handle_request(0, 0, ["acquire", number, False, 600.0, weight])
        for number, weight in ((1, 10), (2, 5), (3, 5))
    ]
    assert [reply.settled for reply in replies] == [True, True, False]
    if is_over:
        replies[2]._recipient = SimpleNamespace(over=True)
    await half.handle_event_from_operator(0, 0, ["correct", 1, 10, 0])
    assert half._desk._replies == {}
    assert replies[2].settled == (not is_over)
    assert half._desk.book._schedule.due(0.0, 10) == (0.0 if is_over else 15.0)


@pytest.mark.parametrize(("asked", "really", "next_at_s"), [(1, 5, 5.0), (5, 1, 1.0)])
async def test_the_first_use_of_a_task_is_corrected(asked: int, really: int, next_at_s: float) -> None:
    permits = Permits("tokens", per_s=1.0, burst=5)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[float]:
        begun = context.now()
        with permits.weight(asked) as used:
            used.correct(really)
        with permits.weight(5):
            yield context.now() - begun

    async with running_operator(parallelism=1, uses=[permits]) as world:
        task = await world.launch_operator(0, call, [])
        await until_done(world, [task])
        assert task.outputs == [pytest.approx(next_at_s)]


# --- figures ------------------------------------------------------------------------------------------------------


def test_the_figures_of_an_operator_are_those_of_its_parts_that_have_some() -> None:
    parts = [SharedValue("rules", 1), Permits("slots", concurrency=2), Group("train"), WorkQueue("tree", [])]
    assert composed("op", OperatorCoordinator, parts).figures() == {"rules": {"version": 1}, "slots": {"in_use": 0}}


# --- limits of counts ---------------------------------------------------------------------------------------------


def test_a_value_in_one_bucket_too_many_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_book, "BUCKETS_MAX", 3)
    book = Book()
    for name, value in (("a", 1.0), ("a", 2.0), ("b", 3.0), ("a", 1.0), ("b", 3.0)):
        book.observe(name, value)
    before = book.to_bytes()
    for name, value in (("a", 4.0), ("b", 1.0), ("c", 1.0)):
        with pytest.raises(ValueError, match=f"may have 3 buckets, .* '{name}' needs one more: observe under fewer"):
            book.observe(name, value)
        assert book.to_bytes() == before
    book.check_names()
    monkeypatch.setattr(counters_book, "BUCKETS_MAX", 2)
    with pytest.raises(RemoteProtocolError, match="3 buckets of distributions, which are more than 2"):
        book.check_names()


def test_a_report_is_checked_in_steps_and_to_its_end() -> None:  # H157
    book = Book()
    for number in range(3 * BUCKETS_A_STEP):
        book.observe("a", 1.1**number)
    assert len(list(book.check_in_steps())) == book.buckets // BUCKETS_A_STEP > 1
    book.observed["a"][4][bucket_of(1.0)] = -1
    with pytest.raises(RemoteProtocolError, match="the distribution 'a' has impossible buckets"):
        list(book.check_in_steps())


# --- a member of a group alone ------------------------------------------------------------------------------------


def test_what_a_member_has_kept_is_freed_when_the_next_generation_has_begun_or_its_task_ends() -> None:  # H104
    part, freed = Meeting(1).part(0), list[str]()
    part.enter()
    part.keep(partial(freed.append, "of the first"))
    part.leave(PeerLost(1, "a peer is gone"))
    assert freed == []
    part.enter()
    assert freed == ["of the first"]
    part.keep(partial(freed.append, "of the second"))
    part.leave(None)
    part.close()
    part.close()
    assert freed == ["of the first", "of the second"]


@pytest.mark.parametrize("error", [PeerLost(1, "gone"), AttemptOver("superseded")])
def test_a_loss_that_is_known_is_not_judged_again(error: Exception) -> None:  # H107
    meeting = Meeting(1)
    part = meeting.part(0)
    asked = len(meeting.asked)
    with pytest.raises(type(error)) as raised, part.judging(1):
        raise error
    assert raised.value is error
    assert len(meeting.asked) == asked
    own = ValueError("its own")
    with pytest.raises(ValueError, match="its own") as raised_too, part.judging(1):
        raise own
    assert raised_too.value is own
    assert meeting.asked[asked:] == [Question(1).as_event()]


def test_one_that_gets_a_loss_in_place_of_a_generation_leaves_and_raises_it() -> None:
    meeting = Meeting(1)
    meeting.admits = False
    part = meeting.part(0)
    with pytest.raises(PeerLost, match="the driver says so"):
        part.enter()
    (left,) = meeting.events
    assert left.generation == 0
    assert "the driver says so" in left.error


@pytest.mark.parametrize("size", [1, direct_bytes(2)])
def test_a_reduction_that_times_out_raises_that_and_gives_up(size: int) -> None:
    meeting = Meeting(2)
    part = meeting.part(0)
    member = part.enter()
    meeting.silent = True
    with pytest.raises(TimedOut, match="did not make the same call within 60 s"):
        member.all_reduce(np.zeros(size, np.uint8))
    assert meeting.events == [GiveUp(1)] * 2, "the call and the reduction"
    with pytest.raises(LocalProtocolError, match="an earlier call ended with TimedOut"):
        member.barrier()


def test_a_member_cannot_broadcast_from_a_rank_that_there_is_not() -> None:
    member = Meeting(1).part(0).enter()
    with pytest.raises(ValueError, match="root must be an int of at least 0, not -1"):
        member.broadcast(1, root=-1)
    with pytest.raises(ValueError, match="root must be a rank from 0 to 0, not 1"):
        member.broadcast(1, root=1)
    assert member.broadcast(1, root=0) == 1


class Stub:
    """Stands for a class of another library's module, and notes how it is made and called, with numbers and texts."""

    port = 1234

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def __call__(self, *arguments: Any) -> Stub:
        shown = (str(one) if isinstance(one, int | str) else type(one).__name__ for one in arguments)
        self._notes.append(" ".join([self._name, *shown]))
        return self

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self._notes.append(f"{self._name} left")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> dict[str, Any]:
            self._notes.append(" ".join([self._name, name, *map(str, arguments)]))
            return {}

        return call


@pytest.mark.parametrize(
    ("library", "rank", "steps"),
    [
        (
            "xgboost",
            0,
            "tracker host 2|tracker arguments|broadcast|frees and may end|worker dict 0 float SocketGuard|worker begin|"
            "work|worker end|worker left|barrier|tracker free",
        ),
        (
            "xgboost",
            1,
            "broadcast|frees and may end|worker dict 1 float SocketGuard|worker begin|work|worker end|worker left|"
            "barrier",
        ),
        (
            "torch",
            0,
            "installed|store host 2 float|broadcast|frees and may end|group 0 2 float|group begin host 1234|work|"
            "barrier|group end|group left",
        ),
        (
            "torch",
            1,
            "installed|broadcast|frees and may end|group 1 2 float|group begin host 1234|work|barrier|group end|"
            "group left",
        ),
    ],
)
def test_members_enter_another_library_together_and_wait_for_each_other_before_they_free_anything(
    library: str, rank: int, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H104
    from spark_bridge.primitives.group import torch_group, xgboost_group

    notes: list[str] = []
    monkeypatch.setattr(xgboost_group, "Tracker", Stub(notes, "tracker"))
    monkeypatch.setattr(xgboost_group, "Worker", Stub(notes, "worker"))
    monkeypatch.setattr(torch_group, "check_installed", lambda: notes.append("installed"))
    monkeypatch.setattr(torch_group, "Store", Stub(notes, "store"))
    monkeypatch.setattr(torch_group, "ProcessGroup", Stub(notes, "group"))
    meeting = Meeting(1)
    part = meeting.part(0)
    member = part.enter()
    member.rank, member.world_size, member.store_address = rank, 2, ("host", 0)
    freeing = part.freeing

    def noted(**given: Any) -> Any:
        notes.append("frees and may end" if given["may_end"] else "frees")
        return freeing(**given)

    monkeypatch.setattr(part, "freeing", noted)

    def answer(kind: str, value: Any) -> tuple[Any, ...]:
        notes.append(kind.partition("(")[0])
        return (encode_event(1234 if library == "torch" else {}),)

    monkeypatch.setattr(member, "_call", answer)
    with getattr(member, library)():
        notes.append("work")
        with pytest.raises(LocalProtocolError, match=r"inside guard\(\) already"), getattr(member, library)():
            pass
    assert notes == steps.split("|")
    part.task = cast("Any", SimpleNamespace(endpoint=replace(part.task.endpoint, certificate_sha256=b"x" * 32)))
    with pytest.raises(LocalProtocolError, match=rf"{library}\(\) would send the data of this group over connections"):
        getattr(member, library)()
    part.leave(None)
    for call in (getattr(member, library), member.guard):
        with pytest.raises(LocalProtocolError, match="this member cannot call any more"):
            call()


# --- permits ------------------------------------------------------------------------------------------------------


async def test_after_a_use_with_a_weight_the_driver_says_that_nothing_is_held_ahead() -> None:
    half: Any = Permits("tokens", per_s=1000.0, burst=500).coordinator("op")
    sent: list[Any] = []

    async def send(subtask: int, event: Any, *, attempt: int, urgent: bool) -> None:
        assert (subtask, attempt, urgent) == (3, 7, True)
        sent.append(event)

    half.context = half.clock = SimpleNamespace(gateways=SimpleNamespace(send=send), now=lambda: 0.0)
    await half.handle_event_from_operator(3, 7, ["more", 4])
    await half.handle_request(3, 7, ["acquire", 1, False, 60.0, 2])
    await half.handle_event_from_operator(3, 7, ["more", 4])
    assert sent == [["permits", [0.0] * 4], ["permits", None]]


def test_a_task_that_is_told_so_asks_for_nothing_ahead_any_more() -> None:
    line = SimpleNamespace(now=lambda: 0.0, more=[])
    line.send_event_nowait = line.more.append
    line.request = lambda payload, timeout_s: 0.0
    part = PermitsPart("tokens", 500, False, True)
    open_alone(part, line)
    part.acquire(1, 60.0)
    assert line.more == [["more", 2]]
    part.handle_urgent(["permits", None])
    part.acquire(1, 60.0)
    assert line.more == [["more", 2]]


def test_a_task_whose_permit_would_come_too_late_asks_again_until_its_time_is_over() -> None:
    time, answers, asked = [0.0], [None, None, 0.5], list[float]()

    def request(payload: list[Any], timeout_s: float) -> float | None:
        asked.append(payload[3])
        return answers.pop(0)

    def sleep(seconds: float) -> None:
        time[0] += seconds

    part = PermitsPart("tokens", 500, False, False)
    line = SimpleNamespace(now=lambda: time[0], request=request, sleep=sleep, send_event=lambda event: None)
    line.timed_out = TimedOut
    open_alone(part, line)
    part.acquire(1, 60.0)
    assert asked[0] == 60.0 > asked[1] > asked[2] > 0.0
    answers += [None] * 50
    with pytest.raises(TimedOut):
        part.acquire(1, 10.0)
    assert len(answers) > 30


def test_a_use_that_weighs_what_it_asked_for_says_nothing_to_the_driver() -> None:
    sent: list[Any] = []
    line = SimpleNamespace(now=lambda: 0.0, request=lambda payload, timeout_s: 0.0, send_event=sent.append)
    part = PermitsPart("tokens", 500, False, False)
    open_alone(part, line)
    for weight in (5, 4):
        with PermitUse(lambda: part, 5, 60.0) as used:
            used.correct(weight)
    assert sent == [["correct", 2, 5, 4]]


def test_what_is_held_ahead_and_was_handed_out_under_other_rules_does_not_come_back() -> None:  # H111
    schedule = RateSchedule(1000.0, 500)
    before = [schedule.take(0.0) for _ in range(3)]
    schedule.stop_sharing(0.0)
    due = schedule.due(0.0, 500)
    for one in before:
        schedule.give_back(one)
    assert schedule.due(0.0, 500) == due
    after = schedule.take(0.0, 500)
    assert schedule.shorten(after, 500) == after
    assert schedule.due(0.0, 500) > due, "a use that weighed what it asked for gives nothing back"
