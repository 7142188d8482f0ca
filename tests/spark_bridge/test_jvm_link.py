# SPDX-License-Identifier: Apache-2.0

"""The sidecar's end of the relay connection, with a stand-in for the JVM."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing

from protocol.facts import ApplicationEnded, FactsDropped, JobEnded
from protocol.wire.framing import frame
from protocol.wire.handshake import ClientHandshake
from protocol.wire.keys import Key, KeyRing, Purpose
from spark_bridge.bridge.relay.interface import RelayError, RelayStatistics, RelayStopped
from spark_bridge.bridge.relay.jvm_link import RelayServer
from spark_bridge.bridge.relay.records import CommandAnswered
from tests.spark.facts_log import FactsLog
from tests.spark_bridge.test_relay_records import record, text

PING = 4
KEYS = KeyRing(b"s" * 32)
KEY = KEYS.key(Purpose.RELAY, b"this driver's id")


class FakeJvm:
    """Plays the listener's side of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: tuple[str, int], key: Key) -> FakeJvm:
        jvm = cls(*await asyncio.open_connection(*address))
        handshake = ClientHandshake(key, b"n" * 32)
        jvm.writer.write(handshake.initial_bytes())
        try:
            for part_bytes in (38, 32):  # the challenge, the proof; the rest is for next_command
                jvm.writer.write(handshake.receive(await jvm.reader.readexactly(part_bytes)))
        except asyncio.IncompleteReadError:
            jvm.writer.close()
            raise ConnectionError("turned away") from None
        return jvm

    def tell(self, sequence: int, body: bytes) -> None:
        self.writer.write(frame(struct.pack(">q", sequence) + body))

    def tell_job_end(self, sequence: int, job_id: int) -> None:
        self.tell(sequence, record(2, struct.pack(">i?", job_id, True), text("")))

    async def next_command(self) -> tuple[int, int]:
        (size_bytes,) = struct.unpack(">I", await self.reader.readexactly(4))
        operation, request_id = struct.unpack_from(">Bq", await self.reader.readexactly(size_bytes))
        return operation, request_id

    def answer(self, request_id: int, problem: str = "") -> None:
        self.tell(0, record(10, struct.pack(">q?", request_id, not problem), text(problem)))

    async def hung_up(self) -> bool:
        """Wait until the sidecar closes the connection; discard whatever it still sends."""
        try:
            while await self.reader.read(1000):
                pass
        except ConnectionError:
            pass
        self.writer.close()
        return True


class Sidecar:
    """A server, the facts it delivered, and the connections to close."""

    def __init__(self, command_timeout_s: float, reconnect_timeout_s: float) -> None:
        self.log = FactsLog()
        self.statistics = RelayStatistics()
        self.lost = asyncio.Event()
        self.server = RelayServer(
            self.log.receive,
            self.statistics,
            KEYS,
            on_lost=lambda _: self.lost.set(),
            command_timeout_s=command_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
        )
        self.address = ("", 0)
        self.jvms: list[FakeJvm] = []

    async def jvm(self, key: Key = KEY) -> FakeJvm:
        self.jvms.append(await FakeJvm.connect(self.address, key))
        return self.jvms[-1]

    async def stranger(self) -> FakeJvm:
        self.jvms.append(FakeJvm(*await asyncio.open_connection(*self.address)))
        return self.jvms[-1]


@asynccontextmanager
async def a_sidecar(command_timeout_s: float = 20.0, reconnect_timeout_s: float = 20.0) -> AsyncIterator[Sidecar]:
    sidecar = Sidecar(command_timeout_s, reconnect_timeout_s)
    sidecar.address = await sidecar.server.listen()
    try:
        yield sidecar
    finally:
        await sidecar.server.close()
        for jvm in sidecar.jvms:
            jvm.writer.close()
            await asyncio.gather(jvm.writer.wait_closed(), return_exceptions=True)


async def test_facts_arrive_in_the_order_of_the_bus() -> None:
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        for number in range(1, 200):
            jvm.tell_job_end(number, number)
        await sidecar.log.wait_for(JobEnded, lambda fact: fact.job_id == 199)
        assert [fact.job_id for fact in sidecar.log.of(JobEnded)] == list(range(1, 200))
        assert sidecar.statistics.records == 199


async def test_a_record_that_a_reconnect_sends_twice_is_delivered_once() -> None:
    async with a_sidecar() as sidecar:
        first = await sidecar.jvm()
        first.tell_job_end(1, 1)
        first.tell_job_end(2, 2)
        await sidecar.log.wait_for(JobEnded, lambda fact: fact.job_id == 2)
        first.writer.close()
        second = await sidecar.jvm()
        second.tell_job_end(2, 2)
        second.tell_job_end(3, 3)
        await sidecar.log.wait_for(JobEnded, lambda fact: fact.job_id == 3)
        assert [fact.job_id for fact in sidecar.log.of(JobEnded)] == [1, 2, 3]
        assert sidecar.statistics.reconnects == 1


async def test_records_lost_with_a_connection_are_counted_as_dropped() -> None:  # H19
    async with a_sidecar() as sidecar:
        (await sidecar.jvm()).tell_job_end(1, 1)
        await sidecar.log.wait_for(JobEnded)
        (await sidecar.jvm()).tell_job_end(5, 5)
        await sidecar.log.wait_for(JobEnded, lambda fact: fact.job_id == 5)
        assert sidecar.log.facts[1] == FactsDropped(3)
        assert sidecar.statistics.dropped == 3


