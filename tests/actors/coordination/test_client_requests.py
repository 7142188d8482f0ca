# SPDX-License-Identifier: Apache-2.0

"""Requests from the driver's own code to a coordinator (R97, S60, S61)."""

from __future__ import annotations

from typing import Any

from tests.actors.coordination.operator_world import RecordingCoordinator, raising, running_operator, running_tasks


async def test_a_coordinator_without_a_handler_says_so() -> None:  # S61
    async with running_operator() as world:
        answer = await world.ask_client_request("testing payload")
        (error,) = answer.errors
        assert "RecordingCoordinator cannot handle requests of the driver" in str(error)


async def test_a_request_that_fails_is_the_askers_trouble_alone() -> None:  # R97, H7
    cause = ValueError("no such table")

    coordinator = RecordingCoordinator(handle_client_request=raising(cause))
    async with running_operator(coordinator) as world:
        answer = await world.ask_client_request("rows of t")
        assert answer.errors == [cause]
        assert not world.reports
        (task,) = await world.running(0)
        task.send("hello")
        await world.settle()
        assert coordinator.events == ["hello"]


async def test_a_request_is_handled_while_a_checkpoint_runs() -> None:  # R98
    async def echo(request: Any) -> Any:
        return request

    async with running_tasks(1, RecordingCoordinator(handle_client_request=echo)) as (world, (task,)):
        task.busy = True
        checkpoint = await world.checkpoint()
        answer = await world.ask_client_request("now")
        assert answer.values == ["now"]
        assert world.statistics.client_requests == 1
        assert checkpoint.open
