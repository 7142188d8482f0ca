# SPDX-License-Identifier: Apache-2.0

"""Hostile peers that attack the server in various ways.

An attack gets a connection and records how many lines the server may have logged about that connection. More than one
is never right (H62).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from protocol.wire.codec import encode_message
from protocol.wire.fragments import encode_whole
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.handshake import NONCE_BYTES, PROTOCOL_VERSION, ClientHandshake
from protocol.wire.keys import Key, KeyRing, Purpose, identity_of
from protocol.wire.messages import (
    AttemptEnded,
    Confirm,
    EventMessage,
    Opened,
    Refused,
    Register,
    Registered,
    RestoreMode,
    Resume,
    Resumed,
)
from spark_bridge.common.tls import TlsStream, client_context
from tests.fuzz import mutations, samples
from tests.fuzz.line import CHALLENGE_BYTES, HELLO_BYTES, Line

_HEAD = b"HDGT" + PROTOCOL_VERSION.to_bytes(2, "big")
_LARGE_START = b"\x00\x00\x00\x05\xc0\x00\x10\x00\x00"
TRIES_MAX = 20
DRIP_S = 0.05
"""A slow sender's pause between two bytes."""

ONE_LINE = range(1, 2)
AT_MOST_ONE_LINE = range(2)
NO_LINE = range(1)


@dataclass(slots=True)
class Intruder:
    """The resources of an attack. ``keys`` are the right ones; strangers may use them only to be nearly right.

    ``lines`` collects the names of the connections and the number of log lines allowed for each. A port, and with
    it a name, may be used again. ``purpose`` is what the port is for. ``pin`` is the digest of the server's
    certificate; empty if the port is not encrypted.
    """

    random: Random
    address: tuple[str, int]
    keys: KeyRing
    lines: dict[str, list[range]] = field(default_factory=dict)
    pin: bytes = b""
    purpose: Purpose = Purpose.TASKS

    def key(self, name: str = "victim") -> Key:
        """The key that this port expects of the operator or driver with this name."""
        return self.keys.key(self.purpose, identity_of(name))

    async def open(self, worth: range, *, raw: bool = False) -> Line:
        """Connect. ``raw``: without TLS, also to a port that expects it."""
        line = await Line.open(self.address, b"" if raw else self.pin)
        self.lines.setdefault(line.name, []).append(worth)
        return line

    async def authenticated(self, worth: range, name: str = "victim") -> Line:
        """Authenticate a connection with the key of this name; again if a crowd of strangers has pushed it out."""
        for _ in range(TRIES_MAX):
            line = await self.open(worth)
            await line.greet(self.key(name), self.nonce())
            if line.authenticated:
                return line
            self.lines[line.name][-1] = ONE_LINE
            await line.close()
        raise AssertionError(f"the server has turned away the right key {TRIES_MAX} times")

    def nonce(self) -> bytes:
        return self.random.randbytes(NONCE_BYTES)


Attack = Callable[[Intruder], Awaitable[None]]


def assert_told_nothing(heard: bytes) -> None:
    """Check that a stranger receives nothing, or only the hello that every peer receives (H61)."""
    assert heard == b"" or (len(heard) == CHALLENGE_BYTES and heard.startswith(_HEAD)), f"a stranger heard {heard!r}"


# --- strangers ----------------------------------------------------------------------------------------------------


async def babble(intruder: Intruder) -> None:
    """Send another protocol, noise, or a hello that is nearly right."""
    random = intruder.random
    line = await intruder.open(ONE_LINE)
    hello = _HEAD + bytes(16) + intruder.nonce()
    noise = random.choice(
        (
            b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
            b"\x16\x03\x01" + random.randbytes(300),
            b"\x00" * random.choice((1, 38, 100_000)),
            b"HDG" + random.randbytes(40).replace(b"T", b"t"),
            hello + random.randbytes(32),
            hello + random.randbytes(200_000),
            hello + hello,
        )
    )
    await line.send(noise)
    assert_told_nothing(await line.until_closed())
    await line.close()


async def cut_off(intruder: Intruder) -> None:
    """End a valid handshake at one of its bytes: by a close, a reset, or silence."""
    await cut_off_at(intruder, intruder.random.randrange(HELLO_BYTES + 32), intruder.random.choice(ENDINGS))


