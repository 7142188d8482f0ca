# SPDX-License-Identifier: Apache-2.0

"""``check_bookkeeping`` finds what a coordinator forgets, says how, and plays it again (H151, H153)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headgate import CoordinatorContext, OperatorCoordinator, SubtaskContext, SubtaskOperator
from headgate.testing import Bookkeeping, World, check_bookkeeping

pytestmark = pytest.mark.anyio

RECORDS = range(8)


class Totals(OperatorCoordinator):
    """Keeps the sum of what each subtask has sent, and asks nobody back."""

    def __init__(self) -> None:
        self.totals: dict[int, int] = {}
        self.filed: dict[int, dict[int, int]] = {}

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.totals[subtask] = self.totals.get(subtask, 0) + event

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.filed[checkpoint_id] = dict(self.totals)
        return json.dumps(self.totals).encode()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.totals = {int(subtask): total for subtask, total in json.loads(state or b"{}").items()}
        self.filed = {checkpoint_id: dict(self.totals)}

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.totals.pop(subtask, None)
        if subtask in (filed := self.filed.get(checkpoint_id, {})):
            self.totals[subtask] = filed[subtask]


class Forgetful(Totals):
    """Does not roll back."""

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        pass


class OneRun(Totals):
    """Is ready for one run only."""

    over = False

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.over = succeeded

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if self.over:
            raise ValueError("a run was over before")


class Answering(Totals):
    """Answers every event, also those of a restored checkpoint whose sender is gone, and takes that for an error."""

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if subtask not in self.context.gateways.ready:
            raise LookupError(f"subtask {subtask} is not there")


class Adder(SubtaskOperator):
    """Sends each record once in its life, and yields how many."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.sent = int(state or b"0") if context.input_begins_again else 0

    def process(self, records: Iterator[int]) -> Iterator[int]:
        for record in records:
            if record >= self.sent:
                self.context.send_event(record)
                self.sent = record + 1
                self.context.wait_for_event(timeout_s=0.1)
        yield self.sent

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.sent


class Talking(Adder):
    """Needs nothing of its records, so it may run in any number of tasks."""

    counts_records = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context, self.sent = context, 0

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b""


def adding(make: type[Totals]) -> Bookkeeping:
    totals = make()
    return Bookkeeping(
        totals,
        Adder,
        records=RECORDS,
        expected=[len(RECORDS)] * 2,
        expected_later=[],
        view=lambda subtask: totals.totals.get(subtask, 0),
    )


async def test_a_coordinator_that_rolls_back_passes_in_both_modes() -> None:
    await check_bookkeeping(lambda: adding(Totals), mode="streaming", parallelism=[2])
    await check_bookkeeping(lambda: adding(Totals), mode="batch", parallelism=[2])


async def test_one_that_does_not_roll_back_is_found_with_the_shortest_history_and_its_seed() -> None:
    with pytest.raises(AssertionError) as found:
        await check_bookkeeping(lambda: adding(Forgetful), parallelism=[2], seed=100)
    text = str(found.value)
    assert "after a reset to" in text
    assert "of subtask" in text
    history = text.partition("The shortest history found that fails so:\n")[2].partition("\nPlay it again")[0]
    steps = [line for line in history.splitlines() if ", then" in line]
    assert 1 <= len(steps) <= 2, "a kill is enough"
    assert any("kill" in step or "lose" in step for step in steps)
    seed = int(text.rpartition("seed=")[2].rstrip(")"))
    with pytest.raises(AssertionError) as again:
        await check_bookkeeping(lambda: adding(Forgetful), parallelism=[2], histories=1, seed=seed)
    assert str(again.value) == text


async def test_one_that_needs_the_sender_of_a_restored_message_is_found() -> None:  # H151
    with pytest.raises(AssertionError, match=r"LookupError: subtask \d is not there") as found:
        await check_bookkeeping(
            lambda: Bookkeeping(Answering(), Talking, records=RECORDS, held=[("", 5)]), parallelism=[1, 3]
        )
    assert "restored with questions" in str(found.value)


@pytest.mark.parametrize("mode", ["streaming", "batch"])
async def test_one_that_is_wrong_in_its_second_run_is_found(mode: Any) -> None:
    with pytest.raises(AssertionError, match="a run was over before"):
        await check_bookkeeping(lambda: adding(OneRun), mode=mode, parallelism=[2])


async def test_what_the_judge_of_a_run_says_is_found() -> None:
    judged: list[Any] = []

    def judge(world: World, outputs: list[Any]) -> None:
        judged.append(outputs)
        raise AssertionError(f"judged after {world.now:g} s")

    with pytest.raises(AssertionError, match=r"judged after \d"):
        await check_bookkeeping(lambda: replace(adding(Totals), judge=judge), parallelism=[2], histories=1)
    assert judged[0] == [len(RECORDS)] * 2


async def test_what_does_not_end_and_what_is_doubled_is_found() -> None:
    def endless(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
        while context.now() < 1e9:
            context.wait_for_event(timeout_s=100.0)
        yield 1

    def twice(records: Iterator[int]) -> Iterator[int]:
        yield from [1, 1]

    def failing(records: Iterator[int]) -> Iterator[int]:
        raise KeyError("broken")

    for operator, text in (
        (endless, "the run does not end"),
        (twice, r"not every output counts once: these are too many: \[1\]"),
        (failing, "has failed: KeyError: 'broken'"),
    ):
        with pytest.raises(AssertionError, match=text):
            await check_bookkeeping(
                lambda operator=operator: Bookkeeping(operator=operator, expected=[1]),  # type: ignore[misc]
                parallelism=[1],
                histories=3,
            )
    with pytest.raises(AssertionError, match=r"these are missing: \[2\]"):
        await check_bookkeeping(lambda: Bookkeeping(operator=twice, expected=[1, 1, 2]), parallelism=[1], histories=1)
