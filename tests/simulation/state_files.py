# SPDX-License-Identifier: Apache-2.0

"""State in files (H190, H191): what tasks upload, what the driver deletes, and that nothing is missing.

A task has a file for each key, with its log of it, and names a file again if it has not changed. The driver's half is
the real ``FileRetention``, which learns what its tracker decides. The files outlive every driver, like the storage.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

from protocol import file_retention as r
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.file_retention import FileOrigin, FileRetention, UploadedFiles
from protocol.subtask import types as s
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import StateHandle
from tests.simulation.application import own_state
from tests.simulation.checkers import demand

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


def names_in(files: dict[str, str], checkpoint: CompletedCheckpoint) -> frozenset[str]:
    """The names of all files that a checkpoint needs."""
    names: set[str] = set()
    for part in checkpoint.subtask_states.values():
        for state in part.states:
            if state.files is not None:
                names |= {state.files.manifest, *json.loads(files.get(state.files.manifest, "{}")).values()}
    return frozenset(names)


class DriverFiles:
    """One driver's half: the real machine, told by the monitor of what the tracker decides."""

    def __init__(self, world: World, epoch: int) -> None:
        self.epoch = epoch
        self._world = world
        self._retention = FileRetention(epoch)
        self._work: deque[Callable[[], None]] = deque()
        self._open: set[int] = set()
        self._allowed: set[int] = set()
        self._kept: set[int] = set()

    def start(self) -> None:
        """The restore record is durable."""
        storage = self._world.storage
        kept = {n: one.checkpoint for n, one in storage.written.items() if storage.holds(n)}
        self._kept = set(kept)
        self._tell(r.RestoreChosen({n: names_in(storage.state_files, checkpoint) for n, checkpoint in kept.items()}))

    def _tell(self, input: r.RetentionInput) -> None:
        for effect in self._retention.handle(input):
            match effect:
                case r.RecordRestore():
                    self._tell(r.RestoreRecorded())
                case r.AllowStore(checkpoint_id):
                    self._allowed.add(checkpoint_id)
                case r.RefuseStore():
                    demand(False, f"H190: {effect}, and every task keeps the rules")
                case _:
                    self._work.append(lambda effect=effect: self._carry_out(effect))  # type: ignore[misc]
        self._retention.check_invariants()

    def _carry_out(self, effect: r.RetentionEffect) -> None:
        storage = self._world.storage
        match effect:
            case r.ListFiles():
                self._tell(r.FilesListed(tuple(storage.state_files)))
            case r.ConfirmClaim():
                self._tell(r.ClaimConfirmed(storage.applications == self.epoch))
            case r.DeleteFiles(names):
                for name in names:
                    del storage.state_files[name]
                self._world.happen("files are swept")
                self._tell(r.FilesDeleted())

    def actions(self, is_known: Callable[[int], bool]) -> list[Callable[[], None]]:
        """Return the possible next actions. ``is_known``: whether the tracker has a request or a checkpoint."""
        for checkpoint_id in [
            n for n in self._open if not is_known(n) and n not in self._world.driver.monitor.completed
        ]:
            self.given_up(checkpoint_id, in_doubt=False)  # it was refused
        return [self._next] if self._work else []

    def _next(self) -> None:
        self._work.popleft()()

    # --- what the tracker decides ---

    def began(self, checkpoint_id: int) -> None:
        self._open.add(checkpoint_id)
        self._tell(r.CheckpointBegan(checkpoint_id))

    def stored(self, checkpoint: CompletedCheckpoint) -> None:
        """A checkpoint is about to be written: check its files, and have the machine allow it."""
        files = self._world.storage.state_files
        for part in checkpoint.subtask_states.values():
            for state in part.states:
                check_state(files, state, f"checkpoint {checkpoint.checkpoint_id} stores")
        self._tell(r.FilesNamed(checkpoint.checkpoint_id, names_in(files, checkpoint)))
        demand(checkpoint.checkpoint_id in self._allowed, f"H190: {checkpoint.checkpoint_id} may not be written")

    def given_up(self, checkpoint_id: int, *, in_doubt: bool) -> None:
        if checkpoint_id in self._open:
            self._open.remove(checkpoint_id)
            self._tell(r.CheckpointGivenUp(checkpoint_id, in_doubt))

    def doubt_ended(self, checkpoint_id: int) -> None:
        self._tell(r.DoubtEnded(checkpoint_id))

    def completed(self, checkpoint_id: int) -> None:
        self._open.discard(checkpoint_id)
        self._kept.add(checkpoint_id)
        self._tell(r.CheckpointDurable(checkpoint_id))
        self._work.append(lambda: self._remove_records(checkpoint_id))

    def _remove_records(self, completed: int) -> None:
        gone = {n for n in self._kept if n < completed and not self._world.storage.holds(n)}
        self._kept -= gone
        self._tell(r.RecordsRemoved(tuple(sorted(gone))))
