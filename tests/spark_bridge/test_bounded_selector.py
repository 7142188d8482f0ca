# SPDX-License-Identifier: Apache-2.0

"""One turn of a sidecar's loop reads a limited number of connections, however many are ready."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from actors.logs import ROOT
from protocol.wire.keys import KeyRing
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.loop import READY_MAX, BoundedSelector, SidecarLoop
from spark_bridge.standalone.command import serve
from spark_bridge.standalone.process import Ports, SidecarProcess

Pair = tuple[socket.socket, socket.socket]
MANY = 3 * READY_MAX


async def nothing(sidecar: object) -> None:
    """A factory of no operator."""


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Pairs of connected sockets. The first of each has a byte to read, which the second has sent."""
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(MANY)]
        for reader, writer in made:
            stack.enter_context(reader)
            stack.enter_context(writer)
            reader.setblocking(False)
            writer.send(b".")
        yield made


@pytest.fixture
def selector(pairs: list[Pair]) -> Iterator[BoundedSelector]:
    with BoundedSelector() as made:
        for reader, _ in pairs:
            made.register(reader, selectors.EVENT_READ)
        yield made


def files_of(ready: list[tuple[selectors.SelectorKey, int]]) -> list[object]:
    return [key.fileobj for key, _ in ready]


async def read_at_most_in_a_turn(pairs: list[Pair]) -> int:
    """Read all on the running loop. Returns how many were read in the turn that read most."""
    loop, everything = asyncio.get_running_loop(), asyncio.Event()
    turns, read_in = count(), Counter[int]()
    turn = 0

    def next_turn() -> None:
        nonlocal turn
        turn = next(turns)
        if not everything.is_set():
            loop.call_soon(next_turn)

    def read(reader: socket.socket) -> None:
        assert reader.recv(1) == b"."
        read_in[turn] += 1
        if read_in.total() == MANY:
            everything.set()

    for reader, _ in pairs:
        loop.add_reader(reader, read, reader)
    next_turn()
    await everything.wait()
    for reader, _ in pairs:
        loop.remove_reader(reader)
    return max(read_in.values())


def test_a_turn_of_the_sidecars_own_loop_reads_a_limited_number_of_connections(pairs: list[Pair]) -> None:
    with asyncio.Runner(loop_factory=SidecarLoop) as runner:
        assert runner.run(read_at_most_in_a_turn(pairs)) <= READY_MAX


def test_a_turn_of_a_sidecar_in_its_own_process_reads_a_limited_number_of_connections(
    pairs: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ROOT)  # otherwise the process sets it
    at_most: list[int] = []

    class ReadsOnce(SidecarProcess):
        async def run(self, *, once: bool = False, started: Callable[[int], None] = lambda port: None) -> None:
            at_most.append(await read_at_most_in_a_turn(pairs))

    assert serve(ReadsOnce(nothing, SidecarConfig(), KeyRing(bytes(32)), "127.0.0.1", Ports(0, 0, 0)), once=True) == 0
    assert at_most[0] <= READY_MAX


def test_every_file_gets_its_turn_before_one_gets_a_second(selector: BoundedSelector, pairs: list[Pair]) -> None:
    for _ in range(2):  # nothing is read, so all of them are ready again
        seen = [file for _ in range(3) for file in files_of(selector.select(0))]
        assert len(seen) == MANY
        assert set(seen) == {reader for reader, _ in pairs}


def test_a_file_that_is_no_longer_registered_is_not_returned(selector: BoundedSelector, pairs: list[Pair]) -> None:
    seen = files_of(selector.select(0))
    left = [reader for reader, _ in pairs if reader not in seen]
    selector.unregister(left[0])
    selector.modify(left[1], selectors.EVENT_READ | selectors.EVENT_WRITE)
    seen += [file for _ in range(2) for file in files_of(selector.select(0))]
    assert left[0] not in seen
    assert left[1] not in seen, "what it was ready for may no longer be wanted"
    for reader, _ in pairs:
        if reader not in left[:2]:
            selector.unregister(reader)
    assert files_of(selector.select(0)) == [left[1]], "it is ready still"


def test_it_waits_only_when_nothing_is_left(selector: BoundedSelector, pairs: list[Pair]) -> None:
    selector.select(0)
    for reader, _ in pairs:
        selector.unregister(reader)
    assert selector.select(None) == []
    assert selector.select(None) == []
    reader, _ = pairs[0]
    selector.register(reader, selectors.EVENT_READ)
    assert files_of(selector.select(None)) == [reader]
