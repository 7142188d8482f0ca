"""One coordinated operator, as the driver's code holds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import structlog

from spark_bridge.subtask.checks import check_operator
from spark_bridge.subtask.endpoint import TaskEndpoint
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask

__all__ = ["OperatorHandle"]

log = structlog.get_logger("headgate.operators")


class OperatorHandle:
    """Its tasks, its figures and its failure. Thread-safe."""

    def __init__(
        self,
        endpoint: TaskEndpoint,
        statistics: Callable[[], dict[str, Any]],
        failure: Callable[[], BaseException | None],
        shipped: Callable[[object], None] = lambda made_by: None,
    ) -> None:
        self._endpoint = endpoint
        self._statistics = statistics
        self._failure = failure
        self._shipped = shipped

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

        Raises ``TypeError`` for what cannot make a ``SubtaskOperator``, as far as that shows here, for a method that is
        ``async def`` or has a ``yield`` where that cannot work, and for a method whose name is unmistakably a
        misspelling of one of ``SubtaskOperator``. A name that is only similar is logged as a warning.
        """
        if not callable(operator):
            raise TypeError(
                f"{operator!r} cannot be called to make an operator: pass the class and its arguments, "
                "subtask(MyOperator, ...), for every task makes its own"
            )
        made = operator.func if isinstance(operator, partial) else operator
        if isinstance(made, type):
            for finding in check_operator(made):
                log.warning(
                    "method never called",
                    operator_id=self.operator_id,
                    method=finding.method,
                    did_you_mean=finding.meant,
                )
        elif iscoroutinefunction(made):
            raise TypeError(f"{operator!r} must not be async: return the operator from a plain function")
        self._shipped(made)
        return SubtaskTask(operator, self._endpoint, args, kwargs)

    def statistics(self) -> dict[str, Any]:
        """Counts and latencies so far, as plain values. Also after the sidecar has closed."""
        return self._statistics()
