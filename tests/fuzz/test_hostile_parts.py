# SPDX-License-Identifier: Apache-2.0

"""A hostile task at the coordinator of every ready-made part, source and sink (H157).

First a short random run of each; then what the fuzzer has found, each as its shortest history.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from actors.coordination import OperatorCoordinator, SourceCoordinator, StaticSplitEnumerator
from headgate import CheckpointConfig, Group, Permits, SharedValue, WorkQueue
from headgate.sources import HybridSource
from headgate.testing import PartEvent, Task, World, running_operator
from protocol.errors import RemoteProtocolError
from protocol.gateway.machine import GatewayMachine
from protocol.gateway.types import ConnectionAttached, GatewayLimits, MessageReceived
from protocol.ids import ExecutionAttempt
from protocol.kept_bytes import KeptBytes
from protocol.wire.codec import encode_event
from protocol.wire.messages import Opened, RestoredEventMessage, RestoredRequestMessage
from spark_bridge.primitives.counters import book
from spark_bridge.primitives.counters.book import Book
from spark_bridge.sinks.files.driver import FileCommitter
from spark_bridge.sinks.postgres.driver import StagedCommitter
from spark_bridge.sinks.two_phase import driver as two_phase
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.parts import PartName, token_of
from spark_bridge.sinks.two_phase.sink import TwoPhaseCommitter
from spark_bridge.sources.postgres.ranges import pack_ranges
from spark_bridge.subtask.parts import COUNTERS
from tests.fuzz import hostile_parts as parts
from tests.fuzz.target import run_cases

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("target", parts.TARGETS, ids=lambda target: str(target.name))
def test_a_hostile_task_hurts_its_own_operator_alone_and_within_its_bounds(target: Any) -> None:  # H157
    run_cases(target, first=SystemRandom().randrange(10**9), count=1)


# --- findings -----------------------------------------------------------------------------------------------------


async def hear(world: World, *said: Any, part: str = "") -> Task:
    """Let a task say this, beside another one; return it."""
    await world.launch(1)
    task = await world.launch(0)
    for one in said:
        task.send(PartEvent(part, one) if part else one)
        await world.settle()
    return task


def sink(real: type[TwoPhaseCommitter], *, atomic: bool = False) -> TwoPhaseSinkCoordinator:
    return TwoPhaseSinkCoordinator(parts._Sink(real, atomic=atomic))


def a_list(*payloads: Any, checkpoint_id: int = 9, first: int = 0) -> list[Any]:
    names = [PartName(0, -1, 0, token_of("proof"), first + number) for number in range(len(payloads))]
    entries = [[str(name), payload] for name, payload in zip(names, payloads, strict=True)]
    return ["headgate/prepared", "sink", "memory", "proof", checkpoint_id, True, entries]


def a_source(make: Callable[[], Any]) -> SourceCoordinator:
    return SourceCoordinator(make().enumerator)


ARRAY = [np.zeros(3), 1, 2]
FORGED: dict[str, tuple[Callable[[], Any], Any]] = {
    "an event of a group that begins with an array": (lambda: Group("part", 2), ARRAY),
    "an event of permits that begins with an array": (lambda: Permits("part", per_s=1.0), ARRAY),
    "an event of a shared value that begins with an array": (lambda: SharedValue("part", 1), ["applied", "x"]),
    "a report of a queue without items": (
        lambda: WorkQueue("part", [1]),
        ["headgate/work-report", [], [[1]], [], 1, False, 0],
    ),
    "an event to a source before the first": (lambda: a_source(lambda: HybridSource(parts._Numbers())), [-1, "event"]),
    "an event to no source": (lambda: a_source(lambda: HybridSource(parts._Numbers())), ["x"]),
    "a range that begins with a list": (
        lambda: a_source(parts.postgres),
        ["headgate/postgres-range-read", [], None, "1:1:"],
    ),
    "a payload of a file without its size": (lambda: sink(FileCommitter), a_list([1])),
    "a payload of rows that is a text": (lambda: sink(StagedCommitter), a_list("x")),
    "a payload that no checkpoint can hold": (lambda: sink(TwoPhaseCommitter), a_list(b"x")),
    "a list that is too long": (lambda: sink(TwoPhaseCommitter), a_list(*[None] * 1001)),
}
UNSAID = {"a range that begins with a list"}
"""Those that a source takes for an event of the user's, of which it says so."""


