# SPDX-License-Identifier: Apache-2.0

"""Live objects as values: a hashable form for comparison, and copies for trying something.

Two objects with the same form behave alike, so only one of them is kept. Dicts and sets are compared without their
order. Nothing explored depends on that order, because the messages of one effect list to several mailboxes commute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

PLAIN = (int, str, bytes, memoryview, float, type(None), Enum, type)
IGNORED = frozenset({"_dispatch", "_out", "out", "now"})
"""Look-up tables that follow from the rest of the object, and values that a machine keeps only during a call."""

_fields: dict[type, tuple[str, ...]] = {}


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of a class's slots, including inherited ones."""
    names = _fields.get(kind)
    if names is None:
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        names = _fields[kind] = tuple(sorted(name for name in slots if not name.startswith("__")))
    return names


def items_of(value: object, but: frozenset[str]) -> list[tuple[str, Any]]:
    """Return the state of an object: the names and values of its slots and its ``__dict__``."""
    found = [(name, getattr(value, name)) for name in fields_of(type(value)) if hasattr(value, name)]
    found += sorted(getattr(value, "__dict__", {}).items())
    return [(name, field) for name, field in found if name not in but and not callable(field)]


def freeze(value: Any, but: frozenset[str] = frozenset()) -> Hashable:
    """Return the form of a value, without the attributes named in ``but``.

    The second occurrence of an object in it is represented by its place.
    """
    return _freeze(value, IGNORED | but, {})


def _freeze(value: Any, but: frozenset[str], met: dict[int, int]) -> Hashable:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list | deque):
        return (type(value), *[_freeze(item, but, met) for item in value])
    if isinstance(value, dict):
        if not isinstance(next(iter(value), None), (*PLAIN, tuple)):  # objects, in the order in which they were put in
            return (dict, *[(_freeze(key, but, met), _freeze(value[key], but, met)) for key in value])
        return (dict, *[(key, _freeze(value[key], but, met)) for key in sorted(value)])
    if isinstance(value, set | frozenset):
        return (set, frozenset(value))
    if isinstance(value, bytearray):
        return (bytearray, bytes(value))
    place = met.get(id(value))
    if place is not None:
        return ("as before", place)
    if not is_value(type(value)):
        met[id(value)] = len(met)
    return (type(value), *[_freeze(field, but, met) for _, field in items_of(value, but)])


def is_value(cls: type) -> bool:
    """Whether instances of a class never change: it is a ``@value``, whose ``repr`` is made there, or a frozen
    dataclass.
    """
    params = getattr(cls, "__dataclass_params__", None)
    is_made_there = getattr(cls.__repr__, "__module__", "") == "protocol.values"
    return is_made_there or (params is not None and params.frozen)


def clone(value: Any) -> Any:
    """Return an independent copy; immutable values are shared."""
    return _clone(value, {})


def _clone(value: Any, met: dict[int, Any]) -> Any:
    if isinstance(value, (*PLAIN, tuple, frozenset, Callable)) or is_value(type(value)):  # type: ignore[arg-type]
        return value
    copy = met.get(id(value))
    if copy is not None:
        return copy
    if isinstance(value, list | deque):
        copy = met[id(value)] = type(value)(_clone(item, met) for item in value)
    elif isinstance(value, dict):
        copy = met[id(value)] = {_clone(key, met): _clone(item, met) for key, item in value.items()}
    elif isinstance(value, set):
        copy = met[id(value)] = set(value)
    else:
        copy = met[id(value)] = object.__new__(type(value))
        for name in fields_of(type(value)):
            if hasattr(value, name):
                field = getattr(value, name)
                object.__setattr__(copy, name, field if name in IGNORED else _clone(field, met))
        for name, field in getattr(value, "__dict__", {}).items():
            object.__setattr__(copy, name, field if name in IGNORED else _clone(field, met))
    return copy
