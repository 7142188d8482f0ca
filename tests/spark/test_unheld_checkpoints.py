# SPDX-License-Identifier: Apache-2.0

"""Checkpoints that hold no events, on real Spark, under a kill (H79)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from protocol.barrier_tracker import CheckpointConfig
from tests.spark.actions import coordinated
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.test_checkpoints import STREAMING, ready, running

pytestmark = pytest.mark.spark


def test_no_event_waits_and_only_the_killed_subtask_sends_what_was_recorded_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """H79, H31, H18: what came after the cut is in the checkpoint, and a retry sends it first."""
    coordinator = CountingCoordinator()
    unheld = CheckpointConfig(hold_events=False, tolerated_failures=10)
    with coordinated(spark, coordinator, 2, mode=STREAMING, checkpoint=unheld) as job:
        with running(job.action(Counting, str(tmp_path))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.tell(1, "compute")
            coordinator.wait_for(lambda story: ("event", 1, 0, "computing") in story)
            with running(job.sidecar.checkpoint) as checkpoint:
                coordinator.wait_for(lambda story: ("checkpoint", 1) in story)
                coordinator.send_numbers(0, 3)
                coordinator.send_numbers(1, 3)  # in its mailbox, after the barrier
                coordinator.wait_until_seen(0, 3)
                at_that_moment = list(coordinator.story)
                (tmp_path / "go on").touch()
            assert checkpoint == [1]
            coordinator.wait_until_seen(1, 3)
            before_the_kill = list(coordinator.story)
            coordinator.tell(1, "die")
            coordinator.wait_for(ready(3))
            coordinator.send_numbers(1, 5)  # its position went back to the cut
            coordinator.wait_until_seen(1, 5)
            coordinator.stop_all()

    assert outcome == [[(0, 3), (1, 5)]]
    assert coordinator.wrong == []
    assert ("complete", 1) not in at_that_moment
    came = before_the_kill.index(("event", 1, 0, "computed"))
    assert before_the_kill.index(("checkpoint", 1)) < came < before_the_kill.index(("complete", 1))
    afterwards = coordinator.story[len(before_the_kill) :]
    again: list[Any] = [callback for callback in afterwards if callback[0] == "event"]
    assert again[0][3] == "computed"
    assert [event[1:] for event in again if event[3] == "computed"] == [(1, 1, "computed")]
    assert all(event[1] == 1 for event in again)
