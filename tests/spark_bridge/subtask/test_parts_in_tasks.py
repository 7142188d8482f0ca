# SPDX-License-Identifier: Apache-2.0

"""What tasks see of the ready-made parts."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.parts import PartTable
from protocol.wire.codec import decode_event
from protocol.wire.messages import Confirm, EventMessage, Opened, OperatorPart
from spark_bridge.primitives.cache.driver import Cache
from spark_bridge.primitives.cache.task import CacheInTask
from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.group.task import GroupInTask
from spark_bridge.primitives.permits.driver import Permits
from spark_bridge.primitives.permits.task import PermitsInTask
from spark_bridge.primitives.shared_value.driver import SharedValue
from spark_bridge.primitives.shared_value.task import SharedValueInTask
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.primitives.work_queue.task import WorkQueueInTask
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.subtask import SplitReader, SubtaskContext, TaskIdentity, run_subtask
from spark_bridge.subtask.parts import OperatorParts, TaskPart, current_part, runs_in_task
from tests.spark_bridge.subtask.operators import Calling, Recorder
from tests.spark_bridge.subtask.peer import KEYS, TASK_ID, Peer, RunningTask, registered

PARTS: list[tuple[Any, Any]] = [
    (Cache, CacheInTask),
    (Group, GroupInTask),
    (Permits, PermitsInTask),
    (SharedValue, SharedValueInTask),
    (WorkQueue, WorkQueueInTask),
]


@pytest.mark.parametrize(("on_driver", "in_task"), PARTS)
def test_every_name_that_only_the_driver_has_says_so_in_a_task(on_driver: Any, in_task: Any) -> None:  # H165
    names = {name for name in {*dir(on_driver)} - {*dir(in_task)} if not name.startswith("_")}
    assert names == in_task._on_driver
    part = in_task("mine")
    for name in names:
        with pytest.raises(AttributeError, match=f"^{name} of the .* 'mine' is for the driver, and this is a task"):
            getattr(part, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = part.nonsense
    assert repr(pickle.loads(pickle.dumps(part))) == repr(copy.copy(part)) == repr(part)


OF_USERS = {
    "attempt",
    "barrier_arrived",
    "cancelled",
    "checkpoint_id",
    "count",
    "handle_pending",
    "input_begins_again",
    "mode",
    "now",
    "observe",
    "operator_id",
    "parallelism",
    "request",
    "request_async",
    "restored_requests",
    "send_event",
    "send_event_nowait",
    "sleep",
    "snapshot_folder",
    "state_folder",
    "statistics",
    "subtask",
    "task_attempt_id",
    "wait_for_event",
}


def test_all_parts_have_contexts_of_one_class_which_has_only_what_users_need(peer: Peer) -> None:  # H80
    own, parts = Recorder(), {"a": Recorder(), "b": Recorder()}
    task, _ = peer.run(own, ["record"], parts={name: lambda part=part: part for name, part in parts.items()})
    peer.finish(task)
    for operator in (own, *parts.values()):
        assert type(operator.context) is SubtaskContext
        assert {name for name in dir(operator.context) if not name.startswith("_")} == OF_USERS


class Reading(SplitReader):
    """Tells the enumerator of its source what it has restored."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        assert type(context) is SubtaskContext
        context.send_event("opened")
        context.send_event_nowait("again")

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        yield from ()


def test_a_reader_inside_of_another_has_the_same_context_and_its_events_name_the_way_to_it(peer: Peer) -> None:
    """H132, and for sources of sources too: each of them has the whole interface."""

    class Outer(HybridReader):
        waits_for_subtask_ready = False

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield from ()

    class Inner(Outer):
        def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
            yield from ()

    def nested() -> HybridReader:
        return Outer([Reading, lambda: Inner([Reading])])

    task, connection = peer.start(Recorder(), parts={"source": nested}), peer.register()
    sent = [connection.next_item(EventMessage) for _ in range(4)]
    opened = connection.next_item(Opened)
    connection.send(Confirm(opened.task_attempt_id, opened.seq))
    peer.finish(task)
    wrapped = [[0, "opened"], [0, "again"], [1, [0, "opened"]], [1, [0, "again"]]]
    assert [(item.part, decode_event(item.payload)) for item in sent] == [(1, event) for event in wrapped]


