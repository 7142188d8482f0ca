# SPDX-License-Identifier: Apache-2.0

"""State in files (H190, H191): what tasks upload, what the driver deletes, and that nothing is missing.

A task has a file for each key, with its log of it, and names a file again if it has not changed. The driver's half is
real, except for its reading, listing and deleting. The files outlive every driver, like the storage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

from protocol import file_retention as r
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.file_retention import FileOrigin, UploadedFiles
from protocol.subtask import types as s
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage import CheckpointStorage, StorageSession
from spark_bridge.storage.operator_states import OperatorStates
from spark_bridge.storage.state_files.folder import StateFolder
from tests.simulation.application import OPERATOR, own_state
from tests.simulation.checkers import demand, judged

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

FAILS = 0.01
"""How likely a step of an upload fails, while the world is unkind."""


@dataclass
class Upload:
    """``contents``: of the files at the cut, by path. ``named``: those that are stored, with their names."""

    contents: dict[str, str]
    named: dict[str, str] = field(default_factory=dict)


class TaskFiles:
    """The files of one task, and their uploads."""

    def __init__(self, process: Process, world: World, epoch: int) -> None:
        self.uploads: dict[int, Upload] = {}
        self._process, self._world, self._epoch = process, world, epoch
        self._random = Random(f"files {world.seed} {process.tid}")
        self._uploaded = UploadedFiles()
        self._count = 0

    def restore(self, states: tuple[SubtaskState, ...]) -> None:
        for state in states:
            files = check_state(self._world.storage.state_files, state, f"task {self._process.tid} restores")
            self._uploaded.restored(((path, content), name) for path, (name, content) in files.items())

    def _contents(self) -> dict[str, str]:
        return {str(key): json.dumps(log.plain()) for key, log in self._process.work.logs.items()}

    def start(self, checkpoint_id: int) -> None:
        self.uploads[checkpoint_id] = Upload(self._contents())

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
        path = next((path for path in upload.contents if path not in upload.named), None)
        if path is None:
            return False
        identity = path, upload.contents[path]
        name = self._uploaded.find(identity)
        if name is None:
            name = self._write(checkpoint_id, upload.contents[path])
            self._uploaded.stored(identity, name, checkpoint_id)
        else:
            self._world.happen("a file is named again")
        upload.named[path] = name
        return True

    def _write(self, checkpoint_id: int, content: str) -> str:
        files = self._world.storage.state_files
        self._count += 1
        origin, token = FileOrigin(checkpoint_id, self._epoch), f"{self._epoch:x}"
        name = r.file_name(origin, token, self._process.task.partition, self._process.tid, "0", self._count)
        demand(name not in files, f"H191: {name} is written twice")
        files[name] = content
        return name

    def _store_manifest(self, checkpoint_id: int, upload: Upload) -> StateHandle:
        manifest = json.dumps(upload.named)
        name = self._write(checkpoint_id, manifest)
        self._uploaded.manifest_stored(checkpoint_id, upload.named.values())
        total, digest = sum(map(len, upload.contents.values())), sha256(manifest.encode()).digest()
        return StateHandle(name, len(manifest), digest, total, len(upload.named))

    def final(self) -> StateHandle:
        """Store the files of the last state. They have the highest id, so this application never sweeps them."""
        upload = Upload(self._contents())
        while self._store_one(r.LAST_STATE, upload):
            pass
        return self._store_manifest(r.LAST_STATE, upload)

    def die(self) -> None:
        """What the task had begun to write may still arrive."""
        for checkpoint_id, upload in self.uploads.items():
            if self._random.random() < 0.5:
                self._store_one(checkpoint_id, upload)
        self.uploads.clear()


def check_state(files: dict[str, str], state: SubtaskState, what: str) -> dict[str, tuple[str, str]]:
    """Check that the files of a state are there, whole, and of the same cut as its bytes; return them by path."""
    demand(state.files is not None, f"H190: {what} a state without files: {state}")
    assert state.files is not None
    manifest = files.get(state.files.manifest, "")
    right = sha256(manifest.encode()).digest() == state.files.sha256
    demand(right and len(manifest) == state.files.size, f"H191: {what} {state.files}, whose manifest is {manifest!r}")
    named = {path: (name, files.get(name, "")) for path, name in json.loads(manifest).items()}
    of_cut = {key: json.dumps(log) for key, log in json.loads(own_state(state.state))["logs"].items()}
    found = {path: content for path, (_, content) in named.items()}
    demand(found == of_cut, f"H190: {what} files with {found} beside a state with {of_cut}")
    return named


def names_in(files: dict[str, str], handles: Sequence[StateHandle]) -> frozenset[str]:
    """The names of all files that these states need."""
    names: set[str] = set()
    for handle in handles:
        names |= {handle.manifest, *json.loads(files.get(handle.manifest, "{}")).values()}
    return frozenset(names)


class SimulatedStates(OperatorStates):
    """The driver's half, with the real ``StateRetention`` before it: its files are those that the tasks have stored.

    The claim and the checkpoints that the storage keeps are read from the simulated disk.
    """

    def __init__(self, world: World, session: StorageSession) -> None:
        storage = session.storage
        assert isinstance(storage, CheckpointStorage)
        super().__init__(session, storage, OPERATOR, _no_savepoint, None)
        self._world = world

    @property
    def found(self) -> bool:
        return bool(self._world.storage.state_files)

    async def gather(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> tuple[frozenset[str], dict[StateHandle, StateHandle], int]:
        """Check the files of a checkpoint that is about to be written."""
        files = self._world.storage.state_files
        demand(not to_copy, f"H193: {to_copy} is copied, and no savepoint has files")
        with judged(self._world):
            for part in checkpoint.subtask_states.values():
                for state in part.states:
                    check_state(files, state, f"checkpoint {checkpoint.checkpoint_id} stores")
        return names_in(files, files_of(checkpoint)), {}, 0

    async def _read(self, folder: StateFolder, handles: Sequence[StateHandle]) -> frozenset[str]:
        return names_in(self._world.storage.state_files, handles)

    async def names(self) -> tuple[str, ...]:
        return tuple(self._world.storage.state_files)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            del self._world.storage.state_files[name]
        self._world.happen("files are swept")


def _no_savepoint(checkpoint_id: int) -> StateFolder:
    raise AssertionError("no savepoint has files")