@pytest.mark.parametrize("forged", FORGED)
async def test_what_no_task_of_ours_sends_is_refused_by_name_and_ends_that_task_alone(forged: str) -> None:  # H157
    make, said = FORGED[forged]
    made = make()
    is_part = not isinstance(made, OperatorCoordinator)
    mode: parts.Mode = "streaming" if "payload" in forged or "list that" in forged else "batch"
    with parts.watching() as watched:
        async with running_operator(
            parts._Main() if is_part else made, uses=[made] if is_part else [], mode=mode
        ) as world:
            task = await hear(world, said, part="part" if is_part else "")
            (error,) = watched.raised
            assert parts.is_said(error), error
            if forged not in UNSAID:
                assert task.outcome == "killed"
                assert [str(failure) for failure in world.failures] == []
                assert [one.outcome for one in world.tasks if one is not task] == [""]


@pytest.mark.parametrize("kind", [RestoredEventMessage, RestoredRequestMessage])
def test_a_task_sends_again_only_what_its_restored_snapshot_held(kind: Any) -> None:  # H157 H52
    """Otherwise it could make a coordinator keep something for subtasks without number."""
    for senders, sender, is_held in (((), 7, False), ({3, 4}, 7, False), ({3, 7}, 7, True), (None, 7, True)):
        machine = GatewayMachine(ExecutionAttempt("operator", 0, 0, 9), GatewayLimits(), senders=senders)
        machine.handle(ConnectionAttached(0), 0.0)
        machine.handle(MessageReceived(Opened(9, 1)), 0.0)
        message = MessageReceived(kind(9, 2, sender, encode_event("x")))
        if is_held:
            machine.handle(message, 0.0)
        else:
            with pytest.raises(RemoteProtocolError, match="its restored snapshot holds none"):
                machine.handle(message, 0.0)


async def test_a_report_of_a_backlog_that_is_too_large_is_not_kept() -> None:  # H157
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(range(4), state))

    def report(size: int, count: int = 4) -> Any:
        return ["headgate/split-backlog", [[bytes(size), 1]] * count]

    async with running_operator(coordinator) as world:
        task = await hear(world, report(10))
        assert coordinator.backlog.amount == 4
        for size, count in ((2**19, 4), (1, 1002)):
            task.send(report(10))
            task.send(report(size, count))
            await world.settle()
            assert parts.kept_bytes(coordinator) < 100_000
        assert task.outcome == ""


async def test_counts_are_kept_for_checkpoints_that_there_are_and_for_no_others() -> None:  # H157
    async with running_operator(parts._Main(), mode="streaming", checkpoint=CheckpointConfig(interval_s=None)) as world:
        counters: Any = world._composed.counters
        await hear(world, *([number, [{"name": 1}, {}]] for number in range(1000)), part=COUNTERS)
        assert counters._filed == {}
        (task,) = (one for one in world.tasks if one.attempt.subtask == 0)
        for number in range(3):
            checkpoint_id = await world.checkpoint()
            task.send(PartEvent(COUNTERS, [checkpoint_id, [{"name": number}, {}]]))
            await world.settle()
            await counters.notify_checkpoint_aborted(checkpoint_id)
            assert list(counters._filed[0]) == [checkpoint_id]  # a later one may refer to it, and to no other


async def test_the_buckets_of_an_attempt_have_a_bound_at_both_ends() -> None:  # H157
    def values(name: str, count: int, begins: int = 0) -> list[Any]:
        return [None, [{}, {name: [count, 1.0, 1.0, 1.0, {f"+{begins + at}": 1 for at in range(count)}]}]]

    counted = Book()
    with patch.object(book, "BUCKETS_MAX", 3000):
        async with running_operator(parts._Main()) as world:
            task = await hear(world, values("a", 2000), values("b", 1000), part=COUNTERS)
            assert (task.outcome, world.counters()["b"].count) == ("", 1000)  # type: ignore[union-attr]
            task.send(PartEvent(COUNTERS, values("c", 1)))
            await world.settle()
            assert task.outcome == "killed"
        for number in range(3000):
            counted.observe("values", 1.05**number)
            counted.observe("values", 1.05**number)
        with pytest.raises(ValueError, match="may have 3000 buckets"):
            counted.observe("values", 1e-9)
    assert counted.buckets == 3000


async def test_a_task_finishes_its_own_items_and_no_others() -> None:  # H157
    queue = WorkQueue("part", range(2))
    async with running_operator(parts._Main(), uses=[queue]) as world:
        task = await hear(world, part="part")
        other = next(one for one in world.tasks if one is not task)
        other.send(PartEvent("part", ["headgate/work-report", [], [], [], 1, False, 0]))
        await world.settle()
        coordinator: Any = world._composed.parts.named("part").coordinator
        ids = list(coordinator.enumerator._in_work)
        task.send(PartEvent("part", ["headgate/work-report", ids, [], [], 0, False, 0]))
        await world.settle()
        assert queue.progress == (0, 2)
        other.send(PartEvent("part", ["headgate/work-report", ids, [], [], 0, False, 0]))
        await world.settle()
        assert queue.progress == (1, 2)


