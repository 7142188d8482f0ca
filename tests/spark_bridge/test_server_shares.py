# SPDX-License-Identifier: Apache-2.0

"""No peer of a server delays the others: shares of a turn of the loop, over real TCP on loopback (H62, H65).

The peers write in one step of the test, so that the server finds everything when it reads next.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from protocol.wire.codec import encode_message
from protocol.wire.messages import AttemptEnded, Confirm, UpMessage
from spark_bridge.server.connection import LIGHT, READ_BYTES_MAX, SHARE, Connection
from tests.spark_bridge.test_server import CONFIG, RunningServer, a_running_server

FLOOD = 1000


def flood(task: int) -> bytes:
    return b"".join(encode_message(Confirm(task, seq)) for seq in range(FLOOD))


def those_of(running: RunningServer, task: int) -> list[int]:
    return [m.seq for m in running.handler.messages if isinstance(m, Confirm) and m.task_attempt_id == task]


async def test_a_single_message_waits_for_one_share_of_four_floods() -> None:  # H65
    async with a_running_server() as running:
        flooding = [await running.a_task() for _ in range(4)]
        neighbour = await running.a_task()
        for task, peer in enumerate(flooding):
            peer.writer.write(flood(task))
        neighbour.writer.write(encode_message(Confirm(99, 0)))
        await running.handler.until(lambda: bool(those_of(running, 99)))
        assert running.handler.messages.index(Confirm(99, 0)) <= SHARE
        await running.handler.until(lambda: len(running.handler.messages) == 4 * FLOOD + 1)


async def test_a_message_that_comes_in_the_middle_of_a_flood_waits_for_few_shares() -> None:  # H65
    sent_after: list[int] = []

    async with a_running_server() as running:
        flooding, neighbour = await running.a_task(), await running.a_task()

        def send_one_more(connection: Connection, messages: list[UpMessage]) -> None:
            if messages[0].task_attempt_id == 1 and len(those_of(running, 99)) == len(sent_after):
                neighbour.writer.write(encode_message(Confirm(99, len(sent_after))))
                sent_after.append(len(those_of(running, 1)))
            elif messages[0].task_attempt_id == 99:
                assert len(those_of(running, 1)) - sent_after[-1] <= 2 * SHARE

        running.handler.on_messages = send_one_more
        flooding.writer.write(flood(1))
        await running.handler.until(lambda: len(those_of(running, 1)) == FLOOD)
        assert len(sent_after) > FLOOD / SHARE / 4
        assert not running.handler.reasons


async def test_floods_take_turns_and_each_keeps_its_order() -> None:  # H22, H65
    async with a_running_server() as running:
        turns: list[int] = []
        running.handler.on_messages = lambda connection, messages: turns.append(messages[0].task_attempt_id)
        first, second = await running.a_task(), await running.a_task()
        first.writer.write(flood(1))
        second.writer.write(flood(2))
        await running.handler.until(lambda: len(running.handler.messages) == 2 * FLOOD)
        assert those_of(running, 1) == those_of(running, 2) == list(range(FLOOD))
        assert max(running.handler.batches) <= SHARE
        ahead = [turns[:count].count(1) - turns[:count].count(2) for count in range(len(turns))]
        assert max(map(abs, ahead)) <= 2


async def test_a_read_of_few_messages_is_handed_over_whole_and_immediately() -> None:
    async with a_running_server() as running:
        peer = await running.a_task()
        peer.writer.write(b"".join(encode_message(Confirm(7, seq)) for seq in range(LIGHT)))
        await running.handler.until(lambda: bool(running.handler.messages))
        assert running.handler.batches == [LIGHT]


async def test_a_peer_with_a_backlog_is_not_read() -> None:  # H62
    async with a_running_server() as running:
        peer = await running.a_task()
        connection = running.handler.connections[0]
        backlogs: list[int] = []
        running.handler.on_messages = lambda connection, messages: backlogs.append(len(connection._backlog))
        rounds = 4 * READ_BYTES_MAX // len(flood(7))
        for _ in range(rounds):
            peer.writer.write(flood(7))
        await running.handler.until(lambda: len(running.handler.messages) == rounds * FLOOD)
        assert 0 < max(backlogs) * len(encode_message(Confirm(7, 0))) <= READ_BYTES_MAX
        assert connection.is_identified


# --- the end of a connection with a backlog --------------------------------------------------------------------


async def test_what_came_before_the_end_of_the_stream_is_handed_over() -> None:  # H24
    async with a_running_server() as running:
        peer = await running.a_task()
        peer.writer.write(flood(7))
        peer.writer.write_eof()
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert running.handler.reasons == ["the peer closed the connection"]
        assert those_of(running, 7) == list(range(FLOOD))


async def test_what_came_before_a_reset_is_handed_over() -> None:  # H24
    async with a_running_server() as running:
        peer = await running.a_task()
        sock = peer.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def reset(connection: Connection, messages: list[UpMessage]) -> None:
            peer.writer.transport.abort()
            connection.send(Confirm(7, 1), immediately=True)  # sooner or later this fails

        running.handler.on_messages = reset
        peer.writer.write(flood(7))
        await running.handler.until(lambda: bool(running.handler.reasons))
        assert "the connection broke" in running.handler.reasons[0]
        assert running.handler.batches[-1] > SHARE  # the rest, when the connection was lost
        assert those_of(running, 7) == list(range(FLOOD))


async def test_close_drops_the_backlog_and_lets_the_last_message_leave() -> None:
    # Closing a socket with unread bytes would reset it, and the last message could be lost.
    async with a_running_server(replace(CONFIG, close_timeout_s=10_000.0)) as running:
        peer = await running.a_task()

        def dismiss(connection: Connection, messages: list[UpMessage]) -> None:
            connection.send(AttemptEnded(7, "stop"))
            connection.close()

        running.handler.on_messages = dismiss
        peer.writer.write(flood(7))
        assert await peer.receive() == AttemptEnded(7, "stop")
        peer.writer.write(flood(7))
        assert await peer.until_closed() == b""
        await peer.close()
        await running.handler.until(lambda: running.handler.reasons == ["closed here"])
        assert running.handler.batches == [SHARE]


async def test_a_connection_that_another_closes_is_read_to_its_end() -> None:
    async with a_running_server(replace(CONFIG, close_timeout_s=10_000.0)) as running:
        flooding = await running.a_task()
        closed = running.handler.connections[0]
        neighbour = await running.a_task()
        running.handler.on_messages = lambda connection, messages: closed.close() if connection is not closed else None
        flooding.writer.write(flood(7))
        neighbour.writer.write(encode_message(Confirm(99, 0)))
        assert await flooding.until_closed() == b""
        assert len(those_of(running, 7)) < FLOOD
        await flooding.close()
        await running.handler.until(lambda: running.handler.reasons == ["closed here"])


async def test_a_handler_that_fails_in_a_later_share_loses_that_connection_only() -> None:
    async with a_running_server() as running:
        bad, good = await running.a_task(), await running.a_task()

        def fail(connection: Connection, messages: list[UpMessage]) -> None:
            if Confirm(1, FLOOD // 2) in messages:
                raise KeyError("a defect")

        running.handler.on_messages = fail
        with capture_logs() as lines:
            bad.writer.write(flood(1))
            good.writer.write(flood(2))
            await running.handler.until(lambda: len(those_of(running, 2)) == FLOOD)
        assert [line["event"] for line in lines] == ["connection dropped, handler failed"]
        assert running.handler.reasons == ["its handler failed"]
        assert len(those_of(running, 1)) < FLOOD


async def test_a_bad_frame_in_a_later_share_ends_that_connection_only() -> None:  # H62
    async with a_running_server() as running:
        bad, good = await running.a_task(), await running.a_task()
        bad.writer.write(flood(1) + b"\x00\x00\x00\x01\xc2" + flood(1))
        good.writer.write(flood(2))
        await running.handler.until(lambda: len(those_of(running, 2)) == FLOOD and bool(running.handler.reasons))
        assert "not msgpack" in running.handler.reasons[0]
        assert FLOOD - SHARE <= len(those_of(running, 1)) <= FLOOD


@pytest.mark.parametrize("count", [LIGHT + 1, SHARE, SHARE + 1])
async def test_a_flood_that_no_other_share_delays_begins_in_the_turn_of_its_read(count: int) -> None:
    async with a_running_server() as running:
        peer = await running.a_task()
        peer.writer.write(b"".join(encode_message(Confirm(7, seq)) for seq in range(count)))
        await running.handler.until(lambda: len(running.handler.messages) == count)
        assert running.handler.batches[0] == min(count, SHARE)
