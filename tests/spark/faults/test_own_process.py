# SPDX-License-Identifier: Apache-2.0

"""A sidecar in a separate process: it serves, dies, and takes over when it comes back.

Its tasks run in the driver's JVM: only the sidecar dies here, so one JVM tests Spark as well as three.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from protocol.errors import HandshakeFailed
from protocol.restart import FixedDelay
from protocol.wire.keys import NO_IDENTITY, Key, identity_of
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import RestartsExhausted, SidecarError
from spark_bridge.primitives.chain import chain
from spark_bridge.standalone import attached
from spark_bridge.standalone.attached import AttachedSidecar
from spark_bridge.standalone.control_client import ControlAddress, SidecarUnreachable, ask
from spark_bridge.storage import CheckpointStorage
from spark_bridge.subtask import SubtaskContext
from spark_bridge.subtask.connection import Connection
from tests.spark.actions import Action, one_task_each, what_the_user_reads
from tests.spark.conftest import LOCAL, NewProgram, SparkOn
from tests.spark.counting import Counting
from tests.spark.faults.own_process import OPERATOR, attach, callbacks, counting_chain
from tests.spark.faults.waiting import wait_until

pytestmark = pytest.mark.spark

RESTART = FixedDelay(restarts_max=3, delay_s=0.1)


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    return spark_on(LOCAL)


def tasks(spark: SparkSession, sidecar: AttachedSidecar) -> RDD[Any]:
    return one_task_each(spark, 2).mapPartitions(sidecar.operator(OPERATOR).subtask(Counting))


def wait_until_ready(sidecar: AttachedSidecar, subtasks: int = 2) -> None:
    wait_until(
        lambda: len({subtask for _, subtask, _ in callbacks(sidecar, "ready")}) == subtasks, "every subtask ready"
    )


def exchange(sidecar: AttachedSidecar, count: int, seen: int) -> None:
    """Send this many numbers to each subtask, and wait until all are answered, up to ``seen``."""
    for subtask in (0, 1):
        sidecar.request(OPERATOR, ["send", subtask, count])
    wait_until(lambda: sidecar.request(OPERATOR, "seen") == {0: seen, 1: seen}, f"{seen} numbers seen")


def run_one_job(spark: SparkSession, sidecar: AttachedSidecar, seen: int) -> None:
    """Send five numbers to each subtask of one job, after which it has seen so many, and let the job end."""
    rdd = tasks(spark, sidecar)
    action = Action(lambda: sidecar.run(rdd.collect, restart=RESTART))
    wait_until_ready(sidecar)
    exchange(sidecar, 5, seen=seen)
    sidecar.request(OPERATOR, "stop")
    assert sorted(action.result()) == [(0, seen), (1, seen)]


def test_a_driver_is_served_by_a_sidecar_in_another_process(spark: SparkSession, program: NewProgram) -> None:
    """Both kinds of traffic, a checkpoint and the end; the process ends when told to."""
    here = program()
    with attach(spark, here) as sidecar:
        assert sidecar.operator_ids == [OPERATOR]
        rdd = tasks(spark, sidecar)

        async def as_in_a_notebook() -> Any:  # a loop runs in the calling thread
            return sidecar.run(rdd.collect, restart=RESTART, input_id="numbers")

        action = Action(lambda: asyncio.run(as_in_a_notebook()))
        wait_until_ready(sidecar)
        exchange(sidecar, 5, seen=5)
        assert sidecar.checkpoint() == 1
        assert sidecar.operator(OPERATOR).statistics()["checkpoints_completed"] == 1
        sidecar.request(OPERATOR, "stop")
        assert sorted(action.result()) == [(0, 5), (1, 5)]
        assert sidecar.request(OPERATOR, "wrong") == []
    assert here.terminate() == 0
    labels = [info.label for info in CheckpointStorage(here.storage).list(OPERATOR)]
    assert labels == [f'run 1 of input "numbers": {how}' for how in ("begun", "done")]  # H174


def test_a_restarted_sidecar_takes_over_its_running_job(spark: SparkSession, program: NewProgram) -> None:
    """H18, H24, H52: the attempts are killed; their successors and the coordinator continue from the checkpoint."""
    here = program()
    with attach(spark, here) as sidecar:
        rdd = tasks(spark, sidecar)
        action = Action(lambda: sidecar.run(rdd.collect, restart=FixedDelay(restarts_max=0)))
        wait_until_ready(sidecar)
        exchange(sidecar, 5, seen=5)
        checkpoint_id = sidecar.checkpoint()
        exchange(sidecar, 3, seen=8)  # none of this remains

        here.kill()
        here.start()

        wait_until_ready(sidecar)
        story = callbacks(sidecar, "reset_to_checkpoint", "start", "ready", "failed", "reset", "run_ended")
        assert story[:2] == [["reset_to_checkpoint", checkpoint_id, story[0][2]], ["start"]]
        for subtask in (0, 1):
            lifecycle = [name for name, which, *_ in story[2:] if which == subtask]
            assert lifecycle in (["ready"], ["failed", "reset", "ready"])  # the kill may be told before the successor
        exchange(sidecar, 4, seen=9)
        sidecar.request(OPERATOR, "stop")
        assert sorted(action.result()) == [(0, 9), (1, 9)]
        assert sidecar.request(OPERATOR, "wrong") == []
        assert callbacks(sidecar, "run_ended") == [["run_ended", True]]


def test_with_takeover_fail_the_job_fails_and_is_run_again(spark: SparkSession, program: NewProgram) -> None:
    """H15, H55: with ``--takeover fail``, the restart continues from the checkpoint."""
    here = program("streaming", "--takeover", "fail")
    with attach(spark, here) as sidecar:
        rdd = tasks(spark, sidecar)
        action = Action(lambda: sidecar.run(rdd.collect, restart=RESTART))
        wait_until_ready(sidecar)
        exchange(sidecar, 5, seen=5)
        sidecar.checkpoint()

        here.kill()
        here.start()

        wait_until_ready(sidecar)
        exchange(sidecar, 4, seen=9)
        sidecar.request(OPERATOR, "stop")
        assert sorted(action.result()) == [(0, 9), (1, 9)]
    assert "the sidecar was started with --takeover fail" in here.log()


def test_a_chain_needs_its_stages_in_the_driver_too(spark: SparkSession, program: NewProgram) -> None:
    """H80: the sidecar's process has the coordinators of the stages, the driver's program sends their operators."""
    with attach(spark, program("chained")) as sidecar:
        handle = sidecar.operator(OPERATOR)
        assert handle.stages == ("count", "negate")
        with pytest.raises(TypeError, match="count, negate: pass the same chain"):
            handle.subtask()
        with pytest.raises(TypeError, match="whose stages are count, negate"):
            handle.subtask(chain(count=Counting))
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(counting_chain()))
        action = Action(lambda: sidecar.run(rdd.collect, restart=RESTART))
        ask = partial(sidecar.request, OPERATOR, part="count")
        wait_until(lambda: len(ask(["callbacks", "ready"])) == 2, "every subtask ready")
        for subtask in (0, 1):
            ask(["send", subtask, 5])
        wait_until(lambda: ask("seen") == {0: 5, 1: 5}, "5 numbers seen")
        ask("stop")
        assert sorted(action.result()) == [(0, -5), (1, -5)]


class EndsEarly(Counting):
    """Subtask 1 ends immediately, so that one task of the stage has succeeded."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        self.stopping = context.subtask == 1