ENDINGS = ("goodbye", "reset", "silence")


async def cut_off_at(intruder: Intruder, length: int, ending: str) -> None:
    line = await intruder.open(ONE_LINE if ending == "silence" else AT_MOST_ONE_LINE)
    handshake = ClientHandshake(intruder.key(), intruder.nonce())
    await line.send(handshake.initial_bytes()[:length])
    heard = b""
    if length >= HELLO_BYTES:
        heard = await line.read()
        if heard:  # else it was dropped as the oldest of too many
            await line.send(handshake.receive(heard)[: length - HELLO_BYTES])
    if ending == "reset":
        line.reset()
    else:
        if ending == "goodbye":
            line.half_close()
        heard += await line.until_closed()
    assert_told_nothing(heard)
    await line.close()


async def wrong_secret(intruder: Intruder) -> None:
    line = await intruder.open(ONE_LINE)
    assert_told_nothing(await line.greet(Key(intruder.key().identity, intruder.random.randbytes(32)), intruder.nonce()))
    await line.close()


async def key_of_another_port(intruder: Intruder) -> None:
    """Use a right key at the wrong port (H76)."""
    others = [purpose for purpose in (Purpose.TASKS, Purpose.RELAY, Purpose.CONTROL) if purpose is not intruder.purpose]
    key = intruder.key()
    line = await intruder.open(ONE_LINE)
    other = intruder.keys.key(intruder.random.choice(others), key.identity)
    assert_told_nothing(await line.greet(other, intruder.nonce()))
    assert not line.authenticated, "a key for another purpose was accepted"
    await line.close()


async def wrong_version(intruder: Intruder) -> None:
    """Announce a wrong version, and perhaps leave slowly."""
    line = await intruder.open(ONE_LINE)
    version = intruder.random.choice((0, 1, PROTOCOL_VERSION + 1, 65_535))
    await line.send(b"HDGT" + version.to_bytes(2, "big") + intruder.nonce()[: intruder.random.randrange(33)])
    assert_told_nothing(await line.until_closed())
    await line.close()


async def replay(intruder: Intruder) -> None:
    """Replay the bytes of an authenticated connection."""
    first = await intruder.open(AT_MOST_ONE_LINE)
    handshake = ClientHandshake(intruder.key(), intruder.nonce())
    await first.send(handshake.initial_bytes())
    challenge = await first.read()
    second = await intruder.open(ONE_LINE)
    if challenge:
        await second.send(handshake.initial_bytes() + handshake.receive(challenge))
    assert_told_nothing(await second.until_closed())
    first.reset()
    await second.close()


async def slow(intruder: Intruder) -> None:
    """Send a byte now and then; the deadline ends the connection, because bytes do not extend it."""
    line = await intruder.open(ONE_LINE)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(line.until_closed())
        for byte in _HEAD + bytes(48):
            if listening.done():
                break
            await line.send(bytes([byte]))
            await asyncio.sleep(DRIP_S)
    assert_told_nothing(listening.result())
    await line.close()


async def crowd(intruder: Intruder) -> None:
    """Open many connections at the same time that send nothing, or half of a hello."""
    random = intruder.random
    lines = await asyncio.gather(*(intruder.open(AT_MOST_ONE_LINE) for _ in range(random.choice((20, 100)))))
    for line in lines:
        await line.send(_HEAD[: random.randrange(7)])
    for line in lines:
        line.reset()


async def crowd_of_another_version(intruder: Intruder) -> None:
    """Open many connections that are refused, and keep their end open."""

    async def one() -> None:
        line = await intruder.open(ONE_LINE)
        await line.send(b"HDGT\x00\x63")
        assert_told_nothing(await line.until_closed())
        await line.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(one())


async def come_and_reset(intruder: Intruder) -> None:
    line = await intruder.open(AT_MOST_ONE_LINE)
    await line.send(_HEAD[: intruder.random.randrange(7)])
    line.reset()


# --- strangers at an encrypted port (H77) ----------------------------------------------------------------------------


