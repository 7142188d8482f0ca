# SPDX-License-Identifier: Apache-2.0

"""The wire format as a table: the tag of each message, and what each field may contain (H60, H62).

Both ends use the same checks, except that a text is truncated, and positions are turned into bytes, before they are
sent. The peer's mistake is a remote error; the caller's own is a local error, raised at the
end that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from math import isfinite
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from protocol.describing import type_name
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.wire.framing import WireLimits
from protocol.wire.messages import (
    PARTS_MAX,
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
    CoordinatorAwaited,
    EventMessage,
    Finished,
    Heartbeat,
    HeldEvent,
    Message,
    Opened,
    OperatorPart,
    Positions,
    RefusalCode,
    Refused,
    Register,
    Registered,
    RequestCancelled,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    RestoreMode,
    Resume,
    Resumed,
    SavepointTaken,
    SavepointTarget,
    StartProcessing,
    StateFailed,
    StateStored,
    SubtaskState,
    UrgentEventMessage,
)
from protocol.wire.state_handles import StateHandle, pack_handle, pack_piece, unpack_handle, unpack_piece

INT_MAX = 2**63 - 1
TOKEN_BYTES_MAX = 64
FOLDER_CHARS_MAX = 4096
"""The size limit of the address of a folder, which must not be truncated like a text for people."""
_COUNT_BYTES = 8
_POSITIONS_RULE = f"must have at most {PARTS_MAX} numbers, of which the last one is not 0"
_COUNTS = [Struct(f">{count}Q") for count in range(PARTS_MAX + 1)]


class _StateEntry(NamedTuple):
    """A ``SubtaskState`` on the wire. ``files``: the bytes of its handle and groups; none if it has no files."""

    subtask: int
    state: bytes
    files: bytes


EntryKind = type[_StateEntry | HeldEvent | OperatorPart]

# A check returns the value to use, or raises ValueError with the rest of a sentence that begins with the field's name.

Check = Callable[[Any, WireLimits], Any]


def _integer(value: Any, limits: WireLimits, *, least: int = 0, most: int = INT_MAX) -> int:
    if type(value) is not int:
        raise ValueError(f"must be an integer, is {type_name(value)}")
    if not least <= value <= most:
        raise ValueError(f"must be from {least} to {most}, is {value}")
    return value


def _of_enum(value: Any, limits: WireLimits, *, kind: type[RestoreMode | RefusalCode]) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be an integer, is {type_name(value)}")
    return kind(value)  # its ValueError names the value


def _seconds(value: Any, limits: WireLimits) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"must be a number, is {type_name(value)}")
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"must be a finite number of seconds, is {value}")
    return float(value)


def _name(value: Any, limits: WireLimits) -> str:
    if type(value) is not str:
        raise ValueError(f"must be a string, is {type_name(value)}")
    if not 0 < len(value) <= limits.name_chars_max:
        raise ValueError(f"must have 1 to {limits.name_chars_max} characters, has {len(value)}")
    return value


def _part_name(value: Any, limits: WireLimits) -> str:
    return value if value == "" and type(value) is str else _name(value, limits)


def text(value: Any, limits: WireLimits) -> str:
    if type(value) is not str:
        raise ValueError(f"must be a string, is {type_name(value)}")
    if len(value) > limits.text_chars_max:
        raise ValueError(f"must have at most {limits.text_chars_max} characters, has {len(value)}")
    return value


def _fitted_text(value: Any, limits: WireLimits) -> str:
    return text(fit_text(value, limits.text_chars_max) if type(value) is str else value, limits)


def fit_text(prose: str, chars_max: int) -> str:
    """Escape lone surrogates (a file name in an exception), and truncate a text that is too long, with a mark."""
    prose = prose.encode("utf-8", "backslashreplace").decode("utf-8")
    return prose if len(prose) <= chars_max else prose[: chars_max - 1] + "…"


def _bytes(value: Any, limits: WireLimits) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"must be bytes, is {type_name(value)}")
    return value  # the frame bounds it


def _payload(value: Any, limits: WireLimits) -> bytes:
    if len(_bytes(value, limits)) > limits.event_bytes_max:
        raise ValueError(f"must have at most {limits.event_bytes_max} bytes (event_bytes_max), has {len(value)}")
    return bytes(value)


def _token(value: Any, limits: WireLimits) -> bytes:
    if len(_bytes(value, limits)) > TOKEN_BYTES_MAX:
        raise ValueError(f"must have at most {TOKEN_BYTES_MAX} bytes, has {len(value)}")
    return bytes(value)


def _folder(value: Any, limits: WireLimits) -> str:
    if type(value) is not str:
        raise ValueError(f"must be a string, is {type_name(value)}")
    if len(value) > FOLDER_CHARS_MAX:
        raise ValueError(f"must have at most {FOLDER_CHARS_MAX} characters, has {len(value)}")
    return value


def _files(value: Any, limits: WireLimits) -> StateHandle | None:
    """Return the handle of a state in files, which comes as bytes: none if there are no files."""
    return unpack_handle(_bytes(value, limits)) if value != b"" else None


def _packed_files(value: Any, limits: WireLimits) -> bytes:
    return b"" if value is None else pack_handle(value)


def _handle(value: Any, limits: WireLimits) -> StateHandle:
    return unpack_handle(_bytes(value, limits))


def _packed_handle(value: Any, limits: WireLimits) -> bytes:
    return pack_handle(value)


def _states(value: Any, limits: WireLimits) -> tuple[SubtaskState, ...]:
    entries = _entries(value, limits, kind=_StateEntry, checks=(_integer, _bytes, _bytes))
    return tuple(
        [SubtaskState(subtask, state, *(unpack_piece(files) if files else ())) for subtask, state, files in entries]
    )


def _packed_states(value: Any, limits: WireLimits) -> tuple[tuple[int, bytes, bytes], ...]:
    states = _entries(value, limits, kind=SubtaskState, checks=(_integer, _bytes, _any, _any))
    return tuple([(one.subtask, one.state, _packed_piece(one.files, one.groups)) for one in states])


def _any(value: Any, limits: WireLimits) -> Any:
    return value


def _packed_piece(files: Any, groups: Any) -> bytes:
    return b"" if files is None and groups is None else pack_piece(files, groups)


def _positions(value: Any, limits: WireLimits) -> Positions:
    """Return ``Positions``, which come as the bytes of their numbers (u64, big-endian)."""
    size = len(_bytes(value, limits))
    if size % _COUNT_BYTES or size > PARTS_MAX * _COUNT_BYTES:
        raise ValueError(f"must have {_COUNT_BYTES} bytes for each of at most {PARTS_MAX} parts, has {size}")
    counts = _COUNTS[size // _COUNT_BYTES].unpack(value)
    _check_positions(counts, limits)
    return counts


def _packed_positions(value: Any, limits: WireLimits) -> bytes:
    if type(value) is not tuple:
        raise ValueError(f"must be a tuple of numbers, is {type_name(value)}")
    if len(value) > PARTS_MAX:
        raise ValueError(_POSITIONS_RULE)
    _check_positions(value, limits)
    return _COUNTS[len(value)].pack(*value)


def _check_positions(counts: Positions, limits: WireLimits) -> None:
    if counts and not counts[-1]:
        raise ValueError(_POSITIONS_RULE)
    for count in counts:
        _integer(count, limits)


def _flag(value: Any, limits: WireLimits) -> bool:
    if type(value) is not bool:
        raise ValueError(f"must be a bool, is {type_name(value)}")
    return value


def _entries(
    value: Any,
    limits: WireLimits,
    *,
    kind: type[SubtaskState | _StateEntry | HeldEvent | OperatorPart],
    checks: tuple[Check, ...],
) -> tuple[Any, ...]:
    """Check a list of lists, each with the fields of ``kind``. There may be 65,536, so no line runs for each."""
    if type(value) is not list and type(value) is not tuple:
        raise ValueError(f"must be a list of lists, is {type_name(value)}")
    if len(value) > limits.held_events_max:
        raise ValueError(f"must have at most {limits.held_events_max} entries, has {len(value)}")
    kinds = set(map(type, value))
    if not kinds <= {list, tuple, kind} or not set(map(len, value)) <= {len(checks)}:
        raise ValueError(f"must hold lists of {len(checks)}: {', '.join(kind._fields)}")
    for index, check in enumerate(checks if value else ()):
        # If the values of a column have one type, its extremes tell whether all of them pass.
        column = list(map(itemgetter(index), value))
        types = set(map(type, column))
        if types == {int}:
            to_check: Collection[Any] = {min(column), max(column)}  # most often they are the same
        elif types == {bytes}:
            to_check = [max(column, key=len)]
        elif types == {bool}:
            to_check = column[:1]
        else:
            to_check = column
        for field in to_check:
            check(field, limits)
    return tuple(value) if kinds <= {kind} else tuple(kind(*entry) for entry in value)


_NATURAL: Check = _integer
_POSITIVE: Check = partial(_integer, least=1)
_CHECKPOINT: Check = partial(_integer, least=VIRTUAL_EMPTY_CHECKPOINT)
_MODE: Check = partial(_of_enum, kind=RestoreMode)
_CODE: Check = partial(_of_enum, kind=RefusalCode)
_PART: Check = partial(_integer, most=PARTS_MAX - 1)
_HELD: Check = partial(_entries, kind=HeldEvent, checks=(_integer, _payload, _flag, _PART))
_PARTS: Check = partial(_entries, kind=OperatorPart, checks=(_part_name, _flag))

ENTRY_KINDS: dict[Check, EntryKind] = {
    _states: _StateEntry,
    _HELD: HeldEvent,
    _PARTS: OperatorPart,
}
"""The checks of fields that are lists of entries, and the kind of an entry; every other field is a single value."""

EVENT_TAG = 1
CONFIRM_TAG = 2

# The wire format: tag, message, one check per field. A tag is never used again for another message.
_WIRE: tuple[tuple[int, type[Message], tuple[Check, ...]], ...] = (
    (EVENT_TAG, EventMessage, (_NATURAL, _POSITIVE, _payload, _PART)),
    (CONFIRM_TAG, Confirm, (_NATURAL, _NATURAL)),
    # up
    (10, Register, (_NATURAL, _name, _NATURAL, _NATURAL, _NATURAL, _MODE, _POSITIVE, text, text, text)),
    (11, Resume, (_NATURAL, _name, _NATURAL, _token)),
    (12, Opened, (_NATURAL, _POSITIVE, _flag)),
    (13, RequestMessage, (_NATURAL, _POSITIVE, _NATURAL, _payload, _PART)),
    (14, ClosedForCheckpoint, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (15, CheckpointAcknowledged, (_NATURAL, _POSITIVE, _CHECKPOINT, _bytes, _HELD, _positions, _NATURAL, _flag)),
    (16, CheckpointDeclined, (_NATURAL, _POSITIVE, _CHECKPOINT, text, _NATURAL)),
    (17, Finished, (_NATURAL, _POSITIVE, text, _bytes, _positions, _files)),
    (18, RestoredEventMessage, (_NATURAL, _POSITIVE, _NATURAL, _payload, _PART)),
    (19, RestoredRequestMessage, (_NATURAL, _POSITIVE, _NATURAL, _payload, _PART)),
    (20, Heartbeat, (_NATURAL,)),
    (21, RequestCancelled, (_NATURAL, _POSITIVE, _NATURAL)),
    (22, StateStored, (_NATURAL, _POSITIVE, _CHECKPOINT, _handle, _NATURAL)),
    (23, StateFailed, (_NATURAL, _POSITIVE, _CHECKPOINT, text, _NATURAL)),
    # down
    (
        30,
        Registered,
        (
            *(_NATURAL, _NATURAL, _CHECKPOINT, _states, _HELD, _seconds),
            *(_POSITIVE, _POSITIVE, _positions, _token, _seconds, _flag, _flag, text, _PARTS, _folder),
        ),
    ),
    (31, Resumed, (_NATURAL, _NATURAL)),
    (32, Refused, (_NATURAL, _CODE, text)),
    (33, AttemptEnded, (_NATURAL, text)),
    (34, AnswerMessage, (_NATURAL, _POSITIVE, _NATURAL, text, _payload)),
    (35, CloseForCheckpoint, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (36, BarrierMessage, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL, _NATURAL)),
    (37, CheckpointCompleted, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (38, CheckpointAborted, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (39, SavepointTaken, (_NATURAL, _POSITIVE, _CHECKPOINT, _NATURAL)),
    (40, CoordinatorAwaited, (_NATURAL, text, _seconds, text)),
    (41, StartProcessing, (_NATURAL, _POSITIVE)),
    (42, UrgentEventMessage, (_NATURAL, _POSITIVE, _payload, _PART)),
    (43, SavepointTarget, (_NATURAL, _POSITIVE, _CHECKPOINT, _folder)),
)
Row = tuple[tuple[str, Check], ...]


def _row(kind: type[Message], checks: tuple[Check, ...]) -> Row:
    return tuple(zip((field.name for field in fields(kind)), checks, strict=True))


BY_TAG: dict[int, tuple[type[Message], Row]] = {tag: (kind, _row(kind, checks)) for tag, kind, checks in _WIRE}
"""How to check what has come: the class of each tag, and its fields in order."""
_WHEN_SENT: dict[Check, Check] = {
    text: _fitted_text,
    _positions: _packed_positions,
    _files: _packed_files,
    _handle: _packed_handle,
    _states: _packed_states,
}
BY_KIND: dict[type[Message], tuple[int, Row]] = {
    kind: (tag, _row(kind, tuple(_WHEN_SENT.get(check, check) for check in checks))) for tag, kind, checks in _WIRE
}
"""How to check what is sent."""
