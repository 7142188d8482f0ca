# SPDX-License-Identifier: Apache-2.0

"""The ring between members, on real connections (H108), and the guard that frees foreign code (H104)."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from protocol.wire.keys import Key
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.primitives.group import ring as ring_module
from spark_bridge.primitives.group.arrays import all_reduce, direct_bytes
from spark_bridge.primitives.group.guard import SocketGuard
from spark_bridge.primitives.group.messages import Broken, Question, Yours
from spark_bridge.primitives.group.ring import Ring, listen
from spark_bridge.primitives.group.task import GroupMember, GroupPart
from spark_bridge.subtask.errors import PeerLost, TimedOut
from tests.primitives.group_processes import Members
from tests.primitives.stand_ins import open_alone

KEY = bytes(32)


def rings(size: int) -> tuple[list[Ring], list[socket.socket]]:
    return [Ring(rank, size, KEY, 60.0) for rank in range(size)], [listen("127.0.0.1") for _ in range(size)]


def end(members: list[Ring], listeners: list[socket.socket]) -> None:
    for member in members:
        member.close()
    for listener in listeners:
        listener.close()


def connect_all(members: list[Ring], listeners: list[socket.socket]) -> None:
    addresses = [one.getsockname() for one in listeners]
    in_all(members, lambda rank, ring: ring.connect(listeners[rank], addresses))


def in_all(members: list[Ring], act: Callable[[int, Ring], Any]) -> list[Any]:
    """Call ``act`` in a thread for each member."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(act, rank, ring) for rank, ring in enumerate(members)]
        return [future.result(60.0) for future in futures]


@pytest.fixture
def connected() -> Iterator[Callable[[int], list[Ring]]]:
    made: list[Ring] = []

    def connect(size: int) -> list[Ring]:
        members, listeners = rings(size)
        made.extend(members)
        addresses = [one.getsockname() for one in listeners]
        in_all(members, lambda rank, ring: ring.connect(listeners[rank], addresses))
        for one in listeners:
            one.close()
        return members

    yield connect
    for ring in made:
        ring.close()


def reduced(members: list[Ring], arrays: list[Any], op: str = "sum") -> list[Any]:
    def gather(kind: str, data: bytes) -> list[bytes]:
        raise AssertionError("this goes through the driver")

    size = len(members)
    return in_all(members, lambda rank, ring: all_reduce(arrays[rank], op, rank, size, gather, lambda: ring))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("op", "function"), [("sum", np.add), ("max", np.maximum)])
def test_all_members_get_the_same_bits_and_the_same_ones_each_time(
    connected: Callable[[int], list[Ring]], size: int, op: str, function: Any
) -> None:
    arrays = [np.random.default_rng(rank).normal(size=(301, 211)) for rank in range(size)]
    members = connected(size)
    first, second = reduced(members, arrays, op), reduced(members, arrays, op)
    assert len({result.tobytes() for result in first + second}) == 1
    assert np.allclose(first[0], function.reduce(arrays), rtol=0, atol=1e-12)
    assert first[0].shape == (301, 211)
    again = reduced(connected(size), arrays, op)
    assert again[0].tobytes() == first[0].tobytes(), "another generation of as many members"


def test_an_array_that_fills_all_buffers_passes(connected: Callable[[int], list[Ring]]) -> None:
    arrays = [np.full(2_000_003, rank + 1, np.int64) for rank in range(3)]
    assert all((result == 6).all() for result in reduced(connected(3), arrays))


@pytest.mark.parametrize("size", [2, 8])
def test_a_few_numbers_go_through_the_driver_and_more_through_the_ring(size: int) -> None:
    """Both give the same sums. The driver's half is played: it has the arrays of all."""

    def through(elements: int) -> str:
        arrays = [np.full(elements, rank) for rank in range(size)]
        went: list[str] = []

        def gather(kind: str, data: bytes) -> list[bytes]:
            went.append("driver")
            return [array.tobytes() for array in arrays]

        def no_ring() -> None:
            went.append("ring")

        total = all_reduce(arrays[0], "sum", 0, size, gather, no_ring)
        assert (total == sum(range(size))).all()
        return went[0]

    least = direct_bytes(size) // 8
    assert [through(1), through(least - 1), through(least)] == ["driver", "driver", "ring"]


