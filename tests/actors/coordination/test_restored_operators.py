# SPDX-License-Identifier: Apache-2.0

"""An operator that starts from a checkpoint, and the positions that its coordinator sees (H6, H31, H32, H52)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from actors.coordination import OperatorConfig
from actors.coordination.engine.messages import StartOperator
from protocol.attempts import AttemptCondemned, FailureKind
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.codec import encode_event
from protocol.wire.messages import CheckpointAcknowledged, HeldEvent, RestoreMode, SubtaskState, UpMessage
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import RecordingCoordinator, raising, running_operator, running_tasks


def part(subtask: int, *held: Any, events_sent: tuple[int, ...] = ()) -> SubtaskSnapshot:
    events = tuple(HeldEvent(subtask, encode_event(event)) for event in held)
    return SubtaskSnapshot((SubtaskState(subtask, b"of %d" % subtask),), events, events_sent)


def checkpoint(*parts: SubtaskSnapshot) -> CompletedCheckpoint:
    return CompletedCheckpoint(7, len(parts), b"books", dict(enumerate(parts)))


class Positions:
    """A coordinator that records the position of every event and request that it receives."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Any, int]] = []
        self.restored: list[bool] = []
        self.coordinator = RecordingCoordinator(handle_event_from_operator=self._hear, handle_request=self._hear)

    async def _hear(self, subtask: int, attempt: int, event: Any) -> None:
        self.heard.append((subtask, event, self.coordinator.context.events_taken(subtask)))
        self.restored.append(self.coordinator.context.handles_restored)


# --- the start ----------------------------------------------------------------------------------------------------


async def test_the_coordinator_is_reset_before_it_starts_and_everything_restores() -> None:  # H6, H52
    async with running_operator(restored=checkpoint(part(0, "held"), part(1))) as world:
        assert world.coordinator.calls == [("reset_to_checkpoint", 7, b"books"), ("start",)]
        one, _ = await world.running(0, 1)
        assert one.registered is not None
        assert (one.registered.checkpoint_id, one.registered.states) == (7, (SubtaskState(0, b"of 0"),))
        assert world.coordinator.events == ["held"]  # H31
        world.fail(one)
        await world.settle()
        assert world.coordinator.calls[-1] == ("subtask_reset", 0, 7)  # H18
        assert world.statistics.last_completed_checkpoint_id == 7
        assert world.statistics.operator_resets == 0


async def test_a_reset_before_the_first_attempt_goes_to_the_restored_checkpoint() -> None:  # H18, H52
    async with running_operator(restored=checkpoint(part(0), part(1))) as world:
        world.reset()
        await world.settle()
        assert world.coordinator.calls[-1] == ("reset_to_checkpoint", 7, b"books")


async def test_a_restore_that_fails_is_a_failed_start() -> None:  # H6, H52
    cause = ValueError("written by a later release")

    coordinator = RecordingCoordinator(reset_to_checkpoint=raising(cause))
    async with running_operator(coordinator, restored=checkpoint(part(0), part(1)), started=False) as world:
        with pytest.raises(ValueError, match="later release") as caught:
            await world.kit.drive(world.tracker.ask(StartOperator, timeout_s=1.0))
        assert caught.value is cause
        await world.stop()
        assert [call[0] for call in coordinator.calls] == ["reset_to_checkpoint", "close"]
        assert not world.reports  # no job exists yet that could fail


def test_in_batch_mode_nothing_is_restored() -> None:  # H52, H55
    with pytest.raises(ValueError, match="coordinate it in streaming mode"):
        OperatorConfig("words", 2, RestoreMode.BATCH, restored=checkpoint(part(0), part(1)))


async def test_with_another_parallelism_held_events_keep_their_sender_and_order() -> None:  # H52
    restored = checkpoint(part(0), part(1, "a", "b"), part(2), part(3, "c"))
    positions = Positions()
    async with running_tasks(2, positions.coordinator, restored=restored) as (world, (_, heir)):
        heir.send("new")
        await world.settle()
        assert positions.heard == [(1, "a", 1), (1, "b", 2), (3, "c", 3), (1, "new", 4)]
        assert world.statistics.events_restored == 3
        assert heir.registered is not None
        assert [state.subtask for state in heir.registered.states] == [1, 3]
        answer = await world.checkpoint()
        assert answer.values == [8]  # H4, H32: both sides count the same


def asked_in(checkpoint: CompletedCheckpoint, subtask: int, *places: int) -> CompletedCheckpoint:
    """Return the same checkpoint with requests at these places of the subtask's held items."""
    parts = dict(checkpoint.subtask_states)
    held = tuple(event._replace(is_request=n in places) for n, event in enumerate(parts[subtask].held))
    parts[subtask] = replace(parts[subtask], held=held)
    return replace(checkpoint, subtask_states=parts)


