# SPDX-License-Identifier: Apache-2.0

"""Watches the messages between the actors, one step at a time, and judges them. The actors do not know of it.

In each step, one actor handles one message. So messages newly at the end of a mailbox were sent in that step, by that
actor or by an actor that it called directly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors import ActorRef, AskTimeout
from actors.cell import ActorCell, cell_of
from actors.coordination import OperatorStatistics
from actors.coordination.engine.barrier_tracker import BarrierTrackerActor
from actors.coordination.engine.coordinator import CoordinatorActor
from actors.coordination.engine.gateway import GatewayActor
from actors.coordination.engine.messages import (
    AttachConnection,
    ConnectionClosed,
    EventArrived,
    LedgerDecided,
    RequestArrived,
    RequestCheckpoint,
    SubtaskReadyWithGateway,
    Timed,
    TrackerMessage,
    WithdrawCheckpoint,
)
from actors.mailbox import Envelope, Mailbox
from protocol.attempts import (
    AttemptCondemned,
    ConnectionExpired,
    GlobalFailureRaised,
    OperatorEnded,
    RunEnded,
    SubtaskFailed,
)
from protocol.barrier_tracker import (
    CompletedCheckpoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
)
from protocol.barrier_tracker.rescale import rescaled
from protocol.errors import LocalProtocolError
from protocol.gateway.machine import GatewayState
from protocol.ids import ExecutionAttempt
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.messages import BridgeMessage
from tests.simulation.application import (
    CONFIRM_S,
    HEARTBEAT_S,
    JUMP_S,
    PARALLELISM_MAX,
    RECONNECT_S,
    REPORT_S,
    SILENCE_S,
    UPWARD_EVENTS_MAX,
    Application,
    own_state,
)
from tests.simulation.bridge_checker import BridgeChecker
from tests.simulation.checkers import SLACK_S, demand, judged
from tests.simulation.invariant import check_checkpoint, check_rescaled, never_restored_since_rescale
from tests.simulation.network import Connection
from tests.simulation.server import Router

if TYPE_CHECKING:
    from tests.simulation.world import World

LOOKS_MAX = 2
"""How many looks may see something overdue: at the first one, its timer has not fired yet."""
OWN_FAULT = re.compile(
    r"not complete within|coordinator: |storage: "
    r"|\S+ \(task \d+\) (declined|could not store the files of its state): |.* had taken \d+ at the cut$"
)
"""The abort reasons that count as failures of the checkpoint (H45)."""


@dataclass(slots=True)
class _Step:
    """One actor's handling of one message."""

    cell: ActorCell[Any]
    message: object
    told_tracker: list[object] = field(default_factory=list)


