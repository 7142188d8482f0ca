# SPDX-License-Identifier: Apache-2.0

"""Targets without a socket: everything that turns bytes from outside into values."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

from protocol.errors import CheckpointCorrupt, EventEncodeError, LocalProtocolError, RemoteProtocolError
from protocol.wire.checkpoint_format import decode_checkpoint, encode_checkpoint
from protocol.wire.codec import decode_event, decode_message, encode_event, encode_message
from protocol.wire.framing import FrameDecoder
from protocol.wire.messages import Message
from spark_bridge.bridge.relay.records import RecordDecodeError, decode_record
from tests.fuzz import mutations, samples
from tests.fuzz.reseal import resealed
from tests.fuzz.samples import LIMITS
from tests.fuzz.target import Target, about_input, within_memory

ERROR_CHARS_MAX = 600
"""A peer's errors go into one line of a log; it must not be able to fill the disk with them."""
_MESSAGE_MEMORY = 16
_EVENT_MEMORY = 160  # an empty dict takes one byte there and 64 here
_CHECKPOINT_MEMORY = 128  # an empty state takes three bytes there
_RECORD_MEMORY = 64


def _check_error(error: Exception, about: str = "") -> None:
    assert str(error), "an error that says nothing"
    assert about in str(error)
    assert len(str(error)) <= ERROR_CHARS_MAX, f"an error of {len(str(error))} characters"


# --- messages -----------------------------------------------------------------------------------------------------


def check_message(data: bytes) -> Message | None:
    """Check that ``data`` is a message or a remote error, and that a message survives being sent on. Returns it."""
    with about_input(data):
        try:
            message = within_memory(lambda body: decode_message(body, LIMITS), data, _MESSAGE_MEMORY)
        except RemoteProtocolError as error:
            _check_error(error)
            return None
        assert decode_message(encode_message(message, LIMITS)[4:], LIMITS) == message
        return message


def _codec_case(random: Random) -> None:
    message = samples.message(random)
    body = encode_message(message, LIMITS)[4:]
    assert check_message(body) == message
    for _ in range(20):
        check_message(mutations.mutated(random, body))
    check_message(random.randbytes(random.choice((1, 3, 20, 200))))
    row = random.choice((b"\x9a\x1e", b"\x97\x0f", b"\x96\x11", b"")) + b"\x01" * random.randrange(6)
    check_message(row + random.choice((_bomb(random, 60_000), _bush(LIMITS.held_events_max))))


def _truncation_case(random: Random) -> None:
    """Cut off a message of each kind at each of its bytes; only the whole is a message."""
    for kind in samples.MESSAGE_KINDS:
        body = encode_message(samples.message(random, kind), LIMITS)[4:]
        for part in mutations.truncations(body[:400]):
            with about_input(part):
                assert check_message(part) is None
        with about_input(body):
            assert check_message(body + b"\x00") is None


# --- events -------------------------------------------------------------------------------------------------------


def check_event(data: bytes) -> None:
    """Check that ``data`` is an event or a remote error; events survive being sent on, up to the bound."""
    with about_input(data):
        try:
            event = within_memory(lambda payload: decode_event(payload, LIMITS), data, _EVENT_MEMORY)
        except RemoteProtocolError as error:
            _check_error(error)
            return
        try:
            again = encode_event(event, LIMITS)
        except EventEncodeError:  # a float of 32 bits is sent with 64
            assert len(data) > LIMITS.event_bytes_max // 2
            return
        assert encode_event(decode_event(again, LIMITS), LIMITS) == again


def _events_case(random: Random) -> None:
    data = encode_event(samples.event(random), LIMITS)
    check_event(data)
    for part in mutations.truncations(data):
        check_event(part)
    for _ in range(20):
        check_event(mutations.mutated(random, data))
    check_event(_bomb(random, LIMITS.event_items_max))
    check_event(_forest(random))


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
        _check_error(error, name)
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


# --- frames -------------------------------------------------------------------------------------------------------


