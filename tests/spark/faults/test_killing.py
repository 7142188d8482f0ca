# SPDX-License-Identifier: Apache-2.0

"""Faults that end an attempt from above: Spark is asked to kill its task, stage or job. docs/spark-faults.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.facts import JobEnded, JobStarted, TaskOutcome
from spark_bridge.driver.handle import OperatorHandle
from tests.spark.actions import Action, what_the_user_reads
from tests.spark.faults.bench import Bench
from tests.spark.faults.heard import Heard
from tests.spark.faults.talking import FIRST_ATTEMPTS_WAIT, both_talk
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark

MAX_FAILURES = 4  # Spark's default on a cluster


def check_that_the_next_job_is_good(bench: Bench, handle: OperatorHandle, script: Script) -> None:
    """H15, H55, H57: the failed run ends with one global reset and no subtask reset; then everything starts again."""
    end = script.story.index(("run_ended", False))
    script._script = {}
    results = sorted(bench.numbers(2).through(handle, Listening).collect())
    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    script.wait_for(lambda story: ("run_ended", True) in story)
    after = [callback for callback in script.story[end + 1 :] if callback[0] != "event"]
    assert after[0] == ("reset_to_checkpoint", -1, None)
    assert sorted(callback[:2] for callback in after[1:-1]) == [("ready", 0), ("ready", 1)]
    assert after[-1] == ("run_ended", True)


# --- one task -------------------------------------------------------------------------------------------------------


def test_a_task_is_killed_more_often_than_it_may_fail(bench: Bench) -> None:
    """H10, H12: each kill ends exactly one attempt; no kill counts as a failure of the task."""
    script = Script({(0, nth): ["hello"] for nth in range(MAX_FAILURES)} | {(1, 0): ["hello"]}, ["hello", "stop"])
    with bench.listening() as heard, bench.coordinated(script) as handle:
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        for nth in range(MAX_FAILURES):
            script.wait_for(lambda story, nth=nth: ("event", 0, nth, ["echo", "hello"]) in story)  # type: ignore[misc]
            bench.kill_task(script.gateways[0].attempt.task_attempt_id, f"kill {nth}")
        script.wait_for(lambda story: ("ready", 0, MAX_FAILURES) in story)
        script.say(["stop"])
        results = sorted(action.result())

    assert [(subtask, received) for subtask, _, received in results] == [(0, ["hello"]), (1, ["hello"])]
    lives = script.of_subtask(0)
    for nth in range(MAX_FAILURES):
        assert lives[3 * nth : 3 * nth + 3] == [("ready", 0, nth), ("failed", 0, nth, "KILLED"), ("reset", 0, -1)]
        assert f"kill {nth}" in script.reasons[nth].text
    assert lives[3 * MAX_FAILURES :] == [("ready", 0, MAX_FAILURES)]
    assert script.of_subtask(1) == [("ready", 1, 0)]
    assert heard.outcomes(0) == [*[TaskOutcome.KILLED] * MAX_FAILURES, TaskOutcome.SUCCESS]


# --- the stage, the job ---------------------------------------------------------------------------------------------


def cancel_the_stage(bench: Bench, heard: Heard) -> str:
    [stage_id] = heard.wait_for(JobStarted).stage_ids
    return bench.cancel_stage(stage_id)


def cancel_the_job(bench: Bench, heard: Heard) -> str:
    return bench.cancel_job(heard.wait_for(JobStarted).job_id)


def cancel_all_jobs(bench: Bench, heard: Heard) -> str:
    return bench.cancel_all_jobs()


@pytest.mark.parametrize("cancel", [cancel_the_stage, cancel_the_job, cancel_all_jobs])
def test_a_running_job_is_cancelled(bench: Bench, cancel: Callable[[Bench, Heard], str]) -> None:
    """H12, H15, H57: every live attempt is reported failed, then the run's end; no subtask is reset without need."""
    script = Script(FIRST_ATTEMPTS_WAIT, ["hello", "stop"])
    with bench.listening() as heard, bench.coordinated(script) as handle:
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        script.wait_for(both_talk)
        text = cancel(bench, heard)
        assert text in what_the_user_reads(action.result)
        script.wait_for(lambda story: ("run_ended", False) in story)
        assert not heard.wait_for(JobEnded).succeeded
        for subtask in (0, 1):
            assert script.of_subtask(subtask) == [("ready", subtask, 0), ("failed", subtask, 0, "RUN_ENDED")]
        assert all(text in reason.text for reason in script.reasons)
        check_that_the_next_job_is_good(bench, handle, script)


def test_a_job_group_is_cancelled(bench: Bench) -> None:
    """H57: the operators of the group's jobs are told; a job that runs alongside them is not affected."""
    scripts = [Script({(0, 0): ["hello"]}, ["hello", "stop"]) for _ in range(3)]
    with (
        bench.coordinated(scripts[0], 1) as first,
        bench.coordinated(scripts[1], 1) as second,
        bench.coordinated(scripts[2], 1) as other,
    ):
        actions = []
        for handle, group in [(first, "condemned"), (second, "condemned"), (other, "spared")]:
            rows = bench.numbers(1).through(handle, Listening)
            actions.append(Action(bench.in_group(group, rows.collect)))
        for script in scripts:
            script.wait_for(lambda story: any(callback[0] == "event" for callback in story))
        text = bench.cancel_group("condemned")
        for script, action in zip(scripts[:2], actions[:2], strict=True):
            assert text in what_the_user_reads(action.result)
            script.wait_for(lambda story: ("run_ended", False) in story)
            assert script.of_subtask(0) == [("ready", 0, 0), ("failed", 0, 0, "RUN_ENDED")]
        assert scripts[2].of_subtask(0) == [("ready", 0, 0)]
        scripts[2].say(["stop"])
        assert [received for _, _, received in actions[2].result()] == [["hello"]]
        assert scripts[2].of_subtask(0) == [("ready", 0, 0)]


def test_a_task_fails_as_often_as_it_may(bench: Bench) -> None:
    """H10, H12, H15: each failure is followed by a reset, and the last one by the end of the run."""
    script = Script({(0, nth): ["raise"] for nth in range(MAX_FAILURES)} | {(1, 0): ["hello"]}, ["hello", "stop"])
    with bench.listening() as heard, bench.coordinated(script) as handle:
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        assert "as it was told" in what_the_user_reads(action.result)
        script.wait_for(lambda story: ("run_ended", False) in story)
        lives = script.of_subtask(0)
        for nth in range(MAX_FAILURES):
            assert lives[3 * nth : 3 * nth + 3] == [("ready", 0, nth), ("failed", 0, nth, "FAILED"), ("reset", 0, -1)]
        heard.wait_for(JobEnded)  # its relay is another one than the sidecar's, and may be later
        assert heard.outcomes(0) == [TaskOutcome.FAILED] * MAX_FAILURES
        assert script.of_subtask(1) == [("ready", 1, 0), ("failed", 1, 0, "RUN_ENDED")]
        check_that_the_next_job_is_good(bench, handle, script)
