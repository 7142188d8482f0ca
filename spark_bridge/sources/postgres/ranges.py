# SPDX-License-Identifier: Apache-2.0

"""The ranges of a table that was read, as one value that fits into an event: a million of them take some megabytes.

The split of the changes has it, so that its reader knows with which snapshot each range was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import compress, decompress

from protocol.wire.state import decode_entry, decode_state, encode_state

_RANGES = "the ranges of a PostgreSQL table"
_NOTHING = "0:0:"
"""The snapshot of a range that nobody has read. No transaction has the number 0."""


def ordered(key: str) -> Any:
    """What orders the texts of keys as the server does: they are integers, or UUIDs."""
    return key if "-" in key[1:] else int(key)


def pack_ranges(read: Mapping[str | None, bytes], count: int) -> bytes:
    """Pack ``count`` ranges in the order of the key. Blocks for some seconds, for a million.

    ``read`` has an encoded ``[low, high, snapshot]`` for each low end. The first range has None, and the last one ends
    with None. Those that are missing were left by tasks that returned early: no snapshot has their rows.
    """
    highs: list[str | None] = []
    numbers: list[int] = []
    snapshots: dict[str, int] = {}  # of which many ranges may have the same

    def add(high: str | None, snapshot: str) -> None:
        highs.append(high)
        numbers.append(snapshots.setdefault(snapshot, len(snapshots)))

    at: str | None = None
    for low in (None, *sorted((low for low in read if low is not None), key=ordered)):
        if low is not None and low != at:
            if len(read) == count or (highs and (at is None or ordered(low) < ordered(at))):
                raise ValueError(
                    f"tasks have read {len(read)} ranges of the table, but none from {at!r} on, where another one "
                    "ends: a task has reported a range that it was not given"
                )
            add(low, _NOTHING)
        if low in read:
            _, at, snapshot = decode_entry(read[low])
            add(at, snapshot)
    if count and (not highs or at is not None):
        add(None, _NOTHING)
    packed = encode_state(_RANGES, {"highs": highs, "numbers": numbers, "snapshots": list(snapshots)})
    return compress(packed, level=1)


def unpack_ranges(ranges: bytes | list[list[str | None]]) -> tuple[list[str | None], list[str | None]]:
    """Return the high ends and the snapshots of the ranges. A checkpoint of before may have a list of the ranges."""
    if isinstance(ranges, list):
        return [high for _, high, _ in ranges], [snapshot for _, _, snapshot in ranges]
    fields = decode_state(_RANGES, decompress(ranges))
    snapshots: list[str | None] = fields["snapshots"]
    return fields["highs"], [snapshots[number] for number in fields["numbers"]]
