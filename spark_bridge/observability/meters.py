# SPDX-License-Identifier: Apache-2.0

"""Figures over time: latency percentiles, rates, and how late the event loop is."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import log10
from typing import Any

from actors.coordination import LatencyRecorder
from spark_bridge.observability.status import LatencyStatus

try:
    from ddsketch import DDSketch

    _new_sketch: Callable[[float], Any] | None = DDSketch
except ImportError:  # the extra is not installed
    _new_sketch = None

ACCURACY = 0.01
"""The relative error of a percentile."""
SAMPLES_TOGETHER_MAX = 4096
"""How many samples one ``fold`` takes in: about a millisecond of work. If more have come, evenly spaced ones."""
BINS = 28
"""How many numbers a histogram has: four for each decade from 10 µs to 100 s."""


class LatencySketch:
    """Percentiles and a histogram of everything that a ``LatencyRecorder`` has recorded, in constant memory.

    Recording stays as cheap as it is. The sketch takes the samples in when somebody looks. Algorithm: DDSketch (Masson,
    Rim, Lee, 2019), from the package ``ddsketch``; sketches of the same kind can be merged.
    """

    def __init__(self, recorder: LatencyRecorder) -> None:
        self._recorder = recorder
        self._folded = 0
        self.sketch: Any = None if _new_sketch is None else _new_sketch(ACCURACY)
        """The ``DDSketch``, in microseconds; None without the package."""
        self._bins = [0] * BINS

    def fold(self) -> None:
        """Take in what was recorded since the last call."""
        if self.sketch is None:
            return
        fresh, self._folded = self._recorder.since(self._folded), self._recorder.count
        step = -(-len(fresh) // SAMPLES_TOGETHER_MAX) or 1
        for microseconds, times in Counter(map(round, fresh[::step])).items():
            self.sketch.add(max(microseconds, 1), times * step)
            self._bins[_bin(microseconds)] += times * step

    def status(self) -> LatencyStatus:
        """The percentiles now."""
        self.fold()
        if self.sketch is None or not self.sketch.count:
            return LatencyStatus(self._recorder.count, None, None, None)
        p50, p99, p999 = (round(self.sketch.get_quantile_value(rank), 1) for rank in (0.5, 0.99, 0.999))
        return LatencyStatus(self._recorder.count, p50, p99, p999, round(self.sketch.sum, 1), tuple(self._bins))


def _bin(microseconds: int) -> int:
    return min(BINS - 1, int(4 * log10(max(microseconds, 10)) - 4))


class Rates:
    """How fast counts grow, over the last ``window_s`` seconds. ``sample`` is to be called about once a second."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque()

    def sample(self, counts: Mapping[str, int], now: float) -> None:
        """Record the counts at this moment, a reading of any clock in seconds."""
        self._samples.append((now, dict(counts)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def per_s(self, name: str, counts: Mapping[str, int], now: float) -> float:
        """How fast one count has grown until now; 0.0 before the first sample."""
        if not self._samples or now <= self._samples[0][0]:
            return 0.0
        began, before = self._samples[0]
        return (counts.get(name, 0) - before.get(name, 0)) / (now - began)


class LoopLag:
    """How late an event loop runs a timer: by how long something else kept it from turning.

    A timer runs ten times a second and costs about 5 µs each time. The figures are over the last minute.
    """

    EVERY_S = 0.1
    KEPT = 600

    def __init__(self) -> None:
        self.turns = 0
        """How often the timer has run. Any thread may read it."""
        self._lags: deque[float] = deque(maxlen=self.KEPT)
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin to measure on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def close(self) -> None:
        """End. The figures stay readable."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._due = self._loop.time() + self.EVERY_S
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self.turns += 1
        self._lags.append(max(0.0, self._loop.time() - self._due))
        self._arm()

    def percentile_ms(self, rank: float) -> float:
        """The nearest-rank percentile, in milliseconds; 0.0 before the first measurement."""
        if not self._lags:
            return 0.0
        ordered = sorted(self._lags)
        return round(ordered[min(len(ordered) - 1, int(rank * len(ordered)))] * 1e3, 3)
