# SPDX-License-Identifier: Apache-2.0

"""Storage as the event loop sees it: ids immediately, and a discard after the store that it overtakes."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from protocol.wire.messages import RestoreMode
from spark_bridge.storage import (
    CheckpointStorage,
    MemoryStorage,
    Storage,
    StorageError,
    StorageSession,
    WriteOptions,
    read_file,
)
from spark_bridge.storage.port import PendingWrite, StoragePort, WriteStopped
from tests.spark_bridge.storage.checkpoints import a_checkpoint, failing, hooked

STREAMING = RestoreMode.STREAMING


class Stopped:
    """A filesystem call that waits in its thread until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.swept = threading.Event()
        self.removed_meanwhile: list[str] = []

    async def is_reached(self) -> None:
        assert await anyio.to_thread.run_sync(self.reached.wait, 30)


@contextmanager
def stopped_at(call: str) -> Iterator[Stopped]:
    """Block the first such call; the threads are released in any case."""
    stop = Stopped()

    def hook(called: str, path: str) -> None:
        if called == call and not stop.reached.is_set():
            stop.reached.set()
            assert stop.go_on.wait(120)
        elif called == "rm_file" and stop.go_on.is_set() and path.endswith("checkpoint-7.hgc"):
            stop.swept.set()
        elif called == "rm_file" and stop.reached.is_set() and not stop.go_on.is_set():
            stop.removed_meanwhile.append(path)

    with hooked(hook):
        try:
            yield stop
        finally:
            stop.go_on.set()


async def test_what_is_stored_is_the_latest(storage: Storage) -> None:
    async with StorageSession(storage) as session:
        port = session.port("words", STREAMING)
        assert await port.restore_latest() is None
        ids = [port.next_checkpoint_id() for _ in range(5)]
        assert ids == [1, 2, 3, 4, 5]
        for checkpoint_id in ids:
            await port.store(a_checkpoint(checkpoint_id))
            if checkpoint_id < 5:
                port.completed(checkpoint_id)
        await port.discard(5)
        assert await port.restore_latest() == a_checkpoint(4)
        assert [info.checkpoint_id for info in storage.list()] == [3, 4]


async def test_operators_share_the_ids_and_nothing_else(storage: Storage) -> None:  # H4
    async with StorageSession(storage) as session:
        words, letters = session.port("words", STREAMING), session.port("letters", STREAMING)
        await words.store(a_checkpoint(words.next_checkpoint_id()))
        await letters.store(a_checkpoint(letters.next_checkpoint_id()))
        assert await words.restore_latest() == a_checkpoint(1)
        assert await letters.restore_latest() == a_checkpoint(2)


async def test_a_savepoint_is_stored_elsewhere_and_is_not_restored(storage: Storage, tmp_path: Path) -> None:  # H49
    async with StorageSession(storage) as session:
        port = session.port("words", STREAMING)
        file = await port.store_savepoint(tmp_path / "by hand", a_checkpoint(port.next_checkpoint_id()))
        assert await port.restore_latest() is None
    assert re.fullmatch(re.escape(str(tmp_path)) + r"/by hand/savepoint-words-1-[0-9a-f]{16}\.hgc", file)
    stored = read_file(file)
    assert (stored.operator_id, stored.mode, stored.checkpoint) == ("words", STREAMING, a_checkpoint(1))


async def test_ids_do_not_run_out_while_the_storage_gives_more(storage: Storage) -> None:  # H4
    async with StorageSession(storage, block_ids=4) as session:
        seen: list[int] = []
        while len(seen) < 50:
            try:
                seen.append(session.next_checkpoint_id())
            except StorageError:
                await anyio.lowlevel.checkpoint()
        assert seen == sorted(set(seen))


async def test_ids_that_cannot_be_refilled_run_out_with_the_cause(hooked_url: str) -> None:  # H4
    async def error_of_the_next_id() -> str:
        await anyio.lowlevel.checkpoint()
        try:
            session.next_checkpoint_id()
        except StorageError as error:
            return str(error)
        return ""

    async with StorageSession(CheckpointStorage(hooked_url), block_ids=2) as session:
        with failing("", ConnectionError("no answer")), anyio.fail_after(120):
            assert [session.next_checkpoint_id(), session.next_checkpoint_id()] == [1, 2]
            while "no answer" not in (error := await error_of_the_next_id()):
                assert "no checkpoint id is left" in error
        with anyio.fail_after(120):
            while await error_of_the_next_id():
                pass


