# SPDX-License-Identifier: Apache-2.0

"""The operators that a sidecar coordinates: their actors, checkpoints and failures, and the calls that change them."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from actors import (
    ActorCancelled,
    ActorError,
    ActorRef,
    ActorStopped,
    ActorSystem,
    AskTimeout,
    Directive,
    HandlerFailed,
    Reply,
    Supervision,
    SystemNotRunning,
)
from actors.coordination import (
    BarrierTrackerActor,
    CoordinatorStore,
    OperatorConfig,
    OperatorPorts,
    OperatorStatistics,
    Parts,
    SourceCoordinator,
)
from actors.coordination.engine.messages import (
    AwaitSettled,
    ClientRequest,
    RequestCheckpoint,
    Settled,
    StartOperator,
    TrackerMessage,
    WithdrawCheckpoint,
)
from actors.coordination.engine.operator_config import UNBOUNDED, DiscardRefused, knows_nothing
from actors.coordination.host.traces import current_traceparent
from actors.coordination.statistics import SourceBacklog
from actors.coordination.user_calls import CallWatch
from actors.logs import get_logger
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.rescale import rescaled
from protocol.describing import describe, is_a
from protocol.errors import LocalProtocolError, RequestFailed
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.messages import AddOperator, AwaitRunsOver, BridgeMessage, FailRuns, RemoveOperator
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.common.errors import (
    CoordinatorStartError,
    NotSettled,
    OperatorBroken,
    SidecarError,
    SidecarNotRunning,
)
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.observability.collector import ObservedOperator
from spark_bridge.observability.journal import Journal
from spark_bridge.primitives.chain import Composed
from spark_bridge.storage import (
    CheckpointInfo,
    Restore,
    StorageError,
    StorageFenced,
    StoragePort,
    StorageSession,
    read_file,
)
from spark_bridge.subtask.parts import overrides_handle_event

__all__ = ["Operator", "Operators", "WholeCalls", "check_savepoint_directory", "sources_of"]

T = TypeVar("T")
log = get_logger("headgate.operators")

BROKEN_ALONE = Supervision(on_failure=Directive.STOP)
"""An error in the actors of one operator ends that operator, and no other: the bridge watches each (H165)."""
BROKEN_KNOWN_S = 5.0
_ENDED = (ActorStopped, HandlerFailed)
"""What a question gets if the actors end: the second one, if it is the question that has broken them."""


class WholeCalls:
    """The calls of a sidecar that change which operators there are. Loop only. They end with ``system``.

    Such a call takes several steps, and a cancellation cannot leave it halfway (H160). Each runs in a separate task, so
    that a cancellation of the caller, even by ``asyncio``, reaches it only as a request: it undoes what it has done, or
    goes on to its end. The caller waits for that, and then raises the cancellation. Calls for one name follow each
    other.
    """

    def __init__(self, system: ActorSystem, require_running: Callable[[], None]) -> None:
        """``require_running`` raises ``SidecarNotRunning`` if no call may begin any more."""
        self._system = system
        self._require_running = require_running
        self._turns: dict[str, anyio.Lock] = {}

    async def run(self, name: str, call: Callable[[], Awaitable[T]], *, certain: bool = False) -> T:
        """Return the result of ``call``, which is the only one for ``name`` until it has ended.

        If the caller is cancelled, so is ``call``, by a cancel scope, unless it is ``certain``: what it shields
        continues. The cancellation is raised when ``call`` has ended. Raises ``SidecarNotRunning`` if the sidecar ends
        first.
        """
        self._require_running()
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        scope = anyio.CancelScope()
        self._system.start_task(self._carry_out, name, call, outcome, scope, name=f"call for {name}")
        cancelled: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.wait([outcome])
            except asyncio.CancelledError as error:
                cancelled = error
                if not certain:
                    scope.cancel()
        if cancelled is not None:
            raise cancelled from None if outcome.cancelled() else outcome.exception()
        if outcome.cancelled():
            raise SidecarNotRunning(
                f"the sidecar was closed before the call for operator {name!r} had ended: leave the `with` block, or "
                "stop the sidecar, only after the call has returned"
            )
        return outcome.result()

    async def _carry_out(
        self, name: str, call: Callable[[], Awaitable[T]], outcome: asyncio.Future[T], scope: anyio.CancelScope
    ) -> None:
        try:
            with scope:
                async with self._turn(name):
                    self._require_running()
                    outcome.set_result(await call())
        except SystemNotRunning:
            outcome.cancel()  # the sidecar has ended meanwhile
        except Exception as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():  # it was cancelled
                outcome.cancel()

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(name, anyio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked() and not turn.statistics().tasks_waiting:
                self._turns.pop(name, None)


@dataclass(slots=True, eq=False)
class Operator:
    """The records of one operator. ``failure`` is the exception with which its coordinator failed its latest job.

    The current micro-batch holds ``batch_turn``.
    """

    tracker_ref: ActorRef[TrackerMessage]
    statistics: OperatorStatistics
    watch: CallWatch
    observed: ObservedOperator
    port: StoragePort
    config: OperatorConfig
    parts: Parts
    compose: Callable[[], Composed] | None = None  # makes its parts anew, for another parallelism
    handle: OperatorHandle | None = None
    failure: BaseException | None = None
    broken: OperatorBroken | None = None  # once its actors have ended with an error that is ours
    told: Settled | None = None  # what a ``run`` or a micro-batch knows, and has raised or tries again
    autoscaling: object = None  # of which its task knows whether the operator is still the same one
    batch_turn: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1, max_value=1))
    shipped_classes: set[object] = field(default_factory=set)

    def shipped(self, made_by: object) -> None:
        """``made_by``, a class or a function, makes operators in tasks. Any thread."""
        self.shipped_classes.add(made_by)
        ignoring = [one for one in self.shipped_classes if isinstance(one, type) and not overrides_handle_event(one)]
        all_ignore = len(ignoring) == len(self.shipped_classes)
        self.statistics.operator_ignores_events = ignoring[0].__qualname__ if all_ignore else ""


@dataclass(slots=True, eq=False)
class _Away:
    """An operator that is being started again."""

    operator: Operator
    back: anyio.Event = field(default_factory=anyio.Event)


class Operators:
    """The operators of a sidecar and their names. Loop only. It needs no closing: the actors end with their system."""

    def __init__(
        self,
        config: SidecarConfig,
        system: ActorSystem,
        bridge_ref: ActorRef[BridgeMessage],
        router: ConnectionRouter,
        storage: StorageSession,
        look_at_run: Callable[[int], Awaitable[StageLook]] = knows_nothing,
        heard_failure: Callable[[str, BaseException], None] = lambda operator_id, error: None,
        journal: Journal | None = None,
    ) -> None:
        """``heard_failure`` is called for each operator that has failed a job, with the cause."""
        self._config = config
        self._system = system
        self._bridge_ref = bridge_ref
        self._router = router
        self._storage = storage
        self._journal = journal or Journal(0.0)
        self._look_at_run = look_at_run
        self.coordinator_store = CoordinatorStore()
        self._operators: dict[str, Operator] = {}
        self._away: dict[str, _Away] = {}
        self._stuck: set[str] = set()
        self._heard_failure = heard_failure
        self.fenced: StorageFenced | None = None
        """Set, permanently, when a later application has taken over the storage."""

    # --- one operator's life --------------------------------------------------------------------------------------

    async def add(
        self,
        config: OperatorConfig,
        parts: Parts,
        restore: Restore,
        composed: Composed | None = None,
    ) -> Operator:
        """Restore its checkpoint, if any, start the coordinator, and accept its tasks from now on.

        ``composed`` has these parts, and what the statistics show of the ready-made ones.
        """
        operator_id = config.operator_id
        if self.fenced is not None:
            raise self.fenced
        if operator_id in self._operators:
            raise SidecarError(
                f"operator {operator_id!r} is already coordinated: choose another name, or release the operator first "
                "(replace=True does)"
            )
        port = self._storage.port(operator_id, config.mode)
        restored, record, files_from = await self._restored(config, port, restore)
        config = replace(config, restored=restored, files_from=files_from)
        statistics = OperatorStatistics(
            operator_id, splits=partial(_splits_of, parts), sources=partial(_backlogs_of, parts)
        )
        if composed is not None:
            counters = composed.counters
            statistics.counters, statistics.counter_totals = counters.sums, counters.totals
            statistics.part_figures = composed.figures
        ports = self._ports(operator_id, port)
        tracker_ref = self._system.spawn(
            lambda: BarrierTrackerActor(parts, config, ports, statistics),
            name=f"operator-{operator_id}",
            mailbox=UNBOUNDED,
            supervision=BROKEN_ALONE,
            log_context={"operator_id": operator_id},
        )
        observed = ObservedOperator(tracker_ref, statistics, ports.watch, config.mode, config.parallelism)
        operator = self._operators[operator_id] = Operator(
            tracker_ref, statistics, ports.watch, observed, port, config, parts
        )
        try:
            await checkpoint_if_cancelled()
            # What the user has chosen is recorded before the coordinator acts on it: it may commit what its checkpoint
            # has prepared, and a restart from another one would repeat that. Then the call goes on to its end, because
            # later restarts know of it.
            with anyio.CancelScope(shield=record is not None):
                if record is not None:
                    await record()
                await self._start(config, operator)
                with anyio.CancelScope(shield=True):
                    await self._accept_tasks(config, tracker_ref)
        except BaseException as error:
            self._forget(operator_id)
            if is_a(error, asyncio.CancelledError):
                self._system.cut_off(tracker_ref)
            with anyio.CancelScope(shield=True):
                await self._system.stop(tracker_ref)
            raise
        return operator

    async def remove(self, operator_id: str) -> None:
        """Notify its live tasks, close its coordinator, and free the name. The caller shields this."""
        operator = self._named(operator_id)
        self._forget(operator_id)
        try:
            await self._bridge_ref.ask(
                lambda reply_to: RemoveOperator(operator_id, reply_to), timeout_s=self._config.limits.start_timeout_s
            )
            # The coordinator should learn of the end of its run, within a limit, and unless it has ended already.
            with suppress(AskTimeout, *_ENDED):
                await operator.tracker_ref.ask(AwaitSettled, timeout_s=self._config.limits.shutdown_timeout_s)
        finally:
            await self._system.stop(operator.tracker_ref)

    def _forget(self, operator_id: str) -> None:
        del self._operators[operator_id]
        self._journal.forget(operator_id)

    @asynccontextmanager
    async def away(self, operator_id: str) -> AsyncIterator[None]:
        """Within the block, the operator may be removed and added again, and whatever asks for it waits."""
        away = self._away[operator_id] = _Away(self._named(operator_id))
        try:
            yield
        finally:
            del self._away[operator_id]
            away.back.set()

    async def _present(self, operator_id: str | None) -> None:
        for name in [operator_id] if operator_id is not None else list(self._away):
            while name in self._away:
                await self._away[name].back.wait()

    @property
    def handles(self) -> dict[str, OperatorHandle]:
        """The handles of the operators that have started; the keys are their names."""
        operators = {**self._operators, **{name: one.operator for name, one in self._away.items()}}
        return {name: one.handle for name, one in operators.items() if one.handle is not None}

    def __contains__(self, operator_id: str) -> bool:
        return operator_id in self._operators

    @property
    def observed(self) -> dict[str, ObservedOperator]:
        """What a status needs of each operator; the keys are their names."""
        return {name: operator.observed for name, operator in self._operators.items() if operator.broken is None}

    async def _restored(
        self, config: OperatorConfig, port: StoragePort, restore: Restore
    ) -> tuple[CompletedCheckpoint | None, Callable[[], Awaitable[None]] | None, str]:
        """The checkpoint to start from, what makes it that of later restarts too if it is not the latest one, and the
        folder with the files of its states if it is not the operator's own."""
        operator_id = config.operator_id
        if config.mode is RestoreMode.BATCH:  # Spark owns the output, so nothing is restored
            if restore not in ("latest", "none"):
                raise SidecarError(
                    f"operator {operator_id!r} cannot start from {restore}, because in batch mode Spark owns its "
                    'output: coordinate it with mode="streaming"'
                )
            return None, None, ""
        record, files_from = None, ""
        match restore:
            case "none":
                return None, partial(port.start_from, None), ""
            case "latest":
                restored = await port.restore_latest(allow_older=self._config.storage_details.allow_older_checkpoint)
            case _:
                read = partial(read_file, str(restore), options=self._config.storage_details.options)
                stored = await self._storage.run_in_thread(read)
                if stored.operator_id != operator_id:
                    raise SidecarError(
                        f"{restore} is a checkpoint of operator {stored.operator_id!r}, not of {operator_id!r}: "
                        "pass the file of this operator"
                    )
                restored = stored.checkpoint
                files_from = await self._storage.run_in_thread(partial(port.restored_elsewhere, str(restore), restored))
                record = partial(port.start_from, restored.checkpoint_id)
        if restored is None:
            log.info(
                "operator started without checkpoint",
                operator_id=operator_id,
                storage=str(self._config.storage or "memory"),
            )
            return None, record, ""
        try:
            restored = rescaled(restored, config.parallelism)
        except LocalProtocolError as error:
            raise SidecarError(f"operator {operator_id!r}: {error}") from error
        log.info("checkpoint restored", operator_id=operator_id, checkpoint_id=restored.checkpoint_id)
        return restored, record, files_from

    async def _start(self, config: OperatorConfig, operator: Operator) -> None:
        operator_id, timeout_s, tracker_ref = (
            config.operator_id,
            self._config.limits.start_timeout_s,
            operator.tracker_ref,
        )
        try:
            with _explained(operator.watch):
                await tracker_ref.ask(StartOperator, timeout_s=timeout_s)
        except Exception as error:  # whatever the user's code has raised
            if is_a(error, ActorStopped | HandlerFailed) and not tracker_ref.is_alive:
                raise OperatorBroken.because(operator_id, error.__cause__ or error) from error
            limit = ". The limit is SidecarLimits.start_timeout_s" if is_a(error, AskTimeout) else ""
            raise CoordinatorStartError(
                f"coordinator of operator {operator_id!r} failed in start: {describe(error)}{limit}"
            ) from error

    async def _accept_tasks(self, config: OperatorConfig, tracker_ref: ActorRef[TrackerMessage]) -> None:
        await self._bridge_ref.ask(
            lambda reply_to: AddOperator(
                config.operator_id,
                config.parallelism,
                tracker_ref,
                reply_to,
                config.allow_fewer,
                partial(self._hear_broken, config.operator_id),
            ),
            timeout_s=self._config.limits.start_timeout_s,
        )

    def _ports(self, operator_id: str, port: StoragePort) -> OperatorPorts:
        async def store(checkpoint: CompletedCheckpoint) -> None:
            try:
                await port.store(checkpoint)
            except StorageFenced as error:
                self._end_fenced(operator_id, error)
                raise

        async def discard(checkpoint_id: int) -> None:
            try:
                await port.discard(checkpoint_id)
            except StorageFenced as error:
                self._end_fenced(operator_id, error)
                raise DiscardRefused(str(error)) from error

        async def store_savepoint(checkpoint: CompletedCheckpoint, directory: str) -> None:
            file = await port.store_savepoint(directory, checkpoint)
            log.info("savepoint written", operator_id=operator_id, checkpoint_id=checkpoint.checkpoint_id, file=file)

        return OperatorPorts(
            report=self._bridge_ref.tell,
            gateway_opened=self._router.gateway_opened,
            gateway_closed=self._router.gateway_closed,
            attempt_token=self._router.attempt_token,
            store=store,
            discard=discard,
            failed=partial(self._hear_failure, operator_id),
            store_savepoint=store_savepoint,
            discard_savepoint=port.discard_savepoint,
            name_savepoint=port.name_savepoint,
            states=port.states(),
            next_checkpoint_id=port.next_checkpoint_id,
            completed=port.completed,
            coordinator_store=self.coordinator_store,
            look_at_run=self._look_at_run,
            observe=partial(self._journal.observe, operator_id),
        )

    def _end_fenced(self, operator_id: str, error: StorageFenced) -> None:
        """A later application continues from here: leave everything to it, including resets and their clean-up."""
        if self.fenced is None:
            self.fenced = error
            log.error("application fenced", error=str(error))
            self._hear_failure(operator_id, error)
            self._router.refuse_tasks(str(error))
            self._bridge_ref.tell(FailRuns(str(error)))

    def _hear_failure(self, operator_id: str, error: BaseException) -> None:
        self._heard_failure(operator_id, error)
        self._journal.job_failed(operator_id, error, self._system.clock.now())
        operator = self._operators.get(operator_id)
        if operator is not None:
            operator.failure = error

    def _hear_broken(self, operator_id: str, error: OperatorBroken) -> None:
        operator = self._operators.get(operator_id)
        if operator is not None:
            operator.broken = error
        self._hear_failure(operator_id, error)

    # --- requests ---------------------------------------------------------------------------------------------

    async def checkpoint(
        self,
        operator_id: str | None,
        *,
        timeout_s: float,
        savepoint_directory: str | None = None,
        counts: bool = True,
    ) -> int:
        """Take a checkpoint or savepoint and return its id. Raises ``CheckpointFailed`` with the reason.

        ``counts``: whether the failure of a checkpoint is one of those that are tolerated in a row.

        After a timeout or a cancellation, one that is not complete is given up, and the file of a savepoint is deleted.
        """
        await self._present(operator_id)
        operator = self._to_ask(operator_id)
        asked: list[Reply[int]] = []

        def request(reply_to: Reply[int]) -> RequestCheckpoint:
            asked.append(reply_to)
            return RequestCheckpoint(reply_to, savepoint_directory, counts)

        try:
            with _explained(operator.watch):
                return await operator.tracker_ref.ask(request, timeout_s=timeout_s)
        except (asyncio.CancelledError, AskTimeout):
            for reply_to in asked:
                if operator.tracker_ref.is_alive:
                    operator.tracker_ref.tell(WithdrawCheckpoint(reply_to))
                if savepoint_directory is not None and (checkpoint_id := reply_to.answered) is not None:
                    self._system.start_task(_delete_savepoint, operator.port, checkpoint_id, name="delete savepoint")
            raise
        except _ENDED as error:
            if broken := await self._broken_with(operator, error):
                raise broken from broken.__cause__
            raise

    async def savepoint(self, operator_id: str | None, directory: str, *, timeout_s: float) -> str:
        """Take a savepoint and return its file. Raises as ``checkpoint`` does."""
        await self._present(operator_id)
        port = self._to_ask(operator_id).port
        place = await port.savepoint_place(directory)
        return port.take_savepoint(await self.checkpoint(operator_id, timeout_s=timeout_s, savepoint_directory=place))

    async def request(self, operator_id: str, payload: Any, part: str = "", *, timeout_s: float) -> Any:
        """Return the result of the coordinator's ``handle_client_request``, or raise what it raises (R97)."""
        await self._present(operator_id)
        operator = self._to_ask(operator_id)
        traceparent = current_traceparent()
        try:
            with _explained(operator.watch):
                return await operator.tracker_ref.ask(
                    lambda reply_to: ClientRequest(payload, reply_to, part, traceparent), timeout_s=timeout_s
                )
        except _ENDED as error:  # H85
            if broken := await self._broken_with(operator, error):
                raise broken from broken.__cause__
            raise RequestFailed(
                f"the coordinator of operator {operator_id!r} was closed before it answered this request: "
                "coordinate the operator again, then ask"
            ) from error

    async def settle(self, timeout_s: float, operator_ids: Collection[str] | None = None) -> str:
        """Wait until these operators have no run and their final checkpoints have ended, whatever others do.

        ``operator_ids`` of None means all operators. Returns why the output of the last run of some of them is not
        committed, or "". Raises ``NotSettled`` after ``timeout_s`` seconds.
        """
        uncommitted = []
        with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
            for operator_id in sorted(self._operators if operator_ids is None else operator_ids):
                await self._present(operator_id)
                if operator_id not in self._operators:
                    continue  # it was released in the meantime
                settled = await self._told(operator_id, timeout_s)
                if settled.uncommitted:
                    uncommitted.append(f"operator {operator_id!r}: {settled.uncommitted}")
        return "; ".join(uncommitted)

    async def settle_one(self, operator_id: str, timeout_s: float) -> Settled:
        """Like ``settle``, for one operator."""
        with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
            await self._present(operator_id)
            return await self._told(operator_id, timeout_s)

    async def settled_while_away(self, operator_id: str, timeout_s: float) -> Settled:
        """Like ``settle_one``, for the call that holds ``away``. It reports nothing to a user."""
        with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
            return await self._settled(operator_id, timeout_s)

    async def uncommitted(self, timeout_s: float, skipped: Collection[str], patience_s: float) -> str:
        """Return why the last output of some operators is not committed, or "". Waits like ``settle``, concurrently.

        An operator of which no attempt has run has no output, whatever its coordinator does.

        ``skipped`` are operators whose run is being failed. What ``run`` or a micro-batch has already reported is left
        out (H71). If a method of a coordinator does not return for ``patience_s`` from now on, the wait for this
        operator ends (H70).
        """
        found: dict[str, str] = {}
        gone: list[ActorError] = []

        async def look(operator_id: str) -> None:
            try:
                with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
                    settled = await self._settled_unless_stuck(operator_id, timeout_s, patience_s)
            except NotSettled as error:
                found[operator_id] = str(error)
                return
            except ActorError as error:
                gone.append(error)
                return
            if settled is None:
                why = self._operators[operator_id].watch.describe()
                log.error("coordinator method wait abandoned", operator_id=operator_id, why=why)
                self._stuck.add(operator_id)
                if self._operators[operator_id].config.mode is RestoreMode.STREAMING:
                    found[operator_id] = why
                return
            why = settled.uncommitted or settled.failed
            if why and settled != self._operators[operator_id].told:
                found[operator_id] = why

        ran = {operator_id for operator_id, operator in self._operators.items() if operator.statistics.attempts}
        async with anyio.create_task_group() as tasks:
            for operator_id in self._operators:
                if operator_id not in skipped:
                    tasks.start_soon(look, operator_id)
        if gone:
            raise gone[0]
        return "; ".join(f"operator {name!r}: {why}" for name, why in sorted(found.items()) if name in ran)

    async def _told(self, operator_id: str, timeout_s: float) -> Settled:
        settled = await self._settled(operator_id, timeout_s)
        if operator_id in self._operators:
            self._operators[operator_id].told = settled
        return settled

    async def _settled(self, operator_id: str, timeout_s: float) -> Settled:
        operator = self._named(operator_id)
        operator_ids = frozenset([operator_id])
        await self._bridge_ref.ask(lambda reply_to: AwaitRunsOver(reply_to, operator_ids), timeout_s=timeout_s)
        try:
            settled: Settled = await operator.tracker_ref.ask(AwaitSettled, timeout_s=timeout_s)
        except _ENDED as error:
            broken = await self._broken_with(operator, error)
            if broken is None:
                raise
            failed = str(broken) if operator.config.mode is RestoreMode.STREAMING else ""
            return Settled(operator.statistics.last_completed_checkpoint_id, "", failed)
        return settled

    async def _broken_with(self, operator: Operator, error: ActorError) -> OperatorBroken | None:
        """Return why an operator is broken whose actors have ended a question with this error, if it is."""
        if operator not in self._operators.values():
            return None  # it was released
        cause = error.__cause__
        if is_a(cause, ActorCancelled):
            return None
        if cause is not None:
            return OperatorBroken.because(operator.statistics.operator_id, cause)
        await self._system.stop(operator.tracker_ref)  # the question came while it ended; the bridge learns of the end
        await self._bridge_ref.ask(lambda reply_to: AwaitRunsOver(reply_to, frozenset()), timeout_s=BROKEN_KNOWN_S)
        return operator.broken

    async def _settled_unless_stuck(self, operator_id: str, timeout_s: float, patience_s: float) -> Settled | None:
        """Like ``_settled``, but None once a coordinator's method has taken ``patience_s`` from now on (H70)."""
        settled: Settled | None = None
        failed: Exception | None = None

        async def give_up() -> None:
            await self._until_stuck(self._operators[operator_id], patience_s)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            try:
                settled = await self._settled(operator_id, timeout_s)
            except Exception as error:  # inside the group, which would wrap it in an exception group
                failed = error
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        return settled

    @staticmethod
    async def _until_stuck(operator: Operator, patience_s: float) -> None:
        began_at = anyio.current_time()
        while True:
            call = operator.watch.oldest
            age_s = 0.0 if call is None else operator.watch.age_s(call)
            awaited_s = min(age_s, anyio.current_time() - began_at)
            if call is not None and awaited_s >= patience_s:
                return
            await anyio.sleep(max(patience_s - awaited_s, 0.01))

    def cut_off_stuck(self) -> None:
        """Cancel the methods of the coordinators that ``uncommitted`` gave up on, so that these can be closed."""
        for operator_id in self._stuck:
            self._system.cut_off(self._operators[operator_id].tracker_ref)

    def describe_waits(self) -> str:
        """Describe what busy coordinators are doing instead of answering; empty if none is busy."""
        waits = ((operator_id, operator.watch.describe()) for operator_id, operator in self._operators.items())
        return "; ".join(f"operator {operator_id!r}: {why}" for operator_id, why in waits if why)

    async def retained(self, operator_id: str) -> Sequence[CheckpointInfo]:
        """The operator's stored checkpoints in ascending order. Reads all of them."""
        return await self._storage.run_in_thread(partial(self._storage.storage.list, operator_id))

    def get(self, operator_id: str) -> Operator | None:
        """The operator with this name, which may be broken; None if there is none."""
        return self._operators.get(operator_id)

    def find(self, operator_id: str | None) -> Operator:
        """The operator with this name, or the only one. Raises ``SidecarError``, also if it is broken."""
        if operator_id is None:
            if len(self._operators) != 1:
                raise SidecarError(
                    f"no operator_id was given, which only works with one operator: {self._known()}. Name the "
                    "one that you mean"
                )
            return next(iter(self._operators.values()))
        operator = self._named(operator_id)
        if operator.broken is not None:
            raise operator.broken
        return operator

    def _to_ask(self, operator_id: str | None) -> Operator:
        """``find``, for a question to the coordinator. Raises ``SidecarError`` if the coordinator itself asks."""
        operator = self.find(operator_id)
        if operator.watch.inside:
            raise SidecarError(
                f"the coordinator of operator {operator.observed.statistics.operator_id!r} asked itself, and would "
                "wait for its own answer: call its method directly, or ask in context.run_in_background(...)"
            )
        return operator

    def _named(self, operator_id: str) -> Operator:
        operator = self._operators.get(operator_id)
        if operator is None and operator_id in self._away:
            return self._away[operator_id].operator
        if operator is None:
            raise SidecarError(
                f"operator {operator_id!r} is not coordinated here: {self._known()}. Coordinate it first, or "
                "correct the name"
            )
        return operator

    def _known(self) -> str:
        names = ", ".join(map(repr, sorted(self._operators)))
        only = "there is only" if len(self._operators) == 1 else "there are"
        return f"{only} {names or 'none'}"


