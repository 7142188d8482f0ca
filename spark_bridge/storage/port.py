# SPDX-License-Identifier: Apache-2.0

"""Storage for the event loop: ids are available immediately, reads and writes run in worker threads.

A ``StorageSession`` is one application's storage, for all its operators. Each operator has a ``StoragePort``, which
restores it and serves its barrier tracker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Event, Lock
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

from actors.logs import get_logger
from actors.threads import ThreadPool
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.wire.messages import RestoreMode
from spark_bridge.common.endpoint import StateStorage
from spark_bridge.storage.errors import StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.interface import Storage, WriteOptions
from spark_bridge.storage.layout import savepoint_folder
from spark_bridge.storage.operator_states import OperatorStates, RestoredElsewhere
from spark_bridge.storage.single_files import new_savepoint
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.values import check_holds_files
from spark_bridge.storage.store import CheckpointStorage
from spark_bridge.storage.value_log import ValueLog

T = TypeVar("T")
log = get_logger("headgate.storage")

NOT_DURABLE = (
    "the cache {!r} cannot be durable, because the sidecar has no storage: set SidecarConfig(storage=...) to a "
    "directory or URL, or leave durable=True out"
)

_BLOCK_IDS = 1000
_THREADS_MAX = 8
_DISCARD_WAIT_S = 60.0
_RETRY_S = 5.0


class WriteStopped(StorageError):
    """The checkpoint is no longer wanted, and has not appeared. Nothing has to be done."""


class ValueUser(NamedTuple):
    """The cache of a ``ValuePort``. All is called on the event loop, except ``value_of``.

    ``written(entries)``: these are durable. ``failed(error)``: something could not be written, and is tried again.
    ``value_of(key)``: the value that the cache still has, for any thread; ``value_bytes()``: how large all are.
    """

    written: Callable[[Mapping[bytes, bytes]], None]
    failed: Callable[[StorageError], None]
    value_of: Callable[[bytes], bytes | None]
    value_bytes: Callable[[], int]


class ValuePort:
    """Where one durable cache keeps its values. For the event loop of its session.

    What ``append`` is given is written in the order in which it came: all that has come meanwhile in one file. What
    could not be written is tried again every ``_RETRY_S``. The writer outlives the operators that use the cache, and
    ends with the session.
    """

    def __init__(self, session: StorageSession, values: ValueLog) -> None:
        self._session = session
        self._log = values
        self._waiting: dict[bytes, bytes] = {}
        self._wanted = anyio.Event()
        self._busy = anyio.Lock()  # one call of the log at a time
        self._user: ValueUser | None = None

    async def open(self, user: ValueUser) -> list[tuple[bytes, bytes]]:
        """Return all entries, the oldest first, and write for ``user`` from now on. Raises ``StorageError``."""
        if self._user is not None:
            raise StorageError(
                "another durable part of this kind and name is in use: pass the same one to each operator, "
                "uses=[part], or release those that use the other one"
            )
        self._user = user
        try:
            async with self._busy:
                return await self._session.run_in_thread(self._log.load)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another cache of this name follow. What was appended is still written."""
        self._user = None

    def append(self, key: bytes, value: bytes) -> None:
        """Write an entry soon."""
        self._waiting[key] = value
        self._wanted.set()

    async def run(self) -> None:
        """Write, until this is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            entries, self._waiting = self._waiting, {}
            try:
                async with self._busy:
                    await self._write(entries)
            except StorageError as error:
                log.error("values of a cache not written", error=str(error))
                if self._user is not None:
                    self._user.failed(error)
                await anyio.sleep(_RETRY_S)
                self._wanted.set()

    async def _write(self, entries: dict[bytes, bytes]) -> None:
        try:
            if entries:
                await self._session.run_in_thread(partial(self._log.append, entries.items()))
        except StorageError:
            self._waiting = {**entries, **self._waiting}
            raise
        user = self._user
        if user is not None:
            user.written(entries)
            merge = partial(self._log.merge_if_due, user.value_of, user.value_bytes())
            await self._session.run_in_thread(merge)


class _WriteState(Enum):
    WAITING = "not started"
    WRITING = "under a temporary name"
    APPEARING = "about to get its name: too late to stop"
    OVER = "over"


class PendingWrite:
    """The write of one checkpoint in a worker thread, which may be stopped up to a certain point.

    It decides whether the thread that writes or the event loop that gives up comes first.

    The thread calls ``begin``, ``permit`` and ``end``, the loop calls ``stop``, and any other thread ``wait_over``.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = _WriteState.WAITING
        self._stopped = False
        self._over = Event()

    def begin(self) -> None:
        """The thread starts to write. Raises ``WriteStopped``."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.WRITING

    def permit(self) -> None:
        """The checkpoint is about to appear, and cannot be stopped after this. Raises ``WriteStopped``."""
        with self._lock:
            self._require_wanted()
            self._state = _WriteState.APPEARING

    def end(self) -> None:
        """The thread has finished, and changes nothing any more."""
        with self._lock:
            self._finish()

    def stop(self) -> None:
        """Keep the checkpoint from appearing, unless it is appearing at this moment. Never blocks."""
        with self._lock:
            self._stopped = True
            if self._state is _WriteState.WAITING:  # its thread may never start
                self._finish()

    def wait_over(self, timeout_s: float) -> bool:
        """Block until nothing is written any more; False after ``timeout_s`` seconds."""
        return self._over.wait(timeout_s)

    def _require_wanted(self) -> None:
        if self._stopped:
            raise WriteStopped("the checkpoint is no longer wanted")

    def _finish(self) -> None:
        self._state = _WriteState.OVER
        self._over.set()


class StorageSession:
    """Takes over the storage for one application: ``async with StorageSession(storage)``. For one event loop.

    Entering raises ``StorageError``. Leaving waits for nothing: a checkpoint that has not appeared will not appear.
    """

    def __init__(self, storage: Storage, *, block_ids: int = _BLOCK_IDS) -> None:
        if block_ids < 2:
            raise ValueError(f"block_ids must be at least 2, is {block_ids}")
        self._storage = storage
        self._block_ids = block_ids
        self._ids: deque[int] = deque()
        self._reserving = anyio.Lock()
        self._refill_wanted = anyio.Event()
        self._refill_error: StorageError | None = None
        self._threads = ThreadPool("storage", _THREADS_MAX)  # separate, so that a hung disk delays nothing else
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup
        self._values: dict[str, ValuePort] = {}

    @property
    def storage(self) -> Storage:
        """The storage itself, whose methods block."""
        return self._storage

    async def __aenter__(self) -> StorageSession:
        await self.run_in_thread(self._storage.prepare)
        self._ids.extend(await self.run_in_thread(partial(self._storage.reserve_ids, self._block_ids)))
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._refill)
            self._tasks = tasks
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()  # without the caller's exception, which the task group would wrap in a group

    def port(self, operator_id: str, mode: RestoreMode) -> StoragePort:
        """The port of one operator."""
        return StoragePort(self, operator_id, mode)

    def values(self, cache: str) -> ValuePort:
        """Return the port of a durable cache. Raises ``StorageError`` if the storage ends with the application."""
        if not isinstance(self._storage, CheckpointStorage):
            raise StorageError(NOT_DURABLE.format(cache))
        port = self._values.get(cache)
        if port is None:
            port = self._values[cache] = ValuePort(self, self._storage.value_log(cache))
            self._tasks.start_soon(port.run)
        return port

    @property
    def state_storage(self) -> StateStorage | None:
        """What tasks need to know of the storage, for their states in files; None if it ends with the application."""
        return self._storage.state_storage if isinstance(self._storage, CheckpointStorage) else None

    def next_checkpoint_id(self) -> int:
        """The next id (H4). Raises ``StorageError`` if none is left, because reserving more fails or is slow."""
        if len(self._ids) <= self._block_ids // 2 + 1:
            self._refill_wanted.set()
        if not self._ids:
            cause = f": {self._refill_error}" if self._refill_error else ", because the storage is slow to reserve more"
            raise StorageError(
                f"no checkpoint id is left{cause}. Look whether the storage answers"
            ) from self._refill_error
        return self._ids.popleft()

    async def pass_over(self, checkpoint_id: int) -> int:
        """Assign no id up to ``checkpoint_id`` from now on, because a checkpoint of another storage is restored (H4).

        Returns the next id. Neither this id nor a higher one has been assigned yet.
        """
        async with self._reserving:
            while self._ids and self._ids[0] <= checkpoint_id:
                self._ids.popleft()
            while not self._ids:
                reserve = partial(self._storage.reserve_ids, self._block_ids, above=checkpoint_id)
                self._ids.extend(await self.run_in_thread(reserve))
            return self._ids[0]

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking method. If this is cancelled, the thread continues and its result is dropped."""
        return await self._threads.run(function, abandon_on_cancel=True)

    async def _refill(self) -> None:
        while True:
            await self._refill_wanted.wait()
            try:
                async with self._reserving:
                    self._ids.extend(await self.run_in_thread(partial(self._storage.reserve_ids, self._block_ids)))
            except StorageError as error:
                self._refill_error = error
                log.warning("checkpoint id reservation failed", error=str(error))
            else:
                self._refill_error = None
            self._refill_wanted = anyio.Event()


