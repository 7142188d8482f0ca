# SPDX-License-Identifier: Apache-2.0

"""The whole world: a state is a short tuple of numbers, and a step leads from one to another.

A state consists of the tracker, the coordinator and the ledger, each with its mailbox, and the budgets; then for each
attempt its gateway, that gateway's mailbox, its task, and the connections between the two. The order guarantees are
only those of the actors and of a connection: each mailbox has one reader and keeps the order in which it was written;
a connection keeps the order of each direction until it breaks; everything else may come in any order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from protocol.file_retention import UploadedFiles
from protocol.gateway.types import ItemTaken
from protocol.wire.messages import Confirm, Resume
from tests.exploration import vocabulary as v
from tests.exploration.coordinator_end import CoordinatorEnd, CoordinatorFacts
from tests.exploration.driver_ends import LedgerEnd, LedgerFacts, TrackerEnd, TrackerFacts
from tests.exploration.gateway_end import GatewayEnd, GatewayFacts
from tests.exploration.interning import Boxes, Link, Links, Memo, Messages, Numbered, Numbers, Population
from tests.exploration.scopes import Scope
from tests.exploration.subtask_end import RUN, Life, SubtaskEnd, SubtaskFacts
from tests.exploration.symmetry import Exchange, Exchanged

State = tuple[int, ...]
TRACKER, TRACKER_BOX, COORDINATOR, COORDINATOR_BOX, LEDGER, LEDGER_BOX, BUDGETS, SLOTS = range(8)
BOX_OF: dict[int, int] = {v.To.TRACKER: TRACKER_BOX, v.To.COORDINATOR: COORDINATOR_BOX, v.To.BRIDGE: LEDGER_BOX}
GATEWAY, GATEWAY_BOX, TASK, LINK = range(4)  # from the base of a slot
WIDTH = 4


class Budget(IntEnum):
    """The budgets of a world, each a field of its ``Scope``, in the order in which a state lists them."""

    CHECKPOINTS = 0
    SAVEPOINTS = 1
    ABORTS = 2
    FAILURES = 3
    DROPS = 4
    TIMEOUTS = 5
    DECLINES = 6
    STORE_FAILURES = 7
    FORGERIES = 8
    RUNS = 9
    INTERRUPTIONS = 10
    RESTARTS = 11
    UPLOAD_FAILURES = 12


NEVER_ENDED = (Life.WAITING, Life.RUNNING, Life.LEAVING)


def base_of(slot: int) -> int:
    return SLOTS + WIDTH * slot


class World:
    """The parts of one scope, and how a step changes a state.

    ``eager``: see ``reduction``. ``symmetric``: see ``symmetry``.
    """

    def __init__(self, scope: Scope, *, eager: bool, symmetric: bool) -> None:
        self.scope = scope
        self.eager = eager
        self.slots = scope.subtasks * scope.starts
        self.messages = Messages()
        self.boxes = Boxes()
        self.links = Links()
        self.trackers: Population[TrackerFacts] = Population(self.messages)
        self.coordinators: Population[CoordinatorFacts] = Population(self.messages)
        self.ledgers: Population[LedgerFacts] = Population(self.messages)
        self.gateways: Population[GatewayFacts] = Population(self.messages)
        self.tasks: Population[SubtaskFacts] = Population(self.messages)
        self.exchanged: Exchanged | None = None
        if symmetric and scope.subtasks == 2:
            exchange = Exchange(scope.starts)
            self.exchanged = Exchanged(exchange, self.messages, self.boxes, self.links)
        self._budgets: Numbers[tuple[int, ...]] = Numbers(lambda budgets: budgets)
        self.budgets = self._budgets.values
        self._kinds = Memo(self._kind)
        self._drivers: dict[int, Population[Any]] = {
            TRACKER: self.trackers,
            COORDINATOR: self.coordinators,
            LEDGER: self.ledgers,
        }
        self.loss = self.messages.number(v.LossNoticed())

    def initial(self) -> State:
        scope = self.scope
        state = [
            self.trackers.number(TrackerEnd(scope)),
            0,
            self.coordinators.number(CoordinatorEnd(scope)),
            0,
            self.ledgers.number(LedgerEnd(scope)),
            0,
            self._budgets.number(tuple(getattr(scope, budget.name.lower()) for budget in Budget)),
        ]
        for slot in range(self.slots):
            exchange = scope.events_up, scope.events_down
            task = SubtaskEnd(slot, slot // scope.starts, slot % scope.attempts, scope.subtasks, exchange)
            task.run_id = RUN + self.run_of(slot)
            task.asks, task.finishes, task.mode = scope.asks, scope.finishes, scope.mode
            task.abandons, task.parts, task.permits = scope.abandons, scope.parts, scope.permits
            task.limit, task.ordered, task.files = scope.in_flight, scope.ordered, scope.files
            task.uploaded = UploadedFiles() if scope.sweeps else None
            task.greeted, task.start_is_lost, task.has_urgent = scope.greets, scope.lost_starts, scope.urgent
            state += [
                self.gateways.number(GatewayEnd(slot, scope)),
                0,
                self.tasks.number(task),
                0,
            ]
        return tuple(state)

    def run_of(self, slot: int) -> int:
        """Which run the attempt in ``slot`` belongs to, from 0."""
        return slot % self.scope.starts // self.scope.attempts

    def slots_of_run(self, state: State | list[int]) -> list[int]:
        """The slots of the current run, or of the last one."""
        run = self.ledgers.facts[state[LEDGER]].run
        return [slot for slot in range(self.slots) if self.run_of(slot) == run]

    # --- numbers ---

    def spend(self, number: int, which: int) -> int:
        budgets = list(self.budgets[number])
        budgets[which] -= 1
        return self._budgets.number(tuple(budgets))

    def kind(self, message: int) -> type:
        """Return the class of a message, or of its content if it travels along a wire."""
        return self._kinds[message]

    def _kind(self, message: int) -> type:
        value = self.messages.values[message]
        return type(value.message if isinstance(value, v.CameUp | v.CameDown) else value)

    def lesser(self, state: State) -> tuple[State, bool]:
        """Return the lesser of this state and its renamed equivalent; and whether that is the renamed one."""
        if self.exchanged is None:
            return state, False
        found = self.other(state)
        return (found, True) if found < state else (state, False)

    def other(self, state: State) -> State:
        """Return the state with the names exchanged."""
        exchanged = self.exchanged
        assert exchanged is not None
        part, box = exchanged.part, exchanged.box
        other = [
            part(self.trackers, state[TRACKER]),
            box[state[TRACKER_BOX]],
            part(self.coordinators, state[COORDINATOR]),
            box[state[COORDINATOR_BOX]],
            part(self.ledgers, state[LEDGER]),
            box[state[LEDGER_BOX]],
            state[BUDGETS],
        ]
        half = WIDTH * self.scope.starts
        places = [*range(SLOTS + half, SLOTS + 2 * half, WIDTH), *range(SLOTS, SLOTS + half, WIDTH)]
        for base in places:
            other.append(part(self.gateways, state[base]))
            other.append(box[state[base + GATEWAY_BOX]])
            other.append(part(self.tasks, state[base + TASK]))
            other.append(exchanged.link[state[base + LINK]])
        return tuple(other)

    # --- steps of one part ---

    def driver(self, place: int, state: list[int], message: int) -> None:
        """Let the part of the driver at ``place`` take a message."""
        state[place], out = self._drivers[place].step(state[place], message)
        self.emit(state, -1, out)

    def gateway(self, state: list[int], slot: int, message: int) -> None:
        base = base_of(slot)
        before = self.gateways.facts[state[base]].over
        state[base], out = self.gateways.step(state[base], message)
        self.emit(state, slot, out)
        if not before and self.gateways.facts[state[base]].over:
            state[base + GATEWAY_BOX] = 0  # nothing reads the messages after the end
            self.forget_link(state, slot)

    def task(self, state: list[int], slot: int, message: int) -> None:
        base = base_of(slot)
        alive = self.tasks.facts[state[base + TASK]].life in NEVER_ENDED
        state[base + TASK], out = self.tasks.step(state[base + TASK], message)
        self.emit(state, slot, out)
        if alive and self.tasks.facts[state[base + TASK]].life not in NEVER_ENDED:
            link = self.links.values[state[base + LINK]]
            state[base + LINK] = self.links.number(link._replace(down=0, open=False, broken=False, apart=()))
            self.forget_link(state, slot)

    def forget_link(self, state: list[int], slot: int) -> None:
        """Forget everything on the way once both ends are over, because it no longer matters."""
        base = base_of(slot)
        if self.gateways.facts[state[base]].over and self.tasks.facts[state[base + TASK]].life not in NEVER_ENDED:
            state[base + LINK] = 0

    # --- routing of outputs ---

    def emit(self, state: list[int], slot: int, out: Numbered) -> None:
        push = self.boxes.push
        for to, message in out:
            if to >= v.To.GATEWAYS:
                self._to_gateway(state, to - v.To.GATEWAYS, message)
            elif to in BOX_OF:
                state[BOX_OF[to]] = push(state[BOX_OF[to]], message)
            elif to == v.To.OUTPUT:
                self._destroy(state, self.messages.values[message])
            elif to == v.To.DOWN:
                self._write_down(state, slot, message)
            elif to == v.To.UP:
                self._write_up(state, slot, message)
            elif to == v.To.ENGINE:
                self.task(state, message_slot(self.messages.values[message]), self.messages.number(v.KillRequested()))
            else:
                self._change_link(state, slot, to, message)

    def _destroy(self, state: list[int], destroyed: Any) -> None:
        """Check destroyed data of a checkpoint: no driver that starts now may restore a checkpoint that needs it."""
        restorable = self.trackers.facts[state[TRACKER]].restorable
        needed = [checkpoint_id for checkpoint_id in destroyed.referring if checkpoint_id in restorable]
        text = f"what was prepared at the cut of {destroyed.cut} is destroyed, and {needed} may be restored"
        v.demand(not needed, "H64", text)

    def _to_gateway(self, state: list[int], slot: int, message: int) -> None:
        base = base_of(slot)
        facts = self.gateways.facts[state[base]]
        if facts.over:
            return
        if self.eager and self.kind(message) is ItemTaken and not self.may_resume(state, slot):
            self.gateway(state, slot, message)
        else:
            state[base + GATEWAY_BOX] = self.boxes.push(state[base + GATEWAY_BOX], message)

    def _write_down(self, state: list[int], slot: int, message: int) -> None:
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        if link.bound != 1 or not link.open:
            return
        if self.eager and self.kind(message) is Confirm and self.tasks.facts[state[place - 1]].attached:
            self.task(state, slot, message)
        else:
            state[place] = self.links.number(link._replace(down=self.boxes.push(link.down, message)))

    def _write_up(self, state: list[int], slot: int, message: int) -> None:
        base = base_of(slot)
        link = self.links.values[state[base + LINK]]
        if not link.open:
            return
        if self.eager and link.bound == 1 and self.settles_nothing(state[base], message):
            state[base] = self.gateways.step(state[base], message)[0]
            return
        state[base + LINK] = self.links.number(link._replace(up=self.boxes.push(link.up, message)))

    def settles_nothing(self, gateway: int, message: int) -> bool:
        """Whether this is a confirmation that the gateway would only record."""
        if self.kind(message) is not Confirm:
            return False
        after, out = self.gateways.step(gateway, message)
        return not out and self.gateways.facts[after].unsettled == self.gateways.facts[gateway].unsettled

    def _change_link(self, state: list[int], slot: int, to: int, message: int) -> None:
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        if to == v.To.APART:
            link = link._replace(apart=tuple(sorted((*link.apart, message))))
        elif to == v.To.RESUMED:
            link = link._replace(old=0, bound=1)
        elif link.bound == 1:  # hang up
            link = link._replace(up=0, bound=0, open=False, broken=False)
        else:
            link = link._replace(old=0, bound=0)
        state[place] = self.links.number(link)

    # --- runs ---

    def fail_job(self, state: list[int], job_ends: int) -> None:
        """Let Spark give up the job: its tasks die."""
        died = self.messages.number(v.Died())
        for slot in self.slots_of_run(state):
            if self.tasks.facts[state[base_of(slot) + TASK]].life in NEVER_ENDED:
                self.task(state, slot, died)
        while state[LEDGER_BOX]:  # nothing that comes later may overtake the end of the job
            box = state[LEDGER_BOX]
            state[LEDGER_BOX] = self.boxes.rest[box]
            self.driver(LEDGER, state, self.boxes.head[box])
        self.driver(LEDGER, state, job_ends)

    def restart(self, state: list[int], checkpoint_id: int) -> None:
        """Let the driver die with all tasks, and start another one from this checkpoint."""
        tracker, coordinator = self.trackers.part(state[TRACKER]), self.coordinators.part(state[COORDINATOR])
        ledger = self.ledgers.part(state[LEDGER])
        assert isinstance(tracker, TrackerEnd)
        assert isinstance(coordinator, CoordinatorEnd)
        assert isinstance(ledger, LedgerEnd)
        died = self.messages.number(v.Died())
        for slot in range(self.slots):
            base = base_of(slot)
            if self.tasks.facts[state[base + TASK]].life in NEVER_ENDED:
                state[base + TASK] = self.tasks.step(state[base + TASK], died)[0]
            state[base + GATEWAY], state[base + GATEWAY_BOX] = self.gateways.number(GatewayEnd(slot, self.scope)), 0
            state[base + LINK] = 0
        state[TRACKER] = self.trackers.number(tracker.successor(self.scope, checkpoint_id))
        state[COORDINATOR] = self.coordinators.number(coordinator.successor(self.scope, checkpoint_id))
        state[LEDGER] = self.ledgers.number(ledger.successor(self.scope))
        state[TRACKER_BOX] = state[COORDINATOR_BOX] = state[LEDGER_BOX] = 0

    # --- connections ---

    def start(self, state: list[int], slot: int) -> None:
        state[base_of(slot) + LINK] = self.links.number(Link(open=True))
        self.task(state, slot, self.messages.number(v.Started(self.ledgers.facts[state[LEDGER]].input)))

    def break_link(self, state: list[int], slot: int) -> None:
        """Break the link: data already written may be read up to any point, and later data is lost."""
        place = base_of(slot) + LINK
        state[place] = self.links.number(self.links.values[state[place]]._replace(open=False, broken=True))

    def reconnect(self, state: list[int], slot: int) -> None:
        """Let the task notice the loss and open a new connection."""
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        if link.bound == 1:
            link = link._replace(old=link.up, bound=2)
        state[place] = self.links.number(link._replace(up=0, down=0, open=True, broken=False))
        self.task(state, slot, self.loss)

    def notice_loss(self, state: list[int], slot: int) -> None:
        """Let the gateway notice the loss."""
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        link = link._replace(up=0, bound=0) if link.bound == 1 else link._replace(old=0, bound=0)
        state[place] = self.links.number(link)
        self.gateway(state, slot, self.loss)

    def attach(self, state: list[int], slot: int) -> None:
        """Let the server read the first message of the newest connection, and look the gateway up."""
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        resume: Any = self.messages.values[self.boxes.head[link.up]].message
        assert isinstance(resume, Resume)
        state[place] = self.links.number(link._replace(up=self.boxes.rest[link.up]))
        over = slot + 1 not in self.trackers.facts[state[TRACKER]].open
        self.gateway(state, slot, self.messages.number(v.Attached(resume.received_seq, over)))

    def read_up(self, state: list[int], slot: int) -> None:
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        wire = link.up if link.bound == 1 else link.old
        message, rest = self.boxes.head[wire], self.boxes.rest[wire]
        state[place] = self.links.number(link._replace(up=rest) if link.bound == 1 else link._replace(old=rest))
        self.gateway(state, slot, message)

    def read_down(self, state: list[int], slot: int) -> None:
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        state[place] = self.links.number(link._replace(down=self.boxes.rest[link.down]))
        self.task(state, slot, self.boxes.head[link.down])

    def take_apart(self, state: list[int], slot: int, message: int) -> None:
        place = base_of(slot) + LINK
        link = self.links.values[state[place]]
        left = list(link.apart)
        left.remove(message)
        state[place] = self.links.number(link._replace(apart=tuple(left)))
        self.task(state, slot, message)

    def may_resume(self, state: State | list[int], slot: int) -> bool:
        """Whether the task may still have to exchange with the driver the numbers of received items."""
        base = base_of(slot)
        if self.tasks.facts[state[base + TASK]].life not in NEVER_ENDED:
            return False
        link = self.links.values[state[base + LINK]]
        return self.budgets[state[BUDGETS]][Budget.DROPS] > 0 or link.bound != 1 or not link.open

    def readable(self, state: State | list[int], slot: int) -> int:
        """Return the wire that the gateway may read from, or the empty one."""
        link = self.links.values[state[base_of(slot) + LINK]]
        return link.up if link.bound == 1 else link.old if link.bound == 2 else 0


def message_slot(message: Any) -> int:
    assert isinstance(message, int)
    return message
