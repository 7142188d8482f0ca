# SPDX-License-Identifier: Apache-2.0

"""Encodes and decodes messages, with every size limited (H60, H62).

The body of a frame (``protocol.wire.framing``) is one *message*: a msgpack array of the message's tag and its
fields, in the order of ``protocol.wire.messages``. A *payload* inside a message is one *event*
(``protocol.wire.events``); nothing here looks into it.

Bytes from the peer are refused with ``RemoteProtocolError`` unless they are exactly what this module writes: a known
tag, the right number of fields, each of the right type and in range. The caller's own messages must obey the same
rules, or ``LocalProtocolError`` is raised before they leave: the end that made the mistake reports it.

``EventMessage`` and ``Confirm``, which are sent by the million, and the checkpoint messages of every subtask (an
acknowledgement only if it has no held events) have a fixed layout (all integers 64 bit), which ``struct`` packs and
unpacks in one call. The layout is plain msgpack, so the same array with shorter integers is decoded too.

Functions here are pure and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from struct import Struct
from struct import error as StructError
from typing import Any, get_args

import msgpack

from protocol.describing import type_name
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.wire.events import (
    EVENT_STEP_BYTES,
    EventSteps,
    decode_event,
    decode_event_in_steps,
    encode_argument,
    encode_event,
    run_steps,
)
from protocol.wire.format import BY_KIND, BY_TAG, CONFIRM_TAG, ENTRY_KINDS, EVENT_TAG, INT_MAX, EntryKind, fit_text
from protocol.wire.framing import CLAIMS_UNCHECKED, DEFAULT_LIMITS, FrameDecoder, WireLimits, frame
from protocol.wire.messages import (
    PARTS_MAX,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    EventMessage,
    HeldEvent,
    Message,
    SavepointTaken,
)

__all__ = [
    "DEFAULT_LIMITS",
    "EVENT_STEP_BYTES",
    "EventSteps",
    "FrameDecoder",
    "WireLimits",
    "decode_event",
    "decode_event_in_steps",
    "decode_message",
    "encode_argument",
    "encode_event",
    "encode_message",
    "encode_report",
    "fit_text",
    "run_steps",
]

# packb creates a Packer for each call. Sharing one would save 0.2 us per event, but user threads and an I/O thread
# encode at the same time, and a Packer is not thread-safe.
_pack: Callable[..., bytes] = msgpack.packb
_unpack: Callable[..., Any] = msgpack.unpackb
_Unpacker: Callable[..., Any] = msgpack.Unpacker
_ENTRY_FIELDS_MAX = max(len(kind._fields) for kind in ENTRY_KINDS.values())
_UNPACK_ERRORS = (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException)


# --- messages -----------------------------------------------------------------------------------------------

# Frame length; msgpack array of 5; tag; u64 task attempt id; u64 seq; bin32 length. The payload follows, then the part.
_EVENT_HEAD = Struct(">I3sQBQBI")
_EVENT_BODY = Struct(">3xQBQBI")
_EVENT_PREFIX = bytes((0x95, EVENT_TAG, 0xCF))
_PART_BYTES = {part: bytes((part,)) for part in range(PARTS_MAX)}
# Frame length; msgpack array of 3; tag; u64 task attempt id; u64 seq.
_CONFIRM_FRAME = Struct(">IBBBQBQ")
_CONFIRM_BODY = Struct(">BBBQBQ")
_CONFIRM_PREFIX = bytes((0x93, CONFIRM_TAG, 0xCF))
# Frame length; msgpack array of 5; tag; u64 task attempt id; u64 seq; u64 checkpoint id; u64 confirmed.
_REPORT_FRAME = Struct(">IBBBQBQBQBQ")
_REPORT_BODY = Struct(">xBxQBQBQBQ")
# What either end says about a checkpoint in a frame of this fixed length is called a report here.
_Report = ClosedForCheckpoint | CloseForCheckpoint | CheckpointCompleted | CheckpointAborted | SavepointTaken
_REPORT_TAGS: dict[type[Message], int] = {kind: BY_KIND[kind][0] for kind in get_args(_Report)}
_REPORTS: dict[int, type[_Report]] = {BY_KIND[kind][0]: kind for kind in get_args(_Report)}
_REPORT_BYTES = _REPORT_BODY.size
# Frame length; msgpack array of 6; tag; u64 task attempt id; u64 seq; u64 checkpoint id; u64 events before;
# u64 confirmed.
_BARRIER_FRAME = Struct(">IBBBQBQBQBQBQ")
_BARRIER_BODY = Struct(">3xQBQBQBQBQ")
_BARRIER_TAG = BY_KIND[BarrierMessage][0]
# Frame length; msgpack array of 9; tag; u64 task attempt id; u64 seq; u64 checkpoint id; bin32 length. The state
# follows, then a list without held events, bin16 length, u64 events sent by each part, u64 confirmed, and a bool.
_ACKNOWLEDGED_HEAD = Struct(">IBBBQBQBQBI")
_ACKNOWLEDGED_BODY = Struct(">3xQBQBQBI")
_ACKNOWLEDGED_ENDS = [Struct(f">BBH{parts}QBQB") for parts in range(PARTS_MAX + 1)]
_ACKNOWLEDGED_TAG = BY_KIND[CheckpointAcknowledged][0]
_FALSE, _TRUE = 0xC2, 0xC3


# Of integers that are all in range, the union of their bits is in range too, and of others it is not: one comparison
# instead of several (benchmarks/instructions.py).


def encode_message(message: Message, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Encode one message as a complete frame.

    A text for people that exceeds its limit is truncated, so that a long traceback never blocks the message that
    reports it. Raises ``LocalProtocolError``, naming the field, for anything else that the peer would refuse: a value
    of the wrong type or out of range, or a frame over ``limits.message_bytes_max`` (a state that is too large).
    """
    try:
        if type(message) is EventMessage:
            task, seq, part = message.task_attempt_id, message.seq, message.part
            payload = message.payload
            size = len(payload)
            # A negative number is refused below, by what packs it.
            if seq and task | seq | part <= INT_MAX and size <= limits.event_bytes_max:
                head = _EVENT_HEAD.pack(26 + size, _EVENT_PREFIX, task, 0xCF, seq, 0xC6, size)
                return head + payload + _PART_BYTES[part]
        elif type(message) is Confirm:
            task, seq = message.task_attempt_id, message.seq
            if 0 <= seq <= INT_MAX and 0 <= task <= INT_MAX:
                return _CONFIRM_FRAME.pack(20, 0x93, CONFIRM_TAG, 0xCF, task, 0xCF, seq)
        elif (encode := _OF_CHECKPOINT.get(type(message))) is not None:
            return encode(message, limits) or _encode_checked(message, limits)
    except (TypeError, StructError, LookupError):
        pass  # a field has a wrong type, or is out of range; the checks below name it
    return _encode_checked(message, limits)


