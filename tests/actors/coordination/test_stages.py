# SPDX-License-Identifier: Apache-2.0

"""A chain of stages behaves as one operator, and each stage as if it were alone (H80)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actors.coordination import CoordinatorContext, OperatorCoordinator, Reply, ResetNotSupported, SubtaskGateway
from headgate import CheckpointConfig, FailureReason, SubtaskContext, SubtaskOperator, WorkQueue, chain
from headgate.errors import CheckpointDeclinedByOperator, CheckpointFailed
from headgate.testing import running_operator
from protocol.errors import LocalProtocolError
from protocol.parts import split_states
from protocol.wire.codec import decode_event, encode_event
from spark_bridge.subtask.parts import COUNTERS

pytestmark = pytest.mark.anyio

Story = list[tuple[Any, ...]]
TOLERANT = CheckpointConfig(tolerated_failures=5)


class Teller(OperatorCoordinator):
    """Writes each call into the story of all stages; its state is its name and how many events it has had."""

    def __init__(self, name: str, story: Story, raises_in: str = "") -> None:
        self.name, self.story, self.raises_in = name, story, raises_in
        self.came: list[Any] = []

    def tell(self, method: str, *details: Any) -> None:
        self.story.append((self.name, method, *details))
        if method == self.raises_in:
            raise ArithmeticError(f"{method} of {self.name}")

    async def start(self, context: CoordinatorContext) -> None:
        self.tell("start")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came.append(event)
        self.tell("event", event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return [self.name, request]

    async def handle_client_request(self, request: Any) -> Any:
        return [self.name, request]

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.tell("subtask_ready")
        await gateway.send_event(f"for {self.name}")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.tell("subtask_failed")

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.tell("subtask_reset", checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.tell("checkpoint_coordinator")
        return f"{self.name} {len(self.came)}".encode()

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.tell("notify_checkpoint_complete", checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.tell("notify_checkpoint_aborted", checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.tell("reset_to_checkpoint", checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.tell("run_ended", succeeded)

    async def close(self) -> None:
        self.tell("close")


class Stage(SubtaskOperator):
    """Passes records on with its letter, counts them, and tells its coordinator of each."""

    counts_records = False  # it skips none

    def __init__(self, letter: str, story: Story | None = None, copies: int = 1) -> None:
        self.letter, self.copies = letter, copies
        self.story: Story = [] if story is None else story
        self.count = 0
        self.events: list[Any] = []
        self.restored: bytes | None = None

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context, self.restored = context, state
        self.count = decode_event(state)[0] if state else 0
        self.story.append((self.letter, "open"))

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return encode_event([sum(decode_event(state)[0] for state in states.values())])

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.count += 1
            self.context.send_event([self.letter, record])
            for copy in range(self.copies):
                yield f"{record}{self.letter}{copy or ''}"

    def handle_event(self, event: Any) -> None:
        self.events.append(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        self.story.append((self.letter, "snapshot"))
        return encode_event([self.count])

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.story.append((self.letter, "complete"))

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.story.append((self.letter, "aborted"))

    def close(self) -> None:
        self.story.append((self.letter, "close"))


def three(story: Story, tasks: Story | None = None, raising: str = "") -> Any:
    return chain(
        source=(Teller("source", story, "subtask_ready" if raising == "source" else ""), partial(Stage, "a", tasks)),
        transform=(
            Teller("transform", story, "subtask_ready" if raising == "transform" else ""),
            partial(Stage, "b", tasks),
        ),
        sink=(Teller("sink", story, "subtask_ready" if raising == "sink" else ""), partial(Stage, "c", tasks)),
    )


async def test_records_flow_from_stage_to_stage_and_events_reach_the_stage_of_the_same_name_alone() -> None:
    story: Story = []
    async with running_operator(three(story), parallelism=1) as world:
        task = await world.launch_operator(0, records=["1", "2"])
        await world.settle()
        assert task.outputs == ["1abc", "2abc"]
        stages = [task.stages[name] for name in ("source", "transform", "sink")]
        assert [stage.events for stage in stages if isinstance(stage, Stage)] == [
            ["for source"],
            ["for transform"],
            ["for sink"],
        ]
    events = [(name, event) for name, method, *rest in story if method == "event" for event in rest]
    assert [event for name, event in events if name == "source"] == [["a", "1"], ["a", "2"]]
    assert [event for name, event in events if name == "transform"] == [["b", "1a"], ["b", "2a"]]
    assert [event for name, event in events if name == "sink"] == [["c", "1ab"], ["c", "2ab"]]


class Reader:
    """Outputs of a stage as some library may give them: an iterator that is to be closed."""

    def __init__(self, outputs: Iterable[Any], story: Story) -> None:
        self._outputs, self._story = iter(outputs), story

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._outputs)

    def close(self) -> None:
        self._story.append(("reader", "closed"))


FORMS: dict[str, Callable[[Iterator[Any], Story], Iterable[Any]]] = {
    "a list": lambda records, story: [f"{record}a" for record in records],
    "an iterator that cannot be closed": lambda records, story: map("{}a".format, records),
    "a generator": lambda records, story: (f"{record}a" for record in records),
    "one that is to be closed": lambda records, story: Reader((f"{record}a" for record in records), story),
}


@pytest.mark.parametrize("last_fails", [False, True], ids=["all is read", "the last stage fails"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "before another stage"])
@pytest.mark.parametrize("form", FORMS)
async def test_a_stage_may_return_its_outputs_in_any_form_and_what_is_to_be_closed_is(
    form: str, alone: bool, last_fails: bool
) -> None:
    story: Story = []

    class Returning(SubtaskOperator):
        def process(self, records: Iterator[Any]) -> Iterable[Any]:
            return FORMS[form](records, story)

    class Failing(SubtaskOperator):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                if last_fails:
                    raise ArithmeticError(record)
                yield record

    stages: dict[str, Any] = {"first": (Teller("first", []), Returning)}
    if not alone:
        stages["second"] = (Teller("second", []), Failing)
    async with running_operator(chain(**stages), parallelism=1) as world:
        task = await world.launch_operator(0, records=["1", "2"])
        await world.settle()
        fails = last_fails and not alone
        assert (task.outcome, task.outputs) == ("failed" if fails else "success", [] if fails else ["1a", "2a"])
    assert story == ([("reader", "closed")] if form == "one that is to be closed" else [])


async def test_a_request_is_answered_by_the_coordinator_of_its_stage() -> None:
    class Asking(Stage):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                yield self.context.request(record)

    story: Story = []
    stages = chain(
        first=(Teller("first", story), partial(Stage, "a")), second=(Teller("second", story), partial(Asking, "b"))
    )
    async with running_operator(stages, parallelism=1) as world:
        task = await world.launch_operator(0, records=["1"])
        await world.settle()
        assert task.outputs == [["second", "1a"]]
        assert await world.request("how?", part="first") == ["first", "how?"]
        with pytest.raises(LocalProtocolError, match="one of 'first', 'second'"):
            await world.request("how?")


async def test_every_call_reaches_the_stages_in_their_order_and_close_in_the_reverse_one() -> None:
    story: Story = []
    tasks: Story = []
    async with running_operator(three(story, tasks), parallelism=1, mode="streaming", checkpoint=TOLERANT) as world:
        task = await world.launch_operator(0)
        await world.checkpoint()
        world.storage_error = OSError("full")
        with pytest.raises(CheckpointFailed):
            await world.checkpoint()
        world.storage_error = None
        await world.kill(task)
        again = await world.launch_operator(0)
        again.end_records()
        await world.settle()
        await world.launch_operator(0)
        await world.cancel_job()
    order = ["source", "transform", "sink"]
    methods = dict.fromkeys(call[1] for call in story)
    assert {"notify_checkpoint_aborted", "subtask_failed", "subtask_reset", "reset_to_checkpoint"} <= set(methods)
    for method in methods:
        calls = [call[0] for call in story if call[1] == method]
        assert calls == (order[::-1] if method == "close" else order) * (len(calls) // 3), method
    for method in ("open", "snapshot", "complete", "aborted"):
        letters = [call[0] for call in tasks if call[1] == method]
        assert letters == list("abc") * (len(letters) // 3), method
        assert letters
    assert [call[0] for call in tasks if call[1] == "close"][:3] == list("cba")


async def test_each_stage_gets_its_own_state_back_also_after_a_reset_of_its_subtask_alone() -> None:
    story: Story = []
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}
    async with running_operator(three(story), **kept) as world:
        task = await world.launch_operator(0)
        task.feed("1", "2")
        await world.settle()
        await world.checkpoint()
        task.feed("3")
        await world.settle()
        await world.kill(task)
        again = await world.retry(task)
        assert [counted(again, name) for name in ("source", "transform", "sink")] == [2, 2, 2]
        restored = world.checkpoints[-1]
    assert ("sink", "subtask_reset", 1) in story
    story.clear()
    async with running_operator(three(story), restored=restored, **kept) as world:
        task = await world.launch_operator(0)
        assert [counted(task, name) for name in ("source", "transform", "sink")] == [2, 2, 2]
    assert story[:3] == [
        ("source", "reset_to_checkpoint", 1, b"source 2"),
        ("transform", "reset_to_checkpoint", 1, b"transform 2"),
        ("sink", "reset_to_checkpoint", 1, b"sink 2"),
    ]


async def test_an_empty_state_of_a_stage_is_restored_as_an_empty_state() -> None:
    class Silent(Stage):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b""

    class SilentTeller(Teller):
        async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
            return b""

    story: Story = []
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}
    stages = chain(only=(SilentTeller("only", story), partial(Silent, "a")))
    async with running_operator(stages, **kept) as world:
        await world.launch_operator(0)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    async with running_operator(stages, restored=restored, **kept) as world:
        task = await world.launch_operator(0)
        stage = task.stages["only"]
        assert isinstance(stage, Stage)
        assert stage.restored == b""
    assert ("only", "reset_to_checkpoint", 1, b"") in story


@pytest.mark.parametrize("parallelism", [1, 2, 4])
async def test_a_chain_is_rescaled_stage_by_stage(parallelism: int) -> None:
    async with running_operator(three([]), parallelism=2, mode="streaming") as world:
        for subtask in range(2):
            task = await world.launch_operator(subtask)
            task.feed(*"12345"[: subtask + 2])
            await world.settle()
        await world.settle()
        await world.checkpoint()
        restored = world.checkpoints[-1]
    async with running_operator(three([]), parallelism=parallelism, mode="streaming", restored=restored) as world:
        tasks = [await world.launch_operator(subtask) for subtask in range(parallelism)]
        for name in ("source", "transform", "sink"):
            assert sum(counted(task, name) for task in tasks) == 5, name


async def test_a_job_that_fails_resets_all_stages_to_the_checkpoint() -> None:
    story: Story = []
    async with running_operator(three(story), parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        task.feed("1")
        await world.settle()
        await world.checkpoint()
        await world.cancel_job()
        story.clear()
        again = await world.launch_operator(0)
        assert [counted(again, name) for name in ("source", "transform", "sink")] == [1, 1, 1]
    resets = [call for call in story if call[1] == "reset_to_checkpoint"]
    assert resets == [
        (name, "reset_to_checkpoint", 1, f"{name} 1".encode()) for name in ("source", "transform", "sink")
    ]
    assert not [call for call in story if call[1] == "subtask_reset"]


async def test_the_final_checkpoint_has_the_last_state_of_every_stage() -> None:
    story: Story = []
    async with running_operator(three(story), parallelism=1, mode="streaming") as world:
        await world.launch_operator(0, records=["1", "2", "3"])
        await world.settle()
        restored = world.checkpoints[-1]
    async with running_operator(three([]), parallelism=1, mode="streaming", restored=restored) as world:
        task = await world.launch_operator(0)
        assert [counted(task, name) for name in ("source", "transform", "sink")] == [3, 3, 3]


@pytest.mark.parametrize("stage", ["source", "transform", "sink"])
async def test_a_failure_of_one_coordinator_fails_the_chain_and_names_the_stage(stage: str) -> None:
    story: Story = []
    async with running_operator(three(story, raising=stage), parallelism=1) as world:
        await world.launch_operator(0)
        assert [str(error) for error in world.failures] == [f"subtask_ready of {stage}"]
        assert world.failures[0].__notes__ == [f"in the part {stage!r} of the operator"]


@pytest.mark.parametrize("stage", ["source", "transform", "sink"])
async def test_a_failure_of_one_operator_fails_the_task_and_names_the_stage(stage: str) -> None:
    def failing(records: Iterator[int]) -> Iterator[float]:
        for record in records:
            yield 1 / record

    stages: dict[str, Any] = {name: lambda records: records for name in ("source", "transform", "sink")}
    async with running_operator(chain(**{**stages, stage: failing}), parallelism=1) as world:
        task = await world.launch_operator(0, records=[1, 0])
        await world.settle()
        assert isinstance(task.error, ZeroDivisionError)
        assert task.error.__notes__ == [f"in the stage {stage!r} of the chain"]


def counted(task: Any, name: str) -> int:
    stage = task.stages[name]
    assert isinstance(stage, Stage)
    return stage.count


class Twice(Stage):
    """Two outputs for each record; the second one after an event."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.count += 1
            yield record
            yield record


