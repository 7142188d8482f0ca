"""The operators that a sidecar coordinates: their actors, their checkpoints and their failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import structlog

from actors import ActorRef, ActorSystem, AskTimeout
from actors.coordination import (
    BarrierTrackerActor,
    CoordinatorStore,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
)
from actors.coordination.messages import (
    AwaitSettled,
    ClientRequest,
    RequestCheckpoint,
    Settled,
    StartOperator,
    TrackerMessage,
)
from actors.coordination.operator_config import UNBOUNDED
from protocol.barrier_tracker import CompletedCheckpoint, rescaled
from protocol.errors import LocalProtocolError
from protocol.messages import RestoreMode
from spark_bridge.bridge import ConnectionRouter
from spark_bridge.bridge_messages import AddOperator, AwaitRunsOver, BridgeMessage, FailRuns, RemoveOperator
from spark_bridge.config import SidecarConfig
from spark_bridge.errors import CoordinatorStartError, NotSettled, SidecarError
from spark_bridge.storage import CheckpointInfo, StorageFenced, StoragePort, StorageSession, read_file

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
    failure: BaseException | None = None
    batch_turn: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1, max_value=1))


class Operators:
    """By name. Loop only; nothing to close: the actors end with their system."""

    def __init__(
        self,
        config: SidecarConfig,
        system: ActorSystem,
        bridge_ref: ActorRef[BridgeMessage],
        router: ConnectionRouter,
        storage: StorageSession,
    ) -> None:
        self._config = config
        self._system = system
        self._bridge_ref = bridge_ref
        self._router = router
        self._storage = storage
        self._coordinator_store = CoordinatorStore()
        self._operators: dict[str, Operator] = {}
        self.failed_count = 0
        """How often a coordinator, or an operator's checkpoints, have failed a job."""
        self.last_failure: BaseException | None = None
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
        port = self._storage.port(operator_id, config.mode, concurrent_max=config.checkpoint.concurrent_max)
        config = replace(config, restored=await self._restored(config, port, restore))
        statistics = OperatorStatistics(operator_id)
        ports = self._ports(operator_id, port)
        tracker_ref = self._system.spawn(
            lambda: BarrierTrackerActor(coordinator, config, ports, statistics),
            name=f"operator-{operator_id}",
            mailbox=UNBOUNDED,
            log_context={"operator_id": operator_id},
        )
        operator = self._operators[operator_id] = Operator(tracker_ref, statistics, config.mode)
        try:
            await self._start(config, tracker_ref)
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
                return None
            case "latest":
                restored = await port.latest(allow_older=self._config.allow_older_checkpoint)
            case _:
                read = partial(read_file, restore, options=self._config.storage_options)
                stored = await self._storage.run_in_thread(read)
                if stored.operator_id != operator_id:
                    raise SidecarError(
                        f"{restore} is a checkpoint of operator {stored.operator_id!r}, not of {operator_id!r}"
                    )
                restored = stored.checkpoint
                await self._storage.pass_over(restored.checkpoint_id)
        if restored is None:
            log.info("starting from nothing", operator_id=operator_id, storage=str(self._config.storage or "memory"))
            return None
        try:
            restored = rescaled(restored, config.parallelism)
        except LocalProtocolError as error:
            raise SidecarError(f"operator {operator_id!r}: {error}") from error
        log.info("restoring a checkpoint", operator_id=operator_id, checkpoint_id=restored.checkpoint_id)
        return restored

    async def _start(self, config: OperatorConfig, tracker_ref: ActorRef[TrackerMessage]) -> None:
        operator_id, timeout_s = config.operator_id, self._config.start_timeout_s
        try:
            await tracker_ref.ask(StartOperator, timeout_s=timeout_s)
        except Exception as error:  # whatever the user's start has raised
            raise CoordinatorStartError(
                f"coordinator of operator {operator_id!r} failed in start: {type(error).__name__}: {error}"
            ) from error
        await self._bridge_ref.ask(
            lambda reply_to: AddOperator(operator_id, config.parallelism, tracker_ref, reply_to), timeout_s=timeout_s
        )

    def _ports(self, operator_id: str, port: StoragePort) -> OperatorPorts:
        async def store(checkpoint: CompletedCheckpoint) -> None:
            try:
                await port.store(checkpoint)
            except StorageFenced as error:
                self._end_fenced(operator_id, error)
                raise

        async def store_savepoint(checkpoint: CompletedCheckpoint, directory: str) -> None:
            file = await port.store_savepoint(directory, checkpoint)
            log.info("savepoint written", operator_id=operator_id, checkpoint_id=checkpoint.checkpoint_id, file=file)

        return OperatorPorts(
            report=self._bridge_ref.tell,
            gateway_opened=self._router.gateway_opened,
            gateway_closed=self._router.gateway_closed,
            store=store,
            discard=port.discard,
            failed=partial(self._hear_failure, operator_id),
            store_savepoint=store_savepoint,
            next_checkpoint_id=port.next_checkpoint_id,
            coordinator_store=self._coordinator_store,
        )

    def _end_fenced(self, operator_id: str, error: StorageFenced) -> None:
        """A later application goes on from here: leave everything to it, resets and their clean-up included."""
        if self.fenced is None:
            self.fenced = error
            log.error("fenced: this application ends its runs and takes no more tasks", error=str(error))
            self._hear_failure(operator_id, error)
            self._router.refuse_tasks(str(error))
            self._bridge_ref.tell(FailRuns(str(error)))

    def _hear_failure(self, operator_id: str, error: BaseException) -> None:
        self.failed_count += 1
        self.last_failure = error
        operator = self._operators.get(operator_id)
        if operator is not None:
            operator.failure = error

    # --- what is asked of operators -------------------------------------------------------------------------------

    async def checkpoint(
        self, operator_id: str | None, *, timeout_s: float, savepoint_directory: str | None = None
    ) -> int:
        """The id of the completed checkpoint or savepoint; raises ``CheckpointFailed`` with the reason."""
        tracker_ref = self.find(operator_id).tracker_ref
        return await tracker_ref.ask(
            lambda reply_to: RequestCheckpoint(reply_to, savepoint_directory), timeout_s=timeout_s
        )

    async def request(self, operator_id: str, payload: Any, *, timeout_s: float) -> Any:
        """What the coordinator's ``handle_client_request`` answers, or raises (R97)."""
        operator = self._operators.get(operator_id)
        if operator is None:
            raise SidecarError(f"a coordinator of operator {operator_id!r} does not exist: {self._known()}")
        return await operator.tracker_ref.ask(lambda reply_to: ClientRequest(payload, reply_to), timeout_s=timeout_s)

    async def settle(self, timeout_s: float) -> str:
        """Wait until no run is under way and every final checkpoint has ended; why the output of some operator's last
        run is not committed, or nothing. Raises ``NotSettled`` after ``timeout_s`` seconds.
        """
        uncommitted = []
        with _not_settled(timeout_s), anyio.fail_after(timeout_s):
            await self._bridge_ref.ask(AwaitRunsOver, timeout_s=timeout_s)
            for operator_id, operator in list(self._operators.items()):
                settled: Settled = await operator.tracker_ref.ask(AwaitSettled, timeout_s=timeout_s)
                if settled.uncommitted:
                    uncommitted.append(f"operator {operator_id!r}: {settled.uncommitted}")
        return "; ".join(uncommitted)

    async def settle_one(self, operator_id: str, timeout_s: float) -> Settled:
        """As ``settle``, for one operator, whatever others do."""
        operator = self.find(operator_id)
        with _not_settled(timeout_s), anyio.fail_after(timeout_s):
            await self._bridge_ref.ask(lambda reply_to: AwaitRunsOver(reply_to, operator_id), timeout_s=timeout_s)
            settled: Settled = await operator.tracker_ref.ask(AwaitSettled, timeout_s=timeout_s)
            return settled

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
def _not_settled(timeout_s: float) -> Iterator[None]:
    """Name what a timeout means here."""
    try:
        yield
    except (TimeoutError, AskTimeout) as error:
        raise NotSettled(
            f"the end of a run and its final checkpoint were not known within {timeout_s:g} s; see "
            "settle_timeout_s of SidecarConfig, and the log for what is late"
        ) from error
