# SPDX-License-Identifier: Apache-2.0

"""State in files (H190, H191): what tasks upload, what the driver deletes and copies, and that nothing is missing.

A task has a file for each key, with its log of it, or for each entry of its table, and names a file again if it has not
changed. The driver's half is real, on folders in which a step takes no time. They outlive every driver, like the
storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

from protocol import file_retention as r
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.file_retention import FileOrigin, UploadedFiles
from protocol.subtask import types as s
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage import CheckpointStorage, CheckpointUnreadable, StorageSession
from spark_bridge.storage.operator_states import OperatorStates, RestoredElsewhere
from spark_bridge.storage.state_files.folder import StateFolder, verified
from spark_bridge.storage.state_files.manifest import StoredFile, decode_manifest, encode_manifest
from tests.simulation.application import OPERATOR, own_state, table_of
from tests.simulation.checkers import Violation, demand, judged

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

FAILS = 0.01
"""How likely a step of an upload fails, while the world is unkind."""


class SimulatedFolder(StateFolder):
    """The files are in the world's storage."""

    def __init__(self, world: World, url: str) -> None:
        self._world = world
        self._url = url
        self._contents = world.storage.state_files.setdefault(url, {})

    @property
    def url(self) -> str:
        return self._url

    def name_of(self, name: str) -> str:
        return f"{self._url}/{name}"

    def write(self, name: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        with judged(self._world):
            demand(name not in self._contents, f"H191: {self.name_of(name)} is written twice")
        self._contents[name] = b"".join(pieces)

    def verified(self, file: StoredFile, stopped: Callable[[], bool]) -> Iterator[bytes]:
        yield from verified([self._read(file.name)], file, stopped)

    def read_manifest(self, handle: StateHandle) -> tuple[StoredFile, ...]:
        try:
            return decode_manifest(self._read(handle.manifest), handle)
        except ValueError as error:
            raise CheckpointUnreadable(self.name_of(handle.manifest), str(error)) from error

    def _read(self, name: str) -> bytes:
        if name not in self._contents:
            raise CheckpointUnreadable(self.name_of(name), "there is no such file")
        return self._contents[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._contents)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            del self._contents[name]

    def _has(self, file: StoredFile, stopped: Callable[[], bool]) -> bool:
        return file.name in self._contents

    def check(self, state: SubtaskState, what: str) -> tuple[StoredFile, ...]:
        """Check that the files of a state are there, whole, and of the same cut as its bytes; return them."""
        handle = state.files
        demand(handle is not None, f"H190: {what} a state without files: {state}")
        assert handle is not None
        try:
            named = self.read_manifest(handle)
            found = {file.path: b"".join(self.verified(file, bool)) for file in named}
        except (CheckpointUnreadable, ValueError) as error:
            raise Violation(f"H191: {what} {handle}: {error}") from error
        if handle.key_groups is None:
            of_cut = {key: json.dumps(log).encode() for key, log in json.loads(own_state(state.state))["logs"].items()}
        else:
            of_cut = {entry: json.dumps(count).encode() for entry, count in table_of(state).items()}
            found = {path: content for path, content in found.items() if path in of_cut}
        demand(found == of_cut, f"H190: {what} files with {found} beside a state with {of_cut}")
        return named


@dataclass
class Upload:
    """``contents``: of the files at the cut, by path. ``target``: see ``StartUpload``. ``named``: what is stored."""

    contents: dict[str, bytes]
    target: str = ""
    named: list[StoredFile] = field(default_factory=list)


class TaskFiles:
    """The files of one task, and their uploads."""

    def __init__(self, process: Process, world: World, epoch: int) -> None:
        self.uploads: dict[int, Upload] = {}
        self._process, self._world, self._epoch = process, world, epoch
        self._random = Random(f"files {world.seed} {process.tid}")
        self._uploaded = UploadedFiles()
        self._count = 0

    def _folder(self, url: str) -> SimulatedFolder:
        return SimulatedFolder(self._world, url or self._world.storage.states_url)

    def restore(self, states: tuple[SubtaskState, ...], files_from: str) -> None:
        folder = self._folder(files_from)
        if files_from and states:
            self._world.happen("a state of a savepoint is restored")
        tables = self._process.application.settings.tables
        for state in states:
            if not tables or state.files is not None:
                files = folder.check(state, f"task {self._process.tid} restores")
                known = (((file.path, file.sha256), file.name) for file in files)
                self._uploaded.restored(known, elsewhere=bool(files_from))
            if state.groups is not None:
                self._world.happen("a piece of a table is restored")

    def start(self, effect: s.StartUpload) -> None:
        self.uploads[effect.checkpoint_id] = Upload(self._process.work.files(), effect.target)

    def stop(self, checkpoint_id: int) -> None:
        del self.uploads[checkpoint_id]
        self._uploaded.aborted(checkpoint_id)

    def completed(self, checkpoint_id: int) -> None:
        self._uploaded.completed(checkpoint_id)

    def go_on(self) -> None:
        """Do one step of an upload, which may be the last one."""
        checkpoint_id = self._random.choice(sorted(self.uploads))
        if not self._world.calm and self._random.random() < FAILS:
            del self.uploads[checkpoint_id]
            self._world.happen("an upload fails")
            self._process.step(s.UploadFailed(checkpoint_id, "no space"))
        elif not self._store_one(checkpoint_id, self.uploads[checkpoint_id]):
            handle = self._store_manifest(checkpoint_id, self.uploads.pop(checkpoint_id))
            self._world.happen("a state in files is stored")
            self._process.step(s.StateUploaded(checkpoint_id, handle))

    def _store_one(self, checkpoint_id: int, upload: Upload) -> bool:
        stored = {file.path for file in upload.named}
        path = next((path for path in upload.contents if path not in stored), None)
        if path is None:
            return False
        content = upload.contents[path]
        digest = sha256(content).digest()
        name = self._uploaded.find((path, digest), upload.target)
        if name is None:
            name = self._write(checkpoint_id, content, upload.target)
            self._uploaded.stored((path, digest), name, checkpoint_id, upload.target)
        else:
            self._world.happen("a file is named again")
        upload.named.append(StoredFile(path, len(content), digest, name))
        return True

    def _write(self, checkpoint_id: int, content: bytes, target: str) -> str:
        self._count += 1
        origin, token = FileOrigin(checkpoint_id, self._epoch), f"{self._epoch:x}"
        name = r.file_name(origin, token, self._process.task.partition, self._process.tid, "0", self._count)
        self._folder(target).write(name, [content], len(content))
        return name

    def _store_manifest(self, checkpoint_id: int, upload: Upload) -> StateHandle:
        groups = self._process.application.groups_of(self._process.task.partition)
        manifest = encode_manifest(upload.named, groups)
        name = self._write(checkpoint_id, manifest, upload.target)
        self._uploaded.manifest_stored(checkpoint_id, [file.name for file in upload.named])
        total, digest = sum(map(len, upload.contents.values())), sha256(manifest).digest()
        return StateHandle(name, len(manifest), digest, total, len(upload.named), groups)

    def final(self) -> StateHandle:
        """Store the files of the last state. They have the highest id, so this application never sweeps them."""
        upload = Upload(self._process.work.files())
        while self._store_one(r.LAST_STATE, upload):
            pass
        return self._store_manifest(r.LAST_STATE, upload)

    def die(self) -> None:
        """What the task had begun to write may still arrive."""
        for checkpoint_id, upload in self.uploads.items():
            if self._random.random() < 0.5:
                self._store_one(checkpoint_id, upload)
        self.uploads.clear()


class SimulatedStates(OperatorStates):
    """The driver's half, with the real ``StateRetention`` before it.

    The claim and the checkpoints that the storage keeps are read from the simulated disk.
    """

    def __init__(
        self,
        world: World,
        session: StorageSession,
        savepoint_folder: Callable[[int], StateFolder],
        elsewhere: RestoredElsewhere | None,
    ) -> None:
        storage = session.storage
        assert isinstance(storage, CheckpointStorage)

        def target(checkpoint_id: int) -> SimulatedFolder:
            return SimulatedFolder(world, savepoint_folder(checkpoint_id).url)

        self._target = target
        super().__init__(session, storage, OPERATOR, target, elsewhere)
        self._world = world
        self._nonce = "0"  # else it would differ between runs of a seed
        demand(self._folder.url == world.storage.states_url, f"H191: the states are in {self._folder.url}")
        self._folder = self._own = self._source = SimulatedFolder(world, world.storage.states_url)
        self._restored: frozenset[StateHandle] = frozenset()
        if elsewhere is not None:
            elsewhere.folder = self._source = SimulatedFolder(world, elsewhere.folder.url)
            self._restored = elsewhere.states

    @property
    def found(self) -> bool:
        return bool(self._own.names())

    async def gather(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> tuple[frozenset[str], dict[StateHandle, StateHandle], int]:
        self._check(checkpoint, to_copy, self._own)
        if to_copy:
            self._world.happen("states of a savepoint are taken over")
        return await super().gather(checkpoint, to_copy)

    async def gather_for_savepoint(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> frozenset[str]:
        self._check(checkpoint, to_copy, self._target(checkpoint.checkpoint_id))
        if to_copy:
            self._world.happen("states are copied into a savepoint")
        return await super().gather_for_savepoint(checkpoint, to_copy)

    def _check(
        self,
        checkpoint: CompletedCheckpoint,
        to_copy: Sequence[StateHandle],
        stored: SimulatedFolder,
    ) -> None:
        """Check the files of a checkpoint that is about to be written. ``stored``: where its tasks store theirs."""
        with judged(self._world):
            for state in with_files(checkpoint):
                folder = stored
                if state.files in to_copy:
                    folder = self._own if state.files not in self._restored else self._source
                folder.check(state, f"checkpoint {checkpoint.checkpoint_id} stores")

    async def delete(self, names: Sequence[str]) -> None:
        await super().delete(names)
        self._world.happen("files are swept")


def with_files(checkpoint: CompletedCheckpoint) -> list[SubtaskState]:
    return [s for part in checkpoint.subtask_states.values() for s in part.states if s.files is not None]
