# SPDX-License-Identifier: Apache-2.0

"""A method of the coordinator that blocks the event loop is named in the log and to hooks."""

# H9

from __future__ import annotations

from typing import Any

from actors.cell import cell_of
from actors.coordination import parts_of
from actors.coordination.coordinator import METHODS, CoordinatorActor
from headgate import OperatorCoordinator
from tests.conformance.application import application


class Slow(OperatorCoordinator):
    """Does nothing."""


def called_for(message: Any) -> str:
    actor: Any = object.__new__(CoordinatorActor)
    actor._own = parts_of(Slow())[0]
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