def reduce_again(member: GroupMember) -> str:
    array = np.ones(direct_bytes(member.world_size))
    member.all_reduce(array)
    asked = member._round
    total = member.all_reduce(array)
    return f"{total[0]:g}, {member._round - asked} calls of the driver"


def test_members_connect_once_and_the_next_arrays_do_not_touch_the_driver() -> None:  # H108
    members = Members([reduce_again, reduce_again])
    members.run()
    assert members.said == {0: [(1, "2, 0 calls of the driver")], 1: [(1, "2, 0 calls of the driver")]}


def test_arrays_of_another_shape_are_refused(connected: Callable[[int], list[Ring]]) -> None:
    arrays = [np.zeros((direct_bytes(2) // 8, 1 + rank)) for rank in range(2)]
    with pytest.raises(ValueError, match="shape, dtype and op must be the same"):
        reduced(connected(2), arrays)


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100)])
def test_a_stranger_that_connects_first_gets_nothing(hello: bytes) -> None:
    members, listeners = rings(2)
    addresses = [one.getsockname() for one in listeners]
    with socket.create_connection(addresses[0]) as stranger:
        stranger.sendall(hello)
        if not hello:
            stranger.shutdown(socket.SHUT_WR)
        in_all(members, lambda rank, ring: ring.connect(listeners[rank], addresses))
        with suppress(ConnectionError):
            assert len(stranger.recv(1000)) <= 48, "at most a challenge"
    end(members, listeners)


def test_one_with_another_key_is_refused() -> None:
    members, listeners = rings(2)
    members[1] = Ring(1, 2, bytes(31) + b"x", 2.0)
    members[0] = Ring(0, 2, KEY, 2.0)
    addresses = [one.getsockname() for one in listeners]
    for error in in_all(members, lambda rank, ring: error_of(lambda: ring.connect(listeners[rank], addresses))):
        assert isinstance(error, OSError)
    end(members, listeners)


