# SPDX-License-Identifier: Apache-2.0

"""A group in a simulated application: the driver's half as users have it, and a task that trains in it.

The task's half waits inside its calls, which a simulated task cannot. So this one sends the same messages, and goes on
when the answer comes. The *model* is a number that each step changes in the same way; all members gather it and must
have the same one (H102, H103). It is saved after each step, and no generation may begin with an earlier step than its
members have seen saved (H105). Each successful task must end with the model of the last step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol.errors import GatewayFull
from protocol.group import SAVE
from protocol.wire.codec import decode_event
from spark_bridge.primitives.group.messages import (
    Admitted,
    Blob,
    Broken,
    Call,
    Fetch,
    Join,
    Leave,
    Values,
    parse_answer,
    parse_broken,
)
from tests.simulation.application import TEAM
from tests.simulation.checkers import demand

if TYPE_CHECKING:
    from tests.simulation.parts import TaskParts

STEPS_MAX = 6
GATHER = "all_gather()"


def model_of(step: int) -> int:
    """The model after so many steps, in any number of generations."""
    model = 1
    for _ in range(step):
        model = (31 * model + 7) % 1_000_003
    return model


class TaskGroup:
    """One task in the group. ``model`` is the result, as soon as it is ``done``."""

    def __init__(self, parts: TaskParts, *, elastic: bool) -> None:
        self._parts = parts
        self._elastic = elastic
        self._steps = min(parts.process.work.target, STEPS_MAX)
        self._name = f"task {parts.process.tid}"
        self._member: Admitted | None = None
        self._round = 0
        self._step = 0
        self._gathered = False  # in this step
        self._broken = 0  # the last generation of which it was told that
        self._waiting = False  # others want to join
        self._fetches = False  # the checkpoint of its generation
        self._asked: Join | Call | Fetch | None = None  # and has no answer yet
        self._seen_saved = -1
        self.model = 0
        self.done = False

    # --- what it may do -----------------------------------------------------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        return [] if self.done or self._asked is not None else [self.go_on]

    def go_on(self) -> None:
        """Take the next step of the function that the task runs."""
        member = self._member
        if member is None:
            self._ask(Join("", 0))
        elif self._fetches:
            self._ask(Fetch(member.step, 0))
        elif self._broken >= member.generation:
            self._leave()
        elif self._step == self._steps:
            self.model, self.done = model_of(self._step), True
            self._leave()
        elif self._waiting:
            self._leave()  # and join again, with those that wait
        elif not self._gathered:
            self._ask(Call(member.generation, self._round, GATHER, json.dumps([self._step, member.rank]).encode()))
        else:
            if member.rank == 0:
                data = json.dumps([self._step + 1, model_of(self._step + 1)]).encode()
                self._parts.send(TEAM, Blob(member.generation, 0, len(data), data).as_event())
            self._ask(Call(member.generation, self._round, SAVE, self._step + 1))

    def _ask(self, request: Join | Call | Fetch) -> None:
        if self._parts.outbox:  # the blob waits for capacity, and leaves first
            return
        try:
            self._parts.process.ask_of_part(TEAM, request.as_event())
        except GatewayFull:
            self._parts.process.waits_for_capacity = True
            return
        self._asked = request

    def _leave(self) -> None:
        assert self._member is not None
        self._parts.send(TEAM, Leave(self._member.generation, "").as_event())
        self._member, self._waiting = None, False

    # --- what it hears ------------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Hear, urgently or not, that a generation is broken."""
        self._broken = max(self._broken, parse_broken(event).generation)

    def hear_answer(self, error: str, payload: bytes) -> None:
        if error.startswith("the attempt is over"):
            return
        asked, self._asked = self._asked, None
        demand(not error, f"H33: {self._name} asked {asked}, and gets the error {error!r}")
        answer = decode_event(payload)
        if isinstance(asked, Fetch):
            self._restore(answer)
            return
        match parse_answer(answer):
            case Admitted() as member:
                demand(isinstance(asked, Join), f"H102: {self._name} is admitted and asked {asked}")
                self._admit(member)
            case Values(values, waiting):
                demand(isinstance(asked, Call), f"H103: {self._name} gets values and asked {asked}")
                assert isinstance(asked, Call)
                self._take(asked, values, waiting)
            case Broken(generation, _):
                self._broken = max(self._broken, generation)
                self._parts.process.world.figures.happen("a call of a broken generation")

    def _admit(self, member: Admitted) -> None:
        text = f"H102: {self._name} joins generation {member.generation} after {self._broken}"
        demand(member.generation > self._broken, text)
        demand(member.step >= self._seen_saved, f"H105: {self._name} begins with {member.step}, not {self._seen_saved}")
        self._member, self._round, self._gathered = member, 0, False
        self._step = 0
        self._fetches = member.step >= 0
        self._parts.process.world.figures.happen("a member of a generation")

    def _restore(self, blob: bytes) -> None:
        assert self._member is not None
        self._fetches = False
        self._step, model = json.loads(blob)
        demand(self._step == self._member.step, f"H105: the blob of {self._member} is of step {self._step}")
        demand(model == model_of(self._step), f"H105: the model of step {self._step} is {model}")

    def _take(self, asked: Call, values: tuple[bytes, ...], waiting: int) -> None:
        assert self._member is not None
        self._round += 1
        self._waiting = self._elastic and waiting > 0 and asked.kind == SAVE
        if asked.kind == SAVE:
            self._step += 1
            self._seen_saved = self._step
            self._gathered = False
            self._parts.process.world.figures.happen("a saved step")
            return
        expected = [[self._step, rank] for rank in range(self._member.world_size)]
        gathered = [json.loads(one) for one in values]
        demand(gathered == expected, f"H103: {self._name} gathers {gathered}, not {expected}")
        self._gathered = True