class Waiting(Stage):
    """Waits for an event before it passes on the first record that it gets."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            while "go" not in self.events:
                self.context.wait_for_event()
            self.count += 1
            yield record


class TwiceAnywhere(Twice):
    snapshot_anywhere = True


@pytest.mark.parametrize(("first", "declined"), [(Twice, True), (TwiceAnywhere, False)])
async def test_a_stage_that_waits_declines_a_checkpoint_while_one_before_it_is_in_the_middle_of_a_record(
    first: type[Stage], declined: bool
) -> None:
    class Going(OperatorCoordinator):
        async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
            self.gateway = gateway

    going = Going()
    stages = chain(first=partial(first, "a"), second=(going, partial(Waiting, "b")))
    async with running_operator(stages, parallelism=1, mode="streaming", checkpoint=TOLERANT) as world:
        task = await world.launch_operator(0)
        task.feed("1")
        await world.settle()
        if declined:
            with pytest.raises(CheckpointFailed, match="stage 'second' waits while a stage before it"):
                await world.checkpoint()
        else:
            await world.checkpoint()
        await world.drive(going.gateway.send_event("go"))
        await world.settle()
        assert task.outputs == ["1", "1"]
        await world.checkpoint()


@pytest.mark.parametrize("first", [Twice, TwiceAnywhere])
async def test_a_snapshot_between_stages_never_cuts_through_a_record(first: type[Stage]) -> None:
    """Whatever the moment of the barrier: what the first stage has counted, the second one has seen, all copies."""

    class Last(Stage):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for number, record in enumerate(records, 1):
                self.count = number
                if number == 3:
                    self.context.send_event("checkpoint!")  # in the middle of the second record
                yield record

    class Requesting(OperatorCoordinator):
        async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
            answers.append(world.begin_checkpoint())

    answers: list[Any] = []
    stages = chain(first=partial(first, "a"), last=(Requesting(), partial(Last, "b")))
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        task.feed("1", "2", "3")
        await world.settle()
        assert answers
        assert answers[0].value == 1
        restored = world.checkpoints[0]
    async with running_operator(stages, parallelism=1, mode="streaming", restored=restored) as world:
        task = await world.launch_operator(0)
        taken, seen = counted(task, "first"), counted(task, "last")
    if first is Twice:
        assert seen == 2 * taken
    else:
        assert 2 * taken - 1 <= seen <= 2 * taken


async def test_one_stage_that_declines_declines_for_all_and_all_are_told() -> None:
    class Declining(Stage):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            raise CheckpointDeclinedByOperator("not now")

    tasks: Story = []
    stages = chain(first=partial(Stage, "a", tasks), second=partial(Declining, "b", tasks))
    async with running_operator(stages, parallelism=1, mode="streaming", checkpoint=TOLERANT) as world:
        await world.launch_operator(0)
        with pytest.raises(CheckpointFailed, match="not now"):
            await world.checkpoint()
        await world.settle()
    assert [call for call in tasks if call[1] == "aborted"] == [("a", "aborted"), ("b", "aborted")]


async def test_an_instance_that_cannot_be_reset_is_refused_whichever_stage_it_has() -> None:
    class Kept(OperatorCoordinator):
        pass

    stages = chain(first=lambda records: records, second=(Kept(), partial(Stage, "b")))
    async with running_operator(stages, parallelism=1) as world:
        for _ in range(2):
            await world.launch_operator(0, records=["1"])
            await world.settle()
        assert [type(error) for error in world.failures] == [ResetNotSupported]
        assert "chain(second=(Kept, ...))" in str(world.failures[0])


async def test_a_stage_that_is_new_begins_without_a_state_and_one_that_is_gone_is_missed() -> None:
    async with running_operator(three([]), parallelism=1, mode="streaming") as world:
        await world.launch_operator(0)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    story: Story = []
    more = chain(
        **{
            name: (Teller(name, story), partial(Stage, letter))
            for name, letter in zip(("source", "new", "transform", "sink"), "anbc", strict=True)
        }
    )
    async with running_operator(more, parallelism=1, mode="streaming", restored=restored) as world:
        task = await world.launch_operator(0)
        stage = task.stages["new"]
        assert isinstance(stage, Stage)
        assert stage.restored is None
    assert ("new", "reset_to_checkpoint", 1, None) in story
    with pytest.raises(LocalProtocolError, match="a state of 'sink', 'source', 'transform'"):
        async with running_operator(
            chain(other=partial(Stage, "z")), parallelism=1, mode="streaming", restored=restored
        ):
            pass


async def test_a_checkpoint_of_an_operator_that_was_not_a_chain_is_refused() -> None:
    async with running_operator(partial(Teller, "alone", []), parallelism=1, mode="streaming") as world:
        await world.launch_operator(0, partial(Stage, "a"))
        await world.checkpoint()
        restored = world.checkpoints[-1]
    with pytest.raises(LocalProtocolError, match="that was not a chain"):
        async with running_operator(three([]), parallelism=1, mode="streaming", restored=restored):
            pass


class Pair:
    """What a ready source or sink looks like."""

    coordinator = OperatorCoordinator
    operator = partial(Stage, "p")


async def test_a_stage_can_be_a_pair_an_object_with_both_halves_or_an_operator_alone() -> None:
    stages = chain(
        pair=(OperatorCoordinator, partial(Stage, "a")), ready=Pair(), alone=partial(Stage, "b"), plain=reversed_text
    )
    assert repr(stages) == "<chain pair -> ready -> alone -> plain>"
    async with running_operator(stages, parallelism=1) as world:
        task = await world.launch_operator(0, records=["1"])
        await world.settle()
        assert task.outputs == ["bpa1"]


def reversed_text(records: Iterable[str]) -> Iterator[str]:
    for record in records:
        yield record[::-1]


async def coroutine(records: Any) -> None: ...


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ({}, ValueError),
        ({"headgate.source": Stage}, ValueError),
        ({"": Stage}, ValueError),
        ({"a": 1}, TypeError),
        ({"a": (OperatorCoordinator, Stage, 1)}, TypeError),
        ({"a": (OperatorCoordinator, 1)}, TypeError),
        ({"a": (OperatorCoordinator, OperatorCoordinator)}, TypeError),
        ({"a": Stage("a")}, TypeError),
        ({"a": coroutine}, TypeError),
    ],
)
def test_what_is_not_a_stage_is_refused_immediately(stages: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        chain(**stages)


async def test_a_stage_knows_whether_its_input_begins_again_after_a_restore() -> None:
    class GoingOn(Stage):
        goes_on_after_restore = True

    seen: dict[str, bool] = {}

    class Asking(Stage):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            seen[self.letter] = context.input_begins_again

    stages = chain(
        first=partial(Asking, "a"),
        second=partial(GoingOn, "b"),
        third=partial(Asking, "c"),
        fourth=partial(Asking, "d"),
    )
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        first = await world.launch_operator(0)
        assert seen == {"a": False, "c": False, "d": False}, "nothing is restored"
        await world.checkpoint()
        await world.kill(first)
        await world.launch_operator(0)
    assert seen == {"a": True, "c": False, "d": False}


class Early(OperatorCoordinator):
    """Its code outside of its methods sends and answers as soon as its own state is taken, before the others'."""

    def __init__(self) -> None:
        self.sent = 0
        self.reply = Reply()

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Reply:
        return self.reply

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.sent

    async def send(self) -> None:
        (gateway,) = self.context.gateways.gateways(0)
        gateway.send_event_nowait("nowait")
        await gateway.send_event("sent")
        await self.context.gateways.broadcast("broadcast")
        self.reply.answer("answer")
        self.sent = 4