def encode_report(message: Message) -> bytes:
    """Encode a message of a checkpoint whose frame has always the same length. Nothing for any other message, and for
    one that ``encode_message`` refuses."""
    encode = _OF_FIXED_LENGTH.get(type(message))
    if encode is None:
        return b""
    try:
        return encode(message, DEFAULT_LIMITS)
    except (TypeError, StructError):
        return b""


def _encode_report(report: Any, limits: WireLimits) -> bytes:
    """Encode it in the fixed layout. Nothing if a number is out of range."""
    task, seq, checkpoint_id, confirmed = report.task_attempt_id, report.seq, report.checkpoint_id, report.confirmed
    if seq and 0 <= task | seq | checkpoint_id | confirmed <= INT_MAX:
        tag = _REPORT_TAGS[type(report)]
        return _REPORT_FRAME.pack(38, 0x95, tag, 0xCF, task, 0xCF, seq, 0xCF, checkpoint_id, 0xCF, confirmed)
    return b""


def _encode_barrier(barrier: Any, limits: WireLimits) -> bytes:
    task, seq, checkpoint_id = barrier.task_attempt_id, barrier.seq, barrier.checkpoint_id
    before, confirmed = barrier.events_before, barrier.confirmed
    if seq and 0 <= task | seq | checkpoint_id | before | confirmed <= INT_MAX:
        return _BARRIER_FRAME.pack(
            *(47, 0x96, _BARRIER_TAG, 0xCF, task, 0xCF, seq, 0xCF, checkpoint_id, 0xCF, before, 0xCF, confirmed)
        )
    return b""


