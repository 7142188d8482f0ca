# SPDX-License-Identifier: Apache-2.0

"""Omits orders of steps that cannot make a difference.

Two steps commute if either order leads to the same state and neither prevents the other. A set of steps may be
explored alone if nothing that can happen before one of them touches what they touch. Every other order is then an
explored one with commuting steps exchanged, so the same ends are reached, and the same steps of each part are taken
(persistent sets). The steps of a world are finite, because each costs a budget or consumes a message, so nothing is put
off forever. Every check happens inside the step of one part. The reductions are:

*Immediately*, without a state in between:
- The coordinator takes an event, or a message with no effect visible to others: it has one mailbox, and its own sends
  do not depend on what it has received. A ready subtask is not such a message: what follows is written to its task,
  before or after the messages of a checkpoint (H66). ``ItemTaken`` goes with it if no connection can break any more:
  only the resume after a loss depends on what was taken. Nothing waits for the other items confirmed with it.
- The ledger takes every message. A message that waits there is equivalent to one sent later: a task that died would
  have done nothing more, a gateway that has reported would not yet have read on, a retry would not yet have started.
- The tracker takes a message that has no effect outside of it. Everything that people and the storage may send it is
  tried in both orders, and must give the same result.
- A gateway takes from its mailbox a message that only leads to something written to its task, if nothing that could
  come up would write as well: it holds nothing that an acknowledgement would release.
- A task reads when it can do nothing else, as in *first*.
- A gateway takes a confirmation that settles no event, and a task takes any confirmation: the items that it trims
  matter only after a loss, and the resume names the same items again. For the same reason, it makes no difference which
  of the peer's items an item of a checkpoint confirms. That depends on the order in which a part reads and writes.

*First*, before anything else:
- The steps of one task that has something to read, other than its own end: only the task reads there, and others write
  after it. The loss of its connection is one of these steps. Its death is not: dying before reading is the same as
  dying after reading without any effect that others have seen.
- The two next steps of a gateway, if there is one in its mailbox and one on its wire, and both only lead to something
  written to its task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from protocol.barrier_tracker import RestoreAttempt
from protocol.gateway import types as g
from protocol.wire.messages import AttemptEnded, Refused
from tests.exploration.coordinator_end import Failed, Reset
from tests.exploration.interning import Broken, Link, Memo, Numbered
from tests.exploration.steps import Step, Steps
from tests.exploration.vocabulary import AttemptFinished, CheckpointEnded, EventCame, SavepointEnded, Suspected, To
from tests.exploration.world import (
    BUDGETS,
    COORDINATOR_BOX,
    GATEWAY,
    GATEWAY_BOX,
    LEDGER_BOX,
    LINK,
    NEVER_ENDED,
    TASK,
    TRACKER,
    TRACKER_BOX,
    WIDTH,
    Budget,
    State,
    World,
    base_of,
)

TAKEN_IMMEDIATELY = (EventCame, CheckpointEnded, SavepointEnded, Failed, Reset, AttemptFinished, Suspected)
LOCAL = (To.DOWN, To.APART)
ENDS = (AttemptEnded, Refused)


class SlotSteps(NamedTuple):
    """The steps of one attempt's parts: those to explore first, if any, and all of them."""

    first: tuple[Step, ...]
    pair: tuple[Step, ...]
    every: tuple[Step, ...]


