# SPDX-License-Identifier: Apache-2.0

"""The spans of a real job with a killed task, as OpenTelemetry's SDK sees them."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, Watching
from tests.spark.actions import Action, one_task_each
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = [pytest.mark.spark, pytest.mark.long]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_a_run_its_attempts_a_restore_and_a_checkpoint_are_spans_that_are_linked(
    spark: SparkSession, exporter: InMemorySpanExporter
) -> None:
    script = Script({(0, 0): ["die"]}, ["hello"])
    with Sidecar(spark, SidecarConfig(watching=Watching(opentelemetry=True))) as sidecar:
        handle = sidecar.coordinate("crawl", script, parallelism=2, mode="streaming")
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        script.wait_for(lambda story: ("ready", 0, 1) in [one[:3] for one in story])
        checkpoint_id = sidecar.checkpoint()
        for _ in range(100):
            script.say(["an event"])
        script.say(["stop"])
        action.result()
    spans = exporter.get_finished_spans()
    (run,) = (span for span in spans if span.name == "headgate.run")
    attempts = {
        ((span.attributes or {})["headgate.subtask"], (span.attributes or {})["headgate.attempt"]): span
        for span in spans
        if span.name == "headgate.attempt"
    }
    assert set(attempts) == {(0, 0), (0, 1), (1, 0)}
    assert {span.parent.span_id for span in attempts.values() if span.parent} == {id_of(run)}
    assert not attempts[0, 0].status.is_ok
    assert run.status.is_ok
    (restore,) = (span for span in spans if span.name == "headgate.restore")
    assert [link.context.span_id for link in restore.links] == [id_of(attempts[0, 0])]
    checkpoints = {
        (span.attributes or {})["headgate.checkpoint_id"]: span for span in spans if span.name == "headgate.checkpoint"
    }
    checkpoint = checkpoints[checkpoint_id]
    assert [link.context.span_id for link in checkpoint.links] == [id_of(run)]
    phases = [span for span in spans if span.parent is not None and span.parent.span_id == id_of(checkpoint)]
    assert {"headgate.acknowledging", "headgate.storing"} <= {span.name for span in phases}
    for phase in phases:
        assert (checkpoint.start_time or 0) <= (phase.start_time or 0) <= (phase.end_time or 0)
        assert (phase.end_time or 0) <= (checkpoint.end_time or 0)
    assert len(spans) < 40  # far fewer than events
