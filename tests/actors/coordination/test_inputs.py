# SPDX-License-Identifier: Apache-2.0

"""An operator's runs, one after the other and over applications: whose records they take for seen (H174)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actors.coordination import OperatorCoordinator
from actors.coordination.engine.inputs import ActionId, BatchInput, CheckpointLabels, InputPosition, UnnamedInput
from headgate import CheckpointConfig, chain
from headgate.errors import InputRefused
from headgate.testing import OperatorTask, World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import HeldEvent, SubtaskState
from spark_bridge.primitives.chain import Chain
from spark_bridge.subtask.context import SubtaskContext
from spark_bridge.subtask.operator import FunctionOperator, SubtaskOperator
from tests.actors.coordination import operator_world


class Positions(SubtaskOperator):
    """Yields each record once: it skips those that its state counts, if they come again."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.seen = int(state) if state and context.input_begins_again else 0

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return next(iter(states.values()))

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for number, record in enumerate(records):
            if number >= self.seen:
                yield record
                self.seen += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.seen


class Resets(OperatorCoordinator):
    """Notes what it is told when it is reset."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes | None, bool | None]] = []
        self.context: Any = None

    async def start(self, context: Any) -> None:
        self.context = context

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.told.append((state, None if self.context is None else self.context.input_begins_again))

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"state"


STREAMING: dict[str, Any] = {"parallelism": 1, "mode": "streaming"}


async def run_well(world: World, records: list[Any]) -> list[Any]:
    task = await world.launch_operator(0, Positions, records)
    await world.advance(1.0)
    assert task.outcome == "success", world.failures
    return task.outputs


async def begin(world: World, *records: Any) -> OperatorTask:
    """A run that has processed these records, and a checkpoint that says so."""
    task = await world.launch_operator(0, Positions)
    task.feed(*records)
    await world.settle()
    await world.checkpoint()
    return task


async def test_a_run_after_one_that_ended_well_begins_at_its_first_record() -> None:  # H174
    async with running_operator(**STREAMING) as world:
        assert await run_well(world, [1, 2, 3]) == [1, 2, 3]
        assert await run_well(world, [4, 5, 6]) == [4, 5, 6]
        assert await run_well(world, [4, 5, 6]) == [4, 5, 6], "equal records are not the same input"
    async with running_operator(**STREAMING, restored=world.checkpoints[-1]) as world:
        assert await run_well(world, [7, 8]) == [7, 8]


async def test_a_run_after_an_interrupted_one_continues_it_in_the_same_application_and_in_another() -> None:  # H174
    async with running_operator(**STREAMING) as world:
        await run_well(world, [1, 2, 3])
        task = await begin(world, 4, 5)
        await world.kill(task)
        again = await world.launch_operator(0, Positions, [4, 5, 6])
        await world.advance(1.0)
        assert again.outputs == [6]
    async with running_operator(**STREAMING) as world:
        await begin(world, 4, 5)
    async with running_operator(**STREAMING, restored=world.checkpoints[-1]) as world:
        assert await run_well(world, [4, 5, 6]) == [6]


async def test_a_retry_before_the_first_checkpoint_of_its_run_skips_nothing() -> None:  # H174
    async with running_operator(**STREAMING) as world:
        await run_well(world, [1, 2, 3])
        task = await world.launch_operator(0, Positions)
        task.feed(4)
        await world.settle()
        await world.kill(task)
        again = await world.launch_operator(0, Positions, [4, 5, 6])
        await world.advance(1.0)
        assert again.outputs == [4, 5, 6]


async def test_an_input_with_a_name_is_skipped_if_it_was_finished_and_another_name_is_refused_if_not() -> None:  # H174
    async with running_operator(**STREAMING) as world:
        world.input_id = "monday"
        assert await run_well(world, [1, 2, 3]) == [1, 2, 3]
        assert await run_well(world, [1, 2, 3]) == [], "the scheduler has repeated it"
        world.input_id = "tuesday"
        await begin(world, 4, 5)
    async with running_operator(**STREAMING, restored=world.checkpoints[-1]) as world:
        world.input_id = "wednesday"
        await world.launch_operator(0, Positions, [7])
        await world.advance(1.0)
        (refusal,) = world.failures
        assert isinstance(refusal, InputRefused)
        assert "input_id='tuesday'" in str(refusal)
        world.input_id = "tuesday"
        assert await run_well(world, [4, 5, 6]) == [6], "the first way out"
    async with running_operator(**STREAMING, restored=world.checkpoints[0], restored_input="other") as world:
        world.input_id = "wednesday"
        assert await run_well(world, [7]) == [7], "the second one"


class Recognises(Positions):
    """Its state does not count Spark's records."""

    counts_records = False


