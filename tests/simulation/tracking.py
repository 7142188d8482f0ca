"""The tracker's actor: the real ``BarrierTracker``, between the ledger's decisions and the coordinator."""

from __future__ import annotations

from typing import Any

from protocol.attempts import (
    AcceptAttempt,
    AnnounceFailed,
    AnnounceReady,
    EndRun,
    FinishAttempt,
    GlobalFailureRaised,
    ResetOperator,
    ResetSubtask,
    StartRun,
)
from protocol.barrier_tracker import (
    AbortCheckpoint,
    AttemptAccepted,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    BarrierTracker,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompleteCheckpoint,
    DiscardCheckpoint,
    EndSavepoint,
    OperatorResetRequired,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    RestoreAttempt,
    RunEnded,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskResetRequired,
    TellFailed,
    TellReady,
    TellReset,
    TellResetToCheckpoint,
    TellRunEnded,
    TrackerEffect,
    TriggerCheckpoint,
    rescaled,
)
from protocol.errors import LocalProtocolError
from protocol.gateway_types import BarrierRequested, CheckpointOutcome, CheckpointOver, CloseRequested
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import demand
from tests.simulation.gateways import GatewayTable
from tests.simulation.invariant import check_checkpoint, check_rescaled
from tests.simulation.shared import Boxes

PARALLELISM_MAX = 4


