"""The operators that a sidecar coordinates: their actors, their checkpoints and their failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import structlog

from actors import ActorError, ActorRef, ActorSystem, AskTimeout
from actors.coordination import (
    BarrierTrackerActor,
    CoordinatorStore,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
)
from actors.coordination.call_watch import CallWatch
from actors.coordination.messages import (
    AwaitSettled,
    ClientRequest,
    RequestCheckpoint,
    Settled,
    StartOperator,
    TrackerMessage,
)
from actors.coordination.operator_config import UNBOUNDED, DiscardRefused, knows_nothing
from protocol.barrier_tracker import CompletedCheckpoint, rescaled
from protocol.errors import LocalProtocolError
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.messages import AddOperator, AwaitRunsOver, BridgeMessage, FailRuns, RemoveOperator
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.errors import CoordinatorStartError, NotSettled, SidecarError
from spark_bridge.storage import CheckpointInfo, StorageFenced, StoragePort, StorageSession, read_file
from spark_bridge.subtask.checks import overrides_handle_event

__all__ = ["Operator", "Operators"]

log = structlog.get_logger("headgate.operators")


@dataclass(slots=True)
class Operator:
    """What is kept of an operator. ``failure``: what its coordinator failed its latest job with.

    ``batch_turn`` is held by the micro-batch that is under way.
    """

    tracker_ref: ActorRef[TrackerMessage]
    statistics: OperatorStatistics
    mode: RestoreMode
    watch: CallWatch = field(default_factory=CallWatch)
    failure: BaseException | None = None
    told: Settled | None = None  # to a caller of ``run`` or a micro-batch, which has raised it or tries again
    batch_turn: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1, max_value=1))
    shipped_classes: set[object] = field(default_factory=set)

    def shipped(self, made_by: object) -> None:
        """``made_by``, a class or a function, makes the operators of tasks. Any thread."""
        self.shipped_classes.add(made_by)
        ignoring = [one for one in self.shipped_classes if isinstance(one, type) and not overrides_handle_event(one)]
        all_ignore = len(ignoring) == len(self.shipped_classes)
        self.statistics.operator_ignores_events = ignoring[0].__qualname__ if all_ignore else ""


class Operators:
    """By name. Loop only; nothing to close: the actors end with their system."""

    def __init__(
        self,
        config: SidecarConfig,
        system: ActorSystem,
        bridge_ref: ActorRef[BridgeMessage],
        router: ConnectionRouter,
        storage: StorageSession,
        look_at_run: Callable[[int], Awaitable[StageLook]] = knows_nothing,
        heard_failure: Callable[[str, BaseException], None] = lambda operator_id, error: None,
    ) -> None:
        """``heard_failure`` is told of each operator that has failed a job, and why."""
        self._config = config
        self._system = system
        self._bridge_ref = bridge_ref
        self._router = router
        self._storage = storage
        self._look_at_run = look_at_run
        self._coordinator_store = CoordinatorStore()
        self._operators: dict[str, Operator] = {}
        self._stuck: set[str] = set()
        self._heard_failure = heard_failure
        self.fenced: StorageFenced | None = None
        """Set for good when a later application has taken the storage over."""

    # --- one operator's life --------------------------------------------------------------------------------------

    async def add(self, config: OperatorConfig, coordinator: OperatorCoordinator, restore: str) -> Operator:
        """Restore what there is for it, start the coordinator, and take its tasks from here on."""
        operator_id = config.operator_id
        if self.fenced is not None:
            raise self.fenced
        if operator_id in self._operators:
            raise SidecarError(f"operator {operator_id!r} is coordinated already: choose another name")
        port = self._storage.port(operator_id, config.mode)
        config = replace(config, restored=await self._restored(config, port, restore))
        statistics = OperatorStatistics(operator_id)
        ports = self._ports(operator_id, port)
        tracker_ref = self._system.spawn(
            lambda: BarrierTrackerActor(coordinator, config, ports, statistics),
            name=f"operator-{operator_id}",
            mailbox=UNBOUNDED,
            log_context={"operator_id": operator_id},
        )
        operator = self._operators[operator_id] = Operator(tracker_ref, statistics, config.mode, ports.watch)
        try:
            await self._start(config, operator)
        except BaseException:
            del self._operators[operator_id]
            with anyio.CancelScope(shield=True):
                await self._system.stop(tracker_ref)
            raise
        return operator

    async def remove(self, operator_id: str) -> None:
        """End it: its live tasks are told, its coordinator is closed, and the name is free."""
        operator = self.find(operator_id)
        del self._operators[operator_id]
        await self._bridge_ref.ask(
            lambda reply_to: RemoveOperator(operator_id, reply_to), timeout_s=self._config.start_timeout_s
        )
        with suppress(AskTimeout):  # the coordinator is to hear the end of its run, but nobody waits for ever for it
            await operator.tracker_ref.ask(AwaitSettled, timeout_s=self._config.shutdown_timeout_s)
        await self._system.stop(operator.tracker_ref)

    async def _restored(self, config: OperatorConfig, port: StoragePort, restore: str) -> CompletedCheckpoint | None:
        operator_id = config.operator_id
        if config.mode is RestoreMode.BATCH:  # Spark owns the output, so everything starts from nothing
            if restore not in ("latest", "none"):
                raise SidecarError(
                    f"operator {operator_id!r} cannot start from {restore}: in batch mode Spark owns its output; "
                    "coordinate it with mode=RestoreMode.STREAMING"
                )
            return None
        match restore:
            case "none":
                await port.start_from(None)
                return None
            case "latest":
                restored = await port.restore_latest(allow_older=self._config.allow_older_checkpoint)
            case _:
                read = partial(read_file, restore, options=self._config.storage_options)
                stored = await self._storage.run_in_thread(read)
                if stored.operator_id != operator_id:
                    raise SidecarError(
                        f"{restore} is a checkpoint of operator {stored.operator_id!r}, not of {operator_id!r}"
                    )
                restored = stored.checkpoint
                await port.start_from(restored.checkpoint_id)
        if restored is None:
            log.info(
                "operator started without checkpoint",
                operator_id=operator_id,
                storage=str(self._config.storage or "memory"),
            )
            return None
        try:
            restored = rescaled(restored, config.parallelism)
        except LocalProtocolError as error:
            raise SidecarError(f"operator {operator_id!r}: {error}") from error
        log.info("checkpoint restored", operator_id=operator_id, checkpoint_id=restored.checkpoint_id)
        return restored

    async def _start(self, config: OperatorConfig, operator: Operator) -> None:
        operator_id, timeout_s, tracker_ref = config.operator_id, self._config.start_timeout_s, operator.tracker_ref
        try:
            with _explained(operator.watch):
                await tracker_ref.ask(StartOperator, timeout_s=timeout_s)
        except Exception as error:  # whatever the user's start has raised
            raise CoordinatorStartError(
                f"coordinator of operator {operator_id!r} failed in start: {type(error).__name__}: {error}"
            ) from error
        await self._bridge_ref.ask(
            lambda reply_to: AddOperator(operator_id, config.parallelism, tracker_ref, reply_to, config.allow_fewer),
            timeout_s=timeout_s,
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
            store=store,
            discard=discard,
            failed=partial(self._hear_failure, operator_id),
            store_savepoint=store_savepoint,
            next_checkpoint_id=port.next_checkpoint_id,
            completed=port.completed,
            coordinator_store=self._coordinator_store,
            look_at_run=self._look_at_run,
        )

    def _end_fenced(self, operator_id: str, error: StorageFenced) -> None:
        """A later application goes on from here: leave everything to it, resets and their clean-up included."""
        if self.fenced is None:
            self.fenced = error
            log.error("application fenced", error=str(error))
            self._hear_failure(operator_id, error)
            self._router.refuse_tasks(str(error))
            self._bridge_ref.tell(FailRuns(str(error)))

    def _hear_failure(self, operator_id: str, error: BaseException) -> None:
        self._heard_failure(operator_id, error)
        operator = self._operators.get(operator_id)
        if operator is not None:
            operator.failure = error

    # --- what is asked of operators -------------------------------------------------------------------------------

    async def checkpoint(
        self, operator_id: str | None, *, timeout_s: float, savepoint_directory: str | None = None
    ) -> int:
        """The id of the completed checkpoint or savepoint; raises ``CheckpointFailed`` with the reason."""
        operator = self.find(operator_id)
        with _explained(operator.watch):
            return await operator.tracker_ref.ask(
                lambda reply_to: RequestCheckpoint(reply_to, savepoint_directory), timeout_s=timeout_s
            )

    async def request(self, operator_id: str, payload: Any, *, timeout_s: float) -> Any:
        """What the coordinator's ``handle_client_request`` answers, or raises (R97)."""
        operator = self._operators.get(operator_id)
        if operator is None:
            raise SidecarError(f"a coordinator of operator {operator_id!r} does not exist: {self._known()}")
        with _explained(operator.watch):
            return await operator.tracker_ref.ask(
                lambda reply_to: ClientRequest(payload, reply_to), timeout_s=timeout_s
            )

    async def settle(self, timeout_s: float, operator_ids: Collection[str] | None = None) -> str:
        """Wait until none of these operators has a run and their final checkpoints have ended, whatever others do.

        ``operator_ids``: None for all operators.

        Returns why the output of the last run of some of them is not committed, or nothing. Raises ``NotSettled`` after
        ``timeout_s`` seconds.
        """
        uncommitted = []
        with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
            for operator_id in sorted(self._operators if operator_ids is None else operator_ids):
                if operator_id not in self._operators:
                    continue  # it was released meanwhile
                settled = await self._told(operator_id, timeout_s)
                if settled.uncommitted:
                    uncommitted.append(f"operator {operator_id!r}: {settled.uncommitted}")
        return "; ".join(uncommitted)

    async def settle_one(self, operator_id: str, timeout_s: float) -> Settled:
        """As ``settle``, for one operator."""
        with _not_settled(timeout_s, self.describe_waits), anyio.fail_after(timeout_s):
            return await self._told(operator_id, timeout_s)

    async def uncommitted(self, timeout_s: float, skipped: Collection[str], patience_s: float) -> str:
        """Why the last output of some operators is not committed, or nothing. Waits as ``settle``, for all at once.

        ``skipped``: operators with a run, whose job fails. What ``run`` or a micro-batch was told is left out (H71). A
        coordinator of which a method has been awaited for ``patience_s`` from now on is not waited for (H70).
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
                log.error("gave up waiting for a coordinator method", operator_id=operator_id, why=why)
                self._stuck.add(operator_id)
                if self._operators[operator_id].mode is RestoreMode.STREAMING:
                    found[operator_id] = why
                return
            why = settled.uncommitted or settled.failed
            if why and settled != self._operators[operator_id].told:
                found[operator_id] = why

        async with anyio.create_task_group() as tasks:
            for operator_id in self._operators:
                if operator_id not in skipped:
                    tasks.start_soon(look, operator_id)
        if gone:
            raise gone[0]
        return "; ".join(f"operator {operator_id!r}: {why}" for operator_id, why in sorted(found.items()))

    async def _told(self, operator_id: str, timeout_s: float) -> Settled:
        settled = await self._settled(operator_id, timeout_s)
        if operator_id in self._operators:
            self._operators[operator_id].told = settled
        return settled

    async def _settled(self, operator_id: str, timeout_s: float) -> Settled:
        operator = self.find(operator_id)
        operator_ids = frozenset([operator_id])
        await self._bridge_ref.ask(lambda reply_to: AwaitRunsOver(reply_to, operator_ids), timeout_s=timeout_s)
        settled: Settled = await operator.tracker_ref.ask(AwaitSettled, timeout_s=timeout_s)
        return settled

    async def _settled_unless_stuck(self, operator_id: str, timeout_s: float, patience_s: float) -> Settled | None:
        """None once a method of its coordinator has been awaited for ``patience_s`` from now on (H70)."""
        settled: Settled | None = None
        failed: Exception | None = None

        async def give_up() -> None:
            await self._until_stuck(self._operators[operator_id], patience_s)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            try:
                settled = await self._settled(operator_id, timeout_s)
            except Exception as error:  # not out of the group, which would put it into another one
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
        """Cancel what the coordinators are doing for which ``uncommitted`` did not wait any longer; they are closed."""
        for operator_id in self._stuck:
            self._system.cut_off(self._operators[operator_id].tracker_ref)

    def describe_waits(self) -> str:
        """What the coordinators are doing instead of answering, for people; empty if they are not."""
        waits = ((operator_id, operator.watch.describe()) for operator_id, operator in self._operators.items())
        return "; ".join(f"operator {operator_id!r}: {why}" for operator_id, why in waits if why)

    async def retained(self, operator_id: str) -> Sequence[CheckpointInfo]:
        """The operator's checkpoints in the storage, ascending. Reads all of them."""
        return await self._storage.run_in_thread(partial(self._storage.storage.list, operator_id))

    def find(self, operator_id: str | None) -> Operator:
        """The operator of this name, or the only one. Raises ``SidecarError``."""
        if operator_id is None:
            if len(self._operators) != 1:
                raise SidecarError(f"say which operator: {self._known()}")
            return next(iter(self._operators.values()))
        operator = self._operators.get(operator_id)
        if operator is None:
            raise SidecarError(f"operator {operator_id!r} is not coordinated here: {self._known()}")
        return operator

    def _known(self) -> str:
        return f"there are {', '.join(map(repr, sorted(self._operators)))}" if self._operators else "there is none"


@contextmanager
def _explained(watch: CallWatch) -> Iterator[None]:
    """Say in the text of a timeout what the coordinator is doing instead of answering."""
    try:
        yield
    except AskTimeout as error:
        detail = watch.describe()
        if not detail:
            raise
        raise AskTimeout(error.actor, error.message_type, error.timeout_s, detail) from error


@contextmanager
def _not_settled(timeout_s: float, describe_waits: Callable[[], str]) -> Iterator[None]:
    """Name what a timeout means here."""
    try:
        yield
    except (TimeoutError, AskTimeout) as error:
        waits = describe_waits()
        raise NotSettled(
            f"the end of a run and its final checkpoint were not known within {timeout_s:g} s; see "
            f"settle_timeout_s of SidecarConfig, and {waits or 'the log for what is late'}"
        ) from error
