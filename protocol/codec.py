"""Messages and user events as bytes, every size bounded (H60, H62).

The body of a frame (``protocol.framing``) is one *message*: a msgpack array of the message's tag and its
fields, in the order of ``protocol.messages``. A *payload* inside a message is one *event*: a single msgpack
value, encoded where it was sent (H21) and decoded where it is handled; nothing between looks into it.

What comes from the peer is refused with ``RemoteProtocolError`` unless it is exactly what this module writes:
a known tag, the right number of fields, each of the right type and in range. What our own caller hands in is
held to the same rules before it leaves, with ``LocalProtocolError``, so that the fault is named at the end
that made it.

The two messages that travel by the million, ``EventMessage`` and ``Confirm``, are written with a fixed layout
(all integers 64 bit), which ``struct`` packs and unpacks in one call. The layout is plain msgpack: a peer
that writes the same array with shorter integers is understood too.

Functions here are pure and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from math import isfinite
from struct import Struct
from typing import Any

import msgpack

from protocol.errors import EventEncodeError, LocalProtocolError, RemoteProtocolError
from protocol.framing import DEFAULT_LIMITS, FrameDecoder, WireLimits, frame
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.messages import (
    AnswerMessage,
    AttemptEnded,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CheckpointDeclined,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    EventMessage,
    Finished,
    Message,
    Opened,
    RefusalCode,
    Refused,
    Register,
    Registered,
    RequestMessage,
    RestoreMode,
    Resume,
    Resumed,
)

__all__ = [
    "DEFAULT_LIMITS",
    "FrameDecoder",
    "WireLimits",
    "decode_event",
    "decode_message",
    "encode_event",
    "encode_message",
]

_INT_MAX = 2**63 - 1

# msgpack makes a Packer for each call of packb. Sharing one would save 0.2 us an event, but user threads and
# an I/O thread encode at the same time, and a Packer is not safe for that.
_pack: Callable[..., bytes] = msgpack.packb
_unpack: Callable[..., Any] = msgpack.unpackb


# --- the fields of messages ---------------------------------------------------------------------------------
# A check returns the value as it is to be used, or raises ValueError with the rest of the sentence "field
# ...".

_Check = Callable[[Any, WireLimits], Any]


def _integer(value: Any, limits: WireLimits, *, least: int = 0, most: int = _INT_MAX) -> int:
    if type(value) is not int:
        raise ValueError(f"must be an integer, is {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"must be from {least} to {most}, is {value}")
    return value


def _of_enum(value: Any, limits: WireLimits, *, kind: type[RestoreMode | RefusalCode]) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be an integer, is {type(value).__name__}")
    return kind(value)  # its ValueError names the value


def _seconds(value: Any, limits: WireLimits) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"must be a number, is {type(value).__name__}")
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"must be a finite number of seconds, is {value}")
    return float(value)


def _name(value: Any, limits: WireLimits) -> str:
    if type(value) is not str:
        raise ValueError(f"must be a string, is {type(value).__name__}")
    if not 0 < len(value) <= limits.name_chars_max:
        raise ValueError(f"must have 1 to {limits.name_chars_max} characters, has {len(value)}")
    return value


def _text(value: Any, limits: WireLimits) -> str:
    if type(value) is not str:
        raise ValueError(f"must be a string, is {type(value).__name__}")
    if len(value) > limits.text_chars_max:
        raise ValueError(f"must have at most {limits.text_chars_max} characters, has {len(value)}")
    return value


def _bytes(value: Any, limits: WireLimits) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"must be bytes, is {type(value).__name__}")
    return value  # the frame bounds it


def _bytes_or_none(value: Any, limits: WireLimits) -> bytes | None:
    return None if value is None else _bytes(value, limits)


def _payload(value: Any, limits: WireLimits) -> bytes:
    if len(_bytes(value, limits)) > limits.event_bytes_max:
        raise ValueError(f"must have at most {limits.event_bytes_max} bytes, has {len(value)}")
    return bytes(value)


def _payloads(value: Any, limits: WireLimits) -> tuple[bytes, ...]:
    if type(value) is not list and type(value) is not tuple:
        raise ValueError(f"must be a list of bytes, is {type(value).__name__}")
    if len(value) > limits.held_events_max:
        raise ValueError(f"must have at most {limits.held_events_max} entries, has {len(value)}")
    return tuple(_payload(entry, limits) for entry in value)


_NATURAL: _Check = _integer
_POSITIVE: _Check = partial(_integer, least=1)
_CHECKPOINT: _Check = partial(_integer, least=VIRTUAL_EMPTY_CHECKPOINT)
_MODE: _Check = partial(_of_enum, kind=RestoreMode)
_CODE: _Check = partial(_of_enum, kind=RefusalCode)

_EVENT_TAG = 1
_CONFIRM_TAG = 2

# The wire format: tag, message, one check per field. A tag is never used again for another message.
_WIRE: tuple[tuple[int, type[Message], tuple[_Check, ...]], ...] = (
    (_EVENT_TAG, EventMessage, (_NATURAL, _POSITIVE, _payload)),
    (_CONFIRM_TAG, Confirm, (_NATURAL, _NATURAL)),
    # up
    (10, Register, (_NATURAL, _name, _NATURAL, _NATURAL, _NATURAL, _MODE, _POSITIVE, _text, _text)),
    (11, Resume, (_NATURAL, _name, _NATURAL)),
    (12, Opened, (_NATURAL, _POSITIVE)),
    (13, RequestMessage, (_NATURAL, _POSITIVE, _NATURAL, _payload)),
    (14, ClosedForCheckpoint, (_NATURAL, _POSITIVE, _CHECKPOINT)),
    (15, CheckpointAcknowledged, (_NATURAL, _POSITIVE, _CHECKPOINT, _bytes, _payloads)),
    (16, CheckpointDeclined, (_NATURAL, _POSITIVE, _CHECKPOINT, _text)),
    (17, Finished, (_NATURAL, _POSITIVE, _text, _bytes)),
    # down
    (
        30,
        Registered,
        (_NATURAL, _NATURAL, _CHECKPOINT, _bytes_or_none, _payloads, _seconds, _POSITIVE, _POSITIVE),
    ),
    (31, Resumed, (_NATURAL, _NATURAL)),
    (32, Refused, (_NATURAL, _CODE, _text)),
    (33, AttemptEnded, (_NATURAL, _text)),
    (34, AnswerMessage, (_NATURAL, _POSITIVE, _NATURAL, _text, _payload)),
    (35, CloseForCheckpoint, (_NATURAL, _POSITIVE, _CHECKPOINT)),
    (36, BarrierMessage, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (37, CheckpointCompleted, (_NATURAL, _POSITIVE, _CHECKPOINT)),
    (38, CheckpointAborted, (_NATURAL, _POSITIVE, _CHECKPOINT)),
)
_Row = tuple[tuple[str, _Check], ...]


def _row(kind: type[Message], checks: tuple[_Check, ...]) -> _Row:
    return tuple(zip((field.name for field in fields(kind)), checks, strict=True))


_BY_TAG: dict[int, tuple[type[Message], _Row]] = {
    tag: (kind, _row(kind, checks)) for tag, kind, checks in _WIRE
}
_BY_KIND: dict[type[Message], tuple[int, _Row]] = {
    kind: (tag, _row(kind, checks)) for tag, kind, checks in _WIRE
}


# --- messages -----------------------------------------------------------------------------------------------

# Frame length; msgpack array of 4; tag; u64 task attempt id; u64 seq; bin32 length. The payload follows.
_EVENT_HEAD = Struct(">IBBBQBQBI")
_EVENT_BODY = Struct(">BBBQBQBI")
_EVENT_PREFIX = bytes((0x94, _EVENT_TAG, 0xCF))
# Frame length; msgpack array of 3; tag; u64 task attempt id; u64 seq.
_CONFIRM_FRAME = Struct(">IBBBQBQ")
_CONFIRM_BODY = Struct(">BBBQBQ")
_CONFIRM_PREFIX = bytes((0x93, _CONFIRM_TAG, 0xCF))


def encode_message(message: Message, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """One message as a whole frame.

    A text for people that is over its bound is cut, so that a long traceback never stops the message that
    reports it. Raises ``LocalProtocolError``, naming the field, for anything else that the peer would refuse:
    a value of the wrong type or out of range, or a frame over ``limits.frame_bytes_max`` (a state that is too
    large).
    """
    kind = type(message)
    if kind is EventMessage:
        size = len(message.payload)  # type: ignore[union-attr]
        seq = message.seq  # type: ignore[union-attr]
        task = message.task_attempt_id
        if 0 < seq <= _INT_MAX and 0 <= task <= _INT_MAX and size <= limits.event_bytes_max:
            head = _EVENT_HEAD.pack(25 + size, 0x94, _EVENT_TAG, 0xCF, task, 0xCF, seq, 0xC6, size)
            return head + message.payload  # type: ignore[union-attr]
    elif kind is Confirm:
        seq = message.seq  # type: ignore[union-attr]
        task = message.task_attempt_id
        if 0 <= seq <= _INT_MAX and 0 <= task <= _INT_MAX:
            return _CONFIRM_FRAME.pack(20, 0x93, _CONFIRM_TAG, 0xCF, task, 0xCF, seq)
    return _encode_checked(message, limits)


def _encode_checked(message: Message, limits: WireLimits) -> bytes:
    entry = _BY_KIND.get(type(message))
    if entry is None:
        raise LocalProtocolError(f"{type(message).__name__} is no message of this protocol")
    tag, row = entry
    values: list[Any] = [tag]
    for name, check in row:
        value = getattr(message, name)
        if check is _text and type(value) is str:
            value = _fit(value, limits.text_chars_max)
        try:
            values.append(check(value, limits))
        except ValueError as error:
            raise LocalProtocolError(f"{type(message).__name__}.{name} {error}") from None
    try:
        body = _pack(values)
    except (ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > limits.frame_bytes_max:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, a frame at most {limits.frame_bytes_max}: "
            "keep less state in the operator, or raise frame_bytes_max on both sides"
        )
    return frame(body)


def _fit(text: str, chars_max: int) -> str:
    """Lone surrogates (a file name in an exception) become escapes; the end of what is too long becomes a
    mark."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def decode_message(body: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Message:
    """The message in one frame body. Raises ``RemoteProtocolError`` that says what is wrong with it."""
    if len(body) >= 25 and body[:3] == _EVENT_PREFIX:
        _, _, _, task, mark_seq, seq, mark_payload, size = _EVENT_BODY.unpack_from(body)
        if (
            (mark_seq == 0xCF and mark_payload == 0xC6 and size == len(body) - 25)
            and (0 < seq <= _INT_MAX and task <= _INT_MAX)
            and size <= limits.event_bytes_max
        ):
            return EventMessage(task, seq, body[25:])
    elif len(body) == 20 and body[:3] == _CONFIRM_PREFIX:
        _, _, _, task, mark_seq, seq = _CONFIRM_BODY.unpack(body)
        if mark_seq == 0xCF and seq <= _INT_MAX and task <= _INT_MAX:
            return Confirm(task, seq)
    return _decode_checked(body, limits)