async def garbage_records(intruder: Intruder) -> None:
    """Send something that is not TLS, or whose records are wrong."""
    random = intruder.random
    line = await intruder.open(ONE_LINE, raw=True)
    hello = _client_hello()
    garbage = random.choice(
        (
            _HEAD + bytes(48),
            b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
            b"\x17\x03\x03\x40\x00" + random.randbytes(2**14),
            b"\x16\x03\x01\xff\xff" + random.randbytes(2**16),
            b"\x15\x03\x03\x00\x02\x02\x28",
            hello + hello,
            hello[:5] + random.randbytes(len(hello) - 5),
            hello + b"\x17\x03\x03\x01\x00" + random.randbytes(2**8),
        )
    )
    await line.send_raw(garbage)
    line.half_close()
    await line.until_closed()
    await line.close()


async def mutated_hello(intruder: Intruder) -> None:
    """Send a damaged first message of TLS, and leave; it may be one that is still understood."""
    line = await intruder.open(AT_MOST_ONE_LINE, raw=True)
    await line.send_raw(mutations.mutated(intruder.random, _client_hello()))
    line.half_close()
    await line.until_closed()
    await line.close()


async def cut_off_tls(intruder: Intruder) -> None:
    """End the TLS handshake at one of its bytes: by a close, a reset, or silence."""
    random = intruder.random
    ending = random.choice(ENDINGS)
    line = await intruder.open(ONE_LINE if ending == "silence" else AT_MOST_ONE_LINE, raw=True)
    hello = _client_hello()
    await line.send_raw(hello[: random.randrange(len(hello) + 1)])
    if ending == "reset":
        line.reset()
    elif ending == "goodbye":
        line.half_close()
    await line.until_closed()
    await line.close()


async def damaged_record(intruder: Intruder) -> None:
    """Send a record that was changed on the way, after the handshake of TLS."""
    line = await intruder.open(ONE_LINE)
    await line.send_raw(b"\x17\x03\x03\x00\x40" + intruder.random.randbytes(64))
    assert_told_nothing(await line.until_closed())
    await line.close()


def _client_hello() -> bytes:
    return TlsStream(client_context(), pin=bytes(32)).start()


# --- peers that know a key -----------------------------------------------------------------------------------


async def bad_frame(intruder: Intruder) -> None:
    """Send something that is not a task's message, after a valid handshake."""
    random = intruder.random
    line = await intruder.authenticated(ONE_LINE)
    honest = encode_message(Confirm(1, 1))
    frames = (
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff" + random.randbytes(100),
        b"\x00\x00\x00\x02" + b"\x92\x63",
        b"\x00\x00\x00\x01\xc1" + honest,
        encode_message(Resumed(7, 1)),
        len(bush := b"\x9a\x1e\x01\x01\x01" + b"\xdc\x00\xff" * 500 + bytes(255)).to_bytes(4, "big") + bush,
        b"\x00\x00\x10\x00" + b"\x91" * 4096,
        b"\x00\x00\x00\x05\xc0\xff\xff\xff\xff",  # the start of a large message, then others that do not fit
        _LARGE_START + b"\x00\x00\x00\x01\xc1",
        _LARGE_START + honest + b"\x00\x00\x00\x03\xc1ab",
        _LARGE_START + _LARGE_START,
    )
    await line.send(random.choice(frames))
    await line.until_closed()
    await line.close()


async def mutated_frames(intruder: Intruder) -> None:
    """Send corrupted frames of every kind, then wait to be disconnected, or leave."""
    random = intruder.random
    line = await intruder.authenticated(AT_MOST_ONE_LINE)
    for _ in range(random.randrange(1, 6)):
        frames = encode_message(samples.message(random, random.choice(samples.UPWARD_KINDS)))
        if random.random() < 0.5:
            await line.send(mutations.mutated(random, frames))
        else:
            body = mutations.mutated(random, frames[4:])
            await line.send(len(body).to_bytes(4, "big") + body)
    if random.random() < 0.3:
        line.reset()
    else:
        line.half_close()
        await line.until_closed()
    await line.close()


async def drip_into_a_frame(intruder: Intruder) -> None:
    """Announce a frame and send it byte by byte; the deadline for registration ends the connection."""
    line = await intruder.authenticated(ONE_LINE)
    await line.send((2**20).to_bytes(4, "big"))
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(line.until_closed())
        while not listening.done():
            await line.send(b"\x91")
            await asyncio.sleep(DRIP_S)
    await line.close()


