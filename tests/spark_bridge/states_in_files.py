# SPDX-License-Identifier: Apache-2.0

"""Operators whose states are in files: storage, machines and actors are real, and so is what a task stores.

A subtask's state is a folder with a file for each word that it was given.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio

from actors.coordination import OperatorConfig
from actors.testing import deterministic_system
from headgate.testing import RecordingCoordinator
from protocol.attempts import FailureKind
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.barrier_tracker.rescale import rescaled
from protocol.file_retention import LAST_STATE
from protocol.subtask.types import (
    OperatorFinished,
    SnapshotTaken,
    StartUpload,
    StateUploaded,
    StopUpload,
    SubtaskEffect,
    UploadFailed,
)
from protocol.wire.messages import Downward, Registered, RestoreMode, SubtaskState
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage import CheckpointStorage, StorageSession, read_file
from spark_bridge.storage.files import Files
from spark_bridge.storage.operator_states import OperatorStates
from spark_bridge.storage.port import StoragePort
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.restoring import RestoredState, restore
from spark_bridge.storage.state_files.snapshot import Snapshot
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import StateFiles
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import Answer, World

T = TypeVar("T")

__all__ = ["Application", "FilesTask", "an_application", "content_of", "missing"]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def folder_at(path: str) -> StateFolder:
    above, _, name = path.rpartition("/")
    return StateFolder(Files(above), name)


class FilesTask(Task):
    """An attempt whose state is the folder ``words``. ``lazy``: its uploads wait for ``upload``."""

    application: Application

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lazy = False
        self.inline = False  # whether its state has no files
        self.fails = ""  # why its uploads fail
        self._started: dict[int, tuple[Snapshot, str]] = {}
        self._frozen: dict[int, Snapshot] = {}
        self._name = f"{self.attempt.subtask}-{self.attempt.task_attempt_id}-{self.application.storage.owner.token}"
        self.words = self.application.place / "tasks" / self._name / "words"
        self.uploader = StateUploader(
            StateFolder.of_operator(Files(self.application.root), "words"),
            self.words.parent / "private",
            epoch=self.application.epoch,
            token=self.application.storage.owner.token,
            subtask=self.attempt.subtask,
            task_attempt_id=self.attempt.task_attempt_id,
        )
        self.words.mkdir()

    def write(self, word: str, content: bytes = b"") -> None:
        (self.words / f"{word}.sst").write_bytes(content or word.encode())

    def remove(self, word: str) -> None:
        (self.words / f"{word}.sst").unlink()

    def _take(self, message: Downward) -> None:
        if isinstance(message, Registered):
            for state in message.states:
                self._restore(state, message.files_from)
            message = replace(message, states=tuple(state._replace(files=None) for state in message.states))
        super()._take(message)

    def _restore(self, state: SubtaskState, files_from: str) -> None:
        if state.files is not None:
            restored = self._restored(state.files, files_from)
            if not files_from:
                self.uploader.restored(restored)

    def _restored(self, handle: StateHandle, files_from: str) -> RestoredState:
        folder = self.application.storage.state_folder("words")
        if files_from:
            folder = folder_at(files_from)
        self.words.rmdir()
        return restore(folder, handle, self.words)

    def acknowledge(self, checkpoint_id: int, state: bytes) -> None:
        if self.inline:
            super().acknowledge(checkpoint_id, state)
            return
        self._frozen[checkpoint_id] = self.uploader.freeze(StateFiles(self.words), checkpoint_id)
        self._drive(SnapshotTaken(checkpoint_id, state, state_follows=True))

    def _carry_out(self, effect: SubtaskEffect) -> None:
        match effect:
            case StartUpload(checkpoint_id, target):
                self._started[checkpoint_id] = self._frozen.pop(checkpoint_id), target
                if not self.lazy:
                    self.upload(checkpoint_id)
            case StopUpload(checkpoint_id):
                self._started.pop(checkpoint_id, None)
                self.uploader.aborted(checkpoint_id)
            case _:
                super()._carry_out(effect)

    def _put(self, item: Any) -> None:
        if type(item).__name__ == "MailboxCompleted":
            self.uploader.completed(item.checkpoint_id)
        super()._put(item)

    def upload(self, checkpoint_id: int) -> None:
        snapshot, target = self._started.pop(checkpoint_id)
        if self.fails:
            self._drive(UploadFailed(checkpoint_id, self.fails))
            return
        handle = self.uploader.upload(snapshot, folder_at(target) if target else None)
        self._drive(StateUploaded(checkpoint_id, handle))

    def end(self) -> None:
        """End with the last state, whose files are stored before."""
        handle = self.uploader.upload(self.uploader.freeze(StateFiles(self.words), LAST_STATE))
        self._drive(OperatorFinished("", b"", handle))
        self._goodbye = ""

    def kill(self) -> None:
        """Nothing more comes from it; its folders are left behind."""
        self.application.fail(self, FailureKind.FAILED)
        shutil.rmtree(self.words.parent)


class _Here:
    """A session whose threads are this one."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        await anyio.lowlevel.checkpoint()
        return function()


