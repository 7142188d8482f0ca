# SPDX-License-Identifier: Apache-2.0

"""The group in a simulated application: generations, collectives, and what members learn of losses (H102 to H109)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from headgate import Group, GroupMember, SubtaskContext
from headgate.errors import PeerLost, RequestFailed, TimedOut
from headgate.testing import OperatorTask, World, running_operator
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.group import Member
from spark_bridge.primitives.group import driver as driver_half
from spark_bridge.primitives.group.messages import Blob, Join, parse_request
from spark_bridge.subtask.parts import current_part
from tests.primitives.histories import group_history, passing_on, trained, training, until_done, with_held_requests

pytestmark = pytest.mark.anyio


def work(group: Group, body: Callable[[SubtaskContext, GroupMember], Any]) -> Any:
    """A task that runs ``body`` in each generation until it goes through, and returns its result."""

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                with group as member:
                    result = body(context, member)
            except PeerLost:
                continue
            yield result
            return

    return run


def results(tasks: list[OperatorTask]) -> list[Any]:
    """What Spark would return: the outputs of the attempts that have succeeded."""
    return [output for task in tasks if task.outcome == "success" for output in task.outputs]


async def launch_all(world: World, group: Group, body: Callable[[SubtaskContext, GroupMember], Any]) -> Any:
    return [await world.launch_operator(subtask, work(group, body), []) for subtask in range(world.parallelism)]


async def test_members_have_ranks_and_exchange_values() -> None:  # H102 H103
    group = Group("train", 3)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        member.barrier()
        place = [member.rank, member.world_size, member.generation, member.checkpoint, member.waiting]
        gathered = member.all_gather({"rank": member.rank, "odd": (1, None, b"x")})
        return place, gathered, member.broadcast(f"from {member.rank}"), member.broadcast(member.rank * 10, root=2)

    async with running_operator(parallelism=3, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    gathered = [{"rank": rank, "odd": [1, None, b"x"]} for rank in range(3)]
    for rank, (place, values, first, last) in enumerate(results(tasks)):
        assert place == [rank, 3, 1, None, 0]
        assert [{**one, "odd": list(one["odd"])} for one in values] == gathered
        assert (first, last) == ("from 0", 20)


async def test_each_survivor_raises_peer_lost_and_the_next_generation_goes_on_from_the_checkpoint() -> None:  # H104
    group = Group("train")
    seen: list[tuple[int, int, int | None]] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        seen.append((member.rank, member.generation, None if member.checkpoint is None else member.checkpoint.step))
        if member.generation == 1:
            member.save(3, b"three")
            if member.rank == 1:
                context.wait_for_event()  # until it is killed
            member.barrier()
        return member.checkpoint and member.checkpoint.blob

    async with running_operator(parallelism=3, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await world.kill(tasks[1])
        tasks.append(await world.retry(tasks[1], []))
        await until_done(world, tasks)
        assert group.checkpoint is not None
        assert (group.checkpoint.step, group.generation) == (3, 2)
    assert results(tasks) == [b"three"] * 3
    assert sorted(seen) == [(rank, number, step) for rank in range(3) for number, step in ((1, None), (2, 3))]


async def test_every_call_after_the_loss_was_told_raises() -> None:  # H104
    group = Group("train")
    reasons: list[str] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        if member.generation == 2:
            return None
        if member.rank == 1:
            context.wait_for_event()
        context.wait_for_event(timeout_s=1.0)  # it computes while the loss is told
        for _ in range(2):
            with pytest.raises(PeerLost) as lost:
                member.barrier()
            reasons.append(lost.value.reason)
        return member.broadcast()

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await world.lose_executor(tasks[1], "host is gone")
        tasks.append(await world.retry(tasks[1], []))
        await until_done(world, tasks)
    assert len(reasons) == 2
    assert set(reasons) == {"subtask 1 (attempt 0) has lost its connection"}


@pytest.mark.parametrize("seed", range(20))
async def test_a_disturbed_training_ends_with_the_model_of_an_undisturbed_one(seed: int) -> None:
    """H102 H103 H104 H105 H106, with kills, copies and lost executors at random."""
    await group_history(seed)


@pytest.mark.parametrize("seed", range(10))
async def test_an_elastic_training_goes_on_with_those_that_are_left_and_lets_the_retry_in(seed: int) -> None:  # H109
    chance = random.Random(seed)
    group = Group("train", min_size=1, max_size=3, start_wait_s=5.0)
    sizes: list[int] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        step = 0 if member.checkpoint is None else member.checkpoint.step
        while step < 30:
            context.wait_for_event(timeout_s=0.1)
            member.barrier()
            step += 1
            member.save(step, b"")
            sizes.append(member.world_size)
            if member.waiting:
                return None
        return step

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        done = None
        while done is None:
            try:
                with group as member:
                    done = body(context, member)
            except PeerLost:
                pass
        yield done

    async with running_operator(parallelism=3, uses=[group], seed=seed) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(3)]
        await world.advance(chance.choice([0.5, 1.0]))
        victim = chance.choice(tasks)
        await world.kill(victim)
        await world.advance(0.5)
        tasks.append(await world.retry(victim, []))
        await until_done(world, tasks)
    assert results(tasks) == [30] * 3, f"seed {seed}"
    changes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert changes == [3, 2, 3], f"seed {seed}"


async def test_one_that_is_lost_after_the_last_step_ends_alone() -> None:  # H106
    group = Group("train")

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        yield from training(group)(context, records)
        if context.subtask == 1 and context.attempt == 0:
            context.wait_for_event()

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await world.advance(5.0)
        assert [task.outcome for task in tasks] == ["success", ""]
        await world.kill(tasks[1])
        tasks.append(await world.retry(tasks[1], []))
        await until_done(world, tasks)
    assert results(tasks) == [trained(2)] * 2


async def test_one_that_is_left_over_without_the_last_step_is_told_why_it_cannot_call() -> None:  # H106
    group = Group("train")

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with group as member:
            member.barrier()
        if context.subtask == 1 and context.attempt == 0:
            context.wait_for_event()
        yield None

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await world.advance(1.0)
        await world.kill(tasks[1])
        retry = await world.retry(tasks[1], [])
        await world.advance(1.0)
    assert isinstance(retry.error, RequestFailed)
    assert "the other tasks of the group have finished" in str(retry.error)


async def test_calls_that_differ_fail_in_all_members() -> None:  # H103
    group = Group("train")

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with group as member:
            if member.rank:
                member.barrier()
            member.all_gather(1)
            yield None

    async with running_operator(parallelism=2, uses=[group], attempts_max=1) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await world.advance(1.0)
    assert any(
        isinstance(task.error, RequestFailed)
        and "rank 0 calls all_gather(), subtask 1 (attempt 0) calls barrier()" in str(task.error)
        for task in tasks
    )


async def test_an_error_of_a_member_reaches_the_others_as_peer_lost() -> None:  # H104
    group = Group("train")
    reasons: list[str] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        try:
            with group as member:
                if member.rank and context.attempt == 0:
                    raise ValueError("a bad row")
                member.barrier()
        except PeerLost as lost:
            reasons.append(lost.reason)
            with group as member:
                member.barrier()
        yield None

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await world.advance(1.0)
        tasks.append(await world.retry(tasks[1], []))
        await until_done(world, tasks)
    assert reasons == ["subtask 1 (attempt 0) left with an error: ValueError: a bad row"]


async def test_waiting_for_too_few_tasks_ends_with_a_text_that_names_the_slots() -> None:  # H48
    group = Group("train", timeout_s=20.0)

    async with running_operator(parallelism=2, uses=[group]) as world:
        task = await world.launch_operator(0, training(group), [])
        await world.advance(21.0)
        assert isinstance(task.error, TimedOut)
        assert "check that Spark has a slot for each" in str(task.error)
        tasks = [await world.retry(task, []), await world.launch_operator(1, training(group), [])]
        await until_done(world, tasks)
    assert results(tasks) == [trained(2)] * 2


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (1000, 201)])
async def test_all_reduce_gives_all_members_the_same_bits_in_the_order_of_ranks(
    op: Any, shape: tuple[int, ...]
) -> None:  # H108
    group = Group("train")
    given = [np.random.default_rng(rank).normal(size=shape) for rank in range(3)]

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        return member.all_reduce(given[member.rank], op)

    async with running_operator(parallelism=3, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    function = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    expected = function(function(given[0], given[1]), given[2])
    for result in results(tasks):
        assert result.shape == shape
        assert result.tobytes() == expected.tobytes()


async def test_all_reduce_keeps_the_dtype_and_refuses_what_it_cannot_add_up() -> None:  # H108
    group = Group("train", 1)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        for wrong in (np.array(["a"]), np.array([None])):
            with pytest.raises(TypeError, match="arrays of numbers"):
                member.all_reduce(wrong)
        with pytest.raises(ValueError, match="op must be 'sum', 'prod', 'max' or 'min', not 'mean'"):
            member.all_reduce([1.0], op=cast("Any", "mean"))
        array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
        return array, member.all_reduce(array)

    async with running_operator(parallelism=1, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    ((given, result),) = results(tasks)
    assert result.dtype == np.float32
    assert (result == given).all()


async def test_arrays_of_different_shapes_fail_in_all_members() -> None:  # H103
    group = Group("train")

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        return member.all_reduce(np.zeros(2 + member.rank))

    async with running_operator(parallelism=2, uses=[group], attempts_max=1) as world:
        tasks = await launch_all(world, group, body)
        await world.advance(1.0)
    assert any("calls all_reduce(float64[3], 'sum')" in str(task.error) for task in tasks)


async def test_a_task_that_gave_up_waiting_may_join_again() -> None:  # H102
    group = Group("train", timeout_s=5.0)

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for _ in range(3):
            try:
                with group as member:
                    member.barrier()
                    yield member.rank
                    return
            except TimedOut:
                pass

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(0, run, [])]
        await world.advance(7.0)
        tasks.append(await world.launch_operator(1, run, []))
        await until_done(world, tasks)
    assert results(tasks) == [0, 1]


@pytest.mark.parametrize("waits_for", ["barrier", "all_gather", "broadcast", "save", "all_reduce"])
async def test_who_comes_after_the_others_have_given_up_is_told_and_all_go_on(waits_for: str) -> None:
    """H104 H176: a call that timed out takes part in no round, even if its member stays inside its block."""
    group = Group("train", timeout_s=5.0)
    calls: dict[str, Callable[[GroupMember], Any]] = {
        "barrier": GroupMember.barrier,
        "all_gather": lambda member: member.all_gather(1),
        "broadcast": lambda member: member.broadcast(1, root=0),
        "save": lambda member: member.save(1, b"one"),
        "all_reduce": lambda member: member.all_reduce(np.zeros(3)),
    }
    lost: list[str] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        is_late = context.subtask == 1
        try:
            with group as member:
                if is_late:
                    context.sleep(8.0)  # it reads a large block of data
                try:
                    calls[waits_for](member)
                except TimedOut:
                    context.sleep(6.0)  # and stays inside, which must not deceive the late one
        except PeerLost as error:
            lost.append(error.reason)
        with group as member:
            calls[waits_for](member)
            yield member.generation

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await until_done(world, tasks)
    assert lost == ["subtask 0 (attempt 0) has given up waiting for the others"]
    assert results(tasks) == [2, 2]


@pytest.mark.parametrize("tasks_more", [0, 1, 3])
async def test_an_elastic_training_with_spare_tasks_forms_one_generation(tasks_more: int) -> None:  # H109
    group = Group("train", min_size=2, max_size=3, start_wait_s=2.0)
    saved: set[tuple[int, int]] = set()

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        step = 0
        while step < 20:
            with group as member:
                step = 0 if member.checkpoint is None else member.checkpoint.step
                while step < 20:
                    step += 1
                    member.save(step, b"")
                    saved.add((member.generation, member.world_size))
                    context.sleep(0.1)
                    if member.waiting:  # as the documentation says
                        break
        yield step

    async with running_operator(parallelism=3 + tasks_more, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(3 + tasks_more)]
        await until_done(world, tasks)
    assert results(tasks) == [20] * len(tasks)
    assert saved == {(1, 3)}


async def test_large_blobs_travel_in_pieces() -> None:  # H105
    group = Group("train", 1)
    blob = random.Random(1).randbytes(700_001)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        if member.checkpoint is None:
            member.save(1, blob)
            context.wait_for_event()
        return member.checkpoint and member.checkpoint.blob

    async with running_operator(parallelism=1, uses=[group]) as world:
        (task,) = await launch_all(world, group, body)
        await world.kill(task)
        tasks = [task, await world.retry(task, [])]
        await until_done(world, tasks)
    assert results(tasks) == [blob]


async def test_a_blob_above_the_limit_fails_the_job_and_says_where_to_put_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H105
    monkeypatch.setattr(driver_half, "BLOB_BYTES_MAX", 1000)
    group = Group("train", 1)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        member.save(1, bytes(1000))
        member.save(2, bytes(1001))

    async with running_operator(parallelism=1, uses=[group]) as world:
        await launch_all(world, group, body)
        await world.advance(1.0)
        (failure,) = map(str, world.failures)
    assert "the blob of a checkpoint has 1001 bytes, and at most 1000 are allowed: store it elsewhere" in failure
    assert group.checkpoint is not None
    assert (group.checkpoint.step, len(group.checkpoint.blob)) == (1, 1000)


@pytest.mark.parametrize("how", ["is lost", "finishes", "leaves"])
async def test_the_blob_of_a_member_that_is_gone_is_not_kept_in_memory(how: str) -> None:  # H105
    group = Group("train")

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        group.__enter__()
        if context.subtask == 0:
            current_part("group", "train").context.send_event(Blob(1, 0, 3, b"one").as_event())
        context.sleep(1.0)
        if how == "leaves":
            group.__exit__(None, None, None)
        while how != "finishes":
            context.wait_for_event()
        yield None

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        assert group._latest is not None
        await world.advance(0.5)
        assert list(group._latest._blobs) == [Member(0, 0)]
        if how == "is lost":
            await world.kill(tasks[0])
        await world.advance(1.0)
        assert group._latest._blobs == {}


def sending(group: Group, *events: Any) -> Callable[[SubtaskContext, Iterator[Any]], Iterator[Any]]:
    """A task that enters the group, and sends these events if it is subtask 0."""

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        group.__enter__()
        if context.subtask == 0:
            for event in events:
                current_part("group", "train").context.send_event(event)
        yield from iter(context.wait_for_event, "the end")

    return run


def kept_of(group: Group) -> int:
    assert group._latest is not None
    return sum(len(blob) for _, blob in group._latest._blobs.values())


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 1, b"ab")],
        [(0, 3, b"ab"), (2, 3, b"cd")],
        [(0, 9, b"ab"), (1, 9, b"cd")],
        [(0, 9, b"ab"), (4, 9, b"cd")],
        [(0, 9, b"ab"), (-2, 9, b"cd")],
        [(5, 9, b"ab")],
        [(0, 1 << 40, b"ab")],
        [(1 << 40, 1, b"ab")],
    ],
    ids=repr,
)
async def test_pieces_of_a_blob_that_do_not_follow_each_other_fail_the_job(pieces: list[Any]) -> None:  # H157
    """What counts is what has come, not the size that the member claims."""
    group = Group("train")
    hostile = sending(group, *(Blob(1, *piece).as_event() for piece in pieces))
    async with running_operator(parallelism=2, uses=[group]) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, hostile, [])
        await world.advance(1.0)
        (failure,) = map(str, world.failures)
        assert ("must follow each other" in failure) or ("at most 1073741824 are allowed" in failure)
        assert kept_of(group) <= 4


async def test_only_rank_0_of_the_current_generation_can_make_the_driver_keep_a_blob() -> None:  # H157
    group = Group("train")
    kept: list[int] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for generation in (0, 1, 2):  # before it is a member
            current_part("group", "train").context.send_event(Blob(generation, 0, 1000, bytes(1000)).as_event())
        context.sleep(0.5)
        group.__enter__()
        for generation in (0, 1, 2, 1):
            current_part("group", "train").context.send_event(Blob(generation, 0, 1000, bytes(1000)).as_event())
        yield from iter(context.wait_for_event, "the end")

    async with running_operator(parallelism=3, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(3)]
        for _ in range(3):
            await world.advance(0.4)
            kept.append(kept_of(group))
        await world.kill(tasks[2])
        await world.advance(0.1)
        assert not world.failures
        assert [*kept, kept_of(group)] == [0, 1000, 1000, 0], "it goes with its generation"


async def test_values_of_a_collective_that_the_driver_would_have_to_keep_above_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H157
    monkeypatch.setattr(driver_half, "ROUND_BYTES_MAX", 1000)
    group = Group("train", timeout_s=5.0)
    errors: list[str] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with group as member:
            for _ in range(5):  # what is answered is not kept
                member.all_gather(bytes(300))
            context.sleep(0.1 * context.subtask)
            try:
                member.all_gather(bytes(400))
            except (RequestFailed, PeerLost) as error:
                errors.append(f"{type(error).__name__} {error}")
        yield None

    async with running_operator(parallelism=3, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(3)]
        await until_done(world, tasks)
        assert group._latest is not None
        assert group._latest._values.total == 0
    text = (
        "the values of a collective of the group 'train' would exceed the limit of 1000 bytes: send less in each call"
    )
    assert [text in error for error in sorted(errors)] == [False, False, True]


@pytest.mark.parametrize(
    "request_",
    [
        ["join", "h" * 256, 1],
        ["call", 1, 0, "k" * 5000, b""],
        ["call", 1, 0, "save", b"not a step"],
        ["call", 1, 0, "barrier()", 5],
    ],
    ids=lambda one: str(one)[:20],
)
def test_texts_and_values_that_no_member_sends_are_refused(request_: list[Any]) -> None:  # H157
    with pytest.raises(RemoteProtocolError, match="not a request of a group"):
        parse_request(request_)


async def test_a_blob_of_a_save_that_was_not_complete_is_not_kept() -> None:  # H105
    group = Group("train")

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        if member.generation == 1:
            member.save(1, b"one")
            if member.rank == 1:
                context.wait_for_event()
            member.save(2, b"two")
        return member.checkpoint and (member.checkpoint.step, member.checkpoint.blob)

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await world.kill(tasks[1])
        tasks.append(await world.retry(tasks[1], []))
        await until_done(world, tasks)
    assert results(tasks) == [(1, b"one")] * 2


@pytest.mark.parametrize(("resume", "succeeds", "kept"), [(False, True, 0), (False, False, 0), (True, False, 2)])
async def test_a_second_action_begins_anew_unless_it_resumes_a_failed_one(
    resume: bool, succeeds: bool, kept: int
) -> None:  # H105
    group = Group("train", resume=resume)
    begins: list[int] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        begins.append(0 if member.checkpoint is None else member.checkpoint.step)
        member.save(2, b"")
        if not succeeds and len(begins) <= 2:
            context.wait_for_event()

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        if succeeds:
            await until_done(world, tasks)
        else:
            await world.cancel_job()
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    assert begins == [0, 0, kept, kept]


async def test_in_streaming_mode_the_checkpoint_is_restored_with_the_coordinators() -> None:  # H105
    group = Group("train")

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        if member.checkpoint is None:
            member.save(1, b"one")
        while member.checkpoint is None:
            context.wait_for_event()
        return member.checkpoint.blob

    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [group]}
    async with running_operator(**kept) as world:
        await launch_all(world, group, body)
        world.begin_checkpoint()
        await world.advance(1.0)
    async with running_operator(**kept, restored=world.checkpoints[-1]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    assert results(tasks) == [b"one"] * 2


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("new_application", [True, False])
async def test_in_streaming_mode_a_run_with_other_input_begins_without_a_checkpoint(
    named: bool, new_application: bool
) -> None:  # H105 H174
    group = Group("train")
    begins: list[int] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        begins.append(0 if member.checkpoint is None else member.checkpoint.step)
        member.save(begins[-1] + 1, b"")

    async def day(world: World, number: int) -> None:
        world.input_id = f"day {number}" if named else None
        await until_done(world, await launch_all(world, group, body))
        await world.advance(5.0)

    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [group]}
    async with running_operator(**kept) as world:
        await day(world, 1)
        if not new_application:
            await day(world, 2)
    if new_application:
        async with running_operator(**kept, restored=world.checkpoints[-1], restored_input="other") as world:
            await day(world, 2)
    assert begins == [0, 0, 0, 0]
    assert group.checkpoint is not None
    assert group.checkpoint.step == 1


@pytest.mark.parametrize("new_application", [True, False])
async def test_in_streaming_mode_a_run_that_repeats_an_interrupted_one_continues_its_training(
    new_application: bool,
) -> None:  # H105 H174
    group = Group("train")
    begins: list[int] = []

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        begins.append(0 if member.checkpoint is None else member.checkpoint.step)
        member.save(begins[-1] + 1, b"")
        while len(begins) <= 2:
            context.wait_for_event()

    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [group]}
    async with running_operator(**kept) as world:
        world.input_id = "today's"
        await launch_all(world, group, body)
        world.begin_checkpoint()
        await world.advance(1.0)
        await world.cancel_job()
        if not new_application:
            await until_done(world, await launch_all(world, group, body))
    if new_application:
        async with running_operator(**kept, restored=world.checkpoints[-1]) as world:
            world.input_id = "today's"
            await until_done(world, await launch_all(world, group, body))
    assert begins == [0, 0, 1, 1]


async def test_a_request_of_an_attempt_before_the_restore_makes_nobody_a_member() -> None:  # H73 H102
    group = Group("train")

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        return member.all_gather(member.rank)

    kept: dict[str, Any] = {"parallelism": 2, "mode": "streaming", "uses": [group]}
    async with running_operator(**kept) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, passing_on)
        await world.checkpoint()
    restored = world.checkpoints[-1]
    for subtask in range(2):
        restored = with_held_requests(restored, Join("gone", 1).as_event(), subtask=subtask, part="train")
    async with running_operator(**kept, restored=restored) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    assert results(tasks) == [[0, 1]] * 2
    assert group.generation == 1


def test_a_group_is_checked_where_it_is_made() -> None:
    for wrong in ({"size": 0}, {"min_size": 3, "max_size": 2}, {"size": 2, "timeout_s": 0.0}, {"join_wait_s": -1.0}):
        with pytest.raises(ValueError, match=r"must"):
            Group("train", **wrong)
    with pytest.raises(LocalProtocolError, match=r"handle\.subtask"):
        Group("train").__enter__()


async def test_a_group_that_is_larger_than_its_operator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 4 members, but its operator has only 2 subtasks"):
        async with running_operator(parallelism=2, uses=[Group("train", 4)]):
            pass


async def test_a_member_cannot_be_used_outside_its_block_or_twice() -> None:
    group = Group("train", 1)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        with pytest.raises(LocalProtocolError, match="inside the group 'train' already"):
            group.__enter__()
        with pytest.raises(ValueError, match="root must be a rank"):
            member.broadcast(1, root=1)
        with pytest.raises(TypeError, match="blob must be bytes"):
            member.save(1)
        return member

    async with running_operator(parallelism=1, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    (member,) = results(tasks)
    with pytest.raises(LocalProtocolError, match="block has ended"):
        member.barrier()


@pytest.mark.parametrize("loses", [True, False])
async def test_the_driver_judges_whose_error_foreign_code_has_met(loses: bool) -> None:  # H107
    group = Group("train", error_grace_s=5.0)
    met: list[BaseException] = []

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with group as member:
            if member.rank == 1:
                context.wait_for_event()
            try:
                with member.guard():
                    raise ValueError("the library has lost a peer")
            except Exception as error:
                met.append(error)
        yield None

    async with running_operator(parallelism=2, uses=[group]) as world:
        tasks = [await world.launch_operator(subtask, run, []) for subtask in range(2)]
        await world.advance(4.0)
        assert met == [], "it waits for news of a loss"
        if loses:
            await world.kill(tasks[1])
        await world.advance(2.0)
    (error,) = met
    if loses:
        assert isinstance(error, PeerLost)
        assert isinstance(error.__cause__, ValueError)
    else:
        assert isinstance(error, ValueError)


@pytest.mark.parametrize("package", ["torch", "xgboost"])
async def test_a_package_that_is_missing_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"spark_bridge.primitives.group.{package}_group", None)
    group = Group("train", 1)

    def body(context: SubtaskContext, member: GroupMember) -> Any:
        with pytest.raises(LocalProtocolError, match=rf"pip install 'headgate\[{package}\]'"):
            getattr(member, package)()

    async with running_operator(parallelism=1, uses=[group]) as world:
        tasks = await launch_all(world, group, body)
        await until_done(world, tasks)
    assert results(tasks) == [None]
