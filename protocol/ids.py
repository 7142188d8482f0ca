# SPDX-License-Identifier: Apache-2.0

"""Identifiers: execution attempts and the virtual empty checkpoint (H1, H2, H4)."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL_EMPTY_CHECKPOINT = -1
"""The id that stands for "nothing was ever stored". Batch mode is streaming mode before its first checkpoint."""


@dataclass(frozen=True, slots=True, order=True)
class ExecutionAttempt:
    """One execution of one subtask.

    ``task_attempt_id`` is Spark's task id. It is unique in an application and the key of every map: Spark's own
    ``(stage, partition, attempt number)`` is not unique, because a zombie stage attempt may run at the same time as its
    successor. ``attempt`` is the number that coordinators see; it increases with each attempt of a subtask.
    """

    # H1, H2

    operator_id: str
    subtask: int
    attempt: int
    task_attempt_id: int

    def __str__(self) -> str:
        return f"{self.operator_id}[{self.subtask}]#{self.attempt} (task {self.task_attempt_id})"
