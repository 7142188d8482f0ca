# SPDX-License-Identifier: Apache-2.0

"""Attacks below the plaintext of an encrypted port, before and after authentication (H157, H158).

An attacker has a handshake of TLS like everybody, and then sends records of its making (``records``). The same records
are also tried without a socket, where it can be seen what the server's end keeps.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from random import Random

from protocol.errors import RemoteProtocolError
from protocol.wire.codec import encode_message
from protocol.wire.keys import KeyRing
from protocol.wire.messages import Confirm
from spark_bridge.common.certificates import Encryption, encryption
from spark_bridge.common.tls import TlsStream, client_context
from tests.fuzz import mutations
from tests.fuzz.attackers import AT_MOST_ONE_LINE, DRIP_S, ONE_LINE, Attack, Intruder, assert_told_nothing
from tests.fuzz.line import Line
from tests.fuzz.records import ALERT, APPLICATION_DATA, CLOSE_NOTIFY, HANDSHAKE, RecordLayer, cleartext_record, shaken
from tests.fuzz.target import Target, about_input

FLOOD_BYTES = 4 * 2**20
KEPT_BYTES_MAX = 2 * (2**14 + 256)
"""What one end may keep of an encrypted connection: two records."""
_SECRET = KeyRing(b"the secret of a fuzzed connection")
_made: list[Encryption] = []


def hostile_records(random: Random, records: RecordLayer) -> Iterator[bytes]:
    """Yield records without an end, many of them of the same kind."""
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: records.new_keys(answered=True),
        lambda: records.new_keys(answered=False),
        lambda: records.record(APPLICATION_DATA, b""),
        lambda: records.record(APPLICATION_DATA, random.randbytes(1)),
        lambda: records.record(APPLICATION_DATA, bytes(2**14)),
        lambda: records.record(APPLICATION_DATA, b"x", padding=2**14 - 1),
        lambda: records.record(APPLICATION_DATA, encode_message(Confirm(1, 1))),
        lambda: records.record(HANDSHAKE, random.randbytes(random.randrange(1, 100))),
        lambda: records.record(HANDSHAKE, b"\x04\x00\x40\x00" + bytes(1000)),
        lambda: records.record(HANDSHAKE, b"\x18"),
        lambda: records.record(ALERT, b"\x01\x5a"),
        lambda: records.record(ALERT, CLOSE_NOTIFY),
        lambda: records.record(random.randrange(256), random.randbytes(20)),
        lambda: mutations.mutated(random, records.record(APPLICATION_DATA, bytes(20))),
        lambda: cleartext_record(
            random.choice((20, ALERT, HANDSHAKE)), b"\x01", claimed=random.choice((1, 2**14, 65535))
        ),
        lambda: records.record(APPLICATION_DATA, bytes(2**14))[:-1],
    )
    while True:
        kind = random.choice(kinds)
        for _ in range(random.choice((1, 1, 3, 200))):
            yield kind()


# --- at a port ----------------------------------------------------------------------------------------------------


async def end_of_encryption(intruder: Intruder) -> None:
    """Say that nothing more comes, and send more, before or after authentication."""
    line = await _below(intruder, AT_MOST_ONE_LINE)
    if line.records is not None:
        if intruder.random.random() < 0.5:
            await line.greet(intruder.key(), intruder.nonce())
        await line.send_raw(line.records.record(ALERT, CLOSE_NOTIFY))
        await _flood(line, bytes(2**16))
    await line.close()


async def records_of_every_kind(intruder: Intruder) -> None:
    line = await _below(intruder, AT_MOST_ONE_LINE)
    if line.records is not None:
        if intruder.random.random() < 0.5:
            await line.greet(intruder.key(), intruder.nonce())
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(line.until_closed())
            sent = 0
            for data in hostile_records(intruder.random, line.records):
                await line.send_raw(data)
                sent += len(data)
                if listening.done() or sent > FLOOD_BYTES:
                    break
            line.half_close()
    await line.close()


async def endless_hello(intruder: Intruder) -> None:
    """Claim a first message of TLS that is huge, and send it in small records, quickly or a byte at a time."""
    line = await intruder.open(ONE_LINE, raw=True)
    await line.send_raw(cleartext_record(HANDSHAKE, b"\x01\x01\xff\xff" + bytes(8)))
    if intruder.random.random() < 0.5:
        await _flood(line, cleartext_record(HANDSHAKE, bytes(1)) * 1000)
        await line.until_closed()
    else:
        await _drip(line, cleartext_record(HANDSHAKE, bytes(1)))
    await line.close()


async def record_without_an_end(intruder: Intruder) -> None:
    """Begin the largest record, and send it a byte at a time; the deadline to authenticate ends that."""
    line = await intruder.open(ONE_LINE)
    await line.send_raw(b"\x17\x03\x03\x40\x10")
    await _drip(line, b"\x00")
    await line.close()


async def _below(intruder: Intruder, worth: range) -> Line:
    line = await Line.open(intruder.address, intruder.pin, below=True)
    intruder.lines.setdefault(line.name, []).append(worth)
    return line


async def _flood(line: Line, data: bytes) -> None:
    """Send much, unless the server ends the connection."""
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(line.until_closed())
        for _ in range(FLOOD_BYTES // len(data)):
            await line.send_raw(data)
            if listening.done():
                break
        line.half_close()


async def _drip(line: Line, data: bytes) -> None:
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(line.until_closed())
        while not listening.done():
            await line.send_raw(data)
            await asyncio.sleep(DRIP_S)
    assert_told_nothing(listening.result())


BELOW: tuple[Attack, ...] = (
    end_of_encryption,
    records_of_every_kind,
    endless_hello,
    record_without_an_end,
)


# --- without a port -----------------------------------------------------------------------------------------------


def _context() -> ssl.SSLContext:
    if not _made:
        _made.append(encryption(True, _SECRET))
    context = _made[0].context
    assert context is not None
    return context


def _case(random: Random) -> None:
    """Give one end what another one should not send, in any portions; see what it keeps, and what it raises."""
    if random.random() < 0.3:  # in the handshake
        stream = TlsStream(_context())
        hello = TlsStream(client_context(), pin=bytes(32)).start()
        sent = iter([mutations.mutated(random, hello), *[cleartext_record(HANDSHAKE, bytes(40))] * 1000])
    else:
        stream, _, records = shaken(_context(), _made[0].certificate_sha256)
        sent = hostile_records(random, records)
    given = 0
    for data in sent:
        portion = random.choice((1, 100, 5000, 65_536)) if len(data) < 1000 else random.choice((5000, 65_536))
        for at in range(0, len(data), portion):
            with about_input(data):
                try:
                    plain, reply = stream.receive(data[at : at + portion])
                except RemoteProtocolError:  # of which a failed handshake is one
                    return
                kept = stream._incoming.pending + stream._outgoing.pending
                assert kept <= KEPT_BYTES_MAX, f"{kept} bytes are kept of {given}"
                assert not (stream.ended and kept)
                assert len(plain) + len(reply) <= len(data) + KEPT_BYTES_MAX
        given += len(data)
        if given > 10 * KEPT_BYTES_MAX and (stream.ended or not stream.established or given > FLOOD_BYTES):
            assert stream.established, "a handshake has no end"
            return


TARGETS = (Target("tls", "records of TLS that no library sends, in any portions", _case),)
