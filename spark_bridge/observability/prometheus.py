# SPDX-License-Identifier: Apache-2.0

"""The figures in Prometheus' format, at ``/metrics`` of the status server.

Needs the package ``prometheus_client`` (``pip install 'headgate[observability]'``), which is imported by the first
scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from protocol.describing import as_float, readable
from spark_bridge.observability.figures import PREFIX, Kind, Sample, figures
from spark_bridge.observability.meters import BIN_ENDS
from spark_bridge.observability.status import LatencyStatus, SidecarStatus
from spark_bridge.observability.status_server import Content, Request, Route, Unavailable

if TYPE_CHECKING:
    from prometheus_client import Metric


class SidecarCollector:
    """A collector of ``prometheus_client``: takes a status at each scrape and holds nothing in between.

    ``take`` is called on the thread that scrapes, for example ``sidecar.status``.
    """

    def __init__(self, take: Callable[[], SidecarStatus]) -> None:
        self._take = take

    def describe(self) -> list[Metric]:
        """Nothing: so that it can be registered before there is a status."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The families of the status now. Raises what ``take`` raises."""
        return _families(self._take())


def metrics_route(take: Callable[[], SidecarStatus]) -> Route:
    """The route that answers a scrape, as text or, for those who ask for it, in the OpenMetrics format."""

    def answer(request: Request) -> Content:
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ImportError:
            raise Unavailable("/metrics needs pip install 'headgate[observability]' where the sidecar runs") from None
        registry = CollectorRegistry()
        registry.register(SidecarCollector(take))
        encode, content_type = choose_encoder(request.accept)
        return Content(content_type, encode(registry))

    return answer


def _families(status: SidecarStatus) -> Iterator[Metric]:
    from prometheus_client import Metric

    for family, samples in figures(status):
        name = f"{PREFIX}{family.name.removesuffix('_total')}"
        metric = Metric(name, family.meaning, family.kind, family.unit)
        for sample in samples:
            _add(metric, family.kind, dict(zip(family.labels, map(readable, sample.labels), strict=True)), sample)
        yield metric


def _add(metric: Metric, kind: Kind, labels: dict[str, str], sample: Sample) -> None:
    value = sample.value
    if isinstance(value, LatencyStatus):
        up_to = list(accumulate(value.histogram))
        for end, count in zip(BIN_ENDS, up_to, strict=True):
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": end}, count)
        metric.add_sample(f"{metric.name}_count", labels, up_to[-1])  # as many as there are in the buckets
        metric.add_sample(f"{metric.name}_sum", labels, value.sum_us / 1e6)
    else:
        metric.add_sample(f"{metric.name}_total" if kind == "counter" else metric.name, labels, as_float(value))
