# SPDX-License-Identifier: Apache-2.0

"""The group on a real Spark: workers are killed in the middle of a training, in ordinary and in barrier stages."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import FixedDelay, GatewayLimits, Group, GroupMember, Sidecar
from headgate.errors import PeerLost
from spark_bridge.primitives.group.ring import listen
from tests.spark.conftest import SparkOn

pytestmark = pytest.mark.spark

STEPS = 12


def executor_pid() -> int:
    """The JVM that started the daemon of this worker."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])


def train(member: GroupMember, fatal: dict[tuple[int, int], Path]) -> int:
    step, model = (0, 1) if member.checkpoint is None else json.loads(member.checkpoint.blob)
    while step < STEPS:
        marker = fatal.get((step, member.rank))
        if marker is not None and not marker.exists():
            marker.touch()
            os.kill(executor_pid() if marker.name == "executor" else os.getpid(), signal.SIGKILL)
            signal.pause()  # until the worker follows its executor
        model = sum(member.all_gather(model * (member.rank + 1) % 1000003)) % 1000003
        step += 1
        member.save(step, json.dumps([step, model]).encode())
    return int(model)


def trained(world_size: int) -> int:
    model = 1
    for _ in range(STEPS):
        model = sum(model * (rank + 1) % 1000003 for rank in range(world_size)) % 1000003
    return model


def work(group: Group, fatal: dict[tuple[int, int], Path]) -> Any:
    def run(records: Iterator[Any]) -> Iterator[Any]:
        lost = []
        while True:
            try:
                with group as member:
                    model = train(member, fatal)
            except PeerLost as error:
                lost.append(error.reason)
                continue
            yield member.rank, model, lost
            return

    return run


def test_survivors_of_a_killed_worker_go_on_with_its_retry(spark: SparkSession, tmp_path: Path) -> None:
    """H102 H104 H105: the model is that of an undisturbed training."""
    fatal = {(3, 1): tmp_path / "first", (7, 0): tmp_path / "second"}
    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        rows = spark.sparkContext.parallelize(range(2), 2).mapPartitions(job.subtask(work(group, fatal))).collect()
        assert group.checkpoint is not None
        assert (group.generation, group.checkpoint.step) == (3, STEPS)
    assert [(rank, model) for rank, model, _ in rows] == [(0, trained(2)), (1, trained(2))]
    assert all(file.exists() for file in fatal.values())
    lost = [reason for _, _, reasons in rows for reason in reasons]
    assert len(lost) == 1, "the other survivor was killed later"
    assert lost[0].startswith("subtask 0 (attempt 0) "), lost


def test_an_action_that_computes_too_few_partitions_fails_with_the_reason(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        rdd = spark.sparkContext.parallelize(range(2), 2).mapPartitions(job.subtask(work(group, {})))
        with pytest.raises(Exception, match=r"computes only 1 of 2 partitions, as take\(\) and first\(\) do"):
            sidecar.run(lambda: rdd.take(1))
        assert [model for _, model, _ in rdd.collect()] == [trained(2)] * 2


def test_foreign_code_that_waits_for_a_frozen_worker_is_freed(spark: SparkSession, tmp_path: Path) -> None:
    """H104: nothing closes its connections, so only the missing signs of life tell."""
    marker = tmp_path / "frozen"

    def run(records: Iterator[Any]) -> Iterator[Any]:
        lost: list[str] = []
        while True:
            try:
                with group as member:
                    with member.guard():
                        wait_for_the_other(member, marker)
            except PeerLost as error:
                lost.append(type(error.__cause__).__name__)
                continue
            yield member.rank, lost
            return

    def wait_for_the_other(member: GroupMember, marker: Path) -> None:
        """As a collective of another library: rank 0 listens, rank 1 connects, both wait for a byte."""
        with listen(member.store_address[0]) as listener:
            port = member.broadcast(listener.getsockname()[1])
            address = member.store_address[0], port
            with listener.accept()[0] if member.rank == 0 else socket.create_connection(address) as other:
                if member.rank == 1 and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGSTOP)
                other.sendall(b"x")
                if not other.recv(1):
                    raise EOFError

    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2)
        heartbeats = GatewayLimits(heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0)
        job = sidecar.coordinate("training", parallelism=2, uses=[group], gateway=heartbeats)
        rows = spark.sparkContext.parallelize(range(2), 2).mapPartitions(job.subtask(run)).collect()
    assert marker.exists()
    assert rows == [(0, ["EOFError"]), (1, [])]


