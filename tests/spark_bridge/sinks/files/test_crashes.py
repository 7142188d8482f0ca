# SPDX-License-Identifier: Apache-2.0

"""Exactly-once output through crashes at every moment: the model of ``world``, exhaustively and at random."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from headgate.testing import _sink_cases
from spark_bridge.sinks.two_phase.errors import SinkFileLost
from tests.mutants.mutant import Edit
from tests.spark_bridge.sinks.files.kit import BreakingFileSystem, new_url
from tests.spark_bridge.sinks.files.world import World

pytestmark = pytest.mark.usefixtures("without_threads")

Step = Callable[[World], Awaitable[None] | None]

# Those of the public cases, for the world of this sink.
SCRIPT: list[Step] = cast(Any, _sink_cases.SCRIPT)
TROUBLES: dict[str, Step] = {
    "nothing": lambda world: None,
    "the first subtask fails, and a completion is told before": lambda world: world.fail(0, told_first=True),
    **cast(Any, _sink_cases.TROUBLES),
}
WRITES: dict[str, list[Step]] = {
    "fails, and the checkpoint is not there": [lambda world: world.store_and_fail(there=False)],
    "hangs, and is given up": [lambda world: world.hang(), lambda world: world.abort()],
    "hangs, and is given up when it is done": [World.hang, World.appear, lambda world: world.abort()],
    **cast(Any, _sink_cases.WRITES),
}
LATER: dict[str, list[Step]] = {
    "the checkpoint appears, and the driver dies": [World.appear, lambda world: world.boot()],
    "the discard succeeds, and the driver dies": [lambda world: world.discard(), lambda world: world.boot()],
    **cast(Any, _sink_cases.LATER),
}


class Crash(BaseException):
    """Stands for the death of the process that raises it: no clean-up that goes on after an error survives it."""


async def take(world: World, step: Step) -> None:
    done = step(world)
    if done is not None:
        await done
    world.check()


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_fault_between_any_two_steps_neither_loses_nor_repeats_a_row(trouble: str) -> None:
    """H18, H31, H47: also if the driver dies right after it, or a reader takes all files away."""
    for moment in range(len(SCRIPT) + 1):
        for then in (TROUBLES["nothing"], TROUBLES["the driver dies"], World.read):
            world = World(new_url())
            await world.boot()
            for step in [*SCRIPT[:moment], then, TROUBLES[trouble], then, *SCRIPT[moment:]]:
                await take(world, step)
            await world.end()
            world.check_end()


@pytest.mark.parametrize("there", [False, True])
async def test_a_write_of_a_checkpoint_that_failed_leaves_it_in_doubt_and_no_subtask_closed(there: bool) -> None:
    """H18: in the model, which ready sinks and those of users are tried with."""
    world = World(new_url())
    await world.boot()
    for step in SCRIPT[:-2]:
        await take(world, step)
    (checkpoint_id,) = (pending.checkpoint_id for pending in [world.pending] if pending is not None)
    await world.store_and_fail(there=there)
    assert world.pending is None
    assert world.in_doubt[checkpoint_id].there is there
    assert world.host.checkpoints_in_doubt == {checkpoint_id}
    assert [attempt.closed_for for attempts in world.attempts.values() for attempt in attempts] == [None, None]


async def test_a_task_that_lists_the_files_of_others_neither_loses_nor_repeats_a_row() -> None:
    """H83: at every moment, and while attempts fail and drivers die."""
    for trouble in (TROUBLES["nothing"], TROUBLES["the first subtask fails"], TROUBLES["the driver dies"]):
        for moment in range(len(SCRIPT) + 1):
            world = World(new_url())
            await world.boot()
            steal: list[Step] = [lambda world: world.steal(0), lambda world: world.steal(1)]
            for step in [*SCRIPT[:moment], *steal, trouble, *steal, *SCRIPT[moment:]]:
                await take(world, step)
            await world.end()
            world.check_end()


async def test_a_theft_that_succeeds_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """H83: without the proof, and without the rule about subtasks that stands behind it."""
    Edit("spark_bridge.sinks.two_phase.parts:parse_prepared", "if committable.part.token != token:", "if False:").apply(
        monkeypatch
    )
    listed = "spark_bridge.sinks.two_phase.ledger:SinkLedger.listed"
    Edit(listed, "if part.subtask != subtask or (", "if False and (").apply(monkeypatch)
    with pytest.raises((AssertionError, SinkFileLost)):
        await test_a_task_that_lists_the_files_of_others_neither_loses_nor_repeats_a_row()


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("write", WRITES)
async def test_whatever_a_storage_answers_no_row_is_lost_or_repeated(write: str, trouble: str) -> None:  # H64
    """A checkpoint with a wrong answer, then trouble, then the checkpoint's real outcome; and a reader."""
    stores = [place for place, step in enumerate(SCRIPT) if "store" in step.__code__.co_names]
    assert len(stores) == 4
    for place in stores:
        for later in LATER.values():
            for reads in (TROUBLES["nothing"], World.read):
                world = World(new_url())
                await world.boot()
                before, between, after = SCRIPT[:place], SCRIPT[place + 1 : place + 3], SCRIPT[place + 3 :]
                for step in [*before, *WRITES[write], TROUBLES[trouble], reads, *between, *later, reads, *after]:
                    await take(world, step)
                await world.end()
                world.check_end()


