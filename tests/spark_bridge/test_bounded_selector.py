# SPDX-License-Identifier: Apache-2.0

"""One turn of a sidecar's loop reads a limited number of connections, however many are ready."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from spark_bridge.driver.bounded_selector import READY_MAX, BoundedSelector, bounded_loop
from spark_bridge.driver.loop import SidecarLoop

Pair = tuple[socket.socket, socket.socket]
MANY = 3 * READY_MAX


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


@pytest.mark.parametrize("new_loop", [bounded_loop, SidecarLoop])
def test_a_turn_of_the_loop_reads_a_limited_number_of_connections(
    new_loop: Callable[[], asyncio.AbstractEventLoop], pairs: list[Pair]
) -> None:
    turns = count()
    turn = 0
    read_in: list[int] = []

    def next_turn() -> None:
        nonlocal turn
        turn = next(turns)
        asyncio.get_running_loop().call_soon(next_turn)

    async def read(reader: socket.socket, everything: asyncio.Event) -> None:
        def read_one() -> None:
            assert reader.recv(1) == b"."
            read_in.append(turn)
            if len(read_in) == MANY:
                everything.set()

        asyncio.get_running_loop().add_reader(reader, read_one)

    async def read_all() -> None:
        everything = asyncio.Event()
        for reader, _ in pairs:
            await read(reader, everything)
        next_turn()
        await everything.wait()
        for reader, _ in pairs:
            asyncio.get_running_loop().remove_reader(reader)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(read_all())
    assert max(map(read_in.count, set(read_in))) <= READY_MAX


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
