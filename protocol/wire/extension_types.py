# SPDX-License-Identifier: Apache-2.0

"""The table of msgpack extension types: the kinds of values in an event that plain msgpack does not have (H95).

The table is closed: another code in the bytes of a peer is an error, and nothing is ever unpickled. A code is never
used again for another kind of value.

A value that contains others is a msgpack list that begins with a *mark*: an extension value of its code, without data.
What it contains follows in the list. So msgpack itself nests such values, and every limit of an event counts what they
contain. Any other kind is a *leaf*: an extension value whose data is all of it (``protocol.wire.leaf_values``).
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CONTAINER_TYPES", "ExtensionType", "mark"]


class ExtensionType(IntEnum):
    """The code of each kind of value, and what follows the mark in its list."""

    PART_EVENT = 1
    """The name of a part, and its event: only in what checkpoints up to format 4 hold."""
    TUPLE = 2
    SET = 3
    FROZENSET = 4
    REGISTERED = 5
    """A value of a class that is registered with ``headgate.event``: the registered name, then the fields in order.
    For a member of an enumeration, the member's name; for flags, their number."""
    TRACED = 6
    """The span that an event was sent in, and the event: only around a whole one (``protocol.wire.traces``)."""

    # Leaves
    DATETIME = 16
    DATE = 17
    TIME = 18
    TIMEDELTA = 19
    DECIMAL = 20
    UUID = 21
    NUMPY_SCALAR = 22
    NUMPY_ARRAY = 23


CONTAINER_TYPES = frozenset(
    {
        ExtensionType.PART_EVENT,
        ExtensionType.TUPLE,
        ExtensionType.SET,
        ExtensionType.FROZENSET,
        ExtensionType.REGISTERED,
    }
)


def mark(code: ExtensionType) -> bytes:
    """Return the bytes of the mark: the extension value of ``code`` without data (msgpack's "ext 8" of length 0)."""
    return bytes((0xC7, 0, code))