def test_user_code_finds_a_part_on_the_threads_of_its_task_until_that_ends(peer: Peer) -> None:
    made: list[TaskPart] = []

    class Part(TaskPart):
        waits_for_subtask_ready = False

        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            made.append(self)

    def look(context: SubtaskContext) -> list[Any]:
        assert runs_in_task()
        with ThreadPoolExecutor(1) as pool:
            return [current_part("part", "a"), pool.submit(current_part, "part", "a").result()]

    task, _ = peer.run(Calling(look), parts={"a": Part, "b": Part})
    ((on_its_own, on_another),) = peer.finish(task)
    assert on_its_own is on_another is made[0]
    assert not runs_in_task()
    with pytest.raises(LocalProtocolError, match="'a' is used where no task of a coordinated operator runs"):
        current_part("part", "a")


class Generating(Recorder):
    """Closes well, and can do nothing else."""

    closed = 0

    def handle_event(self, event: Any) -> Any:
        yield event

    def close(self) -> None:
        Generating.closed += 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (dict, "{} returned a dict; a {} needs a SubtaskOperator, or a function whose first required argument"),
        (lambda: Generating(), r"Generating.handle_event\(\) has a .yield"),  # noqa: PLW0108 - a class is checked before
    ],
)
@pytest.mark.parametrize("stage", [False, True])
def test_what_a_factory_makes_is_checked_for_an_operator_as_for_a_stage(make: Any, says: str, stage: bool) -> None:
    """H59: the driver can check a class, but only the task knows what a function makes."""
    Generating.closed = 0
    named = ("the factory of stage 'a'", "stage") if stage else ("dict", "subtask")
    with pytest.raises(TypeError, match=says.format(*named)):
        OperatorParts(None, {"a": make}, ["a"]) if stage else OperatorParts(make, {})
    assert Generating.closed == (make is not dict)


class Numbered(TaskPart):
    waits_for_subtask_ready = False

    def __init__(self, number: int) -> None:
        self.number = number


class Finding(Recorder):
    """Yields each record with the number of the part that it finds."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            yield [record, current_part("part", "a").number]


def test_two_operators_in_one_pipeline_of_spark_find_each_its_own_part(peer: Peer) -> None:
    """They take turns on one thread: the second one pulls a record out of the first."""
    identity = TaskIdentity(TASK_ID, 2, 5, 1)

    def operator(name: str, number: int, records: Iterable[Any]) -> Iterator[Any]:
        endpoint = peer.endpoint(operator_id=name, key=KEYS.task_key(name))
        parts = dict.fromkeys(("a", "b"), partial(Numbered, number))
        return run_subtask(Finding, endpoint, identity, records, parts)

    def pipeline() -> Iterator[Any]:
        return operator("second", 2, operator("first", 1, ["x", "y"]))

    task = RunningTask(Recorder, peer.endpoint(), body=pipeline)
    parts = tuple(OperatorPart(name) for name in ("", "a", "b"))
    second, first = peer.take_task(parts=parts), peer.take_task(parts=parts)
    first.finish()
    second.finish()
    assert task.outputs() == [[["x", 1], 2], [["y", 1], 2]]


def test_a_task_that_is_never_closed_leaves_no_part_that_user_code_could_find(peer: Peer) -> None:
    channel: Any = SimpleNamespace(
        operator_opened=lambda **_: None, table=PartTable((OperatorPart(""), OperatorPart("a")))
    )
    parts = OperatorParts(Recorder, {"a": Recorder})
    identity: Any = SimpleNamespace(subtask=0, task_attempt_id=1)
    parts.open(channel, peer.endpoint(), identity, registered())
    assert current_part("part", "a") is parts.operators["a"]
    del parts, channel
    gc.collect()
    with pytest.raises(LocalProtocolError, match="no task of a coordinated operator runs"):
        current_part("part", "a")