async def test_a_restored_request_is_handled_again_and_its_answer_is_dropped() -> None:  # H73, H31, H32
    positions = Positions()
    restored = asked_in(checkpoint(part(0, "event", "request", "more"), part(1)), 0, 1)
    async with running_tasks(2, positions.coordinator, restored=restored) as (world, (task, _)):
        calls = positions.coordinator.calls_of("handle_event_from_operator", "handle_request")
        assert [(call[0], call[3]) for call in calls] == [
            ("handle_event_from_operator", "event"),
            ("handle_request", "request"),
            ("handle_event_from_operator", "more"),
        ]
        assert positions.restored == [True] * 3
        assert [position for _, _, position in positions.heard] == [1, 2, 3]
        assert world.statistics.events_restored == 3
        assert task.answers == {}
        task.ask("a new one")
        await world.settle()
        assert list(task.answers) == [1]
        assert positions.restored == [True] * 3 + [False]
        assert not positions.coordinator.context.handles_restored


async def test_with_another_parallelism_held_requests_keep_their_sender_and_order() -> None:  # H73, H52
    positions = Positions()
    restored = asked_in(checkpoint(part(0), part(1, "a"), part(2), part(3, "c", "d")), 3, 0)
    async with running_tasks(2, positions.coordinator, restored=restored) as (_, _):
        assert positions.heard == [(1, "a", 1), (3, "c", 2), (3, "d", 3)]
        assert [call[3] for call in positions.coordinator.calls_of("handle_request")] == ["c"]


async def test_a_coordinator_that_answers_no_requests_bears_a_restored_one() -> None:  # H73
    coordinator = RecordingCoordinator()
    restored = asked_in(checkpoint(part(0, "request", "event"), part(1)), 0, 0)
    async with running_tasks(2, coordinator, restored=restored) as (world, _):
        assert coordinator.events == ["event"]
        assert (world.reports, world.failures) == ([], [])


# --- positions ----------------------------------------------------------------------------------------------------


async def test_the_position_of_an_event_is_counted_over_the_restored_history() -> None:  # H32, H52
    positions = Positions()
    async with running_operator(
        positions.coordinator, restored=checkpoint(part(0, "held", events_sent=(5,)), part(1))
    ) as world:
        one, two = await world.running(0, 1)
        one.send("new")
        two.send("first")
        await world.settle()
        assert sorted(positions.heard) == [(0, "held", 6), (0, "new", 7), (1, "first", 1)]
        context = positions.coordinator.context
        assert [context.events_taken(subtask) for subtask in (0, 1)] == [7, 1]


async def test_an_event_that_is_sent_again_after_a_restore_has_the_position_that_it_had() -> None:  # H32
    positions = Positions()
    async with running_tasks(1, positions.coordinator) as (world, (task,)):
        task.send("covered")
        task.ask("a question counts too")  # H33
        await world.settle()
        await world.checkpoint()
        task.send("not covered")
        await world.settle()
        world.fail(task)
        await world.settle()
        assert positions.coordinator.context.events_taken(0) == 0
        (again,) = await world.running(0)
        assert positions.coordinator.context.events_taken(0) == 2
        again.send("not covered")
        await world.settle()
        assert positions.heard == [
            (0, "covered", 1),
            (0, "a question counts too", 2),
            (0, "not covered", 3),
            (0, "not covered", 3),
        ]
        answer = await world.checkpoint()
        assert answer.values == [2]


async def test_what_a_finished_attempt_had_sent_counts_until_its_success_is_revoked() -> None:  # H32, H47, H17
    async with running_tasks(2) as (world, (done, _)):
        done.send("before the end")
        done.finish(state=b"final")
        await world.settle()
        world.finish(done)
        answer = await world.checkpoint()
        assert answer.values == [1]
        assert world.stored[0].subtask_states[0].events_sent == (1,)
        assert world.coordinator.context.events_taken(0) == 1
        world.fail(done, FailureKind.REVOKED)
        (again,) = await world.running(0)
        again.send("once more")
        await world.settle()
        assert world.coordinator.context.events_taken(0) == 2
        answer = await world.checkpoint()
        assert answer.values == [2]


async def test_a_reset_of_everything_counts_from_the_restored_checkpoint_again() -> None:  # H32, H15
    async with running_tasks(1) as (world, (task,)):
        task.send("x")
        await world.settle()
        world.reset()
        await world.settle()
        assert world.coordinator.context.events_taken(0) == 0
        (again,) = await world.running(0)
        again.send("y")
        await world.settle()
        assert world.coordinator.context.events_taken(0) == 1


