# SPDX-License-Identifier: Apache-2.0

"""The timeline of a real job: its methods, attempts, failures and checkpoints are where they belong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SidecarConfig, SubtaskContext, SubtaskOperator, Watching
from headgate.errors import SidecarError
from tests.spark_bridge.observability.trace_reader import events_of, query

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Answering(OperatorCoordinator):
    """Answers questions and sends an event back for each."""

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        self.gateways = {**getattr(self, "gateways", {}), subtask: gateway}

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self.gateways[subtask].send_event(request)
        return request

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass


class DiesOnce(SubtaskOperator):
    """Asks, and is killed in its first attempt of subtask 0."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        pass

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            yield self.context.request(record)
        self.context.request("more")
        if self.context.subtask == 0 and self.context.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_query_about_a_real_job_is_answered(spark: SparkSession, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    with Sidecar(spark, SidecarConfig(watching=Watching(trace=whole))) as sidecar:
        with pytest.raises(SidecarError, match="already traced into"), sidecar.trace(part):
            pass
        handle = sidecar.coordinate("dies", Answering(), parallelism=2, mode="streaming")
        rows = spark.sparkContext.parallelize(range(20), 2).mapPartitions(handle.subtask(DiesOnce))
        sidecar.run(rows.collect)
    attempts = query(whole, "select name, args ->> 'outcome' from slice where name like 'dies[%' order by name")
    assert [name for name, _ in attempts] == ["dies[0]#0", "dies[0]#1", "dies[1]#0"]
    assert [outcome for _, outcome in attempts][1:] == ["finished", "finished"]
    methods = {name for (name,) in query(whole, "select distinct name from slice where track = 'coordinator of dies'")}
    assert {"handle_request", "subtask_ready", "subtask_failed", "subtask_reset"} <= methods
    (phases,) = query(
        whole,
        "select sum(phase.dur), max(whole.dur) from slice phase, slice whole where phase.track = whole.track "
        "and phase.category = 'checkpoint' and phase.depth = 1 and whole.depth = 0 and whole.track = 'dies/1'",
    )
    assert phases[0] == pytest.approx(phases[1], abs=1.0), "the phases fill the checkpoint"
    (confirmed,) = query(whole, "select count(*) from slice where category = 'event'")
    assert confirmed[0] >= 20
    names = [event["name"] for event in events_of(whole)]
    assert any(name.startswith("failure: ") for name in names)
    assert "reset of subtask 0" in names
    assert names[-1] == "end of trace"


def test_a_block_traces_a_part(spark: SparkSession, tmp_path: Path) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("dies", Answering(), parallelism=2)
        rows = spark.sparkContext.parallelize(range(4), 2).mapPartitions(handle.subtask(DiesOnce))
        with sidecar.trace(tmp_path / "part.json"):
            assert sorted(rows.collect()) == [0, 1, 2, 3]
        seen = (tmp_path / "part.json").read_bytes()
        with sidecar.trace(tmp_path / "second.json"):
            pass
        with pytest.raises(SidecarError, match="cannot write the trace to"), sidecar.trace(tmp_path):
            pass
        sidecar.trace(tmp_path / "last.json").__enter__()  # leaving the sidecar ends it
    assert (tmp_path / "part.json").read_bytes() == seen
    for name, runs in (("part", 1), ("second", 0), ("last", 0)):
        file = tmp_path / f"{name}.json"
        assert events_of(file)[-1]["name"] == "end of trace"
        assert query(file, "select count(*) from slice where name like 'run,%'") == [(runs,)]
