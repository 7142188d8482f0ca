"""Whole checkpoints, with both ends of every channel (H31, H40 to H47)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from actors import ActorStopped
from actors.coordination import CheckpointFailed
from actors.coordination.messages import RequestCheckpoint
from protocol.attempts import AttemptCondemned, GlobalFailureRaised
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.codec import decode_event, encode_event
from protocol.messages import RestoreMode
from tests.actors.coordination.operator_world import Answer, RecordingCoordinator, World, running_operator


def reason_of(answer: Answer) -> str:
    assert not answer.values
    (error,) = answer.errors
    assert isinstance(error, CheckpointFailed)
    return str(error)


def decoded(checkpoint: CompletedCheckpoint, subtask: int) -> tuple[list[Any], list[Any]]:
    """The events that a subtask had handled, and those that its valve held, in a checkpoint."""
    snapshot = checkpoint.subtask_states[subtask]
    return decode_event(snapshot.state), [decode_event(payload) for payload in snapshot.held]


async def test_a_request_is_answered_with_the_id_of_the_complete_checkpoint() -> None:  # H4, H40
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        one, two = await world.running(0, 1)
        first = world.checkpoint()
        await world.settle()
        second = world.checkpoint()
        await world.settle()
        assert (first.values, second.values) == ([1], [2])
        assert [checkpoint.checkpoint_id for checkpoint in world.stored] == [1, 2]
        assert world.stored[0].coordinator_state == b"state"
        assert coordinator.calls[3:] == [
            ("checkpoint_coordinator", 1),
            ("notify_checkpoint_complete", 1),
            ("checkpoint_coordinator", 2),
            ("notify_checkpoint_complete", 2),
        ]
        for task in (one, two):
            assert task.handled == [("snapshot", 1), ("completed", 1), ("snapshot", 2), ("completed", 2)]
        assert world.statistics.checkpoints_completed == 2


async def test_nobody_is_told_before_the_checkpoint_is_durable() -> None:  # H40
    written = asyncio.Event()

    async def write(checkpoint: Any) -> None:
        await written.wait()

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        world.on_store = write
        answer = world.checkpoint()
        await world.settle()
        assert answer.open
        assert coordinator.calls[-1] == ("checkpoint_coordinator", 1)
        assert task.handled == [("snapshot", 1)]
        written.set()
        await world.settle()
        assert answer.values == [1]
        assert task.handled == [("snapshot", 1), ("completed", 1)]


async def test_all_subtasks_close_before_the_coordinator_takes_its_snapshot() -> None:  # H40
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        _, slow = await world.running(0, 1)
        slow.deaf = True
        world.checkpoint()
        await world.settle()
        assert not coordinator.named("checkpoint_coordinator")
        slow.deaf = False
        await world.settle()
        assert coordinator.named("checkpoint_coordinator")


@pytest.mark.parametrize("seed", range(20))
async def test_an_event_is_in_the_checkpoint_on_both_sides_or_on_neither(seed: int) -> None:  # the invariant, H40
    """Both sides send all the time; what each has sent and received is in the states."""
    sent_down: dict[int, list[int]] = {0: [], 1: []}

    async def send_one_down(subtask: int, attempt: int, event: Any) -> None:
        number = len(sent_down[subtask])
        sent_down[subtask].append(number)
        coordinator.gateways[subtask].send_event_nowait(number)

    async def snapshot(checkpoint_id: int) -> bytes:
        received: dict[int, list[Any]] = {0: [], 1: []}
        for _, subtask, _, event in coordinator.named("handle_event_from_operator"):
            received[subtask].append(event)
        return encode_event([received, {subtask: list(sent) for subtask, sent in sent_down.items()}])

    coordinator = RecordingCoordinator(handle_event_from_operator=send_one_down, checkpoint_coordinator=snapshot)
    async with running_operator(coordinator, seed=seed) as world:
        tasks = await world.running(0, 1)
        sent_up: dict[int, list[int]] = {0: [], 1: []}

        async def traffic(steps: int) -> None:
            for number in range(steps):
                for task in tasks:
                    subtask = task.attempt.subtask
                    sent_up[subtask].append(len(sent_up[subtask]))
                    task.send(sent_up[subtask][-1])
                    if (number + subtask + seed) % 3 == 0:
                        task.read()
                for _ in range((seed + number) % 7):
                    await world.kit.step()

        await traffic(5)
        answers = [world.checkpoint()]
        await traffic(10)
        await world.settle()
        answers.append(world.checkpoint())
        await traffic(5)
        await world.settle()
        assert [answer.values for answer in answers] == [[1], [2]]
        for checkpoint in world.stored:
            received, sent = decode_event(checkpoint.coordinator_state)
            for subtask in (0, 1):
                handled, held = decoded(checkpoint, subtask)
                assert handled == sent[subtask], "down: sent before the cut, and handled before the barrier"
                ups = received[subtask] + held
                assert ups == sent_up[subtask][: len(ups)], "up: received, or held in the snapshot, in order"
        for task in tasks:  # and nothing was lost or doubled by the way
            subtask = task.attempt.subtask
            assert task.events == sent_down[subtask]
        ups_of_all = {0: [], 1: []} | {
            subtask: [call[3] for call in coordinator.named("handle_event_from_operator") if call[1] == subtask]
            for subtask in (0, 1)
        }
        assert ups_of_all == sent_up


async def test_events_of_a_closed_subtask_are_in_its_snapshot_and_arrive_once_after_it() -> None:  # H31
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, slow = await world.running(0, 1)
        task.send("before")
        await world.settle()
        slow.deaf = True
        world.checkpoint()
        await world.settle()
        task.send("held 1")
        task.send("held 2")
        await world.settle()
        assert coordinator.events == ["before"]
        slow.deaf = False
        await world.settle()
        (checkpoint,) = world.stored
        assert decoded(checkpoint, 0)[1] == ["held 1", "held 2"]
        assert coordinator.events == ["before", "held 1", "held 2"]


async def test_held_events_leave_first_after_a_restore() -> None:  # H31, H18
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, slow = await world.running(0, 1)
        slow.deaf = True
        world.checkpoint()
        await world.settle()
        task.send("held")
        slow.deaf = False
        await world.settle()
        world.fail(task)
        await world.settle()
        coordinator.calls.clear()
        restored = world.accept(0)
        restored.opens_at_once = False
        await world.settle()
        assert restored.registered is not None
        assert restored.registered.checkpoint_id == 1
        assert restored.registered.state is not None
        restored.open()
        restored.send("new")
        await world.settle()
        assert coordinator.events == ["held", "new"]


async def test_events_sent_after_the_cut_wait_for_that_subtasks_acknowledge_and_only_for_that() -> None:  # H41
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        quick, slow = await world.running(0, 1)
        slow.busy = True
        world.checkpoint()
        await world.settle()
        assert quick.handled == [("snapshot", 1)]
        confirmations = [await coordinator.gateways[subtask].send_event("after the cut") for subtask in (0, 1)]
        await world.settle()
        assert quick.events == ["after the cut"]
        assert [confirmation.confirmed() for confirmation in confirmations] == [True, False]
        slow.busy = False
        await world.settle()
        assert slow.handled == [("snapshot", 1), "after the cut", ("completed", 1)]
        assert confirmations[1].confirmed()


async def test_what_is_sent_inside_the_snapshot_is_before_the_cut() -> None:  # H40, H41
    async def send_and_return(checkpoint_id: int) -> bytes:
        await coordinator.gateways[0].send_event("inside")
        return b""

    async def send_after(checkpoint_id: int) -> None:
        await coordinator.gateways[0].send_event("after")

    coordinator = RecordingCoordinator(checkpoint_coordinator=send_and_return, notify_checkpoint_complete=send_after)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        await coordinator.gateways[0].send_event("before")
        world.checkpoint()
        await world.settle()
        assert task.handled == ["before", "inside", ("snapshot", 1), ("completed", 1), "after"]


async def test_the_barrier_waits_for_every_event_of_before_the_cut() -> None:  # H42
    async def send_and_return(checkpoint_id: int) -> bytes:
        task.mute = True  # from here on its confirmations do not come through
        await coordinator.gateways[0].send_event("inside")
        return b""

    coordinator = RecordingCoordinator(checkpoint_coordinator=send_and_return)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        answer = world.checkpoint()
        await world.settle()
        assert task.handled == ["inside"]
        task.speak()
        await world.settle()
        assert task.handled == ["inside", ("snapshot", 1), ("completed", 1)]
        assert answer.values == [1]


async def test_an_event_of_before_the_cut_that_is_not_confirmed_fails_the_checkpoint() -> None:  # H42, H25
    async def send_and_return(checkpoint_id: int) -> bytes:
        task.deaf = True
        await coordinator.gateways[0].send_event("inside")
        return b""

    coordinator = RecordingCoordinator(checkpoint_coordinator=send_and_return)
    async with running_operator(coordinator, confirm_timeout_s=3.0) as world:
        task, other = await world.running(0, 1)
        answer = world.checkpoint()
        await world.advance(4.0)
        assert isinstance(world.reports[0], AttemptCondemned)
        world.fail(task)  # what the ledger does then
        await world.settle()
        assert reason_of(answer).startswith("checkpoint 1: words[0]#0")
        assert other.handled == [("aborted", 1)]


async def test_a_loss_tolerant_event_keeps_no_checkpoint_waiting() -> None:  # H28
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.mute = True
        await coordinator.gateways[0].send_event("a hint", loss_tolerant=True)
        await world.settle()
        answer = world.checkpoint()
        task.speak()  # the confirmation has come, but neither does the checkpoint need it
        await world.settle()
        assert answer.values == [1]


async def test_an_attempt_that_becomes_ready_while_others_close_is_announced_after_the_snapshot() -> None:  # H40
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (slow,) = await world.running(0)
        slow.deaf = True
        world.checkpoint()
        (late,) = await world.running(1)
        late.send("not in the checkpoint")
        await world.settle()
        slow.deaf = False
        await world.settle()
        assert [call[0] for call in coordinator.calls[2:]] == [
            "checkpoint_coordinator",
            "subtask_ready",
            "handle_event_from_operator",
            "notify_checkpoint_complete",
        ]
        assert 1 not in world.stored[0].subtask_states  # H47: as empty


async def test_a_finished_subtask_takes_part_with_its_final_state() -> None:  # H47
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        done, _ = await world.running(0, 1)
        done.finish(state=b"final")
        await world.settle()
        world.finish(done)
        answer = world.checkpoint()
        await world.settle()
        assert answer.values == [1]
        assert world.stored[0].subtask_states[0].state == b"final"


async def test_a_checkpoint_goes_on_over_a_broken_connection() -> None:  # H24, H40
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, other = await world.running(0, 1)
        task.busy = True
        answer = world.checkpoint()
        await world.settle()
        task.lose_connection()
        await world.settle()
        task.busy = False
        task.send("from between")
        await world.settle()
        task.reconnect(world.connection())
        await world.settle()
        assert answer.values == [1]
        assert coordinator.events == ["from between"]
        assert other.handled[-1] == ("completed", 1)


# --- aborts -------------------------------------------------------------------------------------------------------


async def assert_that_all_goes_on(world: World, coordinator: RecordingCoordinator) -> None:
    """After an abort every valve is open, in both directions, and the next checkpoint completes."""
    living = [task for task in world.tasks if not task.ended]
    for task in living:
        subtask = task.attempt.subtask
        task.send("up again")
        assert (await coordinator.gateways[subtask].send_event("down again")).done() is False
    await world.settle()
    for task in living:
        assert task.events[-1] == "down again"
    assert coordinator.events[-len(living) :] == ["up again"] * len(living)
    answer = world.checkpoint()
    await world.settle()
    assert len(answer.values) == 1


async def test_a_subtask_that_declines_aborts_the_checkpoint_on_both_sides() -> None:  # H45
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, other = await world.running(0, 1)
        task.declines = "my files are open"
        answer = world.checkpoint()
        await world.settle()
        assert "declined: my files are open" in reason_of(answer)
        assert coordinator.calls[-1] == ("notify_checkpoint_aborted", 1)
        assert task.handled[-1] == ("aborted", 1)
        assert other.handled[-1] == ("aborted", 1)
        assert world.statistics.checkpoints_aborted == 1
        task.declines = ""
        await assert_that_all_goes_on(world, coordinator)


async def test_a_checkpoint_that_takes_too_long_is_aborted_on_both_sides() -> None:  # H45, H48
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, checkpoint_timeout_s=10.0) as world:
        task, other = await world.running(0, 1)
        task.busy = True
        answer = world.checkpoint()
        await world.advance(9.9)
        assert answer.open
        await world.advance(0.2)
        assert "10 s" in reason_of(answer)
        assert str(task.attempt) in reason_of(answer)
        task.busy = False
        await world.settle()
        assert coordinator.named("notify_checkpoint_aborted") == [("notify_checkpoint_aborted", 1)]
        assert other.handled[-1] == ("aborted", 1)
        await assert_that_all_goes_on(world, coordinator)


async def test_an_attempt_that_fails_aborts_the_checkpoint_before_anybody_hears_of_it() -> None:  # H16, H45
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, other = await world.running(0, 1)
        task.busy = True
        answer = world.checkpoint()
        await world.settle()
        world.fail(task)
        await world.settle()
        assert [call[0] for call in coordinator.calls[-3:]] == [
            "notify_checkpoint_aborted",
            "subtask_failed",
            "subtask_reset",
        ]
        assert answer.errors
        assert other.handled[-1] == ("aborted", 1)
        await assert_that_all_goes_on(world, coordinator)


async def test_storage_that_fails_aborts_the_checkpoint() -> None:  # H45
    async def fail(checkpoint: Any) -> None:
        raise OSError("no space left")

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        world.on_store = fail
        answer = world.checkpoint()
        await world.settle()
        assert "OSError: no space left" in reason_of(answer)
        assert task.handled[-1] == ("aborted", 1)
        world.on_store = None
        await assert_that_all_goes_on(world, coordinator)


async def test_a_checkpoint_aborted_while_it_is_stored_is_taken_back() -> None:  # H44, H51
    disk = asyncio.Event()

    async def slowly(checkpoint: Any) -> None:
        await disk.wait()

    async def fail(checkpoint_id: int) -> None:
        raise OSError("it is gone already")

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        world.on_store, world.on_discard = slowly, fail
        answer = world.checkpoint()
        await world.settle()
        world.fail(task)
        await world.settle()
        assert answer.errors
        assert world.discarded == [1]
        disk.set()
        await world.settle()
        assert world.stored == []
        assert world.tracker.is_alive  # H48: storage that cannot delete ends nobody
        world.on_store = None
        await world.running(0)
        await assert_that_all_goes_on(world, coordinator)


async def test_a_coordinator_that_returns_nothing_is_told_to_return_bytes() -> None:  # H46
    async def forget(checkpoint_id: int) -> None:
        return None

    coordinator = RecordingCoordinator(checkpoint_coordinator=forget)
    async with running_operator(coordinator) as world:
        await world.running(0)
        answer = world.checkpoint()
        await world.settle()
        assert "returned NoneType, not bytes" in reason_of(answer)
        (failure,) = world.reported(GlobalFailureRaised)
        assert "return b''" in failure.cause


@pytest.mark.parametrize("state", [b"", bytearray(b"x"), memoryview(b"y")])
async def test_any_bytes_will_do_and_empty_ones_too(state: Any) -> None:  # H46
    async def snapshot(checkpoint_id: int) -> Any:
        return state

    async with running_operator(RecordingCoordinator(checkpoint_coordinator=snapshot)) as world:
        await world.running(0)
        world.checkpoint()
        await world.settle()
        assert world.stored[0].coordinator_state == bytes(state)


async def test_a_coordinator_that_takes_too_long_for_its_snapshot_aborts_it() -> None:  # H46, H48
    async def never(checkpoint_id: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    coordinator = RecordingCoordinator(checkpoint_coordinator=never)
    async with running_operator(coordinator, snapshot_timeout_s=5.0) as world:
        (task,) = await world.running(0)
        answer = world.checkpoint()
        await world.advance(4.9)
        assert answer.open
        await world.advance(0.2)
        assert "longer than 5 s" in reason_of(answer)
        assert task.handled == [("aborted", 1)]
        assert not world.failures
        del coordinator.deeds["checkpoint_coordinator"]
        await assert_that_all_goes_on(world, coordinator)


async def test_a_timeout_of_the_coordinators_own_is_an_exception_like_any_other() -> None:  # H7, H46
    async def give_up(checkpoint_id: int) -> bytes:
        raise TimeoutError("the broker did not answer")

    coordinator = RecordingCoordinator(checkpoint_coordinator=give_up)
    async with running_operator(coordinator) as world:
        await world.running(0)
        answer = world.checkpoint()
        await world.settle()
        assert "the broker did not answer" in reason_of(answer)
        assert "the broker did not answer" in str(world.failures[0])


async def test_a_second_request_waits_for_the_first_and_a_third_is_refused() -> None:  # H43
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.busy = True
        first, second, third = (world.checkpoint() for _ in range(3))
        await world.settle()
        assert "only one may" in reason_of(third)
        task.busy = False
        await world.settle()
        assert (first.values, second.values) == ([1], [2])
        assert not coordinator.named("notify_checkpoint_aborted")  # the third never began


async def test_the_id_of_a_reset_is_the_last_one_that_the_coordinator_was_told() -> None:  # H18
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        world.checkpoint()
        await world.settle()
        world.fail(task)
        (task,) = await world.running(0)
        assert coordinator.named("subtask_reset") == [("subtask_reset", 0, 1)]
        task.busy = True
        world.checkpoint()
        await world.settle()
        world.fail(task)
        await world.settle()
        assert coordinator.named("subtask_reset")[-1] == ("subtask_reset", 0, 1)
        world.reset()
        await world.settle()
        assert coordinator.calls[-1] == ("reset_to_checkpoint", 1, b"state")


async def test_in_batch_mode_every_reset_goes_to_the_beginning() -> None:  # H18, H55
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, mode=RestoreMode.BATCH) as world:
        (task,) = await world.running(0)
        world.checkpoint()
        await world.settle()
        world.fail(task)
        (task,) = await world.running(0)
        world.reset()
        await world.settle()
        assert coordinator.named("subtask_reset", "reset_to_checkpoint") == [
            ("subtask_reset", 0, -1),
            ("reset_to_checkpoint", -1, None),
        ]
        assert task.registered is not None
        assert (task.registered.checkpoint_id, task.registered.state) == (-1, None)


async def test_a_request_that_is_pending_at_the_stop_is_failed() -> None:  # H48
    ended: list[Exception] = []

    async def ask() -> None:
        try:
            await world.tracker.ask(RequestCheckpoint, timeout_s=1000.0)
        except ActorStopped as stopped:
            ended.append(stopped)

    async with running_operator(RecordingCoordinator()) as world:
        (task,) = await world.running(0)
        task.busy = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await world.settle()
            assert not ended
            await world.stop()
    assert len(ended) == 1
