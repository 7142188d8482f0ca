"""The simulation as a test: fresh worlds each time, and proof that its checkers can see.

A failing run prints its seed; ``python -m tests.simulation --seed N`` replays it with its story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

import pytest

from protocol.attempts import AttemptLedger, ResetSubtask
from protocol.barrier_tracker import (
    AbortCheckpoint,
    AttemptFailed,
    AttemptReady,
    BarrierTracker,
    CompletedCheckpoint,
    RestoreAttempt,
    StoreCheckpoint,
    TellReady,
    TellReset,
    rescaled,
    tracker,
)
from protocol.barrier_tracker.pending import Part, PendingCheckpoint
from protocol.barrier_tracker.under_way import CheckpointsUnderWay
from protocol.downward_intake import DownwardIntake
from protocol.downward_valve import DownwardValve
from protocol.gateway import GatewayMachine
from protocol.gateway_types import ConfirmEvent, EventSubmitted, FailAttempt, FailEvent, SendToAttempt
from protocol.messages import CheckpointAcknowledged, EventMessage
from protocol.streams import ConnectionAttached
from protocol.subtask import SubtaskMachine
from protocol.subtask_types import BarrierArrived, PutInMailbox, SendToCoordinator
from protocol.upward_valve import Phase, UpwardValve
from spark_bridge import operators
from tests.simulation.__main__ import main
from tests.simulation.coordinator import Coordinator
from tests.simulation.world import World, run_world

WORLDS = 40
HUNT_MAX = 1000  # worlds until a broken machine must have been caught


def test_fresh_worlds_keep_the_contract() -> None:
    # The invariant, H4, H10-H24, H28, H30-H33, H40-H50, H52, H55, H57
    first = SystemRandom().randrange(1_000_000_000)
    print(f"seeds {first}..{first + WORLDS - 1}")
    for seed in range(first, first + WORLDS):
        world, error = run_world(seed)
        if error is not None:
            print("\n".join(world.story[-100:]))
            raise AssertionError(f"python -m tests.simulation --seed {seed}") from error


def test_a_seed_tells_the_same_story_twice() -> None:
    seed = Random().randrange(1_000_000)
    print(f"seed {seed}")
    first, second = World(seed), World(seed)
    first.run()
    second.run()
    assert first.story == second.story
    assert first.totals() == second.totals()


def test_the_command_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "0", "--seeds", "3"]) == 0
    assert "no rule was broken" in capsys.readouterr().out


def test_the_command_names_the_seed_that_broke_a_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_duplicates(monkeypatch)
    seed = hunt()[0]
    assert main(["--first", str(seed), "--seeds", "5"]) == 1
    assert f"python -m tests.simulation --seed {seed}" in capsys.readouterr().out
    assert main(["--seed", str(seed)]) == 1


# --- machines that are broken on purpose --------------------------------------------------------------------------


def hunt(eager: float | None = None) -> tuple[int, str]:
    """The first world that a broken machine does not survive, and how it was seen."""
    for seed in range(HUNT_MAX):
        _, error = run_world(seed, eager)
        if error is not None:
            return seed, str(error)
    raise AssertionError(f"{HUNT_MAX} worlds, and nobody has noticed")


def edit(monkeypatch: pytest.MonkeyPatch, machine: type, change: Callable[[Any, list[Any]], list[Any]]) -> None:
    """Put ``change(input, effects)`` behind everything that a kind of machine says."""
    for name in ("handle", "handle_batch"):
        if (method := getattr(machine, name, None)) is None:
            continue

        def edited(self: Any, input: Any, now: float, method: Callable[..., Any] = method) -> list[Any]:
            return change(input, list(method(self, input, now)))

        monkeypatch.setattr(machine, name, edited)


def break_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some events reach the operator twice (H22)."""

    def twice(_: Any, effects: list[Any]) -> list[Any]:
        events = [e for e in effects if isinstance(e, PutInMailbox) and b":d3" in getattr(e.item, "payload", b"")]
        return [*effects, *events]

    edit(monkeypatch, SubtaskMachine, twice)


def break_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reconnect, the first of what is unconfirmed is forgotten (H24)."""

    def forgetful(input: Any, effects: list[Any]) -> list[Any]:
        resent = [e for e in effects if isinstance(e, SendToAttempt) and isinstance(e.message, EventMessage)]
        if isinstance(input, ConnectionAttached) and resent:
            effects.remove(resent[0])
        return effects

    edit(monkeypatch, GatewayMachine, forgetful)


def break_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event counts as confirmed when it is sent (H23)."""

    def hasty(input: Any, effects: list[Any]) -> list[Any]:
        return [ConfirmEvent(input.event_id), *effects] if isinstance(input, EventSubmitted) else effects

    edit(monkeypatch, GatewayMachine, hasty)