class ForgetfulTask(Task):
    """Counts an event that it never sent, as if one had been lost on the way."""

    def _say(self, message: UpMessage) -> None:
        if isinstance(message, CheckpointAcknowledged):
            message = replace(message, events_sent=(message.events_sent[0] + 1,))
        super()._say(message)


async def test_where_the_two_sides_count_differently_nothing_is_stored() -> None:  # H32, H45
    async with running_tasks(1, task_type=ForgetfulTask) as (world, (task,)):
        task.send("heard")
        answer = await world.checkpoint()
        assert world.coordinator.events == ["heard"]
        assert "2" in answer.reason()
        assert world.stored == []
        assert world.coordinator.calls[-2:] == [("notify_checkpoint_aborted", 1), ("notify_checkpoint_discarded", 1)]


async def test_parts_that_are_too_much_for_one_frame_fail_the_attempt_and_say_so() -> None:  # H48, H52
    large = tuple(SubtaskSnapshot((SubtaskState(subtask, bytes(65 * 2**20)),)) for subtask in range(2))
    async with running_operator(parallelism=1, restored=checkpoint(*large)) as world:
        task = world.accept(0)
        await world.settle()
        (condemned,) = world.reported(AttemptCondemned)
        assert "checkpoint 7 cannot be restored: Registered takes" in condemned.reason
        assert condemned.unusable
        assert task.registered is None
        assert task.connection is None or task.connection.closed


# --- a sender that is gone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["send", "gateways", "later"])
async def test_what_is_sent_to_the_sender_of_a_restored_message_that_is_gone_reaches_nobody(how: str) -> None:  # H151
    answers: list[Any] = []

    async def answer(subtask: int, attempt: int, event: Any) -> None:
        gateways = coordinator.context.gateways
        if how == "later":
            coordinator.context.call_soon_threadsafe(partial(send_later, subtask))
        elif how == "send":
            answers.append(await gateways.send(subtask, ["for", event]))
        else:
            answers.append(gateways.gateways(subtask))

    async def send_later(subtask: int) -> None:
        answers.append(await coordinator.context.gateways.send(subtask, "later"))

    coordinator = RecordingCoordinator(handle_event_from_operator=answer, handle_request=answer)
    held = asked_in(checkpoint(part(0, "mine"), part(1, "an event", "a request"), part(2), part(3)), 1, 1)
    async with running_tasks(1, coordinator, parallelism=1, restored=held) as (world, (task,)):
        await world.settle()
        if how == "later":  # the restored message is handled by then, and there is only subtask 0
            assert "there is no subtask 1" in str(world.failures[0])
        else:
            assert [len(answered) for answered in answers] == [1, 0, 0]
            assert world.failures == []
            assert task.events == ([["for", "mine"]] if how == "send" else [])


@pytest.mark.parametrize("subtask", [-1, 1, 10**9])
async def test_a_subtask_that_no_message_names_is_a_mistake_as_ever(subtask: int) -> None:  # H151, H88
    async with running_tasks(1, parallelism=1) as (world, _):
        gateways = world.coordinator.context.gateways
        with pytest.raises(ValueError, match=f"no subtask {subtask}|at least 0, not {subtask}"):
            gateways.gateways(subtask)
        with pytest.raises(ValueError, match=f"no subtask {subtask}|at least 0, not {subtask}"):
            await gateways.send(subtask, "x")


@pytest.mark.parametrize("seed", range(10))
async def test_no_restore_makes_a_coordinator_fail_that_answers_each_sender(seed: int) -> None:  # H151, H52
    random = Random(seed)
    print(f"seed {seed}")
    before, after = random.randrange(1, 9), random.randrange(1, 9)
    parts = [part(subtask, *range(random.randrange(4))) for subtask in range(before)]
    restored = checkpoint(*parts)
    for subtask, of_subtask in enumerate(parts):
        asked = [place for place in range(len(of_subtask.held)) if random.random() < 0.5]
        restored = asked_in(restored, subtask, *asked)

    async def answer(subtask: int, attempt: int, event: Any) -> None:
        sent = await coordinator.context.gateways.send(subtask, [subtask, event])
        assert len(sent) == (1 if subtask < after and subtask in coordinator.context.gateways.ready else 0)

    coordinator = RecordingCoordinator(handle_event_from_operator=answer, handle_request=answer)
    order = random.sample(range(after), after)
    async with running_operator(coordinator, parallelism=after, restored=restored) as world:
        for subtask in order:
            await world.running(subtask)
        assert world.failures == []
        assert world.statistics.events_restored == sum(len(one.held) for one in parts)
        for task in world.tasks:
            assert all(sender == task.attempt.subtask for sender, _ in task.events)
