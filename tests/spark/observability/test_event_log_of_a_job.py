# SPDX-License-Identifier: Apache-2.0

"""A real application whose event log is read after its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headgate import Sidecar, SidecarConfig
from spark_bridge.command import main
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import LOCAL, SparkOn
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = [pytest.mark.spark, pytest.mark.long]


def test_failures_resets_and_checkpoints_are_read_from_the_event_log_alone(
    spark_on: SparkOn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    spark = spark_on(LOCAL, spark_eventLog_enabled="true", spark_eventLog_dir=logs.as_uri())
    script = Script({(0, 0): ["die"]}, ["hello"])
    with Sidecar(spark, SidecarConfig()) as sidecar:
        handle = sidecar.coordinate("crawl", script, parallelism=2, mode="streaming")
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        script.wait_for(lambda story: [one[:3] for one in story if one[0] == "ready"].count(("ready", 0, 1)) == 1)
        checkpoint_id = sidecar.checkpoint()
        script.say(["stop"])
        action.result()
    spark.stop()
    (log,) = logs.iterdir()
    capsys.readouterr()
    assert main(["history", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [
        r"local-\d+ headgate-tests, Spark 4\.\d\.\d, started .* UTC",
        r" +\+\d+\.\d{3} s +application started",
        r".* job \d+ started, stages \[\d+\]",
        r".* s  crawl  run started, stage \d+",
        r".* s  crawl  subtask 0 attempt 0 failed: \w+: .+",
        r".* s  crawl  subtask 0 reset to the beginning",
        rf".* s  crawl  checkpoint {checkpoint_id} completed after .* \(.*acknowledging .*storing .*\)",
        r".* s  crawl  run succeeded, stage \d+",
        r".* s +application ended",
    ]
    found = iter(lines)
    for pattern in expected:  # in this order, others may be in between
        assert any(re.fullmatch(pattern, line) for line in found), (pattern, lines)
