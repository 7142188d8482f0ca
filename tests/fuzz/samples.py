# SPDX-License-Identifier: Apache-2.0

"""Random valid values: every message of the protocol, events, checkpoints, records of the relay.

Every function draws from the ``Random`` that it is given, so a seed always gives the same value. Numbers are mostly
small or at an edge, because decoders go wrong there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Any, get_args
from uuid import UUID

import numpy as np

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.facts import TaskState
from protocol.wire.checkpoint_format import CHECKPOINT_ID_MAX, StoredCheckpoint
from protocol.wire.event_classes import event as event_class
from protocol.wire.framing import WireLimits
from protocol.wire.messages import (
    HeldEvent,
    Message,
    OperatorPart,
    Positions,
    RefusalCode,
    RestoreMode,
    SubtaskState,
    UpMessage,
)
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from spark_bridge.bridge.relay.records import TASK_STATES

LIMITS = WireLimits(
    message_bytes_max=64 * 1024,
    event_bytes_max=8 * 1024,
    event_nesting_max=16,
    event_containers_max=1500,
    event_items_max=2000,
    event_map_entries_max=1200,
    name_chars_max=32,
    text_chars_max=256,
    held_events_max=64,
    fragment_bytes=2048,
)
"""Bounds small enough that a fuzzer often reaches them."""

MESSAGE_KINDS: tuple[type[Message], ...] = get_args(Message)
UPWARD_KINDS: tuple[type[UpMessage], ...] = get_args(UpMessage)
INT_MAX = 2**63 - 1

_EDGES = (0, 1, 2, 31, 32, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**32 - 1, 2**32, 2**53 + 1, INT_MAX)
_LETTERS = "aZ09 _-.:/\n\x00äß€漢\U0001f6a6"


def natural(random: Random, least: int = 0) -> int:
    """Return a number from ``least`` to ``INT_MAX``."""
    value = random.choice(_EDGES) if random.random() < 0.5 else random.randrange(1000)
    return max(least, value)


def text(random: Random, chars_max: int, least: int = 0) -> str:
    length = random.choice((least, 1, 3, 31, 32, chars_max))
    return "".join(random.choices(_LETTERS, k=min(max(length, least), chars_max)))


def blob(random: Random, bytes_max: int) -> bytes:
    length = random.choice((0, 1, 5, 255, 256, random.randrange(bytes_max + 1)))
    return random.randbytes(min(length, bytes_max))


# --- messages -----------------------------------------------------------------------------------------------------


def _payload(random: Random) -> bytes:
    return blob(random, LIMITS.event_bytes_max) if random.random() < 0.1 else blob(random, 300)


def _held(random: Random) -> tuple[HeldEvent, ...]:
    count = random.choice((0, 1, 3, LIMITS.held_events_max))
    return tuple(
        HeldEvent(natural(random), blob(random, 40), random.random() < 0.5, part(random)) for _ in range(count)
    )


PART_NAMES = ("", *(f"part {index}" for index in range(1, 128)))


def part(random: Random) -> int:
    """Return the index of a part."""
    return random.choice((0, 0, 1, 2, 127))


def positions(random: Random) -> Positions:
    """Return the counts of up to so many parts as there may be."""
    counts = [natural(random) for _ in range(random.choice((0, 1, 2, 128)))]
    return (*counts[:-1], counts[-1] or 1) if counts else ()


def _parts(random: Random) -> tuple[OperatorPart, ...]:
    names = {text(random, LIMITS.name_chars_max, 1) for _ in range(random.choice((0, 1, 5)))}
    return (OperatorPart(""), *(OperatorPart(name, random.random() < 0.5) for name in names))


def handle(random: Random) -> StateHandle:
    """Return the handle of a state in files."""
    name = "/".join(random.choice(("7-1-ab", "0-12-cd-manifest", "x.y", "_=")) for _ in range(random.choice((1, 2, 5))))
    size, total, count = random.choice((1, 4711, 2**27)), natural(random), random.choice((0, 1, 2**18))
    low = random.choice((0, 5, 2**15 - 1))
    groups = random.choice((None, KeyGroupRange(low, random.randint(low + 1, 2**15), 2**15)))
    return StateHandle(name, size, random.randbytes(32), total, count, groups)


def files(random: Random) -> StateHandle | None:
    """Return the handle of a state in files, or that it has none."""
    return random.choice((None, handle(random)))


def _state(random: Random) -> SubtaskState:
    state = SubtaskState(natural(random), blob(random, 300), files(random))
    if state.files is None or state.files.key_groups is None or random.random() < 0.5:
        return state
    first, end, _ = state.files.key_groups
    low = random.randrange(first, end)
    return state._replace(groups=(low, random.randint(low + 1, end)))


def _states(random: Random) -> tuple[SubtaskState, ...]:
    return tuple(_state(random) for _ in range(random.choice((0, 1, 4))))


_FIELDS: dict[str, Callable[[Random], Any]] = {
    "seq": lambda random: natural(random, 1),
    "payload": _payload,
    "state": lambda random: blob(random, 3000),
    "token": lambda random: blob(random, 64),
    "held": _held,
    "part": part,
    "parts": _parts,
    "events_sent": positions,
    "states": _states,
    "files": files,
    "handle": handle,
    "state_follows": lambda random: random.random() < 0.5,
    "files_from": lambda random: text(random, 4096),
    "target": lambda random: text(random, 4096),
    "operator_id": lambda random: text(random, LIMITS.name_chars_max, 1),
    "mode": lambda random: random.choice(list(RestoreMode)),
    "code": lambda random: random.choice(list(RefusalCode)),
    "parallelism": lambda random: natural(random, 1),
    "awaits_start": lambda random: random.random() < 0.5,
    "hold_events": lambda random: random.random() < 0.5,
    "input_begins_again": lambda random: random.random() < 0.5,
    "window_events": lambda random: natural(random, 1),
    "window_bytes": lambda random: natural(random, 1),
    "checkpoint_id": lambda random: natural(random) if random.random() < 0.8 else -1,
    "awaited_s": lambda random: random.choice((0.0, 10.5, 1e300)),
    "reconnect_timeout_s": lambda random: random.choice((0.0, 0.5, 30.0, 1e300, 5e-324)),
}
_TEXTS = frozenset(
    {
        "action",
        "call",
        "place",
        "location",
        "python_version",
        "reason",
        "failure",
        "message",
        "error",
        "positions_refused",
    }
)


def message(random: Random, kind: type[Message] | None = None) -> Message:
    """Return a valid message under ``LIMITS``: of ``kind``, or of any."""
    kind = kind or random.choice(MESSAGE_KINDS)
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in _TEXTS:
            values[field.name] = text(random, LIMITS.text_chars_max)
        else:
            values[field.name] = _FIELDS.get(field.name, natural)(random)
    return kind(**values)


# --- events -------------------------------------------------------------------------------------------------------


@event_class("tests.fuzz.sample")
@dataclass(frozen=True)
class Sample:
    first: Any
    second: Any = None


def event(random: Random, depth: int = 0) -> Any:
    """Return a value that an event can be, with a few levels of nesting."""
    if depth < 4 and random.random() < 0.4:
        entries = range(random.choice((0, 1, 2, 5)))
        match random.randrange(8):
            case 0:
                return tuple(event(random, depth + 1) for _ in entries)
            case 1:
                return random.choice((set, frozenset))(_hashable(random) for _ in entries)
            case 2:
                return Sample(event(random, depth + 1), event(random, depth + 1))
            case 3 | 4 | 5:
                return [event(random, depth + 1) for _ in entries]
        return {_hashable(random): event(random, depth + 1) for _ in entries}
    return _scalar(random) if random.random() < 0.8 else _leaf(random)


def _hashable(random: Random) -> Any:
    if random.random() < 0.8:
        return _scalar(random)
    return random.choice((lambda: (_scalar(random), _leaf(random)), lambda: Sample(_scalar(random))))()


def _leaf(random: Random) -> Any:
    moment = datetime(random.randrange(1, 9999), 2, 3, 4, 5, 6, random.randrange(10**6), fold=random.randrange(2))  # noqa: DTZ001
    number = natural(random)
    return random.choice(
        (
            moment,
            moment.replace(tzinfo=timezone(timedelta(minutes=random.randrange(-1439, 1440)))),
            moment.date(),
            moment.time(),
            timedelta(number % 10**9, number % 86_400, number % 10**6),
            Decimal(number).scaleb(random.randrange(-50, 50)),
            UUID(int=number),
            np.float32(number),
            np.datetime64(number, "us"),
        )
    )


def _scalar(random: Random) -> Any:
    match random.randrange(7):
        case 0:
            return random.choice((None, True, False))
        case 1:
            return natural(random)
        case 2:
            return -natural(random) - 1
        case 3:
            return random.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), -5e-324, 2**64 - 1))
        case 4:
            return text(random, 40)
        case _:
            return blob(random, 40)


# --- checkpoints and relay records --------------------------------------------------------------------------------


def checkpoint(random: Random) -> StoredCheckpoint:
    parallelism = random.choice((1, 2, 5))
    parts = {
        subtask: SubtaskSnapshot(_states(random), _held(random), positions(random))
        for subtask in range(parallelism)
        if random.random() < 0.7
    }
    return StoredCheckpoint(
        operator_id=text(random, 32, 1),
        mode=random.choice(list(RestoreMode)),
        created_ms=natural(random),
        release=text(random, 8, 1),
        checkpoint=CompletedCheckpoint(
            min(natural(random, 1), CHECKPOINT_ID_MAX), parallelism, blob(random, 300), parts, parts=PART_NAMES
        ),
    )


def relay_record(random: Random) -> bytes:
    """Return a record as the listener in the JVM writes it: a kind, a time, and the fields of that kind."""
    kind = random.randrange(1, 12)

    def small(layout: str) -> bytes:
        return struct.pack(">" + layout, *(random.randrange(100) for _ in layout))

    def flag() -> bytes:
        return struct.pack(">?", random.random() < 0.5)

    def prose() -> bytes:
        data = text(random, 60).encode()
        return struct.pack(">H", len(data)) + data

    def listed(layout: str) -> bytes:
        entries = [small(layout) if "?" not in layout else small(layout[:-1]) + flag() for _ in range(3)]
        return struct.pack(">I", len(entries)) + b"".join(entries)

    def task_state() -> bytes:
        state = random.randrange(4)
        return struct.pack(">IqB", 1, 7, state) + (
            small("ii") if state != TASK_STATES.index(TaskState.UNKNOWN) else b""
        )

    bodies: dict[int, Callable[[], bytes]] = {
        1: lambda: small("i") + listed("i") + prose(),
        2: lambda: small("i") + flag() + prose(),
        3: lambda: small("iii") + flag() + small("i"),
        4: lambda: small("ii") + flag() + prose(),
        5: lambda: small("qiiii") + flag() + prose() + prose(),
        6: lambda: small("qiiii") + bytes([random.randrange(7)]) + prose(),
        7: lambda: prose() + prose(),
        8: lambda: small("q"),
        9: lambda: b"",
        10: lambda: small("q") + flag() + prose(),
        11: lambda: small("q") + listed("i?") + task_state(),
    }
    return struct.pack(">Bq", kind, natural(random)) + bodies[kind]()