class Application(World):
    """One application with the operator "words"."""

    port: StoragePort
    place: Path
    root: Path
    epoch: int
    states: OperatorStates | None
    on_completed: Callable[[], object] = staticmethod(lambda: None)
    """Called when a checkpoint is complete."""

    @property
    def storage(self) -> CheckpointStorage:
        return cast("CheckpointStorage", self.port._storage)

    def _more_ports(self) -> dict[str, Any]:
        port = self.port
        states = self.states = port.states()
        return {
            "completed": self._hear_completed,
            "name_savepoint": port.name_savepoint,
            "discard_savepoint": port.discard_savepoint,
            "states": states,
        }

    def _hear_completed(self, checkpoint_id: int) -> None:
        self.completed.append(checkpoint_id)
        self.on_completed()

    async def _store(self, checkpoint: CompletedCheckpoint) -> None:
        if self.completed:
            self.port.completed(self.completed[-1])
        await self.port.store(checkpoint)
        await super()._store(checkpoint)

    async def _discard(self, checkpoint_id: int) -> None:
        await super()._discard(checkpoint_id)
        await self.port.discard(checkpoint_id)

    async def _store_savepoint(self, checkpoint: CompletedCheckpoint, directory: str) -> None:
        await self.port.store_savepoint(directory, checkpoint)
        await super()._store_savepoint(checkpoint, directory)

    async def tasks_of(self, *subtasks: int) -> list[FilesTask]:
        return cast("list[FilesTask]", await self.running(*subtasks))

    async def savepoint(self) -> Path:
        answer: Answer = await self.checkpoint(str(self.place / "saved"))
        assert answer.values, answer.errors
        return Path(self.port.take_savepoint(answer.values[0]))

    async def completed_checkpoint(self) -> CompletedCheckpoint:
        answer = await self.checkpoint()
        assert answer.values, answer.errors
        return self.stored[-1]

    def files(self) -> tuple[str, ...]:
        return self.storage.state_folder("words").names()


@asynccontextmanager
async def an_application(
    place: Path,
    *,
    savepoint: Path | None = None,
    parallelism: int = 1,
    retained: int = 2,
    root: str = "storage",
    prepare: Callable[[CheckpointStorage], object] = lambda storage: None,
    **settings: Any,
) -> AsyncIterator[Application]:
    """Start an application that restores what it finds, and end it as a kill does: without a word."""
    storage = CheckpointStorage(place / root, retained=retained)
    storage.prepare()
    prepare(storage)
    ids = storage.reserve_ids(1000)
    port = StoragePort(cast("StorageSession", _Here(storage)), "words", RestoreMode.STREAMING)
    files_from, restored = "", None
    if savepoint is not None:
        restored = read_file(savepoint).checkpoint
        ids = storage.reserve_ids(1000, above=restored.checkpoint_id)
        files_from = port.restored_elsewhere(str(savepoint), restored)
        storage.start_from("words", restored.checkpoint_id, first=ids[0])
    else:
        restored = storage.restore_latest("words", first=ids[0])
    config = OperatorConfig(
        "words",
        parallelism,
        RestoreMode.STREAMING,
        checkpoint=CheckpointConfig(tolerated_failures=10, **settings),
        restored=None if restored is None else rescaled(restored, parallelism),
        files_from=files_from,
        restored_input=None if restored is None else "same",
    )
    kind = type(
        "TheApplication",
        (Application,),
        {"port": port, "place": place, "root": place / root, "epoch": storage.owner.epoch},
    )
    async with deterministic_system() as kit:
        application = kind(kit, RecordingCoordinator(), config)
        application.task_type = type("TheTask", (FilesTask,), {"application": application})
        application.next_id = ids[0]
        await application.start()
        await application.settle()
        yield application


def missing(storage: CheckpointStorage, operator_id: str = "words") -> list[str]:
    """What a checkpoint names that a restart may restore, and that is not there, or not whole."""
    folder = storage.state_folder(operator_id)
    problems = []
    for checkpoint_id, handles in storage.kept_states(operator_id).items():
        for handle in handles or ():
            try:
                folder.verify(handle)
            except Exception as error:
                problems.append(f"{checkpoint_id}: {error}")
    return problems


def states_of(checkpoint: CompletedCheckpoint) -> list[SubtaskState]:
    return [state for part in checkpoint.subtask_states.values() for state in part.states]
