# SPDX-License-Identifier: Apache-2.0

"""The steps that may happen next in a state, and their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tests.exploration import vocabulary as v
from tests.exploration.interning import Memo
from tests.exploration.subtask_end import Life
from tests.exploration.world import (
    BUDGETS,
    COORDINATOR,
    COORDINATOR_BOX,
    GATEWAY,
    GATEWAY_BOX,
    LEDGER,
    LEDGER_BOX,
    LINK,
    NEVER_ENDED,
    TASK,
    TRACKER,
    TRACKER_BOX,
    Budget,
    State,
    World,
    base_of,
)


class Step(NamedTuple):
    """One possible step: of the part of ``slot`` (-1 for the driver's), with ``message`` if there is one.

    ``budget``: the budget that it costs.
    """

    what: str
    slot: int = -1
    message: int = -1
    budget: int = -1


class Steps:
    """The steps of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        number = world.messages.number
        self.trigger = number(v.Trigger())
        self.savepoint = number(v.Trigger(savepoint=True))
        self.send, self.sends = number(v.Send()), [number(v.Send(v.Slot(slot))) for slot in range(world.slots)]
        self.settles = [number(v.Settle(v.Slot(slot))) for slot in range(world.slots)]
        self.died, self.killed = number(v.Died()), number(v.Killed())
        self.forged = [number(v.Forged(task, attempt)) for task in (0, 90) for attempt in (0, 9)]
        self.finish, self.leave = number(v.Finish()), number(v.Leave())
        self.job_succeeds, self.job_fails = number(v.JobEnds(succeeded=True)), number(v.JobEnds(succeeded=False))
        self.timeout = number(v.OutOfTime())
        self.barrier, self.declined = number(v.MeetBarrier()), number(v.MeetBarrier(declines=True))
        self.abandon, self.ask_permit = number(v.Abandon()), number(v.AskPermit())
        self.takes, self.leaves = number(v.TakeRecord()), number(v.LeaveResult())
        self.lands = [number(v.EndCall(place)) for place in range(world.scope.in_flight)]
        self.barrier_sends = number(v.MeetBarrier(sends=True))
        self.urgent_begins, self.urgent_ends = number(v.BeginUrgent()), number(v.EndUrgent())
        self._spontaneous = Memo[tuple[int, int], tuple[Step, ...]](lambda key: tuple(self._find_spontaneous(*key)))
        self._of_engine = [Step("Spark starts", slot) for slot in range(world.slots)]
        self._do: dict[str, Callable[[list[int], int, int], None]] = {
            "the tracker takes": partial(self._take, TRACKER),
            "the tracker:": partial(self._give, TRACKER),
            "the coordinator takes": partial(self._take, COORDINATOR),
            "the coordinator sends to": partial(self._give, COORDINATOR),
            "the coordinator settles the reply to": partial(self._give, COORDINATOR),
            "the ledger takes": partial(self._take, LEDGER),
            "the ledger:": partial(self._give, LEDGER),
            "the gateway takes": self._take_gateway,
            "the gateway reads": lambda state, slot, message: world.read_up(state, slot),
            "the server takes the new connection of": lambda state, slot, message: world.attach(state, slot),
            "the gateway notices the loss of": lambda state, slot, message: world.notice_loss(state, slot),
            "the gateway gives up": world.gateway,
            "the task reads": lambda state, slot, message: world.read_down(state, slot),
            "the task:": world.task,
            "the barrier apart reaches": world.take_apart,
            "the task connects again,": lambda state, slot, message: world.reconnect(state, slot),
            "the connection breaks of": lambda state, slot, message: world.break_link(state, slot),
            "Spark starts": lambda state, slot, message: world.start(state, slot),
            "Spark gives up the job:": lambda state, slot, message: world.fail_job(state, message),
            "the driver dies, and another one starts from": self._restart,
        }

    # --- execution ---

    def do(self, state: list[int], step: Step) -> None:
        """Change ``state``. Raises ``Broken``."""
        if step.budget >= 0:
            state[BUDGETS] = self.world.spend(state[BUDGETS], step.budget)
        self._do[step.what](state, step.slot, step.message)

    def _take(self, place: int, state: list[int], slot: int, message: int) -> None:
        """Let a part of the driver take the first message of its mailbox, which lies after it in a state."""
        state[place + 1] = self.world.boxes.rest[state[place + 1]]
        self.world.driver(place, state, message)

    def _give(self, place: int, state: list[int], slot: int, message: int) -> None:
        self.world.driver(place, state, message)

    def _restart(self, state: list[int], slot: int, message: int) -> None:
        self.world.restart(state, self.world.messages.values[message])

    def _take_gateway(self, state: list[int], slot: int, message: int) -> None:
        place = base_of(slot) + GATEWAY_BOX
        state[place] = self.world.boxes.rest[state[place]]
        self.world.gateway(state, slot, message)

    def describe(self, step: Step, *, exchanged: bool = False) -> str:
        """Describe a step for people. An attempt is written ``subtask#start``. ``exchanged``: with the other names."""
        text, slot, message = step.what, step.slot, step.message
        if exchanged and self.world.exchanged is not None:
            slot = self.world.exchanged.exchange.slot(slot) if slot >= 0 else slot
            message = self.world.exchanged.message[message] if message >= 0 else message
        if slot >= 0:
            starts = self.world.scope.starts
            text += f" {slot // starts}#{slot % starts}"
        if message >= 0:
            value: Any = self.world.messages.values[message]
            if isinstance(value, v.CameUp | v.CameDown):
                value = value.message
            text += f" {value}"
        return text.replace(": ", " ", 1)

    # --- possible steps ---

    def all(self, state: State) -> list[Step]:
        """Return every step, those of the user and of Spark first."""
        steps = list(self.of_driver(state))
        for slot in range(self.world.slots):
            steps += self.of_gateway(state, slot)
            steps += self.of_task(state, slot)
            steps += self.of_engine(state, slot)
        return steps

    def of_driver(self, state: State) -> Iterator[Step]:
        world = self.world
        yield from self.spontaneous(state[TRACKER], state[BUDGETS])
        for slot in world.coordinators.facts[state[COORDINATOR]].senders:
            if slot + 1 in world.trackers.facts[state[TRACKER]].open:
                yield Step("the coordinator sends to", slot, self.sends[slot])
        for slot in world.coordinators.facts[state[COORDINATOR]].deferred:
            if slot + 1 in world.trackers.facts[state[TRACKER]].open:
                yield Step("the coordinator settles the reply to", slot, self.settles[slot])
        head = world.boxes.head
        if state[TRACKER_BOX]:
            yield Step("the tracker takes", -1, head[state[TRACKER_BOX]])
        if state[COORDINATOR_BOX]:
            yield Step("the coordinator takes", -1, head[state[COORDINATOR_BOX]])
        if state[LEDGER_BOX]:
            yield Step("the ledger takes", -1, head[state[LEDGER_BOX]])
        else:
            yield from self._of_forger(state)
            yield from self._of_jobs(state)

    def _of_forger(self, state: State) -> Iterator[Step]:
        """Yield claims beside the first attempt while it lives, and the look that follows a claim which waits."""
        world = self.world
        if world.ledgers.facts[state[LEDGER]].look_due:
            tasks = world.tasks.facts
            running = tuple(
                slot for slot in range(world.slots) if tasks[state[base_of(slot) + TASK]].life in NEVER_ENDED
            )
            yield Step("the ledger:", -1, world.messages.number(v.Looked(running)))
        if world.budgets[state[BUDGETS]][Budget.FORGERIES] and 1 in world.trackers.facts[state[TRACKER]].open:
            for forged in self.forged:
                yield Step("the ledger:", -1, forged, Budget.FORGERIES)

    def _of_jobs(self, state: State) -> Iterator[Step]:
        """Yield the ends of jobs and drivers, and the beginnings of further runs."""
        world, budgets = self.world, self.world.budgets[state[BUDGETS]]
        scope, number, ledger = world.scope, world.messages.number, world.ledgers.facts[state[LEDGER]]
        if not scope.runs:
            return
        if ledger.active:
            succeeded = {
                slot // scope.starts
                for slot in world.slots_of_run(state)
                if world.tasks.facts[state[base_of(slot) + TASK]].life is Life.SUCCEEDED
            }
            if ledger.cancelled:
                yield Step("Spark gives up the job:", -1, self.job_fails)
            elif len(succeeded) == scope.subtasks:
                yield Step("the ledger:", -1, self.job_succeeds)
            elif budgets[Budget.INTERRUPTIONS]:
                yield Step("Spark gives up the job:", -1, self.job_fails, Budget.INTERRUPTIONS)
        elif budgets[Budget.RUNS]:
            for input in range(ledger.input + 2):
                yield Step("the ledger:", -1, number(v.RunBegins(input)), Budget.RUNS)
        if budgets[Budget.RESTARTS] and budgets[Budget.RUNS]:
            facts = world.trackers.facts[state[TRACKER]]
            for checkpoint_id in sorted({facts.complete, *facts.restorable}):
                what = "the driver dies, and another one starts from"
                yield Step(what, -1, number(checkpoint_id), Budget.RESTARTS)

    def spontaneous(self, tracker: int, budgets_number: int) -> tuple[Step, ...]:
        """Return the steps in which people or the storage send the tracker's actor a message."""
        return self._spontaneous[tracker, budgets_number]

    def _find_spontaneous(self, tracker: int, budgets_number: int) -> Iterator[Step]:
        number, budgets = self.world.messages.number, self.world.budgets[budgets_number]
        facts = self.world.trackers.facts[tracker]
        if budgets[Budget.CHECKPOINTS]:
            yield Step("the tracker:", -1, self.trigger, Budget.CHECKPOINTS)
        if budgets[Budget.SAVEPOINTS]:
            yield Step("the tracker:", -1, self.savepoint, Budget.SAVEPOINTS)
        if budgets[Budget.ABORTS]:
            for abort in facts.abortable:
                yield Step("the tracker:", -1, number(abort), Budget.ABORTS)
        if facts.sweeps:
            yield Step("the tracker:", -1, number(v.Sweep()))
        for checkpoint_id in facts.discarding:
            yield Step("the tracker:", -1, number(v.DiscardEnds(checkpoint_id)))
        for checkpoint_id in facts.writing:
            yield Step("the tracker:", -1, number(v.WriteEnds(checkpoint_id)))
            if budgets[Budget.STORE_FAILURES]:
                yield Step("the tracker:", -1, number(v.WriteEnds(checkpoint_id, stored=False)), Budget.STORE_FAILURES)

    def of_gateway(self, state: State, slot: int) -> Iterator[Step]:
        world, base = self.world, base_of(slot)
        facts = world.gateways.facts[state[base + GATEWAY]]
        if state[base + GATEWAY_BOX]:
            yield Step("the gateway takes", slot, world.boxes.head[state[base + GATEWAY_BOX]])
        if not facts.exists:
            return
        link = world.links.values[state[base + LINK]]
        wire = world.readable(state, slot)
        if wire:
            yield Step("the gateway reads", slot, world.boxes.head[wire])
        if link.up and link.bound != 1:
            yield Step("the server takes the new connection of", slot)
        if link.bound == 2 or (link.bound == 1 and link.broken):
            yield Step("the gateway notices the loss of", slot)
        if facts.may_expire and world.budgets[state[BUDGETS]][Budget.TIMEOUTS]:
            yield Step("the gateway gives up", slot, self.timeout, Budget.TIMEOUTS)

    def of_task(self, state: State, slot: int, *, dies: bool = True) -> Iterator[Step]:
        """Yield the steps of a task. ``dies``: include those that end the task from outside."""
        world, base = self.world, base_of(slot)
        facts = world.tasks.facts[state[base + TASK]]
        if facts.life not in NEVER_ENDED:
            return
        link, budgets = world.links.values[state[base + LINK]], world.budgets[state[BUDGETS]]
        if link.down:
            yield Step("the task reads", slot, world.boxes.head[link.down])
        if facts.sends:
            yield Step("the task:", slot, self.send)
        if facts.abandons:
            yield Step("the task:", slot, self.abandon)
        if facts.asks_permit:
            yield Step("the task:", slot, self.ask_permit)
        if facts.takes:
            yield Step("the task:", slot, self.takes)
        for landed in self.lands[: facts.open_calls]:
            yield Step("the task:", slot, landed)
        if facts.leaves:
            yield Step("the task:", slot, self.leaves)
        if facts.at_barrier:
            yield Step("the task:", slot, self.barrier)
            if facts.sends and world.scope.in_snapshot:
                yield Step("the task:", slot, self.barrier_sends)
            if budgets[Budget.DECLINES]:
                yield Step("the task:", slot, self.declined, Budget.DECLINES)
        for checkpoint_id in facts.uploads:
            yield Step("the task:", slot, world.messages.number(v.EndUpload(checkpoint_id)))
            if budgets[Budget.UPLOAD_FAILURES]:
                fails = world.messages.number(v.EndUpload(checkpoint_id, stored=False))
                yield Step("the task:", slot, fails, Budget.UPLOAD_FAILURES)
        if facts.may_begin_urgent:
            yield Step("the task:", slot, self.urgent_begins)
        if facts.may_end_urgent:
            yield Step("the task:", slot, self.urgent_ends)
        if facts.may_finish:
            yield Step("the task:", slot, self.finish)
        if facts.may_leave:
            yield Step("the task:", slot, self.leave)
        if facts.life is not Life.WAITING:
            for message in link.apart:
                yield Step("the barrier apart reaches", slot, message)
            if link.broken:
                yield Step("the task connects again,", slot)
            elif budgets[Budget.DROPS] and facts.attached and link.open and link.bound == 1:
                yield Step("the connection breaks of", slot, -1, Budget.DROPS)
            if facts.may_expire and budgets[Budget.TIMEOUTS]:
                yield Step("the task:", slot, self.timeout, Budget.TIMEOUTS)
        if dies:
            if facts.condemned:
                yield Step("the task:", slot, self.killed)
            if budgets[Budget.FAILURES] and (slot + 1) % world.scope.attempts:
                yield Step("the task:", slot, self.died, Budget.FAILURES)

    def of_engine(self, state: State, slot: int) -> Iterator[Step]:
        """Yield the step in which Spark starts the next attempt after the last one is over."""
        facts = self.world.tasks.facts
        if facts[state[base_of(slot) + TASK]].life is Life.ABSENT:
            ledger = self.world.ledgers.facts[state[LEDGER]]
            if not ledger.active or ledger.run != self.world.run_of(slot):
                return
            is_first = slot % self.world.scope.attempts == 0
            if is_first or facts[state[base_of(slot - 1) + TASK]].life is Life.GONE:
                yield self._of_engine[slot]
