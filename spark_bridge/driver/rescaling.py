# SPDX-License-Identifier: Apache-2.0

"""Another parallelism for an operator while the application runs.

A checkpoint is taken first. Then the jobs of the actions that run the operator end, and the operator starts again at
the other parallelism from its newest checkpoint, as after a release. ``run`` calls the action again, and its restart
strategy does not count that. Until the operator is back, whatever asks for it waits. What can be refused is refused
before anything is stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import getattr_static

import anyio

from actors import ActorError, SystemNotRunning
from actors.coordination import OperatorConfig
from actors.coordination.engine.inputs import InputPosition
from actors.coordination.host.given import why_not_resettable
from actors.logs import get_logger
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.rescale import rescaled
from protocol.describing import describe
from protocol.errors import LocalProtocolError
from protocol.parts import states_by_part
from protocol.wire.messages import RestoreMode, SubtaskState
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import NotSettled, SidecarError
from spark_bridge.driver.actions import Actions
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.operators import Operator, Operators, WholeCalls
from spark_bridge.primitives.chain import Composed
from spark_bridge.subtask.operator import SubtaskOperator

__all__ = ["Rescaling", "counts_records", "lacks_merge"]

log = get_logger("headgate.operators")

Add = Callable[[OperatorConfig, Callable[[], Composed]], Awaitable[OperatorHandle]]


class Rescaling:
    """The changes of parallelism of a sidecar's operators. Loop only.

    ``add`` starts an operator from its newest checkpoint, and ``release`` ends one.
    """

    def __init__(
        self,
        jobs: RunningJobs,
        operators: Operators,
        actions: Actions,
        calls: WholeCalls,
        add: Add,
        release: Callable[[str], Awaitable[None]],
    ) -> None:
        self._jobs = jobs
        self._operators = operators
        self._actions = actions
        self._calls = calls
        self._add = add
        self._release = release
        self._under_way: set[str] = set()

    def is_under_way(self, operator_id: str) -> bool:
        """Whether a call of ``rescale`` for this operator has not ended."""
        return operator_id in self._under_way

    async def rescale(
        self,
        operator_id: str,
        parallelism: int,
        timeout_s: float,
        is_meant: Callable[[Operator], bool] = lambda operator: True,
    ) -> None:
        """See ``Sidecar.rescale``. Nothing happens to an operator that is not meant, because it has a name again."""
        if operator_id in self._under_way:
            raise SidecarError(
                f"another change of the parallelism of operator {operator_id!r} is under way: wait until that call "
                "has returned"
            )
        self._under_way.add(operator_id)
        try:
            await self._calls.run(operator_id, partial(self._rescale, operator_id, parallelism, timeout_s, is_meant))
        finally:
            self._under_way.discard(operator_id)

    async def _rescale(
        self, operator_id: str, parallelism: int, timeout_s: float, is_meant: Callable[[Operator], bool]
    ) -> None:
        began_at = anyio.current_time()
        operator = self._operators.find(operator_id)
        if not is_meant(operator):
            return
        config = self._refused_unless_possible(operator_id, operator, parallelism)
        if parallelism == config.parallelism:
            return
        async with _Turn(operator_id, operator.batch_turn, timeout_s):
            left_s = began_at + timeout_s - anyio.current_time()
            checkpoint_id = await self._operators.checkpoint(operator_id, timeout_s=max(left_s, 0.001), counts=False)
            self._refuse_cut(operator_id, operator, await operator.port.restore_latest(), parallelism)
            with anyio.CancelScope(shield=True):  # from here on, a cancellation comes too late
                async with self._operators.away(operator_id):
                    await self._end_run(operator_id, parallelism, timeout_s)
                    await self._start_again(operator_id, operator, config, parallelism)
        log.info(
            "operator rescaled",
            operator_id=operator_id,
            parallelism=parallelism,
            before=config.parallelism,
            checkpoint_id=checkpoint_id,
            seconds=round(anyio.current_time() - began_at, 3),
        )

    def _refused_unless_possible(self, operator_id: str, operator: Operator, parallelism: int) -> OperatorConfig:
        """Return the settings of an operator whose parallelism can be changed. Raises ``SidecarError``."""
        config, compose = operator.config, operator.compose
        if config.mode is not RestoreMode.STREAMING or compose is None:
            raise SidecarError(
                f"operator {operator_id!r} cannot be rescaled, because in batch mode nothing of a run is kept: "
                'coordinate it with mode="streaming", or again with the other parallelism and replace=True after the '
                "action has returned"
            )
        if why := why_not_resettable(operator_id, operator.parts):
            raise SidecarError(f"operator {operator_id!r} cannot be rescaled: {why}")
        self._refuse_plain_run(operator_id)
        return config

    def _refuse_plain_run(self, operator_id: str) -> None:
        if operator_id in self._jobs.operator_ids and not self._jobs.knows(self._jobs.action_of(operator_id)):
            raise SidecarError(
                f"operator {operator_id!r} cannot be rescaled during this run, because nothing would call its action "
                "again: run the action with sidecar.run(...) or handle.run(...), or wait until it has returned"
            )

    def _refuse_cut(
        self, operator_id: str, operator: Operator, newest: CompletedCheckpoint | None, parallelism: int
    ) -> None:
        """Raise ``SidecarError`` if the checkpoint cannot be divided, or a run would refuse its part (H52, H174)."""
        if newest is None:
            return
        try:
            cut = rescaled(newest, parallelism)
        except LocalProtocolError as error:
            raise SidecarError(f"operator {operator_id!r}: {error}") from error
        label = InputPosition.read(cut.label)
        positions = any(not part.earlier_input for part in cut.subtask_states.values())
        is_in_an_input = label is not None and not label.done and positions and cut.partitions not in (0, parallelism)
        counting = "" if operator.handle is None else counts_records(operator.handle._makers)
        if is_in_an_input and counting and operator_id in self._jobs.operator_ids:
            raise SidecarError(
                f"operator {operator_id!r} cannot be rescaled during this run: {counting} counts the records of "
                f"{cut.partitions} partitions of Spark's, and with {parallelism} partitions that number says nothing. "
                "Wait until the run has ended, or let the records come from a source in a chain or from a work queue. "
                "If its state does not depend on which records were processed, set counts_records = False in the class"
            )
        if operator.handle is not None and (lacks := lacks_merge(cut, operator.handle._makers_by_part)):
            raise SidecarError(
                f"operator {operator_id!r} cannot be rescaled to {parallelism}: {lacks.partition('.')[0]} has states "
                f"that would meet in one subtask. Define {lacks}, or keep the parallelism"
            )

    async def _end_run(self, operator_id: str, parallelism: int, timeout_s: float) -> None:
        """End the jobs of the operator's run. Raises ``SidecarError`` if the operator has to stay as it is."""
        self._refuse_plain_run(operator_id)
        action_ids = self._jobs.end_for_rescale(operator_id)
        cause = f"operator {operator_id!r} continues with parallelism {parallelism}, so its action is called again"
        for action_id in sorted(action_ids):
            await self._actions.stop(action_id, cause)
        try:
            settled = await self._operators.settled_while_away(operator_id, timeout_s)
        except NotSettled as error:
            raise SidecarError(
                f"operator {operator_id!r} keeps its parallelism, because its run has not ended: {error}"
            ) from error
        if not action_ids and (settled.uncommitted or settled.failed):
            raise SidecarError(
                f"operator {operator_id!r} keeps its parallelism, because the output of its last run is not "
                f"committed: {settled.uncommitted or settled.failed}. Call rescale again after its next run"
            )

    async def _start_again(
        self, operator_id: str, operator: Operator, config: OperatorConfig, parallelism: int
    ) -> None:
        assert operator.compose is not None
        # The checkpoint that was just taken says which input it belongs to.
        config = replace(config, restored=None, files_from="", restored_input=None)
        await self._release(operator_id)
        try:
            handle = await self._add(replace(config, parallelism=parallelism), operator.compose)
        except SystemNotRunning:  # the sidecar has been left meanwhile
            raise
        except (SidecarError, ActorError) as error:
            log.error("operator not rescaled", operator_id=operator_id, error=describe(error))
            handle = await self._add(config, operator.compose)
            self._continue(operator_id, operator, handle)
            raise
        self._continue(operator_id, operator, handle)

    def _continue(self, operator_id: str, before: Operator, handle: OperatorHandle) -> None:
        """Let users keep their handle, and the query of micro-batches its turn."""
        operator = self._operators.find(operator_id)
        operator.batch_turn, operator.shipped_classes = before.batch_turn, before.shipped_classes
        operator.autoscaling, operator.observed.autoscale = before.autoscaling, before.observed.autoscale
        if before.handle is not None:
            before.handle._become(handle)
            operator.handle = before.handle


