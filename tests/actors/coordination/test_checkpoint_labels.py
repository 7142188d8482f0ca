# SPDX-License-Identifier: Apache-2.0

"""Checkpoint labels say which work a checkpoint belongs to, and whether it holds all of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from actors.coordination.engine.inputs import (
    ActionId,
    BatchInput,
    CheckpointLabels,
    InputPosition,
    NamedInput,
    NoInput,
    UnnamedInput,
)
from actors.coordination.engine.messages import BatchDone, LabelledWork
from protocol.attempts import GlobalFailureRaised
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import World, raising, running_operator, waiting_for

NONE = str(InputPosition(NoInput(), done=True))


def batch(number: int) -> BatchInput:
    return BatchInput("q", number)


def begun(number: int) -> str:
    return str(InputPosition(batch(number), done=False))


def done(number: int) -> str:
    return str(InputPosition(batch(number), done=True))


def labels(world: World) -> list[str]:
    return [checkpoint.label for checkpoint in world.stored]


async def run_well(world: World) -> None:
    """Run one subtask again, from its reset to its final checkpoint."""
    world.reset("a new run")
    (task,) = await world.running(0)
    await finish_well(world, task)


async def finish_well(world: World, task: Any) -> None:
    task.finish(state=b"last")
    await world.settle()
    world.finish(task)
    world.end_run()
    await world.settle()


async def test_a_run_that_nobody_has_named_is_labelled_with_its_place() -> None:
    async with running_operator(parallelism=1) as world:
        await run_well(world)
        assert labels(world) == [str(InputPosition(UnnamedInput(), done=True))]


async def test_what_begins_before_the_good_end_of_the_run_is_told_from_what_begins_after_it() -> None:
    async with running_operator(parallelism=1) as world:
        world.announce(batch(1))
        (task,) = await world.running(0)
        await world.checkpoint()
        assert await world.labelled_work() == LabelledWork(begun(1), 1, False)
        await finish_well(world, task)
        await world.checkpoint()
        assert labels(world) == [begun(1), done(1), done(1)]
        world.announce(batch(2))
        assert await world.labelled_work() == LabelledWork(done(1), 0, False)
        await run_well(world)
        assert labels(world)[-1] == done(2)


async def test_one_that_began_before_the_end_is_not_a_final_one_although_it_is_complete_after_it() -> None:
    written = asyncio.Event()

    async with running_operator(parallelism=1) as world:
        world.announce(batch(1))
        (task,) = await world.running(0)
        task.finish(state=b"last")
        await world.settle()
        world.on_store = waiting_for(written)
        await world.checkpoint()
        world.finish(task)
        world.end_run()
        await world.settle()
        written.set()
        await world.settle()
        assert labels(world) == [begun(1), done(1)]


async def test_a_run_that_failed_has_done_nothing_and_may_be_tried_again() -> None:
    async with running_operator(parallelism=1) as world:
        world.announce(batch(1))
        await world.running(0)
        world.end_run(succeeded=False)
        world.reset("the run has failed")
        await world.checkpoint()
        assert labels(world) == [begun(1)], "what begins after a failed run does not hold it"
        await run_well(world)
        assert labels(world) == [begun(1), done(1)]
        assert not world.reported(GlobalFailureRaised)


async def test_a_run_whose_final_checkpoint_failed_may_be_tried_again() -> None:
    async with running_operator(parallelism=1, tolerated_failures=0) as world:
        world.announce(batch(1))
        world.on_store = raising(OSError("no space left"))
        await run_well(world)
        assert await world.labelled_work() == LabelledWork(NONE, 1, True)
        world.on_store = None
        failures = len(world.reported(GlobalFailureRaised))
        await run_well(world)
        assert labels(world) == [done(1)]
        assert len(world.reported(GlobalFailureRaised)) == failures
        assert await world.labelled_work() == LabelledWork(done(1), 2, False)


async def test_a_second_run_of_what_is_done_is_a_global_failure() -> None:
    async with running_operator(parallelism=1) as world:
        world.announce(batch(1))
        await run_well(world)
        world.reset("a new run")
        (task,) = await world.running(0)
        (failure,) = world.reported(GlobalFailureRaised)
        assert "a second run" in failure.cause
        assert "batch 1 of q" in failure.cause
        await world.checkpoint()
        assert labels(world) == [done(1), done(1)], "should it come that far, the first run is still not done again"
        await finish_well(world, task)
        world.reset("a third run")
        await world.running(0)
        assert len(world.reported(GlobalFailureRaised)) == 2


async def test_the_label_of_the_restored_checkpoint_is_the_first_one() -> None:
    restored = CompletedCheckpoint(7, 1, b"books", label=done(3))
    async with running_operator(parallelism=1, restored=restored) as world:
        assert await world.labelled_work() == LabelledWork(done(3), 0, False)
        await world.checkpoint()
        assert labels(world) == [done(3)]
        await run_well(world)
        assert labels(world)[0] == done(3)
        after = InputPosition(UnnamedInput(), done=True, last_batch=InputPosition.read(done(3)))
        assert labels(world)[1] == str(after), "a plain run after it"


async def test_work_without_a_run_is_done_by_a_checkpoint() -> None:
    async with running_operator(parallelism=1) as world:
        world.tracker.tell(BatchDone(batch(1)))
        await world.checkpoint()
        assert await world.labelled_work() == LabelledWork(done(1), 0, False)


async def test_a_savepoint_has_the_label_and_changes_nothing() -> None:  # H49
    async with running_operator(parallelism=1) as world:
        world.announce(batch(1))
        await world.running(0)
        await world.checkpoint("elsewhere")
        assert [checkpoint.label for _, checkpoint in world.savepoints] == [begun(1)]
        assert await world.labelled_work() == LabelledWork(NONE, 1, False)


async def test_in_batch_mode_no_checkpoint_has_a_label() -> None:
    async with running_operator(parallelism=1, mode=RestoreMode.BATCH) as world:
        await world.running(0)
        await world.checkpoint()
        assert labels(world) == [""]


def test_only_the_first_run_and_its_repetitions_have_the_input_that_the_user_has_said_is_the_same() -> None:  # H174
    """The run ends well, and its output is never committed: the next one must not skip its own first records."""
    label = str(InputPosition(NamedInput("monday"), done=False))
    labels = CheckpointLabels(CompletedCheckpoint(4, 1, b"c", {}, label=label), "same")
    action = ActionId("0" * 16, 0, "day 1")
    assert labels.run_begins(str(action)) == (True, "")
    assert labels.run_begins(str(replace(action, number=1))) == (True, ""), "it was restarted"
    labels.run_ended(succeeded=True, job_succeeded=True)
    same, why = labels.run_begins(str(ActionId("1" * 16, 0, "day 2")))
    assert not same
    assert "was interrupted" in why


def test_what_is_given_up_is_the_input_of_no_run() -> None:  # H174
    label = str(InputPosition(NamedInput("monday"), done=False))
    labels = CheckpointLabels(CompletedCheckpoint(4, 1, b"c", {}, label=label), "other")
    for day in ("tuesday", "wednesday"):
        assert labels.run_begins(str(ActionId("0" * 16, 0, day))) == (False, "")