def _encode_acknowledged(snapshot: Any, limits: WireLimits) -> bytes:
    """Encode one without held events in the fixed layout. Nothing if it has some, or a field is out of range."""
    if snapshot.held:
        return b""
    task, seq, checkpoint_id = snapshot.task_attempt_id, snapshot.seq, snapshot.checkpoint_id
    state, sent, confirmed = snapshot.state, snapshot.events_sent, snapshot.confirmed
    end = _ACKNOWLEDGED_ENDS[len(sent)]
    size = _ACKNOWLEDGED_BODY.size + len(state) + end.size
    if not sent:
        numbers_fit = seq and 0 <= task | seq | checkpoint_id | confirmed <= INT_MAX
    else:
        numbers_fit = seq and sent[-1] and 0 <= task | seq | checkpoint_id | confirmed | max(sent) <= INT_MAX
    if numbers_fit and type(state) is bytes and size <= limits.message_bytes_max:
        head = _ACKNOWLEDGED_HEAD.pack(
            *(size, 0x99, _ACKNOWLEDGED_TAG, 0xCF, task, 0xCF, seq, 0xCF, checkpoint_id, 0xC6, len(state))
        )
        follows = _TRUE if snapshot.state_follows else _FALSE
        return head + state + end.pack(0x90, 0xC5, 8 * len(sent), *sent, 0xCF, confirmed, follows)
    return b""


_OF_FIXED_LENGTH: dict[type[Message], Callable[[Any, WireLimits], bytes]] = {
    **dict.fromkeys(get_args(_Report), _encode_report),
    BarrierMessage: _encode_barrier,
}
_OF_CHECKPOINT: dict[type[Message], Callable[[Any, WireLimits], bytes]] = {
    **_OF_FIXED_LENGTH,
    CheckpointAcknowledged: _encode_acknowledged,
}