async def test_a_new_session_goes_on_above_the_ids_of_the_old_one(tmp_path: Path) -> None:  # H4
    async with StorageSession(CheckpointStorage(tmp_path), block_ids=10) as session:
        assert session.next_checkpoint_id() == 1
    async with StorageSession(CheckpointStorage(tmp_path), block_ids=10) as session:
        assert session.next_checkpoint_id() == 11


async def test_an_error_in_the_body_of_a_session_comes_out_as_it_is(storage: Storage) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with StorageSession(storage):
            raise LookupError("mine")


@asynccontextmanager
async def stopped_store(url: str, moment: str) -> AsyncIterator[tuple[StoragePort, Stopped, anyio.abc.TaskGroup]]:
    """A store of checkpoint 7 that was cancelled while its thread waits at ``moment``; nothing of it may stay."""
    storage = CheckpointStorage(url)
    async with StorageSession(storage) as session, anyio.create_task_group() as tasks:
        port = session.port("words", STREAMING)
        with stopped_at(moment) as stop:
            async with anyio.create_task_group() as storing:
                storing.start_soon(port.store, a_checkpoint(7))
                await stop.is_reached()
                storing.cancel_scope.cancel()
            yield port, stop, tasks
    assert storage.list() == []


@pytest.mark.parametrize("moment", ["pipe_file", "mv", "moved"])
async def test_a_discard_waits_for_the_store_that_it_stops(moment: str, hooked_url: str) -> None:  # H50
    async with stopped_store(hooked_url, moment) as (port, stop, tasks):
        tasks.start_soon(port.discard, 7)
        await anyio.wait_all_tasks_blocked()
        assert stop.removed_meanwhile == []


async def test_a_cancelled_store_does_not_appear_afterwards(hooked_url: str) -> None:  # H50
    async with stopped_store(hooked_url, "pipe_file") as (_, stop, _):
        stop.go_on.set()
        assert await anyio.to_thread.run_sync(stop.swept.wait, 30)


async def test_what_could_not_be_discarded_is_discarded_with_the_next_store(hooked_url: str) -> None:  # H48, H64
    storage = CheckpointStorage(hooked_url)
    async with StorageSession(storage) as session:
        port = session.port("words", STREAMING)
        await port.store(a_checkpoint(1))
        await port.store(a_checkpoint(2))
        with failing("", ConnectionError("no answer"), within="/void-"):
            with pytest.raises(StorageError, match="no answer"):
                await port.discard(2)
            await port.store(a_checkpoint(3))
            assert [info.checkpoint_id for info in storage.list()] == [1, 2, 3]
        await port.store(a_checkpoint(4))
        assert [info.checkpoint_id for info in storage.list()] == [1, 3, 4]


def test_a_write_is_stopped_before_it_begins_and_before_it_appears_and_not_later() -> None:  # H50
    early = PendingWrite()
    early.stop()
    assert early.wait_over(0)
    with pytest.raises(WriteStopped):
        early.begin()
    late = PendingWrite()
    late.begin()
    late.stop()
    assert not late.wait_over(0)
    with pytest.raises(WriteStopped):
        late.permit()
    too_late = PendingWrite()
    too_late.begin()
    too_late.permit()
    too_late.stop()
    assert not too_late.wait_over(0)
    too_late.end()
    assert too_late.wait_over(0)


def test_memory_reports_a_missing_checkpoint() -> None:
    with pytest.raises(StorageError, match="there is no checkpoint 3 of 'words' in memory"):
        MemoryStorage().read("words", 3)


def test_memory_keeps_the_last_completed_one_too() -> None:  # H51
    storage = MemoryStorage(retained=1)
    checkpoints = [a_checkpoint(checkpoint_id) for checkpoint_id in storage.reserve_ids(4)]
    for checkpoint in checkpoints:
        storage.store("words", checkpoint, WriteOptions(completed_id=2))
    storage.discard("words", 4)
    storage.discard("words", 3)
    assert storage.latest("words") == checkpoints[1]


async def test_ids_pass_over_a_checkpoint_of_another_storage(storage: Storage) -> None:
    # H4: an application that starts from a savepoint of another storage uses ids higher than the savepoint's
    async with StorageSession(storage, block_ids=4) as session:
        assert session.next_checkpoint_id() == 1
        await session.pass_over(2)
        assert session.next_checkpoint_id() == 3
        await session.pass_over(1000)
        assert session.next_checkpoint_id() == 1001
        await session.pass_over(7)
        assert session.next_checkpoint_id() == 1002