def _framing_case(random: Random) -> None:
    """Check that bodies come out as they went in, in any portions, up to the first bad length and none after it."""
    bytes_max = random.choice((1, 16, 300))
    bodies = [random.randbytes(random.randint(1, bytes_max)) for _ in range(random.randrange(12))]
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    broken = random.random() < 0.5
    if broken:
        stream += random.choice((0, bytes_max + 1, 2**31, 2**32 - 1)).to_bytes(4, "big") + random.randbytes(20)
    decoder, received, failed = FrameDecoder(bytes_max), list[bytes](), False
    with about_input(stream):
        position = 0
        while position < len(stream):
            size = random.choice((1, 1, 2, 3, 4, 5, 50, 1000))
            try:
                received += decoder.feed(stream[position : position + size])
            except RemoteProtocolError as error:
                _check_error(error)
                failed = True
            position += size
            assert decoder.buffered_bytes <= bytes_max + 4
        assert failed == broken
        if broken:  # bodies in one portion with the bad length are dropped with it
            assert received == bodies[: len(received)]
            assert decoder.buffered_bytes == 0
        else:
            assert received == bodies
            assert decoder.buffered_bytes == 0


# --- checkpoints --------------------------------------------------------------------------------------------------


def check_checkpoint(data: bytes) -> None:
    """Check that ``data`` is a checkpoint that would be written identically, or is refused as corrupt."""
    with about_input(data):
        try:
            stored = within_memory(decode_checkpoint, data, _CHECKPOINT_MEMORY)
        except CheckpointCorrupt as error:
            _check_error(error)
            return
        assert decode_checkpoint(encode_checkpoint(stored)) == stored


def _checkpoint_case(random: Random) -> None:
    stored = samples.checkpoint(random)
    data = encode_checkpoint(stored)
    assert decode_checkpoint(data) == stored
    for _ in range(10):
        spoilt = mutations.mutated(random, data)
        check_checkpoint(spoilt)
        if spoilt != data:
            with about_input(spoilt):
                _assert_refused(spoilt)
        check_checkpoint(resealed(mutations.mutated(random, data)))
    part = data[: random.randrange(len(data))]
    _assert_refused(part)
    check_checkpoint(resealed(part))


def _assert_refused(data: bytes) -> None:
    try:
        decode_checkpoint(data)
    except CheckpointCorrupt:
        return
    raise AssertionError("an altered checkpoint was taken for a whole one")


# --- records of the relay -----------------------------------------------------------------------------------------


def check_record(data: bytes) -> None:
    """Check that ``data`` is a record of the relay, or is refused."""
    with about_input(data):
        try:
            within_memory(decode_record, data, _RECORD_MEMORY)
        except RecordDecodeError as error:
            _check_error(error)


def _relay_case(random: Random) -> None:
    record = samples.relay_record(random)
    decode_record(record)
    for other in (*mutations.truncations(record), record + b"\x00"):
        with about_input(other):
            try:
                decode_record(other)
            except RecordDecodeError:
                continue
            raise AssertionError("a part of a record, or more than one, was taken for a whole one")
    for _ in range(20):
        check_record(mutations.mutated(random, record))


# --- input from our own side --------------------------------------------------------------------------------------

_WRONG: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 2**63, 2**64, 10**400, float("nan"), object()),
    *("", "\ud800", "x" * 5000, b"", bytes(70_000), bytearray(b"x")),
    *([], {}, (1, b""), ((1, 2, 3),), (("1", b""),), ((1, bytearray(b"x")),)),
)


def _encode_case(random: Random) -> None:
    """Check that a message with a field of the wrong type is sent as valid, or is a local error that names it."""
    message = samples.message(random)
    name = random.choice(fields(message)).name
    changed = replace(message, **{name: random.choice(_WRONG)})
    try:
        data = encode_message(changed, LIMITS)
    except LocalProtocolError as error:
        _check_error(error, type(message).__name__)
    else:
        assert check_message(data[4:]) is not None, f"{changed!r:.300} has left, and would be refused"


TARGETS = (
    Target("codec", "messages: valid, mutated, random", _codec_case, check_message),
    Target("truncation", "every message, cut off at each of its bytes", _truncation_case),
    Target("encode", "messages with a wrong field, from our own side", _encode_case),
    Target("events", "payloads: valid, mutated, cut off, bombs", _events_case, check_event),
    Target("framing", "frames in any portions, bad lengths between them", _framing_case),
    Target(
        "checkpoint", "checkpoint files: altered, cut off, with a right checksum", _checkpoint_case, check_checkpoint
    ),
    Target("relay", "records of the listener in the JVM", _relay_case, check_record),
)