class Reduction:
    """Selects the steps that are enough. See the module."""

    def __init__(self, world: World, steps: Steps) -> None:
        self.world = world
        self.steps = steps
        self._free = Memo[tuple[int, int, int], bool](lambda key: self._find_free(*key))
        self._heard = Memo(self._find_heard)
        self._immediate: dict[tuple[int, ...], Step | None] = {}
        self._of_slot: dict[tuple[int, ...], SlotSteps] = {}

    # --- immediate steps ---

    def settle(self, state: list[int], done: list[Step]) -> None:
        """Take every immediate step; ``done`` collects them. Raises ``Broken``."""
        while True:
            step = self._next_immediate(state)
            if step is None:
                return
            done.append(step)
            self.steps.do(state, step)

    def _next_immediate(self, state: list[int]) -> Step | None:
        world = self.world
        head = world.boxes.head
        if state[COORDINATOR_BOX]:
            message = head[state[COORDINATOR_BOX]]
            if self._heard[message]:
                return Step("the coordinator takes", -1, message)
        if state[LEDGER_BOX]:
            return Step("the ledger takes", -1, head[state[LEDGER_BOX]])
        if state[TRACKER_BOX]:
            message = head[state[TRACKER_BOX]]
            if self.is_free(state[TRACKER], message, state[BUDGETS]):
                return Step("the tracker takes", -1, message)
        open_ = world.trackers.facts[state[TRACKER]].open
        for slot in range(world.slots):
            base = base_of(slot)
            if state[base + GATEWAY_BOX] or state[base + LINK]:
                key = slot, slot + 1 in open_, state[BUDGETS], *state[base : base + WIDTH]
                if key not in self._immediate:
                    self._immediate[key] = self._immediate_of_slot(state, slot, slot + 1 in open_)
                step = self._immediate[key]
                if step is not None:
                    return step
        return None

    def _find_heard(self, message: int) -> bool:
        """Whether the coordinator takes this message immediately."""
        value: Any = self.world.messages.values[message]
        asks = isinstance(value, EventCame) and value.request_id is not None
        return isinstance(value, TAKEN_IMMEDIATELY) and not asks

    def _immediate_of_slot(self, state: list[int], slot: int, is_open: bool) -> Step | None:
        world, base, head = self.world, base_of(slot), self.world.boxes.head
        if state[base + GATEWAY_BOX]:
            message = head[state[base + GATEWAY_BOX]]
            gone = not is_open or (world.kind(message) is g.ItemTaken and not world.may_resume(state, slot))
            if gone or self._only_writes(state[base + GATEWAY], message):
                return Step("the gateway takes", slot, message)
        if state[base + LINK]:
            wire = world.readable(state, slot)
            if wire and world.settles_nothing(state[base + GATEWAY], head[wire]):
                return Step("the gateway reads", slot, head[wire])
            link = world.links.values[state[base + LINK]]
            if self._reads_first(state, base) and self._only_reads(state, base, link):
                return Step("the task reads", slot, head[link.down])
        return None

    def _reads_first(self, state: State | list[int], base: int) -> bool:
        """Whether a live task has something to read, other than its end, which Spark would learn of."""
        world = self.world
        link = world.links.values[state[base + LINK]]
        alive = world.tasks.facts[state[base + TASK]].life in NEVER_ENDED
        return alive and link.down > 0 and not link.apart and world.kind(world.boxes.head[link.down]) not in ENDS

    def _only_reads(self, state: list[int], base: int, link: Link) -> bool:
        """Whether the task can only read, and its connection will not break."""
        world = self.world
        facts = world.tasks.facts[state[base + TASK]]
        if facts.sends or facts.abandons or facts.at_barrier or facts.may_finish or facts.may_leave or link.broken:
            return False
        if facts.may_begin_urgent or facts.may_end_urgent or facts.asks_permit:
            return False
        if facts.takes or facts.open_calls or facts.leaves or facts.uploads:
            return False
        return not (facts.attached and world.budgets[state[BUDGETS]][Budget.DROPS])

    def _only_writes(self, gateway: int, message: int) -> bool:
        value = self.world.messages.values[message]
        facts = self.world.gateways.facts[gateway]
        match value:
            case g.EventSubmitted() | g.AnswerSubmitted() | RestoreAttempt() | g.ReadyAnnounced():
                return True
            case g.CloseRequested():
                return facts.holds_nothing
            case g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.COMPLETED):
                return facts.holds_nothing and checkpoint_id not in facts.closed_for
        return False

    def is_free(self, tracker: int, message: int, budgets: int) -> bool:
        """Whether a message has no effect, now or after any other message that the tracker may receive first."""
        return self._free[tracker, message, budgets]

    def _find_free(self, tracker: int, message: int, budgets: int) -> bool:
        try:
            return self._is_free(tracker, message, budgets)
        except Broken:
            return False

    def _is_free(self, tracker: int, message: int, budgets: int) -> bool:
        take = self.world.trackers.step
        after, out = take(tracker, message)
        if out:
            return False
        for step in self.steps.spontaneous(tracker, budgets):
            left = budgets if step.budget < 0 else self.world.spend(budgets, step.budget)
            told, said = take(tracker, step.message)
            if step not in self.steps.spontaneous(after, budgets) or take(after, step.message) != (
                take(told, message)[0],
                said,
            ):
                return False
            if not self.is_free(told, message, left):
                return False
        return True

    # --- steps to explore first ---

    def enough(self, state: State) -> list[Step]:
        """Return the steps to explore from here."""
        pair: tuple[Step, ...] = ()
        every: list[Step] = []
        for slot in range(self.world.slots):
            base = base_of(slot)
            key = slot, state[BUDGETS], *state[base : base + WIDTH]
            known = self._of_slot.get(key)
            if known is None:
                known = self._of_slot[key] = self._sort_steps(state, slot)
            if known.first:
                return list(known.first)
            pair = pair or known.pair
            every += known.every
            every += self.steps.of_engine(state, slot)
        return list(pair) if pair else [*self.steps.of_driver(state), *every]

    def _sort_steps(self, state: State, slot: int) -> SlotSteps:
        world, base = self.world, base_of(slot)
        of_gateway = tuple(self.steps.of_gateway(state, slot))
        wire, box = world.readable(state, slot), state[base + GATEWAY_BOX]
        pair = False
        if wire and box and not world.budgets[state[BUDGETS]][Budget.TIMEOUTS]:
            pair = all(self._is_local(state[base], world.boxes.head[place]) for place in (wire, box))
        return SlotSteps(
            tuple(self.steps.of_task(state, slot, dies=False)) if self._reads_first(state, base) else (),
            of_gateway if pair else (),
            (*of_gateway, *self.steps.of_task(state, slot)),
        )

    def _is_local(self, gateway: int, message: int) -> bool:
        out: Numbered = self.world.gateways.step(gateway, message)[1]
        return all(to in LOCAL for to, _ in out)