async def _delete_savepoint(port: StoragePort, checkpoint_id: int) -> None:
    """Delete the file of a savepoint whose requester was cancelled when it was complete, so nobody knows its name."""
    try:
        await port.discard_savepoint(checkpoint_id)
    except StorageError as error:
        log.warning("savepoint deletion failed", checkpoint_id=checkpoint_id, error=str(error))


def _splits_of(parts: Parts) -> tuple[int, int | None] | None:
    """How far a source is; None for other coordinators. Any thread."""
    for _, source in sources_of(parts):
        return source.splits_progress
    return None


def _backlogs_of(parts: Parts) -> dict[str, SourceBacklog]:
    """What each source has not read yet, by the name of the stage or part; the user's own has none."""
    return {name: source.backlog for name, source in sources_of(parts)}


def sources_of(parts: Parts) -> Iterator[tuple[str, SourceCoordinator]]:
    """The sources among the coordinators of an operator, with the names of their stages."""
    for part in parts:
        coordinator = part.coordinator
        if isinstance(coordinator, SourceCoordinator):
            yield part.name, coordinator


@contextmanager
def _explained(watch: CallWatch) -> Iterator[None]:
    """Add to the text of a timeout what the coordinator is doing instead of answering."""
    try:
        yield
    except AskTimeout as error:
        detail = watch.describe() or "nothing says what it waits for"
        detail += "; sidecar.explain() says who waits for whom"
        raise AskTimeout(error.actor, error.message_type, error.timeout_s, detail) from error


