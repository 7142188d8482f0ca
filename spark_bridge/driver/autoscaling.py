# SPDX-License-Identifier: Apache-2.0

"""Another parallelism for an operator when its backlog needs it.

A task for each such operator looks at its sources about once a second, and calls ``rescale`` as a user would. What that
raises is in the log and the status, and ends neither the job nor the sidecar. The task ends when the operator is
released.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from actors import ActorSystem
from actors.coordination import GivenCoordinator, OperatorCoordinator, Parts, SourceCoordinator
from actors.logs import get_logger
from protocol.autoscaling import Autoscale, Autoscaler, Decision
from protocol.describing import describe
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.driver.operators import Operator, Operators, sources_of
from spark_bridge.driver.rescaling import Rescaling
from spark_bridge.observability.status import AutoscaleStatus, ScalingRecord
from spark_bridge.primitives.chain import Chain

__all__ = ["Autoscaling", "check_autoscale"]

log = get_logger("headgate.operators")

EVERY_S = 1.0
RESCALE_TIMEOUT_S = 60.0
"""Or the deadline of the operator's checkpoints, if that is later."""
REPORT_S = 60.0
_NO_RUN = Decision(None, None, "the operator has no run")


def check_autoscale(
    operator_id: str,
    autoscale: Autoscale,
    mode: RestoreMode,
    parallelism: int,
    coordinator: GivenCoordinator | Chain,
) -> None:
    """Raise ``ValueError`` if the operator cannot be scaled by its backlog, as far as that is known by now."""
    if mode is not RestoreMode.STREAMING:
        raise ValueError(
            f"operator {operator_id!r} cannot have autoscale, because in batch mode nothing of a run is kept: "
            'coordinate it with mode="streaming", or leave autoscale out'
        )
    if not autoscale.min <= parallelism <= autoscale.max:
        raise ValueError(
            f"parallelism must be from {autoscale.min} to {autoscale.max}, the limits of autoscale, not {parallelism}"
        )
    those = coordinator.coordinators.values() if isinstance(coordinator, Chain) else (coordinator,)
    if not any(map(_may_be_source, those)):
        raise _without_source(operator_id)


def _may_be_source(given: GivenCoordinator) -> bool:
    """Whether it is a source, or a function of which nobody knows what it makes."""
    made_by = given.func if isinstance(given, partial) else given
    if isinstance(made_by, type):
        return issubclass(made_by, SourceCoordinator)
    return isinstance(made_by, SourceCoordinator) or not isinstance(made_by, OperatorCoordinator)


def _without_source(operator_id: str) -> ValueError:
    return ValueError(
        f"operator {operator_id!r} cannot have autoscale, because it has no source that knows what is left to read: "
        "coordinate a SourceCoordinator, alone or in a chain, or leave autoscale out and call rescale"
    )


class Autoscaling:
    """The scaling of one operator, over all changes of its parallelism. Loop only.

    ``slots`` returns how many tasks Spark can run at the same time; None if that is not known, or can grow.
    ``wall_time`` returns the seconds since the epoch.
    """

    def __init__(
        self,
        operator_id: str,
        autoscale: Autoscale,
        operators: Operators,
        rescaling: Rescaling,
        jobs: RunningJobs,
        slots: Callable[[], Awaitable[int | None]],
        wall_time: Callable[[], float],
    ) -> None:
        self._operator_id = operator_id
        self._scaler = Autoscaler(autoscale)
        self._operators = operators
        self._rescaling = rescaling
        self._jobs = jobs
        self._slots = slots
        self._wall_time = wall_time
        self._decision = _NO_RUN
        self._unknown_since: float | None = None
        self._reported = False  # that it has been unknown for long
        self._last_change: ScalingRecord | None = None
        self._last_refusal: ScalingRecord | None = None

    def begin(self, system: ActorSystem) -> None:
        """Scale the operator that has just started under this name, until it is released.

        Raises ``ValueError`` if it has no source.
        """
        operator = self._operators.find(self._operator_id)
        if not any(sources_of(operator.parts)):
            raise _without_source(self._operator_id)
        self._scaler.decide(anyio.current_time(), operator.config.parallelism, None)  # from here on, it sees changes
        operator.autoscaling, operator.observed.autoscale = self, self.status
        system.start_task(self._run, name=f"autoscaling of {self._operator_id}")

    def status(self) -> AutoscaleStatus:
        policy = self._scaler.policy
        wanted, _, why = self._decision
        return AutoscaleStatus(policy.min, policy.max, wanted, why, self._last_change, self._last_refusal)

    async def _run(self) -> None:
        """Ends also with the sidecar, which cancels it."""
        while True:
            await anyio.sleep(EVERY_S)
            if self._rescaling.is_under_way(self._operator_id):
                continue
            operator = self._operators.get(self._operator_id)
            if operator is None or not self._is_mine(operator) or operator.broken is not None:
                return
            try:
                await self._look(operator)
            except SidecarNotRunning:
                return
            except Exception as error:  # of the user's enumerator, or of Spark
                self._report(describe(error))

    def _is_mine(self, operator: Operator) -> bool:
        return operator.autoscaling is self

    async def _look(self, operator: Operator) -> None:
        if self._operator_id not in self._jobs.operator_ids:
            self._decision, self._unknown_since = _NO_RUN, None
            return
        before, backlog = operator.config.parallelism, self._backlog(operator.parts)
        if isinstance(backlog, str):
            self._scaler.decide(anyio.current_time(), before, None)
            self._report(backlog)
            return
        self._unknown_since, self._reported = None, False
        may_grow = backlog > before * self._scaler.policy.per_subtask
        slots = await self._slots() if may_grow else None
        self._decision = decision = self._scaler.decide(anyio.current_time(), before, backlog, slots)
        if decision.to is not None:
            await self._change(before, decision.to, decision.why, operator.config.checkpoint.timeout_s)

    def _report(self, why: str) -> None:
        """The backlog is not known. Once it has not been for long, the log says so."""
        self._decision = Decision(None, None, f"the backlog is not known: {why}")
        now = anyio.current_time()
        self._unknown_since = now if self._unknown_since is None else self._unknown_since
        if now - self._unknown_since >= REPORT_S and not self._reported:
            self._reported = True
            log.warning("operator not scaled, its backlog is not known", operator_id=self._operator_id, why=why)

    def _backlog(self, parts: Parts) -> int | str:
        """The largest one of its sources; why, if one of them is not known."""
        in_splits = self._scaler.policy.splits_per_subtask is not None
        largest = 0
        for name, source in sources_of(parts):
            backlog = source._whole_backlog(in_splits=in_splits)
            if isinstance(backlog, str):
                return f"source {name!r}: {backlog}" if name else backlog
            largest = max(largest, backlog)
        return largest

    async def _change(self, before: int, parallelism: int, why: str, timeout_s: float) -> None:
        fields = {"operator_id": self._operator_id, "parallelism": parallelism, "before": before, "why": why}
        try:
            await self._rescaling.rescale(
                self._operator_id, parallelism, max(timeout_s, RESCALE_TIMEOUT_S), self._is_mine
            )
        except SidecarNotRunning:
            raise
        except Exception as error:
            self._scaler.refused(anyio.current_time())
            self._last_refusal = ScalingRecord(self._wall_time(), before, parallelism, describe(error))
            log.warning("operator not scaled", error=describe(error), **fields)
            return
        operator = self._operators.get(self._operator_id)
        if operator is not None and self._is_mine(operator):
            self._last_change = ScalingRecord(self._wall_time(), before, parallelism, why)
            log.info("operator scaled", **fields)
