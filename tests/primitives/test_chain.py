# SPDX-License-Identifier: Apache-2.0

"""Several parts behind one operator (H80)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from actors.coordination import OperatorCoordinator, SubtaskGateway
from actors.coordination.engine.barrier_tracker import CheckpointFailed
from headgate import CoordinatorContext, FailureReason, SubtaskContext, SubtaskOperator
from headgate.testing import RecordingCoordinator, running_operator
from protocol.errors import LocalProtocolError
from protocol.parts import MAGIC, join_states, split_states
from spark_bridge.primitives.primitive import Primitive
from spark_bridge.subtask.parts import TaskPart
from tests.primitives.histories import with_held_requests

pytestmark = pytest.mark.anyio


class Echo(TaskPart):
    """The task's half of an ``EchoPart``: sends back what it gets, with its count of events, which is its state."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.count = int(state or b"0")

    def handle_event(self, event: Any) -> None:
        self.count += 1
        self.context.send_event([event, self.count])

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.count

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b"%d" % sum(map(int, states.values()))


class EchoCoordinator(OperatorCoordinator):
    """Sends its name to each attempt, and keeps what comes back; writes each call into the story of all parts."""

    def __init__(self, name: str, story: list[tuple[Any, ...]], *, raises_in: str = "") -> None:
        self.name = name
        self.story = story
        self.raises_in = raises_in
        self.came: list[Any] = []

    def tell(self, method: str, *details: Any) -> None:
        self.story.append((self.name, method, *details))
        if method == self.raises_in:
            raise RuntimeError(f"{method} of {self.name}")

    async def start(self, context: CoordinatorContext) -> None:
        self.tell("start")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came.append(event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return [self.name, request]

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.tell("subtask_ready")
        await gateway.send_event(f"from {self.name}")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.tell("subtask_failed")

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.tell("subtask_reset", checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return f"state of {self.name}".encode()

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.tell("notify_checkpoint_complete", checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.tell("reset_to_checkpoint", checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.tell("run_ended", succeeded)

    async def close(self) -> None:
        self.tell("close")


class EchoPart(Primitive):
    def __init__(
        self, name: str, story: list[tuple[Any, ...]], *, raises_in: str = "", task_part: type[TaskPart] = Echo
    ) -> None:
        super().__init__(name)
        self._task_part = task_part
        self.driver = EchoCoordinator(name, story, raises_in=raises_in)

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return self.driver

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return self._task_part


class Main(SubtaskOperator):
    """Passes its records on after an event; asks its own coordinator, and counts its records."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.events: list[Any] = []
        self.restored = state

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            yield self.context.request(record)

    def handle_event(self, event: Any) -> None:
        self.events.append(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"main"


async def test_events_and_requests_reach_the_part_of_the_same_name_alone() -> None:
    story: list[tuple[Any, ...]] = []
    parts = [EchoPart("one", story), EchoPart("two", story)]
    main = EchoCoordinator("main", story)
    async with running_operator(main, parallelism=1, uses=parts) as world:
        task = await world.launch_operator(0, Main, ["question"])
        await world.settle()
        operator = task.operator
        assert isinstance(operator, Main)
        assert operator.events == ["from main"]
        assert task.outputs == [["main", "question"]]
        assert [part.driver.came for part in parts] == [[["from one", 1]], [["from two", 1]]]
        assert main.came == []


async def test_every_call_reaches_the_named_parts_in_their_order_then_the_main_one_and_close_comes_back() -> None:
    story: list[tuple[Any, ...]] = []
    parts = [EchoPart("one", story), EchoPart("two", story)]
    async with running_operator(EchoCoordinator("main", story), parallelism=1, mode="streaming", uses=parts) as world:
        task = await world.launch_operator(0, Main)
        await world.checkpoint()
        await world.kill(task)
        again = await world.launch_operator(0, Main)
        await world.cancel_job()
    order = ["one", "two", "main"]
    assert again.outcome == "killed"
    for method in dict.fromkeys(call[1] for call in story):
        calls = [call for call in story if call[1] == method]
        expected = order[::-1] if method == "close" else order
        assert [call[0] for call in calls] == expected * (len(calls) // 3), method
    assert ("two", "subtask_reset", 1) in story


async def test_each_part_and_each_operator_gets_its_own_state_back() -> None:
    story: list[tuple[Any, ...]] = []
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}
    async with running_operator(EchoCoordinator("main", story), uses=[EchoPart("one", story)], **kept) as world:
        await world.launch_operator(0, Main)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    story.clear()
    part = EchoPart("one", story)
    async with running_operator(
        EchoCoordinator("main", story), uses=[EchoPart("new", story), part], restored=restored, **kept
    ) as world:
        task = await world.launch_operator(0, Main)
        assert isinstance(task.operator, Main)
        assert task.operator.restored == b"main"
    assert story[:3] == [
        ("new", "reset_to_checkpoint", 1, None),
        ("one", "reset_to_checkpoint", 1, b"state of one"),
        ("main", "reset_to_checkpoint", 1, b"state of main"),
    ]
    assert part.driver.came == [["from one", 2]], "it goes on counting"


async def test_a_restored_request_is_shown_to_the_one_that_had_asked() -> None:  # H73
    story: list[tuple[Any, ...]] = []
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}
    async with running_operator(EchoCoordinator("main", story), uses=[EchoPart("one", story)], **kept) as world:
        await world.launch_operator(0, Main)
        await world.checkpoint()
        restored = with_held_requests(world.checkpoints[-1], "of one", part="one")
        restored = with_held_requests(restored, "of main")
    seen: dict[str, Any] = {}

    class Seeing(Main):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            seen["main"] = context.restored_requests

    class SeeingEcho(Echo):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            seen["one"] = context.restored_requests

    part = EchoPart("one", story, task_part=SeeingEcho)
    async with running_operator(EchoCoordinator("main", story), uses=[part], restored=restored, **kept) as world:
        await world.launch_operator(0, Seeing)
    assert seen == {"main": ("of main",), "one": ("of one",)}


async def test_states_of_several_subtasks_are_merged_part_by_part() -> None:
    story: list[tuple[Any, ...]] = []

    class Merging(Main):
        counts_records = False

        def merge_states(self, states: dict[int, bytes]) -> bytes:
            return b"+".join(states.values())

    async with running_operator(parallelism=2, mode="streaming", uses=[EchoPart("one", story)]) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, Merging)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    part = EchoPart("one", story)
    async with running_operator(parallelism=1, mode="streaming", uses=[part], restored=restored) as world:
        task = await world.launch_operator(0, Merging)
        assert isinstance(task.operator, Merging)
        assert task.operator.restored == b"main+main"
    assert part.driver.came == [["from one", 3]]


async def test_a_checkpoint_with_the_state_of_a_part_that_is_gone_is_refused() -> None:
    story: list[tuple[Any, ...]] = []
    async with running_operator(parallelism=1, mode="streaming", uses=[EchoPart("one", story)]) as world:
        await world.launch_operator(0, Main)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    with pytest.raises(LocalProtocolError, match="a state of 'one', which this operator does not use"):
        async with running_operator(parallelism=1, mode="streaming", uses=[EchoPart("two", story)], restored=restored):
            pass


async def test_a_failure_in_a_part_fails_the_job_and_names_the_part() -> None:
    story: list[tuple[Any, ...]] = []
    part = EchoPart("one", story, raises_in="subtask_ready")
    async with running_operator(RecordingCoordinator(), parallelism=1, uses=[part]) as world:
        await world.launch_operator(0, Main)
        assert [str(error) for error in world.failures] == ["subtask_ready of one"]
        assert world.failures[0].__notes__ == ["in the part 'one' of the operator"]


async def test_the_coordinator_of_a_part_that_returns_no_bytes_is_named_in_the_reason() -> None:
    class Forgetful(EchoCoordinator):
        async def checkpoint_coordinator(self, checkpoint_id: int) -> Any:
            return {"sold": 1}

    part = EchoPart("one", [])
    part.driver = Forgetful("one", [])
    async with running_operator(RecordingCoordinator(), parallelism=1, uses=[part]) as world:
        await world.launch_operator(0, Main)
        with pytest.raises(CheckpointFailed, match="checkpoint_coordinator of 'one' returned dict, not bytes"):
            await world.checkpoint()


async def test_a_coordinator_that_is_built_anew_for_each_run_is_one_part_among_others() -> None:
    story: list[tuple[Any, ...]] = []
    part = EchoPart("one", story)
    async with running_operator(partial(EchoCoordinator, "main", story), parallelism=1, uses=[part]) as world:
        for _ in range(2):
            await world.launch_operator(0, Main, ["question"])
            await world.settle()
    assert part.driver.came == [["from one", 1], ["from one", 1]]
    assert len([call for call in story if call[:2] == ("main", "start")]) == 2


def test_a_chain_without_states_of_its_parts_has_the_state_of_its_main_part() -> None:
    assert join_states(b"main", {"one": b"", "two": b""}) == b"main"
    assert split_states(b"main", {"one"}) == (b"main", {})


@pytest.mark.parametrize("main", [b"", b"main", MAGIC, MAGIC + b"more"])
@pytest.mark.parametrize("parts", [{}, {"one": b"1"}, {"one": b"1", "zwei ü": bytes(1000)}])
def test_a_state_divides_into_the_states_that_it_was_made_of(main: bytes, parts: dict[str, bytes]) -> None:
    assert split_states(join_states(main, parts), parts) == (main, parts)


@pytest.mark.parametrize("cut", [1, 5, 12, 20, 40])
def test_a_damaged_state_is_refused(cut: int) -> None:
    state = join_states(b"the main state", {"one": b"the state of one"})
    with pytest.raises(LocalProtocolError, match="damaged"):
        split_states(state[:-cut], {"one"})


async def test_two_parts_of_one_name_are_refused_and_so_is_what_is_not_a_part() -> None:
    story: list[tuple[Any, ...]] = []
    with pytest.raises(ValueError, match="have the name 'one'"):
        async with running_operator(uses=[EchoPart("one", story), EchoPart("one", story)]):
            pass
    with pytest.raises(TypeError, match="uses="):
        async with running_operator(uses=["one"]):  # type: ignore[list-item]
            pass