def test_a_partly_succeeded_job_is_not_taken_over(spark: SparkSession, program: NewProgram) -> None:
    """H17: Spark would not rerun the completed part, whose events the coordinator has lost."""
    here = program("batch")
    with attach(spark, here) as sidecar:
        rdd = one_task_each(spark, 2).mapPartitions(sidecar.operator(OPERATOR).subtask(EndsEarly))
        action = Action(lambda: sidecar.run(rdd.collect, restart=FixedDelay(restarts_max=0)))
        tracker = spark.sparkContext.statusTracker()

        def one_has_succeeded() -> bool:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            return any(stage is not None and stage.numCompletedTasks == 1 for stage in stages)

        wait_until(one_has_succeeded, "a success")

        here.kill()
        here.start()

        with pytest.raises(RestartsExhausted) as caught:
            action.result()
        assert "1 of its tasks had already succeeded" in str(caught.value.__cause__)


def test_a_sidecar_that_stays_away_fails_the_job_with_an_explanation(spark: SparkSession, program: NewProgram) -> None:
    """H24, H48: the tasks give up without being told, then the driver does."""
    here = program("quick")
    with attach(spark, here, connect_timeout_s=2.0) as sidecar:
        rdd = tasks(spark, sidecar)
        action = Action(rdd.collect)
        wait_until_ready(sidecar)
        here.kill()
        assert "cannot reach the sidecar" in what_the_user_reads(action.result)
        with pytest.raises(SidecarUnreachable, match="no sidecar answers at"):
            sidecar.checkpoint()


