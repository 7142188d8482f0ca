# SPDX-License-Identifier: Apache-2.0

"""Figures over time: latency percentiles, rates, and how late the event loop is."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from math import log10
from typing import Any

from actors.coordination import LatencyRecorder
from spark_bridge.observability.status import BINS, LatencyStatus, Percentiles

try:
    from ddsketch import DDSketch

    _new_sketch: Callable[[float], Any] | None = DDSketch
except ImportError:  # the extra is not installed
    _new_sketch = None

ACCURACY = 0.01
"""The relative error of a percentile."""
SAMPLES_TOGETHER_MAX = 4096
"""How many samples one ``fold`` takes in: about a millisecond of work. If more have come, evenly spaced ones."""
BIN_ENDS = (*(f"{10 ** ((number + 1) / 4 - 5):.3g}" for number in range(BINS - 1)), "+Inf")
"""The upper end of each, in seconds, as Prometheus writes it."""
SLICE_S = 15.0
"""How much time one sketch of the recent samples covers."""
RECENT_S = (60.0, 300.0)


class LatencySketch:
    """Percentiles and a histogram of everything that a ``LatencyRecorder`` has recorded, in bounded memory.

    Recording stays as cheap as it is. The sketch takes the samples in when somebody looks, or once a second. Algorithm:
    DDSketch (Masson, Rim, Lee, 2019), from the package ``ddsketch``. Such sketches can be merged, so there is one for
    each slice of ``SLICE_S`` of the last five minutes, and one for all that came before the newest slice. ``now`` is a
    clock in seconds.
    """

    def __init__(self, recorder: LatencyRecorder) -> None:
        self._recorder = recorder
        self._folded = 0
        self._sum_us = 0.0
        self._bins = [0] * BINS
        self._newest: Any = None
        self._newest_began = 0.0
        self._slices: deque[tuple[float, Any]] = deque()  # when each began, the oldest first, without the newest
        self._before: Any = None  # everything but the newest
        self._merged: dict[int, Any] = {}  # so many of the slices; a merge takes about 50 µs

    def fold(self, now: float) -> None:
        """Take in what was recorded since the last call."""
        if self._newest is not None and now - self._newest_began >= SLICE_S:
            self._slices.append((self._newest_began, self._newest))
            self._before = _merged(filter(None, (self._before, self._newest)))
            self._newest = None
            self._merged.clear()
        while self._slices and self._slices[0][0] <= now - RECENT_S[-1] - SLICE_S:
            self._slices.popleft()
        fresh, self._folded = self._recorder.since(self._folded), self._recorder.count
        if not fresh:
            return
        if self._newest is None and _new_sketch is not None:
            self._newest, self._newest_began = _new_sketch(ACCURACY), now
        step = -(-len(fresh) // SAMPLES_TOGETHER_MAX) or 1
        for microseconds, times in Counter(map(round, fresh[::step])).items():
            self._sum_us += microseconds * times * step
            self._bins[_bin(microseconds)] += times * step
            if self._newest is not None:
                self._newest.add(max(microseconds, 1), times * step)

    def status(self, now: float) -> LatencyStatus:
        """The figures at this moment."""
        self.fold(now)
        minute, five_minutes = (self._percentiles(self._since(now - seconds - SLICE_S)) for seconds in RECENT_S)
        ever, sum_us = self._percentiles(self._before), round(self._sum_us, 1)
        return LatencyStatus(self._recorder.count, ever, minute, five_minutes, sum_us, tuple(self._bins))

    def _since(self, began: float) -> Any:
        many = sum(slice_began > began for slice_began, _ in self._slices)
        if many and many not in self._merged:
            self._merged[many] = _merged(one for _, one in list(self._slices)[-many:])
        return self._merged[many] if many else None

    def _percentiles(self, older: Any) -> Percentiles:
        """Of these and the newest samples."""
        sketches = [one for one in (older, self._newest) if one is not None]
        if not sketches:
            return Percentiles()
        sketch = sketches[0] if len(sketches) == 1 else _merged(sketches)
        return Percentiles(*(round(sketch.get_quantile_value(rank), 1) for rank in (0.5, 0.99, 0.999)))


def _merged(sketches: Iterable[Any]) -> Any:
    """A new sketch of all their samples."""
    assert _new_sketch is not None
    merged = _new_sketch(ACCURACY)
    for one in sketches:
        merged.merge(one)
    return merged


def _bin(microseconds: float) -> int:
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
