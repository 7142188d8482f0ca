# SPDX-License-Identifier: Apache-2.0

"""Perfetto's own trace processor reads the timeline of a real job."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, Watching
from tests.spark.browser.perfetto import perfetto
from tests.spark.observability.test_trace import Answering, DiesOnce

pytestmark = [pytest.mark.spark, pytest.mark.long]

PHASES = {"closing", "snapshotting", "acknowledging", "storing"}


def test_perfetto_reads_a_trace_and_answers_a_query_about_checkpoint_phases(
    spark: SparkSession, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "job.json"
    with Sidecar(spark, SidecarConfig(watching=Watching(trace=file))) as sidecar:
        handle = sidecar.coordinate("dies", Answering(), parallelism=2, mode="streaming")
        rows = spark.sparkContext.parallelize(range(20), 2).mapPartitions(handle.subtask(DiesOnce))
        sidecar.run(rows.collect)
    with perfetto(browser, file, tmp_path / "perfetto") as trace:
        assert trace.query("select name from stats where severity in ('error', 'data_loss') and value > 0") == []
        phases = trace.query(
            "select whole.id, whole.dur, phase.name, phase.dur from slice whole join slice phase "
            "on phase.parent_id = whole.id where whole.category = 'checkpoint'"
        )
        attempts = trace.query(
            "select slice.name, extract_arg(slice.arg_set_id, 'args.outcome'), slice.depth from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "where slice.name glob 'dies[[]*' order by slice.name"
        )
        methods = trace.query(
            "select distinct slice.name from slice join thread_track on slice.track_id = thread_track.id "
            "join thread using (utid) where thread.name = 'coordinator of dies'"
        )
        in_flight = trace.query("select count(*) from slice where category = 'event'")
    assert phases
    for checkpoint, duration in {(row[0], row[1]) for row in phases}:
        parts = [row[3] for row in phases if row[0] == checkpoint]
        assert sum(parts) == pytest.approx(duration, abs=1_000 * len(parts)), "the phases fill the checkpoint"
    assert PHASES & {row[2] for row in phases} >= {"snapshotting", "storing"}
    assert attempts[1:] == [("dies[0]#1", "finished", 0), ("dies[1]#0", "finished", 0)]
    assert {"handle_request", "subtask_ready", "subtask_failed", "subtask_reset"} <= {name for (name,) in methods}
    assert in_flight[0][0] >= 20
