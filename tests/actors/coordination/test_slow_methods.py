# SPDX-License-Identifier: Apache-2.0

"""A method of the coordinator that blocks the event loop is named in the log and to hooks."""

# H9

from __future__ import annotations

from typing import Any

from actors.cell import cell_of
from actors.coordination import parts_of
from actors.coordination.engine.coordinator import METHODS, CoordinatorActor
from headgate import OperatorCoordinator
from headgate.testing import PartEvent
from tests.actors.coordination.operator_world import running_tasks
from tests.conformance.application import application


class Slow(OperatorCoordinator):
    """Does nothing."""


def called_for(message: Any) -> str:
    actor: Any = object.__new__(CoordinatorActor)
    actor._called = parts_of(Slow())[0]
    name: str = actor.called_for(message)
    return name


def test_each_message_of_a_coordinator_is_named_by_the_method_that_it_leads_to() -> None:
    for kind, method in METHODS.items():
        assert called_for(object.__new__(kind)) == f"Slow.{method}"
        assert hasattr(OperatorCoordinator, method)
    assert called_for(5) == "int"


async def test_a_slow_step_of_a_coordinator_is_logged_with_its_class_and_method() -> None:
    async with application() as app:
        await app.coordinate(Slow())
        tasks = await app.running()
        tasks[0].send("up")
        await app.settle()
        coordinator = cell_of(app.operators.find("words").tracker_ref).children["coordinator"]
        assert coordinator._handled == "Slow.handle_event_from_operator"


async def test_a_slow_step_of_a_part_is_logged_with_the_class_of_that_part() -> None:
    class OfStage(OperatorCoordinator):
        """Its events come from the stage of the same name."""

    async with running_tasks(1, parts_of(None, {"first": OfStage(), "second": Slow()}, ("first", "second"))) as (
        world,
        (task,),
    ):
        (tracker,) = (cell_of(world.tracker),)
        actor = tracker.children["coordinator"]
        for name, expected in (("first", "OfStage"), ("second", "Slow")):
            task.send(PartEvent(name, "up"))
            await world.settle()
            assert actor._handled.split(".")[-2:] == [expected, "handle_event_from_operator"]
        assert world.failures == []
