# SPDX-License-Identifier: Apache-2.0

"""A deep picture of a machine, to show that a refused input changed nothing."""

from __future__ import annotations

from collections import deque
from enum import Enum

# A refusal may leave the submission that waits for ``RoomAvailable`` (H27). The dispatch table is code.
FORGIVEN = {"_refused", "_dispatch"}


def snapshot(thing: object) -> object:
    """Return the values of all slots, recursively, in a form that compares by value."""
    if isinstance(thing, dict):
        return {key: snapshot(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | deque):
        return [snapshot(value) for value in thing]
    if isinstance(thing, Enum) or not type(thing).__module__.startswith("protocol."):
        return set(thing) if isinstance(thing, set) else thing
    slots = getattr(type(thing), "__slots__", ())
    return type(thing), {name: snapshot(getattr(thing, name)) for name in slots if name not in FORGIVEN}
