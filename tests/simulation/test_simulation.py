# SPDX-License-Identifier: Apache-2.0

"""The simulation as a test: fresh worlds each time. ``tests/mutants`` shows that its checkers detect violations.

A failing run prints its seed; ``python -m tests.simulation --seed N`` replays it.
"""

from __future__ import annotations

from random import Random, SystemRandom

import pytest

from spark_bridge.subtask import parts
from tests.simulation.checkers import demand
from tests.simulation.world import World, run_world

WORLDS = 25


def test_fresh_worlds_keep_the_contract() -> None:
    # The invariant, H2-H6, H10-H24, H26-H28, H30-H33, H40-H50, H52, H55, H57, H174
    first = SystemRandom().randrange(1_000_000_000)
    print(f"seeds {first}..{first + WORLDS - 1}")
    for seed in range(first, first + WORLDS):
        world, error = run_world(seed)
        if error is not None:
            print("\n".join(world.story[-100:]))
            raise AssertionError(f"python -m tests.simulation --seed {seed}") from error


@pytest.mark.parametrize("seed", [136, 600_010, 601_248, 603_466, 615_044_186, 620_058_770, 737_813_114, 978_493_272])
def test_a_world_in_which_a_checker_was_once_mistaken_is_right(seed: int) -> None:
    """States of another input meet in a rescaling, a user gives up an input, and two calls are cancelled together.

    A user who has given up an input says so each time that he restores a checkpoint of it, a named file too.
    A task that resumes is heard when its gateway gets the new connection, not when the driver reads from it.
    An event that waits for an urgent one of a part outside of checkpoints is confirmed, and not in the mailbox yet.
    """
    world, error = run_world(seed, files=0.0)
    assert error is None, "\n".join(world.story[-100:])


@pytest.mark.parametrize("seed", [2083, 23519433, 164962490, 263741694, 506000235, 655497011, 739269127, 966184581])
def test_a_world_with_ready_made_parts_that_once_broke_a_rule_keeps_it(seed: int) -> None:  # H80, H100, H101
    world, error = run_world(seed, chains=1.0, teams=0.0, inputs=0.0, files=0.0)
    assert error is None, "\n".join(world.story[-100:])
    assert world.figures.happenings["an item"]


@pytest.mark.parametrize("seed", [9, 48, 65, 310, 418, 654])
def test_an_async_stage_has_one_result_for_each_record(seed: int) -> None:  # H180, H181
    """Ordered and not, behind the source and behind a plain function, while tasks and drivers die and are rescaled."""
    world, error = run_world(seed, chains=0.0, staged=1.0, paid=1.0, files=0.0)
    assert error is None, "\n".join(world.story[-100:])
    assert world.figures.happenings["a call ends"]
    assert world.figures.happenings["an input in flight is restored"]


@pytest.mark.parametrize("seed", [0, 1, 4, 6, 11, 12])
def test_states_in_files_are_whole_wherever_they_are_restored(seed: int) -> None:  # H190, H191
    """Tasks and drivers die during uploads and sweeps; a checkpoint and a restore have all files of one cut."""
    world, error = run_world(seed, files=1.0)
    assert error is None, "\n".join(world.story[-100:])
    for happening in ("a state in files is stored", "a file is named again", "files are swept"):
        assert world.figures.happenings[happening]


@pytest.mark.parametrize(
    ("seed", "happening"),
    [
        (6, "a piece of a table is restored"),
        (182, "a piece of a table is restored"),
        (163, "states of a savepoint are taken over"),
        (25, "a state of a savepoint is restored"),
    ],
)
def test_files_reach_another_parallelism_and_come_back_from_savepoints(seed: int, happening: str) -> None:  # H52, H193
    """Each event is counted once in all tables together, and a savepoint has all of its files itself."""
    world, error = run_world(seed, files=1.0, staged=0.0)
    assert error is None, "\n".join(world.story[-100:])
    assert world.figures.happenings[happening]


@pytest.mark.parametrize("seed", [0, None], ids=["a write of a savepoint fails", "fresh"])
def test_a_seed_tells_the_same_story_twice(seed: int | None) -> None:
    if seed is None:
        seed = Random().randrange(1_000_000)
    print(f"seed {seed}")
    first, second = World(seed), World(seed)
    first.run()
    second.run()
    assert first.story == second.story
    assert first.totals() == second.totals()


@pytest.mark.parametrize("broken_off", [False, True], ids=["to its end", "until it breaks a rule"])
def test_no_chain_of_stages_outlives_its_world(broken_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its tasks ended by themselves, were killed, or lost their driver: other tests share the process."""
    before = set(parts._open)
    step, opened = World.step, set()

    def watched(world: World) -> None:
        step(world)
        if set(parts._open) != before:
            opened.add(world.seed)
            demand(not broken_off, "it ends here")

    monkeypatch.setattr(World, "step", watched)
    first = SystemRandom().randrange(1_000_000_000)
    print(f"seeds {first}..{first + 4}")
    for seed in range(first, first + 5):
        _, error = run_world(seed, chains=0.0, staged=1.0)
        assert (error is not None) == (broken_off and seed in opened), error
        assert set(parts._open) == before
    assert opened