@pytest.mark.long
def test_an_elastic_group_goes_on_without_the_killed_worker_and_lets_its_retry_in(
    spark: SparkSession, tmp_path: Path
) -> None:
    """H109: the survivor goes on alone until the retry has come."""
    marker = tmp_path / "killed"

    def run(records: Iterator[Any]) -> Iterator[Any]:
        sizes: list[int] = []
        done = False
        while not done:
            try:
                with group as member:
                    sizes.append(member.world_size)
                    step = 0 if member.checkpoint is None else member.checkpoint.step
                    if len(sizes) == 1 and member.rank == 1 and not marker.exists():
                        marker.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    if member.world_size == 2 and step:
                        done = True  # both are there again
                    while not done and not member.waiting:
                        step += 1
                        member.save(step, b"")
                        time.sleep(0.01)
            except PeerLost:
                pass
        yield sizes

    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", min_size=1, max_size=2, start_wait_s=300.0)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        rows = spark.sparkContext.parallelize(range(2), 2).mapPartitions(job.subtask(run)).collect()
    assert rows == [[2, 1, 2], [2]]


@pytest.mark.long
def test_a_barrier_stage_that_is_run_again_goes_on_from_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """H105: Spark does not retry a barrier stage without a shuffle, so the action is run again."""
    fatal = {(5, 1): tmp_path / "killed"}
    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2, resume=True)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        began: list[int | None] = []

        def action() -> Any:
            began.append(None if group.checkpoint is None else group.checkpoint.step)
            rdd = spark.sparkContext.parallelize(range(2), 2).barrier()
            return rdd.mapPartitions(job.subtask(work(group, fatal))).collect()

        rows = sidecar.run(action, restart=FixedDelay(restarts_max=2, delay_s=0.0))
    assert began == [None, 5]
    assert [model for _, model, _ in rows] == [trained(2)] * 2


@pytest.mark.long
@pytest.mark.long
def test_the_model_is_the_same_though_an_executor_is_killed_in_the_middle(spark_on: SparkOn, tmp_path: Path) -> None:
    """H102 H104 H105"""
    spark = spark_on("local-cluster[2,1,1024]", spark_task_maxFailures="4")
    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        rdd = spark.sparkContext.parallelize(range(2), 2)
        fatal = {(5, 1): tmp_path / "executor"}
        ended = sorted(sidecar.run(rdd.mapPartitions(job.subtask(work(group, fatal))).collect))
    assert (tmp_path / "executor").exists()
    assert [model for _, model, _ in ended] == [trained(2)] * 2
    assert sum(len(lost) for _, _, lost in ended) == 1, ended


def test_a_lost_shuffle_output_is_computed_alone_from_the_last_step(spark_on: SparkOn, tmp_path: Path) -> None:
    """H106 H56: Spark keeps the results of the other member, and computes those of one again."""
    spark = spark_on("local-cluster[2,1,1024]", spark_task_maxFailures="4")
    with Sidecar(spark) as sidecar:
        group = sidecar.group("train", 2)
        job = sidecar.coordinate("training", parallelism=2, uses=[group])
        rdd = spark.sparkContext.parallelize(range(2), 2).mapPartitions(job.subtask(work(group, {})))
        killed = tmp_path / "killed"

        def kill_an_executor(rows: Any) -> Iterator[Any]:
            found = list(rows)
            try:
                killed.touch(exist_ok=False)
            except FileExistsError:
                yield from found
            else:
                os.kill(executor_pid(), signal.SIGKILL)

        shuffled = rdd.map(lambda row: (row[0], row[1])).groupByKey(2).mapValues(list).mapPartitions(kill_an_executor)
        assert sorted(sidecar.run(shuffled.collect)) == [(0, [trained(2)]), (1, [trained(2)])]
        assert killed.exists()
