# SPDX-License-Identifier: Apache-2.0

"""Interleaved measuring: baseline and subject alternate, so that a drift in speed affects both equally."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Rounds = Sequence[Sequence[float]]
"""The samples of each round."""
Progress = Callable[[str], None]
"""Called with a description of each step of a long measurement."""
Measure = Callable[[bool, Progress], "list[Figure]"]
"""A benchmark. Its first argument is *quick*: take few samples, to show that it runs, not how fast."""

one_jvm = False
"""Whether all Spark sessions of this process have the same JVM, which saves a quick run many seconds for each."""

CURVE = (0.0, 0.01, 0.05, *(tenths / 10 for tenths in range(1, 10)), 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999, 1.0)
"""The fractions at which a figure's curves are drawn."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, of a subject compared with its raw baseline, both in ``unit``. Less is better.

    ``params`` distinguishes figures of the same name, and says what was measured: how many subtasks, which part.
    ``details`` is extra data for plots that no table shows. A figure that is not a time, such as bytes for one
    gateway, may have one sample in each round.
    """

    name: str
    unit: str
    rounds: Rounds
    baseline_rounds: Rounds
    params: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the figure for JSON. Percentiles are over the samples of all rounds; a ratio is subject / baseline.

        ``ratio_p50_low`` and ``ratio_p50_high`` are the smallest and largest ratio of the medians in single rounds:
        they show how reliable a figure is.
        """
        samples, baseline = flatten(self.rounds), flatten(self.baseline_rounds)
        p50, p90, p99 = (percentile(samples, q) for q in (0.5, 0.9, 0.99))
        base50, base90, base99 = (percentile(baseline, q) for q in (0.5, 0.9, 0.99))
        ratios = [
            ratio(statistics.median(ours), statistics.median(raw))
            for ours, raw in zip(self.rounds, self.baseline_rounds, strict=True)
        ]
        return {
            "name": self.name,
            "unit": self.unit,
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": max(samples),
            "baseline_p50": base50,
            "baseline_p90": base90,
            "baseline_p99": base99,
            "baseline_max": max(baseline),
            "ratio_p50": ratio(p50, base50),
            "ratio_p99": ratio(p99, base99),
            "ratio_p50_low": min(ratios),
            "ratio_p50_high": max(ratios),
            "samples": len(samples),
            "rounds": len(self.rounds),
            "params": self.params,
            "curve": {
                "fractions": list(CURVE),
                "subject": [percentile(samples, fraction) for fraction in CURVE],
                "baseline": [percentile(baseline, fraction) for fraction in CURVE],
            },
            "details": self.details,
        }


def flatten(rounds: Rounds) -> list[float]:
    return [sample for of_round in rounds for sample in of_round]


def ratio(subject: float, baseline: float) -> float:
    """Raises ``ValueError`` for a baseline of zero: a figure without a baseline says nothing."""
    if not baseline:
        raise ValueError(f"the baseline of {subject:g} is 0: measure something that takes time or memory")
    return subject / baseline


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def interleave(
    rounds: int,
    baseline: Callable[[], list[float]],
    subject: Callable[[], list[float]],
    progress: Progress,
) -> tuple[Rounds, Rounds]:
    """Run the two in turn, ``rounds`` times after one warm-up of each; return the subject's rounds and the baseline's.

    The order alternates with each round, so that neither always runs in what the other leaves behind.
    """
    baseline()
    subject()
    baseline_rounds: list[Sequence[float]] = []
    subject_rounds: list[Sequence[float]] = []
    for done in range(1, rounds + 1):
        if done % 2:
            baseline_rounds.append(baseline())
            subject_rounds.append(subject())
        else:
            subject_rounds.append(subject())
            baseline_rounds.append(baseline())
        _report(done, rounds, subject_rounds, baseline_rounds, progress)
    return subject_rounds, baseline_rounds


async def interleave_async(
    rounds: int,
    baseline: Callable[[], Awaitable[Sequence[float]]],
    subject: Callable[[], Awaitable[Sequence[float]]],
    progress: Progress,
) -> tuple[Rounds, Rounds]:
    """``interleave`` on a loop that already runs, because both ends stay connected from round to round."""
    await baseline()
    await subject()
    baseline_rounds: list[Sequence[float]] = []
    subject_rounds: list[Sequence[float]] = []
    for done in range(1, rounds + 1):
        if done % 2:
            baseline_rounds.append(await baseline())
            subject_rounds.append(await subject())
        else:
            subject_rounds.append(await subject())
            baseline_rounds.append(await baseline())
        _report(done, rounds, subject_rounds, baseline_rounds, progress)
    return subject_rounds, baseline_rounds


async def interleave_floors_async(
    rounds: int,
    floors: Sequence[Callable[[], Awaitable[list[float]]]],
    subject: Callable[[], Awaitable[list[float]]],
    progress: Progress,
) -> tuple[Rounds, list[Rounds]]:
    """``interleave_async`` with several baselines; each is the first one of a round as often as the others."""
    measures = [*floors, subject]
    for measure in measures:
        await measure()
    results: list[list[Sequence[float]]] = [[] for _ in measures]
    for done in range(1, rounds + 1):
        for place in range(len(measures)):
            which = (place + done) % len(measures)
            results[which].append(await measures[which]())
        _report(done, rounds, results[-1], results[0], progress)
    return results[-1], [*results[:-1]]


def _report(done: int, rounds: int, subject: Rounds, baseline: Rounds, progress: Progress) -> None:
    so_far = ratio(statistics.median(flatten(subject)), statistics.median(flatten(baseline)))
    progress(f"round {done}/{rounds}: ratio so far {so_far:.2f}")