@dataclass(slots=True)
class _Savepoint:
    """A savepoint that is in progress, or complete and not taken.

    ``directory`` as the user gave it; ``name``: of the file there; ``file`` is set by the thread that writes it, before
    the write is over.
    """

    write: PendingWrite
    directory: str
    name: str
    file: str = ""


class StoragePort:
    """The checkpoints of one operator. For the event loop of its session."""

    def __init__(self, session: StorageSession, operator_id: str, mode: RestoreMode) -> None:
        self._session = session
        self._storage = session.storage
        self._operator_id = operator_id
        self._mode = mode
        self._completed_id = VIRTUAL_EMPTY_CHECKPOINT
        self._writes: dict[int, PendingWrite] = {}
        self._savepoints: dict[int, _Savepoint] = {}  # until they are taken or discarded
        self._unwanted: set[int] = set()  # given up, and not discarded; used in worker threads too
        self._elsewhere: RestoredElsewhere | None = None

    def next_checkpoint_id(self) -> int:
        """Like ``StorageSession.next_checkpoint_id``: ids belong to the storage, not to the operator."""
        return self._session.next_checkpoint_id()

    async def store(self, checkpoint: CompletedCheckpoint) -> None:
        """Make it durable. Raises ``StorageError``, or ``StorageFenced`` if this application must end.

        After a cancellation, the checkpoint does not appear, unless it was appearing at that very moment. After an
        error or a cancellation, only a successful ``discard`` guarantees that no restart restores it.
        """
        checkpoint_id = checkpoint.checkpoint_id
        write = self._writes[checkpoint_id] = PendingWrite()
        try:
            await self._session.run_in_thread(partial(self._write, write, checkpoint))
        finally:
            write.stop()  # has no effect after the end of the write; otherwise this was cancelled
            if write.wait_over(0):
                del self._writes[checkpoint_id]

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint is complete. Both sides know it, so retention counts it."""
        self._completed_id = checkpoint_id

    async def discard(self, checkpoint_id: int) -> None:
        """Like ``Storage.discard``. Stops a running ``store`` of it, and waits for that.

        Raises ``StorageError``. A discard that failed is tried again with each later ``store``.
        """
        write = self._writes.get(checkpoint_id)
        if write is not None:
            write.stop()
        await self._session.run_in_thread(partial(self._discard, checkpoint_id, write))
        self._writes.pop(checkpoint_id, None)

    async def restore_latest(self, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        """Like ``Storage.restore_latest``. Call this or ``start_from`` once, before anything is stored."""
        first = await self._session.pass_over(VIRTUAL_EMPTY_CHECKPOINT)
        restored = await self._session.run_in_thread(
            partial(self._storage.restore_latest, self._operator_id, first=first, allow_older=allow_older)
        )
        if restored is not None:
            self._completed_id = restored.checkpoint_id
        return restored

    async def start_from(self, checkpoint_id: int | None) -> None:
        """Like ``Storage.start_from``. Ids continue above ``checkpoint_id``."""
        completed_id = VIRTUAL_EMPTY_CHECKPOINT if checkpoint_id is None else checkpoint_id
        first = await self._session.pass_over(completed_id)
        await self._session.run_in_thread(
            partial(self._storage.start_from, self._operator_id, checkpoint_id, first=first)
        )
        self._completed_id = completed_id

    def states(self) -> OperatorStates | None:
        """The files of the operator's states; None if the storage cannot have any."""
        if not isinstance(self._storage, CheckpointStorage):
            return None
        return OperatorStates(self._session, self._storage, self._operator_id, self._savepoint_folder, self._elsewhere)

    def restored_elsewhere(self, file: str, checkpoint: CompletedCheckpoint) -> str:
        """The operator starts from the checkpoint in this file. Call this before ``states``.

        Returns the folder with the files of its states, if there are any and it is not the operator's own; otherwise
        "". Raises ``StorageError`` if there are, and this storage cannot have such files. Blocks; for any thread.
        """
        if not files_of(checkpoint):
            return ""
        if not isinstance(self._storage, CheckpointStorage):
            check_holds_files(None)
            return ""
        folder = StateFolder.beside(file, self._storage.options)
        if folder.url == self._storage.state_folder(self._operator_id).url:
            return ""
        self._elsewhere = RestoredElsewhere(folder, checkpoint)
        return folder.url

    async def savepoint_place(self, directory: str | os.PathLike[str]) -> str:
        """The full name of a directory for savepoints, for other processes too; as it is if it cannot be used."""
        try:
            return await self._session.run_in_thread(lambda: Files(directory, self._options).url)
        except StorageError:
            return str(directory)  # the write of the savepoint says why

    def name_savepoint(self, checkpoint_id: int, directory: str) -> str:
        """A savepoint begins. Returns the folder for the files of its states, or "" if it can have none.

        ``take_savepoint`` or ``discard_savepoint`` follows.
        """
        name = new_savepoint(self._operator_id, checkpoint_id)
        self._savepoints[checkpoint_id] = _Savepoint(PendingWrite(), directory, name)
        if not isinstance(self._storage, CheckpointStorage):
            return ""
        return f"{directory.rstrip('/')}/{savepoint_folder(name)}"

    async def store_savepoint(self, directory: str | os.PathLike[str], checkpoint: CompletedCheckpoint) -> str:
        """Like ``Storage.store_savepoint``. After a cancellation, only ``discard_savepoint`` guarantees that no file is
        left.
        """
        checkpoint_id = checkpoint.checkpoint_id
        if checkpoint_id not in self._savepoints:
            self.name_savepoint(checkpoint_id, str(directory))
        savepoint = self._savepoints[checkpoint_id]
        try:
            return await self._session.run_in_thread(partial(self._write_savepoint, savepoint, checkpoint))
        finally:
            savepoint.write.stop()

    def take_savepoint(self, checkpoint_id: int) -> str:
        """The file of a complete savepoint, which is its requester's from now on."""
        return self._savepoints.pop(checkpoint_id).file

    async def discard_savepoint(self, checkpoint_id: int) -> None:
        """Stop a running ``store_savepoint``, wait for that, and delete its files. Raises ``StorageError``."""
        savepoint = self._savepoints.get(checkpoint_id)
        if savepoint is None:
            return
        savepoint.write.stop()
        await self._session.run_in_thread(partial(self._delete_savepoint, savepoint))
        self._savepoints.pop(checkpoint_id, None)

    # --- in worker threads ----------------------------------------------------------------------------------------

    def _write(self, write: PendingWrite, checkpoint: CompletedCheckpoint) -> None:
        write.begin()
        try:
            self._retry_discards()
            options = WriteOptions(self._mode, self._completed_id, frozenset(self._unwanted), write.permit)
            self._storage.store(self._operator_id, checkpoint, options)
        except (StorageFenced, WriteStopped):
            raise
        except StorageError:
            self._unwanted.add(checkpoint.checkpoint_id)
            raise
        finally:
            write.end()

    def _savepoint_folder(self, checkpoint_id: int) -> StateFolder:
        savepoint = self._savepoints[checkpoint_id]
        return StateFolder.of_savepoint(Files(savepoint.directory, self._options), savepoint.name)

    @property
    def _options(self) -> Mapping[str, Any] | None:
        return self._storage.options if isinstance(self._storage, CheckpointStorage) else None

    def _write_savepoint(self, savepoint: _Savepoint, checkpoint: CompletedCheckpoint) -> str:
        write = savepoint.write
        write.begin()
        try:
            savepoint.file = self._storage.store_savepoint(
                savepoint.directory,
                self._operator_id,
                checkpoint,
                mode=self._mode,
                permit=write.permit,
                name=savepoint.name,
            )
            return savepoint.file
        finally:
            write.end()

    def _delete_savepoint(self, savepoint: _Savepoint) -> None:
        if not savepoint.write.wait_over(_DISCARD_WAIT_S):
            raise StorageError(
                f"a savepoint is still being written after {_DISCARD_WAIT_S:g} s, so it is not deleted: look whether "
                "the storage hangs"
            )
        if savepoint.file:
            self._storage.delete_savepoint(savepoint.file)
        elif isinstance(self._storage, CheckpointStorage):  # tasks may have stored files all the same
            files = Files(savepoint.directory, self._options)
            StateFolder.of_savepoint(files, savepoint.name).delete_all()

    def _discard(self, checkpoint_id: int, write: PendingWrite | None) -> None:
        try:
            if write is not None and not write.wait_over(_DISCARD_WAIT_S):
                raise StorageError(
                    f"checkpoint {checkpoint_id} is still being written after {_DISCARD_WAIT_S:g} s, so it is left "
                    "as it is: look whether the storage hangs"
                )
            self._storage.discard(self._operator_id, checkpoint_id)
        except StorageError:
            self._unwanted.add(checkpoint_id)
            raise
        self._unwanted.discard(checkpoint_id)

    def _retry_discards(self) -> None:
        for checkpoint_id in sorted(self._unwanted):
            try:
                self._discard(checkpoint_id, None)
            except StorageError as error:
                log.warning("checkpoint discard failed", error=str(error))
                return