class InvariantMonitor:
    """See the module. ``completed`` and ``aborted`` are the checkpoints whose end was decided here."""

    def __init__(self, world: World, router: Router, attempts_max: int) -> None:
        self.completed: set[int] = set()
        self.aborted: set[int] = set()
        self.in_doubt: set[int] = set()  # aborted while being written, and none has completed since
        self.savepoints: set[int] = set()
        self.savepoints_over: set[int] = set()
        self.begun_before: set[int] = set()  # checkpoints that were in progress when a run ended
        self.handling: Any = None  # the last input of the coordinator's actor
        self._world = world
        self._router = router
        self.raised = ""  # the coordinator's method that has failed in this step
        self._coordinator: ActorCell[Any] | None = None
        self._newest: dict[int, int] = {}  # the last attached connection of each task
        self._gone_at: dict[int, float] = {}  # when the end of a connection was reported
        self._heard_gone_at: dict[int, float] = {}  # when the gateway handled that report
        self._goodbyes: set[int] = set()  # the tasks that have sent a completion message
        self._overdue: dict[str, int] = {}  # conditions that should have ended: how often each was seen
        self._unread_since: dict[tuple[int, str], float] = {}  # by the hung task and its next event
        self._step: _Step | None = None  # the innermost one, if one actor lets another handle a message
        self._mark: dict[str, int] = {}  # how many messages to each mailbox are judged
        self.bridge_checker = BridgeChecker(attempts_max)
        self._given_up: set[int] = set()  # by request
        self._reason = ""  # of the last such request
        self._failures = 0  # in a row
        self.finished: set[ExecutionAttempt] = set()
        self._triggered: set[int] = set()
        self._asks_for_savepoint = self._asks_uncounted = False  # the tracker handles such a request now
        self._uncounted: set[int] = set()  # checkpoints whose failure their requester acts on
        self._ready_beside: dict[int, set[int]] = {}
        self._failed_beside: dict[int, set[int]] = {}
        self._boxes: dict[str, Mailbox] = {}
        self._statistics: OperatorStatistics | None = None

    def watch(
        self, bridge: ActorRef[BridgeMessage], tracker: ActorRef[TrackerMessage], statistics: OperatorStatistics
    ) -> None:
        """Watch the mailboxes of an operator from now on."""
        cell = cell_of(tracker)
        self._coordinator = coordinator = cell.children["coordinator"]
        self._boxes = {"bridge": bridge._cell.mailbox, "tracker": cell.mailbox, "coordinator": coordinator.mailbox}
        self._router.told = lambda: coordinator.mailbox.accepted
        self._statistics = statistics

    def waiting(self, name: str) -> list[object]:
        """Return the messages in the mailbox of "bridge", "tracker" or "coordinator"."""
        box = self._boxes.get(name)
        return [] if box is None else [item.message if isinstance(item, Envelope) else item for item in box.queue]

    # --- steps ----------------------------------------------------------------------------------------------------

    def before(self, cell: ActorCell[Any], item: object) -> None:
        """Begin the turn of an actor."""
        self._mark = {name: box.accepted for name, box in self._boxes.items()}
        self._begin(cell, item)

    def after(self) -> None:
        """End the turn of an actor."""
        self._end()
        self._step = None

    def direct(self, cell: ActorCell[Any], item: object) -> None:
        """Record that an idle actor handles a message immediately, perhaps within another actor's step."""
        outer = self._step
        with judged(self._world):
            if outer is None:
                self._mark = {name: box.accepted for name, box in self._boxes.items()}
            else:
                self._judge_told()
                if cell.mailbox in self._boxes.values():
                    self._judge(outer.cell, item)
                if cell.mailbox is self._boxes.get("tracker"):
                    outer.told_tracker.append(item)
            self._begin(cell, item)
        cell.handle_direct(item)
        with judged(self._world):
            for name, accepted in self._mark.items():
                if self._boxes[name] is cell.mailbox:
                    self._mark[name] = accepted + 1  # the message itself
            self._end()
        self._step = outer
        self._world.figures.taken_direct += 1

    def _begin(self, cell: ActorCell[Any], item: object) -> None:
        message = item.message if isinstance(item, Envelope) else item
        self._step = _Step(cell, message)
        match cell._instance:
            case GatewayActor() as gateway if isinstance(message, AttachConnection):
                self._newest[gateway._attempt.task_attempt_id] = message.connection.connection_id
                self._world.record(gateway._attempt.task_attempt_id).heard_at = self._world.now
            case GatewayActor() if isinstance(message, ConnectionClosed):
                self._heard_gone_at[message.connection_id] = self._world.now
            case CoordinatorActor():
                self.handling = item.message if isinstance(item, Timed) else item
            case BarrierTrackerActor() as instance:
                self._router.closed_beside.clear()
                asks_for = message.savepoint_directory if isinstance(message, RequestCheckpoint) else None
                self._asks_for_savepoint = asks_for is not None
                self._asks_uncounted = isinstance(message, RequestCheckpoint) and not message.counts
                if isinstance(message, LedgerDecided) and isinstance(message.decision, RunEnded):
                    self.begun_before.update(instance._machine.pending_ids)
            case _:
                pass

    def _judge_told(self) -> None:
        """Judge the messages sent since the last look that wait in a mailbox."""
        step = self._step
        assert step is not None
        for name, accepted in self._mark.items():
            box = self._boxes[name]
            self._mark[name] = box.accepted
            count = box.accepted - accepted
            told = list(box.queue)[-count:] if count else []
            messages = [message.message if isinstance(message, Envelope) else message for message in told]
            for place, message in enumerate(messages, box.accepted - count + 1):
                self._judge(step.cell, message, place if name == "coordinator" else None)
            if name == "tracker":
                step.told_tracker += messages

    def _end(self) -> None:
        self._judge_told()
        step = self._step
        assert step is not None
        cell = step.cell
        if isinstance(cell._instance, BridgeActor):
            self.bridge_checker.judge(step.message, step.told_tracker, self._world.now)
        if isinstance(cell._instance, BarrierTrackerActor) and isinstance(step.message, WithdrawCheckpoint):
            awaited = {one.reply_to for one in cell._instance._requests._open.values() if one.reply_to is not None}
            for waiting in cell.mailbox.queue:
                message = waiting.message if isinstance(waiting, Envelope) else waiting
                if isinstance(message, WithdrawCheckpoint):  # another call that was cancelled
                    awaited.discard(message.reply_to)
            demand(all(reply.open for reply in awaited), "H160: a checkpoint is taken for a call that was cancelled")
        if isinstance(cell._instance, GatewayActor):
            machine = cell._instance._machine
            record = self._world.record(machine.attempt.task_attempt_id)
            record.connected(self._world.now, machine.state is GatewayState.ATTACHED)
            if machine.state is GatewayState.ATTACHED:  # a checkpoint may have held the event for the whole time
                limit_s = self._world.settings.checkpoints.timeout_s + CONFIRM_S + SLACK_S
                record.check_tolerated(self._world.now, limit_s)
                if self._world.settings.heartbeats and not machine._inbound.finished:
                    silent_s = record.silent_for(self._world.now)
                    text = f"H94: {record.name} is silent for {silent_s:.3f} s, and nobody gives it up"
                    demand(silent_s < SILENCE_S + HEARTBEAT_S + 3 * JUMP_S, text)  # time may jump before a look
        check_machine(cell)

    def _judge(self, cell: ActorCell[Any], message: object, told: int | None = None) -> None:
        match message:
            case SubtaskReadyWithGateway(attempt):
                self._ready_beside[attempt.task_attempt_id] = self._router.beside(attempt)
            case SubtaskFailed(attempt) | Timed(SubtaskFailed(attempt)):
                closed = self._router.closed_beside.get(attempt.task_attempt_id)
                beside = self._router.beside(attempt, told) if closed is None else closed
                self._failed_beside[attempt.task_attempt_id] = beside
            case NotifyCheckpointComplete(checkpoint_id):
                self._complete(checkpoint_id)
            case NotifyCheckpointAborted(checkpoint_id):
                self._abort(checkpoint_id)
            case GlobalFailureRaised():
                self._failures = 0
                late = isinstance(cell._instance, CoordinatorActor) and self.is_behind_a_reset()
                demand(not late, "H15: a failure of before a reset fails the run that comes after it")
            case OperatorEnded(task_attempt_id=task_attempt_id):
                self._goodbyes.add(task_attempt_id)
            case ConnectionExpired(_, task_attempt_id) if isinstance(cell._instance, GatewayActor):
                self._check_expired(task_attempt_id)
            case EventArrived(attempt=attempt) | RequestArrived(attempt=attempt):
                self._check_window(attempt)
            case AttemptCondemned(task_attempt_id=task_attempt_id, silent=True):
                self._world.record(task_attempt_id).check_silent(self._world.now, SILENCE_S)
                self._world.figures.happen("a silent task is given up")
            case AttemptCondemned(task_attempt_id=task_attempt_id) if isinstance(cell._instance, GatewayActor):
                self._world.record(task_attempt_id).check_late(self._world.now, CONFIRM_S)
            case _:
                pass

    def is_behind_a_reset(self) -> bool:
        """Whether a reset is decided that the coordinator has not received."""
        actor = None if self._coordinator is None else self._coordinator._instance
        return isinstance(actor, CoordinatorActor) and actor._resets < actor._failures.resets

    def check_reported(self, method: str, awaited_s: float) -> None:
        """Check that a method that took long was reported before it returns (H70)."""
        actor = None if self._coordinator is None else self._coordinator._instance
        if awaited_s > REPORT_S + SLACK_S and isinstance(actor, CoordinatorActor):
            self._world.figures.happen("a method is reported")
            call = actor._watch.oldest
            reported = call is not None and call.reported
            demand(reported, f"H70: {method} was awaited for {awaited_s:.3f} s, and not reported")

    def check_raised(self) -> None:
        """Check that an error in a coordinator's method is a global failure, unless a reset has begun (H7)."""
        actor = None if self._coordinator is None else self._coordinator._instance
        if self.raised and isinstance(actor, CoordinatorActor):  # else it was released meanwhile
            failed = actor._failures.latched or self.is_behind_a_reset()
            demand(failed, f"H7: {self.raised} has raised, and the job goes on")
        self.raised = ""

    def connection_gone(self, connection_id: int) -> None:
        """Record that the server reports the end of a connection."""
        self._gone_at[connection_id] = self._world.now

    def _check_expired(self, task_attempt_id: int) -> None:
        """Check that an attempt without a connection fails only if its newest has been gone for long enough (H24)."""
        connection_id = self._newest[task_attempt_id]
        waited_s = self._world.now - self._gone_at.get(connection_id, self._world.now)
        demand(
            waited_s >= RECONNECT_S - 1e-6, f"H24: task {task_attempt_id} failed {waited_s:.3f} s after its connection"
        )

    def look(self, connections: Iterable[tuple[Connection, bool]], *, idle: bool) -> None:
        """Look before timers fire. ``connections``: each with whether its task hangs. ``idle``: no mailbox has mail."""
        now, overdue = self._world.now, set[str]()
        for task_attempt_id, attempt in self._router.open.items():
            gone_at = self._heard_gone_at.get(self._newest.get(task_attempt_id, -1), now)
            if now > gone_at + RECONNECT_S and task_attempt_id not in self._goodbyes:
                overdue.add(f"H24: {attempt} is without a connection since {gone_at:.4f}")
        unread = {key for connection, hung in connections if (key := self._unheard(connection, hung=hung))}
        self._unread_since = {key: self._unread_since.get(key, now) for key in unread}
        for (task_attempt_id, payload), since in self._unread_since.items():
            if now > since + CONFIRM_S:
                overdue.add(f"H25: task {task_attempt_id} does not confirm {payload} since {since:.4f}")
        self._overdue = {what: self._overdue.get(what, 0) + idle for what in overdue}
        for what, looks in self._overdue.items():
            demand(looks <= LOOKS_MAX, f"{what}, and not failed")

    def _unheard(self, connection: Connection, *, hung: bool) -> tuple[int, str] | None:
        """Return a hung task and the first event that it has yet to confirm, on a sound connection."""
        task_attempt_id = connection.task_attempt_id
        if not (hung and connection.is_sound(self._world.now) and task_attempt_id in self._router.open):
            return None
        payload = self._world.record(task_attempt_id).first_to_confirm(connection.down)
        return (task_attempt_id, payload) if payload else None

    def connection_dropped(self, peer: str) -> None:
        """Check a dropped connection: tasks keep to the protocol, so only a replaced one may be cut off (H24, H30)."""
        with judged(self._world):
            item = None if self._step is None else self._step.message
            demand(isinstance(item, AttachConnection), f"H30: the connection of {peer} is dropped at {item}")

    def _check_window(self, attempt: ExecutionAttempt) -> None:
        """Check the limit of events that a part has sent and the coordinator has not taken (H27, H150)."""
        waiting = Counter(
            message.part
            for message in self._boxes["coordinator"].queue
            if isinstance(message, EventArrived | RequestArrived) and message.attempt == attempt
        )
        text = f"H27: {dict(waiting)} events of {attempt}, by part, wait for the coordinator"
        demand(all(count <= UPWARD_EVENTS_MAX for count in waiting.values()), text)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def triggered(self, checkpoint_id: int) -> None:
        """Record an id that the tracker has taken."""
        self._triggered.add(checkpoint_id)
        if self._asks_uncounted:
            self._uncounted.add(checkpoint_id)
        if self._asks_for_savepoint:
            self.savepoints.add(checkpoint_id)
            self._asks_for_savepoint = False

    def _complete(self, checkpoint_id: int) -> None:
        world = self._world
        world.tell(f"checkpoint {checkpoint_id} is complete")
        demand(checkpoint_id not in self.completed | self.aborted, f"H44: checkpoint {checkpoint_id} ended twice")
        demand(world.storage.holds(checkpoint_id), f"H50: {checkpoint_id} is complete, and not durable")
        self.completed.add(checkpoint_id)
        self.in_doubt.clear()
        self._failures = 0
        world.figures.checkpoints += 1

    def _abort(self, checkpoint_id: int) -> None:
        world, statistics = self._world, self._statistics
        assert statistics is not None
        world.tell(f"checkpoint {checkpoint_id} is aborted: {statistics.last_abort_reason}")
        demand(checkpoint_id not in self.completed | self.aborted, f"H44: checkpoint {checkpoint_id} ended twice")
        self.aborted.add(checkpoint_id)
        if checkpoint_id in world.storage.written:
            self.in_doubt.add(checkpoint_id)
        refused = "it names files of states" in statistics.last_abort_reason
        demand(not refused, f"H190: {checkpoint_id} may not be written, and every task keeps the rules")
        self._check_abort(checkpoint_id, statistics.last_abort_reason)
        world.figures.aborted += 1
        world.figures.subsumed += statistics.last_abort_reason.startswith("subsumed")

    def give_up(self, reason: str) -> int:
        """Choose a checkpoint to abort: any that was triggered, over or not (H44)."""
        checkpoint_id = self._world.random.choice(sorted(self._triggered)[-4:] or [0])
        self._given_up.add(checkpoint_id)
        self._reason = reason
        return checkpoint_id

    def _check_abort(self, checkpoint_id: int, reason: str) -> None:
        if reason == self._reason:
            demand(checkpoint_id in self._given_up, f"H44: {checkpoint_id} is aborted in place of {self._given_up}")
        late = reason.startswith("not complete within")
        for attempt in self.finished:
            demand(not (late and f"{attempt}:" in reason), f"H47: {checkpoint_id} waited for {attempt}, which finished")
        actor = None if self._coordinator is None else self._coordinator._instance
        if isinstance(actor, CoordinatorActor) and actor._failures.latched:
            self._failures = 0  # they or something else became a global failure
        elif checkpoint_id not in self.savepoints | self._uncounted and OWN_FAULT.match(reason):
            self._failures += 1
            limit = self._world.settings.checkpoints.tolerated_failures + 2  # one may come in the step of the reset
            demand(self._failures <= limit, f"H45: {self._failures} checkpoints in a row have failed")

    def request_answered(self, checkpoint_id: int, *, savepoint: bool) -> None:
        """Check a success that the requester receives."""
        if not savepoint:
            demand(
                checkpoint_id in self.completed, f"H45: checkpoint {checkpoint_id} is reported as complete, and is not"
            )
            return
        durable = self._world.storage.holds(checkpoint_id, savepoint=True)
        demand(durable, f"H49: savepoint {checkpoint_id} is not durable")
        self.savepoints_over.add(checkpoint_id)
        self._world.figures.savepoints += 1

    def request_failed(self, error: Exception) -> None:
        demand(not isinstance(error, AskTimeout), "H48: a request for a checkpoint is never answered")
        self._world.tell(f"a checkpoint that was asked for: {error}")

    def check_stored(self, checkpoint: CompletedCheckpoint, application: Application, *, savepoint: bool) -> None:
        """Check that each written checkpoint keeps the invariant with any parallelism, even if it is later aborted."""
        checkpoint_id = checkpoint.checkpoint_id
        demand(savepoint == (checkpoint_id in self.savepoints), f"H49: {checkpoint_id}, savepoint: {savepoint}")
        check_checkpoint(checkpoint, application)
        if self._world.inputs is not None:
            input, done = json.loads(own_state(checkpoint.coordinator_state))["input"]
            self._world.inputs.written(checkpoint, (input, done))
        other = self._world.random.randint(1, PARALLELISM_MAX)
        try:
            check_rescaled(checkpoint, rescaled(checkpoint, other))
        except LocalProtocolError as error:
            demand(never_restored_since_rescale(checkpoint.subtask_states.values()), f"H52: {error}")

    # --- expectations for the coordinator's callbacks -------------------------------------------------------------

    def beside_ready(self, attempt: ExecutionAttempt) -> set[int]:
        """Return the siblings that were alive when the announcement of the attempt was decided."""
        return self._ready_beside[attempt.task_attempt_id]

    def beside_failed(self, attempt: ExecutionAttempt) -> tuple[bool, set[int]]:
        """Return whether the attempt was ever accepted, and the siblings that were alive when its end was decided."""
        return attempt.task_attempt_id in self._router.accepted, self._failed_beside[attempt.task_attempt_id]

    def check_rest(self) -> None:
        newest = self._world.storage.newest()
        demand(newest not in self.aborted, f"H44: a restart would restore checkpoint {newest}, which was aborted")
        statistics = self._statistics
        if statistics is not None:
            ended = self.completed | self.aborted | self.savepoints_over
            never = len(self._triggered - ended) - statistics.checkpoints_refused
            demand(never <= 0, f"H45: {never} checkpoints were triggered and never answered: {self._triggered - ended}")
            self._world.figures.refused += statistics.checkpoints_refused


def check_machine(cell: ActorCell[Any]) -> None:
    """Check the machine's own invariants, after each message that its actor has handled."""
    instance = cell._instance
    machine = getattr(instance, "_machine", None) or getattr(instance, "_ledger", None)
    if machine is not None:
        machine.check_invariants()
    retention = getattr(getattr(instance, "_retention", None), "_machine", None)
    if retention is not None:
        retention.check_invariants()
