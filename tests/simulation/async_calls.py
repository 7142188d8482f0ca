# SPDX-License-Identifier: Apache-2.0

"""An async stage in the chain of a simulated task: the product's own, with calls that end as the world chooses.

In some worlds with stages, one of them makes a call for each record, several at a time. It is the transform, directly
after the source, or the sink, after a plain function that cannot be cut between its outputs. Calls take as long as the
seed says. Meanwhile the other tasks and the driver go on, and so does this task until its stage has to wait: then its
thread stops in the middle of an output, until a call ends or something is in the mailbox.

What is checked of it, in each snapshot and in each task that ends well (H180, H181):

  - a record that was taken has left, or is in flight, and never both,
  - the event and the count of a result happen once, or are still with the result,
  - each result that is known and has not left is in the snapshot,
  - no call is made for a record whose result the restored checkpoint has, or twice by one attempt,
  - no more calls are open than the limit allows, and no more records are in flight; but a barrier that can only be met
    before the plain function lets that pass on its next outputs,
  - if the stage is ordered, results leave in the order of the records.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headgate import SubtaskContext, concurrently
from headgate.types import RecordContext
from protocol.subtask.types import MailboxBarrier, MailboxItem
from protocol.wire.messages import RestoreMode
from protocol.wire.state import decode_entry, decode_state
from spark_bridge.subtask.coroutines.loop import TaskLoop
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import demand
from tests.simulation.loop import SimulatedLoop
from tests.simulation.stages import Doubling, Gone, Reading, Stage, TaskChannel, TaskStages
from tests.simulation.threads import Operation, SimulatedThread, this_thread

if TYPE_CHECKING:
    from spark_bridge.subtask.task_channel import TaskChannel as AnyTaskChannel
    from tests.simulation.process import Process

T = TypeVar("T")
DURATIONS_S = (0.0, 0.002, 0.01, 0.05, 0.2)


def name_of(record: list[Any]) -> str:
    """The name of a record ``[key, number]``, or of one of its two outputs ``[key, number, which]``."""
    key, number, which = [*record, 1][:3]
    return f"{key}/{number}/{which}"


class AsyncCalls(Stage):
    """The stage: the real operator, and what the world knows of its records.

    ``happened`` are the names of those whose event was sent, ``counted`` those that were counted, ``left`` those that
    have left if this is the last stage.
    """

    snapshot_anywhere = True
    goes_on_after_restore = True
    of: TaskStagesWithCalls

    def __init__(self, of: TaskStages, name: str) -> None:
        super().__init__(of, name)
        settings = of.process.application.settings
        self.limit = settings.in_flight
        self.operator = concurrently(self.call, limit=self.limit, ordered=settings.ordered)()
        self.happened: list[str] = []
        self.counted: list[str] = []
        self.left: list[str] = []
        self.done: set[str] = set()  # results of the restored checkpoint, and of this attempt
        self.restored = 0  # how many records the restored checkpoint has in flight
        self.waiting: dict[str, asyncio.Future[None]] = {}  # the calls that are open
        self.due: dict[str, float] = {}  # when they may end

    # --- the calls ------------------------------------------------------------------------------------------------

    async def call(self, context: RecordContext, record: list[Any]) -> list[Any]:
        name, tid = name_of(record), self.of.process.tid
        demand(name not in self.done, f"H180: task {tid} calls again for {name}, whose result is known")
        demand(name not in self.waiting, f"H180: task {tid} calls for {name} twice at a time")
        world = self.of.process.world
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.due[name] = world.now + world.random.choice(DURATIONS_S)
        demand(len(self.waiting) <= self.limit, f"H181: task {tid} has {len(self.waiting)} calls open, of {self.limit}")
        context.send_event(name)
        context.count(name)
        try:
            await self.waiting[name]
        finally:
            del self.waiting[name], self.due[name]
        self.done.add(name)
        return record

    def land(self) -> None:
        """Let one of the calls end whose time has come."""
        world = self.of.process.world
        name = world.random.choice([name for name, due in self.due.items() if due <= world.now])
        world.happen("a call ends")
        self.waiting[name].set_result(None)
        self.of.loop.run_until_idle()

    # --- the operator ---------------------------------------------------------------------------------------------

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        whole = json.loads(state) if state else {}
        operator_state = bytes.fromhex(whole.get("operator", ""))
        self.happened, self.counted, self.left = (whole.get(name, []) for name in ("happened", "counted", "left"))
        flights = flights_in(operator_state)
        self.restored = len(flights)
        self.done.update(name for name, effects in flights if effects is not None)
        for _, effects in flights:
            what = "an input in flight" if effects is None else "a result in flight"
            self.of.process.world.figures.happen(f"{what} is restored")
        self.done.update(self.left)
        self.operator.open(cast("SubtaskContext", WatchedContext(self, context)), operator_state)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in self.operator.process(records):
            if self is self.of.stages[-1]:
                self.of.take_out(self.left, record)
            yield record

    def close(self) -> None:
        super().close()
        self.operator.close()

    def send_event(self, name: str) -> None:
        """The event of a result happens: it is the next one of the stage, whichever record it is about."""
        tid = self.of.process.tid
        demand(name not in self.happened, f"H180: task {tid} sends the event of {name} twice")
        key, _, which = map(int, name.split("/"))
        if which:
            self._pass(key, self.passed[key])
        self.happened.append(name)

    def count(self, name: str) -> None:
        demand(name not in self.counted, f"H180: task {self.of.process.tid} counts {name} twice")
        self.counted.append(name)

    # --- snapshots ------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        self.operator_state = self.operator.snapshot_state(-1)
        names = {"happened": self.happened, "counted": self.counted, "left": self.left}
        return {**names, "operator": self.operator_state.hex()}

    def _merged(self, wholes: list[dict[str, Any]]) -> dict[str, Any]:
        names = {kind: [name for whole in wholes for name in whole[kind]] for kind in ("happened", "counted", "left")}
        states = {index: bytes.fromhex(whole["operator"]) for index, whole in enumerate(wholes)}
        return {**names, "operator": self.operator.merge_states(states).hex()}


class Gathering(Stage):
    """The sink after it: keeps the names of what has left."""

    of: TaskStagesWithCalls

    def __init__(self, of: TaskStages, name: str) -> None:
        super().__init__(of, name)
        self.left: list[str] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        self.left = json.loads(state)["left"] if state else []

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            key, _ = record
            self._pass(key, self.passed[key])
            self.of.take_out(self.left, record)
            yield record

    def own_state(self) -> dict[str, Any]:
        return {"left": self.left}

    def _merged(self, wholes: list[dict[str, Any]]) -> dict[str, Any]:
        return {"left": [name for whole in wholes for name in whole["left"]]}


def flights_in(operator_state: bytes) -> list[tuple[str, list[str] | None]]:
    """The records that an async stage has in flight, and of those that have a result, what is to happen with it."""
    flights = decode_state("an async stage", operator_state)["flights"] if operator_state else []
    return [
        (name_of(decode_entry(encoded)), None)
        if result is None
        else (name_of(result[1]), [f"{kind} {name}" for kind, name, *_ in result[2]])
        for encoded, result in flights
    ]


class WatchedContext:
    """The ``SubtaskContext`` of the operator: what happens with a result is that of the stage."""

    def __init__(self, stage: AsyncCalls, context: SubtaskContext) -> None:
        self._stage = stage
        self._of = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def send_event(self, name: str) -> None:
        self._stage.send_event(name)

    def count(self, name: str, by: int) -> None:
        self._stage.count(name)


# --- the task -------------------------------------------------------------------------------------------------------


class TaskStagesWithCalls(TaskStages):
    """See the module. ``calls`` is the async stage, ``loop`` that of its coroutines."""

    def __init__(self, process: Process) -> None:
        self.plain = process.application.settings.behind_plain
        self.kinds = (Reading, Doubling, AsyncCalls) if self.plain else (Reading, AsyncCalls, Gathering)
        super().__init__(process)
        self.loop = _LoopOfCalls(lambda: process.world.now)  # type: ignore[abstract]  # there is no I/O
        self.at_end: list[Callable[[], None]] = []
        self.thread: SimulatedThread | None = None  # the task's, in the middle of an output
        self.ready: Callable[[], bool] = lambda: True  # what it waits for there
        (self.calls,) = (stage for stage in self.stages if isinstance(stage, AsyncCalls))

    def channel(self) -> TaskChannel:
        return ChannelForCalls(self)

    def background_actions(self) -> list[Callable[[], None]]:
        now = self.process.world.now
        return [self.calls.land] if any(due <= now for due in self.calls.due.values()) else []

    def next_deadline(self) -> float | None:
        now = self.process.world.now
        return min((due for due in self.calls.due.values() if due > now), default=None)

    def actions(self) -> list[Callable[[], None]]:
        if self.thread is None:
            return super().actions()
        return [self.go_on] if self.ready() or self.process.mailbox else []

    def may_handle(self, item: MailboxItem) -> bool:
        """Not the world while the thread waits, which takes from the mailbox itself; but the thread may."""
        return (self.thread is None or this_thread() is self.thread) and super().may_handle(item)

    def pull(self) -> None:
        """Let the task's thread produce an output, or stop before that as it has to wait."""
        self.thread = SimulatedThread(super().pull, self.pulled)
        if self.thread.over:
            self.thread = None

    def go_on(self) -> None:
        assert self.thread is not None
        self.thread.answer(None)
        if self.thread.over:
            self.thread = None

    def pulled(self, _: object, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self.calls.operator._flights.check_invariants()
        most = max(self.calls.limit, self.calls.restored)
        flights = len(self.calls.operator._flights)
        demand(self.plain or flights <= most, f"H181: task {self.process.tid} has {flights} in flight, of {most}")

    def take_out(self, left: list[str], record: list[Any]) -> None:
        """A record has left, for good."""
        name, tid = name_of(record), self.process.tid
        demand(name not in left, f"H180: {name} leaves task {tid} twice")
        key = record[0]
        before = [one for one in left if one.startswith(f"{key}/")]
        if self.process.application.settings.ordered:
            demand(name == self.expected(key)[len(before)], f"H181: {name} leaves task {tid} after {before}")
        left.append(name)

    def expected(self, key: int) -> list[str]:
        """The names of the key's records that the source has passed on, in order."""
        outputs = (0, 1) if self.plain else (1,)
        return [name_of([key, number, which]) for number in range(self.stages[0].passed[key]) for which in outputs]

    def check_cut(self, which: str) -> None:
        if self.process.application.settings.mode is not RestoreMode.STREAMING:
            return  # all records come again
        flights = flights_in(self.calls.operator_state)
        left = cast("AsyncCalls | Gathering", self.stages[-1]).left
        self.process.world.happen("a cut with calls in flight" if flights else "a cut without calls in flight")
        expected = [name for key in self.keys for name in self.expected(key)]
        text = f"H180: {which} with {left} out, {flights} in flight, of {expected}"
        demand(Counter([*left, *(name for name, _ in flights)]) == Counter(expected), text)
        unheld = [name for name, effects in flights if effects is None and name in self.calls.done]
        demand(not unheld, f"{text}: the results of {unheld} are known, and not in it")
        for kind, names in (("event", self.calls.happened), ("count", self.calls.counted)):
            known = [*left, *(name for name, effects in flights if effects is not None)]
            there = [
                name for name in known for effects in [dict(flights).get(name)] if f"{kind} {name}" in (effects or ())
            ]
            demand(Counter([*names, *there]) == Counter(known), f"{text}: {kind}s of {names}")

    def check_whole(self) -> None:
        super().check_whole()
        left = cast("AsyncCalls | Gathering", self.stages[-1]).left
        expected = sorted(name for key in self.keys for name in self.expected(key))
        for what, names in (("left", left), ("sent", self.calls.happened), ("counted", self.calls.counted)):
            demand(sorted(names) == expected, f"H180: task {self.process.tid} has {what} {names}, of {expected}")

    def close(self) -> None:
        if self.thread is not None and this_thread() is not self.thread and not self.thread.over:
            self.thread.kill()
        for call in self.at_end:
            call()
        self.loop.run_until_idle()
        demand(not self.calls.waiting, f"H26: calls of task {self.process.tid} outlive it: {[*self.calls.waiting]}")
        super().close()


class ChannelForCalls(TaskChannel):
    """What an async stage needs besides. While it waits, it takes from the mailbox itself."""

    def __init__(self, of: TaskStagesWithCalls) -> None:
        super().__init__(of)
        self._calls = of
        self._waits = False
        self.key = (of.process.tid, OPERATOR)
        self.mailbox = self
        self.at_end = of.at_end.append
        self.poll = self.serve

    def serve(self) -> None:
        self._waits = False
        self._calls.serve_mail()

    def __bool__(self) -> bool:
        process = self._calls.process
        free = not (process.troubles.stalled or self._calls.blocked)
        return self._waits and free and bool(process.mailbox)

    @property
    def starts_with_barrier(self) -> bool:
        return isinstance(self._calls.process.mailbox[0], MailboxBarrier)

    def take(self, *, events_only: bool = False) -> None:
        """The process handles the next item."""
        self._calls.process.handle_mail()
        self.check()

    def check(self) -> None:
        if self._calls.process.life.value == "gone":
            raise Gone

    def wait_until(self, ready: Callable[[], bool]) -> None:
        self._waits, self._calls.ready = True, ready
        while not (ready() or self):
            thread = this_thread()
            assert thread is not None
            demand(bool(self._calls.calls.waiting), "H48: an async stage waits, and none of its calls is open")
            thread.ask(Operation("wait", "for a call", lambda: None))
            self.check()

    def nudge(self) -> None:
        """The world looks by itself."""

    def stepped_loop(self, channel: AnyTaskChannel) -> CallsLoop:
        return CallsLoop(channel, self._calls.loop)


class _LoopOfCalls(SimulatedLoop):
    """What another thread has it call, it calls at that moment."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        self.run_until_idle()
        return handle


class CallsLoop(TaskLoop):
    """The product's loop without its thread. It ends when the task is closed."""

    loop: SimulatedLoop
    _over = False

    def _begin(self) -> None:
        """The world runs it."""

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await make()

        if self._over:
            return cast("T", None)  # the task is gone, and its generators end
        done = self.loop.create_task(run())
        self.loop.run_until_idle()
        demand(done.done(), "H48: the coroutines of a stage do not end")
        return done.result()

    def close(self) -> None:
        self._over = True
        self.loop.kill()
