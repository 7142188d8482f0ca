# SPDX-License-Identifier: Apache-2.0

"""The contract's invariant, checked over random runs of both machines with a breaking channel and checkpoints.

The tests compare both ends at each acknowledged checkpoint. Downward, the subtask's state holds exactly the events that
the coordinator had submitted at its cut. Upward, the events that the coordinator had received at its cut, followed
by those in the subtask's snapshot, are exactly the events that the subtask had sent at its snapshot. The subtask's
count of sent events equals the coordinator's count of received ones (H32).

Up to three checkpoints are open at a time. Some are aborted at a random moment, some are declined, and some are
savepoints. A later one that completes subsumes those before it. Some barriers travel apart from the items: they arrive
at any later moment, twice, or at no subtask.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from protocol.gateway import types as g
from protocol.subtask import types as s
from protocol.wire.messages import HeldEvent
from tests.protocol.both_ends import World


@dataclass
class Pending:
    """A checkpoint as its driver sees it."""

    savepoint: bool = False
    heard_at_cut: int = -1
    submitted_at_cut: int = -1
    sent_up_at_snapshot: int = -1
    steps: deque[str] = field(default_factory=lambda: deque(["closed", "cut", "drained", "barrier", "acknowledged"]))


@dataclass
class Stored:
    """A checkpoint in which both sides took part."""

    heard: int
    submitted: int
    sent_up: int
    held: tuple[HeldEvent, ...]
    events_sent: int


class CheckpointedWorld(World):
    """A world whose operator reads its mailbox and whose driver takes checkpoints."""

    def __init__(self, seed: int, held: tuple[HeldEvent, ...] = (), events_sent: int = 0, concurrent: int = 2) -> None:
        super().__init__(seed, held, events_sent)
        self.restored_events_sent = events_sent
        self.concurrent = concurrent
        self.handled: list[bytes] = []  # by the operator
        self.pending: dict[int, Pending] = {}
        self.next_checkpoint = 1
        self.stored: list[Stored] = []
        self.told: list[s.MailboxItem] = []
        self.barriers_apart: list[g.InjectBarrier] = []  # in flight apart from the items
        self.savepoints: set[int] = set()

    def read_mailbox(self) -> None:
        if not self.mailbox:
            return
        match self.mailbox.popleft():
            case s.MailboxEvent(payload):
                self.handled.append(payload)
            case s.MailboxBarrier(checkpoint_id) if not self.subtask.wants_snapshot(checkpoint_id):
                pass
            case s.MailboxBarrier(checkpoint_id):
                if self.random.random() < 0.1:
                    self.drive_subtask(s.SnapshotRefused(checkpoint_id, "disk full"))
                else:
                    state = b"%d" % len(self.handled)
                    if checkpoint_id in self.pending:
                        self.pending[checkpoint_id].sent_up_at_snapshot = len(self.sent_up)
                    self.drive_subtask(s.SnapshotTaken(checkpoint_id, state))
            case told:
                self.told.append(told)

    def advance_checkpoint(self) -> None:
        self.hear_reports()
        if len(self.pending) < self.concurrent and self.random.random() < 0.3:
            self.pending[self.next_checkpoint] = Pending(savepoint=self.random.random() < 0.2)
            self.drive_gateway(g.CloseRequested(self.next_checkpoint))
            self.next_checkpoint += 1
        for checkpoint_id, pending in list(self.pending.items()):
            if checkpoint_id not in self.pending:
                continue  # subsumed meanwhile
            if self.random.random() < 0.01:
                self.end(checkpoint_id, g.CheckpointOutcome.ABORTED)
            elif pending.steps and pending.steps[0] == "cut" and self.may_cut(checkpoint_id):
                pending.steps.popleft()
                pending.heard_at_cut, pending.submitted_at_cut = len(self.heard), len(self.submitted)
                self.drive_gateway(g.CutReached(checkpoint_id))
            elif pending.steps and pending.steps[0] == "barrier":
                pending.steps.popleft()
                self.drive_gateway(g.BarrierRequested(checkpoint_id, apart=self.random.random() < 0.4))
            elif not pending.steps and self.random.random() < 0.5:
                self.complete(checkpoint_id, pending)

    def complete(self, checkpoint_id: int, pending: Pending) -> None:
        if pending.savepoint:
            self.savepoints.add(checkpoint_id)
            self.end(checkpoint_id, g.CheckpointOutcome.SAVEPOINT)
            return
        for lower in [other for other in self.pending if other < checkpoint_id]:
            self.end(lower, g.CheckpointOutcome.ABORTED)
        self.end(checkpoint_id, g.CheckpointOutcome.COMPLETED)

    def end(self, checkpoint_id: int, outcome: g.CheckpointOutcome) -> None:
        del self.pending[checkpoint_id]
        self.drive_gateway(g.CheckpointOver(checkpoint_id, outcome))

    def carry_barrier(self) -> None:
        """Deliver a barrier apart from the items: late, out of order, or a second time."""
        if self.barriers_apart:
            barrier = self.random.choice(self.barriers_apart)
            if self.random.random() < 0.7:
                self.barriers_apart.remove(barrier)
            self.drive_subtask(s.BarrierArrived(barrier.checkpoint_id, barrier.events_before))

    def may_cut(self, checkpoint_id: int) -> bool:
        """Take the coordinator's snapshots one after the other."""
        return all("cut" not in self.pending[other].steps for other in self.pending if other < checkpoint_id)

    def hear_reports(self) -> None:
        reports, self.reports = self.reports, []
        for report in reports:
            match report:
                case g.ReportClosed(n):
                    self.passed(n, "closed")
                case g.ReportDrained(n):
                    self.passed(n, "drained")
                case g.ReportAcknowledged(n, state, held, events_sent):
                    self.passed(n, "acknowledged")
                    self.check_checkpoint(n, state, held, events_sent)
                case g.ReportDeclined(n, _):
                    if n in self.pending:
                        self.end(n, g.CheckpointOutcome.ABORTED)
                case g.InjectBarrier():
                    self.barriers_apart.append(report)

    def passed(self, checkpoint_id: int, step: str) -> None:
        if checkpoint_id in self.pending:
            assert self.pending[checkpoint_id].steps.popleft() == step

    def check_checkpoint(self, checkpoint_id: int, state: bytes, held: tuple[HeldEvent, ...], events_sent: int) -> None:
        pending = self.pending.get(checkpoint_id)
        if pending is None:
            return
        assert int(state) == pending.submitted_at_cut, "the barrier and an event have overtaken one another"
        heard = self.heard[: pending.heard_at_cut]
        assert heard + [event.payload for event in held] == self.sent_up[: pending.sent_up_at_snapshot]
        assert events_sent == self.restored_events_sent + len(heard)  # H32
        self.stored.append(Stored(len(heard), pending.submitted_at_cut, pending.sent_up_at_snapshot, held, events_sent))