@contextmanager
def _not_settled(timeout_s: float, describe_waits: Callable[[], str]) -> Iterator[None]:
    """Turn a timeout into ``NotSettled``."""
    try:
        yield
    except (TimeoutError, AskTimeout) as error:
        waits = describe_waits()
        raise NotSettled(
            f"a run and its final checkpoint did not end within {timeout_s:g} s (SidecarLimits.settle_timeout_s): "
            f"{waits or 'see the log for what is late'}"
        ) from error


def check_savepoint_directory(directory: str | os.PathLike[str], roots: Collection[str | os.PathLike[str]]) -> None:
    """Raise ``SidecarError`` unless ``directory`` is one of ``roots``, or lies below one.

    Links in local paths are followed first, so a link below a root does not lead out of it. May block.
    """
    place = _resolved(directory)
    if not any(place == root or place.startswith(root.rstrip("/") + "/") for root in map(_resolved, roots)):
        allowed = ", ".join(sorted(os.fspath(root) for root in roots)) or "none"
        raise SidecarError(
            f"this sidecar does not write savepoints into {os.fspath(directory)}: its configuration allows {allowed}. "
            "Add the directory to StorageDetails.savepoint_roots, or to --savepoint-root of a sidecar process"
        )


def _resolved(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    scheme, separator, path = text.partition("://")
    if not separator or scheme in ("file", "local"):
        return os.path.realpath(path if separator else text)
    return f"{scheme}://{posixpath.normpath(path)}"
