# SPDX-License-Identifier: Apache-2.0

"""Every kind of wrong use, on a real Spark: each error names its cause, and nothing hangs.

After each of these tests the driver is as it was before: no thread, socket or listener is left, and Spark works.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from protocol.attempts import FailureReason
from spark_bridge.bridge.relay import RelayError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.errors import CoordinatorStartError, SidecarError
from spark_bridge.server.server import ServerStartError
from spark_bridge.subtask import SplitReader, SubtaskContext, SubtaskOperator
from spark_bridge.task_entry import NotInsideTask
from tests.spark.actions import Action, one_task_each, what_the_user_reads
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
        super().__init__({(0, 0): ["raise"]} if method in ("subtask_failed", "subtask_reset") else {}, ["hello"])
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

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._raise_in("handle_event_from_operator")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._raise_in("subtask_failed")

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._raise_in("subtask_reset")

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await super().reset_to_checkpoint(checkpoint_id, state)
        self._raise_in("reset_to_checkpoint")

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._raise_in("checkpoint_coordinator")
        return await super().checkpoint_coordinator(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._raise_in("notify_checkpoint_complete")

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        self._raise_in("run_ended")

    async def close(self) -> None:
        await super().close()
        self._raise_in("close")


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


@pytest.mark.parametrize(
    "method", ["subtask_ready", "handle_event_from_operator", "subtask_failed", "subtask_reset", "reset_to_checkpoint"]
)
def test_a_coordinator_that_raises_fails_the_action_with_the_cause(spark: SparkSession, method: str) -> None:
    # H7: and the next action of the same operator starts from a reset
    coordinator = RaisesIn(method)
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(Listening))
        if method == "reset_to_checkpoint":  # which the second run needs first
            coordinator._otherwise = ["stop"]
            assert rdd.count() == 2
        text = what_the_user_reads(rdd.collect)
        assert f"{method}: LookupError: no luck in {method}" in text
        assert "'op'" in text
        assert isinstance(handle.failure, LookupError)
        coordinator._script, coordinator._otherwise = {}, ["hello", "stop"]
        assert rdd.count() == 2
    assert coordinator.named("run_ended")[-1] == ("run_ended", True)


@pytest.mark.parametrize("method", ["checkpoint_coordinator", "notify_checkpoint_complete"])
def test_a_coordinator_that_raises_in_a_checkpoint_fails_the_action(spark: SparkSession, method: str) -> None:
    # H45: the checkpoint is aborted as well
    coordinator = RaisesIn(method)
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        coordinator.wait_for(lambda story: len([c for c in story if c[0] == "ready"]) == 2)
        if method == "checkpoint_coordinator":
            assert "no luck in checkpoint_coordinator" in what_the_user_reads(lambda: sidecar.checkpoint("op"))
        else:
            assert sidecar.checkpoint("op") == 1  # it was written before any subtask was notified
        assert f"no luck in {method}" in what_the_user_reads(action.result)
        assert isinstance(handle.failure, LookupError)


def test_a_coordinator_that_raises_after_a_run_does_not_affect_its_result(spark: SparkSession) -> None:
    coordinator = RaisesIn("run_ended")
    coordinator._otherwise = ["stop"]
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(Listening))
        assert rdd.count() == 2
        coordinator.wait_for(lambda story: ("run_ended", True) in story)
        assert rdd.count() == 2
        assert isinstance(handle.failure, LookupError)


def test_a_coordinator_that_raises_in_close_is_only_logged(spark: SparkSession) -> None:
    # H6
    coordinator = RaisesIn("close")
    with Sidecar(spark) as sidecar:
        sidecar.coordinate("op", coordinator, parallelism=1)
    assert coordinator.story == [("start",), ("close",)]


def test_an_event_that_cannot_be_encoded_fails_the_action_and_names_the_type(spark: SparkSession) -> None:
    # H21
    class SendsAnObject(Recorder):
        async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
            await gateway.send_event({"when": object()})

    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", SendsAnObject(), parallelism=1)
        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect)
    assert "subtask_ready: EventEncodeError" in text
    assert "object" in text


# --- an operator that raises ----------------------------------------------------------------------------------------


class Fragile(SubtaskOperator):
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._raise_in("__init__")

    def _raise_in(self, method: str) -> None:
        if self.where == method:
            raise ArithmeticError(f"no sum in {method}")

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.received: list[Any] = []
        self._raise_in("open")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        list(records)
        self._raise_in("process")
        if self.where == "send_event":
            self.context.send_event(object())
        while not self.received:
            self.context.wait_for_event()
        yield 1

    def handle_event(self, event: Any) -> None:
        self._raise_in("handle_event")
        self.received.append(event)

    def close(self) -> None:
        self._raise_in("close")


@pytest.mark.parametrize(
    "where",
    ["process", *(pytest.param(w, marks=pytest.mark.long) for w in ("__init__", "open", "handle_event", "close"))],
)
def test_an_operator_that_raises_fails_the_action_after_its_retries(spark: SparkSession, where: str) -> None:
    coordinator = Script({}, ["go on"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1)
        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(Fragile, where)).collect)
        assert f"ArithmeticError: no sum in {where}" in text
        assert handle.failure is None  # the coordinator is not at fault
        coordinator.wait_for(lambda story: ("run_ended", False) in story)
        assert [callback[3] for callback in coordinator.named("failed")] == ["FAILED"] * 3
        fine = one_task_each(spark, 1).mapPartitions(handle.subtask(Fragile, "nowhere"))
        assert fine.collect() == [1]


def test_an_operator_that_sends_what_cannot_be_encoded_gets_an_error(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, []), parallelism=1)
        rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Fragile, "send_event"))
        assert "EventEncodeError" in what_the_user_reads(rdd.collect)


def test_an_operator_that_cannot_be_pickled_is_reported_before_any_task_runs(spark: SparkSession) -> None:
    recorder = Recorder()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", recorder, parallelism=1)
        rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Fragile, threading.Lock()))
        assert "cannot pickle '_thread.lock' object" in what_the_user_reads(rdd.collect)
    assert recorder.story == [("start",), ("close",)]


class AsyncOperator(SubtaskOperator):
    async def process(self, records: Iterator[Any]) -> Any:
        yield 1


class MisspeltOperator(SubtaskOperator):
    def process(self, records: Iterator[Any]) -> list[Any]:
        return []

    def snapshots_state(self, checkpoint_id: int) -> bytes:
        return b"state"


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        (Recorder, "Recorder.* is not a SubtaskOperator"),
        (AsyncOperator, r"AsyncOperator.process\(\) is an async generator, .*: write `def process`"),
        (partial(AsyncOperator), r"AsyncOperator.process\(\) is an async generator, .*: write `def process`"),
        (MisspeltOperator, r"MisspeltOperator.snapshots_state\(\) is never called: did you mean snapshot_state\(\)\?"),
        (Listening(), r"pass the operator's class and its arguments"),
        ("Listening", r"pass the operator's class and its arguments"),
    ],
)
def test_an_object_that_is_not_an_operator_is_refused_in_the_driver(
    spark: SparkSession, operator: Any, text: str
) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Recorder(), parallelism=1)
        with pytest.raises(TypeError, match=text):
            handle.subtask(operator)


def test_a_function_that_makes_no_operator_is_reported_in_the_task(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Recorder(), parallelism=1)
        seven: Any = lambda: 7  # noqa: E731
        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(seven)).collect)
    assert "made a int; a subtask needs a SubtaskOperator" in text


def test_what_a_function_makes_is_checked_in_the_task(spark: SparkSession) -> None:
    # H59
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Recorder(), parallelism=1)

        def make() -> SubtaskOperator:
            return AsyncOperator()

        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(make)).collect)
    assert "AsyncOperator.process() is an async generator" in text


def test_a_subtask_that_is_called_by_hand_says_what_it_is_for(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Recorder(), parallelism=1)
        with pytest.raises(NotInsideTask, match="pass it to mapPartitions"):
            handle.subtask(Listening)(iter([1]))


class NamesOnly(SplitReader):
    """Has its own ``__init__``, and does not call that of ``SplitReader``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read_split(self, split: Any) -> list[str]:
        return [f"{self.name}-{split}"]


