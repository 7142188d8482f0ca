# SPDX-License-Identifier: Apache-2.0

"""The ``@value`` decorator, for messages, inputs and effects, of which there are millions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

# A dataclass that is frozen at run time sets each field with ``object.__setattr__``. That took half the time of a
# machine's step, and a fifth of the time of a confirmed event. The methods that ``value`` adds need no source that is
# compiled for each class, which took a third of the time that a new Python worker of Spark needs to import Headgate.
_as_dataclass: Callable[[type], type] = dataclass(slots=True, repr=False, eq=False)


@dataclass_transform(frozen_default=True, eq_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make an immutable dataclass with slots, compared and hashed by its fields.

    The type checker rejects assignments to fields, as for ``dataclass(frozen=True)``. At run time nothing does.
    """
    made: Any = _as_dataclass(cls)
    fields = made.__dataclass_fields__.values()
    compared = [one.name for one in fields if one.compare]
    shown = [one.name for one in fields if one.repr]
    key: Callable[[Any], Any] = attrgetter(*compared) if compared else type

    def __eq__(self: object, other: object) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: object) -> int:
        return hash(key(self))

    def __repr__(self: object) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    made.__eq__, made.__hash__, made.__repr__ = __eq__, __hash__, __repr__
    return made  # type: ignore[no-any-return]
