# SPDX-License-Identifier: Apache-2.0

"""The names and values of the gauges in Spark's metrics; tests/spark/observability shows them in a real Spark."""

from __future__ import annotations

import pytest

from spark_bridge.observability.figures import FAMILIES
from spark_bridge.observability.spark_metrics import gauges
from spark_bridge.observability.status import AutoscaleStatus, LatencyStatus, Percentiles, SourceStatus
from tests.spark_bridge.observability.statuses import attempt, operator, sidecar


def test_every_figure_is_a_gauge_under_its_operator() -> None:
    ever, minute = Percentiles(9000.0, 9000.0, 9000.0), Percentiles(250.0, 900.0, 2000.0)
    confirm, sources = LatencyStatus(3, ever, minute), {"": SourceStatus(7, 3, 4096)}
    scaling = AutoscaleStatus(1, 8, 5, "450 left to read")
    one = operator(confirm=confirm, sources=sources, parts={"geo.code": {"entries": 9}}, autoscale=scaling)
    found = gauges(sidecar(one, display_failures={"trace": 3}))
    for family in FAMILIES:
        head = "headgate.crawl" if "operator" in family.labels else "headgate"
        if family.name not in ("run_start_time_seconds", "last_checkpoint_id") and "last_" not in family.name:
            assert any(name == f"{head}.{family.name}" or name.startswith(f"{head}.{family.name}.") for name in found)
    assert found["headgate.crawl.attempts.ready"] == 4
    assert found["headgate.crawl.event_confirm_seconds.p99"] == pytest.approx(0.0009)
    assert found["headgate.crawl.event_confirm_seconds.count"] == 3
    assert "headgate.crawl.request_seconds.p99" not in found
    assert found["headgate.crawl.source_backlog.crawl"] == 4096, "a source without stages has the operator's name"
    assert found["headgate.crawl.part.geo_code.entries"] == 9
    assert found["headgate.operators"] == 1
    assert found["headgate.display_failures_total.trace"] == 3
    assert found["headgate.sidecar_info.jvm.false"] == 1


def test_rates_are_gauges_because_sinks_compute_none() -> None:
    found = gauges(sidecar(operator(events_up_per_s=5.0, events_down_per_s=6.0, requests_per_s=7.0)))
    assert found["headgate.crawl.events_received_per_second"] == 5
    assert found["headgate.crawl.events_sent_per_second"] == 6
    assert found["headgate.crawl.requests_received_per_second"] == 7


def test_a_name_cannot_add_levels_or_lines() -> None:
    found = gauges(sidecar(operator(operator_id="a.b c\nd", attempts=(attempt(),))))
    assert found["headgate.a_b_c_d.subtasks"] == 4
    assert not [name for name in found if "\n" in name or " " in name]
