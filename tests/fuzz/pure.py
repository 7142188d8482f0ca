# SPDX-License-Identifier: Apache-2.0

"""Targets without a socket: the decoders of everything that comes from outside.

A decoder takes valid, cut off, mutated and random bytes, and bytes that are small on the wire and large in memory. It
returns a value that survives being sent on, or refuses the bytes with a documented error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from protocol.errors import CheckpointCorrupt, EventEncodeError, RemoteProtocolError
from protocol.wire.checkpoint_format import decode_checkpoint, encode_checkpoint
from protocol.wire.codec import decode_event, decode_message, encode_event, encode_message
from protocol.wire.fragments import PASSING, FragmentDecoder, Outbox
from protocol.wire.messages import Message
from spark_bridge.bridge.relay.records import RecordDecodeError, decode_record
from tests.fuzz import mutations, samples
from tests.fuzz.reseal import resealed
from tests.fuzz.samples import LIMITS
from tests.fuzz.target import Target, about_input, within_memory

ERROR_CHARS_MAX = 600
"""A peer's errors go into one line of a log; it must not be able to fill the disk with them."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """``memory_times``: how much memory it may take, in sizes of its input. ``ends``: only the whole is a value.

    ``sample`` makes valid bytes, ``more`` other bytes that are worth trying. ``send_on`` encodes a value again and
    checks that it comes back.
    """

    name: str
    about: str
    decode: Callable[[bytes], Any]
    error: type[Exception]
    memory_times: int
    sample: Callable[[Random], bytes]
    send_on: Callable[[Any, bytes], None] = lambda value, data: None
    more: Callable[[Random, bytes], Iterator[bytes]] = lambda random, data: iter(())
    ends: bool = True

    def accepts(self, data: bytes) -> bool:
        """Return whether ``data`` is a value; anything else than a value or the documented error fails the case."""
        with about_input(data):
            try:
                value = within_memory(self.decode, data, self.memory_times)
            except self.error as error:
                check_error(error)
                return False
            self.send_on(value, data)
            return True

    def case(self, random: Random) -> None:
        data = self.sample(random)
        assert self.accepts(data)
        for part in (*mutations.truncations(data[:400]), data + b"\x00"):
            with about_input(part):
                assert not (self.accepts(part) and self.ends), "a part of it, or more than one, was taken for a whole"
        for _ in range(20):
            self.accepts(mutations.mutated(random, data))
        for other in (random.randbytes(random.choice((1, 3, 20, 200))), *self.more(random, data)):
            self.accepts(other)

    def target(self) -> Target:
        return Target(self.name, self.about, self.case, self.accepts)


def check_error(error: Exception, about: str = "") -> None:
    assert str(error), "an error that says nothing"
    assert about in str(error)
    assert len(str(error)) <= ERROR_CHARS_MAX, f"an error of {len(str(error))} characters"


# --- messages and events ------------------------------------------------------------------------------------------


def _send_message_on(message: Any, data: bytes) -> None:
    assert decode_message(encode_message(message, LIMITS)[4:], LIMITS) == message


def _send_event_on(event: Any, data: bytes) -> None:
    try:
        again = encode_event(event, LIMITS)
    except EventEncodeError:  # a float of 32 bits is sent with 64
        assert len(data) > LIMITS.event_bytes_max // 2
        return
    assert encode_event(decode_event(again, LIMITS), LIMITS) == again


def _rows_of_bombs(random: Random, data: bytes) -> Iterator[bytes]:
    row = random.choice((b"\x9a\x1e", b"\x97\x0f", b"\x96\x11", b"")) + b"\x01" * random.randrange(6)
    yield row + random.choice((_bomb(random, 60_000), _bush(LIMITS.held_events_max)))


def _bombs_and_forests(random: Random, data: bytes) -> Iterator[bytes]:
    yield _bomb(random, LIMITS.event_items_max)
    yield _forest(random)


def _forest(random: Random) -> bytes:
    """Return lists or maps that are each within the limits, and together at a limit or beyond it.

    What is exactly within must be decoded, and one more container or entry refused.
    """
    limit, name = random.choice(
        ((LIMITS.event_containers_max, "lists and maps"), (LIMITS.event_items_max, "entries in its lists and maps"))
    )
    entry = random.choice((b"\x90", b"\x80")) if name == "lists and maps" else b"\xc0"
    rows = random.choice((2, 3, 7))
    spread = limit - 1 - rows if name == "lists and maps" else limit - rows  # the rows and the root count, too
    sizes = [spread // rows + (row < spread % rows) for row in range(rows)]

    def packed() -> bytes:
        head = b"\xdd" + rows.to_bytes(4, "big")
        return head + b"".join(b"\xdd" + size.to_bytes(4, "big") + entry * size for size in sizes)

    decode_event(packed(), LIMITS)
    sizes[-1] += 1
    try:
        decode_event(packed(), LIMITS)
    except RemoteProtocolError as error:
        check_error(error, name)
    else:
        raise AssertionError(f"an event with one of the {name} too many was decoded")
    sizes[-1] += random.choice((0, 1, 500))
    return packed()


def _bomb(random: Random, count_max: int) -> bytes:
    """Return data that is small on the wire and large in memory."""
    entry = random.choice((b"\x90", b"\x80", b"\x91\x90", b"\x81\xc0\x80", b"\xcb\x00\x00\x00\x00\x00\x00\x00\x01"))
    count = random.choice((100, LIMITS.event_items_max, count_max, count_max + 1))
    inner = b"\xdd" + count.to_bytes(4, "big") + entry * count
    nested = random.choice((b"\x91", b"\xdc\x07\x00", b"\xdd\x00\x00\x07\x00")) * random.choice((0, 3, 15, 400))
    return nested + inner


def _bush(width: int) -> bytes:
    """Return lists of lists of empty lists, none of them too long."""
    head = b"\xdc" + width.to_bytes(2, "big")
    return head + (head + (head + b"\x90" * width) * 3) * width


# --- fragments ----------------------------------------------------------------------------------------------------


def _fragments_case(random: Random) -> None:
    """Large and small messages in fragments come whole, in any portions; damaged ones do, or are refused."""
    outbox, sent, stream = Outbox(LIMITS), list[Message](), b""
    for _ in range(random.randrange(1, 6)):
        message = samples.message(random)
        sent.append(decode_message(encode_message(message, LIMITS)[4:], LIMITS))  # a number may become a float
        stream += outbox.put(message)
        if random.random() < 0.5:
            stream += outbox.next()
    while outbox.busy:
        stream += outbox.next()
    with about_input(stream):
        came = _fragments_of(random, stream)
        for passing in (True, False):
            assert [one for one in came if (type(one) in PASSING) is passing] == [
                one for one in sent if (type(one) in PASSING) is passing
            ]
    for _ in range(10):
        _accepts_fragments(mutations.mutated(random, stream), random)
    _accepts_fragments(random.randbytes(random.choice((3, 20, 200))), random)


def _fragments_of(random: Random, stream: bytes) -> list[Message]:
    decoder, messages = FragmentDecoder(LIMITS), list[Message]()
    while stream:
        size = random.choice((1, 7, 1000, 5000))
        messages += decoder.messages(stream[:size])
        assert decoder.buffered_bytes <= LIMITS.message_bytes_max + 2 * LIMITS.fragment_bytes
        stream = stream[size:]
    return messages


def _accepts_fragments(stream: bytes, random: Random | None = None) -> bool:
    with about_input(stream):
        try:
            within_memory(lambda data: _fragments_of(random or Random(0), data), stream, 64)
        except RemoteProtocolError as error:
            check_error(error)
            return False
        return True


# --- checkpoints --------------------------------------------------------------------------------------------------


def _send_checkpoint_on(stored: Any, data: bytes) -> None:
    assert decode_checkpoint(encode_checkpoint(stored)) == stored


def _resealed(random: Random, data: bytes) -> Iterator[bytes]:
    """Yield damaged checkpoints with a right checksum. Any that has not is refused."""
    for _ in range(10):
        spoilt = mutations.mutated(random, data)
        if spoilt != data:
            with about_input(spoilt):
                assert not CHECKPOINT.accepts(spoilt), "an altered checkpoint was taken for a whole one"
        yield resealed(spoilt)
    yield resealed(data[: random.randrange(len(data))])


MESSAGES = Decoder(
    "codec",
    "messages: valid, cut off, mutated, random, bombs",
    lambda body: decode_message(body, LIMITS),
    RemoteProtocolError,
    16,
    lambda random: encode_message(samples.message(random), LIMITS)[4:],
    _send_message_on,
    _rows_of_bombs,
)
EVENTS = Decoder(
    "events",
    "payloads: valid, mutated, cut off, bombs",
    lambda payload: decode_event(payload, LIMITS),
    RemoteProtocolError,
    160,  # an empty dict takes one byte there and 64 here
    lambda random: encode_event(samples.event(random), LIMITS),
    _send_event_on,
    _bombs_and_forests,
    ends=False,
)
CHECKPOINT = Decoder(
    "checkpoint",
    "checkpoint files: altered, cut off, with a right checksum",
    decode_checkpoint,
    CheckpointCorrupt,
    128,  # an empty state takes three bytes there
    lambda random: encode_checkpoint(samples.checkpoint(random)),
    _send_checkpoint_on,
    _resealed,
)
RELAY = Decoder(
    "relay", "records of the listener in the JVM", decode_record, RecordDecodeError, 64, samples.relay_record
)
FRAGMENTS = Target(
    "fragments", "large messages in parts: valid, in any portions, mutated", _fragments_case, _accepts_fragments
)
TARGETS = (*(decoder.target() for decoder in (MESSAGES, EVENTS, CHECKPOINT, RELAY)), FRAGMENTS)