def break_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unconfirmed at the end of an attempt is forgotten, not failed (H26)."""
    edit(monkeypatch, GatewayMachine, lambda _, effects: [e for e in effects if not isinstance(e, FailEvent)])


def break_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the upward valve holds is left out of the snapshot (H31)."""

    def lossy(_: Any, effects: list[Any]) -> list[Any]:
        return [
            SendToCoordinator(replace(e.message, held=()))
            if isinstance(e, SendToCoordinator) and isinstance(e.message, CheckpointAcknowledged)
            else e
            for e in effects
        ]

    edit(monkeypatch, SubtaskMachine, lossy)


def break_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateways hear of the cut a moment late: an event slips in between (H40, H41)."""
    checkpoint_coordinator = Coordinator.checkpoint_coordinator

    async def late(self: Coordinator, checkpoint_id: int) -> bytes:
        state = await checkpoint_coordinator(self, checkpoint_id)
        if self.can_send():
            self.send_something()
        return state

    monkeypatch.setattr(Coordinator, "checkpoint_coordinator", late)


def break_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure gives the pending checkpoint up, and nobody is told (H16, H45)."""

    def silent(input: Any, effects: list[Any]) -> list[Any]:
        return [e for e in effects if not (isinstance(input, AttemptFailed) and isinstance(e, AbortCheckpoint))]

    edit(monkeypatch, BarrierTracker, silent)


def break_reset_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset names the next checkpoint, not the last one (H18)."""

    def wrong(_: Any, effects: list[Any]) -> list[Any]:
        return [TellReset(e.subtask, e.checkpoint_id + 1) if isinstance(e, TellReset) else e for e in effects]

    edit(monkeypatch, BarrierTracker, wrong)


def break_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that a subtask has to be reset (H10)."""
    edit(monkeypatch, AttemptLedger, lambda _, effects: [e for e in effects if not isinstance(e, ResetSubtask)])


def break_withholding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt is announced while the others are closing, ahead of the coordinator's snapshot."""

    def eager(self: BarrierTracker, input: AttemptReady, now: float, out: list[Any]) -> None:
        self._attempts.by_task[input.attempt.task_attempt_id].ready = True
        out.append(TellReady(input.attempt))

    monkeypatch.setitem(tracker._HANDLERS, AttemptReady, eager)


def break_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subtask that waits for its restart takes part as empty, though it will restore something (H47)."""
    init = PendingCheckpoint.__init__

    def forgetful(self: PendingCheckpoint, checkpoint_id: int, deadline: float, parts: Any, at_rest: Any) -> None:
        init(self, checkpoint_id, deadline, parts, {})

    monkeypatch.setattr(PendingCheckpoint, "__init__", forgetful)


def break_reopening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway reopens when the barrier leaves, not when the attempt has acknowledged (H41)."""
    send_barrier, reopen = DownwardValve.send_barrier, DownwardValve._reopen

    def hasty(self: DownwardValve, checkpoint_id: int, apart: bool, effects: list[Any]) -> None:
        send_barrier(self, checkpoint_id, apart, effects)
        only_once(self, checkpoint_id, 0.0, effects)

    def only_once(self: DownwardValve, checkpoint_id: int, now: float, effects: list[Any]) -> None:
        if checkpoint_id in self.closed:
            reopen(self, checkpoint_id, now, effects)

    monkeypatch.setattr(DownwardValve, "send_barrier", hasty)
    monkeypatch.setattr(DownwardValve, "_reopen", only_once)


def break_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker does not compare the two halves of a checkpoint (H32); by itself that harms nothing."""
    monkeypatch.setattr(Part, "why_torn", lambda self: "")


def break_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upward valve holds nothing (H31), and nobody compares."""
    break_comparison(monkeypatch)
    submit = UpwardValve.submit

    def leaky(self: UpwardValve, submitted: Any, effects: list[Any]) -> None:
        closed, self._closed = self._closed, []
        try:
            submit(self, submitted, effects)
        finally:
            self._closed = closed

    monkeypatch.setattr(UpwardValve, "submit", leaky)


