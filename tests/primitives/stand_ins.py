# SPDX-License-Identifier: Apache-2.0

"""The task's half of a part alone, with a stand-in of the test for its task."""

from __future__ import annotations

from typing import Any

from spark_bridge.subtask.parts import TaskPart

__all__ = ["open_alone"]


def open_alone(part: TaskPart, task: Any) -> None:
    """Open ``part``. ``task`` is as much of its context, and of its ``TaskAccess``, as the test needs."""
    part.task = task
    part.open(task, None)
