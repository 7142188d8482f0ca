# SPDX-License-Identifier: Apache-2.0

"""Every kind of wrong use, on a real Spark: each error names its cause, and nothing hangs.

After each of these tests the driver is as it was before: no thread, socket or listener is left, and Spark works.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from actors.coordination import (
    CoordinatorContext,
    OperatorCoordinator,
    SourceCoordinator,
    StaticSplitEnumerator,
    SubtaskGateway,
)
from protocol.describing import a_type
from spark_bridge.common.errors import CoordinatorStartError, SidecarError
from spark_bridge.driver.config import Addresses, SidecarConfig, SidecarLimits
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.server.server import ServerStartError
from spark_bridge.subtask import SplitReader, SubtaskContext, SubtaskOperator
from tests.spark.actions import coordinated, one_task_each, what_the_user_reads
from tests.spark.leftovers import nothing_left
from tests.spark.operators import Listening
from tests.spark.recorder import Recorder
from tests.spark.script import Script

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _leaves_nothing(spark: SparkSession) -> Iterator[None]:
    with nothing_left():
        yield


# --- a coordinator that raises --------------------------------------------------------------------------------------


class RaisesIn(Script):
    """Raises in one of its methods, only once, so that a later run can succeed."""

    def __init__(self, method: str) -> None:
        super().__init__({}, ["hello"])
        self.method = method

    def _raise_in(self, method: str) -> None:
        if self.method == method:
            self.method = ""
            raise LookupError(f"no luck in {method}")

    async def start(self, context: CoordinatorContext) -> None:
        await super().start(context)
        self._raise_in("start")

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await super().subtask_ready(subtask, gateway)
        self._raise_in("subtask_ready")

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await super().reset_to_checkpoint(checkpoint_id, state)
        self._raise_in("reset_to_checkpoint")

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        self._raise_in("run_ended")


def test_a_coordinator_that_raises_in_start_is_closed_and_the_cause_reported(spark: SparkSession) -> None:
    # H6
    coordinator = RaisesIn("start")
    with Sidecar(spark) as sidecar:
        with pytest.raises(CoordinatorStartError, match="'op' failed in start: LookupError: no luck") as raised:
            sidecar.coordinate("op", coordinator, parallelism=1)
        assert isinstance(raised.value.__cause__, LookupError)
        assert coordinator.story == [("start",), ("close",)]
        coordinator = RaisesIn("")  # the name is available again
        handle = sidecar.coordinate("op", coordinator, parallelism=1)
        coordinator._otherwise = ["stop"]
        assert one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).count() == 1


@pytest.mark.parametrize("method", ["subtask_ready", "reset_to_checkpoint"])
def test_a_coordinator_that_raises_fails_the_action_with_the_cause(spark: SparkSession, method: str) -> None:
    # H7: and the next action of the same operator starts from a reset
    coordinator = RaisesIn(method)
    with coordinated(spark, coordinator, 2) as job:
        rdd = job.tasks()
        if method == "reset_to_checkpoint":  # which the second run needs first
            coordinator._otherwise = ["stop"]
            assert rdd.count() == 2
        text = what_the_user_reads(rdd.collect)
        assert f"{method}: LookupError: no luck in {method}" in text
        assert "'op'" in text
        assert isinstance(job.handle.failure, LookupError)
        coordinator._script, coordinator._otherwise = {}, ["hello", "stop"]
        assert rdd.count() == 2
    assert coordinator.named("run_ended")[-1] == ("run_ended", True)


def test_a_coordinator_that_raises_after_a_run_does_not_affect_its_result(spark: SparkSession) -> None:
    coordinator = RaisesIn("run_ended")
    coordinator._otherwise = ["stop"]
    with coordinated(spark, coordinator, 2) as job:
        rdd = job.tasks()
        assert rdd.count() == 2
        coordinator.wait_for(lambda story: ("run_ended", True) in story)
        assert rdd.count() == 2
        assert isinstance(job.handle.failure, LookupError)


# --- an operator that raises ----------------------------------------------------------------------------------------


def test_an_operator_that_cannot_be_pickled_is_reported_before_any_task_runs(spark: SparkSession) -> None:
    recorder = Recorder()
    with coordinated(spark, recorder) as job:
        assert "cannot pickle '_thread.lock' object" in what_the_user_reads(
            job.tasks(NamesOnly, threading.Lock()).collect
        )
    assert recorder.story == [("start",), ("close",)]


class AsyncOperator(SubtaskOperator):
    async def process(self, records: Iterator[Any]) -> Any:
        yield 1


class MisspeltOperator(SubtaskOperator):
    def process(self, records: Iterator[Any]) -> list[Any]:
        return []

    def snapshots_state(self, checkpoint_id: int) -> bytes:
        return b"state"


class NamesOnly(SplitReader):
    """Has its own ``__init__``, and does not call that of ``SplitReader``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read_split(self, split: Any) -> list[str]:
        return [f"{self.name}-{split}"]