class Tracking:
    """See the module. ``completed`` are the checkpoints whose completion was decided here."""

    def __init__(self, boxes: Boxes, table: GatewayTable) -> None:
        application = boxes.application
        self.boxes = boxes
        self.table = table
        self.config = application.settings.checkpoints
        self.tracker = BarrierTracker(OPERATOR, application.parallelism, self.config, application.restored)
        self.last_id = -1 if application.restored is None else application.restored.checkpoint_id
        self.savepoints: set[int] = set()
        self.triggered: set[int] = set()
        self.answered: set[int] = set()
        self.completed: set[int] = set()
        self.aborted: set[int] = set()
        self.run_is_on = False
        self.uncommitted = ""  # what whoever waits for the last output is told

    # --- triggers ---

    def request(self, *, savepoint: bool) -> None:
        """Somebody asks for one."""
        self.boxes.tracker.append(("request", savepoint))

    def trigger(self, *, savepoint: bool = False) -> None:
        """Somebody asked, or one is due. Without an id nothing is said."""
        world = self.boxes.world
        checkpoint_id = world.storage.next_id(not world.calm)
        if checkpoint_id is None:
            world.tell("no checkpoint id")
            if self.tracker.final_owed:
                self.uncommitted = "no checkpoint id"
            return
        demand(checkpoint_id > self.last_id, f"H4: checkpoint {checkpoint_id} after {self.last_id}")
        self.last_id = checkpoint_id
        self.triggered.add(checkpoint_id)
        if savepoint:
            self.savepoints.add(checkpoint_id)
        self.handle(CheckpointTriggered(checkpoint_id, savepoint))

    # --- the mailbox ---

    def receive(self) -> None:
        message = self.boxes.tracker.popleft()
        match message:
            case ("request", bool(savepoint)):
                self.trigger(savepoint=savepoint)
            case (AcceptAttempt(attempt=attempt, run_id=run_id, mode=mode), connection):
                self.table.accepting[attempt.task_attempt_id] = connection, run_id
                self.handle(AttemptAccepted(attempt, mode))
            case StartRun():
                self.run_is_on, self.uncommitted = True, ""
            case _:
                self.handle(self.as_fact(message))

    def as_fact(self, message: Any) -> Any:
        match message:
            case AnnounceReady(attempt):
                return AttemptReady(attempt)
            case AnnounceFailed(attempt, reason):
                return AttemptFailed(attempt, reason)
            case FinishAttempt(attempt):
                self.table.close(attempt, "it has finished")
                self.boxes.coordinator.append(("finished", attempt))
                return AttemptFinished(attempt)
            case ResetSubtask(_, subtask):
                return SubtaskResetRequired(subtask)
            case ResetOperator(_, cause):
                return OperatorResetRequired(cause)
            case EndRun(_, run_id, succeeded, reason):
                self.run_is_on = False
                return RunEnded(run_id, succeeded, reason)
            case _:
                return message

    def handle(self, message: Any) -> None:
        effects = self.tracker.handle(message, self.boxes.world.now)
        self.tracker.check_invariants()
        for effect in effects:
            self.carry_out(effect)
        if TriggerCheckpoint() in effects:
            self.boxes.world.figures.final += not self.run_is_on
            self.trigger()

    def carry_out(self, effect: TrackerEffect) -> None:
        boxes, table = self.boxes, self.table
        if not isinstance(effect, CloseSubtask | SendBarrier | StoreCheckpoint | RestoreAttempt):
            boxes.world.tell(f"tracker: {effect}"[:200])
        match effect:
            case CloseSubtask(attempt, checkpoint_id):
                table.tell(attempt, CloseRequested(checkpoint_id))
            case SendBarrier(attempt, checkpoint_id):
                apart = boxes.world.random.random() < boxes.application.settings.apart
                boxes.world.figures.barriers_apart += apart
                table.tell(attempt, BarrierRequested(checkpoint_id, apart))
            case ReopenSubtask(attempt, checkpoint_id):
                table.tell(attempt, CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))
            case SnapshotCoordinator(checkpoint_id):
                boxes.coordinator.append(("snapshot", checkpoint_id, checkpoint_id in self.savepoints))
            case StoreCheckpoint():
                self.store(effect)
            case DiscardCheckpoint(checkpoint_id, savepoint):
                boxes.world.storage.discard(checkpoint_id, savepoint)
            case CompleteCheckpoint() | AbortCheckpoint() | EndSavepoint() | RefuseCheckpoint():
                self.end_checkpoint(effect)
            case RaiseGlobalFailure(cause):
                boxes.bridge.append(GlobalFailureRaised(OPERATOR, cause))
            case RestoreAttempt():
                boxes.world.tell(f"tracker: restore {effect.attempt} to {effect.checkpoint_id}, held {effect.held}")
                table.open_one(boxes, effect)
            case _:
                self.tell_coordinator(effect)

    def tell_coordinator(self, effect: TrackerEffect) -> None:
        box, table = self.boxes.coordinator, self.table
        match effect:
            case TellReady(attempt):
                gateway = table.open.get(attempt.task_attempt_id)
                if gateway is not None:  # else it finished while its readiness was withheld (H11)
                    box.append(("ready", gateway, table.beside(attempt)))
            case TellFailed(attempt, reason):
                accepted = any(gateway.attempt == attempt for gateway in table.by_connection.values())
                table.close(attempt, str(reason))
                box.append(("failed", attempt, reason, accepted, table.beside(attempt)))
            case TellReset(subtask, checkpoint_id):
                box.append(("reset", subtask, checkpoint_id))
            case TellResetToCheckpoint(checkpoint_id, state):
                box.append(("reset_all", checkpoint_id, state))
            case TellRunEnded(run_id, succeeded):
                table.close_all("the run has ended")
                box.append(("run_ended", run_id, succeeded))
            case _:
                pass

    # --- the steps that end a checkpoint ---

    def store(self, effect: StoreCheckpoint) -> None:
        """Whatever becomes of it: what is written must keep the invariant, with any parallelism."""
        checkpoint, application = effect.checkpoint, self.boxes.application
        demand(effect.savepoint == (checkpoint.checkpoint_id in self.savepoints), f"H49: {checkpoint.checkpoint_id}")
        check_checkpoint(checkpoint, application)
        other = self.boxes.world.random.randint(1, PARALLELISM_MAX)
        try:
            check_rescaled(checkpoint, rescaled(checkpoint, other))
        except LocalProtocolError as error:
            demand(never_restored_since_rescale(checkpoint.subtask_states.values()), f"H52: {error}")
        self.boxes.world.storage.begin(checkpoint, application.ways, effect.savepoint)

    def end_write(self) -> None:
        world = self.boxes.world
        checkpoint_id, stored = world.storage.end_one(not world.calm)
        message = CheckpointStored(checkpoint_id) if stored else CheckpointStoreFailed(checkpoint_id, "no space")
        self.boxes.tracker.append(message)

    def end_checkpoint(self, effect: CompleteCheckpoint | AbortCheckpoint | EndSavepoint | RefuseCheckpoint) -> None:
        checkpoint_id, figures = effect.checkpoint_id, self.boxes.world.figures
        demand(checkpoint_id not in self.answered, f"H44: checkpoint {checkpoint_id} was answered twice")
        self.answered.add(checkpoint_id)
        if self.tracker.final_owed and isinstance(effect, AbortCheckpoint | RefuseCheckpoint):
            self.uncommitted = f"checkpoint {checkpoint_id} failed"
        match effect:
            case CompleteCheckpoint():
                self.uncommitted = ""
                demand(checkpoint_id in self.boxes.world.storage.files, f"H50: {checkpoint_id} is not durable")
                self.completed.add(checkpoint_id)
                figures.checkpoints += 1
                self.table.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.COMPLETED))
                self.boxes.coordinator.append(("over", checkpoint_id, True))
            case EndSavepoint():
                demand(checkpoint_id in self.boxes.world.storage.savepoints, f"H49: {checkpoint_id} is not durable")
                figures.savepoints += 1
                self.table.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.SAVEPOINT))
                self.boxes.coordinator.append(("savepoint_over", checkpoint_id))
            case AbortCheckpoint(_, reason):
                self.aborted.add(checkpoint_id)
                figures.aborted += 1
                figures.subsumed += reason.startswith("subsumed")
                self.table.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))
                self.boxes.coordinator.append(("over", checkpoint_id, False))
            case RefuseCheckpoint():
                figures.refused += 1

    def check_rest(self) -> None:
        demand(not self.tracker.pending_ids, "H48: a checkpoint is pending for ever")
        unanswered = self.triggered - self.answered
        demand(not unanswered, f"H45: the requests for checkpoints {unanswered} were never answered")


def never_restored_since_rescale(parts: Any) -> bool:
    """Whether any subtask still has several states, or another one's: the only reason not to cut once more (H52)."""
    states = [[state.subtask for state in part.states] for part in parts]
    subtasks = [subtask for part in states for subtask in part]
    return any(len(part) > 1 for part in states) or len(set(subtasks)) < len(subtasks)


__all__ = ["PARALLELISM_MAX", "Tracking", "never_restored_since_rescale"]
