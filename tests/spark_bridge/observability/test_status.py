# SPDX-License-Identifier: Apache-2.0

"""The status as values: what is derived from the fields, and the plain form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.coordination.statistics import SourceBacklog, SplitBacklog
from headgate.testing import RecordingCoordinator
from protocol.facts import JobEnded
from spark_bridge.observability.collector import Process, StatusCollector, _by_stage
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.status import RelayStatus, SourceStatus, SplitStatus
from tests.conformance.application import OPERATOR, application
from tests.spark_bridge.observability.statuses import attempt, checkpoint, operator, sidecar


@pytest.mark.parametrize(
    ("changes", "waits_for"),
    [
        ({}, ""),
        ({"state": "accepted"}, "its operator to open"),
        ({"known_to_coordinator": False}, "the coordinator's subtask_ready to return"),
        ({"requested_at": 1.0}, "the answer to its request"),
        ({"deferred_at": 1.0}, "the coordinator to settle its Reply"),
        ({"connected": False, "requested_at": 1.0}, "its connection to come back"),
        ({"state": "ending"}, "Spark to report its success"),
        ({"state": "finished", "connected": False}, ""),
        ({"state": "over", "connected": False}, ""),
    ],
)
def test_an_attempt_says_what_it_waits_for(changes: dict[str, Any], waits_for: str) -> None:
    assert attempt(**changes).waits_for == waits_for


def test_a_subtask_counts_once_as_ready_however_many_attempts_it_has() -> None:
    first, second, other = attempt(0, state="over"), attempt(0, attempt=1), attempt(1, state="finished")
    one = operator(attempts=(first, second, other, attempt(2, state="accepted")))
    assert one.ready == 2
    assert one.attempts_of(0) == (first, second)


@pytest.mark.parametrize(
    ("phase", "step", "awaited"),
    [
        ("closing", "close", (1, 3)),
        ("acknowledging", "acknowledge", (1, 3)),
        ("storing", "acknowledge", ()),
        ("snapshotting", "acknowledge", ()),
    ],
)
def test_a_checkpoint_awaits_the_subtasks_whose_step_its_phase_is(phase: str, step: str, awaited: tuple[int]) -> None:
    assert checkpoint(phase, 1, 3, step=step).awaited == awaited


def test_the_plain_form_survives_json() -> None:
    plain = sidecar(operator(checkpoints=(checkpoint("closing", 1, step="close"),))).to_dict()
    again = json.loads(json.dumps(plain))
    assert again == plain
    assert again["operators"]["crawl"]["checkpoints"][0]["subtasks"]["1"] == "close"
    assert again["operators"]["crawl"]["attempts"][2]["task_attempt_id"] == 102


def test_a_source_shows_what_is_left_and_its_largest_splits() -> None:
    backlog = SourceBacklog(1, 2, 30, (SplitBacklog(4, "'a'", 20), SplitBacklog(0, "'b'", 9)))
    shown = _by_stage({"read": backlog, "": SourceBacklog(None, 0, None)})
    assert shown["read"] == SourceStatus(1, 2, 30, (SplitStatus(4, "'a'", 20), SplitStatus(0, "'b'", 9)))
    assert shown[""] == SourceStatus(None, 0, None, ())


async def test_a_status_shows_the_run_of_each_operator_that_has_one() -> None:
    async def cores() -> int:
        return 3

    async with application(parallelism=3) as app:
        process = Process("here", 7, False, lambda: RelayStatus("none", 0, 0, 0), app.kit.clock.now() - 60.0, cores)
        collector = StatusCollector(
            app.bridge_ref, app.kit.clock, Journal(0.0), process, lambda: app.operators.observed
        )
        await app.coordinate(RecordingCoordinator())
        await app.coordinate(RecordingCoordinator(), "idle")
        app.start_job()
        for subtask in (0, 1):
            app.register(app.launch(subtask))
        await app.settle()
        status = await app.kit.drive(collector.take())
        one, idle = status.operators[OPERATOR], status.operators["idle"]
        assert status.uptime_s == 60.0

        assert one.run is not None
        assert (one.run.stage_id, one.run.tasks_started, one.run.subtasks_seen, one.run.missing) == (10, 2, 2, (2,))
        assert [(attempt.subtask, attempt.state, attempt.waits_for) for attempt in one.attempts] == [
            (0, "ready", ""),
            (1, "ready", ""),
        ]
        assert status.cores == 3, "which may be why a subtask has no task"
        assert (idle.run, idle.attempts) == (None, ())

        for task in app.tasks.values():
            await app.end(task)
        app.post(JobEnded(1, False, "two tasks failed"))
        await app.settle()
        over = await app.kit.drive(collector.take())
        assert (over.operators[OPERATOR].run, over.operators[OPERATOR].attempts, over.cores) == (None, (), None)
