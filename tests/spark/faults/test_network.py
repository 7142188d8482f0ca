# SPDX-License-Identifier: Apache-2.0

"""The network between the tasks and the sidecar fails while Spark's own works: docs/spark-faults.md, row 8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protocol.attempts import FailureKind
from protocol.barrier_tracker import CheckpointConfig
from protocol.facts import JobEnded, TaskEnded, TaskOutcome
from protocol.gateway.types import GatewayLimits
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.actions import Action
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.faults.bench import Bench
from tests.spark.faults.network import Line
from tests.spark.operators import Listening
from tests.spark.recorder import Callback, Recorder
from tests.spark.script import Script

pytestmark = pytest.mark.spark

SHORT = GatewayLimits(reconnect_timeout_s=1.0)


@dataclass
class Job:
    """A running job whose tasks reach the sidecar by a line."""

    line: Line
    sidecar: Sidecar
    action: Action


@contextmanager
def a_job(
    bench: Bench,
    coordinator: Recorder,
    operator: Callable[..., Any],
    *arguments: Any,
    line: Line | None = None,
    parallelism: int = 2,
    gateway: GatewayLimits | None = None,
    mode: RestoreMode = RestoreMode.BATCH,
    checkpoint: CheckpointConfig | None = None,
) -> Iterator[Job]:
    """It has begun when each of its subtasks is ready."""
    with line or Line() as line, bench.behind_a_line(line) as sidecar:
        handle = sidecar.coordinate(
            "op", coordinator, parallelism=parallelism, mode=mode, gateway=gateway, checkpoint=checkpoint
        )
        tasks = bench.numbers(parallelism).through(handle, operator, *arguments)
        action = bench.start_collecting(tasks)
        coordinator.wait_for(lambda story: len({callback[1] for callback in named(story, "ready")}) == parallelism)
        yield Job(line, sidecar, action)


def named(story: list[Callback], name: str) -> list[Callback]:
    return [callback for callback in story if callback[0] == name]


def echoed(story: list[Callback], event: Any) -> set[tuple[int, int]]:
    """Which attempts, of which subtasks, have sent this event back."""
    return {callback[1:3] for callback in named(story, "event") if callback[3] == ["echo", event]}


def say_to(script: Script, subtask: int, event: Any) -> None:
    """Send to one subtask only."""

    async def send() -> None:
        await script.gateways[subtask].send_event(event)

    script.context.call_soon_threadsafe(send)


class Flowing(CountingCoordinator):
    """Sends each number in a separate call, so that a checkpoint can be cut between two of them."""

    def send_one_by_one(self, subtask: int, count: int) -> None:
        async def send() -> None:
            self.sent[subtask] = self.sent.get(subtask, 0) + 1
            await self.gateways[subtask].send_event(["number", self.sent[subtask]])
            if count > 1:
                self.send_one_by_one(subtask, count - 1)

        self.context.call_soon_threadsafe(send)


# --- it heals in time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "broken"])
def test_a_network_cut_that_heals_in_time_loses_nothing(bench: Bench, tmp_path: Path, how: str) -> None:
    """H22, H24, H30: without a notice, messages of both sides wait on the line, and arrive later, in order and once.
    With one, the tasks reconnect, and both sides resend what is unconfirmed.
    """
    coordinator = CountingCoordinator()
    with a_job(bench, coordinator, Counting, str(tmp_path)) as job:
        coordinator.tell(0, "compute")
        coordinator.wait_for(lambda story: ("event", 0, 0, "computing") in story)
        job.line.cut() if how == "cut" else job.line.break_off()
        (tmp_path / "go on").touch()
        coordinator.send_numbers(0, 3)
        coordinator.send_numbers(1, 3)
        if how == "cut":
            job.line.wait_for(
                lambda line: (
                    any(one.of_task.waiting_bytes > len("computed") for one in line.connections)
                    and all(one.of_sidecar.waiting_bytes for one in line.connections)
                ),
                "both directions are held up",
            )
        else:
            job.line.wait_for(lambda line: line.turned_away >= 4, "the tasks cannot connect")
        while_away = [callback[3] for callback in coordinator.named("event")]
        job.line.heal()
        coordinator.wait_until_seen(0, 3)
        coordinator.wait_until_seen(1, 3)
        coordinator.stop_all()
        assert job.action.result() == [(0, 3), (1, 3)]
        assert len(job.line.connections) == (2 if how == "cut" else 4)

    assert while_away == ["computing"]
    assert coordinator.wrong == []
    assert sorted(coordinator.named("ready", "failed", "reset")) == [("ready", 0, 0), ("ready", 1, 0)]


@pytest.mark.parametrize("who_speaks", ["sidecar", "task"])
def test_a_connection_reset_in_the_middle_of_a_frame_is_reestablished(bench: Bench, who_speaks: str) -> None:
    """H24, H60: the torn frame is not a message, and the whole frame is sent again."""
    long_event = "x" * 100_000
    script = Script({}, ["hello"])
    with a_job(bench, script, Listening, parallelism=1) as job:
        script.wait_for(lambda story: bool(echoed(story, "hello")))
        [torn] = job.line.connections
        job.line.tear_after(torn.of_sidecar if who_speaks == "sidecar" else torn.of_task, 5_000)
        script.say([long_event, "stop"])
        [(subtask, attempt, received)] = job.action.result()
        assert torn.torn
        assert len(job.line.connections) == 2

    assert (subtask, attempt, received) == (0, 0, ["hello", long_event])
    told = [callback[3][1] for callback in script.named("event")]
    assert told == ["hello", long_event]
    assert script.named("ready", "failed", "reset") == [("ready", 0, 0)]


# --- it does not heal ---------------------------------------------------------------------------------------------


def test_a_task_with_a_permanently_lost_connection_is_failed_and_killed(bench: Bench) -> None:
    """H12, H24: the task lives, unaware of the cut; Spark kills it and starts another; no other subtask is affected."""
    script = Script({}, ["hello"])
    with bench.listening() as heard:
        with a_job(bench, script, Listening, gateway=SHORT) as job:
            script.wait_for(lambda story: len(echoed(story, "hello")) == 2)
            known, gone = len(job.line.connections), job.line.connections[-1]
            job.line.leave_half_open(gone)
            script.wait_for(lambda story: bool(named(story, "failed")))
            task_lived = gone.of_task.is_open
            [(_, lost, _, _)] = script.named("failed")
            script.wait_for(lambda story: (lost, 1) in echoed(story, "hello"))
            script.say(["stop"])
            results = sorted(job.action.result())
            assert len(job.line.connections) == known + 1
        heard.wait_for(JobEnded)

    assert task_lived
    assert results == sorted([(lost, 1, ["hello"]), (1 - lost, 0, ["hello"])])
    assert script.of_subtask(lost) == [
        ("ready", lost, 0),
        ("failed", lost, 0, FailureKind.CONNECTION_LOST.name),
        ("reset", lost, -1),
        ("ready", lost, 1),
    ]
    assert script.of_subtask(1 - lost) == [("ready", 1 - lost, 0)]
    assert heard.outcomes(lost) == [TaskOutcome.KILLED, TaskOutcome.SUCCESS]
    [killed] = heard.of(TaskEnded, lambda fact: fact.outcome is TaskOutcome.KILLED)
    assert killed.reason == "connection lost: the task did not come back in time"


def test_tasks_that_cannot_reconnect_in_time_are_run_again(bench: Bench) -> None:
    """H10, H24: both sides notice the cut and measure the time, so either may be the first to give up."""
    script = Script({}, ["hello"])
    with a_job(bench, script, Listening, gateway=SHORT) as job:
        script.wait_for(lambda story: len(echoed(story, "hello")) == 2)
        job.line.break_off()
        script.wait_for(lambda story: {callback[1] for callback in named(story, "failed")} == {0, 1})
        job.line.heal()
        script.wait_for(lambda story: {(0, 1), (1, 1)} <= echoed(story, "hello"))
        script.say(["stop"])
        assert sorted(job.action.result()) == [(0, 1, ["hello"]), (1, 1, ["hello"])]
        assert job.line.turned_away >= 2

    for subtask in range(2):
        assert [callback[0] for callback in script.of_subtask(subtask)] == ["ready", "failed", "reset", "ready"]
    assert {reason.kind for reason in script.reasons} <= {FailureKind.CONNECTION_LOST, FailureKind.FAILED}


def test_a_cut_longer_than_the_confirmation_timeout_fails_the_receiving_attempt(bench: Bench) -> None:
    """H25: neither side is notified of such a cut; an event that is not confirmed in time reveals it."""
    script = Script({}, ["hello"])
    with a_job(bench, script, Listening, gateway=GatewayLimits(confirm_timeout_s=2.0)) as job:
        script.wait_for(lambda story: len(echoed(story, "hello")) == 2)
        job.line.cut()
        say_to(script, 0, "anybody there?")
        script.wait_for(lambda story: bool(named(story, "failed")))
        job.line.heal()
        script.wait_for(lambda story: (0, 1) in echoed(story, "hello"))
        script.say(["stop"])
        results = sorted(job.action.result())

    assert results == [(0, 1, ["hello"]), (1, 0, ["hello"])]
    assert script.of_subtask(0) == [
        ("ready", 0, 0),
        ("failed", 0, 0, FailureKind.CONFIRMATION_TIMEOUT.name),
        ("reset", 0, -1),
        ("ready", 0, 1),
    ]
    assert script.of_subtask(1) == [("ready", 1, 0)]
    assert not echoed(script.story, "anybody there?")  # the old attempt has it by now, and is ignored (H3)


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "broken"])
def test_a_checkpoint_waits_for_a_network_cut_to_heal(bench: Bench, how: str) -> None:
    """H24, H40: it begins at all subtasks or is not cut, and completes when they are reachable again."""
    coordinator, held = CountingCoordinator(), CheckpointConfig(hold_events=True)
    with a_job(bench, coordinator, Counting, mode=RestoreMode.STREAMING, checkpoint=held) as job:
        coordinator.send_numbers(0, 3)
        coordinator.wait_until_seen(0, 3)
        if how == "cut":
            job.line.cut()
        else:
            job.line.break_off()
        checkpoint = Action(job.sidecar.checkpoint)
        if how == "cut":
            job.line.wait_for(
                lambda line: all(one.of_sidecar.waiting_bytes for one in line.connections), "the closing is held up"
            )
        else:
            job.line.wait_for(lambda line: line.turned_away >= 4, "the tasks cannot connect")
        while_away = list(coordinator.story)
        job.line.heal()
        assert checkpoint.result() == 1
        coordinator.send_numbers(1, 2)
        coordinator.wait_until_seen(1, 2)
        coordinator.stop_all()
        assert job.action.result() == [(0, 3), (1, 2)]

    assert ("checkpoint", 1) not in while_away
    assert coordinator.named("checkpoint", "complete", "aborted")[:2] == [("checkpoint", 1), ("complete", 1)]
    assert coordinator.wrong == []
    assert sorted(coordinator.named("ready", "failed", "reset")) == [("ready", 0, 0), ("ready", 1, 0)]


def test_a_slow_network_with_small_windows_keeps_a_restored_job_exact(bench: Bench) -> None:
    """H27, H40: checkpoints are taken while the windows are full, and the job restores the last one."""
    numbers = 60
    coordinator = Flowing()
    windows = GatewayLimits(events_max=4, confirm_timeout_s=60.0)
    slow = Line(buffer_bytes=64, delay_s=0.005)
    with a_job(bench, coordinator, Counting, line=slow, gateway=windows, mode=RestoreMode.STREAMING) as job:
        coordinator.send_one_by_one(0, numbers)
        coordinator.send_one_by_one(1, numbers)
        last = [job.sidecar.checkpoint() for _ in range(3)][-1]
        coordinator.wait_until_seen(0, numbers)
        coordinator.wait_until_seen(1, numbers)
        coordinator.tell(0, "die")
        coordinator.wait_for(lambda story: ("ready", 0, 1) in story)
        gone_back_to = coordinator.sent[0]
        coordinator.send_numbers(0, numbers - gone_back_to)
        coordinator.wait_for(lambda story: coordinator.seen[0] == numbers)
        coordinator.stop_all()
        assert job.action.result() == [(0, numbers), (1, numbers)]
        assert slow.filled > 0

    assert 0 < gone_back_to < numbers
    assert coordinator.wrong == []
    assert [callback[0] for callback in coordinator.of_subtask(0)] == ["ready", "failed", "reset", "ready"]
    assert coordinator.of_subtask(0)[2] == ("reset", 0, last)
    assert coordinator.of_subtask(1) == [("ready", 1, 0)]