class _Turn:
    """Waits for the end of a micro-batch, and keeps the next one waiting."""

    def __init__(self, operator_id: str, turn: anyio.Semaphore, timeout_s: float) -> None:
        self._operator_id = operator_id
        self._turn = turn
        self._timeout_s = timeout_s

    async def __aenter__(self) -> None:
        try:
            with anyio.fail_after(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise SidecarError(
                f"operator {self._operator_id!r} keeps its parallelism, because a micro-batch has not ended within "
                f"{self._timeout_s:g} s: call rescale again, with a longer timeout_s"
            ) from None

    async def __aexit__(self, *exception: object) -> None:
        self._turn.release()


def counts_records(makers: Iterable[object]) -> str:
    """Return the class of the operators that count the records of Spark, or "" (H174).

    ``makers`` make the operators that feed each other, in this order. What only an instance says is not known.
    """
    for made_by in makers:
        kind = _class_of(made_by)
        if kind is None:
            return ""  # it may be a source, of which the others count the records
        if _counts(kind):
            return kind.__qualname__
        if kind.goes_on_after_restore:
            return ""
    return ""


def lacks_merge(cut: CompletedCheckpoint, makers: Mapping[str, object]) -> str:
    """Return the method that a task would need and its class does not define, or "" (H52).

    ``makers`` make the operators of the parts, by the parts' names. What is not made by a class is not looked at.
    """
    for part in cut.subtask_states.values():
        with suppress(LocalProtocolError):  # it has the state of a part that is gone, and the task says so
            for name, method in _merges(part.states, makers):
                kind = _class_of(makers.get(name))
                if kind is not None and getattr(kind, method) is getattr(SubtaskOperator, method):
                    return f"{kind.__qualname__}.{method}"
    return ""


def _merges(states: Iterable[SubtaskState], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The parts that have to merge what one subtask gets, each with the method that does it."""
    in_bytes, in_files = states_by_part(states, names)
    for name, found in in_bytes.items():
        if len(found) > 1 and any(found.values()):
            yield name, "merge_states"
    for name, pieces in in_files.items():
        if len(pieces) > 1 or not pieces[0].is_whole:
            yield name, "merge_files"


def _class_of(made_by: object) -> type[SubtaskOperator] | None:
    """The class whose instance this makes; None if that is not known."""
    kind = made_by.func if isinstance(made_by, partial) else made_by
    return kind if isinstance(kind, type) and issubclass(kind, SubtaskOperator) else None


def _counts(kind: type[SubtaskOperator]) -> bool:
    says: object = getattr_static(kind, "counts_records")
    if not isinstance(says, property):
        return bool(says)
    try:
        return bool(says.__get__(kind.__new__(kind), kind))
    except Exception:  # it depends on what __init__ sets
        return False
