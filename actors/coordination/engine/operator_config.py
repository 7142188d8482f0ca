# SPDX-License-Identifier: Apache-2.0

"""The settings of one operator, and its interface to the engine's side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from actors import ActorRef, MailboxConfig
from actors.coordination.engine.inputs import RestoredInput
from actors.coordination.engine.messages import AttemptConnection, GatewayMessage
from actors.coordination.engine.state_retention import StatesPort
from actors.coordination.host.gateway import GATEWAYS_PER_TURN
from actors.coordination.store import CoordinatorStore
from actors.coordination.user_calls import CallWatch
from protocol.arguments import AT_LEAST_1, NAME, PARALLELISM, check_fields
from protocol.attempts import Decision, LedgerInput
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint, TrackerEffect, TrackerInput
from protocol.errors import HeadgateError
from protocol.facts import StageLook
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.messages import RestoreMode

UNBOUNDED = MailboxConfig(capacity=None)
"""The protocol itself bounds these messages (H27), so the mailbox needs no second bound."""


class DiscardRefused(HeadgateError):
    """``OperatorPorts.discard`` cannot succeed by trying again: the checkpoint stays in doubt permanently.

    Nothing is lost: a restart may find it.
    """


BarrierInjector = Callable[[ExecutionAttempt, int, int], None]
"""Takes the attempt, the checkpoint's id, and how many items the attempt has in its mailbox before the barrier."""


METHOD_REPORT_S = 10.0


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """The settings of one operator. Times are in seconds.

    ``restored`` is the checkpoint that this application starts from, of any parallelism (H52). The coordinator is
    reset to it before ``start`` (H6). In batch mode it raises ``ValueError``. With ``inject_barrier``, checkpoint
    barriers do not travel among the events. It is called on the event loop, once for each barrier, and must not block;
    an exception aborts the checkpoint. ``allow_fewer``: a run may have fewer partitions than subtasks. A method of the
    coordinator that has been awaited for ``method_report_s`` is reported in the log, and again each time that this time
    has doubled. ``wire_limits`` are the limits of what leaves. ``gateways_per_turn``: how many gateways are notified of
    a step of a checkpoint in one turn of the event loop. ``restored_input``: whether the first run has the input that
    ``restored`` belongs to; None if its label says so. ``files_from``: the folder that has the files of the states in
    ``restored``, if they are not where this application stores its own, because it is a savepoint.
    """

    operator_id: str
    parallelism: int
    mode: RestoreMode = RestoreMode.BATCH
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot_timeout_s: float = 60.0
    restored: CompletedCheckpoint | None = None
    inject_barrier: BarrierInjector | None = None
    allow_fewer: bool = False
    method_report_s: float = METHOD_REPORT_S
    wire_limits: WireLimits = DEFAULT_LIMITS
    gateways_per_turn: int = GATEWAYS_PER_TURN
    restored_input: RestoredInput | None = None
    files_from: str = ""

    def __post_init__(self) -> None:
        check_fields(self, operator_id=NAME, parallelism=PARALLELISM, gateways_per_turn=AT_LEAST_1)
        if self.restored is not None and self.mode is not RestoreMode.STREAMING:
            raise ValueError(
                f"operator {self.operator_id!r} starts from checkpoint {self.restored.checkpoint_id}, but in batch mode"
                " Spark owns the output and every run starts without state: coordinate it in streaming mode"
            )


def _no_token(attempt: ExecutionAttempt) -> bytes:
    """The default of a port whose connections do not break."""
    return b""


def _ignore(checkpoint_id: int) -> None:
    """Do nothing: the default of a port that nothing uses."""


async def _discard_nothing(checkpoint_id: int) -> None:
    """Do nothing: the default of a port whose savepoints are values in memory."""


def _no_folder(checkpoint_id: int, directory: str) -> str:
    """The default of a port whose tasks store no files."""
    return ""


Observed = Decision | TrackerInput | TrackerEffect
"""What ``OperatorPorts.observe`` is shown: the values of the machines, unchanged."""


def _observe_nothing(observed: Observed, now: float) -> None:
    """The default of ``OperatorPorts.observe``."""


async def knows_nothing(run_id: int) -> StageLook:
    """Answer for an engine that cannot be asked: assume that each run computes everything."""
    return StageLook()


@dataclass(frozen=True, slots=True)
class OperatorPorts:
    """The operator's interface to the engine's side. Everything is called on the event loop.

    ``report`` passes an input to the attempt ledger. ``gateway_opened`` and ``gateway_closed`` tell the router of
    connections which actor serves an attempt, and until when. ``attempt_token`` makes what an attempt has to show when
    it connects again (H74). ``failed`` is given the first cause of each global failure.

    ``store`` makes a checkpoint durable or raises; after any exception, the checkpoint may still exist. ``discard``
    comes after ``store`` has failed or been cancelled. When it returns, no restart will restore the checkpoint, and
    that is durable (H64). If it raises, the exception is logged and it is called again later, except after
    ``DiscardRefused``. ``completed`` is called for each completed checkpoint. ``store_savepoint`` writes one into the
    requested directory, and ``discard_savepoint`` deletes what that has written, if the savepoint failed or nobody
    waits for it any more (H49, H160). ``name_savepoint`` is called before that, when it is triggered: it returns the
    folder for the files of its states, or "". ``discard_savepoint`` then follows also if the savepoint is given up
    before it is written. ``states`` has the files of states; None if the engine looks after them itself.
    ``next_checkpoint_id`` returns an id higher than every earlier one, for the life of the storage (H4); it must not
    block, and may raise. Several ``store`` calls of one operator may run concurrently (H43).

    ``observe`` is shown, with a reading of the system's clock, what becomes of the operator: every decision of the
    ledger, and the steps of each checkpoint (``OBSERVED_INPUTS``, ``OBSERVED_EFFECTS``). It must not raise or block.
    Nothing depends on it.

    ``coordinator_store`` is shared by all coordinators of an application. ``watch`` knows which methods of the
    coordinator have not returned. ``look_at_run`` returns which partitions the engine computes in a run, and what it
    has kept of earlier ones; it may raise.
    """

    report: Callable[[LedgerInput], None]
    gateway_opened: Callable[[ExecutionAttempt, ActorRef[GatewayMessage], AttemptConnection], None]
    gateway_closed: Callable[[ExecutionAttempt], None]
    store: Callable[[CompletedCheckpoint], Awaitable[None]]
    discard: Callable[[int], Awaitable[None]]
    failed: Callable[[BaseException], None]
    store_savepoint: Callable[[CompletedCheckpoint, str], Awaitable[None]]
    next_checkpoint_id: Callable[[], int]
    coordinator_store: CoordinatorStore = field(default_factory=CoordinatorStore)
    look_at_run: Callable[[int], Awaitable[StageLook]] = knows_nothing
    watch: CallWatch = field(default_factory=CallWatch)
    completed: Callable[[int], None] = _ignore
    discard_savepoint: Callable[[int], Awaitable[None]] = _discard_nothing
    name_savepoint: Callable[[int, str], str] = _no_folder
    states: StatesPort | None = None
    attempt_token: Callable[[ExecutionAttempt], bytes] = _no_token
    observe: Callable[[Observed, float], None] = _observe_nothing


__all__ = [
    "UNBOUNDED",
    "BarrierInjector",
    "DiscardRefused",
    "Observed",
    "OperatorConfig",
    "OperatorPorts",
    "knows_nothing",
]
