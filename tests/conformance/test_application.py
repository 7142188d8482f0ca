# SPDX-License-Identifier: Apache-2.0

"""S31 to S34, S39 to S41, S44 to S47, S55, S60 to S63: a coordinator's life in an application, from start to close."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from actors.coordination import Reply
from protocol.attempts import FailureKind
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.errors import RequestFailed
from protocol.wire.messages import RefusalCode
from spark_bridge.common.errors import CoordinatorStartError, SidecarError
from tests.actors.coordination.operator_world import RecordingCoordinator
from tests.conformance.application import OPERATOR, application, coordinated
from tests.conformance.harness import SlowSnapshot

RANDOM_BYTES = Random(656).randbytes(656)


class StorageOutOfReach(Exception):
    pass


async def raise_it(*args: Any) -> Any:
    raise StorageOutOfReach("the coordinator's own trouble")


async def test_a_coordinator_is_started_with_its_operator() -> None:
    """S31 (R8; H6)."""
    async with coordinated() as (_, coordinator):
        assert coordinator.calls == [("start",)]


async def test_a_coordinator_is_closed_when_all_stops() -> None:
    """S32 (R16; H6)."""
    async with coordinated() as (app, coordinator):
        await app.running()
        await app.release()
        assert coordinator.calls[-1] == ("close",)
        assert len(coordinator.calls_of("close")) == 1


async def test_a_failure_in_start_closes_the_coordinator() -> None:
    """S33, S34 (R8; H6): and is raised."""
    coordinator = RecordingCoordinator(start=raise_it)
    async with application() as app:
        with pytest.raises(CoordinatorStartError, match="the coordinator's own trouble"):
            await app.coordinate(coordinator)
        assert coordinator.calls == [("start",), ("close",)]


async def test_there_is_no_gateway_before_the_task_runs() -> None:
    """S39, S40 (R10; H11)."""
    async with coordinated() as (app, coordinator):
        await app.deployed()
        assert coordinator.gateways == {}
    async with coordinated() as (app, coordinator):
        tasks = await app.running()
        assert {subtask: gateway.attempt for subtask, gateway in coordinator.gateways.items()} == {
            task.attempt.subtask: task.attempt for task in tasks
        }


async def test_what_went_wrong_in_the_task_comes_back_to_the_sender() -> None:
    """S41 (R27; H12, H26). A task that cannot take an event fails as a whole, with its own error text."""
    async with coordinated() as (app, coordinator):
        tasks = await app.running()
        tasks[0].unresponsive = True
        confirmation = await coordinator.gateways[0].send_event("hello")
        await app.settle()
        assert not confirmation.done()
        tasks[0].finish("ValueError: no such rule")
        await app.settle()
        assert "no such rule" in str(confirmation.error())
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.FAILED)]


async def test_a_completed_checkpoint_holds_the_coordinators_bytes() -> None:
    """S44 (R75; H40)."""
    snapshot = SlowSnapshot()
    async with application() as app:
        await app.coordinate(RecordingCoordinator(checkpoint_coordinator=snapshot))
        await app.running()
        answer = await app.checkpoint()
        (checkpoint_id,) = snapshot.begun
        snapshot.complete(checkpoint_id, RANDOM_BYTES)
        await app.settle()
        assert answer.values == [checkpoint_id]
        assert [checkpoint.coordinator_state for checkpoint in app.storage.stored] == [RANDOM_BYTES]


async def test_a_snapshot_that_raises_fails_its_checkpoint_with_that_cause() -> None:
    """S45 (R41; H45, and H7: it is a global failure too, as in Flink)."""
    async with application() as app:
        await app.coordinate(RecordingCoordinator(checkpoint_coordinator=raise_it))
        await app.running()
        answer = await app.checkpoint()
        assert "the coordinator's own trouble" in answer.reason()
        assert type(app.operators.find(None).failure) is StorageOutOfReach
        assert app.storage.stored == []


async def test_a_snapshot_that_fails_later_on_fails_its_checkpoint_with_that_cause() -> None:
    """S46 (R43; H45). H7 decides that it is a global failure too: to Flink it is only when the method itself throws."""
    snapshot = SlowSnapshot()
    async with application() as app:
        await app.coordinate(RecordingCoordinator(checkpoint_coordinator=snapshot))
        await app.running()
        answer = await app.checkpoint()
        (checkpoint_id,) = snapshot.begun
        assert answer.open
        snapshot.fail(checkpoint_id, StorageOutOfReach("the coordinator's own trouble"))
        await app.settle()
        assert "the coordinator's own trouble" in answer.reason()
        assert type(app.operators.find(None).failure) is StorageOutOfReach


async def test_a_coordinator_is_restored_from_what_an_earlier_application_stored() -> None:
    """S47 (R87, R9; H52, H6): before its start."""
    state = Random(1337).randbytes(123)
    coordinator = RecordingCoordinator()
    async with application(restored=CompletedCheckpoint(1337, 2, state)) as app:
        await app.coordinate(coordinator)
        assert coordinator.calls == [("reset_to_checkpoint", 1337, state), ("start",)]


async def test_the_coordinator_is_notified_of_a_complete_checkpoint() -> None:
    """S55 (R79; H40)."""
    async with coordinated() as (app, coordinator):
        await app.running()
        answer = await app.checkpoint()
        (checkpoint_id,) = answer.values
        assert coordinator.calls_of("notify_checkpoint_complete") == [("notify_checkpoint_complete", checkpoint_id)]


async def test_a_request_of_the_drivers_program_is_answered() -> None:
    """S60 (R97)."""

    async def echo(request: Any) -> Any:
        return request

    async with application() as app:
        await app.coordinate(RecordingCoordinator(handle_client_request=echo))
        assert await app.request("testing payload") == "testing payload"


async def test_a_request_that_waits_for_its_answer_ends_with_the_operator() -> None:  # H85
    async def later(request: Any) -> Reply:
        replies.append(Reply())
        return replies[-1]

    replies: list[Reply] = []
    outcomes: list[Any] = []
    async with application() as app:
        await app.coordinate(RecordingCoordinator(handle_client_request=later))

        async def ask(request: str) -> None:
            try:
                outcomes.append(await app.operators.request(OPERATOR, request, timeout_s=600.0))
            except RequestFailed as error:
                outcomes.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "first")
            group.start_soon(ask, "second")
            await app.settle()
            replies[0].answer("later")
            await app.settle()
            await app.release()
        closed = f"the coordinator of operator {OPERATOR!r} was closed before it answered this request"
        closed += ": coordinate the operator again, then ask"
        assert outcomes == ["later", closed]
        assert replies[1].over
        replies[1].answer("nobody hears this")


async def test_a_coordinator_that_answers_no_requests_says_so() -> None:
    """S61 (R97): only the caller gets it."""
    async with application() as app:
        await app.coordinate(RecordingCoordinator())
        with pytest.raises(TypeError, match="cannot handle requests of the driver"):
            await app.request("testing payload")
        assert app.operators.find(None).failure is None


async def test_a_request_for_an_operator_that_does_not_exist_says_so() -> None:
    """S62 (R97)."""
    async with application() as app:
        await app.coordinate(RecordingCoordinator())
        with pytest.raises(SidecarError, match="'another' is not coordinated here"):
            await app.request("testing payload", "another")


async def test_a_registration_tells_which_operators_are_known() -> None:
    """S63 (R7). Flink's handler returns the ids; here a task that names an unknown one is told the known ones."""
    async with application() as app:

        async def known_to_a_stranger() -> str:
            app.start_job()
            task = app.launch(0)
            app.register(task, "a stranger")
            await app.settle()
            assert task.refused is not None
            assert task.refused.code == RefusalCode.UNKNOWN_OPERATOR
            return task.refused.message

        await app.coordinate(RecordingCoordinator(), "first")
        before = await known_to_a_stranger()
        assert ("'first'" in before, "'second'" in before) == (True, False)
        await app.coordinate(RecordingCoordinator(), "second")
        after = await known_to_a_stranger()
        assert ("'first'" in after, "'second'" in after) == (True, True)
