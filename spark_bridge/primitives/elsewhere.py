# SPDX-License-Identifier: Apache-2.0

"""Parts of a sidecar in another process: what it tells a driver of them, and what the driver makes of that.

A part's coordinator is in the sidecar's process, and its half in the tasks comes from the driver's program. That half
needs the name of the part and a few plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from spark_bridge.primitives.budget.task import BudgetInTask, BudgetPart
from spark_bridge.primitives.cache.task import CacheInTask, CachePart
from spark_bridge.primitives.group.task import GroupInTask, GroupPart
from spark_bridge.primitives.permits.task import PermitsInTask, PermitsPart
from spark_bridge.primitives.primitive import PARTS_OF_ALL
from spark_bridge.primitives.shared_value.task import SharedValueInTask, SharedValuePart
from spark_bridge.primitives.work_queue.task import WorkQueueInTask, WorkQueuePart
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import TaskPart

TaskParts = Mapping[str, Callable[[], SubtaskOperator]]


class _Kind(NamedTuple):
    """The class of the task's half, and what makes the object that user code sees there, of the name."""

    task_class: type[TaskPart]
    in_task: Callable[[str], Any]


_KINDS = {
    "shared": _Kind(SharedValuePart, SharedValueInTask),
    "budget": _Kind(BudgetPart, BudgetInTask),
    "permits": _Kind(PermitsPart, PermitsInTask),
    "work_queue": _Kind(WorkQueuePart, WorkQueueInTask),
    "group": _Kind(GroupPart, GroupInTask),
    "cache": _Kind(CachePart, CacheInTask),
}
"""By the method of the sidecar that makes the part."""


def _kind_of(make: object) -> str | None:
    made = make.func if isinstance(make, partial) else make
    return next((name for name, kind in _KINDS.items() if made is kind.task_class), None)


def described_parts(task_parts: TaskParts) -> dict[str, list[Any]]:
    """Return kind and settings of each ready-made part, by its name, as plain values."""
    return {
        name: [kind, list(make.args)]
        for name, make in task_parts.items()
        if isinstance(make, partial) and (kind := _kind_of(make)) is not None
    }


def task_parts_of(described: Mapping[str, list[Any]]) -> TaskParts:
    """Return what makes the parts in the tasks, of what ``described_parts`` has returned in another process."""
    parts = {name: partial(_KINDS[kind].task_class, *settings) for name, (kind, settings) in described.items()}
    return {**PARTS_OF_ALL, **parts}


def in_task(task_parts: TaskParts, name: str) -> Any:
    """Return what stands for the part in the functions of tasks; None if no part has this name."""
    kind = _kind_of(task_parts.get(name))
    return None if kind is None else _KINDS[kind].in_task(name)
