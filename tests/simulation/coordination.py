"""The coordinator's actor: one mailbox, one call at a time, and the cut."""

from __future__ import annotations

from actors.coordination.taken_events import TakenEvents
from protocol.attempts import GlobalFailureRaised
from protocol.barrier_tracker import CoordinatorSnapshotFailed, CoordinatorSnapshotTaken
from protocol.gateway_types import AnswerSubmitted, CutReached, ItemTaken, ReadyAnnounced
from protocol.messages import RestoreMode
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import CallbackOrder, check_whole, demand
from tests.simulation.coordinator import Coordinator
from tests.simulation.gateways import EVENTS_MAX, Gateway
from tests.simulation.invariant import Log, read_coordinator, split_wire_form
from tests.simulation.shared import Boxes


class Coordination:
    """See the module. ``order`` judges what the coordinator is told."""

    def __init__(self, boxes: Boxes) -> None:
        application = boxes.application
        settings, restored = application.settings, application.restored
        self.boxes = boxes
        self.coordinator = Coordinator(application)
        self.taken = TakenEvents()
        self.snapshotting: int | None = None
        self.unanswered: list[tuple[Gateway, str, int]] = []
        self.order = CallbackOrder(
            application.parallelism,
            settings.mode is RestoreMode.BATCH,
            settings.copies or settings.barrier_stage,
            settings.checkpoints.concurrent_max,
            -1 if restored is None else restored.checkpoint_id,
        )

    # --- what the user's code does by itself ---

    def senders(self) -> list[tuple[Gateway, list[Log]]]:
        """The gateways that may take another event, and the logs of the keys that want one."""
        found = []
        for subtask, handles in self.coordinator.handles.items():
            for number, gateway in handles.items():
                if gateway.open_events < EVENTS_MAX:
                    logs = self.coordinator.logs[subtask][number]
                    wanting = [log for log in logs.values() if len(log.sent) < gateway.target]
                    if wanting:
                        found.append((gateway, wanting))
        return found

    def send_something(self) -> None:
        random = self.boxes.world.random
        gateway, logs = random.choice(self.senders())
        tid = gateway.attempt.task_attempt_id
        if random.random() < self.boxes.application.settings.loose:
            count = self.coordinator.loose_sent[tid] = self.coordinator.loose_sent.get(tid, 0) + 1
            gateway.send(f"{tid}|~{count}", loose=True)
            return
        log = random.choice(logs)
        keys = self.coordinator.logs[gateway.attempt.subtask][gateway.attempt.attempt]
        key = next(key for key, other in keys.items() if other is log)
        event = f"d{len(log.sent)}"
        log.sent.append(event)
        gateway.send(f"{tid}|{key}:{event}")

    def end_snapshot(self) -> None:
        """``checkpoint_coordinator`` returns: this is the cut. Or it fails."""
        boxes, world = self.boxes, self.boxes.world
        checkpoint_id, self.snapshotting = self.snapshotting, None
        assert checkpoint_id is not None
        if not world.calm and world.random.random() < 0.02:
            if world.random.random() < 0.5:  # it raised; else it took too long
                boxes.bridge.append(GlobalFailureRaised(OPERATOR, "checkpoint_coordinator"))
            boxes.tracker.append(CoordinatorSnapshotFailed(checkpoint_id, "no"))
            return
        state = self.coordinator.snapshot(checkpoint_id)
        for handles in self.coordinator.handles.values():
            for gateway in handles.values():
                gateway.record.cut(checkpoint_id)
                gateway.box.append(CutReached(checkpoint_id))
        boxes.tracker.append(CoordinatorSnapshotTaken(checkpoint_id, state, self.taken.at_this_moment()))

    # --- the mailbox ---

    def receive(self) -> None:
        coordinator, order = self.coordinator, self.order
        message = self.boxes.coordinator.popleft()
        match message:
            case ("event", gateway, seq, payload, sender):
                if self.take(gateway, payload, sender) is not None:
                    gateway.box.append(ItemTaken(seq))
            case ("request", gateway, seq, payload, request_id):
                self.hear_request(gateway, seq, payload, request_id)
            case ("snapshot", checkpoint_id, savepoint):
                order.snapshot_asked(checkpoint_id, savepoint)
                self.snapshotting = checkpoint_id
            case ("over", checkpoint_id, completed):
                order.checkpoint_over(checkpoint_id, completed)
                if completed:
                    self.check_committed(checkpoint_id)
            case ("savepoint_over", checkpoint_id):
                order.savepoint_over(checkpoint_id)
            case ("ready", gateway, beside):
                order.ready(gateway.attempt.subtask, gateway.attempt.attempt, beside)
                coordinator.ready(gateway)
                self.taken.begin(gateway.attempt, gateway.events_restored)
                gateway.box.append(ReadyAnnounced())
            case ("finished", attempt):
                coordinator.finish(attempt.subtask, attempt.attempt)
            case ("run_ended", run_id, succeeded):
                order.run_ended(run_id, succeeded)
                coordinator.handles.clear()
                if succeeded:
                    self.check_whole_run(run_id)
            case ("failed", attempt, reason, accepted, beside):
                order.failed_attempt(attempt.subtask, attempt.attempt, accepted, beside)
                self.boxes.world.figures.count_failure(reason.kind.value)
                coordinator.over(attempt.subtask, attempt.attempt)
                self.taken.forget(attempt)
            case ("reset", subtask, checkpoint_id):
                self.boxes.world.figures.resets += 1
                order.reset(subtask, checkpoint_id)
                coordinator.reset(subtask, checkpoint_id)
            case ("reset_all", checkpoint_id, state):
                self.boxes.world.figures.resets += 1
                order.reset_all(checkpoint_id)
                coordinator.reset_all(state)
                self.taken.clear()

    def take(self, gateway: Gateway, payload: str, sender: int | None) -> Log | None:
        """An event comes to the coordinator; None when its attempt is over: dropped in one place (H3)."""
        attempt = gateway.attempt
        if attempt.attempt not in self.coordinator.handles.get(attempt.subtask, {}):
            return None
        self.order.event(attempt.subtask, attempt.attempt)
        subtask = attempt.subtask if sender is None else sender
        self.taken.take(attempt, subtask)
        first, key, event = split_wire_form(payload)
        demand(first == subtask, f"H52: {payload} comes in the name of subtask {subtask}")
        gateway.record.came_up(payload, self.taken.position(subtask))
        log = self.coordinator.logs[attempt.subtask][attempt.attempt][key]
        log.received.append(event)
        self.taken.taken()
        figures = self.boxes.world.figures
        figures.events_up += 1
        figures.events_restored += sender is not None
        return log

    def hear_request(self, gateway: Gateway, seq: int, payload: str, request_id: int) -> None:
        if self.take(gateway, payload, None) is None:
            return
        self.unanswered.append((gateway, payload, request_id))
        gateway.box.append(ItemTaken(seq))
        if self.boxes.world.random.random() >= self.boxes.application.settings.late_answers:
            self.answer_one(len(self.unanswered) - 1)

    def answer_one(self, place: int | None = None) -> None:
        """Answer a request, any one unless ``place`` names it; to an attempt that is over, nothing is said."""
        random, subtasks = self.boxes.world.random, self.coordinator.handles
        gateway, payload, request_id = self.unanswered.pop(
            random.randrange(len(self.unanswered)) if place is None else place
        )
        attempt = gateway.attempt
        if attempt.attempt not in subtasks.get(attempt.subtask, {}):
            return
        _, key, event = split_wire_form(payload)
        answer = f"a{event}"
        self.coordinator.logs[attempt.subtask][attempt.attempt][key].answers.append(answer)
        gateway.record.answered[request_id] = answer
        self.boxes.world.figures.requests += 1
        gateway.box.append(AnswerSubmitted(request_id, "", answer.encode()))

    # --- what must be true of the whole ---

    def check_whole_run(self, run_id: int) -> None:
        """A run that succeeded has exchanged everything, once, for every key."""
        target = self.boxes.world.target(run_id)
        for key in range(self.boxes.application.settings.keys):
            log = self.coordinator.base_of(key)
            check_whole(f"coordinator's view of key {key}", log.received, log.sent, target)

    def check_committed(self, checkpoint_id: int) -> None:
        """Behind the end of a good run, a checkpoint that covers all of it commits its last output."""
        if self.order.uncommitted:
            state = read_coordinator(self.coordinator.snapshots[checkpoint_id])[0]
            base = self.coordinator.base
            if all(state[key].plain() == log.plain() for key, log in base.items()):
                self.order.uncommitted = ""
