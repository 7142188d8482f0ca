"""The function that Spark ships: one object that every ``map...`` and ``foreachPartition`` takes.

It is the only place of the executor's half that knows pyspark: it asks Spark's ``TaskContext`` which task
this is, and hands that to ``spark_bridge.subtask``, which does not know Spark at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
    from spark_bridge.subtask.operator import SubtaskOperator

__all__ = ["NotInsideTask", "SubtaskTask", "current_task"]


class NotInsideTask(RuntimeError):
    """The function was called by hand; only a Spark task has an identity."""


class SubtaskTask:
    """An operator with its arguments, and where its coordinator is. Made on the driver, called in the tasks.

    It takes an iterator (of records, of pandas DataFrames, of Arrow RecordBatches) and returns one, so it
    serves as the function of ``RDD.mapPartitions``, ``RDD.barrier().mapPartitions``,
    ``RDD.foreachPartition``, ``DataFrame.foreachPartition``, ``DataFrame.mapInPandas`` and
    ``DataFrame.mapInArrow``. Where Spark wants no outputs it draws them and throws them away.

    The secret is inside, for Spark's closure is the only way it travels; ``repr`` does not show it (H61).
    """

    __name__ = "headgate_subtask"  # what Spark shows in its plans

    def __init__(
        self,
        make_operator: Callable[..., SubtaskOperator],
        endpoint: TaskEndpoint,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """``make_operator(*args, **kwargs)`` is called in each task, once; all three must be picklable."""
        self._make_operator = make_operator
        self._endpoint = endpoint
        self._args = args
        self._kwargs = kwargs or {}

    def __call__(self, records: Iterable[Any]) -> Any:
        """Run the operator in this task over ``records``. See ``run_subtask`` for what it raises.

        Raises:
            NotInsideTask: at once, where there is no Spark task.
        """
        identity = current_task()
        from spark_bridge.subtask.runner import run_subtask

        return run_subtask(self._build, self._endpoint, identity, records)

    def __repr__(self) -> str:
        name = getattr(self._make_operator, "__qualname__", repr(self._make_operator))
        return f"SubtaskTask({name}, {self._endpoint!r})"

    def _build(self) -> SubtaskOperator:
        from spark_bridge.subtask.operator import SubtaskOperator

        operator = self._make_operator(*self._args, **self._kwargs)
        if not isinstance(operator, SubtaskOperator):
            raise TypeError(
                f"{self._make_operator!r} made a {type(operator).__name__}; a subtask needs a SubtaskOperator"
            )
        return operator


def current_task() -> TaskIdentity:
    """The task that this Python worker runs now.

    Raises:
        NotInsideTask: none, or this is the driver.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise NotInsideTask(
            "this function runs inside a Spark task: pass it to mapPartitions, mapInPandas, mapInArrow or "
            f"foreachPartition instead of calling it (in {sys.argv[0] or 'this process'})"
        )
    from spark_bridge.subtask.endpoint import TaskIdentity

    return TaskIdentity(
        task_attempt_id=context.taskAttemptId(),
        subtask=context.partitionId(),
        run_id=context.stageId(),
        attempt_number=context.attemptNumber(),
    )
