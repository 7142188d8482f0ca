# SPDX-License-Identifier: Apache-2.0

"""The figures as OpenTelemetry's SDK collects them."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from actors.coordination import OperatorCoordinator
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.observability import otel_metrics
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.figures import FAMILIES, figures
from spark_bridge.observability.otel_metrics import DISPLAY, OpenTelemetryMetrics
from spark_bridge.observability.status import LatencyStatus, Percentiles, SidecarStatus
from spark_bridge.observability.status_server import LoopCaller, RecentStatus, Unavailable
from tests.spark_bridge.observability.statuses import operator, sidecar
from tests.spark_bridge.observability.test_figures import busy
from tests.spark_bridge.simulated_driver import SimulatedDriver

COLLECTIONS = [0]


@pytest.fixture(autouse=True)
def _a_second_passes_between_two_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_metrics, "monotonic", lambda: float(COLLECTIONS[0]))


def collected(reader: InMemoryMetricReader) -> dict[str, dict[tuple[tuple[str, Any], ...], float]]:
    """What a collection finds: the figures by the names of their metrics and their attributes."""
    COLLECTIONS[0] += 1
    data: Any = reader.get_metrics_data()
    return {
        metric.name: {tuple(sorted((point.attributes or {}).items())): point.value for point in metric.data.data_points}
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def a_provider() -> tuple[MeterProvider, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    return MeterProvider([reader]), reader


def test_every_figure_has_the_name_the_labels_and_the_value_that_prometheus_shows() -> None:
    status = busy()
    provider, reader = a_provider()
    OpenTelemetryMetrics(lambda: status, Displays(), provider)
    found = collected(reader)
    for family, samples in figures(status):
        if family.kind != "histogram":
            expected = {tuple(sorted(zip(family.labels, one.labels, strict=True))): one.value for one in samples}
            assert found[family.full_name] == expected
    assert {family.full_name for family in FAMILIES if family.kind != "histogram"} <= found.keys()


def test_a_latency_has_its_count_its_sum_and_the_percentiles_of_the_last_minute() -> None:
    confirm = LatencyStatus(3, Percentiles(9e6, 9e6, 9e6), Percentiles(250.0, 900.0, None), sum_us=1500.0)
    provider, reader = a_provider()
    OpenTelemetryMetrics(lambda: sidecar(operator(confirm=confirm)), Displays(), provider)
    found, crawl = collected(reader), ("operator", "crawl")
    assert found["headgate_event_confirm_seconds_count"] == {(crawl,): 3}
    assert found["headgate_event_confirm_seconds_sum"] == {(crawl,): 0.0015}
    assert found["headgate_event_confirm_seconds"] == {
        (crawl, ("quantile", "0.5")): 0.00025,
        (crawl, ("quantile", "0.99")): 0.0009,
    }


def test_sidecars_one_after_the_other_and_at_the_same_time_share_the_instruments() -> None:
    provider, reader = a_provider()
    names = ("first", "second")
    both = [OpenTelemetryMetrics(lambda name=name: one_of(name), Displays(), provider) for name in names]  # type: ignore[misc]
    assert set(collected(reader)["headgate_subtasks"]) == {(("operator", name),) for name in names}
    both[0].close()
    assert set(collected(reader)["headgate_subtasks"]) == {(("operator", "second"),)}
    both[1].close()
    assert collected(reader).get("headgate_subtasks", {}) == {}
    OpenTelemetryMetrics(lambda: one_of("third"), Displays(), provider)
    assert set(collected(reader)["headgate_subtasks"]) == {(("operator", "third"),)}


async def test_a_sidecar_gives_its_figures_to_the_provider_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, reader = a_provider()
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: provider)
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(watching=Watching(opentelemetry=True))) as runtime:
        await runtime.coordinate("crawl", OperatorCoordinator, parallelism=7)
        found = await anyio.to_thread.run_sync(collected, reader)
    assert found["headgate_subtasks"] == {(("operator", "crawl"),): 7}
    assert collected(reader).get("headgate_subtasks", {}) == {}


def one_of(name: str) -> SidecarStatus:
    return sidecar(operator(operator_id=name))


def test_a_status_that_fails_is_a_failure_of_the_display_and_of_nothing_else() -> None:  # H155
    def broken() -> SidecarStatus:
        raise RuntimeError("as planned")

    provider, reader = a_provider()
    displays = Displays()
    OpenTelemetryMetrics(broken, displays, provider)
    OpenTelemetryMetrics(busy, Displays(), provider)
    assert collected(reader)["headgate_operators"] == {(): 2}
    assert displays.failures() == {DISPLAY: 1}


def test_a_collection_on_the_sidecars_own_loop_does_not_wait_for_itself() -> None:
    provider, reader = a_provider()
    displays = Displays()

    async def status() -> SidecarStatus:
        return busy()

    async def collect_on_the_loop() -> tuple[Any, Any]:
        recent = RecentStatus(LoopCaller(asyncio.get_running_loop()), status)
        metrics = OpenTelemetryMetrics(recent, displays, provider)
        on_the_loop = collected(reader)
        with pytest.raises(Unavailable, match="cannot wait for itself"):
            recent()
        beside = await anyio.to_thread.run_sync(collected, reader)
        metrics.close()
        return on_the_loop, beside

    on_the_loop, beside = asyncio.run(collect_on_the_loop())
    assert on_the_loop.get("headgate_operators", {}) == {}
    assert displays.failures() == {DISPLAY: 1}
    assert beside["headgate_operators"] == {(): 2}
