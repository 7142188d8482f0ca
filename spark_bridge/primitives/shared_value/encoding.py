# SPDX-License-Identifier: Apache-2.0

"""What the two halves of a shared value send to each other, and the value as bytes.

Two values are equal if their encodings are: types, the order of dicts and the bytes of arrays included. ``_same`` alone
decides that of what a user has set, and Python's ``==`` never does.

to a task      ["value", version, wants_answer, bytes]
               ["change", version, wants_answer, base, bytes]    of a dict: what differs from version ``base``
               ["offer", version, wants_answer, digest]          of a large value
               ["chunk", version, wants_answer, number, count, bytes]
               ["complete"]                                      wakes a task that waits for its first value
from a task    ["applied", version]
               ["want", version, wants_answer]                   it lacks the base of a change, or an offered value
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from protocol.wire.codec import decode_event, encode_argument
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits

COMPLETE = ["complete"]
VALUE_BYTES_MAX = 256 * 1024 * 1024
LARGE_BYTES = 64 * 1024
"""A larger value is offered first, and comes in chunks to a process that does not have it."""
CHUNK_BYTES = 240 * 1024
"""With what surrounds it, it travels in one frame."""
CHUNKS_UNCONFIRMED = 2
"""So many chunks are on their way to a task; the next one is encoded when the first of these has arrived."""
_PLAIN = frozenset({str, bytes, int, bool})
"""Two values of one of these types are equal exactly if their encodings are."""
_LIMITS = WireLimits(
    message_bytes_max=VALUE_BYTES_MAX + 2**20,
    event_bytes_max=VALUE_BYTES_MAX,
    event_containers_max=64 * DEFAULT_LIMITS.event_containers_max,
    event_items_max=64 * DEFAULT_LIMITS.event_items_max,
    event_map_entries_max=2**20,  # what comes from the driver is not hostile
)


def encode_value(value: Any, name: str = "value") -> bytes:
    """Raises ``EventEncodeError`` if an event could not carry the value, whatever its size, or above 256 MiB."""
    return encode_argument(name, value, _LIMITS)


def decode_value(payload: bytes) -> Any:
    """Return a new object, equal to the one that was encoded."""
    return decode_event(payload, _LIMITS)


def digest_of(payload: bytes) -> bytes:
    """What tells values apart, and proves that a file of another process holds the value."""
    return blake2b(payload, digest_size=32).digest()


def encode_change(old: Any, encoded: bytes, new: Any, payload: bytes) -> bytes | None:
    """What a task needs that has what ``encoded`` says, to get what ``payload`` says. None if it needs the whole value.

    A dict in another order needs that, and so does one with a key such as NaN, which no look-up finds, and one that a
    program has changed although it got it from ``get``.
    """
    changes = difference(old, new)
    if changes is None:
        return None
    change = encode_value(list(changes))
    if len(change) > LARGE_BYTES or 2 * len(change) > len(payload):
        return None
    return change if encode_value(apply_change(decode_value(encoded), change)) == payload else None


def apply_change(old: Any, change: bytes) -> dict[Any, Any]:
    """Return a new dict: what ``encode_change`` was told is new."""
    changed, removed = decode_value(change)
    gone = set(removed)
    return {**{key: value for key, value in old.items() if key not in gone}, **changed}


def difference(old: Any, new: Any) -> tuple[dict[Any, Any], list[Any]] | None:
    """What of a dict has changed: the new entries and those with another value, and the keys that are gone.

    A key of another type, such as True for 1, replaces an equal one: it is new, and the old one is gone. None for other
    values, and if more than half of the entries differ.
    """
    if type(old) is not dict or type(new) is not dict:
        return None
    kept = {key: key for key in old}  # as they are in the old one: a look-up finds 1 for True
    kept = {key: kept[key] for key in new if key in kept and _same(kept[key], key)}
    changed = {key: value for key, value in new.items() if key not in kept or not _same(old[key], value)}
    removed = [key for key in old if key not in kept]
    if 2 * (len(changed) + len(removed)) > len(new):
        return None
    return changed, removed


def _same(old: Any, new: Any) -> bool:
    """Of one type at every level, and equal. ``==`` says that 1, 1.0 and True are equal, and of arrays nothing."""
    if old is new or type(old) is not type(new):
        return old is new
    return bool(old == new) if type(old) in _PLAIN else encode_value(old) == encode_value(new)
