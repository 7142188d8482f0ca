# SPDX-License-Identifier: Apache-2.0

"""Frames of which only a part has arrived: their bound and their deadline, over real TCP on loopback (H62, H65).

The checks of progress are made by the test, which therefore needs no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from structlog.testing import capture_logs

from protocol.wire.codec import DEFAULT_LIMITS, encode_message
from protocol.wire.fragments import encode_whole
from protocol.wire.messages import Confirm, EventMessage
from spark_bridge.server.connection import PROGRESS_BYTES, READ_BYTES_MAX, TIMEOUTS_MAX, Connection, IncompleteFrames
from tests.spark_bridge.test_server import CONFIG, Peer, RunningServer, a_running_server

FRAME = encode_whole(EventMessage(7, 1, bytes(3 * PROGRESS_BYTES)), DEFAULT_LIMITS)
LIMIT = 1_000_000
NO_CHECKS = replace(CONFIG, frame_timeout_s=1e6)
FEW_BYTES = replace(NO_CHECKS, incomplete_bytes_max=LIMIT)


def frames_of(running: RunningServer) -> IncompleteFrames:
    return running.server._incomplete


async def a_task(running: RunningServer) -> tuple[Peer, Connection]:
    peer = await running.a_task()
    return peer, running.handler.connections[-1]


def is_open(connection: Connection) -> bool:
    return connection.is_identified


def holds(running: RunningServer, size: int) -> bool:
    return frames_of(running).total_bytes == size


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0)


async def test_states_that_exceed_the_limit_together_wait_at_their_sockets_and_all_arrive() -> None:  # H62, H65
    count, size = 16, 500_000
    async with a_running_server(FEW_BYTES) as running:
        peak = 0
        peers = [await running.a_task() for _ in range(count)]
        with capture_logs() as lines:
            for seq, peer in enumerate(peers, 1):
                peer.writer.write(encode_whole(EventMessage(7, seq, bytes(size)), DEFAULT_LIMITS))
            async with asyncio.timeout(120):
                while len(running.handler.messages) < count:
                    peak = max(peak, frames_of(running).total_bytes)
                    await asyncio.sleep(0)
        assert LIMIT < peak <= LIMIT + size + count * READ_BYTES_MAX  # without a limit, about all 16 of them
        assert sorted(m.seq for m in running.handler.messages if isinstance(m, EventMessage)) == list(
            range(1, count + 1)
        )
        assert lines == []
        assert frames_of(running).total_bytes == 0


async def test_a_connection_that_waits_continues_when_the_large_one_is_gone() -> None:  # H62
    async with a_running_server(FEW_BYTES) as running:
        (large, _), (waiting, connection) = await a_task(running), await a_task(running)
        large.writer.write(FRAME[:-1])
        await until(lambda: frames_of(running).total_bytes == len(FRAME) - 1)
        waiting.writer.write(FRAME)
        await until(lambda: not connection.is_read)
        await large.close()
        await running.handler.until(lambda: running.handler.messages == [EventMessage(7, 1, bytes(3 * PROGRESS_BYTES))])
        assert frames_of(running).total_bytes == 0


async def test_a_waiting_connection_that_is_closed_is_read_to_its_end() -> None:
    async with a_running_server(replace(FEW_BYTES, close_timeout_s=10_000.0)) as running:
        (large, _), (waiting, connection) = await a_task(running), await a_task(running)
        large.writer.write(FRAME[:-1])
        await until(lambda: frames_of(running).total_bytes == len(FRAME) - 1)
        waiting.writer.write(FRAME)
        await until(lambda: not connection.is_read)
        connection.close()
        assert await waiting.until_closed() == b""
        await waiting.close()
        await running.handler.until(lambda: running.handler.reasons == ["closed here"])


async def test_small_messages_pass_while_large_frames_wait() -> None:  # H65
    async with a_running_server(FEW_BYTES) as running:
        large = await running.a_task()
        large.writer.write(FRAME[:-1])
        await until(lambda: frames_of(running).total_bytes == len(FRAME) - 1)
        assert await running.is_well()


async def test_a_frame_that_always_makes_progress_has_an_end_too() -> None:  # H158
    """A mebibyte in each minute kept 128 of them for two hours."""
    frame = encode_whole(EventMessage(7, 1, bytes((TIMEOUTS_MAX + 2) * PROGRESS_BYTES)), DEFAULT_LIMITS)
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        with capture_logs() as lines:
            for check in range(TIMEOUTS_MAX + 1):
                assert is_open(connection), f"before check {check}"
                came = check * PROGRESS_BYTES
                peer.writer.write(frame[came : came + PROGRESS_BYTES])
                await until(partial(holds, running, came + PROGRESS_BYTES))
                frames_of(running)._check()
        assert not is_open(connection)
        assert "did not arrive within 20 times" in lines[0]["why"]
        assert frames_of(running).total_bytes == 0


async def test_a_frame_that_makes_no_progress_between_two_checks_is_dropped() -> None:  # H62
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        peer.writer.write(FRAME[:1000])
        await until(lambda: frames_of(running).total_bytes == 1000)
        frames_of(running)._check()
        peer.writer.write(FRAME[1000 : PROGRESS_BYTES + 1000])
        await until(lambda: frames_of(running).total_bytes == PROGRESS_BYTES + 1000)
        frames_of(running)._check()
        assert is_open(connection)  # slow, but steady
        peer.writer.write(FRAME[PROGRESS_BYTES + 1000 : 2 * PROGRESS_BYTES + 999])
        await until(lambda: frames_of(running).total_bytes == 2 * PROGRESS_BYTES + 999)
        with capture_logs() as lines:
            frames_of(running)._check()
        assert not is_open(connection)
        assert [line["event"] for line in lines] == ["connection dropped"]
        assert "the rest of a frame did not arrive" in lines[0]["why"]
        await running.handler.until(lambda: len(running.handler.reasons) == 1)
        assert frames_of(running).total_bytes == 0
        assert await running.is_well()


async def test_a_check_that_comes_late_drops_nobody() -> None:
    # While the loop is held up, nothing is read.
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        peer.writer.write(FRAME[:1000])
        await until(lambda: frames_of(running).total_bytes == 1000)
        frames_of(running)._check()
        loop = asyncio.get_running_loop()
        frames_of(running)._timer = loop.call_at(loop.time() - 0.6e6, lambda: None)
        frames_of(running)._check()
        assert is_open(connection)
        frames_of(running)._check()
        assert not is_open(connection)


async def test_each_frame_has_its_own_time() -> None:  # H62
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        small = encode_message(EventMessage(7, 1, bytes(100)))
        for count in range(1, 4):  # always incomplete, never the same frame
            peer.writer.write(small[-9 * (count > 1) :][: 9 * (count > 1)] + small[:-9])
            await until(lambda: frames_of(running).total_bytes == len(small) - 9)
            await until(lambda count=count: len(running.handler.messages) == count - 1)  # type: ignore[misc]
            frames_of(running)._check()
        assert is_open(connection)


async def test_a_connection_that_waits_for_others_is_not_dropped_but_the_largest_is() -> None:  # H62, H65
    async with a_running_server(FEW_BYTES) as running:
        (large, largest), (waiting, connection) = await a_task(running), await a_task(running)
        large.writer.write(FRAME[: PROGRESS_BYTES + 1])
        await until(lambda: frames_of(running).total_bytes == PROGRESS_BYTES + 1)
        waiting.writer.write(FRAME)
        await until(lambda: not connection.is_read)
        held_bytes = frames_of(running).total_bytes
        frames_of(running)._check()
        large.writer.write(FRAME[PROGRESS_BYTES + 1 : 2 * PROGRESS_BYTES + 1])
        await until(lambda: frames_of(running).total_bytes == held_bytes + PROGRESS_BYTES)
        with capture_logs() as lines:
            frames_of(running)._check()
        assert not is_open(largest)
        assert "this one is the largest" in lines[0]["why"]
        assert len(lines) == 1
        await running.handler.until(lambda: len(running.handler.messages) == 1)
        assert is_open(connection)


async def test_a_part_of_a_frame_and_a_peer_that_is_held_back_are_signs_of_life() -> None:  # H94
    async with a_running_server(FEW_BYTES) as running:
        (large, largest), (waiting, connection) = await a_task(running), await a_task(running)
        largest.heard(), connection.heard()
        assert not largest.heard()
        large.writer.write(FRAME[: PROGRESS_BYTES + 1])
        await until(lambda: frames_of(running).total_bytes == PROGRESS_BYTES + 1)
        assert largest.heard()
        assert not largest.heard()
        waiting.writer.write(FRAME)
        await until(lambda: not connection.is_read)
        assert [connection.heard() for _ in range(3)] == [True] * 3


async def test_the_server_itself_checks() -> None:  # H62
    async with a_running_server(replace(CONFIG, frame_timeout_s=0.05)) as running:
        peer = await running.a_task()
        peer.writer.write(FRAME[:1000])
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert "the rest of a frame did not arrive" in running.handler.reasons[0]
        await peer.until_closed()
        again = await running.a_task()
        await again.send(Confirm(7, 1))
        await running.handler.until(lambda: running.handler.messages == [Confirm(7, 1)])


async def test_small_messages_between_the_parts_are_not_progress_of_a_large_one() -> None:  # H62, H113
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        peer.writer.write(FRAME[: PROGRESS_BYTES + 1000])
        await until(lambda: frames_of(running).total_bytes == PROGRESS_BYTES + 1000)
        rest = PROGRESS_BYTES + 1000
        parts = [start for start in range(len(FRAME)) if FRAME[start : start + 5] == b"\x00\x04\x00\x01\xc1"]
        between = next(start for start in parts if start > rest)
        peer.writer.write(FRAME[rest:between])
        await until(lambda: frames_of(running).total_bytes == between)
        frames_of(running)._check()
        for number in range(1, 4):
            await peer.send(Confirm(7, number))
            await running.handler.until(lambda number=number: Confirm(7, number) in running.handler.messages)  # type: ignore[misc]
        assert frames_of(running).total_bytes == between
        frames_of(running)._check()
        assert not is_open(connection)


async def test_other_messages_leave_between_the_parts_for_a_peer_that_reads_slowly() -> None:  # H112, H113
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        payload = bytes(32 * 2**20)
        connection.send(EventMessage(7, 1, payload))
        await until(lambda: connection.is_write_paused)
        for _ in range(50):
            await asyncio.sleep(0)
        assert connection.progressed()
        assert not connection.progressed()
        assert connection._transport.get_write_buffer_size() < 2**20
        connection.send(EventMessage(7, 2, b"in its turn"))
        connection.send(Confirm(7, 3))
        peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert await peer.receive() == Confirm(7, 3)
        assert connection.unsent_bytes > 2**20, "it came before the large message had left"
        assert await peer.receive() == EventMessage(7, 1, payload)
        assert await peer.receive() == EventMessage(7, 2, b"in its turn")
        assert connection.progressed()
        await until(lambda: connection.unsent_bytes == 0)


async def test_what_waits_behind_a_large_message_for_a_peer_that_does_not_read_has_a_limit() -> None:  # H157
    async with a_running_server(replace(NO_CHECKS, write_buffer_bytes_max=1_000_000)) as running:
        peer, connection = await a_task(running)
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        connection.send(EventMessage(7, 1, bytes(32 * 2**20)))
        await until(lambda: connection.is_write_paused)
        count = 0
        while is_open(connection) and count < 20:
            count += 1
            connection.send(EventMessage(7, 1 + count, bytes(100_000)))
        assert not is_open(connection)
        assert count > 5, "the large one does not count"
        await running.handler.until(lambda: "does not read" in " ".join(running.handler.reasons))


async def test_a_connection_that_is_dropped_forgets_what_it_was_sending() -> None:  # H115
    async with a_running_server(NO_CHECKS) as running:
        peer, connection = await a_task(running)
        connection.send(EventMessage(7, 1, bytes(32 * 2**20)))
        await until(lambda: connection.is_write_paused)
        connection.abort("the test")
        assert connection._outbox is not None
        assert connection._outbox.waiting_bytes == 0
        await running.handler.until(lambda: running.handler.reasons == ["the test"])
        await peer.until_closed()
