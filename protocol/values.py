"""``@value``: a class of messages, inputs or effects, of which millions are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")

# A dataclass that is frozen when it runs, too, sets each field by a call of ``object.__setattr__``: that was half of
# the time of a machine's step, and a fifth of that of a confirmed event.
_as_dataclass: Callable[[type], type] = dataclass(slots=True, unsafe_hash=True)


@dataclass_transform(frozen_default=True, eq_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make a dataclass that never changes: compared and hashed by its fields, with slots.

    That nobody assigns to a field is the type checker's to see, as for ``dataclass(frozen=True)``; at run time
    nothing forbids it.
    """
    return _as_dataclass(cls)


def is_value(cls: type) -> bool:
    """Whether the objects of a class never change: those of ``@value``, and frozen dataclasses."""
    params = getattr(cls, "__dataclass_params__", None)
    return params is not None and (params.frozen or params.unsafe_hash)
