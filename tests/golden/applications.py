# SPDX-License-Identifier: Apache-2.0

"""Applications whose checkpoints are kept in this folder, and what must hold when one goes on from such a file.

Each ends after some seconds of virtual time, and what it has done by then is exact only if nothing of its state was
lost: the items of a queue, counts and distributions, splits and positions of a source, and the stages of a chain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from headgate import CheckpointConfig, OperatorCoordinator, WorkQueue, chain
from headgate.testing import OperatorTask, World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from tests.primitives import histories, stage_histories
from tests.simulation.checkers import demand

SUBTASKS = 3
HELD = 1000
"""A request that a checkpoint of the third format holds. Its answer is dropped, but it is added."""
INPUT_ID = "all of it"
Steps = Callable[[World, list[OperatorTask]], Awaitable[None]]


def queue() -> dict[str, Any]:
    """A tree of items, crawled by tasks whose state is what they have found."""
    items = WorkQueue("tree", ["r"], in_hand=2)
    return {"uses": [items], "task": lambda: histories.Crawler(items, seed=1), "records": []}


def counts() -> dict[str, Any]:
    """Counters and a distribution over the same records in each subtask."""
    return {"uses": [], "task": histories.Counting, "records": range(histories.RECORDS)}


class Adding(OperatorCoordinator):
    """Adds what tasks ask, and answers with the sum."""

    def __init__(self) -> None:
        self.sum = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        self.sum += request
        return self.sum

    async def handle_client_request(self, request: Any) -> Any:
        return self.sum

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.sum = int(state or b"0")

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.sum


class Asking(histories.Counting):
    """Asks with each record once in its life."""

    def process(self, records: Iterator[int]) -> Iterator[int]:
        for record in records:
            if record < self.done:
                continue
            self.done = record + 1
            self.context.request(record)
            self.context.wait_for_event(timeout_s=0.1)
        yield self.done


def requests() -> dict[str, Any]:
    """Tasks that ask their coordinator."""
    return {"coordinator": Adding, "task": Asking, "records": range(histories.RECORDS)}


def stages(make_source: Callable[[], Any]) -> dict[str, Any]:
    """A source, a transform and a sink in one task; the transform sends events and asks its coordinator."""
    calls = stage_histories.Calls()
    given = chain(
        source=make_source(),
        double=(stage_histories.Counting(calls), partial(stage_histories.Doubling, calls)),
        sink=(stage_histories.Greeting(calls), partial(stage_histories.Keeping, calls)),
    )
    return {"coordinator": given, "task": None, "records": None}


APPLICATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "queue": queue,
    "counts": counts,
    "requests": requests,
    "chain": lambda: stages(stage_histories.simple_source),
    "hybrid-chain": lambda: stages(stage_histories.hybrid_source),
}

RESCALED = ("queue", "chain", "hybrid-chain")
"""Those whose tasks do not count records of one subtask."""


async def run(
    name: str, steps: Steps, *, restored: CompletedCheckpoint | None = None, parallelism: int = SUBTASKS, hold: bool
) -> list[CompletedCheckpoint]:
    """Run an application, whose tasks have started, through ``steps``; return its checkpoints."""
    settings = APPLICATIONS[name]()
    task, records = settings.pop("task"), settings.pop("records")
    checkpoint = CheckpointConfig(hold_events=hold, tolerated_failures=1000)
    async with running_operator(
        **settings, parallelism=parallelism, mode="streaming", checkpoint=checkpoint, restored=restored, seed=1
    ) as world:
        world.input_id = INPUT_ID
        given = () if task is None else (task, records)
        await steps(world, [await world.launch_operator(subtask, *given) for subtask in range(parallelism)])
        return list(world.checkpoints)


def files_of(subtask: int) -> StateHandle:
    """The handle of the files that a subtask has, in the checkpoints with files. Nothing stored these."""
    return StateHandle(f"7-1-ab/{subtask}-100-cd-manifest", 4711, bytes([subtask] * 32), 2**30, 12)


def with_files(checkpoint: CompletedCheckpoint) -> CompletedCheckpoint:
    """Return the checkpoint as it would be if each subtask had stored files beside the state that it has sent."""
    return _with_files(checkpoint, lambda subtask: (files_of(subtask), None))


def with_pieces(checkpoint: CompletedCheckpoint) -> CompletedCheckpoint:
    """The same if the files were divided into key groups, and each subtask had yet to restore some of these."""

    def piece(subtask: int) -> tuple[StateHandle, tuple[int, int]]:
        groups = KeyGroupRange(8 * subtask, 8 * subtask + 8, 128)
        return files_of(subtask)._replace(key_groups=groups), (8 * subtask + 1, 8 * subtask + 4)

    return _with_files(checkpoint, piece)


def without_files(checkpoint: CompletedCheckpoint) -> CompletedCheckpoint:
    return _with_files(checkpoint, lambda subtask: (None, None))


def _with_files(
    checkpoint: CompletedCheckpoint, files: Callable[[int], tuple[StateHandle | None, tuple[int, int] | None]]
) -> CompletedCheckpoint:
    parts = {
        subtask: replace(
            part, states=tuple(SubtaskState(one.subtask, one.state, *files(one.subtask)) for one in part.states)
        )
        for subtask, part in checkpoint.subtask_states.items()
    }
    return replace(checkpoint, subtask_states=parts)


async def goes_on(name: str, restored: CompletedCheckpoint, parallelism: int) -> None:
    """Run an application from a checkpoint to its end; what it has done in all its life is exact."""
    held = sum(item.is_request for part in restored.subtask_states.values() for item in part.held)

    async def to_the_end(world: World, tasks: list[OperatorTask]) -> None:
        await histories.until_done(world, tasks)
        demand(all(task.outcome == "success" for task in tasks), f"{name}: {[task.error for task in tasks]}")
        if name == "queue":
            demand(histories.results(tasks) == histories.names(histories.DEPTH), f"H100: {histories.results(tasks)}")
        elif name == "counts":
            histories.judge_counts(world, tasks)
        elif name == "requests":
            asked = await world.request("sum")
            expected = SUBTASKS * sum(range(histories.RECORDS)) + held * HELD
            demand(asked == expected, f"each record is asked with once: {asked}, not {expected}")
        else:
            await world.advance(1.0)

    completed = await run(name, to_the_end, restored=restored, parallelism=parallelism, hold=True)
    if "chain" in name:
        stage_histories.judge(completed[-1])