class Slow(OperatorCoordinator):
    """Its snapshot waits until the part before it has sent."""

    def __init__(self, early: Early) -> None:
        self.early = early

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        if not self.early.sent:
            await self.early.send()
        return b""


class Hearing(SubtaskOperator):
    """Its state is what it has heard."""

    snapshot_anywhere = True

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.heard: list[Any] = decode_event(state) if state else []

    def handle_event(self, event: Any) -> None:
        self.heard.append(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        self.heard.append(self.context.request("?"))
        while len(self.heard) < 4:
            self.context.wait_for_event()
        yield from records

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(self.heard)


async def test_what_a_stage_sends_behind_its_own_snapshot_is_behind_the_cut_of_the_chain() -> None:  # H80, H41
    early = Early()
    stages = chain(first=(early, Hearing), second=(Slow(early), partial(Stage, "b")))
    async with running_operator(stages, parallelism=1, mode="streaming", checkpoint=TOLERANT) as world:
        task = await world.launch_operator(0, records=[])
        await world.settle()
        await world.checkpoint()
        await world.settle()
        first = world.checkpoints[0]
        _, of_coordinators = split_states(first.coordinator_state, {"first", "second", COUNTERS})
        ((_, state, *_),) = first.subtask_states[0].states
        _, of_task = split_states(state, {"first", "second", COUNTERS})
        assert (of_coordinators["first"], decode_event(of_task["first"])) == (b"0", [])
        (hearing, _) = task.stages.values()
        assert isinstance(hearing, Hearing)
        assert task.outcome == "success"
        assert sorted(hearing.heard) == ["answer", "broadcast", "nowait", "sent"]


class Ahead(OperatorCoordinator):
    """Its state is large. While it is joined to those of the parts, its code outside of its methods sends."""

    def __init__(self) -> None:
        self.snapshot_taken = anyio.Event()

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        context.run_in_background(self.send, handler=self.sent)

    async def send(self) -> None:
        await self.snapshot_taken.wait()
        for number in range(3):
            await self.context.gateways.broadcast(number)
            await anyio.lowlevel.checkpoint()

    async def sent(self, result: None, error: Exception | None) -> None:
        assert error is None

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.snapshot_taken.set()
        return bytes(2**26)


class Counting(SubtaskOperator):
    """Its state is how many events it has handled. It ends after three."""

    snapshot_anywhere = True

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.handled = 0

    def handle_event(self, event: Any) -> None:
        self.handled += 1

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while self.handled < 3:
            self.context.wait_for_event()
        yield from records

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.handled


async def test_what_is_sent_while_the_states_of_the_parts_are_joined_is_behind_the_cut() -> None:  # H80, H41
    queue = WorkQueue("items", ["one"])
    settings: Any = {"parallelism": 1, "mode": "streaming", "checkpoint": TOLERANT, "uses": [queue]}
    async with running_operator(Ahead(), **settings) as world:
        task = await world.launch_operator(0, Counting, records=[])
        await world.settle()
        await world.checkpoint()
        await world.settle()
        ((_, state, *_),) = world.checkpoints[0].subtask_states[0].states
        assert split_states(state, {"items", COUNTERS})[0] == b"0", "the state of the coordinator has sent nothing"
        assert task.outcome == "success"