def test_a_split_reader_needs_no_call_of_its_base_class(spark: SparkSession) -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(3), state))
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", source, parallelism=2)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(NamesOnly, "row"))
        assert sorted(rdd.collect()) == ["row-0", "row-1", "row-2"]


class ForgetsTheContext(NamesOnly):
    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        pass


def test_a_split_reader_without_its_context_says_which_call_is_missing(spark: SparkSession) -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(3), state))
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", source, parallelism=1)
        rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(ForgetsTheContext, "row"))
        text = what_the_user_reads(rdd.collect)
    assert "ForgetsTheContext.open() has not kept its context: call super().open(context, state)" in text


@pytest.mark.parametrize(
    ("method", "record", "text"),
    [
        ("map", 1, "a subtask takes the iterator over one partition, but Spark called it with int"),
        ("flatMap", "words", "a subtask takes the iterator over one partition, but Spark called it with str"),
        ("filter", (1, 2), "a subtask takes the iterator over one partition, but Spark called it with tuple"),
        ("map", [1], "Spark takes all outputs of a subtask for one row"),
    ],
)
def test_a_subtask_that_is_given_to_a_method_for_records_names_the_right_ones(
    spark: SparkSession, method: str, record: Any, text: str
) -> None:
    recorder = Recorder()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", recorder, parallelism=1)
        rdd = spark.sparkContext.parallelize([record], 1)
        told = what_the_user_reads(getattr(rdd, method)(handle.subtask(Listening)).collect)
    assert text in told
    assert "pass it to mapPartitions" in told
    assert recorder.story == [("start",), ("close",)]


