# SPDX-License-Identifier: Apache-2.0

"""Encodes the state of enumerators, readers, plans and parts: of any length, in steps (H164).

A state has *fields* with names. A field that is a list may have any number of entries, and is written in chunks of
them. Bytes are written as they are, so a state can be a field of another one. Any other value is written as a whole. An
entry or a value is what an event can have, and comes back with its type, but the limits of events do not apply: a state
ends with its job, and no peer sends it. What remains is the limit of a checkpoint.

```
MAGIC, version    16 bytes and one
kind              what the state is of: its length in one byte, then UTF-8
then for each piece of a field
form              one byte: V a value, B bytes, L some entries of a list
name              its length in one byte, then UTF-8
length            u64 big-endian
                  an encoded event, or the bytes themselves
```

An empty list has one piece, with no entries. All pieces of a list follow each other.

Before version 1, each state was one encoded event. Such a state is read as the field ``OLD``, and the
reader knows what it was.

Encoding and decoding are generators that yield after each step of bounded cost, and return the result: an event loop
has to do other work in between, because a state of a million entries takes most of a second. What is encoded must not
change until the end, so give it a copy. Functions here are pure and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from io import BytesIO
from itertools import islice
from struct import Struct
from struct import error as StructError
from typing import Any, TypeVar

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.wire.events import decode_event, decode_event_in_steps, encode_event, run_steps
from protocol.wire.framing import WireLimits

__all__ = [
    "OLD",
    "STATE_LIMITS",
    "Steps",
    "decode_entry",
    "decode_state",
    "decode_state_in_steps",
    "drain",
    "encode_entry",
    "encode_state",
    "encode_state_in_steps",
    "in_chunks",
    "is_state_of",
    "join_in_steps",
    "run_steps",
]

T = TypeVar("T")
Steps = Generator[None, None, T]

MAGIC = b"\xc1headgate-state-"  # 0xc1 begins no msgpack value
VERSION = 1
OLD = ""
"""The field that has the decoded value of a state before version 1."""
CHUNK_BYTES = 2**16
"""About how many bytes of entries are encoded or decoded in a step."""
CHUNK_ENTRIES = 1024
"""How many entries at most."""
COPY_BYTES = 2**20
"""How much is copied in a step: copying takes a thirtieth of encoding."""

_VALUE, _BYTES, _LIST = b"V", b"B", b"L"
_LENGTH = Struct(">Q")

STATE_LIMITS = WireLimits(
    message_bytes_max=2**32 - 1,
    event_bytes_max=2**32 - 2**20,
    event_nesting_max=256,
    event_containers_max=2**31,
    event_items_max=2**31,
    event_map_entries_max=2**31,
)
"""The limits of one entry. It has those of a checkpoint, and nests deeper than an event, because it contains some."""


def encode_entry(value: Any) -> bytes:
    """Encode a single value as a state does. Raises ``EventEncodeError`` for one that an event cannot have."""
    return encode_event(value, STATE_LIMITS)


def decode_entry(data: bytes) -> Any:
    """Return what ``encode_entry`` was given."""
    return decode_event(data, STATE_LIMITS)


def is_state_of(kind: str, data: bytes) -> bool:
    """Whether the bytes begin as a state of this kind, in version 1 or later."""
    return data.startswith(MAGIC) and data.startswith(_named(kind), len(MAGIC) + 1)


# --- encoding -----------------------------------------------------------------------------------------------------


def encode_state_in_steps(kind: str, fields: Mapping[str, Any]) -> Steps[bytes]:
    """Return a state of a ``kind``, which is a name for people. A list, or what an iterator yields, is in chunks.

    Raises ``EventEncodeError`` for a value that an event cannot have.
    """
    out = BytesIO()  # unlike a list of pieces, it becomes bytes without a copy
    out.write(MAGIC + bytes((VERSION,)) + _named(kind))
    for name, value in fields.items():
        if type(value) is list or isinstance(value, Iterator):
            for chunk in _chunks(value):
                _write(out, _LIST, name, chunk)
                yield
        elif type(value) is bytes:
            out.write(_head(_BYTES, name, len(value)))
            yield from _copy(value, out)
        else:
            _write(out, _VALUE, name, encode_entry(value))
            yield
    return out.getvalue()


def encode_state(kind: str, fields: Mapping[str, Any]) -> bytes:
    """``encode_state_in_steps`` without a pause."""
    state: bytes = run_steps(encode_state_in_steps(kind, fields))
    return state


def _chunks(entries: Iterable[Any]) -> Iterator[bytes]:
    """Encode a list in chunks of about ``CHUNK_BYTES``. The first one has few entries, because these may be large."""
    iterator, count = iter(entries), 16
    taken = list(islice(iterator, count))
    while True:
        chunk = encode_event(taken, STATE_LIMITS)
        yield chunk
        per_entry = len(chunk) // count + 1
        count = max(1, min(CHUNK_ENTRIES, 4 * count, CHUNK_BYTES // per_entry))
        taken = list(islice(iterator, count))
        if not taken:
            return


def _write(out: BytesIO, form: bytes, name: str, data: bytes) -> None:
    out.write(_head(form, name, len(data)))
    out.write(data)


def _head(form: bytes, name: str, length: int) -> bytes:
    return form + _named(name) + _LENGTH.pack(length)


def _named(name: str) -> bytes:
    encoded = name.encode()
    return bytes((len(encoded),)) + encoded


def _copy(data: bytes | memoryview, out: BytesIO) -> Steps[None]:
    view = memoryview(data)
    for start in range(0, len(view), COPY_BYTES):
        out.write(view[start : start + COPY_BYTES])
        yield


def join_in_steps(pieces: Iterable[bytes | memoryview]) -> Steps[bytes]:
    """Return the concatenation of some bytes."""
    out = BytesIO()
    for piece in pieces:
        if len(piece) <= COPY_BYTES:
            out.write(piece)
        else:
            yield from _copy(piece, out)
    return out.getvalue()


# --- decoding -----------------------------------------------------------------------------------------------------


def decode_state_in_steps(kind: str, data: bytes, old: type = dict) -> Steps[dict[str, Any]]:
    """Return the fields of a state of this ``kind``, or ``{OLD: value}`` if it was written before version 1.

    ``old`` is the type of that value.

    Raises ``LocalProtocolError`` if it is neither: of another kind, of a later version, or damaged.
    """
    if not data.startswith(MAGIC):
        try:
            value = yield from decode_event_in_steps(data, STATE_LIMITS)
        except RemoteProtocolError as error:
            raise LocalProtocolError(_not_a_state_of(kind)) from error
        if type(value) is not old:
            raise LocalProtocolError(_not_a_state_of(kind))
        return {OLD: value}
    try:
        return (yield from _decode_fields(kind, data))
    except (StructError, RemoteProtocolError, UnicodeDecodeError, IndexError) as error:
        raise LocalProtocolError(
            f"the state of {kind} in the checkpoint is damaged ({error}): restore an older checkpoint"
        ) from error


def decode_state(kind: str, data: bytes, old: type = dict) -> dict[str, Any]:
    """``decode_state_in_steps`` without a pause."""
    fields: dict[str, Any] = run_steps(decode_state_in_steps(kind, data, old))
    return fields


def _decode_fields(kind: str, data: bytes) -> Steps[dict[str, Any]]:
    version, at = data[len(MAGIC)], len(MAGIC) + 1
    if version != VERSION:
        raise LocalProtocolError(
            f"the state of {kind} in the checkpoint has version {version}, and this release reads version {VERSION}: "
            "restore it with a later release"
        )
    found, at = _name_at(data, at)
    if found != kind:
        raise LocalProtocolError(_not_a_state_of(kind, f", but that of {found}"))
    fields: dict[str, Any] = {}
    view = memoryview(data)
    while at < len(data):
        form = data[at : at + 1]
        name, at = _name_at(data, at + 1)
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        end = at + length
        if end > len(data):
            raise StructError("it is truncated")
        if form == _BYTES:
            fields[name] = yield from join_in_steps((view[at:end],))
        else:
            value = yield from _decode_piece(data[at:end])
            if form == _LIST and type(value) is list:
                fields.setdefault(name, []).extend(value)
            elif form == _VALUE:
                fields[name] = value
            else:
                raise StructError(f"a piece of the unknown form {form!r}")
        at = end
        yield
    return fields


def _decode_piece(data: bytes) -> Steps[Any]:
    if len(data) <= 2 * CHUNK_BYTES:
        return decode_event(data, STATE_LIMITS)
    return (yield from decode_event_in_steps(data, STATE_LIMITS))


def _name_at(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def _not_a_state_of(kind: str, found: str = "") -> str:
    return (
        f"the checkpoint has a state in this place that is not that of {kind}{found}: the operator had other parts or "
        "names when the checkpoint was made. Give it those again, or begin without the checkpoint"
    )


def in_chunks(values: Iterable[T], many: int = CHUNK_ENTRIES) -> Iterator[list[T]]:
    """Yield the values in lists of up to ``many``: what is done with one list is a step."""
    iterator = iter(values)
    while chunk := list(islice(iterator, many)):
        yield chunk


def drain(values: list[T], many: int = CHUNK_ENTRIES) -> Iterator[list[T]]:
    """Take the values out of a list, in lists of up to ``many``. So they are freed in steps, too."""
    values.reverse()
    while values:
        chunk = values[-many:]
        del values[-many:]
        chunk.reverse()
        yield chunk
