# SPDX-License-Identifier: Apache-2.0

"""A world that breaks the contract becomes a short story that breaks the same rule; the story can be saved."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from protocol.barrier_tracker import BarrierTracker, SubtaskResetToCheckpoint
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.types import PutInMailbox
from tests.simulation import shrink as shrinking
from tests.simulation import stories, world
from tests.simulation.checkers import Violation
from tests.simulation.choices import Record
from tests.simulation.shrink import shrink
from tests.simulation.stories import Story, load, rule_of, save, tell, tell_seed
from tests.simulation.world import World

STORIES = Path(__file__).parent / "stories"
STEPS_MAX = 100
"""The limit for a short story; the worlds that are broken here have some hundreds."""


def test_the_stories_that_were_kept_do_not_break_the_contract_any_more() -> None:
    # Each file in stories/ was once a violation; its name says which.
    broken = {path.stem: str(story.error) for path in sorted(STORIES.glob("*.json")) if (story := tell(load(path))[1])}
    assert not broken


# --- broken machines ---


def break_reset_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a reset name the next checkpoint, not the last one (H18)."""
    handle = BarrierTracker.handle

    def wrong(self: BarrierTracker, input: Any, now: float) -> list[Any]:
        effects = handle(self, input, now)
        return [
            SubtaskResetToCheckpoint(e.subtask, e.checkpoint_id + 1) if isinstance(e, SubtaskResetToCheckpoint) else e
            for e in effects
        ]

    monkeypatch.setattr(BarrierTracker, "handle", wrong)


def break_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some events reach the operator twice (H22)."""
    handle_batch = SubtaskMachine.handle_batch

    def twice(self: SubtaskMachine, batch: Any, now: float) -> list[Any]:
        effects = list(handle_batch(self, batch, now))
        events = [e for e in effects if isinstance(e, PutInMailbox) and b":d3" in getattr(e.item, "payload", b"")]
        return [*effects, *events]

    monkeypatch.setattr(SubtaskMachine, "handle_batch", twice)


def first_story(rule: str, eager: float | None = 0.1) -> Story:
    """Return the story of the first world that breaks this rule at some length."""
    for seed in range(500):
        _, story = tell_seed(seed, eager)
        if story is not None and story.rule == rule and story.steps > 2 * STEPS_MAX:
            return story
    raise AssertionError("nobody has noticed")


def quietly(_: str) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize(
    ("break_it", "rule"), [pytest.param(break_reset_id, "H18", marks=pytest.mark.long), (break_duplicates, "H22")]
)
def test_a_broken_rule_becomes_a_short_story_of_the_same_rule(
    break_it: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_it(monkeypatch)
    long = first_story(rule)
    short = shrink(long, quietly, effort=60_000, seconds=inf)
    print(f"seed {long.record.seed}: {long.size} became {short.size}\n{short.text()}")
    assert short.rule == rule
    assert short.steps <= STEPS_MAX < long.steps
    assert short.record.wild < long.record.wild / 10

    path = tmp_path / "story.json"
    save(short, path)
    assert load(path) == short.record
    _, again = tell(load(path))
    assert again is not None
    assert (again.lines, str(again.error)) == (short.lines, str(short.error))

    monkeypatch.undo()
    assert tell(load(path))[1] is None, "the repaired machine keeps the contract in the same world"


@pytest.mark.long
def test_a_shorter_story_of_another_rule_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # A job of few events breaks H1 as soon as it starts.
    break_duplicates(monkeypatch)
    start_job = World.start_job

    def start_large_job(self: World) -> None:
        if self.to_send < 8:
            raise Violation("H1: a small job")
        start_job(self)

    monkeypatch.setattr(World, "start_job", start_large_job)
    long = first_story("H22")
    short = shrink(long, quietly, effort=20_000, seconds=inf)
    assert short.rule == "H22"
    assert short.steps <= STEPS_MAX


@pytest.mark.long
def test_the_same_world_becomes_the_same_story(monkeypatch: pytest.MonkeyPatch) -> None:
    break_reset_id(monkeypatch)
    long = first_story("H18")
    first, second = (shrink(long, quietly, effort=8_000, seconds=inf) for _ in range(2))
    assert first.record == second.record
    assert first.lines == second.lines
    assert first.size < long.size


def test_the_seed_and_its_record_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    break_duplicates(monkeypatch)
    long = first_story("H22")
    plain = World(long.record.seed, long.record.eager)
    with pytest.raises(Violation, match="H22"):
        plain.run()
    assert tuple(plain.story) == long.lines
    _, again = tell(long.record)
    assert again is not None
    assert again.lines == long.lines


@pytest.mark.long
def test_a_world_without_an_end_becomes_a_short_one_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # H48: in worlds where tasks crash, an action that does nothing stays available.
    actions = World.actions
    steps_max = 4000  # more than these worlds need

    def restless(self: World, **patient: bool) -> list[Callable[[], None]]:
        return [*([lambda: None] if self.faults.crash else []), *actions(self, **patient)]

    monkeypatch.setattr(World, "actions", restless)
    for module in (world, stories):
        monkeypatch.setattr(module, "STEPS_MAX", steps_max)
    monkeypatch.setattr(shrinking, "REST_MAX", steps_max - 100)
    long = next(story for seed in range(100) if (story := tell_seed(seed)[1]))
    assert long.endless
    short = shrink(long, quietly, effort=60_000, seconds=inf)
    print(short.text())
    assert short.rule == "H48"
    assert short.record.wild < long.record.wild


def test_the_effort_ends_the_search_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    break_duplicates(monkeypatch)
    said: list[str] = []
    long = first_story("H22")
    assert shrink(long, said.append, effort=1, seconds=inf).size <= long.size
    assert said == ["the effort is used up: there may be a shorter story"]
    said.clear()
    assert shrink(long, said.append, seconds=0.0) is long
    assert said == ["the time is used up: another attempt at the same world may end with another story"]


# --- equal rules ---


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("H22: task 7 got d3, not d4", "H22"),
        ("H4: 7 is complete after 8", "H4"),
        ("invariant, down, checkpoint 7, subtask 1: lost", "invariant, down"),
        ("exactly once, up, job 0: []", "exactly once, up"),
        ("a task spoke before it was registered", "a task spoke before it was registered"),
    ],
)
def test_the_rule_of_a_violation(text: str, rule: str) -> None:
    assert rule_of(Violation(text)) == rule


def test_the_rule_of_any_other_error_is_its_place() -> None:
    def somewhere() -> None:
        raise KeyError(7)

    with pytest.raises(KeyError) as caught:
        somewhere()
    assert rule_of(caught.value) == "KeyError in somewhere"


# --- files ---


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a record of a world"),
        ("[]", "version 1"),
        ('{"version": 2, "seed": 1, "eager": null, "steps": []}', "version 1"),
        ('{"version": 1, "seed": "1", "eager": null, "steps": []}', "needs a seed"),
        ('{"version": 1, "seed": 1, "eager": null, "steps": [7]}', "7 is not a step"),
        ('{"version": 1, "seed": 1, "eager": null, "steps": [{"strike": [[]]}]}', "can be drawn"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"damaged.json.*{why}"):
        load(path)


def test_a_record_may_be_empty() -> None:
    assert tell(Record(0, None, ({},)))[1] is None
