"""Whole histories of one operator's checkpoints, with failures, resets, savepoints and copies at any moment.

A failing case prints its seed and its story; ``live(World(seed, concurrent_max), STEPS)`` replays it.
"""

from __future__ import annotations

import pytest

from protocol.attempts import OperatorReset
from protocol.barrier_tracker import Phase
from tests.protocol.barrier_tracker_world import World

STEPS = 1500


def live(world: World, steps: int) -> World:
    """So many things happen, whichever and in whatever order."""
    random = world.random
    for _ in range(steps):
        alive = [task for task in world.tasks.values() if not task.finished]
        missing = [s for s in range(world.parallelism) if not any(t.attempt.subtask == s for t in world.tasks.values())]
        match random.choices(range(11), (60, 10, 8, 8, 4, 1.5, 1.5, 2, 2, 0.5, 3))[0]:
            case 0:
                world.deliver()
            case 1:
                world.send()
            case 2 if missing and not world.operator_owed and missing[0] not in world.owed:
                world.register(missing[0])
            case 3 if opening := [task for task in alive if not task.ready]:
                world.open(random.choice(opening))
            case 4:
                world.trigger(random.random() < 0.2)
            case 5 if alive:
                world.fail(random.choice(alive))
            case 6 if running := [task for task in alive if task.told]:
                task = random.choice(running)
                if random.random() < 0.5:
                    world.finish(task)
                elif random.random() < 0.3:
                    world.register(task.attempt.subtask)  # a copy
            case 7:
                world.abort()
            case 8:
                world.speak_for_another()
            case 9 if not world.operator_owed:
                world.end_run(random.random() < 0.5)
            case 10:
                world.pass_time(random.choice([0.1, 1.0, 1.0, 4.0]))
        if random.random() < 0.3:
            world.reset()
    return world


def settle(world: World) -> None:
    """Everybody goes, and whatever was asked for has its answer in time."""
    world.tasks.clear()
    world.tell(OperatorReset("words", "the end"))
    for _ in range(1000):
        if world.idle():
            world.pass_time(25.0)
        world.deliver()


@pytest.mark.parametrize("concurrent_max", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_history_keeps_the_order_of_the_contract(seed: int, concurrent_max: int) -> None:
    # H4, H16, H18, H32, H40, H42 to H45, H49; the world says which where it checks
    world = World(seed, concurrent_max)
    try:
        live(world, STEPS)
        settle(world)
    except AssertionError:
        print("\n".join(world.story[-120:]))
        print(f"seed {seed}, concurrent_max {concurrent_max}")
        raise
    assert world.tracker.phase is Phase.IDLE
    unanswered = [n for n, checkpoint in world.checkpoints.items() if not checkpoint.answer]
    assert unanswered == []
    kinds = (
        "NotifyCheckpointComplete",
        "EndSavepoint",
        "NotifyCheckpointAborted",
        "NotifyCheckpointDiscarded",
        "SubtaskResetToCheckpoint",
        "TriggerCheckpoint",
    )
    for kind in kinds:
        assert world.kinds[kind], f"this history has shown nothing of {kind}"


def test_the_histories_reach_what_is_rare() -> None:
    # H32, H43, H45: together; else the checks above would hold for want of an occasion.
    worlds = [live(World(seed, 3), STEPS) for seed in range(8)]
    stories = "\n".join(line for world in worlds for line in world.story)
    for rare in (
        "subsumed by",
        "(H32)",
        "declined",
        "RaiseGlobalFailure",
        "SubtaskReady",
        "DiscardCheckpoint",
        "at once",
    ):
        assert rare in stories, rare
