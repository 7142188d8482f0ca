# SPDX-License-Identifier: Apache-2.0

"""The figures for machines: their names and units, their table in the documentation, and what Prometheus reads."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from spark_bridge.observability.collector import COUNTS
from spark_bridge.observability.figures import FAMILIES, figures
from spark_bridge.observability.prometheus import SidecarCollector, metrics_route
from spark_bridge.observability.status import (
    AutoscaleStatus,
    CallStatus,
    CheckpointRecord,
    LatencyStatus,
    RegistrationStatus,
    SidecarStatus,
    SourceStatus,
)
from spark_bridge.observability.status_server import Request, Unavailable
from tests.spark_bridge.observability.statuses import NOW, attempt, checkpoint, operator, run, sidecar

PAGE = Path(__file__).resolve().parents[3] / "docs" / "observability" / "metrics.md"
SCRAPE = Request("/metrics", {}, "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")


def busy() -> SidecarStatus:
    """A status in which every family has a value."""
    crawl = operator(
        run=run(registrations=(RegistrationStatus(3, 103, 2.0, "the end of the attempt before"),)),
        call=CallStatus("handle_request(subtask=1)", 40.0, "crawl.py:31"),
        queued=5,
        sources={"read": SourceStatus(7, 3, 4096)},
        parts={"geocode": {"hit_share": 0.75}},
        attempts=(
            attempt(0, events_unconfirmed=2, unconfirmed_since_at=NOW - 1.5, events_held=1, bytes=100),
            attempt(
                1,
                events_unconfirmed=1,
                unconfirmed_since_at=NOW - 0.5,
                requested_at=NOW - 40,
                bytes=30,
                events_untaken=4,
            ),
            attempt(2, connected=False, state="accepted"),
            attempt(3, state="over", failure="killed", connected=False),
        ),
        checkpoints=(checkpoint("closing", 1), checkpoint("acknowledging", 1, 2, step="state")),
        checkpoint_history=(
            CheckpointRecord(10, False, NOW - 9, 2.0, {"closing": 0.5, "storing": 1.5}, "completed", ""),
            CheckpointRecord(11, False, NOW - 5, 1.0, {"closing": 1.0}, "aborted", "timeout"),
        ),
        last_completed_checkpoint_id=10,
        last_checkpoint_files_bytes=5_000,
        last_checkpoint_uploaded_bytes=50,
        in_doubt=(11,),
        autoscale=AutoscaleStatus(1, 8, 5, "450 left to read, at 100 for each subtask"),
        counts={name: 100 + number for number, name in enumerate(COUNTS)},
        confirm=LatencyStatus(1000, sum_us=300_000.0, histogram=(*[0] * 6, 600, 400, *[0] * 20)),
        failures_by_kind={"killed": 3},
    )
    return sidecar(crawl, operator(operator_id='words "quoted"\n'), display_failures={"trace": 3})


def values(status: SidecarStatus) -> dict[str, float]:
    """What a scrape reads, by the sample's name and labels."""
    body = metrics_route(lambda: status)(SCRAPE).body.decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in parse_openmetrics(body)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def test_names_and_units_follow_the_conventions() -> None:
    names = Counter(family.full_name for family in FAMILIES)
    assert max(names.values()) == 1
    for family in FAMILIES:
        assert re.fullmatch(r"headgate_[a-z0-9]+(_[a-z0-9]+)*", family.full_name)
        assert family.full_name.endswith("_total") == (family.kind == "counter")
        assert not re.search("_(ms|us|millis|kb|mb|count|sum)(_|$)", family.full_name)  # base units, no reserved suffix
        assert (family.unit == "seconds") == family.full_name.endswith("_seconds")
        assert (family.unit == "bytes") == family.full_name.endswith(("_bytes", "_bytes_total"))
        assert family.meaning.endswith(".")


def test_labels_are_bounded_whatever_the_parallelism() -> None:
    def series(subtasks: int) -> int:
        many = operator(parallelism=subtasks, attempts=tuple(attempt(number) for number in range(subtasks)))
        return sum(len(samples) for _, samples in figures(sidecar(many)))

    assert series(4) == series(1000) < 120
    labels = {label for family in FAMILIES for label in family.labels}
    of_parts = {"part", "figure"}
    assert labels == of_parts | {
        "operator", "state", "kind", "outcome", "phase", "mode", "relay", "tls", "stage", "display"
    }  # fmt: skip