class Unasking(Positions):
    """Skips as many records as its state counts, whosever records they were: the mistake of a new user."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.seen = int(state) if state else 0


class Seen(Unasking):
    """Skips what it has seen, wherever it comes: its state says so."""

    counts_records = False

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            yield record
            self.seen += 1


class Later(Unasking):
    """Asks in ``process``, after it has taken a record, and only if there is something to skip."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for number, record in enumerate(records):
            if number < self.seen and self.context.input_begins_again:
                continue
            yield record


def restored(context: SubtaskContext, state: bytes | None) -> int:
    return int(state) if state and context.input_begins_again else 0


class Elsewhere(Positions):
    """Asks outside of its class."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.seen = restored(context, state)


class Unrestored(Positions):
    """Keeps a state that it never restores."""

    seen = 0
    open = SubtaskOperator.open


class Started(Positions):
    """A stage whose outputs begin with the first record again."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        return records


class Total(Unasking):
    """Counts, over all inputs, what a source before it yields, and skips nothing."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.seen += 1
            yield record


class Source(Started):
    goes_on_after_restore = True
    counts_records = False


@pytest.mark.parametrize(
    ("operator", "refused"),
    [
        (Unasking, True),
        (chain(first=Started, then=Unasking), True),
        (Positions, False),
        (Later, False),
        (Elsewhere, False),
        (Seen, False),
        (Unrestored, False),
        (chain(first=Source, then=Total), False),
    ],
    ids=["unasking", "stage", "asking", "later", "elsewhere", "seen", "unrestored", "after-a-source"],
)
async def test_an_operator_that_may_skip_records_of_another_input_must_ask_whose_its_state_counts(
    operator: Any, refused: bool
) -> None:  # H174
    stages = operator if isinstance(operator, Chain) else Resets()
    made_of = None if stages is operator else operator
    async with running_operator(stages, **STREAMING) as world:
        world.input_id = "monday"
        task = await world.launch_operator(0, made_of)
        task.feed(1, 2, 3)
        await world.settle()
        await world.checkpoint()
        await world.kill(task)
        task = await world.launch_operator(0, made_of, [1, 2, 3, 4])
        await world.advance(1.0)
        assert task.outcome == "success", "the same input, for which a count is right"
    async with running_operator(stages, **STREAMING, restored=world.checkpoints[-1]) as world:
        world.input_id = "tuesday"
        task = await world.launch_operator(0, made_of, [])
        await world.advance(1.0)
        assert task.outcome == "success", "no record can be lost"
    async with running_operator(stages, **STREAMING, restored=world.checkpoints[-1]) as world:
        world.input_id = "wednesday"
        task = await world.launch_operator(0, made_of, [5, 6, 7])
        await world.advance(1.0)
        if not refused:
            assert (task.outcome, task.outputs) == ("success", [5, 6, 7])
            return
        assert isinstance(task.error, InputRefused)
        assert task.outputs == []
        for said in (
            "operator 'operator'",
            "Unasking.open()",
            "if state and context.input_begins_again else 0",
            "counts_records = False",
        ):
            assert said in str(task.error)


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_the_same_input_in_other_partitions_is_refused_if_records_are_counted(parallelism: int) -> None:  # H174
    async with running_operator(parallelism=2, mode="streaming") as world:
        world.input_id = "monday"
        await begin(world, 1, 2)
    settings: dict[str, Any] = {"parallelism": parallelism, "mode": "streaming", "restored": world.checkpoints[-1]}
    for input_id, made_of, refused in [
        ("monday", Positions, True),
        ("monday", Recognises, False),
        ("monday", lambda: FunctionOperator(list, False), False),
        ("tuesday", Positions, False),
    ]:
        said: Any = "other" if input_id == "tuesday" else None
        async with running_operator(**settings, restored_input=said) as world:
            world.input_id = input_id
            task = await world.launch_operator(parallelism - 1, made_of, [7, 8, 9])
            await world.advance(1.0)
            assert (task.outcome != "success") is refused, input_id
            assert task.outputs == [] if refused else task.outputs
            if refused:
                text = str(task.error)
                assert f"in {parallelism} partition" in text
                assert "it was in 2 partitions" in text
                for way_out in ("run it in 2 partitions", 'restored_input="other"', "counts_records = False"):
                    assert way_out in text


async def test_what_an_application_says_about_the_restored_input_holds_until_it_has_taken_a_checkpoint() -> (
    None
):  # H174
    restored = CompletedCheckpoint(7, 1, b"state", {})
    async with operator_world.running_operator(parallelism=1, restored=restored, restored_input="other") as world:
        for _ in range(2):
            (task,) = await world.running(0)
            assert not task.input_begins_again
            world.fail(task)
            world.end_run(succeeded=False)
            world.reset("again")
        (task,) = await world.running(0)
        await world.checkpoint()
        world.fail(task)
        world.end_run(succeeded=False)
        world.reset("again")
        (task,) = await world.running(0)
        assert task.input_begins_again
        assert not world.failures


@pytest.mark.parametrize("said", ["same", "other"])
async def test_what_was_said_outlives_a_checkpoint_that_began_before_the_first_run(said: Any) -> None:  # H174
    async with running_operator(**STREAMING) as world:
        await begin(world, 1, 2)
    async with running_operator(**STREAMING, restored=world.checkpoints[-1], restored_input=said) as world:
        answer = world.begin_checkpoint()
        await world.settle()
        assert answer.value is not None
        world.input_id = "tuesday"
        assert await run_well(world, [1, 2, 3]) == ([3] if said == "same" else [1, 2, 3])


@pytest.mark.parametrize(
    ("restored", "refused"),
    [
        (CompletedCheckpoint(7, 1, b"state"), True),
        (CompletedCheckpoint(7, 1, b"", {0: SubtaskSnapshot((SubtaskState(0, b"state"),))}), True),
        (
            CompletedCheckpoint(7, 1, b"", {0: SubtaskSnapshot((SubtaskState(0, b""),), (HeldEvent(3, b"\xa1r"),))}),
            True,
        ),
        (CompletedCheckpoint(7, 1, b"", {0: SubtaskSnapshot((SubtaskState(0, b""),))}), False),
        (CompletedCheckpoint(7, 1, b""), False),
    ],
)
async def test_a_checkpoint_of_an_earlier_release_is_refused_unless_it_holds_nothing(
    restored: CompletedCheckpoint, refused: bool
) -> None:  # H174
    labels = CheckpointLabels(restored)
    same, why = labels.run_begins("")
    assert bool(why) is refused
    assert not same


async def test_the_coordinator_knows_it_too_also_in_the_first_run_of_an_application() -> None:  # H174
    coordinator = Resets()
    async with running_operator(coordinator, **STREAMING) as world:
        await run_well(world, [1])
        await run_well(world, [2])
        assert coordinator.told == [(b"state", False)]
    after, coordinator = world.checkpoints[-1], Resets()
    async with running_operator(coordinator, **STREAMING, restored=after) as world:
        assert coordinator.told == [(b"state", None)]
        assert coordinator.context.input_begins_again
        await run_well(world, [3])
        assert coordinator.told[1:] == [(b"state", False)], "before the first subtask is ready"
    coordinator = Resets()
    async with running_operator(coordinator, **STREAMING, restored=after, restored_input="same") as world:
        await run_well(world, [3])
        assert coordinator.told == [(b"state", None)]


async def test_a_run_waits_until_the_last_output_of_the_previous_one_is_committed() -> None:  # H40
    written = anyio.Event()
    async with operator_world.running_operator(parallelism=1) as world:
        (task,) = await world.running(0)
        task.finish(state=b"last")
        await world.settle()
        world.on_store = operator_world.waiting_for(written)
        world.finish(task)
        world.end_run()
        world.reset("a second action, immediately")
        (second,) = await world.running(0)
        assert second.registered is None, "its reset would drop the final checkpoint"
        written.set()
        await world.settle()
        assert [checkpoint.label for checkpoint in world.stored] == ["run 1 of call - after 0: done"]
        assert second.restored_checkpoint_id == 1
        assert not second.input_begins_again


def test_the_runs_of_one_action_are_told_apart_also_when_it_is_called_again() -> None:  # H174
    labels = CheckpointLabels()
    first, again = str(ActionId("0" * 16)), str(ActionId("0" * 16, 1))
    assert labels.run_begins(first) == (False, "")
    _complete(labels, 1)
    labels.run_ended(True, True)
    _complete(labels, 2)
    assert labels.run_begins(first) == (False, ""), "its second job"
    assert labels.run_begins(again) == (True, ""), "called again before any checkpoint of the second job"
    assert _complete(labels, 3).endswith("done"), "what is done stays done while it is skipped"
    labels.run_ended(True, True)
    assert labels.run_begins(again) == (False, "")
    _complete(labels, 4)
    _same, why = labels.run_begins(str(ActionId("0" * 16, 2)))
    assert "belongs to a later run of the same action" in why
    other = CheckpointLabels(CompletedCheckpoint(4, 1, b"x", label=labels.completed))
    assert "was interrupted" in other.run_begins("")[1], "its first run is not the second one of the other application"


def test_no_unnamed_run_continues_one_that_failed_after_its_plain_action_had_returned() -> None:  # H174
    call = str(ActionId("0" * 16))
    for plain, job_succeeded in ((True, True), (True, False), (False, True)):
        labels = CheckpointLabels()
        labels.run_begins("" if plain else call)
        _complete(labels, 1)
        labels.run_ended(False, job_succeeded)
        for action in ("", str(ActionId("1" * 16))):
            same, why = labels.run_begins(action)
            assert same is not (plain and job_succeeded)
            assert ("its action has returned" in why) is (plain and job_succeeded)
        named = labels.run_begins(str(ActionId("1" * 16, 0, "day 2")))[1]
        assert "which was interrupted" in named


def test_a_run_that_returned_without_a_checkpoint_is_not_mistaken_for_the_next() -> None:  # H174
    labels = CheckpointLabels()
    labels.run_begins("")
    labels.run_ended(False, True)
    assert labels.run_begins("") == (False, "")
    _complete(labels, 1)
    labels.run_ended(False, False)
    assert labels.run_begins("") == (True, ""), "it was interrupted, and its action raised"


def test_an_adopted_batch_is_another_input_even_if_its_number_is_equal() -> None:  # H174
    restored = CompletedCheckpoint(4, 1, b"x", {}, "batch 0 of old: begun")
    for batch in (BatchInput("new", 0), BatchInput("new", 5)):
        labels = CheckpointLabels(restored)
        labels.announce(batch, adopted=True)
        assert labels.run_begins("") == (False, "")
        _complete(labels, 5)
        assert labels.run_begins("") == (True, ""), "and its own checkpoint is its own"


def test_a_batch_after_an_interrupted_run_is_refused_and_can_be_adopted() -> None:  # H174
    restored = CompletedCheckpoint(4, 1, b"x", {}, "run 1 of call - after 0: begun")
    for adopted in (False, True):
        labels = CheckpointLabels(restored)
        labels.announce(BatchInput("q", 0), adopted=adopted)
        same, why = labels.run_begins("")
        assert not same
        assert ("adopt=True" in why) is not adopted


def test_a_run_after_a_batch_is_none_of_its_query() -> None:  # H174
    labels = CheckpointLabels()
    labels.announce(BatchInput("q", 0), adopted=False)
    labels.run_begins("")
    _complete(labels, 1)
    labels.withdraw()
    assert "start its query again" in labels.run_begins("")[1]


def _run_well(labels: CheckpointLabels, action: str, checkpoint_id: int) -> None:
    assert labels.run_begins(action)[1] == ""
    labels.run_ended(True, True)
    _complete(labels, checkpoint_id)


def test_runs_between_the_batches_of_a_query_leave_what_its_last_batch_was() -> None:  # H174
    labels = CheckpointLabels()
    labels.announce(BatchInput("q", 0), adopted=False)
    _run_well(labels, "", 1)
    labels.withdraw()
    for number in (2, 3):
        _run_well(labels, str(ActionId("0" * 15 + str(number))), number)
    found = InputPosition.read(labels.completed)
    assert found is not None
    assert isinstance(found.input, UnnamedInput)
    assert str(found.batch) == "batch 0 of q: done"
    labels.announce(BatchInput("q", 1), adopted=False)
    _run_well(labels, "", 4)
    assert labels.completed == "batch 1 of q: done"


def test_the_names_of_finished_inputs_outlive_batches_and_runs_without_a_name() -> None:  # H174
    monday = str(ActionId("0" * 16, 0, "monday"))
    labels = CheckpointLabels()
    _run_well(labels, monday, 1)
    _run_well(labels, "", 2)
    labels.announce(BatchInput("q", 0), adopted=False)
    _run_well(labels, "", 3)
    labels.announce(BatchInput("q", 1), adopted=False)
    labels.done_without_run(BatchInput("q", 1))
    _complete(labels, 4)
    labels.withdraw()
    assert "input 'monday' is finished" in labels.run_begins(monday)[1]


def _complete(labels: CheckpointLabels, checkpoint_id: int) -> str:
    labels.see((checkpoint_id,))
    labels.complete(checkpoint_id)
    labels.see(())
    return labels.completed


async def test_in_every_history_of_days_all_records_appear_once() -> None:  # H174
    """Random days: each run may be interrupted several times, in this application or with it, and is then repeated."""
    seed = random.randrange(2**32)
    print("seed", seed)
    for history in range(12):
        await _days(random.Random(seed + history))


async def _days(chance: random.Random) -> None:
    restored: CompletedCheckpoint | None = None
    named = chance.random() < 0.5
    outputs: list[int] = []
    expected: list[int] = []
    for day in range(5):
        records = [100 * day + number for number in range(chance.randrange(1, 6))]
        expected += records
        done = False
        while not done:
            checkpoint = CheckpointConfig(interval_s=chance.choice([None, 1.0]))
            async with running_operator(**STREAMING, restored=restored, checkpoint=checkpoint) as world:
                world.input_id = f"day {day}" if named else None
                done = await _one_application(world, chance, records, outputs)
                restored = world.checkpoints[-1] if world.checkpoints else restored
    assert outputs == expected


async def _one_application(world: World, chance: random.Random, records: list[int], outputs: list[int]) -> bool:
    """Return whether the day's run ended well. ``outputs`` gets what a complete checkpoint covers, as from a sink."""
    task = await world.launch_operator(0, Positions)
    for place, record in enumerate(records):
        task.feed(record)
        await world.settle()
        if chance.random() < 0.3:
            await world.checkpoint()
            _cover(world, records, outputs)
        if chance.random() < 0.2:
            if chance.random() < 0.5:
                return False
            await world.kill(task)
            task = await world.launch_operator(0, Positions)
            task.feed(*records[: place + 1])
            await world.settle()
    task.end_records()
    await world.advance(1.0)
    assert task.outcome == "success"
    _cover(world, records, outputs)
    return True


def _cover(world: World, records: list[int], outputs: list[int]) -> None:
    (state,) = world.checkpoints[-1].subtask_states[0].states
    before = [one for one in outputs if one not in records]
    outputs[:] = [*before, *records[: int(state.state)]]


class Other(SubtaskOperator):
    """Has a state that the operator before it cannot read."""

    counts_records = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.names = json.loads(state) if state else []

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        self.names += [*records]
        yield from self.names

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return json.dumps(self.names).encode()


async def test_a_state_that_open_cannot_read_is_named_with_its_checkpoint_and_the_way_out() -> None:
    async with running_operator(Resets(), **STREAMING) as world:
        task = await world.launch_operator(0, Other, ["monday"])
        await world.advance(1.0)
        assert task.outcome == "success"
    async with running_operator(Resets(), **STREAMING, restored=world.checkpoints[-1], restored_input="same") as world:
        task = await world.launch_operator(0, Positions, ["monday"])
        assert isinstance(task.error, ValueError)
        (note,) = task.error.__notes__
        assert "Positions.open() was given a state of checkpoint" in note
        assert 'coordinate(..., restore="none")' in note
