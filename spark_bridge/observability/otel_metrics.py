# SPDX-License-Identifier: Apache-2.0

"""The figures as metrics of OpenTelemetry, by the names that Prometheus shows, when the application's reader collects.

Needs the package ``opentelemetry-api``. A provider of meters never forgets an instrument, so each has its instruments
once, and they ask the sidecars that run. The API has no histogram that is only read, and one record for each sample
would cost more than the event: a latency has its count, its sum, and the percentiles of the last minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from protocol.describing import as_float, readable
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.figures import FAMILIES, AnyFamily, Sample, figures
from spark_bridge.observability.status import LatencyStatus, SidecarStatus

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider, Observation

KEPT_S = 0.25
DISPLAY = "opentelemetry-metrics"
QUANTILES = ("0.5", "0.99", "0.999")
UNITS = {"": "", "seconds": "s", "bytes": "By"}  # UCUM, as OpenTelemetry asks
Figures = dict[AnyFamily, list[Sample]]
Part = Callable[[LatencyStatus], Iterator[tuple[dict[str, str], float]]]
"""What an instrument reads of a latency: further labels and the figure."""

_running: WeakKeyDictionary[Any, list[_Source]] = WeakKeyDictionary()


class OpenTelemetryMetrics:
    """Gives one sidecar's figures to the meters of ``provider``, by default the one that the application has set.

    ``take`` is called on the thread that collects. What it raises is a failure of the display, and the collection has
    no figures of this sidecar. ``close`` ends that.
    """

    def __init__(
        self, take: Callable[[], SidecarStatus], displays: Displays, provider: MeterProvider | None = None
    ) -> None:
        from opentelemetry import metrics

        provider = provider or metrics.get_meter_provider()
        if provider not in _running:
            _running[provider] = []
            _create_instruments(provider, _running[provider])
        self._sources = _running[provider]
        self._source = _Source(take, displays)
        self._sources.append(self._source)

    def close(self) -> None:
        """See the class."""
        self._sources.remove(self._source)


class _Source:
    """The figures of one sidecar, computed once for all instruments: a collection asks for one after the other."""

    def __init__(self, take: Callable[[], SidecarStatus], displays: Displays) -> None:
        self._take = take
        self._displays = displays
        self._figures: Figures = {}
        self._read_at = -inf

    def figures(self) -> Figures:
        if monotonic() - self._read_at > KEPT_S:
            self._figures = self._displays.run(DISPLAY, lambda: dict(figures(self._take()))) or {}
            self._read_at = monotonic()
        return self._figures


def _count(latency: LatencyStatus) -> Iterator[tuple[dict[str, str], float]]:
    yield {}, latency.samples


def _sum(latency: LatencyStatus) -> Iterator[tuple[dict[str, str], float]]:
    yield {}, latency.sum_us / 1e6


def _quantiles(latency: LatencyStatus) -> Iterator[tuple[dict[str, str], float]]:
    for quantile, microseconds in zip(QUANTILES, latency.last_minute, strict=True):
        if microseconds is not None:
            yield {"quantile": quantile}, microseconds / 1e6


def _create_instruments(provider: MeterProvider, sources: list[_Source]) -> None:
    meter = provider.get_meter("headgate")

    def read(family: AnyFamily, part: Part = _quantiles) -> Any:
        return [lambda _: _observations(family, part, sources)]

    for family in FAMILIES:
        name, unit, meaning = family.full_name, UNITS[family.unit], family.meaning
        if family.kind == "histogram":
            meter.create_observable_counter(f"{name}_count", read(family, _count), "", meaning)
            meter.create_observable_counter(f"{name}_sum", read(family, _sum), unit, meaning)
            meter.create_observable_gauge(name, read(family, _quantiles), unit, f"{meaning} Of the last minute.")
        elif family.kind == "counter":
            meter.create_observable_counter(name, read(family), unit, meaning)
        else:
            meter.create_observable_gauge(name, read(family), unit, meaning)


def _observations(family: AnyFamily, part: Part, sources: list[_Source]) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for source in list(sources):
        for sample in source.figures().get(family, ()):
            labels = dict(zip(family.labels, map(readable, sample.labels), strict=True))
            if isinstance(sample.value, LatencyStatus):
                for more, value in part(sample.value):
                    yield Observation(value, {**labels, **more})
            else:
                yield Observation(as_float(sample.value), labels)
