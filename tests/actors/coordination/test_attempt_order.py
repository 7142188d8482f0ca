# SPDX-License-Identifier: Apache-2.0

"""The order in which a coordinator learns of attempts, and what it can still do then (H3, H10 to H15, H57)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.coordination import Confirmation
from protocol.attempts import FailureKind
from protocol.errors import AttemptOver
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    running_operator,
    running_tasks,
    the_turn_of,
    waiting_for,
)


async def test_an_attempt_is_ready_then_failed_then_its_subtask_reset_then_the_next_one_ready() -> None:  # H10
    async with running_tasks(1) as (world, (task,)):
        world.fail(task)
        await world.running(0)
        assert world.coordinator.calls[1:] == [
            ("subtask_ready", 0, 0),
            ("subtask_failed", 0, 0, FailureKind.FAILED),
            ("subtask_reset", 0, -1),
            ("subtask_ready", 0, 1),
        ]


async def test_an_attempt_that_dies_before_it_opens_is_reported_failed_and_never_ready() -> None:  # H11
    async with running_operator() as world:
        task = world.accept(0)
        task.opens_immediately = False
        await world.settle()
        world.fail(task)
        await world.settle()
        assert world.coordinator.calls[1:] == [("subtask_failed", 0, 0, FailureKind.FAILED), ("subtask_reset", 0, -1)]


async def test_inside_failed_and_reset_the_old_gateway_refuses_immediately() -> None:  # H14, H26
    tried: list[tuple[str, Confirmation]] = []
    known_immediately: list[bool] = []

    async def try_to_send(subtask: int, *args: Any) -> None:
        gateway = coordinator.gateways[subtask]
        tried.append(("awaited", await gateway.send_event("too late")))
        tried.append(("nowait", gateway.send_event_nowait("too late")))
        known_immediately.extend(confirmation.done() for _, confirmation in tried)

    coordinator = RecordingCoordinator(subtask_failed=try_to_send, subtask_reset=try_to_send)
    # The coordinator is told before the gateway runs, so the refusal must not need the gateway's mailbox.
    async with running_tasks(1, coordinator, schedule=the_turn_of("operator", "operator/coordinator")) as (
        world,
        (task,),
    ):
        world.fail(task)
        await world.settle()
        assert all(known_immediately)
        assert [name for name, _ in tried] == ["awaited", "nowait"] * 2
        assert all(isinstance(confirmation.error(), AttemptOver) for _, confirmation in tried)
        assert task.events == []
        assert not world.reports  # H26: no failover follows


async def test_a_gateway_never_reaches_a_later_attempt() -> None:  # H20
    async with running_tasks(1) as (world, (old,)):
        old_gateway = world.coordinator.gateways[0]
        world.fail(old)
        (new,) = await world.running(0)
        confirmation = await old_gateway.send_event("for the old one")
        await world.settle()
        assert isinstance(confirmation.error(), AttemptOver)
        assert new.events == []
        assert old_gateway.attempt == old.attempt
        assert world.coordinator.gateways[0].attempt == new.attempt


@pytest.mark.parametrize(
    "ending",
    [World.fail, World.finish, lambda world, task: world.reset(), lambda world, task: world.end_run()],
    ids=["failed", "finished", "reset", "end of the run"],
)
async def test_an_event_that_comes_after_the_end_of_its_attempt_is_dropped_and_counted(  # H3, H15, H57
    ending: Callable[[World, Task], None],
) -> None:
    async with running_tasks(1, schedule=the_turn_of("operator")) as (world, (task,)):
        task.send("too late")  # waits at the gateway while the tracker announces the end
        ending(world, task)
        await world.settle()
        assert world.coordinator.events == []
        assert world.statistics.messages_dropped == 1


async def test_an_event_that_came_before_the_end_of_its_attempt_is_handled_before_it() -> None:  # H3, H30
    async with running_tasks(1) as (world, (task,)):
        task.send("last words")
        await world.settle()
        world.fail(task)
        await world.settle()
        assert [call[0] for call in world.coordinator.calls[2:4]] == ["handle_event_from_operator", "subtask_failed"]


async def test_a_task_that_is_over_is_told_to_stop() -> None:  # H3
    async with running_tasks(1) as (world, (task,)):
        world.fail(task, FailureKind.KILLED)
        await world.settle()
        assert task.ended == ["killed: by the test"]
        assert task.connection is not None
        assert task.connection.closed


async def test_a_connection_that_comes_after_the_end_is_told_so() -> None:  # H3
    async with running_tasks(1) as (world, (task,)):
        world.fail(task, reset=False)
        connection = world.connection()
        task.lose_connection()
        task.reconnect(connection)
        await world.settle()
        assert connection.closed or not task.gateway_ref.is_alive
        assert len(world.gateways) == 0


async def test_events_go_to_the_attempt_whose_gateway_was_used() -> None:  # H13
    async with running_tasks(1) as (world, (first,)):
        first_gateway = world.coordinator.gateways[0]
        (second,) = await world.running(0)
        await first_gateway.send_event("to the first")
        await world.coordinator.gateways[0].send_event("to the second")
        await world.settle()
        assert (first.events, second.events) == (["to the first"], ["to the second"])
        world.fail(first, FailureKind.SUPERSEDED, reset=False)
        await world.settle()
        assert world.coordinator.calls_of("subtask_failed", "subtask_reset") == [
            ("subtask_failed", 0, 0, FailureKind.SUPERSEDED)
        ]


async def test_a_global_failover_reports_each_attempt_and_resets_once() -> None:  # H15
    async with running_operator() as world:
        for task in await world.running(0, 1):
            world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset()
        await world.settle()
        assert world.coordinator.calls[-3:] == [
            ("subtask_failed", 0, 0, FailureKind.GLOBAL_FAILURE),
            ("subtask_failed", 1, 0, FailureKind.GLOBAL_FAILURE),
            ("reset_to_checkpoint", -1, None),
        ]


async def test_the_end_of_a_run_ends_its_gateways_and_is_told() -> None:  # H57
    async with running_tasks(2) as (world, (done, left)):
        done.finish(state=b"final")
        await world.settle()
        world.finish(done)
        world.end_run(False, "the job was cancelled")
        await world.settle()
        assert world.coordinator.calls[-1] == ("run_ended", 1, False, "the job was cancelled")
        assert world.gateways == {}
        assert left.ended == ["the run has ended"]
        assert not done.gateway_ref.is_alive
        assert not left.gateway_ref.is_alive
        confirmation = world.coordinator.gateways[1].send_event_nowait("after the run")
        assert isinstance(confirmation.error(), AttemptOver)


async def test_a_coordinator_can_be_used_for_the_next_run() -> None:  # H55, H57
    async with running_tasks(1, mode=RestoreMode.BATCH) as (world, _):
        world.end_run()
        world.reset("a new run")
        (task,) = await world.running(0)
        await world.coordinator.gateways[0].send_event("hello again")
        await world.settle()
        assert world.coordinator.calls[-3:] == [
            ("run_ended", 1, True, ""),
            ("reset_to_checkpoint", -1, None),
            ("subtask_ready", 0, 1),
        ]
        assert task.events == ["hello again"]


async def test_a_finished_attempt_may_be_failed_later() -> None:  # H17, H86
    async with running_tasks(1) as (world, (task,)):
        task.finish()
        await world.settle()
        world.finish(task)
        await world.settle()
        assert world.coordinator.calls[1:] == [("subtask_ready", 0, 0), ("subtask_finished", 0, 0)]
        world.fail(task, FailureKind.REVOKED)
        await world.settle()
        assert world.coordinator.calls[3:] == [("subtask_failed", 0, 0, FailureKind.REVOKED), ("subtask_reset", 0, -1)]
        (retry,) = await world.running(0)
        retry.finish()
        await world.settle()
        world.finish(retry)
        await world.settle()
        assert world.coordinator.calls[5:] == [("subtask_ready", 0, 1), ("subtask_finished", 0, 1)]
        assert world.statistics.finished == 2


async def test_a_success_comes_after_everything_that_the_attempt_sent_and_before_the_end_of_the_run() -> None:  # H86
    async with running_tasks(2) as (world, (one, two)):
        for task in (one, two):
            task.send("the last event")
            task.finish()
        world.coordinator.methods["handle_event_from_operator"] = waiting_for(gate := asyncio.Event())
        await world.settle()
        world.finish(one)
        world.finish(two)
        world.end_run()
        await world.settle()
        assert not world.coordinator.calls_of("subtask_finished")  # the coordinator has not taken their events yet
        gate.set()
        await world.settle()
        told = world.coordinator.calls_of("handle_event_from_operator", "subtask_finished", "run_ended")
        assert {call[1] for call in told[:2]} == {0, 1}
        assert told[2:] == [("subtask_finished", 0, 0), ("subtask_finished", 1, 0), ("run_ended", 1, True, "")]


async def test_the_gateway_of_a_finished_attempt_refuses_events() -> None:  # H86, H14
    async def send_inside(subtask: int, attempt: int) -> None:
        sent.append(world.coordinator.gateways[subtask].send_event_nowait("too late"))

    sent: list[Confirmation] = []
    async with running_tasks(1, RecordingCoordinator(subtask_finished=send_inside)) as (world, (task,)):
        task.finish()
        await world.settle()
        world.finish(task)
        await world.settle()
        assert isinstance(sent[0].error(), AttemptOver)
        assert "it has finished" in str(sent[0].error())


async def test_an_attempt_that_failed_never_finishes() -> None:  # H86
    async with running_tasks(1) as (world, (task,)):
        world.fail(task)
        world.finish(task)  # from two facts that contradict each other, the first one counts
        await world.settle()
        assert not world.coordinator.calls_of("subtask_finished")


async def test_the_final_checkpoint_comes_after_all_successes() -> None:  # H86, H40
    async with running_tasks(1) as (world, (task,)):
        task.finish(state=b"final")
        await world.settle()
        world.finish(task)
        world.end_run()
        await world.settle()
        assert [call[0] for call in world.coordinator.calls[2:]] == [
            "subtask_finished",
            "run_ended",
            "checkpoint_coordinator",
            "notify_checkpoint_complete",
        ]


async def test_an_attempt_that_finished_while_its_readiness_was_withheld_is_not_announced() -> None:  # H11, H40
    async with running_tasks(1) as (world, (slow,)):
        slow.unresponsive = True
        answer = await world.checkpoint()
        (quick,) = await world.running(1)
        quick.finish(state=b"nothing to do")
        await world.settle()
        world.finish(quick)
        await world.settle()
        slow.unresponsive = False
        await world.settle()
        assert answer.values == [1]
        assert not [call for call in world.coordinator.calls_of("subtask_ready") if call[1] == 1]
        assert world.coordinator.calls_of("subtask_finished") == [("subtask_finished", 1, 0)]


async def test_the_figures_of_an_operator_are_kept() -> None:  # H27
    async with running_tasks(1) as (world, (task,)):
        await world.advance(1.0)  # otherwise an event that was never sent would appear as old
        task.unresponsive = True
        await world.coordinator.gateways[0].send_event("one")
        await world.advance(0.25)
        task.unresponsive = False
        task.send("two")
        await world.settle()
        world.fail(task)
        world.reset()
        world.end_run()
        await world.settle()
        figures = world.statistics.snapshot()
        expected: dict[str, Any] = {
            "attempts": 1,
            "ready": 1,
            "failures": 1,
            "failures_by_kind": {"failed": 1},
            "subtask_resets": 1,
            "operator_resets": 1,
            "resets": 2,
            "runs": 1,
            "events_sent": 1,
            "events_confirmed": 1,
            "events_failed": 0,
            "events_received": 1,
        }
        assert {name: figures[name] for name in expected} == expected
        assert figures["confirm_us"] == pytest.approx(dict.fromkeys(figures["confirm_us"], 250_000) | {"count": 1})