def _encode_checked(message: Message, limits: WireLimits) -> bytes:
    entry = BY_KIND.get(type(message))
    if entry is None:
        raise LocalProtocolError(f"{type_name(message)} is not a message of this protocol")
    tag, row = entry
    place = ""
    try:
        values = [check(getattr(message, place := name), limits) for name, check in row]
    except (ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{type_name(message)}.{place} {error}") from None
    try:
        body = _pack([tag, *values])
    except (ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{type_name(message)} cannot be encoded: {error}") from error
    if len(body) > limits.message_bytes_max:
        raise LocalProtocolError(
            f"{type_name(message)} takes {len(body)} bytes, and a message at most {limits.message_bytes_max}: "
            "keep less state in the operator"
        )
    return frame(body)


def decode_message(body: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Message:
    """Decode the message in one frame body. Raises ``RemoteProtocolError`` that says what is wrong with it."""
    length = len(body)
    if length >= 26 and body[:3] == _EVENT_PREFIX:
        task, mark_seq, seq, mark_payload, size = _EVENT_BODY.unpack_from(body)
        if (
            (mark_seq == 0xCF and mark_payload == 0xC6 and size == length - 26)
            and (seq and task | seq <= INT_MAX)
            and size <= limits.event_bytes_max
            and (part := body[-1]) < PARTS_MAX
        ):
            return EventMessage(task, seq, body[25:-1], part)
    elif length == 20 and body[:3] == _CONFIRM_PREFIX:
        _, _, _, task, mark_seq, seq = _CONFIRM_BODY.unpack(body)
        if mark_seq == 0xCF and seq <= INT_MAX and task <= INT_MAX:
            return Confirm(task, seq)
    return _CHECKPOINT_BODIES.get(body[:3], _decode_any)(body, limits)


def _decode_any(body: bytes, limits: WireLimits) -> Message:
    """Decode a message that is not in the fixed layout, or has a number out of range."""
    message = _decode_small(body, limits) if len(body) <= CLAIMS_UNCHECKED else None
    return _decode_checked(body, limits) if message is None else message


# These decode a message in the fixed layout, or as any other if it is not one.


def _decode_report(body: bytes, limits: WireLimits) -> Message:
    if len(body) == _REPORT_BYTES:
        tag, task, mark_seq, seq, mark_id, checkpoint_id, mark_last, confirmed = _REPORT_BODY.unpack(body)
        if mark_seq == mark_id == mark_last == 0xCF and seq and task | seq | checkpoint_id | confirmed <= INT_MAX:
            return _REPORTS[tag](task, seq, checkpoint_id, confirmed)
    return _decode_any(body, limits)


def _decode_barrier(body: bytes, limits: WireLimits) -> Message:
    if len(body) == _BARRIER_BODY.size:
        values = _BARRIER_BODY.unpack(body)
        task, mark_seq, seq, mark_id, checkpoint_id, mark_before, before, mark_last, confirmed = values
        if mark_seq == mark_id == mark_before == mark_last == 0xCF and (
            seq and task | seq | checkpoint_id | before | confirmed <= INT_MAX
        ):
            return BarrierMessage(task, seq, checkpoint_id, before, confirmed)
    return _decode_any(body, limits)


def _decode_acknowledged(body: bytes, limits: WireLimits) -> Message:
    begin = _ACKNOWLEDGED_BODY.size
    if len(body) < begin:
        return _decode_any(body, limits)
    task, mark_seq, seq, mark_id, checkpoint_id, mark_state, size = _ACKNOWLEDGED_BODY.unpack_from(body)
    end = begin + size
    parts = (len(body) - end - _ACKNOWLEDGED_ENDS[0].size) // 8
    if not 0 <= parts <= PARTS_MAX or len(body) != end + _ACKNOWLEDGED_ENDS[parts].size:
        return _decode_any(body, limits)
    ending = _ACKNOWLEDGED_ENDS[parts].unpack_from(body, end)
    no_entries, mark_sent, sent_bytes, *sent, mark_last, confirmed, follows = ending
    if (
        mark_seq == mark_id == mark_last == 0xCF
        and (mark_state == 0xC6 and no_entries == 0x90 and mark_sent == 0xC5 and sent_bytes == 8 * parts)
        and (seq and task | seq | checkpoint_id | confirmed <= INT_MAX)
        and (not sent or (sent[-1] and max(sent) <= INT_MAX))
        and follows in (_FALSE, _TRUE)
    ):
        positions, state_follows = tuple(sent), follows == _TRUE
        state = body[begin:end]
        return CheckpointAcknowledged(task, seq, checkpoint_id, state, (), positions, confirmed, state_follows)
    return _decode_any(body, limits)


_CHECKPOINT_BODIES: dict[bytes, Callable[[bytes, WireLimits], Message]] = {
    **{bytes((0x95, tag, 0xCF)): _decode_report for tag in _REPORTS},
    bytes((0x96, _BARRIER_TAG, 0xCF)): _decode_barrier,
    bytes((0x99, _ACKNOWLEDGED_TAG, 0xCF)): _decode_acknowledged,
}
"""By the first bytes of the fixed layout."""


def _decode_small(body: bytes, limits: WireLimits) -> Message | None:
    """Decode a message that is too small to claim much memory in one step. None if it is invalid: then
    ``_decode_checked`` finds out why."""
    try:
        values = _unpack(
            body,
            strict_map_key=False,
            max_array_len=len(body),
            max_map_len=len(body),
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
        tag, *fields = values
        kind, row = BY_TAG[tag]
        if type(values) is not list or type(tag) is not int or len(fields) != len(row):
            return None
        return kind(*[check(value, limits) for (_, check), value in zip(row, fields, strict=True)])
    except (*_UNPACK_ERRORS, KeyError):
        return None


def _decode_checked(body: bytes, limits: WireLimits) -> Message:
    values = _Values(body, limits)
    if not values.next_is_list():
        raise RemoteProtocolError("a message that is not msgpack, or not a list that begins with its tag")
    try:
        count = values.list_length()
        tag = values.scalar()
    except _UNPACK_ERRORS as error:
        raise RemoteProtocolError(f"a message that does not begin with its tag: {_detail(error)}") from None
    entry = BY_TAG.get(tag) if type(tag) is int else None
    if entry is None:
        raise RemoteProtocolError(f"there is no message with tag {tag!r:.40}")
    kind, row = entry
    if count != len(row) + 1:
        raise RemoteProtocolError(f"{kind.__name__} must have {len(row)} fields, has {count - 1}")
    fitted = []
    for name, check in row:
        try:
            entry_kind = ENTRY_KINDS.get(check)
            value = values.scalar() if entry_kind is None else values.entries(limits.held_events_max, entry_kind)
            fitted.append(check(value, limits))
        except _UNPACK_ERRORS as error:
            raise RemoteProtocolError(f"{kind.__name__}.{name} {_detail(error)}") from None
    if not values.at_end:
        raise RemoteProtocolError(f"{kind.__name__} has bytes after its last field")
    return kind(*fitted)


class _Values:
    """Reads the values of one body one by one.

    Whatever a larger body claims, the only lists built are those of entries, and no more of them than the field may
    have. Decoded as a whole, nested lists could take a thousand times the message's bytes.
    """

    __slots__ = ("_body", "_entries_left", "_entry_kind", "_size", "_values")

    def __init__(self, body: bytes, limits: WireLimits) -> None:
        self._body = body
        self._size = len(body)
        # The decoder in Python applies the limit to list_length too. It allocates nothing for a claim.
        entries_max = _ENTRY_FIELDS_MAX if _continues() else max(limits.held_events_max, 32)
        self._values = _unpacker(body, entries_max, self._make_entry)
        self._entry_kind: EntryKind = HeldEvent
        self._entries_left = 0

    def next_is_list(self) -> bool:
        mark = self._next_byte()
        return 0x90 <= mark <= 0x9F or mark in (0xDC, 0xDD)

    @property
    def at_end(self) -> bool:
        return bool(self._values.tell() == self._size)

    def list_length(self) -> int:
        return int(self._values.read_array_header())

    def scalar(self) -> Any:
        mark = self._next_byte()
        if 0x80 <= mark <= 0x9F or 0xDC <= mark <= 0xDF:
            raise ValueError("must be a single value, is a list or a map")
        return self._values.unpack()

    def entries(self, count_max: int, kind: EntryKind) -> tuple[Any, ...]:
        """Read a list of lists. Whether these have the right fields is left to the check of the field."""
        if not self.next_is_list():
            raise ValueError("must be a list of lists")
        count = self.list_length()
        if count > count_max:
            raise ValueError(f"must have at most {count_max} entries, has {count}")
        self._entry_kind, self._entries_left = kind, count
        entries = tuple(islice(self._values, count))
        if len(entries) < count:
            raise ValueError(f"must have {count} entries, has {len(entries)}")
        return entries

    def _make_entry(self, values: list[Any]) -> Any:
        """Called for each list inside a list of entries, once for each of 65,536: so the number of values is not
        checked here."""
        if not self._entries_left:
            raise ValueError("must hold lists of single values")
        self._entries_left -= 1
        return tuple.__new__(self._entry_kind, values)

    def _next_byte(self) -> int:
        place = self._values.tell()
        return self._body[place] if place < self._size else 0


def _unpacker(data: bytes, entries_max: int, list_hook: Callable[[list[Any]], Any]) -> Any:
    size = len(data)
    unpacker = _Unpacker(
        max_buffer_size=max(size, 1),
        strict_map_key=False,
        max_str_len=size,
        max_bin_len=size,
        max_array_len=entries_max,
        max_map_len=0,
        max_ext_len=0,
        list_hook=list_hook,
    )
    unpacker.feed(data)
    return unpacker


def _detail(error: BaseException) -> str:
    return str(error) or type_name(error)


def _continues() -> bool:
    """Whether msgpack continues within a value when more bytes arrive. Its decoder in Python begins again."""
    return bool(_Unpacker.__module__ != "msgpack.fallback")


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")