def break_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upward valve opens for one checkpoint while it is closed for another (H43), and nobody compares."""
    break_comparison(monkeypatch)

    def early(self: UpwardValve, checkpoint_id: int, effects: list[Any]) -> None:
        self._closed.remove(checkpoint_id)
        closed, self._closed = self._closed, []
        self._make_room(effects)
        self._closed = closed

    monkeypatch.setattr(UpwardValve, "_open", early)


def break_restore_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset refers to a checkpoint that is being written, ahead of its completion (H18, FLINK-20290)."""
    handle = BarrierTracker.handle

    def early(self: BarrierTracker, input: Any, now: float) -> list[Any]:
        effects = handle(self, input, now)
        for effect in effects:
            if isinstance(effect, StoreCheckpoint):
                self._completed = effect.checkpoint
        return effects

    monkeypatch.setattr(BarrierTracker, "handle", early)


def break_rescale(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another parallelism, the last held event of each subtask is lost (H52)."""

    def lossy(checkpoint: CompletedCheckpoint, parallelism: int) -> CompletedCheckpoint:
        whole = rescaled(checkpoint, parallelism)
        if whole is checkpoint:
            return whole
        parts = {subtask: replace(part, held=part.held[:-1]) for subtask, part in whole.subtask_states.items()}
        return replace(whole, subtask_states=parts)

    monkeypatch.setattr(operators, "rescaled", lossy)


def break_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restore, positions are counted from nothing again, on both sides (H32)."""

    def forgetful(_: Any, effects: list[Any]) -> list[Any]:
        return [replace(e, events_sent=0) if isinstance(e, RestoreAttempt) else e for e in effects]

    edit(monkeypatch, BarrierTracker, forgetful)


def break_loss_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deaf attempt is failed for an event that may be lost (H28)."""

    def strict(input: Any, effects: list[Any]) -> list[Any]:
        lost = [e for e in effects if isinstance(e, SendToAttempt)]
        if isinstance(input, EventSubmitted) and input.loss_tolerant and lost:
            return [*effects, FailAttempt("not confirmed")]
        return effects

    edit(monkeypatch, GatewayMachine, strict)


def break_barrier_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier that comes on its own way does not wait for the items before it (H23)."""

    def hasty(self: DownwardIntake, barrier: BarrierArrived, effects: list[Any]) -> None:
        if self._valve.phase(barrier.checkpoint_id) is Phase.CLOSED:
            self._meet_barrier(barrier.checkpoint_id, effects)

    monkeypatch.setattr(DownwardIntake, "take_barrier_apart", hasty)


def break_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway is drained at its cut, whatever is unconfirmed (H42)."""
    reach_cut = DownwardValve.reach_cut

    def careless(self: DownwardValve, checkpoint_id: int, effects: list[Any]) -> None:
        submitted, self._submitted = self._submitted, 0
        reach_cut(self, checkpoint_id, effects)
        self._submitted = submitted

    monkeypatch.setattr(DownwardValve, "reach_cut", careless)


def break_savepoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A savepoint becomes the point that resets refer to (H49)."""
    complete = CheckpointsUnderWay.complete

    def greedy(self: CheckpointsUnderWay, checkpoint_id: int, out: list[Any]) -> CompletedCheckpoint | None:
        pending = self.pending[checkpoint_id]
        complete(self, checkpoint_id, out)
        return pending.whole(self.parallelism)

    monkeypatch.setattr(CheckpointsUnderWay, "complete", greedy)


@pytest.mark.parametrize(
    ("break_it", "rules"),
    [
        (break_duplicates, ("H22",)),
        (break_resend, ("H22",)),
        (break_confirmation, ("H23", "H21")),
        (break_settling, ("H26",)),
        (break_held, ("invariant, up",)),
        (break_cut, ("invariant, down", "H23")),
        (break_abort, ("H16", "H43")),
        (break_reset_id, ("H18",)),
        (break_reset, ("H10",)),
        (break_withholding, ("invariant",)),
        (break_at_rest, ("invariant", "exactly once")),
        (break_reopening, ("invariant, down", "H23")),
        (break_closing, ("invariant, up", "H30", "H32")),
        (break_release, ("invariant, up", "H32")),
        (break_restore_point, ("H18",)),
        (break_rescale, ("invariant, up", "exactly once", "H30")),
        (break_position, ("H32",)),
        (break_loss_tolerance, ("H28",)),
        (break_savepoint, ("H18",)),
        (break_barrier_apart, ("H23",)),
        (break_drain, ("H42",)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_machine_is_caught(
    break_it: Callable[[pytest.MonkeyPatch], None], rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the machines' own invariants: the checkers stand on their own feet.
    for machine in (AttemptLedger, BarrierTracker, GatewayMachine, SubtaskMachine):
        monkeypatch.setattr(machine, "check_invariants", lambda self: None)
    break_it(monkeypatch)
    seed, what = hunt(eager=0.1)
    print(f"seed {seed}: {what}")
    assert any(rule in what for rule in rules), what
