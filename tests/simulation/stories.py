# SPDX-License-Identifier: Apache-2.0

"""The story of a world that breaks the contract: built from a record, printed for people, kept in a file."""

from __future__ import annotations

import json
import re
import textwrap
import traceback
from dataclasses import dataclass
from math import inf
from pathlib import Path

from tests.simulation.checkers import Violation
from tests.simulation.choices import Draw, Record, RecordedChoices, Source, Step, StoryTooLong, seeded, tame
from tests.simulation.world import STEPS_MAX, World, run_world

VERSION = 1
WIDTH = 118
RESTLESS = "H48: the world does not come to rest"


@dataclass(frozen=True)
class Story:
    """One world and its violation of the contract. ``steps``: how many steps it took.

    ``endless``: it was stopped because it did not come to rest; only the steps in its record are of interest.
    """

    record: Record
    lines: tuple[str, ...]
    steps: int
    error: Exception
    endless: bool = False

    @property
    def rule(self) -> str:
        return rule_of(self.error)

    @property
    def size(self) -> tuple[int, int]:
        """The number of steps that matter, and of draws that are not tame; lower is better."""
        return (len(self.record.steps) if self.endless else self.steps), self.record.wild

    def text(self) -> str:
        """Return the numbered lines, followed by the violation."""
        digits = len(str(len(self.lines)))
        numbered = [f"{number:{digits}} {line}" for number, line in enumerate(self.lines, start=1)]
        indent = " " * (digits + 22)
        whole = [textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) for line in numbered]
        return "\n".join([*whole, "", what_broke(self.error)])


def what_broke(error: Exception) -> str:
    if isinstance(error, Violation):
        return f"breaks the contract: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def rule_of(error: Exception) -> str:
    """Return the rule that an error names. Stories with the same rule break the contract in the same way."""
    if isinstance(error, Violation):
        rule = re.match(r"H\d+|(invariant|exactly once), \w+|[^:\d]*", str(error))
        return rule[0] if rule else ""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {where.name}"


def tell(
    record: Record, beyond: Source | None = None, steps_max: float = inf, *, endless: bool = False
) -> tuple[World, Story | None]:
    """Run the world of this record. Return no story if it keeps the contract, or is stopped after ``steps_max``.

    ``beyond``: the source after the end of the record; by default everything is tame from there on.
    ``endless``: whether being stopped counts as a violation.
    """
    choices = RecordedChoices(record, beyond or tame(), steps_max)
    world, error = run_world(record.seed, record.eager, choices)
    given, lines = choices.given(), tuple(world.story)
    if error is not None:
        world.driver.abandon()
    stopped = isinstance(error, StoryTooLong)
    if stopped and endless:
        error = Violation(RESTLESS)
    elif error is None or stopped:
        return world, None
    restless = stopped or world.steps >= STEPS_MAX
    return world, Story(given, lines, world.steps, error, restless)


def tell_seed(seed: int, eager: float | None = None) -> tuple[World, Story | None]:
    """Run the world of this seed and write down all its draws."""
    return tell(Record(seed, eager), seeded(seed))


# --- files ---


def save(story: Story, path: Path) -> None:
    """Save the record for the machine, and the story for a reader."""
    record = story.record
    steps = ",\n  ".join(json.dumps(step) for step in record.steps)
    head = {"version": VERSION, "rule": story.rule, "seed": record.seed, "eager": record.eager}
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    fields.append(f'"steps": [\n  {steps}\n ]')
    fields.append(f'"story": {json.dumps(story.text().splitlines(), indent=2)}')
    path.write_text("{\n " + ",\n ".join(fields) + "\n}\n", encoding="utf-8")


def load(path: Path) -> Record:
    """Load a record. ``ValueError``: not a record, or one of another version."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a record of a world: {error}") from None
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise ValueError(f"{path} is not a record of a world in version {VERSION}")
    seed, eager, steps = plain.get("seed"), plain.get("eager"), plain.get("steps")
    if not (isinstance(seed, int) and isinstance(eager, float | None) and isinstance(steps, list)):
        raise ValueError(f"{path} is a damaged record: it needs a seed, an eagerness and steps")
    return Record(seed, eager, tuple(checked(step, path) for step in steps))


def checked(step: object, path: Path) -> Step:
    if not isinstance(step, dict) or not all(isinstance(draws, list) for draws in step.values()):
        raise ValueError(f"{path} is a damaged record: {step!r} is not a step")
    if not all(isinstance(draw, Draw) for draws in step.values() for draw in draws):
        raise ValueError(f"{path} is a damaged record: not all of {step!r} can be drawn")
    return step
