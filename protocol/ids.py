"""Names of the things that the protocol talks about (H1, H2, H4)."""

from __future__ import annotations

from dataclasses import dataclass

VIRTUAL_EMPTY_CHECKPOINT = -1
"""The checkpoint before every other one: "nothing was ever stored". Batch is streaming before its first checkpoint."""


@dataclass(frozen=True, slots=True, order=True)
class ExecutionAttempt:
    """One life of one subtask (H1).

    ``task_attempt_id`` is Spark's task id, unique in an application, and the key of every map: Spark's own
    ``(stage, partition, attempt number)`` is not unique, because a zombie stage attempt may run beside its
    successor. ``attempt`` is the number that coordinators see; it rises strictly per subtask (H2).
    """

    operator_id: str
    subtask: int
    attempt: int
    task_attempt_id: int

    def __str__(self) -> str:
        return f"{self.operator_id}[{self.subtask}]#{self.attempt} (task {self.task_attempt_id})"
