# SPDX-License-Identifier: Apache-2.0

"""The status of a real job: what it says of attempts, failures and events, before, during and after the run."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

from headgate import Sidecar
from spark_bridge.common.errors import SidecarNotRunning
from tests.spark.actions import Action, one_task_each
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark


def test_a_run_with_a_killed_task_is_shown_from_beginning_to_end(spark: SparkSession) -> None:
    script = Script({(0, 0): ["die"]}, ["hello"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", script, parallelism=2)
        before = sidecar.status()
        assert (before.operators["op"].run, before.operators["op"].attempts) == (None, ())
        assert (before.host, before.port, before.relay.kind) == (*sidecar.address, sidecar.relay_kind)

        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        while [callback[3] for callback in script.named("event")].count(["echo", "hello"]) < 2:
            sidecar.status()
        status = sidecar.status()
        operator = status.operators["op"]
        assert operator.run is not None
        assert (operator.run.task_count, operator.run.missing, operator.run.failed_cause) == (2, (), "")
        lost, again = operator.attempts_of(0)
        assert (lost.state, lost.attempt, lost.is_live, lost.waits_for) == ("over", 0, False, "")
        assert (bool(lost.failure), lost.connected, lost.heard_at) == (True, False, None)
        assert (again.state, again.attempt, again.connected, again.known_to_coordinator) == ("ready", 1, True, True)
        assert (again.executor_id, bool(again.host)) == ("driver", True)
        assert again.heard_at is not None
        assert before.taken_at < again.accepted_at <= again.heard_at <= status.taken_at
        (failure,) = operator.failures
        assert (failure.subtask, failure.attempt, failure.kind) == (0, 0, lost.failure)
        assert (operator.counts["attempts"], operator.counts["failures"]) == (3, 1)
        assert (operator.ready, operator.queued, operator.call) == (2, 0, None)
        assert operator.confirm.samples == operator.counts["events_confirmed"] >= 2
        assert operator.confirm.last_minute.p50_us is not None
        json.dumps(status.to_dict())

        idle, changed = operator.attempts_of(1)[0], again
        assert sidecar.status().operators["op"].attempts_of(1)[0] is idle  # nothing has come from it since
        script.say(["stop"])
        action.result()
        while sidecar.status().operators["op"].run is not None:
            continue
        after = sidecar.status().operators["op"]
        assert (after.attempts, after.counts["runs"], len(after.failures)) == ((), 1, 1)
        assert changed.state == "ready"  # a status does not change any more
    with pytest.raises(SidecarNotRunning):
        sidecar.status()
    with pytest.raises(SidecarNotRunning):
        sidecar.explain()