@pytest.mark.long
def test_a_split_reader_needs_no_call_of_its_base_class(spark: SparkSession) -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(3), state))
    with coordinated(spark, source, 2) as job:
        assert sorted(job.tasks(NamesOnly, "row").collect()) == ["row-0", "row-1", "row-2"]


class ForgetsTheContext(NamesOnly):
    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        pass


@pytest.mark.long
def test_a_split_reader_without_its_context_says_which_call_is_missing(spark: SparkSession) -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(3), state))
    with coordinated(spark, source) as job:
        text = what_the_user_reads(job.tasks(ForgetsTheContext, "row").collect)
    assert "ForgetsTheContext.open() did not store its context: call super().open(context, state)" in text


@pytest.mark.parametrize(
    ("method", "record", "text"),
    [
        ("map", 1, "a subtask takes the iterator over one partition, but Spark called it with int"),
        *(
            pytest.param(method, record, f"over one partition, but Spark called it with {kind}", marks=pytest.mark.long)
            for method, record, kind in (("flatMap", "words", "str"), ("filter", (1, 2), "tuple"))
        ),
        ("map", [1], "Spark takes all outputs of a subtask for one row"),
    ],
)
def test_a_subtask_that_is_given_to_a_method_for_records_names_the_right_ones(
    spark: SparkSession, method: str, record: Any, text: str
) -> None:
    recorder = Recorder()
    with coordinated(spark, recorder) as job:
        rdd = spark.sparkContext.parallelize([record], 1)
        told = what_the_user_reads(getattr(rdd, method)(job.handle.subtask(Listening)).collect)
    assert text in told
    assert "pass it to mapPartitions" in told
    assert recorder.story == [("start",), ("close",)]