class Asks(SubtaskOperator):
    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        list(records)
        yield self.context.request("the price")


class HasNoPrices(OperatorCoordinator):
    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return self._look_up({}, request)

    def _look_up(self, prices: dict[str, int], name: str) -> int:
        return prices[name]


def test_a_failed_request_shows_the_task_where_the_coordinator_raised(spark: SparkSession) -> None:
    # H33
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", HasNoPrices(), parallelism=1)
        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(Asks)).collect)
    assert "The coordinator's traceback, on the driver:" in text
    assert "in _look_up" in text
    assert "return prices[name]" in text
    assert "RequestFailed: KeyError: 'the price'" in text


class HandlesNoEvents(SubtaskOperator):
    """Never reads the events of ``subtask_ready``, which have arrived before ``process`` begins."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield "done"


def test_events_that_no_operator_handles_are_counted_and_logged_once(spark: SparkSession) -> None:
    # H59
    with capture_logs() as logs, Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["hello"]), parallelism=2)
        for _ in range(2):
            assert one_task_each(spark, 2).mapPartitions(handle.subtask(HandlesNoEvents)).count() == 2
            sidecar.run(lambda: None)  # waits until the run is over
        assert handle.statistics()["events_unhandled_by_operator"] == handle.statistics()["events_confirmed"] > 0
    (line,) = [line for line in logs if line["event"] == "events to subtasks not handled"]
    assert line["hint"] == "override handle_event in HandlesNoEvents, or do not send events to it"


# --- the wrong arguments and the wrong order ------------------------------------------------------------------------


def test_a_name_in_use_is_refused_and_the_first_operator_continues(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=1)
        second = Recorder()
        with pytest.raises(SidecarError, match="'op' is already coordinated: choose another name"):
            sidecar.coordinate("op", second, parallelism=1)
        assert second.story == []
        assert one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).count() == 1


class SynchronousCoordinator(OperatorCoordinator):
    def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


class MisspeltCoordinator(OperatorCoordinator):
    async def handle_events_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        pass


@pytest.mark.parametrize("given", ["an instance", "a class", "a factory"])
@pytest.mark.parametrize(
    ("mistaken", "text"),
    [
        (SynchronousCoordinator, "SynchronousCoordinator.handle_request\\(\\) is a plain function, but it is awaited"),
        (MisspeltCoordinator, r"did you mean handle_event_from_operator\(\)\?"),
    ],
)
def test_a_mistake_in_a_coordinators_class_is_reported_by_coordinate(
    spark: SparkSession, mistaken: Any, text: str, given: str
) -> None:
    # H59
    coordinator = {"an instance": mistaken(), "a class": mistaken, "a factory": lambda: mistaken()}[given]  # noqa: PLW0108
    with Sidecar(spark) as sidecar:
        with pytest.raises(CoordinatorStartError if given == "a factory" else TypeError, match=text):
            sidecar.coordinate("op", coordinator, parallelism=1)


@pytest.mark.parametrize(
    ("operator_id", "coordinator", "parallelism", "error", "text"),
    [
        ("", Recorder(), 1, ValueError, "must not be empty"),
        (None, Recorder(), 1, TypeError, "operator_id must be a str"),
        ("a/b", Recorder(), 1, ValueError, "or contain a slash"),
        ("op", Recorder(), 0, ValueError, "at least 1, not 0"),
        ("op", Recorder(), 2.5, TypeError, "parallelism must be an int"),
        ("op", Recorder(), "2", TypeError, "parallelism must be an int"),
        ("op", object(), 1, TypeError, "is not an OperatorCoordinator"),
        ("op", object, 1, TypeError, "is not an OperatorCoordinator"),
        ("op", RaisesIn, 1, TypeError, "cannot be called without arguments"),
    ],
)
def test_invalid_arguments_are_refused(
    spark: SparkSession, operator_id: Any, coordinator: Any, parallelism: Any, error: type[Exception], text: str
) -> None:
    with Sidecar(spark) as sidecar:
        with pytest.raises(error, match=text):
            sidecar.coordinate(operator_id, coordinator, parallelism=parallelism)


def test_names_that_are_not_coordinated_are_refused(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        with pytest.raises(SidecarError, match="'nobody' is not coordinated here"):
            sidecar.release("nobody")
        with pytest.raises(SidecarError, match="'nobody' is not coordinated here"):
            sidecar.checkpoint("nobody")


def test_more_partitions_than_subtasks_are_refused_with_the_number_that_is_needed(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2)
        text = what_the_user_reads(one_task_each(spark, 3).mapPartitions(handle.subtask(Listening)).collect)
        assert "SUBTASK_OUT_OF_RANGE" in text
        assert "an RDD with 3 partitions needs parallelism=3" in text
        coordinator.wait_for(lambda story: ("run_ended", False) in story)
        assert one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).count() == 2


def test_fewer_partitions_than_subtasks_are_refused_with_every_way_out(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=5)
        text = what_the_user_reads(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        assert "has parallelism=5, but the RDD of stage" in text
        assert "parallelism=2, call repartition(5) before its subtasks, or pass allow_fewer=True" in text
        assert one_task_each(spark, 5).mapPartitions(handle.subtask(Listening)).count() == 5


def test_fewer_partitions_than_subtasks_are_taken_where_they_are_allowed(spark: SparkSession) -> None:
    coordinator = Script({}, ["stop"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=5, allow_fewer=True)
        assert one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).count() == 2
        coordinator.wait_for(lambda story: ("run_ended", True) in story)
    assert {callback[1] for callback in coordinator.named("ready")} == {0, 1}


@pytest.mark.parametrize("relay", ["jvm", "py4j"])
def test_an_action_over_a_part_of_enough_partitions_is_not_refused(spark: SparkSession, relay: Any) -> None:
    with Sidecar(spark, SidecarConfig(relay=relay)) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=3)
        assert len(one_task_each(spark, 3).mapPartitions(handle.subtask(Listening)).take(1)) == 1
        text = what_the_user_reads(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        assert "allow_fewer=True" in text


def test_a_second_action_at_the_same_time_is_refused_and_the_first_is_unharmed(spark: SparkSession) -> None:
    # H55
    coordinator = Script({}, ["hello"])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1)
        rdd = one_task_each(spark, 1).mapPartitions(handle.subtask(Listening))
        first = Action(rdd.collect)
        coordinator.wait_for(lambda story: any(callback[0] == "ready" for callback in story))
        text = what_the_user_reads(rdd.count)
        assert "CONCURRENT_RUN" in text
        assert "run the two actions one after the other, or coordinate two operators" in text
        coordinator.say(["stop"])
        assert [received for _, _, received in first.result()] == [["hello"]]
    assert [callback[0] for callback in coordinator.named("ready", "failed", "reset")] == ["ready"]


def test_one_operator_in_two_stages_of_one_job_is_refused(spark: SparkSession) -> None:
    # H55
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=2)
        first = one_task_each(spark, 2).mapPartitions(handle.subtask(Listening))
        both = first.map(lambda row: (row[0], 1)).groupByKey(2).mapPartitions(handle.subtask(Listening))
        text = what_the_user_reads(both.collect)
    assert "CONCURRENT_RUN" in text
    assert "is in two stages" in text
    assert "coordinate two operators, or cache what the two stages share" in text


def test_a_coalesce_behind_the_subtasks_is_refused_as_too_few_partitions(spark: SparkSession) -> None:
    # H58
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=2)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).coalesce(1)
        text = what_the_user_reads(rdd.collect)
    assert "parallelism=2, but the RDD of stage" in text
    assert "After its subtasks, use repartition() in place of coalesce(), which puts several subtasks" in text


def test_two_subtasks_in_one_task_are_refused(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", Script({}, ["stop"]), parallelism=2, allow_fewer=True)
        rdd = one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).coalesce(1)
        text = what_the_user_reads(rdd.collect)
    assert "coalesce() or union() has put two subtasks into one task" in text
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


def test_a_bind_host_of_another_machine_is_reported(spark: SparkSession) -> None:
    with pytest.raises(ServerStartError, match=r"cannot listen on 192\.0\.2\.1:0: .* an address of this machine"):
        Sidecar(spark, SidecarConfig(bind_host="192.0.2.1")).__enter__()


def test_the_wildcard_is_never_advertised(spark: SparkSession) -> None:
    # H63
    with pytest.raises(ServerStartError, match=r"'0\.0\.0\.0', which nothing can connect to: set advertised_host"):
        Sidecar(spark, SidecarConfig(bind_host="0.0.0.0")).__enter__()


def test_an_advertised_port_where_nobody_listens_fails_the_action_with_a_way_out(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once_taken:
        nowhere = once_taken.getsockname()[1]
    recorder = Recorder()
    with Sidecar(spark, SidecarConfig(advertised_port=nowhere, connect_timeout_s=0.5)) as sidecar:
        handle = sidecar.coordinate("op", recorder, parallelism=1)
        text = what_the_user_reads(one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect)
    assert f"cannot reach the sidecar at 127.0.0.1:{nowhere}" in text
    assert "set advertised_host and advertised_port" in text
    assert recorder.story == [("start",), ("close",)]


def test_unauthenticated_peers_are_refused_while_a_job_runs(spark: SparkSession) -> None:
    # H61, H62: garbage, a frame that claims four gigabytes, and nothing at all
    coordinator = Script({}, ["hello"])
    with Sidecar(spark, SidecarConfig(authenticate_timeout_s=1.0)) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect)
        coordinator.wait_for(lambda story: any(callback[0] == "event" for callback in story))
        for words in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 0xFFFFFFFF) * 1000, os.urandom(4096), b""):
            with socket.create_connection(sidecar.address, timeout=30) as stranger:
                stranger.sendall(words)
                assert read_to_the_end(stranger) < 200  # the reply reveals little
        coordinator.say(["and", "stop"])
        assert [received for _, _, received in action.result()] == [["hello", "and"]]
    assert [callback[0] for callback in coordinator.named("ready", "failed", "reset")] == ["ready"]


def read_to_the_end(stranger: socket.socket) -> int:
    """How many bytes the peer sends before it closes the connection."""
    total = 0
    try:
        while data := stranger.recv(65536):
            total += len(data)
    except ConnectionResetError:
        pass
    return total


def test_a_connect_session_is_refused_on_entering() -> None:  # spark-facts 5
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(RelayError, match=r"SparkSession\.builder\.master"):
        Sidecar(connect).__enter__()


@pytest.mark.parametrize("thing", [None, "local[2]", SparkSession])
def test_an_object_that_is_not_a_session_is_refused_on_entering(thing: Any) -> None:
    with pytest.raises(TypeError, match="is neither a SparkSession nor a SparkContext"):
        Sidecar(thing).__enter__()


def test_a_missing_worker_python_is_reported_before_any_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python3")
    with pytest.raises(SidecarError, match=r"'/nowhere/python3' was not found: set PYSPARK_PYTHON=/"):
        Sidecar(spark).__enter__()


def test_a_worker_python_without_msgpack_is_reported_before_any_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:  # spark-facts 21: PYSPARK_PYTHON is not set, so Spark would use the python3 of the PATH
    bare = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    with pytest.raises(SidecarError, match=r"lacks what a subtask needs \(.*msgpack.*\): set PYSPARK_PYTHON="):
        Sidecar(spark).__enter__()


def test_a_worker_python_of_another_version_is_reported_before_any_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(SidecarError, match=rf"\(Python 3\.9\), but the driver runs Python {here}: set PYSPARK_PYTHON="):
        Sidecar(spark).__enter__()