def error_of(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


class Strangers:
    """Connections of nobody. Each does the same thing again and again until the other end closes, or the block ends."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60.0)
        for one in self._sockets:
            one.close()

    def silent(self, address: Any, count: int) -> list[socket.socket]:
        self._sockets += [socket.create_connection(address) for _ in range(count)]
        return self._sockets[-count:]

    def dribbling(self, address: Any, pace_s: float) -> list[int]:
        """One that sends a byte every ``pace_s``. Returns a list that gets the number of bytes that it could send."""
        sent: list[int] = []
        one = self.silent(address, 1)[0]
        one.settimeout(pace_s)

        def dribble() -> None:
            count = 0
            with suppress(OSError):
                while not self._over.is_set():
                    one.sendall(b"x")
                    count += 1
                    with suppress(TimeoutError):
                        if not one.recv(1000):
                            break
            sent.append(count)

        self._threads.append(threading.Thread(target=dribble, daemon=True))
        self._threads[-1].start()
        return sent


def test_a_stranger_that_sends_one_byte_at_a_time_does_not_move_its_deadline(  # H158
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_module, "HANDSHAKE_S", 0.3)
    ring = Ring(0, 2, KEY, 60.0)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as silent, Strangers() as strangers:
        sent = strangers.dribbling(own.getsockname(), 0.1)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(error_of, lambda: ring.connect(own, [own.getsockname(), silent.getsockname()]))
            strangers._threads[0].join(60.0)
            ring.cancel()
            assert isinstance(future.result(60.0), OSError)
    assert sent, "it was never closed"
    assert sent[0] < ring_module.NONCE_BYTES + 4
    ring.close()


def test_at_the_limit_the_oldest_stranger_goes(monkeypatch: pytest.MonkeyPatch) -> None:  # H158
    monkeypatch.setattr(ring_module, "STRANGERS_MAX", 3)
    monkeypatch.setattr(ring_module, "HANDSHAKE_S", 600.0)
    ring = Ring(0, 2, KEY, 600.0)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as silent, Strangers() as strangers:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(error_of, lambda: ring.connect(own, [own.getsockname(), silent.getsockname()]))
            held = strangers.silent(own.getsockname(), 5)
            for one in held[:2]:
                one.settimeout(60.0)
                assert one.recv(1) == b""
            for one in held[2:]:
                one.setblocking(False)
                with pytest.raises(BlockingIOError):
                    one.recv(1)
            ring.cancel()
            assert isinstance(future.result(60.0), OSError)
    ring.close()


def test_a_member_that_was_dismissed_as_the_oldest_connects_again() -> None:  # H158
    """The port is played: it closes the first connections, at each point of the handshake."""
    key = os.urandom(32)
    ring, other = Ring(0, 2, key, 60.0), Ring(1, 2, key, 60.0)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as full, ThreadPoolExecutor(2) as pool:

        def let_in() -> None:
            for reads in ([], [20], [20, 32]):
                with full.accept()[0] as one:
                    handshake = other._handshake(one)
                    next(handshake)
                    for place, size in enumerate(reads, 1):
                        data = one.recv(size, socket.MSG_WAITALL)
                        if place < len(reads):
                            handshake.send(data)
            other.connect(full, [own.getsockname(), full.getsockname()])

        future = pool.submit(let_in)
        ring.connect(own, [own.getsockname(), full.getsockname()])
        future.result(60.0)
    end([ring, other], [])


def test_a_member_comes_in_among_strangers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing, dribble, lie, leave, and that know the protocol but not the key (H157, H158)."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(ring_module, "STRANGERS_MAX", 8)
    for _ in range(5):
        members, listeners = rings(3)
        addresses = [one.getsockname() for one in listeners]
        with Strangers() as strangers:
            for _ in range(rng.randrange(1, 60)):
                address = rng.choice(addresses)
                if rng.random() < 0.2:
                    strangers.dribbling(address, rng.choice([0.001, 0.01, 0.1]))
                    continue
                one = strangers.silent(address, 1)[0]
                rank = rng.randrange(4).to_bytes(4, "big")
                with suppress(OSError):
                    one.sendall(rng.choice([b"", rng.randbytes(rng.randrange(200)), bytes(16) + rank + bytes(32)]))
                    if rng.random() < 0.3:
                        one.shutdown(rng.choice([socket.SHUT_WR, socket.SHUT_RD, socket.SHUT_RDWR]))
            connect_all(members, listeners)
            arrays = [np.arange(1000.0)] * 3
            assert all((result == 3 * arrays[0]).all() for result in reduced(members, arrays))
        end(members, listeners)


def test_a_member_that_sends_one_byte_at_a_time_does_not_move_the_deadline_of_a_collective(  # H158
    connected: Callable[[int], list[Ring]],
) -> None:
    """It has 10,000 bytes to send, and no exchange begins anew what is left of the time."""
    members = connected(2)
    members[0]._timeout_s = 0.5
    over = threading.Event()

    def dribble() -> None:
        with suppress(OSError):
            while not over.wait(0.01):
                members[1]._right.send(b"x")

    def collect() -> None:
        members[0].begin()
        for _ in range(100):
            members[0].exchange(memoryview(b""), memoryview(bytearray(100)))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(dribble)
        error = error_of(collect)
        over.set()
    assert isinstance(error, TimedOut)
    assert "waits for rank 1 to send the rest" in str(error)


def test_a_member_that_waits_is_freed_by_cancel(connected: Callable[[int], list[Ring]]) -> None:
    members = connected(3)
    waits = threading.Event()

    def wait() -> BaseException | None:
        waits.set()
        return error_of(lambda: members[0].exchange(memoryview(bytes(10_000_000)), memoryview(bytearray(10))))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait)
        waits.wait()
        members[0].cancel()
        assert isinstance(future.result(60.0), OSError)
    assert isinstance(error_of(lambda: members[0].exchange(memoryview(b"x"), memoryview(bytearray(1)))), OSError)


def test_the_death_of_a_neighbour_ends_the_exchange(connected: Callable[[int], list[Ring]]) -> None:
    members = connected(3)
    members[2].close()
    assert isinstance(error_of(lambda: members[0].exchange(memoryview(b""), memoryview(bytearray(10)))), OSError)


# --- the guard --------------------------------------------------------------------------------------------------------


def a_pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0]


def test_a_guard_frees_what_waits_on_connections_that_were_opened_in_it_and_touches_nothing_else() -> None:
    with listen("127.0.0.1") as listener, listen("127.0.0.1") as sidecar:
        earlier, earlier_peer = a_pair(listener)
        guard = SocketGuard(frozenset({sidecar.getsockname()}))
        kept, kept_peer = a_pair(sidecar)
        kept_peer_of = socket.create_connection(sidecar.getsockname())
        opened, opened_peer = a_pair(listener)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(opened.recv, 1)
            guard.free()
            assert future.result(60.0) == b""
        later, later_peer = a_pair(listener)  # the foreign code connects again
        assert later.recv(1) == b""
        guard.leave()
        after, after_peer = a_pair(listener)
        for one, peer in ((earlier, earlier_peer), (after, after_peer)):
            one.sendall(b"x")
            assert peer.recv(1) == b"x"
        kept.sendall(b"x")  # its other end is in this process too, and was shut down
        for one in (earlier, earlier_peer, kept, kept_peer, kept_peer_of, opened, opened_peer, later, later_peer):
            one.close()
        after.close()
        after_peer.close()


def test_a_descriptor_that_means_another_socket_by_now_is_left_alone() -> None:  # H104
    guard, acted = SocketGuard(frozenset()), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as one:
        opened = one.fileno(), os.fstat(one.fileno()).st_ino
        before = len(os.listdir("/dev/fd"))
        guard._on_one((opened[0], opened[1] + 1), acted.append)
        assert acted == []
        guard._on_one(opened, acted.append)
        assert len(acted) == 1
        assert len(os.listdir("/dev/fd")) == before


def test_a_guard_that_is_left_leaves_no_thread_and_no_descriptor() -> None:
    before = set(os.listdir("/dev/fd"))
    guard = SocketGuard(frozenset())
    guard.free()
    guard.leave()
    assert set(os.listdir("/dev/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "headgate-guard"]


def test_a_thread_that_waits_in_accept_is_woken_if_its_library_survives_that() -> None:  # H104
    with listen("127.0.0.1") as earlier:
        guard = SocketGuard(frozenset(), wake_with=b"over")
        with listen("127.0.0.1") as opened, ThreadPoolExecutor(1) as pool:
            future = pool.submit(opened.accept)
            guard.free()
            with future.result(60.0)[0] as caller:
                assert caller.recv(100) in (b"over", b"")  # the guard shuts this end down too, perhaps before
            guard.leave()
        earlier.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            earlier.accept()


def test_a_library_that_has_been_left_is_woken_where_it_listens_and_connections_of_another_kind_stay() -> None:  # H104
    guard = SocketGuard(frozenset(), wake_with=b"over")
    local, local_peer = socket.socketpair()
    with listen("127.0.0.1") as opened, local, local_peer, ThreadPoolExecutor(1) as pool:
        future = pool.submit(opened.accept)
        guard.wake()
        with future.result(60.0)[0] as caller:
            assert caller.recv(100) == b"over"
        with socket.create_connection(opened.getsockname()) as connected:
            shut = pool.submit(connected.recv, 1)
            guard.free()
            assert shut.result(60.0) == b""
        local.sendall(b"x")
        assert local_peer.recv(1) == b"x"
        guard.leave()


def stand_still(lock: Any) -> None:
    guard = SocketGuard(frozenset(), may_end=lambda: True)
    guard.free()
    lock.acquire()


def compute(lock: Any) -> None:
    guard = SocketGuard(frozenset(), may_end=lambda: True)
    guard.free()
    while not lock.acquire(block=False):
        pass
    guard.leave()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a thread stands still")
def test_a_process_that_no_shutdown_frees_is_ended_but_never_one_that_computes() -> None:  # H104
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    with lock:
        computes = context.Process(target=compute, args=(lock,))
        computes.start()
        stands_still = context.Process(target=stand_still, args=(lock,))
        stands_still.start()
        stands_still.join(60)
        assert stands_still.exitcode == -signal.SIGKILL
    computes.join(60)
    assert computes.exitcode == 0


def test_a_member_that_waits_for_the_driver_is_not_taken_for_one_that_stands_still() -> None:  # H107
    part = GroupPart("train", 60.0)
    allowed: list[bool] = []

    class Driver:
        endpoint = TaskEndpoint("127.0.0.1", 9, Key(bytes(16), bytes(32)), "op", 1)

        def request(self, event: Any, timeout_s: float) -> Any:
            allowed.append(guard._may_end is not None and guard._may_end())
            return Yours().as_event()

    open_alone(part, Driver())
    with part.freeing(may_end=True) as guard:
        assert guard._may_end is not None
        assert guard._may_end(), "it is in foreign code"
        part.ask(Question(1))
        assert guard._may_end()
    assert allowed == [False]
    with part.freeing() as guard:
        assert guard._may_end is None, "guard() never ends the process"


def a_member_whose_generation_is_broken() -> GroupPart:
    part = GroupPart("train", 60.0)
    context = SimpleNamespace(endpoint=TaskEndpoint("127.0.0.1", 9, Key(bytes(16), bytes(32)), "op", 1))
    open_alone(part, context)
    part.member = cast("GroupMember", SimpleNamespace(generation=3))
    part.handle_urgent(Broken(3, "subtask 1 is gone").as_event())
    return part


def test_a_guard_that_is_entered_after_the_generation_broke_ends_the_wait() -> None:  # H104
    part = a_member_whose_generation_is_broken()

    received: list[bytes] = []

    def collective(listener: socket.socket) -> None:
        one, peer = a_pair(listener)
        with one, peer:
            one.settimeout(60.0)
            received.append(one.recv(1))
            raise ConnectionError("the library has lost a peer")

    with listen("127.0.0.1") as listener:
        with pytest.raises(PeerLost, match="subtask 1 is gone"), part.guard(3):
            collective(listener)
    assert received == [b""]


def test_a_ring_that_is_made_after_the_generation_broke_connects_to_nobody() -> None:  # H104
    part = a_member_whose_generation_is_broken()
    ring = Ring(0, 2, KEY, 60.0)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as silent:
        part.use(ring)
        with pytest.raises(ConnectionError, match="this generation of the group is broken"):
            ring.connect(own, [own.getsockname(), silent.getsockname()])
    ring.close()


def test_a_stranger_that_answers_at_a_members_address_is_refused() -> None:  # H108
    ring = Ring(0, 2, KEY, 2.0)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as strange, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with strange.accept()[0] as one:
                one.sendall(bytes(48))
                while one.recv(100):
                    pass

        future = pool.submit(answer)
        with pytest.raises(ConnectionError, match="is not rank 1 of the group"):
            ring.connect(own, [own.getsockname(), strange.getsockname()])
        ring.close()
        future.result(60.0)


def test_a_member_that_does_not_answer_is_named() -> None:
    ring = Ring(0, 2, KEY, 0.2)
    with listen("127.0.0.1") as own, listen("127.0.0.1") as silent:
        with pytest.raises(TimedOut, match=r"rank 1 of the group did not let rank 0 in within 0\.2 s"):
            ring.connect(own, [own.getsockname(), silent.getsockname()])
        ring.close()


def test_a_member_waits_for_a_connection_no_longer_than_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def connect(address: object, timeout_s: float) -> socket.socket:
        waits.append(timeout_s)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(socket, "create_connection", connect)
    ring = Ring(0, 2, KEY, 0.2)
    with listen("127.0.0.1") as own:
        with pytest.raises(OSError, match="nobody is there"):
            ring.connect(own, [own.getsockname(), ("127.0.0.1", 9)])
        ring.close()
    assert waits
    assert max(waits) <= 0.2