def run(world: CheckpointedWorld, steps: int) -> CheckpointedWorld:
    deeds = [
        world.send_down, world.send_up, world.carry_down, world.carry_up, world.take,
        world.read_mailbox, world.read_mailbox, world.advance_checkpoint, world.advance_checkpoint,
        world.carry_barrier,
    ]  # fmt: skip
    world.connect()
    world.drive_subtask(s.OperatorOpened())
    world.drive_gateway(g.ReadyAnnounced())
    for _ in range(steps):
        world.now += world.random.random()
        if world.random.random() < (0.02 if world.connected else 0.2):
            (world.lose if world.connected else world.connect)()
        world.random.choice(deeds)()
        world.check_order()
    return world


def settle(world: CheckpointedWorld) -> None:
    """Abort every pending checkpoint and deliver everything in flight."""
    world.hear_reports()
    for checkpoint_id in list(world.pending):
        world.end(checkpoint_id, g.CheckpointOutcome.ABORTED)
    world.settle()
    while world.mailbox:
        world.read_mailbox()
    world.settle()


@pytest.mark.parametrize("concurrent", [1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_both_ends_of_every_checkpoint_agree(seed: int, concurrent: int) -> None:
    # The invariant; H23, H31, H32, H40, H41, H42, H43, H44, H49
    print(f"seed {seed}, {concurrent} at a time")
    world = run(CheckpointedWorld(seed, concurrent=concurrent), 1500)
    settle(world)
    assert world.stored, "no checkpoint was ever acknowledged: this run has shown nothing"
    assert world.arrived == world.submitted
    assert world.heard == world.sent_up
    assert world.failed == []
    assert world.gateway.statistics().closed_for == ()
    assert world.subtask.statistics().closed_for == ()


@pytest.mark.parametrize("seed", range(25))
def test_an_attempt_restored_from_any_checkpoint_loses_and_doubles_nothing(seed: int) -> None:
    # H31, H32, H52
    print(f"seed {seed}")
    before = run(CheckpointedWorld(seed), 900)
    stored = before.random.choice(before.stored)
    after = CheckpointedWorld(seed + 1000, stored.held, stored.events_sent)
    after.next_up = stored.sent_up
    run(after, 600)
    settle(after)
    heard = before.heard[: stored.heard] + after.heard
    assert heard == [b"u%d" % place for place in range(len(heard))]
    assert after.heard == after.sent_up


def test_both_sides_hear_of_every_end_but_that_of_a_savepoint() -> None:
    # H45, H49: the operator is told, too, whatever happened to its barrier
    savepoints: set[int] = set()
    for seed in range(20):
        world = run(CheckpointedWorld(seed), 600)
        settle(world)
        savepoints |= world.savepoints
        ends = s.MailboxCompleted | s.MailboxAborted
        over = [told.checkpoint_id for told in world.told if isinstance(told, ends)]
        others = set(range(1, world.next_checkpoint)) - world.savepoints
        assert sorted(over) == sorted(others), f"seed {seed}"
    assert savepoints, "no savepoint was ever taken: these runs have shown nothing of them"
