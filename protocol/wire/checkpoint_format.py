# SPDX-License-Identifier: Apache-2.0

"""Encodes a checkpoint as the bytes of one file, and decodes it (H50).

```
bytes  0..7    magic
bytes  8..11   format version, u32 big-endian
bytes 12..19   length of the body, u64 big-endian
               body
last 32 bytes  SHA-256 of everything before it
```

Every version of the format begins with the magic, the version and the length, and ends with the digest, so a release
can tell a file of a later release from a damaged one. And 20 bytes show that a large file is not a checkpoint.

The body is a sequence of msgpack values, none of them a container: operator id, checkpoint id, parallelism, mode, time
of creation, release, the coordinator's state, the number of subtasks; per subtask its number, ``events_sent``, the
number of states, per state its subtask and bytes, the number of held events, per event its sender and bytes. Nothing
nests and each value must lie within the body, so no memory is used for bytes that a file only claims to have.

Format 2 adds one value at the end, the label. Format 3 adds one value for each held event, whether it is a request; its
label may be empty. Format 4 adds one value for each subtask, at its end: whether its states are of an earlier input
than the label's; and one after the label: in how many partitions its input was. Without this value, they were as many
as the parallelism if there is a label, and it is not known if there is none. In format 5, each subtask has as many
counts of sent events as parts, after their number, where it had one; each held event has one value more, the index of
its part; and the names of the parts are at the end, after their number. Format 6 adds one value for each state, after
its bytes: the handle of its files (``protocol.wire.state_handles``), or no bytes if it has none. Format 7 is the same
with handles that have key groups. A checkpoint is written in the lowest format that can hold it, so that an earlier
release can restore it. In formats 1 and 2, a held request is indistinguishable from an event, and is restored as one.
Up to format 4, the name of a part was inside the bytes of its held events, and one count was that of all parts
together; it is restored as that of the operator's own.

Functions here are pure and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct
from typing import Any, cast

import msgpack

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.describing import type_name
from protocol.errors import CheckpointCorrupt, CheckpointTooNew, LocalProtocolError
from protocol.parts import OWN_PART, positions
from protocol.wire.extension_types import ExtensionType, mark
from protocol.wire.messages import HeldEvent, Positions, RestoreMode, SubtaskState
from protocol.wire.state import join_in_steps, run_steps
from protocol.wire.state_handles import StateHandle, pack_piece, unpack_piece
from protocol.wire.traces import split_traceparent

FORMAT_VERSION = 7
"""The newest format. Every format from 1 on can be read."""
CHECKPOINT_BYTES_MAX = 2**32 - 1
"""The size limit of a file, which is completely in memory while it is written or read."""
CHECKPOINT_ID_MAX = 2**53 - 1
"""The highest id of a checkpoint: a thousand a second would reach it after 285,000 years."""
PARALLELISM_MAX = 2**31 - 1
"""The highest parallelism: Spark counts partitions in 32 bits."""

_MAGIC = b"\x89HGC\r\n\x1a\n"  # as in PNG: reveals a transfer as text, or one that drops the eighth bit
_HEAD = Struct(">8sIQ")
_DIGEST_BYTES = 32
_OVERHEAD_BYTES = _HEAD.size + _DIGEST_BYTES
HEAD_BYTES = _HEAD.size
"""The size of the head, which ``check_head`` takes."""
_INT_MAX = 2**63 - 1
_LARGE_BYTES = 2**16
_BIN32 = b"\xc6"

# The first byte of each value that a body has, as msgpack writes it, with how many bytes its size or number takes.
_FIXINT_MAX, _FIXSTR = 0x7F, 0xA0
_BOOLS = {0xC2: False, 0xC3: True}
_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}

_ENVELOPE = b"\x93" + mark(ExtensionType.PART_EVENT)

_pack: Callable[..., bytes] = msgpack.packb


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint with its operator, its time of creation, and the release that wrote it.

    ``created_ms`` is in milliseconds since 1970, UTC.
    """

    operator_id: str
    mode: RestoreMode
    created_ms: int
    release: str
    checkpoint: CompletedCheckpoint


