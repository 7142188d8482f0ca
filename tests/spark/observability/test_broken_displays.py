# SPDX-License-Identifier: Apache-2.0

"""Displays that are broken while a real job runs: the job and the sidecar go on, and say so (H155)."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from headgate import OperatorCoordinator, Sidecar, SubtaskContext
from spark_bridge.bridge import jvm_classes
from spark_bridge.observability import event_log, progress, spark_metrics, spark_ui
from spark_bridge.observability.displays import FAILURES_MAX
from tests.spark.actions import one_task_each
from tests.spark.conftest import SparkOn

pytestmark = [pytest.mark.spark, pytest.mark.long]

DISPLAYS = {"spark-ui-tab", "spark-metrics", "event-log", "progress"}
FAILED, PAUSED = "display failed, jobs not affected", "display paused"


class Broken(Exception):
    """What a display raises here."""


def breaks(*args: Any, **kwargs: Any) -> Any:
    raise Broken("as it was told")


@pytest.fixture
def spark(spark_on: SparkOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """A session with a UI and an event log, in whose JVM no class of a display is compiled yet."""
    monkeypatch.setattr(jvm_classes, "_loaded", {})
    monkeypatch.setattr(spark_metrics, "PUBLISH_EVERY_S", 0.2)
    monkeypatch.setattr(spark_ui, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(event_log, "FLUSH_AFTER_S", 0.1)
    return spark_on(
        "local[2]",
        spark_ui_enabled="true",
        spark_ui_port="0",
        spark_eventLog_enabled="true",
        spark_eventLog_dir=tmp_path.as_uri(),
    )


def counting(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    for record in records:
        context.count("records", 1)
        yield record


def look_at_the_tab(spark: SparkSession) -> None:
    """Ask for the status, as a browser does: the tab is fed while somebody looks."""
    with urllib.request.urlopen(f"{spark.sparkContext.uiWebUrl}/headgate/files/status.json") as answer:
        answer.read()


def jobs_go_on(spark: SparkSession, sidecar: Sidecar, name: str, broken: set[str]) -> dict[str, int]:
    """Run a job while the displays fail, and another one; return the failures that the status has."""
    handle = sidecar.coordinate(name, OperatorCoordinator, parallelism=2)
    rows = one_task_each(spark, 2).mapPartitions(handle.subtask(counting))
    with handle.progress():
        assert sorted(rows.collect()) == [0, 1]
        while not broken <= sidecar.status().display_failures.keys():  # the test's timeout is the limit
            if "/headgate/files" in handlers(spark):
                look_at_the_tab(spark)
            time.sleep(0.05)
    assert sorted(rows.collect()) == [0, 1]
    assert handle.counters() == {"records": 2}
    return dict(sidecar.status().display_failures)


def test_a_job_goes_on_while_all_its_displays_are_broken(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    with capture_logs() as lines, Sidecar(spark) as sidecar:
        for owner, function in (
            (spark_ui, "page_parts"),
            (spark_metrics, "gauges"),
            (event_log.EventLog, "post"),
            (progress.Progress, "_look"),
        ):
            monkeypatch.setattr(owner, function, breaks)
        while "/headgate" not in handlers(spark):
            time.sleep(0.05)
        failures = jobs_go_on(spark, sidecar, "crawl", DISPLAYS)
        said = " ".join(sidecar.explain())
        assert all(f"the display {display!r} has failed" in said for display in DISPLAYS)
    failed = [line["display"] for line in lines if line["event"] == FAILED]
    assert sorted(failed) == sorted(DISPLAYS), "each is logged once"
    paused = {line["display"] for line in lines if line["event"] == PAUSED}
    assert {display for display, count in failures.items() if count >= FAILURES_MAX} <= paused
    assert not [line for line in lines if line["log_level"] == "error"]


def handlers(spark: SparkSession) -> list[str]:
    """The paths of everything that is attached to Spark's UI."""
    all_of_them = spark.sparkContext._jsc.sc().ui().get().getHandlers()
    return [all_of_them.apply(place).getContextPath() for place in range(all_of_them.size())]