class HandlesNoEvents(SubtaskOperator):
    """Never reads the events of ``subtask_ready``, which have arrived before ``process`` begins."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield "done"


def test_events_that_no_operator_handles_are_counted_and_logged_once(spark: SparkSession) -> None:
    # H59
    with capture_logs() as logs, coordinated(spark, Script({}, ["hello"]), 2) as job:
        for _ in range(2):
            assert job.tasks(HandlesNoEvents).count() == 2
            job.sidecar.run(lambda: None)  # waits until the run is over
        assert (
            job.handle.statistics()["events_unhandled_by_operator"] == job.handle.statistics()["events_confirmed"] > 0
        )
    (line,) = [line for line in logs if line["event"] == "events to subtasks not handled"]
    assert line["hint"] == "override handle_event in HandlesNoEvents, or do not send events to it"


# --- the wrong arguments and the wrong order ------------------------------------------------------------------------


class SynchronousCoordinator(OperatorCoordinator):
    def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


class MisspeltCoordinator(OperatorCoordinator):
    async def handle_events_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        pass


def factory_of(made: type[OperatorCoordinator]) -> Any:
    return lambda: made()  # noqa: PLW0108 - a class would be checked before it is called


OPERATORS: list[tuple[Any, str]] = [
    (Recorder, "Recorder.* is not a SubtaskOperator"),
    (AsyncOperator, r"AsyncOperator.process\(\) is an async generator, .*: write `def process`"),
    (partial(AsyncOperator), r"AsyncOperator.process\(\) is an async generator, .*: write `def process`"),
    (MisspeltOperator, r"MisspeltOperator.snapshots_state\(\) is never called: did you mean snapshot_state\(\)\?"),
    (Listening(), "pass the operator's class and its arguments"),
    ("Listening", "pass the operator's class and its arguments"),
]
IDS: list[tuple[Any, type[Exception], str]] = [
    ("", ValueError, "operator_id must be a str of 1 to 256 characters"),
    (None, TypeError, "operator_id must be a str"),
    ("a/b", ValueError, "without slashes"),
    ("op", SidecarError, "'op' is already coordinated: choose another name"),
]
PARALLELISMS: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "parallelism must be an int from 1 to 1000000, not 0"),
    (2.5, TypeError, "parallelism must be an int"),
    ("2", TypeError, "parallelism must be an int"),
]
MISTAKES: list[tuple[type[OperatorCoordinator], str]] = [
    (SynchronousCoordinator, r"SynchronousCoordinator.handle_request\(\) is a plain function, but it is awaited"),
    (MisspeltCoordinator, r"did you mean handle_event_from_operator\(\)\?"),
]
COORDINATORS: list[tuple[Any, type[Exception], str]] = [
    (
        object(),
        TypeError,
        "coordinator must be an OperatorCoordinator, a RecreateOnReset, a function .* or a Chain, not <object",
    ),
    (
        object,
        TypeError,
        "coordinator must be an OperatorCoordinator, a RecreateOnReset, a function .* or a Chain, not <class",
    ),
    (RaisesIn, TypeError, "a function without arguments, .* or a Chain, not <class"),
    *((mistaken(), TypeError, text) for mistaken, text in MISTAKES),
    *((mistaken, TypeError, text) for mistaken, text in MISTAKES),
    *((factory_of(mistaken), CoordinatorStartError, text) for mistaken, text in MISTAKES),
]


def test_wrong_arguments_are_refused_with_the_fix_and_the_operator_in_use_continues(spark: SparkSession) -> None:  # H59
    with coordinated(spark, Script({}, ["stop"])) as job:
        for operator, text in OPERATORS:
            with pytest.raises(TypeError, match=text):
                job.handle.subtask(operator)
        for operator_id, error, text in IDS:
            with pytest.raises(error, match=text):
                job.sidecar.coordinate(operator_id, Recorder(), parallelism=1)
        for parallelism, error, text in PARALLELISMS:
            with pytest.raises(error, match=text):
                job.sidecar.coordinate("another", Recorder(), parallelism=parallelism)
        for coordinator, error, text in COORDINATORS:
            with pytest.raises(error, match=text):
                job.sidecar.coordinate("another", coordinator, parallelism=1)
        for call in (job.sidecar.release, job.sidecar.checkpoint):
            with pytest.raises(SidecarError, match="'nobody' is not coordinated here"):
                call("nobody")
        assert job.tasks().count() == 1


def test_an_await_of_a_sidecar_with_its_own_thread_is_refused_before_anything_happens(spark: SparkSession) -> None:
    # H122
    coordinator = Script({}, ["stop"])
    with coordinated(spark, coordinator) as job:
        sidecar: Any = job.sidecar

        async def run() -> None:
            await job.handle.run(Listening)  # type: ignore[misc]

        async def request() -> None:
            await sidecar.request("op", "question")

        async def coordinate() -> None:
            await sidecar.coordinate("another", Recorder(), parallelism=1)

        async def action() -> None:
            await sidecar.run(job.tasks().count)

        for mistake in (run, request, coordinate, action):
            place = rf"test_wrong_use\.py:{mistake.__code__.co_firstlineno + 1} in .*\.{mistake.__name__}, or enter"
            with pytest.raises(TypeError, match=rf"write it without `await` at .*{place}.*`async with Sidecar"):
                anyio.run(mistake)
        assert coordinator.story == [("start",)]
        assert job.tasks().count() == 1


def test_an_action_that_is_lazy_or_was_called_already_is_refused_and_one_that_ran_may_return_a_frame(
    spark: SparkSession,
) -> None:  # H165
    with coordinated(spark, Script({}, ["stop"])) as job:
        rdd = job.tasks()
        for action in (lambda: rdd, lambda: spark.range(3)):
            with pytest.raises(TypeError, match=r"it returned a .*(RDD|DataFrame), which is lazy.*\.collect\(\)"):
                job.sidecar.run(action)
        with pytest.raises(TypeError, match=r"action must be a function .*lambda: rdd\.count\(\), not 3"):
            job.sidecar.run(spark.sparkContext.range(3).count())  # type: ignore[arg-type]

        def counted() -> Any:
            rdd.count()
            return spark.range(3)

        assert job.sidecar.run(counted).count() == 3


def test_more_partitions_than_subtasks_are_refused_with_the_number_that_is_needed(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with coordinated(spark, coordinator, 2) as job:
        text = what_the_user_reads(job.tasks(partitions=3).collect)
        assert "SUBTASK_OUT_OF_RANGE" in text
        assert "an RDD with 3 partitions needs parallelism=3" in text
        coordinator.wait_for(lambda story: ("run_ended", False) in story)
        assert job.tasks().count() == 2


def test_fewer_partitions_than_subtasks_are_refused_with_every_way_out(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with coordinated(spark, coordinator, 5) as job:
        text = what_the_user_reads(job.tasks(partitions=2).collect)
        assert "has parallelism=5, but the RDD of stage" in text
        assert "parallelism=2, call repartition(5) before its subtasks, or pass allow_fewer=True" in text
        assert job.tasks().count() == 5


@pytest.mark.long
def test_fewer_partitions_than_subtasks_are_taken_where_they_are_allowed(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with coordinated(spark, coordinator, 5, allow_fewer=True) as job:
        assert job.tasks(partitions=2).count() == 2
        coordinator.wait_for(lambda story: ("run_ended", True) in story)
    assert {callback[1] for callback in coordinator.named("ready")} == {0, 1}


@pytest.mark.parametrize("relay", ["jvm", pytest.param("py4j", marks=pytest.mark.long)])
def test_an_action_over_a_part_of_enough_partitions_is_not_refused(spark: SparkSession, relay: Any) -> None:
    with coordinated(spark, Script({}, ["stop"]), 3, config=SidecarConfig(relay=relay)) as job:
        assert len(job.tasks().take(1)) == 1
        text = what_the_user_reads(job.tasks(partitions=2).collect)
        assert "allow_fewer=True" in text


@pytest.mark.long
def test_one_operator_in_two_stages_of_one_job_is_refused(spark: SparkSession) -> None:
    # H55
    with coordinated(spark, Script({}, ["stop"]), 2) as job:
        first = job.tasks()
        both = first.map(lambda row: (row[0], 1)).groupByKey(2).mapPartitions(job.handle.subtask(Listening))
        text = what_the_user_reads(both.collect)
    assert "CONCURRENT_RUN" in text
    assert "is in two stages" in text
    assert "coordinate two operators, or cache what the two stages share" in text


def test_two_subtasks_in_one_task_are_refused(spark: SparkSession) -> None:
    with coordinated(spark, Script({}, ["stop"]), 2, allow_fewer=True) as job:
        text = what_the_user_reads(job.tasks().coalesce(1).collect)
    assert "has put two subtasks into one task" in text
    assert "use repartition() in place of coalesce()" in text


# --- peers, ports and Pythons ---------------------------------------------------------------------------------------


def test_a_port_in_use_is_reported_with_its_number(spark: SparkSession) -> None:
    # H63
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sidecar = Sidecar(spark, SidecarConfig(port=port))
        with pytest.raises(ServerStartError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            sidecar.__enter__()
    with sidecar:  # the port is free now, and the same object works again
        assert sidecar.address == ("127.0.0.1", port)


def test_an_advertised_port_where_nobody_listens_fails_the_action_with_a_way_out(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once_taken:
        nowhere = once_taken.getsockname()[1]
    recorder = Recorder()
    with coordinated(
        spark,
        recorder,
        config=SidecarConfig(addresses=Addresses(advertised_port=nowhere), limits=SidecarLimits(connect_timeout_s=0.5)),
    ) as job:
        text = what_the_user_reads(job.tasks().collect)
    assert f"cannot reach the sidecar at 127.0.0.1:{nowhere}" in text
    assert "set advertised_host and advertised_port" in text
    assert recorder.story == [("start",), ("close",)]


def test_a_worker_python_without_msgpack_is_reported_before_any_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # spark-facts 21: PYSPARK_PYTHON is not set, so Spark would use the python3 of the PATH
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(SidecarError, match=r"lacks what a subtask needs \(.*msgpack.*\): set PYSPARK_PYTHON="):
        Sidecar(spark).__enter__()


# --- the driver's objects in a function for a task ------------------------------------------------------------------


def _uses(what: Any, item: Any) -> Any:
    return what.statistics()


def test_a_task_function_that_uses_the_sidecar_or_a_handle_is_refused_with_the_alternative(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
        what: Any
        for what in (sidecar, handle):
            with pytest.raises(pickle.PicklingError, match=rf"{a_type(what)} stays on the driver.*subtask\("):
                one_task_each(spark, 1).map(partial(_uses, what)).collect()