async def test_a_sidecar_that_takes_over_does_not_count_earlier_records_as_lost() -> None:
    log = FactsLog()
    server = RelayServer(log.receive, RelayStatistics(), KEYS, joins=True)
    address = await server.listen()
    try:
        jvm = await FakeJvm.connect(address, KEY)
        jvm.tell_job_end(5001, 7)
        jvm.tell_job_end(5003, 8)
        await log.wait_until(lambda: len(log.facts) == 3)
        jvm.writer.close()
    finally:
        await server.close()
    assert log.facts == [JobEnded(7, True), FactsDropped(1), JobEnded(8, True)]


async def test_a_record_that_cannot_be_read_costs_only_itself() -> None:
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        jvm.tell(1, b"\xffnonsense!")
        jvm.tell_job_end(2, 2)
        await sidecar.log.wait_for(JobEnded)
        assert sidecar.log.facts == [FactsDropped(1), JobEnded(2, True)]


async def test_a_handler_that_raises_does_not_cost_the_next_fact() -> None:
    async with a_sidecar() as sidecar:
        receive = sidecar.log.receive
        calls = iter([True])

        def raise_once(relayed: object) -> None:
            if next(calls, False):
                raise ValueError("a bad handler")
            receive(relayed)  # type: ignore[arg-type]

        sidecar.server._on_fact = raise_once
        jvm = await sidecar.jvm()
        with structlog.testing.capture_logs() as lines:
            jvm.tell_job_end(1, 1)
            jvm.tell_job_end(2, 2)
            await sidecar.log.wait_for(JobEnded, lambda fact: fact.job_id == 2)
        assert [line["event"] for line in lines] == ["Spark fact handler failed"]


async def test_a_peer_without_the_secret_is_refused_and_delivers_nothing() -> None:  # H61
    async with a_sidecar() as sidecar:
        with pytest.raises(ConnectionError):
            await sidecar.jvm(Key(KEY.identity, b"a guess of the right length 32 b"))
        assert sidecar.log.facts == []


async def test_the_jvm_of_another_driver_is_refused() -> None:  # H76
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        assert sidecar.server.driver == KEY.identity
        with pytest.raises(ConnectionError):
            await sidecar.jvm(KEYS.key(Purpose.RELAY, b"another driver's"))
        jvm.tell_job_end(1, 1)
        await sidecar.log.wait_for(JobEnded)


@pytest.mark.parametrize("purpose", [Purpose.TASKS, Purpose.CONTROL])
async def test_a_key_for_another_purpose_does_not_open_the_relay(purpose: Purpose) -> None:  # H76
    async with a_sidecar() as sidecar:
        with pytest.raises(ConnectionError):
            await sidecar.jvm(KEYS.key(purpose, KEY.identity))
        assert not sidecar.server.linked


@pytest.mark.parametrize("bad_frame", [b"\xff" * 4, b"\x00" * 4, b"\x00\x00\x00\x03abc"])
async def test_a_bad_frame_closes_its_connection_and_the_jvm_may_come_back(bad_frame: bytes) -> None:  # H62
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        jvm.writer.write(bad_frame)
        assert await jvm.hung_up()
        (await sidecar.jvm()).tell_job_end(1, 1)
        await sidecar.log.wait_for(JobEnded)


async def test_a_command_outlives_a_broken_connection() -> None:
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        command = asyncio.gather(sidecar.server.command(PING, b""))
        assert await jvm.next_command() == (PING, 1)
        jvm.writer.close()
        again = await sidecar.jvm()
        assert await again.next_command() == (PING, 1)
        again.answer(1)
        assert (await command)[0] == CommandAnswered(1, None)


async def test_a_command_that_spark_refuses_says_why() -> None:
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        command = asyncio.gather(sidecar.server.command(PING, b""), return_exceptions=True)
        _, request_id = await jvm.next_command()
        jvm.answer(request_id, "there is no such thing")
        [problem] = await command
        assert isinstance(problem, RelayError)
        assert "there is no such thing" in str(problem)


async def test_a_command_without_an_answer_has_a_deadline() -> None:  # H48
    async with a_sidecar(command_timeout_s=0.01) as sidecar:
        await sidecar.jvm()
        with pytest.raises(RelayError, match="did not answer within"):
            await sidecar.server.command(PING, b"")


async def test_the_end_of_the_application_ends_the_commands_that_wait() -> None:
    async with a_sidecar() as sidecar:
        jvm = await sidecar.jvm()
        command = asyncio.gather(sidecar.server.command(PING, b""), return_exceptions=True)
        await jvm.next_command()
        jvm.tell(1, record(9))
        [problem] = await command
        assert isinstance(problem, RelayStopped)
        assert sidecar.log.facts == [ApplicationEnded()]
        with pytest.raises(RelayStopped, match="has stopped"):
            await sidecar.server.command(PING, b"")


async def test_a_jvm_that_does_not_come_back_is_reported_once() -> None:  # H48
    async with a_sidecar(reconnect_timeout_s=0.01) as sidecar:
        (await sidecar.jvm()).writer.close()
        async with asyncio.timeout(20):
            await sidecar.lost.wait()
        with pytest.raises(RelayStopped, match="did not reconnect"):
            await sidecar.server.command(PING, b"")


async def test_every_address_can_be_listened_on_if_one_is_advertised() -> None:  # H63
    server = RelayServer(FactsLog().receive, RelayStatistics(), KEYS)
    address = await server.listen("0.0.0.0", 0, "127.0.0.1")
    try:
        jvm = await FakeJvm.connect(address, KEY)
        jvm.writer.close()
    finally:
        await server.close()
    assert address[0] == "127.0.0.1"


async def test_closing_twice_is_closing_once() -> None:
    async with a_sidecar() as sidecar:
        await sidecar.server.close()
        await sidecar.server.close()
        with pytest.raises(RelayStopped, match="closed"):
            await sidecar.server.command(PING, b"")
