"""Interleaved measuring: baseline and subject in turn, several times, so that a machine whose speed drifts is fair."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. ``p50`` and the like are over all samples of all rounds; a ratio is subject / baseline."""

    name: str
    unit: str
    samples: list[float]
    baseline_samples: list[float]
    params: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        p50, p90, p99 = (percentile(self.samples, q) for q in (0.5, 0.9, 0.99))
        base50, base99 = (percentile(self.baseline_samples, q) for q in (0.5, 0.99))
        return {
            "name": self.name,
            "unit": self.unit,
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": max(self.samples),
            "baseline_p50": base50,
            "baseline_p99": base99,
            "ratio_p50": p50 / base50,
            "ratio_p99": p99 / base99,
            "samples": len(self.samples),
            "params": self.params,
        }


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def interleave(
    rounds: int,
    baseline: Callable[[], list[float]],
    subject: Callable[[], list[float]],
    progress: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """Run the two in turn, ``rounds`` times after one warm-up of each; return all samples of each."""
    baseline()
    subject()
    baseline_samples: list[float] = []
    samples: list[float] = []
    for done in range(1, rounds + 1):
        baseline_samples += baseline()
        samples += subject()
        ratio = statistics.median(samples) / statistics.median(baseline_samples)
        progress(f"round {done}/{rounds}: ratio so far {ratio:.2f}")
    return samples, baseline_samples


async def interleave_async(
    rounds: int,
    baseline: Callable[[], Awaitable[list[float]]],
    subject: Callable[[], Awaitable[list[float]]],
    progress: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """``interleave`` on a loop that is running already, because both ends stay connected from round to round."""
    await baseline()
    await subject()
    baseline_samples: list[float] = []
    samples: list[float] = []
    for done in range(1, rounds + 1):
        baseline_samples += await baseline()
        samples += await subject()
        ratio = statistics.median(samples) / statistics.median(baseline_samples)
        progress(f"round {done}/{rounds}: ratio so far {ratio:.2f}")
    return samples, baseline_samples
