# SPDX-License-Identifier: Apache-2.0

"""The function that Spark ships: what it carries, and which task it claims to be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import RDD, TaskContext
from pyspark.serializers import CloudPickleSerializer

from protocol.errors import InputRefused
from protocol.wire import event_classes
from protocol.wire.messages import Register, RestoreMode, StartProcessing
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.primitives.elsewhere import task_parts_of
from spark_bridge.primitives.primitive import PARTS_OF_ALL
from spark_bridge.subtask import SubtaskOperator, TaskEndpoint
from spark_bridge.subtask.parts import overrides_handle_event
from spark_bridge.task_entry import (
    NotInsideTask,
    SubtaskTask,
    _pack_event_classes,
    _refuse_stray_batch,
    _unpack_event_classes,
)
from tests.spark_bridge.subtask.peer import KEYS, Peer, RunningTask, registered


class Times(SubtaskOperator):
    def __init__(self, factor: int, plus: int = 0) -> None:
        self._factor = factor
        self._plus = plus

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            yield record * self._factor + self._plus


@pytest.fixture
def inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(
        taskAttemptId=lambda: 71,
        partitionId=lambda: 2,
        stageId=lambda: 5,
        attemptNumber=lambda: 1,
        getLocalProperty={"headgate.action": "an action"}.get,
    )
    monkeypatch.setattr(TaskContext, "get", lambda: context)


def an_endpoint() -> TaskEndpoint:
    return TaskEndpoint("somewhere", 1, KEYS.task_key("words"), "words", parallelism=4)


def test_a_call_by_hand_names_the_methods_to_pass_it_to() -> None:
    with pytest.raises(NotInsideTask, match="mapPartitions"):
        SubtaskTask(Times, an_endpoint(), (2,))(iter([1]))


def test_its_text_names_the_operator_and_not_the_secret() -> None:  # H61
    text = repr(SubtaskTask(Times, an_endpoint(), (2,)))
    assert "Times" in text
    assert repr(KEYS.task_key("words").secret) not in text


def test_an_event_class_that_cannot_be_pickled_is_named_and_keeps_no_other_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H97
    class Plain:
        pass

    class Locked:
        LOCK = threading.Lock()

    classes = [SimpleNamespace(name=cls.__name__, cls=cls) for cls in (Locked, Plain)]
    monkeypatch.setattr(event_classes, "registered", lambda: classes)
    learnt: dict[str, str] = {}
    monkeypatch.setattr(event_classes, "learn_failures", learnt.update)
    packed = _pack_event_classes()
    assert list(packed.pickled) == ["Plain"]
    _unpack_event_classes(packed)
    assert list(learnt) == ["Locked"]
    assert "cannot pickle" in learnt["Locked"]


@pytest.mark.parametrize("parts", [{}, {"pages": ["work_queue", [2, 100]], "api": ["permits", []]}])
def test_a_part_that_an_operator_does_not_use_is_refused_with_those_that_it_uses(parts: dict[str, list[Any]]) -> None:
    handle = OperatorHandle(an_endpoint(), dict, lambda: None, task_parts=task_parts_of(parts))
    assert handle.parts == parts
    for name in parts:
        assert type(handle.part(name)).__name__ in ("WorkQueueInTask", "PermitsInTask")
    known = "'api', 'pages'" if parts else "none"
    with pytest.raises(ValueError, match=rf"'words' uses no part 'rate'; there is {known}\. Give it .*uses=\[part\]"):
        handle.part("rate")


def test_a_chain_and_an_operator_with_parts_do_not_count_as_ignoring_events() -> None:
    """A stage or a part may handle them, and nobody has looked: no warning says that these events are for nobody."""
    shipped: list[Any] = []
    parts = task_parts_of({"pages": ["work_queue", [2, 100]]})
    OperatorHandle(an_endpoint(), dict, lambda: None, shipped.append, {**PARTS_OF_ALL, **parts}).subtask(Times, 2)
    OperatorHandle(an_endpoint(), dict, lambda: None, shipped.append, parts, ("pages",)).subtask()
    assert [overrides_handle_event(one) for one in shipped] == [True, True]
    assert not overrides_handle_event(Times)


@pytest.mark.usefixtures("inside_a_task")
def test_an_unpickled_task_runs_its_operator_as_the_current_task() -> None:  # H1; spark-facts 14
    with Peer() as peer:
        sparks_own: Any = CloudPickleSerializer
        packed = sparks_own().dumps(SubtaskTask(Times, peer.endpoint(), (2,), {"plus": 1}))
        task = RunningTask(lambda: Times(0), peer.endpoint(), body=lambda: sparks_own().loads(packed)(iter([1, 2, 3])))
        connection = peer.accept()
        register = connection.expect(Register)
        assert (register.task_attempt_id, register.subtask, register.action) == (71, 2, "an action")
        assert (register.run_id, register.attempt_number) == (5, 1)
        connection.send(registered())
        connection.receive()  # Opened
        connection.send(StartProcessing(71, 1))
        connection.finish()
        assert task.outputs() == [3, 5, 7]


@pytest.mark.parametrize(
    ("mode", "properties", "refused"),
    [
        (RestoreMode.STREAMING, {"sql.streaming.queryId": "q"}, True),
        (RestoreMode.STREAMING, {"sql.streaming.queryId": "q", "headgate.batch": "others"}, True),
        (RestoreMode.STREAMING, {"sql.streaming.queryId": "q", "headgate.batch": "words"}, False),
        (RestoreMode.STREAMING, {}, False),
        (RestoreMode.BATCH, {"sql.streaming.queryId": "q"}, False),
    ],
)
def test_a_streaming_operator_runs_in_a_micro_batch_only_if_it_was_begun_for_it(
    mode: RestoreMode, properties: dict[str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # H174, H175
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(getLocalProperty=properties.get))
    expected = pytest.raises(InputRefused, match="micro-batch of query q") if refused else nullcontext()
    with expected:
        _refuse_stray_batch(replace(an_endpoint(), mode=mode))


class Async(SubtaskOperator):
    closed = 0

    async def process(self, records: Iterator[Any]) -> Any:
        yield 1

    def close(self) -> None:
        Async.closed += 1


@pytest.mark.usefixtures("inside_a_task")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dict, "returned a dict; a subtask needs a SubtaskOperator"),
        (lambda: Async(), r"Async.process() is an async generator"),  # noqa: PLW0108 - a class is checked before
    ],
)
def test_what_a_function_makes_is_checked_in_the_task_and_refused_with_the_fix(make: Any, said: str) -> None:  # H59
    Async.closed = 0
    with Peer() as peer:
        entry = SubtaskTask(make, peer.endpoint())
        task = RunningTask(lambda: Times(0), peer.endpoint(), body=lambda: entry(iter([])))
        assert said in peer.register().finish().failure
        assert isinstance(task.error(), TypeError)
    assert Async.closed == (make is not dict), "what it has opened"


@pytest.mark.usefixtures("inside_a_task")
@pytest.mark.parametrize("arguments", [(7,), ("words",), (("a", 1),), ({"a": 1},), (0, iter([1])), (iter([1]), 3)])
def test_a_call_without_a_partition_names_the_methods_that_pass_one(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"called it with \w+.*: pass it to mapPartitions, .* instead of map"):
        SubtaskTask(Times, an_endpoint(), (2,))(*arguments)


@pytest.mark.usefixtures("inside_a_task")
@pytest.mark.parametrize("records", [range(2), [1, 2], iter([1, 2])])
def test_a_partition_may_be_any_iterable(records: Any) -> None:
    outputs = SubtaskTask(Times, an_endpoint(), (2,))(records)
    sparks_own: Any = CloudPickleSerializer
    with pytest.raises(Exception, match="takes all outputs of a subtask for one row: pass it to mapPartitions"):
        sparks_own().dumps(outputs)


def test_an_action_of_spark_is_refused_with_where_it_belongs() -> None:  # H165
    handle = OperatorHandle(an_endpoint(), dict, lambda: None)
    with pytest.raises(TypeError, match=r"collect\(\) is an action of Spark, .* sidecar\.run\(rows\.collect\)"):
        handle.subtask(RDD.__new__(RDD).collect)  # type: ignore[arg-type]
