"""One coordinated operator, as the driver's code holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_bridge.subtask.endpoint import TaskEndpoint
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask

__all__ = ["OperatorHandle"]


class OperatorHandle:
    """Its tasks, its figures and its failure. Thread-safe."""

    def __init__(
        self,
        endpoint: TaskEndpoint,
        statistics: Callable[[], dict[str, Any]],
        failure: Callable[[], BaseException | None],
    ) -> None:
        self._endpoint = endpoint
        self._statistics = statistics
        self._failure = failure

    def __repr__(self) -> str:
        return f"<OperatorHandle {self.operator_id!r} x {self.parallelism}>"

    @property
    def endpoint(self) -> TaskEndpoint:
        """What its tasks are told."""
        return self._endpoint

    @property
    def operator_id(self) -> str:
        return self._endpoint.operator_id

    @property
    def parallelism(self) -> int:
        return self._endpoint.parallelism

    @property
    def failure(self) -> BaseException | None:
        """The first exception with which the coordinator failed its latest job, if it did (H7)."""
        return self._failure()

    def subtask(self, operator: Callable[..., SubtaskOperator], *args: Any, **kwargs: Any) -> SubtaskTask:
        """The function for ``mapPartitions``, ``mapInPandas``, ``mapInArrow``, ``foreachPartition`` and barrier stages.

        ``operator(*args, **kwargs)`` is called in each task; all three must be picklable. The partition is the subtask,
        so the RDD or DataFrame must have exactly ``parallelism`` partitions.

        Raises ``TypeError`` for what cannot make a ``SubtaskOperator``, as far as that shows here.
        """
        if not callable(operator):
            raise TypeError(
                f"{operator!r} cannot be called to make an operator: pass the class and its arguments, "
                "subtask(MyOperator, ...), for every task makes its own"
            )
        if isinstance(operator, type) and not issubclass(operator, SubtaskOperator):
            raise TypeError(f"{operator!r} is no SubtaskOperator: derive it from that class")
        return SubtaskTask(operator, self._endpoint, args, kwargs)

    def statistics(self) -> dict[str, Any]:
        """Counts and latencies so far, as plain values. Also after the sidecar has closed."""
        return self._statistics()
