# SPDX-License-Identifier: Apache-2.0

"""The files of one operator's states, for the event loop: what its ``StateRetention`` needs of the storage."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Event
from typing import NamedTuple, Protocol, TypeVar

import anyio

from actors.logs import get_logger
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.file_retention import FileOrigin, file_name
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.store import CheckpointStorage

T = TypeVar("T")
log = get_logger("headgate.storage")

_READERS = 4
"""How many manifests are read at the same time: half of the storage's threads."""


class _Named(NamedTuple):
    """What a state names, and how many bytes of it were uploaded together with its manifest."""

    names: frozenset[str]
    uploaded_bytes: int


_Known = dict[StateHandle, _Named]


class _Threads(Protocol):
    """The threads of a storage."""

    async def run_in_thread(self, function: Callable[[], T]) -> T: ...


class RestoredElsewhere:
    """The states of the checkpoint that this application starts from, if their files are in another folder."""

    def __init__(self, folder: StateFolder, checkpoint: CompletedCheckpoint) -> None:
        self.folder = folder
        self.states = frozenset(files_of(checkpoint))


class OperatorStates:
    """Implements ``StatesPort`` with a storage. Loop only; blocking calls run in the storage's threads.

    ``savepoint_folder``: that of a savepoint that is in progress.
    """

    def __init__(
        self,
        threads: _Threads,
        storage: CheckpointStorage,
        operator_id: str,
        savepoint_folder: Callable[[int], StateFolder],
        elsewhere: RestoredElsewhere | None,
    ) -> None:
        self._threads = threads
        self._storage = storage
        self._operator_id = operator_id
        self._folder = storage.state_folder(operator_id)
        self._savepoint_folder = savepoint_folder
        self._elsewhere = elsewhere
        self._known: _Known = {}  # what the states of the last checkpoint name
        self._copies: dict[tuple[int, bytes], str] = {}  # of the checkpoint that this application starts from
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    @property
    def epoch(self) -> int:
        return self._storage.owner.epoch

    @property
    def found(self) -> bool:
        return self._storage.had_states(self._operator_id)

    async def kept(self) -> dict[int, frozenset[str]]:
        """What each kept checkpoint names. One that cannot be read, or whose manifests cannot, names all files that
        there are: somebody may replace it from a backup."""
        kept = await self._threads.run_in_thread(partial(self._storage.kept_states, self._operator_id))
        everything: frozenset[str] | None = None
        names: dict[int, frozenset[str]] = {}
        for checkpoint_id, handles in kept.items():
            try:
                if handles is not None:
                    names[checkpoint_id] = await self._read(self._folder, handles)
                    continue
            except CheckpointUnreadable as error:
                log.warning("manifest of a checkpoint not readable", file=error.file, problem=error.problem)
            if everything is None:
                everything = frozenset(await self.names())
            names[checkpoint_id] = everything
        return names

    async def kept_ids(self) -> frozenset[int]:
        return await self._threads.run_in_thread(partial(self._storage.kept_ids, self._operator_id))

    async def gather(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> tuple[frozenset[str], dict[StateHandle, StateHandle], int]:
        copied, before = {}, self._known
        origin, copies = FileOrigin(checkpoint.checkpoint_id, self.epoch), self._copies
        for handle in to_copy:
            assert self._elsewhere is not None
            copy = partial(
                self._folder.take_over, handle, self._elsewhere.folder, partial(self._new_name, origin), copies
            )
            copied[handle] = await self._until_stopped(copy)
        try:
            names = await self._read(self._folder, [copied.get(one, one) for one in files_of(checkpoint)])
        except CheckpointUnreadable as error:
            raise _not_shared(error) from error
        new = [named.uploaded_bytes for handle, named in self._known.items() if handle not in before]
        return names, copied, sum(new)

    async def gather_for_savepoint(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> frozenset[str]:
        stored = [handle for handle in files_of(checkpoint) if handle not in set(to_copy)]
        elsewhere: Collection[StateHandle] = () if self._elsewhere is None else self._elsewhere.states
        try:
            if stored:
                await self._read(self._savepoint_folder(checkpoint.checkpoint_id), stored)
            return await self._read(self._folder, [handle for handle in to_copy if handle not in elsewhere])
        except CheckpointUnreadable as error:
            raise _not_shared(error) from error

    async def copy_for_savepoint(self, checkpoint_id: int, to_copy: Sequence[StateHandle]) -> None:
        target = self._savepoint_folder(checkpoint_id)
        for handle in to_copy:
            is_elsewhere = self._elsewhere is not None and handle in self._elsewhere.states
            source = self._elsewhere.folder if self._elsewhere is not None and is_elsewhere else self._folder
            await self._until_stopped(partial(source.copy, handle, target))

    async def names(self) -> tuple[str, ...]:
        return await self._threads.run_in_thread(self._folder.names)

    async def has_claim(self) -> bool:
        return await self._threads.run_in_thread(self._storage.has_claim)

    async def delete(self, names: Sequence[str]) -> None:
        await self._threads.run_in_thread(partial(self._folder.delete, names))

    async def _read(self, folder: StateFolder, handles: Sequence[StateHandle]) -> frozenset[str]:
        """What these states name. Their manifests are read, unless the last checkpoint had the same states."""
        known = {handle: self._known[handle] for handle in handles if handle in self._known}
        missing = [handle for handle in handles if handle not in known]
        errors: list[StorageError] = []

        async def read(some: Sequence[StateHandle]) -> None:
            try:
                known.update(await self._until_stopped(partial(_named_by, folder, some)))
            except StorageError as error:  # in a task group, it would come out in a group
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for first in range(min(_READERS, len(missing))):
                tasks.start_soon(read, missing[first::_READERS])
        if errors:
            raise errors[0]
        if folder is self._folder:
            self._known = known
        return frozenset().union(*(named.names for named in known.values()))

    async def _until_stopped(self, call: Callable[..., T]) -> T:
        """Run ``call(stopped=...)`` in a thread, and have it stop if this is cancelled."""
        over = Event()
        try:
            return await self._threads.run_in_thread(partial(call, stopped=over.is_set))
        finally:
            over.set()

    def _new_name(self, origin: FileOrigin, kind: str) -> str:
        """A name for a file that the driver writes, as if it were an attempt. For any thread."""
        return file_name(origin, self._storage.owner.token, 0, 0, self._nonce, f"{kind}{next(self._numbers)}")


def _named_by(folder: StateFolder, handles: Sequence[StateHandle], stopped: Callable[[], bool]) -> _Known:
    named: _Known = {}
    for handle in handles:
        if stopped():
            break
        sizes = {file.name: file.size for file in folder.read_manifest(handle)}
        sizes[handle.manifest] = handle.size
        together = f"{handle.manifest.partition('/')[0]}/"  # of the same checkpoint of the same application
        uploaded_bytes = sum([size for name, size in sizes.items() if name.startswith(together)])
        named[handle] = _Named(frozenset(sizes), uploaded_bytes)
    return named


def _not_shared(error: CheckpointUnreadable) -> StorageError:
    return StorageError(
        f"the driver cannot read what a subtask has stored: {error.file}: {error.problem}. If the storage is a local "
        "path, all executors and the driver must share it; otherwise look who else deletes or changes files there"
    )
