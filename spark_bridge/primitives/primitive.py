# SPDX-License-Identifier: Apache-2.0

"""What every ready-made part has: a name, a half for the coordinator, and a half for the tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from actors.coordination import CoordinatorChain, OperatorCoordinator
from spark_bridge.primitives.counters.driver import CountersCoordinator
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.subtask.chain import COUNTERS
from spark_bridge.subtask.operator import SubtaskOperator

__all__ = ["PARTS_OF_ALL", "Composed", "Primitive", "composed"]

NAME_CHARS_MAX = 200
PARTS_OF_ALL: Mapping[str, Callable[[], SubtaskOperator]] = {COUNTERS: CountersPart}
"""What makes the parts that the tasks of every operator have."""


class Primitive(ABC):
    """A ready-made part that operators can use: ``coordinate(..., uses=[part])``.

    The same object is used in the tasks: a function that refers to it may be passed to ``handle.subtask``. There it
    stands for the part of that task.
    """

    def __init__(self, name: str) -> None:
        given: object = name
        if not isinstance(given, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise ValueError(f"the name must be a str of 1 to {NAME_CHARS_MAX} characters, not {name!r:.80}")
        if name.startswith("headgate."):
            raise ValueError(f"names that begin with 'headgate.' are reserved, so choose another one than {name!r}")
        self._name = name

    @property
    def name(self) -> str:
        """The name by which the driver's half and the tasks' halves find each other."""
        return self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"

    @abstractmethod
    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        """Return a new coordinator's half, for one operator."""

    @abstractmethod
    def task_part(self) -> Callable[[], SubtaskOperator]:
        """Return what makes a task's half. It is pickled."""


@dataclass(frozen=True)
class Composed:
    """An operator with its parts: its coordinator, what makes the parts in its tasks, and its counters."""

    coordinator: OperatorCoordinator
    task_parts: Mapping[str, Callable[[], SubtaskOperator]]
    counters: CountersCoordinator


def composed(operator_id: str, main: OperatorCoordinator, uses: Collection[Primitive]) -> Composed:
    """Compose an operator of its own coordinator, the counters that every operator has, and the parts that it uses.

    Raises:
        TypeError: something else than a part is used.
        ValueError: two parts have one name.
    """
    named: dict[str, Primitive] = {}
    for part in uses:
        if not isinstance(part, Primitive):
            raise TypeError(
                f"uses=[...] takes what sidecar.shared(), sidecar.work_queue() and the like return, not {part!r:.80}"
            )
        if part.name in named:
            raise ValueError(f"two parts of operator {operator_id!r} have the name {part.name!r}: give each its own")
        named[part.name] = part
    counters = CountersCoordinator()
    coordinators = {COUNTERS: counters, **{name: part.coordinator(operator_id) for name, part in named.items()}}
    task_parts = {**PARTS_OF_ALL, **{name: part.task_part() for name, part in named.items()}}
    return Composed(CoordinatorChain(main, coordinators), task_parts, counters)