def test_every_count_of_the_status_is_a_figure() -> None:
    shown = {sample.value for _, samples in figures(busy()) for sample in samples}
    crawl = busy().operators["crawl"]
    missing = {name for name, value in crawl.counts.items() if value not in shown}
    assert missing == {"failures"}  # which is shown by kind


def test_every_family_has_a_value_in_a_busy_status() -> None:
    assert [family.full_name for family, samples in figures(busy()) if not samples] == []


def test_a_scrape_reads_the_figures_in_base_units() -> None:
    read = values(busy())
    crawl = ("operator", "crawl")
    expected = {
        f"headgate_event_confirm_seconds_bucket{[('le', '0.000316'), crawl]}": 0,
        f"headgate_event_confirm_seconds_bucket{[('le', '0.000562'), crawl]}": 600,
        f"headgate_event_confirm_seconds_bucket{[('le', '0.001'), crawl]}": 1000,
        f"headgate_event_confirm_seconds_bucket{[('le', '+Inf'), crawl]}": 1000,
        f"headgate_event_confirm_seconds_count{[crawl]}": 1000,
        f"headgate_event_confirm_seconds_sum{[crawl]}": 0.3,
        f"headgate_request_seconds_count{[crawl]}": 0,
        f"headgate_attempts{[crawl, ('state', 'ready')]}": 2,
        f"headgate_attempts{[crawl, ('state', 'over')]}": 1,
        f"headgate_attempts{[crawl, ('state', 'ending')]}": 0,
        f"headgate_attempts_disconnected{[crawl]}": 1,
        f"headgate_unconfirmed_events{[crawl]}": 3,
        f"headgate_oldest_unconfirmed_event_seconds{[crawl]}": 1.5,
        f"headgate_oldest_request_seconds{[crawl]}": 40.0,
        f"headgate_buffered_bytes{[crawl]}": 130,
        f"headgate_coordinator_call_seconds{[crawl]}": 40.0,
        f"headgate_attempt_failures_total{[('kind', 'killed'), crawl]}": 3,
        f"headgate_attempt_failures_total{[('kind', 'connection_lost'), crawl]}": 0,
        f"headgate_last_checkpoint_id{[crawl]}": 10,
        f"headgate_last_checkpoint_time_seconds{[crawl]}": NOW - 7,
        f"headgate_last_checkpoint_phase_seconds{[crawl, ('phase', 'storing')]}": 1.5,
        f"headgate_checkpoints_total{[crawl, ('outcome', 'completed')]}": 100 + COUNTS.index("checkpoints_completed"),
        f"headgate_subtasks_uploading{[crawl]}": 2,
        f"headgate_autoscale_wanted_subtasks{[crawl]}": 5,
        f"headgate_last_checkpoint_files_bytes{[crawl]}": 5_000,
        f"headgate_last_checkpoint_uploaded_bytes{[crawl]}": 50,
        f"headgate_uploaded_bytes_total{[crawl]}": 100 + COUNTS.index("uploaded_bytes"),
        f"headgate_start_time_seconds{[]}": NOW - 100,
        f"headgate_event_loop_lag_max_seconds{[]}": 0.002,
        f"headgate_sidecar_info{[('relay', 'jvm'), ('tls', 'false')]}": 1,
    }
    assert {name: read.get(name) for name in expected} == pytest.approx(expected)
    other = [("operator", 'words "quoted"\n')]
    assert read[f"headgate_subtasks{other}"] == 4
    assert f"headgate_last_checkpoint_id{other}" not in read


def test_an_old_scraper_gets_the_text_format() -> None:
    content = metrics_route(busy)(Request("/metrics", {}, ""))
    assert content.content_type.startswith("text/plain; version=0.0.4")
    assert {family.name for family in parse_text(content.body.decode())} >= {"headgate_operators", "headgate_runs"}


def test_an_own_registry_can_hold_the_collector() -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(SidecarCollector(busy))
    assert registry.get_sample_value("headgate_operators") == 2


def test_without_the_package_the_scrape_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Unavailable, match=r"pip install 'headgate\[observability\]'"):
        metrics_route(busy)(SCRAPE)


def test_the_page_lists_every_figure_with_type_unit_and_labels() -> None:
    rows = re.findall(r"^\| `(headgate_\w+)` \| (\w+) \| (\w*) \| ([^|]*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = [
        (name, kind, unit, tuple(re.findall(r"\w+", labels)), meaning) for name, kind, unit, labels, meaning in rows
    ]
    assert listed == [
        (family.full_name, family.kind, family.unit, family.labels, family.meaning.rstrip(".")) for family in FAMILIES
    ]
