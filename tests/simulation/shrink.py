# SPDX-License-Identifier: Apache-2.0

"""Shrinks a world that breaks the contract to a short one that breaks the same rule.

Four changes are tried in turn, as long as one of them helps: other chance in the same settings, in simpler and in fresh
ones; simpler settings; whole spans of steps taken out; single draws turned tame. A story is better with fewer steps,
and among those with fewer draws that are not tame. A world is stopped when it gets longer than the best one so far, so
the search gets quicker as it goes. It is repeatable, because a number of executed steps ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from tests.simulation.choices import Choices, Draw, Source, Step, half_tame, seeded
from tests.simulation.stories import Story, tell

EFFORT = 300_000
"""The total number of steps that may run; this takes some 20 to 40 seconds."""
SECONDS = 60.0
WORLD = 30
"""The cost of a world before its first step, in steps."""
MISSES_MAX = 40
"""How many times in a row other chance may fail to help."""
SHORT_ENOUGH = 40
"""A story of at most this many steps is not abandoned for another."""
PARTS = 16
"""How finely a story is cut while it is still long."""
REST_MAX = 10_000
"""The number of steps within which a world comes to rest once everything is tame."""
AFTERWARDS = 200
"""How many steps of an endless world are recorded."""
REPORT_S = 1.0


@dataclass
class Shrinking:
    """``effort``: how many steps may still be run. ``deadline``: when to stop anyway, by ``time.monotonic``."""

    best: Story
    say: Callable[[str], None]
    effort: int = EFFORT
    deadline: float = inf
    attempts: int = 0
    fresh: int = 0  # how often other chance was tried
    next_report: float = field(default_factory=lambda: time.monotonic() + REPORT_S)

    def run(self) -> Story:
        self.coarsely()
        self.finely()
        if self.effort <= 0:
            self.say("the effort is used up: there may be a shorter story")
        elif self.out_of_time():
            self.say("the time is used up: another attempt at the same world may end with another story")
        return self.beginning() if self.best.endless else self.best

    def beginning(self) -> Story:
        """Return the beginning of a story without an end."""
        _, story = tell(self.best.record, None, len(self.steps) + AFTERWARDS, endless=True)
        assert story is not None
        return story

    def coarsely(self) -> None:
        """Shrink until a round makes the story hardly any shorter."""
        before = inf
        while self.best.size[0] < 0.9 * before and not self.over():
            before = self.best.size[0]
            self.other_chance()
            self.simpler_settings()
            self.other_chance()
            self.tamer_functions()
            self.fewer_steps(PARTS)
            self.tamer_draws(PARTS)

    def finely(self) -> None:
        """Shrink until nothing helps any more."""
        before = None
        while self.best.size != before and not self.over():
            before = self.best.size
            self.fewer_steps(len(self.steps))
            self.tamer_draws(self.best.record.wild)
            self.simpler_settings()
            self.tamer_functions()

    # --- one attempt ---

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.best.record.steps

    def over(self) -> bool:
        return self.effort <= 0 or self.out_of_time()

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def attempt(self, steps: Iterable[Step], beyond: Source | None = None) -> bool:
        """Try a story and keep it if it is better; return whether it is."""
        if self.over():
            return False
        self.attempts += 1
        best, record = self.best, replace(self.best.record, steps=tuple(steps))
        steps_max = len(record.steps) + REST_MAX if best.endless else best.steps
        world, story = tell(record, beyond, steps_max, endless=best.endless)
        self.effort -= world.steps + WORLD
        self.report()
        if story is None or story.rule != best.rule or story.size >= best.size:
            return False
        self.best = story
        return True

    def report(self) -> None:
        now = time.monotonic()
        if now >= self.next_report:
            self.next_report = now + REPORT_S
            self.say(f"{self.attempts} attempts, the shortest story has {self.best.size[0]} steps")

    # --- changes to try ---

    def other_chance(self) -> None:
        """Draw everything after the settings again; every third time also the settings, or turn some of them tame."""
        misses, least = 0, self.effort * 2 // 3
        if self.best.endless:
            return
        while misses < MISSES_MAX and self.effort > least and self.best.steps > SHORT_ENOUGH and not self.over():
            self.fresh += 1
            seed = self.best.record.seed * 1000 + self.fresh
            settings = ((), self.steps[:1], (half_of(self.steps[0], seed),))[self.fresh % 3]
            helped = self.attempt(settings, seeded(seed) if self.fresh % 2 else half_tame(seed))
            misses = 0 if helped else misses + 1

    def simpler_settings(self) -> None:
        """Turn each setting tame, or at least lower."""
        for place in list(self.steps[0]):
            for number in range(len(self.steps[0].get(place, ()))):
                for lower in lower_than(self.steps[0], place, number):
                    if self.attempt((with_draw(self.steps[0], place, number, lower), *self.steps[1:])):
                        break

    def tamer_functions(self) -> None:
        """Turn all draws of a function tame."""
        for place in sorted({place for step in self.steps[1:] for place in step}):
            settings, *steps = self.steps
            self.attempt([settings, *({p: draws for p, draws in step.items() if p != place} for step in steps)])

    def fewer_steps(self, parts: int) -> None:
        """Take out spans of steps, from last to first, in ever smaller spans. The settings stay."""
        for span in spans(len(self.steps), parts):
            start = len(self.steps) - span
            while start > 0 and not self.over():
                self.attempt(self.steps[:start] + self.steps[start + span :])
                start = min(start, len(self.steps)) - span

    def tamer_draws(self, parts: int) -> None:
        for span in spans(self.best.record.wild, parts):
            wild = wild_draws(self.steps)
            for start in range(0, len(wild), span):
                if self.over():
                    return
                steps = list(self.steps)
                for number, place, index in wild[start : start + span]:
                    if number < len(steps) and index < len(steps[number].get(place, ())):
                        steps[number] = with_draw(steps[number], place, index, None)
                self.attempt(steps)


def shrink(story: Story, say: Callable[[str], None] = print, effort: int = EFFORT, seconds: float = SECONDS) -> Story:
    """Return the shortest story found that breaks the same rule. ``say`` reports progress about once a second."""
    shrinking = Shrinking(story, say, effort, time.monotonic() + seconds)
    return shrinking.run()


def spans(whole: int, parts: int) -> list[int]:
    """Return half of the whole, a quarter, and so on down to the size of one part."""
    found, span, least = [], whole // 2, max(1, whole // max(1, parts))
    while span >= least:
        found.append(span)
        span //= 2
    return found or [1]


def lower_than(step: Step, place: str, number: int) -> list[Draw]:
    """Return the possible replacements of a draw, the tamest first."""
    draws = step.get(place, [])
    draw = draws[number] if number < len(draws) else None
    if draw is None:
        return []
    return [None, *range(1, draw)] if isinstance(draw, int) else [None]


def with_draw(step: Step, place: str, number: int, draw: Draw) -> Step:
    draws = step[place]
    return {**step, place: [*draws[:number], draw, *draws[number + 1 :]]}


def half_of(step: Step, seed: int) -> Step:
    """Let a coin decide for each draw whether it becomes tame."""
    coins = Choices(seed)
    return {place: [draw if coins.random() < 0.5 else None for draw in draws] for place, draws in step.items()}


def wild_draws(steps: tuple[Step, ...]) -> list[tuple[int, str, int]]:
    """Return the step, function and list index of each draw that is not tame, except those of the settings."""
    return [
        (number, place, index)
        for number, step in enumerate(steps)
        for place, draws in step.items()
        for index, draw in enumerate(draws)
        if number and draw is not None
    ]