async def silent_insider(intruder: Intruder) -> None:
    line = await intruder.authenticated(ONE_LINE)
    await line.until_closed()
    await line.close()


async def speak_unasked(intruder: Intruder) -> None:
    """Send an item before any registration, or a registration with something after it."""
    random = intruder.random
    line = await intruder.authenticated(ONE_LINE)
    await line.say(*random.choice(([Opened(7, 1)], [Confirm(7, 1)], [a_register(random), Opened(7, 1)])))
    await line.until_closed()
    await line.close()


async def register_nonsense(intruder: Intruder) -> None:
    """Send a registration that matches nothing in the driver, or contradicts a live one.

    A peer that knows an operator's key may pose as a task that Spark has not started yet, because the fact of its start
    may be lost (H19). Such a peer leaves. With the key of another operator it is not answered at all (H76).
    """
    register = a_register(intruder.random)
    line = await intruder.authenticated(AT_MOST_ONE_LINE, intruder.random.choice(("victim", register.operator_id)))
    await line.say(register)
    if intruder.random.random() < 0.7:
        for answer in await line.messages():
            assert isinstance(answer, Refused | Registered | AttemptEnded), f"a registration was answered by {answer}"
    line.reset()
    await line.close()


async def resume_nonsense(intruder: Intruder) -> None:
    """Resume an attempt that never existed, or an honest one without its token (H74)."""
    random = intruder.random
    operator_id = random.choice(("honest", "victim", "x"))
    line = await intruder.authenticated(ONE_LINE, random.choice(("victim", operator_id)))
    task = random.choice((random.randrange(1, 5), 10**6 + samples.natural(random) % 2**60))
    await line.say(Resume(task, operator_id, 0, random.choice((b"", bytes(32), random.randbytes(32)))))
    await line.until_closed()
    await line.close()


async def part_of_a_large_message(intruder: Intruder) -> None:
    """Send most of a large message, and never the rest; the deadline for registration ends the connection."""
    line = await intruder.authenticated(AT_MOST_ONE_LINE)
    await line.send(
        encode_whole(EventMessage(7, 1, bytes(intruder.random.choice((1, 8)) * 2**20)), DEFAULT_LIMITS)[:-1]
    )
    await line.until_closed()
    await line.close()


async def storm_of_connections(intruder: Intruder) -> None:
    """Prove the key, leave, and come back immediately."""
    for _ in range(50):
        line = await intruder.authenticated(AT_MOST_ONE_LINE)
        line.reset()
        await line.close()


def a_register(random: Random) -> Register:
    """Return a registration of an unknown operator, subtask or run, or of a task that has registered.

    It never uses an honest task's id for another operator: one task may hold several, so that would be believed.
    """
    operator_id, subtask, run_id = random.choice(
        (
            (samples.text(random, 256, 1), 0, 1),
            ("honest", 1000 + samples.natural(random) % 2**60, 1),
            ("honest", random.randrange(4), 7 + samples.natural(random) % 2**60),
            ("victim", random.randrange(9), random.choice((1, 2, samples.natural(random)))),
        )
    )
    strange = 10**6 + samples.natural(random) % 2**60
    return Register(
        task_attempt_id=strange if operator_id == "victim" else random.choice((random.randrange(1, 4), strange)),
        operator_id=operator_id,
        subtask=subtask,
        run_id=run_id,
        attempt_number=samples.natural(random),
        mode=RestoreMode.BATCH,
        parallelism=random.choice((4, 8, samples.natural(random, 1))),
        location=samples.text(random, 256),
        python_version=samples.text(random, 256),
    )


STRANGERS: tuple[Attack, ...] = (
    babble,
    cut_off,
    wrong_secret,
    key_of_another_port,
    wrong_version,
    replay,
    slow,
    crowd,
    crowd_of_another_version,
    come_and_reset,
)
TLS_STRANGERS: tuple[Attack, ...] = (garbage_records, mutated_hello, cut_off_tls, damaged_record)
INSIDERS: tuple[Attack, ...] = (
    bad_frame,
    mutated_frames,
    drip_into_a_frame,
    silent_insider,
    speak_unasked,
    register_nonsense,
    resume_nonsense,
    part_of_a_large_message,
    storm_of_connections,
)