def _decode_checked(body: bytes, limits: WireLimits) -> Message:
    values = _unpack_bounded(body, limits, max(limits.held_events_max, 32), "a message")
    if type(values) is not list or not values or type(values[0]) is not int:
        raise RemoteProtocolError("a message must be a list that begins with its tag")
    entry = _BY_TAG.get(values[0])
    if entry is None:
        raise RemoteProtocolError(f"there is no message with tag {values[0]}")
    kind, row = entry
    if len(values) != len(row) + 1:
        raise RemoteProtocolError(f"{kind.__name__} must have {len(row)} fields, has {len(values) - 1}")
    fitted = []
    for (name, check), value in zip(row, values[1:], strict=True):
        try:
            fitted.append(check(value, limits))
        except ValueError as error:
            raise RemoteProtocolError(f"{kind.__name__}.{name} {error}") from None
    return kind(*fitted)


def _unpack_bounded(data: bytes, limits: WireLimits, items_max: int, what: str) -> Any:
    """msgpack sizes a list when it reads its header, so no list may claim more entries than bytes are
    here."""
    size = len(data)
    entries_max = min(size, items_max)
    try:
        return _unpack(
            data,
            strict_map_key=False,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=entries_max,
            max_map_len=entries_max,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        detail = str(error) or type(error).__name__
        raise RemoteProtocolError(f"{what} that is not msgpack within the bounds: {detail}") from None


# --- events -------------------------------------------------------------------------------------------------

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS = frozenset({list, tuple, dict})


def encode_event(value: object, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """One user event as msgpack (H21). Later changes of ``value`` have no effect on what was encoded.

    An event is None, a bool, an int of 64 bits, a float, a str, bytes, or a list, tuple or dict of these; the
    keys of a dict are no containers. A tuple arrives as a list. Subclasses (an enum, a numpy number, a named
    tuple) are refused rather than turned into something else on the way. Raises ``EventEncodeError`` that
    names the place in the event, the cause and the mend.
    """
    if type(value) not in _SCALARS:
        _check_value(value, limits)
    try:
        data = _pack(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise EventEncodeError(
            f"the event cannot be encoded: {error}. Integers have 64 bits; a str must be valid Unicode"
        ) from error
    if len(data) > limits.event_bytes_max:
        raise EventEncodeError(
            f"the event takes {len(data)} bytes, over the bound of {limits.event_bytes_max}: "
            "send it in parts, send a reference to it, or raise event_bytes_max on both sides"
        )
    return data


def decode_event(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Any:
    """The event in a payload. Raises ``RemoteProtocolError`` when it is none, or is over a bound."""
    if len(data) > limits.event_bytes_max:
        raise RemoteProtocolError(f"an event of {len(data)} bytes, over {limits.event_bytes_max}")
    value = _unpack_bounded(data, limits, limits.event_items_max, "an event")
    if type(value) not in _SCALARS:
        try:
            _check_value(value, limits)
        except EventEncodeError as error:
            raise RemoteProtocolError(f"an event over the bounds: {error}") from None
    return value


_Place = tuple[
    "_Place | None", object
]  # a linked list of keys, so that a path costs nothing until it is needed


def _check_value(root: object, limits: WireLimits) -> None:
    """Types, nesting and counts, without recursion: a list may contain itself, or share its parts manifold.

    A flat event costs one pass in C.
    """
    pending: list[tuple[Any, int, _Place | None]] = [(root, 1, None)]
    entries_seen = 0
    while pending:
        value, depth, place = pending.pop()
        kind = type(value)
        if kind not in _CONTAINERS:
            raise EventEncodeError(
                f"{_path(place)} is of type {kind.__module__}.{kind.__qualname__}, no msgpack value: "
                "convert it to None, bool, int, float, str, bytes, list or dict before sending"
            )
        entries_seen += 1 + len(value)
        if depth > limits.event_nesting_max:
            raise EventEncodeError(f"the event nests deeper than {limits.event_nesting_max}: flatten it")
        if len(value) > limits.event_items_max:
            raise EventEncodeError(
                f"{_path(place)} has {len(value)} entries, over {limits.event_items_max}: send it in parts"
            )
        if entries_seen > limits.event_bytes_max:  # each entry takes a byte or more
            raise EventEncodeError(f"the event takes over {limits.event_bytes_max} bytes: send it in parts")
        if kind is dict:
            if not _SCALARS.issuperset(map(type, value)):
                odd = next(type(key).__name__ for key in value if type(key) not in _SCALARS)
                raise EventEncodeError(
                    f"{_path(place)} has a key of type {odd}: use a str, an int or bytes as the key"
                )
            inner, entries = value.values(), value.items()
        else:
            inner, entries = value, enumerate(value)
        if not _SCALARS.issuperset(map(type, inner)):
            pending.extend(
                (entry, depth + 1, (place, key)) for key, entry in entries if type(entry) not in _SCALARS
            )


def _path(place: _Place | None) -> str:
    keys = ""
    while place is not None:
        place, key = place
        keys = f"[{key!r:.40}]{keys}"
    return f"the event{keys}"