async def test_what_tasks_have_added_counts_after_each_restore_as_before() -> None:  # H157
    def report(*found: Any) -> Any:
        return PartEvent("part", ["headgate/work-report", [], list(found), [], 0, False, 0])

    restored, added = None, 0
    for _ in range(4):  # otherwise each driver would allow as much again
        queue = WorkQueue("part", ["root" * 1000], bytes_max=20_000)
        async with running_operator(parts._Main(), uses=[queue], mode="streaming", restored=restored) as world:
            tasks = [await world.launch(0), await world.launch(1)]
            for _ in range(8):
                tasks[0].send(report([added + 1, 0, "x" * 500]))
                await world.settle()
                if world.failures:
                    break
                added += 1
            else:
                await world.checkpoint()
                restored = world.checkpoints[-1]
                continue
            assert "would exceed the limit of 20000 bytes" in str(world.failures[0])
            break
    assert 16 <= added <= 22
    bounded = WorkQueue("part", ["root" * 1000], bytes_max=20_000)
    half: Any = bounded._enumerator(None if restored is None else _state_of(restored))
    half._begun.finish_now()
    assert half._account.total - half._account._beside <= 20_000, "what was within the limit still is"


def _state_of(checkpoint: Any) -> bytes:
    from protocol.parts import split_states

    _, states = split_states(checkpoint.coordinator_state, {"part": None, COUNTERS: None})
    return states["part"]


async def test_more_ranges_than_a_table_was_divided_into_are_refused() -> None:  # H157
    async with running_operator(a_source(parts.postgres), mode="streaming") as world:
        read = ["headgate/postgres-range-read"]
        task = await hear(world, *([*read, str(low), None, "1:1:"] for low in range(3)))
        assert task.outcome == ""
        task.send([*read, "3", None, "1:1:"])
        await world.settle()
        assert task.outcome == "killed"


def test_ranges_that_do_not_follow_each_other_are_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="none from '5' on"):
        pack_ranges({None: encode_event([None, "5", "1:1:"]), "7": encode_event(["7", None, "1:1:"])}, 2)


@pytest.mark.parametrize("atomic", [False, True])
async def test_what_a_task_lists_for_checkpoints_that_never_come_has_a_limit(*, atomic: bool) -> None:  # H157
    with patch.object(two_phase, "LISTED_BYTES_MAX", 50_000):
        coordinator = sink(TwoPhaseCommitter, atomic=atomic)
    async with running_operator(coordinator, mode="streaming") as world:
        task = await hear(world)
        for number in range(200):
            task.send(a_list(None, checkpoint_id=2**62, first=number))
            await world.settle()
            assert coordinator.commits.pending <= 80
            if world.failures:
                break
        assert "have prepared, and no checkpoint has committed, would exceed the limit" in str(world.failures[0])
        await world.launch(1)
        assert coordinator.commits._account.total == 0, "the next run has all of it again"


async def test_parts_that_are_committed_or_destroyed_do_not_count_any_more() -> None:  # H157
    coordinator = sink(TwoPhaseCommitter)
    server = coordinator.commits._of.server  # type: ignore[attr-defined]
    async with running_operator(coordinator, mode="streaming") as world:
        task = await hear(world)
        prepared = a_list(None, None, checkpoint_id=1)
        server.prepared["sink"] = {name: [] for name, _ in prepared[-1]}
        task.send(prepared)
        task.send(a_list(None, checkpoint_id=2**60, first=5))
        await world.settle()
        assert len(coordinator.commits._account.owners()) == 3
        await world.checkpoint()
        assert len(coordinator.commits._account.owners()) == 1
        late = a_list(None, checkpoint_id=1, first=7)
        server.prepared["sink"] = {name: [] for name, _ in late[-1]}
        task.send(late)
        await world.settle()
        assert (len(coordinator.commits._account.owners()), server.prepared["sink"]) == (1, {}), "it is committed"
        await world.kill(task)
        assert coordinator.commits._account.owners() == []


def test_an_account_that_a_checkpoint_has_filled_takes_nothing_more() -> None:  # H157
    account = KeptBytes(100, "what is kept", "keep less")
    account.keep("a", 150)
    with pytest.raises(ValueError, match="limit of 100 bytes"):
        account.charge("b", 1)
    account.release("a", 60)
    account.charge("b", 10)
    assert (account.total, account.keeps("a"), account.keeps("c")) == (100, True, False)


def test_the_walk_over_what_is_kept_sees_all_of_a_part() -> None:
    """The fuzzer's own measure."""
    holder = parts.Part("name", _nothing, ())
    object.__setattr__(holder, "events", [bytes(10_000), {1: [bytes(5_000)]}])
    assert 15_000 < parts.kept_bytes(holder) < 17_000


def _nothing() -> Any:
    raise AssertionError
