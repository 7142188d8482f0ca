# SPDX-License-Identifier: Apache-2.0

"""What each process has of the keys, in all of its memory, compared with the table of what it may have (H76).

The memory has what a process was ever given, unless something was written over it. A key that a process must have in
order to work is looked for as well, so a search that finds nothing fails.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, SourceCoordinator, StaticSplitEnumerator
from protocol.wire.keys import NO_IDENTITY, Holder, identity_of
from tests.spark.attached_keys import keys_of_an_attached_job, workers
from tests.spark.conftest import NewProgram, SparkOn
from tests.spark.counting import Counting
from tests.spark.faults.file_gates import open_gates
from tests.spark.faults.own_process import OPERATOR, attach
from tests.spark.held import PLANS, HeldSource, HeldSplits, pid_of
from tests.spark.memory import SECRET, Name, Sought, can_look, check, children, command_of, keys_in, notations
from tests.spark.test_streams import add_files

pytestmark = [pytest.mark.spark, pytest.mark.skipif(not can_look(), reason="the system hides the memory of processes")]

KEY = bytes(range(65, 97))


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    """Each worker runs one task, because Spark does not clear the memory of a worker that it uses again."""
    return spark_on("local[3,4]", spark_python_worker_reuse="false")


@pytest.fixture
def jvm(spark: SparkSession) -> int:
    machine: Any = spark.sparkContext._jvm
    return int(machine.java.lang.ProcessHandle.current().pid())


@pytest.mark.parametrize("at", [0, 1, 4075, 4091 - len(KEY)])
def test_a_key_is_found_wherever_it_is_and_however_it_is_written(at: int) -> None:
    """And nothing else: each of the others differs in one byte."""
    wanted = {"key": notations(KEY), "other": notations(KEY[:-1] + b"?")}
    for written in wanted["key"] - wanted["other"]:
        memory = bytearray(4096 + len(written))
        memory[at : at + len(written)] = written
        assert Sought(wanted).names_in(bytes(memory)) == {"key"}
    assert Sought(wanted).names_in(bytes(4096)) == set()


def test_each_process_of_a_driver_has_the_keys_of_the_table_and_no_others(
    spark: SparkSession, jvm: int, tmp_path: Path
) -> None:
    """A stream, and another operator in another task at the same time. Neither task has what the planner has (S10)."""
    add_files(tmp_path / "in", range(1))
    config = SidecarConfig(storage=str(tmp_path / "plans"))
    with Sidecar(spark, config) as sidecar, ThreadPoolExecutor(1) as thread:
        source = HeldSource(tmp_path, str(tmp_path / "in"), discover_every_s=0.01)
        sidecar.source("growing", source, parallelism=1)
        frame = spark.readStream.format("growing").load()
        query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "query")).start()
        splits = SourceCoordinator(lambda state: StaticSplitEnumerator([1], state))
        neighbour = sidecar.coordinate("neighbour", splits, parallelism=1)
        rdd = spark.sparkContext.parallelize([0], 1)
        job = thread.submit(rdd.mapPartitions(neighbour.subtask(partial(HeldSplits, str(tmp_path)))).collect)
        try:
            tasks = [pid_of(tmp_path, "reader"), pid_of(tmp_path, "neighbour")]
            [planner] = [pid for pid in children(jvm) if PLANS in command_of(pid)]
            runtime: Any = sidecar._entered()[1]
            names: dict[str, Name] = {
                "TASKS growing": ("TASKS", identity_of("growing")),
                "TASKS neighbour": ("TASKS", identity_of("neighbour")),
                "RELAY": ("RELAY", runtime._relay._first._key.identity),
                "CONTROL": ("CONTROL", runtime._driver.identity),
                "STREAMS": ("STREAMS", identity_of("growing")),
                "ATTEMPTS": ("ATTEMPTS", runtime._driver.identity),
                "CERTIFICATE": ("CERTIFICATE", NO_IDENTITY),
            }
            driver, machine, of_planner, *of_tasks = keys_in(
                [os.getpid(), jvm, planner, *tasks], runtime._driver.keys, names
            )
        finally:
            open_gates(tmp_path, [0])
            job.result()
            query.stop()

    check(driver, Holder.DRIVER, {SECRET, "TASKS growing", "TASKS neighbour", "RELAY"})
    check(machine, Holder.JVM, {"TASKS growing", "TASKS neighbour", "STREAMS", "RELAY"})
    check(of_planner, Holder.PLANNER, {"TASKS growing", "STREAMS"})
    assert "TASKS neighbour" not in of_planner
    assert of_tasks == [{"TASKS growing"}, {"TASKS neighbour"}]


def test_a_batch_of_a_source_is_read_by_tasks_that_cannot_open_its_plan(spark: SparkSession, tmp_path: Path) -> None:
    """S10: Spark sends the data source to the tasks as well, for the texts of errors."""
    add_files(tmp_path / "in", range(1))
    with Sidecar(spark, SidecarConfig()) as sidecar, ThreadPoolExecutor(1) as thread:
        sidecar.source("growing", HeldSource(tmp_path, str(tmp_path / "in")), parallelism=1)
        job = thread.submit(spark.read.format("growing").load().count)
        try:
            names: dict[str, Name] = {
                "TASKS": ("TASKS", identity_of("growing")),
                "STREAMS": ("STREAMS", identity_of("growing")),
            }
            [task] = keys_in([pid_of(tmp_path, "reader")], sidecar._entered()[1]._driver.keys, names)
        finally:
            open_gates(tmp_path, [0])
            job.result()

    check(task, Holder.TASK, {"TASKS"})


def test_each_process_of_an_attached_driver_has_the_keys_of_the_table_and_no_others(
    spark: SparkSession, jvm: int, program: NewProgram, tmp_path: Path
) -> None:
    """The sidecar in a separate process, with TLS."""
    process = program("streaming", "--tls")
    with attach(spark, process, tls=True) as sidecar:
        tasks = spark.sparkContext.parallelize([0, 1], 2).mapPartitions(sidecar.operator(OPERATOR).subtask(Counting))
        found = keys_of_an_attached_job(sidecar, process, tasks.collect, lambda: [jvm, *workers(jvm)])
    machine, *of_tasks = found
    check(machine, Holder.JVM, {"TASKS", "RELAY"}, without=frozenset({"STREAMS"}))
    assert of_tasks == [{"TASKS"}, {"TASKS"}]