def encode_checkpoint(stored: StoredCheckpoint, *, bytes_max: int = CHECKPOINT_BYTES_MAX) -> bytes:
    """Return the bytes of the file. Equal checkpoints give equal bytes.

    Raises ``LocalProtocolError`` for anything that ``decode_checkpoint`` would refuse: a value of the wrong type or out
    of range, or more than ``bytes_max`` bytes.
    """
    pieces: list[bytes] = [b""]
    try:
        for value in _values(stored):
            if type(value) is bytes and len(value) >= _LARGE_BYTES:
                pieces += (_BIN32 + len(value).to_bytes(4, "big"), value)  # as msgpack does, without another copy
            else:
                pieces.append(_pack(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(
            f"checkpoint {stored.checkpoint.checkpoint_id} of {stored.operator_id!r} cannot be encoded: {error}"
        ) from error
    body_size = sum(map(len, pieces))
    size = body_size + _OVERHEAD_BYTES
    if size > bytes_max:
        raise LocalProtocolError(
            f"checkpoint {stored.checkpoint.checkpoint_id} of {stored.operator_id!r} takes {size} bytes, and at most "
            f"{bytes_max} can be stored: keep less state in the operator, or store large state elsewhere"
        )
    pieces[0] = _HEAD.pack(_MAGIC, _version_for(stored), body_size)
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    # In steps, so that a worker thread with a large state does not keep the interpreter from the event loop.
    data: bytes = run_steps(join_in_steps((*pieces, digest.digest())))
    return data


def check_head(head: bytes, size_bytes: int, *, bytes_max: int = CHECKPOINT_BYTES_MAX) -> None:
    """Raise ``CheckpointCorrupt`` if the head shows that a file of ``size_bytes`` is not a whole checkpoint.

    ``head`` has the first ``HEAD_BYTES`` bytes of the file, or all of them if there are fewer. What passes may still be
    damaged: ``decode_checkpoint`` decides.
    """
    if size_bytes > bytes_max:
        raise CheckpointCorrupt(f"it has {size_bytes} bytes, which exceeds the limit of {bytes_max}")
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise CheckpointCorrupt("it is not a Headgate checkpoint (bad header); check the path")
    if size_bytes < _OVERHEAD_BYTES or len(head) < _HEAD.size:
        raise CheckpointCorrupt(f"it is truncated: {size_bytes} bytes are fewer than any checkpoint has")
    claimed = _HEAD.unpack_from(head)[2] + _OVERHEAD_BYTES
    if claimed > size_bytes:
        raise CheckpointCorrupt(f"it is truncated or altered: it has {size_bytes} of {claimed} bytes")
    if claimed < size_bytes:
        raise CheckpointCorrupt(f"it claims {claimed} bytes, but has {size_bytes}")


def decode_checkpoint(data: bytes, *, bytes_max: int = CHECKPOINT_BYTES_MAX) -> StoredCheckpoint:
    """Return the checkpoint in the bytes of a file.

    Raises ``CheckpointCorrupt``, with the reason, unless ``data`` is exactly what ``encode_checkpoint`` writes, and
    ``CheckpointTooNew`` for a complete checkpoint of a later format.
    """
    check_head(data[:HEAD_BYTES], len(data), bytes_max=bytes_max)
    version = _HEAD.unpack_from(data)[1]
    end = len(data) - _DIGEST_BYTES
    if sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise CheckpointCorrupt("its checksum does not match: it is altered")
    if not 1 <= version <= FORMAT_VERSION:
        raise CheckpointTooNew(FORMAT_VERSION, version)
    return _Body(memoryview(data)[_HEAD.size : end], version).read()


def _version_for(stored: StoredCheckpoint) -> int:
    checkpoint = stored.checkpoint
    snapshots = checkpoint.subtask_states.values()
    handles = [state.files for one in snapshots for state in one.states if state.files is not None]
    if handles:
        return 7 if any(handle.key_groups is not None for handle in handles) else 6
    if any(len(one.events_sent) > 1 or any(map(_needs_part, one.held)) for one in snapshots):
        return 5
    if any(part.earlier_input for part in checkpoint.subtask_states.values()):
        return 4
    if checkpoint.partitions != _partitions_unsaid(checkpoint.parallelism, checkpoint.label):
        return 4
    if any(held.is_request for part in checkpoint.subtask_states.values() for held in part.held):
        return 3
    return 2 if checkpoint.label else 1


def _needs_part(held: HeldEvent) -> bool:
    """Whether earlier formats would not say whose event it is, or would read its beginning as an envelope."""
    return held.part > 0 or split_traceparent(held.payload)[1].startswith(_ENVELOPE)


def _partitions_unsaid(parallelism: int, label: str) -> int:
    """What formats 1 to 3 say about the number of partitions."""
    return parallelism if label else 0


def _values(stored: StoredCheckpoint) -> Iterator[object]:
    """Yield the values of the body in order, each checked."""
    checkpoint, version = stored.checkpoint, _version_for(stored)
    yield _text(stored.operator_id, "the operator id")
    yield _integer(checkpoint.checkpoint_id, "the checkpoint id", least=1, most=CHECKPOINT_ID_MAX)
    parallelism = _integer(checkpoint.parallelism, "the parallelism", least=1, most=PARALLELISM_MAX)
    yield parallelism
    yield int(RestoreMode(stored.mode))
    yield _integer(stored.created_ms, "the time of creation")
    yield _text(stored.release, "the release")
    yield _bytes(checkpoint.coordinator_state, "the coordinator's state")
    yield len(checkpoint.subtask_states)
    for subtask, snapshot in sorted(checkpoint.subtask_states.items()):
        yield _integer(subtask, "a subtask", most=parallelism - 1)
        yield from _counts(snapshot.events_sent, version, len(checkpoint.parts))
        yield len(snapshot.states)
        for original, state, files, groups in snapshot.states:
            yield _integer(original, "the subtask of a state")
            yield _bytes(state, "a state")
            if version >= 6:
                yield _packed_files(files, groups)
        yield len(snapshot.held)
        for event in snapshot.held:
            yield from _held(event, version, len(checkpoint.parts))
        if version >= 4:
            yield _flag(snapshot.earlier_input, "whether a state is of an earlier input")
    if version >= 2:
        yield _text(checkpoint.label, "the label", may_be_empty=version >= 3)
    if version >= 4:
        yield _integer(checkpoint.partitions, "the partitions", most=PARALLELISM_MAX)
    if version >= 5:
        yield len(checkpoint.parts)
        if checkpoint.parts[:1] != ("",) or len(set(checkpoint.parts)) < len(checkpoint.parts):
            raise ValueError(f"the parts must be the user's own and others, each with its own name: {checkpoint.parts}")
        for name in checkpoint.parts:
            yield _text(name, "the name of a part", may_be_empty=True)


def _packed_files(files: StateHandle | None, groups: tuple[int, int] | None) -> bytes:
    try:
        return b"" if files is None and groups is None else pack_piece(cast("StateHandle", files), groups)
    except ValueError as error:
        raise ValueError(f"the files of a state {error}") from None


def _counts(events_sent: Positions, version: int, parts: int) -> Iterator[int]:
    if version >= 5:
        yield _integer(len(events_sent), "how many parts have positions", most=parts)
    for count in events_sent if version >= 5 else events_sent or (0,):
        yield _integer(count, "events_sent")


def _held(event: HeldEvent, version: int, parts: int) -> Iterator[object]:
    yield _integer(event.sender, "the sender of a held event")
    yield split_traceparent(_bytes(event.payload, "a held event"))[1]
    if version >= 3:
        yield _flag(event.is_request, "whether a held event is a request")
    if version >= 5:
        yield _integer(event.part, "the part of a held event", most=parts - 1)


class _Body:
    """Reads the values of a body one by one. No value is larger than the rest of the body.

    Not with msgpack, which copies the whole body first: a thread would keep the interpreter from the event loop.
    """

    def __init__(self, body: memoryview, version: int) -> None:
        self._body = body
        self._size = len(body)
        self._version = version
        self._at = 0
        self._parts = {"": OWN_PART}  # up to format 4: those that held events name

    def read(self) -> StoredCheckpoint:
        try:
            stored = self._read_all()
            if self._at != self._size:
                raise ValueError("there are bytes after its end")
        except (ValueError, TypeError) as error:
            raise CheckpointCorrupt(f"its body does not have this format: {str(error) or type_name(error)}") from None
        return stored

    def _read_all(self) -> StoredCheckpoint:
        operator_id = _text(self._next(), "the operator id")
        checkpoint_id = _integer(self._next(), "the checkpoint id", least=1, most=CHECKPOINT_ID_MAX)
        parallelism = _integer(self._next(), "the parallelism", least=1, most=PARALLELISM_MAX)
        mode = RestoreMode(_integer(self._next(), "the mode"))
        created_ms = _integer(self._next(), "the time of creation")
        release = _text(self._next(), "the release")
        coordinator_state = _bytes(self._next(), "the coordinator's state")
        parts: dict[int, SubtaskSnapshot] = {}
        for _ in range(self._count()):
            subtask = _integer(self._next(), "a subtask", most=parallelism - 1)
            if parts and subtask <= next(reversed(parts)):
                raise ValueError(f"subtask {subtask} is out of order")
            parts[subtask] = self._read_part()
        label = ""
        if self._version >= 2:
            label = _text(self._next(), "the label", may_be_empty=self._version >= 3)
        partitions = _partitions_unsaid(parallelism, label)
        if self._version >= 4:
            partitions = _integer(self._next(), "the partitions", most=PARALLELISM_MAX)
        if self._version >= 5:
            self._parts = {}
            for index in range(self._count()):
                name = _text(self._next(), "the name of a part", may_be_empty=True)
                if self._parts.setdefault(name, index) != index:
                    raise ValueError(f"there are two parts {name!r}")
        if next(iter(self._parts), None) != "":
            raise ValueError("the first part is not the user's own")
        for one in parts.values():
            if len(one.events_sent) > len(self._parts) or any(held.part >= len(self._parts) for held in one.held):
                raise ValueError("there are events of a part without a name")
        names = tuple(self._parts)
        checkpoint = CompletedCheckpoint(checkpoint_id, parallelism, coordinator_state, parts, label, partitions, names)
        return StoredCheckpoint(operator_id, mode, created_ms, release, checkpoint)

    def _read_part(self) -> SubtaskSnapshot:
        counts = self._count() if self._version >= 5 else 1
        events_sent = positions([_integer(self._next(), "events_sent") for _ in range(counts)])
        states = tuple(self._read_state() for _ in range(self._count()))
        held = tuple(self._read_held() for _ in range(self._count()))
        earlier = self._version >= 4 and _flag(self._next(), "whether a state is of an earlier input")
        return SubtaskSnapshot(states, held, events_sent, earlier)

    def _read_state(self) -> SubtaskState:
        original = _integer(self._next(), "the subtask of a state")
        state = _bytes(self._next(), "a state")
        files = _bytes(self._next(), "the files of a state") if self._version >= 6 else b""
        try:
            handle, groups = unpack_piece(files) if files else (None, None)
        except ValueError as error:
            raise ValueError(f"the files of a state {error}") from None
        if self._version == 6 and handle is not None and handle.key_groups is not None:
            raise ValueError("a state has key groups, which this format has not")
        return SubtaskState(original, state, handle, groups)

    def _read_held(self) -> HeldEvent:
        sender = _integer(self._next(), "the sender of a held event")
        payload = _bytes(self._next(), "a held event")
        is_request = self._version >= 3 and _flag(self._next(), "whether a held event is a request")
        if self._version >= 5:
            return HeldEvent(sender, payload, is_request, _integer(self._next(), "the part of a held event"))
        name, payload = _split_envelope(payload)
        return HeldEvent(sender, payload, is_request, self._parts.setdefault(name, len(self._parts)))

    def _next(self) -> Any:
        form = self._take(1)[0]
        if form <= _FIXINT_MAX:
            return form
        if form in _BOOLS:
            return _BOOLS[form]
        if form in _INTEGERS:
            return int.from_bytes(self._take(_INTEGERS[form]), "big")
        if form in _BYTES:
            data: bytes = run_steps(join_in_steps((self._take(int.from_bytes(self._take(_BYTES[form]), "big")),)))
            return data
        if form in _TEXTS:
            return str(self._take(int.from_bytes(self._take(_TEXTS[form]), "big")), "utf-8")
        if _FIXSTR <= form <= _FIXSTR + 31:
            return str(self._take(form - _FIXSTR), "utf-8")
        raise ValueError(f"a value begins with {form:#x}")

    def _take(self, count: int) -> memoryview:
        at, self._at = self._at, self._at + count
        if self._at > self._size:
            raise ValueError("a value is truncated")
        return self._body[at : self._at]

    def _count(self) -> int:
        """How many entries follow. Each takes at least two bytes."""
        return _integer(self._next(), "a count", most=self._size // 2)


def _split_envelope(payload: bytes) -> tuple[str, bytes]:
    """Return the name of the part in a held event up to format 4, and its own event. An event without one is whole."""
    if payload[:4] != _ENVELOPE:
        return "", payload
    form, at = payload[4], 5
    if form in _TEXTS:
        form, at = int.from_bytes(payload[5 : 5 + _TEXTS[form]], "big"), 5 + _TEXTS[form]
    elif _FIXSTR <= form <= _FIXSTR + 31:
        form -= _FIXSTR
    else:
        raise ValueError("the event of a part has no name")
    return _text(payload[at : at + form].decode(), "the name of a part"), payload[at + form :]


def _integer(value: Any, name: str, *, least: int = 0, most: int = _INT_MAX) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, is {type_name(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, is {value}")
    return value


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} must be a bool, is {type_name(value)}")
    return value


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if type(value) is not str:
        raise ValueError(f"{name} must be a string, is {type_name(value)}")
    if not value and not may_be_empty:
        raise ValueError(f"{name} must not be empty")
    return value


def _bytes(value: Any, name: str) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"{name} must be bytes, is {type_name(value)}")
    return value


__all__ = [
    "CHECKPOINT_BYTES_MAX",
    "CHECKPOINT_ID_MAX",
    "FORMAT_VERSION",
    "HEAD_BYTES",
    "PARALLELISM_MAX",
    "StoredCheckpoint",
    "check_head",
    "decode_checkpoint",
    "encode_checkpoint",
]
