# SPDX-License-Identifier: Apache-2.0

"""Deferred replies and checkpoints, with operators that wait in ``request`` (H84, H85)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headgate import CheckpointConfig, GatewayLimits, OperatorCoordinator, Reply, SubtaskContext, SubtaskOperator
from headgate.errors import CheckpointFailed, TimedOut
from headgate.testing import running_operator


class Desk(OperatorCoordinator):
    """Answers nothing by itself. Its state is what it has taken."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.replies: list[Reply] = []

    async def handle_request(self, subtask: int, attempt: int, request: str) -> Reply:
        self.taken.append(request)
        self.replies.append(Reply())
        return self.replies[-1]

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return ",".join(self.taken).encode()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.taken = [] if not state else state.decode().split(",")


class Asking(SubtaskOperator):
    """Asks one question, and again after a restore if it has no answer."""

    def __init__(self) -> None:
        self.answer = b""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context, self.answer = context, state or b""
        self.restored_requests = context.restored_requests

    def process(self, records: Iterator[Any]) -> Iterator[bytes]:
        if not self.answer:
            self.answer = self.context.request("question", timeout_s=600.0)
        yield self.answer

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return self.answer


class Patient(Asking):
    snapshot_anywhere = True


async def test_a_checkpoint_passes_while_a_task_waits_for_a_deferred_answer() -> None:
    """The request was taken before the cut, and the answer comes after it. A restored task asks again."""
    desk = Desk()
    async with running_operator(desk, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, Patient, [])
        assert desk.taken == ["question"]
        await world.checkpoint()
        (checkpoint,) = world.checkpoints
        assert checkpoint.coordinator_state == b"question"
        assert checkpoint.subtask_states[0].held == ()
        desk.replies[0].answer(b"late")
        await world.settle()
        assert task.outputs == [b"late"]

    restored = Desk()
    async with running_operator(restored, parallelism=1, mode="streaming", restored=checkpoint) as world:
        task = await world.launch_operator(0, Patient, [])
        assert restored.taken == ["question", "question"]  # a request must be harmless when it comes twice
        restored.replies[0].answer(b"again")
        await world.settle()
        assert task.outputs == [b"again"]


async def test_a_task_that_may_not_take_a_snapshot_while_it_waits_declines() -> None:
    desk = Desk()
    patient = CheckpointConfig(tolerated_failures=5)
    async with running_operator(desk, parallelism=1, mode="streaming", checkpoint=patient) as world:
        task = await world.launch_operator(0, Asking, [])
        with pytest.raises(CheckpointFailed, match="declined: the operator was waiting for its coordinator"):
            await world.checkpoint()
        assert not desk.replies[0].over
        desk.replies[0].answer(b"the answer")
        await world.settle()
        assert task.outputs == [b"the answer"]


async def test_the_reply_to_a_task_that_waits_no_more_is_over() -> None:  # H85, also in the kit
    class Impatient(Asking):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for number in range(3):
                with pytest.raises(TimedOut):
                    self.context.request(number, timeout_s=5.0)
            yield self.context.request("the last")

    desk = Desk()
    async with running_operator(desk, parallelism=1, gateway=GatewayLimits(upward_events_max=1)) as world:
        task = await world.launch_operator(0, Impatient, [])
        await world.advance(15.0)
        assert [reply.over for reply in desk.replies] == [True, True, True, False]
        desk.replies[3].answer("here")
        await world.settle()
        assert task.outputs == ["here"]


async def test_an_answer_before_the_cut_is_in_the_state_of_the_task() -> None:
    desk = Desk()
    async with running_operator(desk, parallelism=1, mode="streaming") as world:
        await world.launch_operator(0, Patient, [])
        desk.replies[0].answer(b"early")
        await world.checkpoint()
        assert world.checkpoints[0].subtask_states[0].states[0].state == b"early"


class OpenDesk(OperatorCoordinator):
    """Answers a client at the next client's request."""

    def __init__(self) -> None:
        self.waiting: Reply | None = None

    async def handle_client_request(self, payload: str) -> Reply | str:
        if self.waiting is None:
            self.waiting = Reply()
            return self.waiting
        self.waiting.answer(f"{payload} has come")
        return "hello"


async def test_deferred_answer_to_a_client_arrives_when_it_is_given() -> None:
    async with running_operator(OpenDesk) as world:
        first = world.begin_request("Ann")
        await world.settle()
        assert first.open
        assert await world.request("Bob") == "hello"
        assert first.value == "Bob has come"


async def test_deferred_answer_to_a_client_fails_at_the_end() -> None:  # H85
    async with running_operator(OpenDesk) as world:
        first = world.begin_request("Ann")
        with pytest.raises(AssertionError, match="there is no answer yet"):
            _ = first.value
        await world.settle()
    with pytest.raises(Exception, match="operator"):
        _ = first.value