IN_DOUBT = next(place for place, step in enumerate(SCRIPT) if "store" in step.__code__.co_names)
SCRIPT_IN_DOUBT = [*SCRIPT[:IN_DOUBT], *WRITES["fails, and the checkpoint is there"], *SCRIPT[IN_DOUBT + 1 :]]
"""A script whose first checkpoint is in doubt until another one completes."""
SCRIPT_IN_DOUBT.insert(IN_DOUBT + 1, TROUBLES["the job fails"])


async def run_until_operation(script: list[Step], number: int, *, reads: bool) -> tuple[World, str]:
    """Run the script on a filesystem that breaks at its change ``number``; return the kind of that change, "" for
    none.

    ``reads``: a reader takes each file as soon as it becomes visible.
    """
    world = World(new_url())
    seen: list[str] = []

    def count(what: str, path: str) -> None:
        seen.append(what)
        if reads and what == "after remove":
            BreakingFileSystem.on_operation = None  # the reader's own changes do not count
            world.read()
            BreakingFileSystem.on_operation = count
        if len(seen) == number:
            raise Crash(what)

    BreakingFileSystem.on_operation = count
    try:
        await world.boot()
        for step in script:
            await take(world, step)
        await world.end()
    except Crash as crash:
        return world, str(crash)
    finally:
        BreakingFileSystem.on_operation = None
    return world, ""


@pytest.mark.parametrize("reads", [False, True], ids=["nobody reads", "a reader takes everything immediately"])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(SCRIPT, id="all completes"),
        pytest.param(SCRIPT_IN_DOUBT, id="one is in doubt", marks=pytest.mark.long),
    ],
)
async def test_a_crash_at_any_change_of_the_filesystem_neither_loses_nor_repeats_a_row(
    script: list[Step], reads: bool
) -> None:  # H64
    """Also between the copy and the removal, if publishing takes two steps; the whole application starts again."""
    kinds = set()
    number = 0
    while True:
        number += 1
        world, broken_at = await run_until_operation(script, number, reads=reads)
        if not broken_at:
            break
        kinds.add(broken_at)
        await world.boot()
        world.check()
        for step in SCRIPT:
            await take(world, step)
        await world.end()
        world.check_end()
    world.check_end()  # the run without a crash
    assert kinds >= {"before create", "after create", "before copy", "after copy", "before remove", "after remove"}


async def test_a_journal_that_is_written_after_the_move_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:  # H64
    where = "spark_bridge.sinks.files.driver:FileCommitter.commit"
    record = "self._journal.record(file.part for file in committables)"
    Edit(where, record, "pass").apply(monkeypatch)
    sync = "self._directory.sync_published()"
    Edit(where, sync, f"{sync}; {record}").apply(monkeypatch)
    with pytest.raises((AssertionError, SinkFileLost)):
        await test_a_crash_at_any_change_of_the_filesystem_neither_loses_nor_repeats_a_row(SCRIPT, reads=True)


async def test_a_reset_that_deletes_in_doubt_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:  # H64
    Edit("spark_bridge.sinks.two_phase.driver:SinkCommits._destroy", "if in_doubt:", "if False:").apply(monkeypatch)
    with pytest.raises((AssertionError, SinkFileLost)):
        await test_whatever_a_storage_answers_no_row_is_lost_or_repeated(
            "fails, and the checkpoint is there", "the job fails"
        )


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(15, 60))])
async def test_no_order_of_steps_and_faults_loses_or_repeats_a_row(seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    subtasks = dice.choice([1, 2, 3])
    world = World(new_url(), subtasks=subtasks, rows=dice.choice([3, 12]))
    await world.boot()
    for _ in range(dice.choice([40, 150])):
        _, step = _sink_cases.a_step(dice, subtasks)
        await take(world, World.read if dice.random() < 0.02 else cast(Any, step))
    await world.end()
    world.check_end()