def test_a_second_driver_is_served_when_the_first_has_left(spark_on: SparkOn, program: NewProgram) -> None:
    """H52: it continues from the last checkpoint of the first."""
    here = program()
    for seen in (5, 10):
        spark = spark_on(LOCAL)
        with attach(spark, here) as sidecar:
            run_one_job(spark, sidecar, seen)
            spark.stop()


def test_a_driver_that_attaches_after_another_has_detached_is_not_taken_for_it(
    spark_on: SparkOn, program: NewProgram
) -> None:
    """H52. The first one's application ends when its ``with`` block does, although its Spark still runs.

    Stage ids and the listener's numbers begin again with the next Spark: served as the first one's, its tasks would be
    refused and its facts skipped.
    """
    here = program("streaming", "--lost-after", "3600")
    for seen in (5, 10, 15):
        spark = spark_on(LOCAL)
        with attach(spark, here) as sidecar:
            with pytest.raises(SidecarError, match="another driver is attached to this sidecar"):
                attach(spark, here).__enter__()
            run_one_job(spark, sidecar, seen)
        wait_until(lambda: here.log().count("driver detached") == seen // 5, "the application ends with the block")  # noqa: B023
        if seen != 10:  # the third block attaches the same Spark again
            spark.stop()


def test_a_driver_that_was_lost_is_replaced_by_the_next(
    spark_on: SparkOn, program: NewProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H52. Nobody hears that the first one leaves, as when it is killed; the sidecar would wait for it."""

    def cut_off(address: ControlAddress, driver: bytes, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "detach":
            raise SidecarUnreachable("the driver was killed before it could detach")
        return ask(address, driver, method, *arguments, **options)

    monkeypatch.setattr(attached, "ask", cut_off)
    here = program()
    for seen in (5, 10):
        spark = spark_on(LOCAL)
        with attach(spark, here) as sidecar:
            run_one_job(spark, sidecar, seen)
        spark.stop()


class Burglar(Counting):
    """Tries the key of its task at each port, and as another operator, then works like any other task."""

    def __init__(self, endpoint: TaskEndpoint, ports: dict[str, int]) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._ports = ports

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        own = self._endpoint.key
        for name, port in self._ports.items():
            for identity in (own.identity, NO_IDENTITY, identity_of("another operator")):
                endpoint = replace(self._endpoint, port=port, key=Key(identity, own.secret))
                yield name, identity == own.identity, _is_let_in(endpoint)
        yield from super().process(records)


def _is_let_in(endpoint: TaskEndpoint) -> bool:
    try:
        Connection.open(endpoint, time.monotonic() + 30.0).close()
    except HandshakeFailed:
        return False
    return True


def test_the_key_of_a_task_opens_only_the_port_of_the_tasks(spark: SparkSession, program: NewProgram) -> None:
    """H76: neither the driver's port nor the JVM's, and no other operator's place."""
    here = program()
    with attach(spark, here) as sidecar:
        handle = sidecar.operator(OPERATOR)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(Burglar, handle.endpoint, here.ports))
        action = Action(lambda: sidecar.run(rdd.collect, restart=RESTART))
        wait_until_ready(sidecar)
        sidecar.request(OPERATOR, "stop")
        results = action.result()
    tried = [result for result in results if result[0] in here.ports]
    assert len(tried) == 2 * 3 * 3
    assert {(name, own) for name, own, let_in in tried if let_in} == {("tasks", True)}
    assert [result for result in results if result not in tried] == [(0, 0), (1, 0)]


def test_a_wrong_secret_is_reported(spark: SparkSession, program: NewProgram, tmp_path: Path) -> None:
    """H61."""
    here = program()
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("ab" * 32)
    with pytest.raises(SidecarUnreachable, match="give both ends the same --secret-file"):
        AttachedSidecar(spark, here.address, secret_file=other).__enter__()


def test_an_operator_that_the_factory_does_not_coordinate_is_reported(spark: SparkSession, program: NewProgram) -> None:
    here = program()
    with attach(spark, here) as sidecar, pytest.raises(SidecarError, match=r"'words' is not coordinated.*'op'"):
        sidecar.operator("words")
