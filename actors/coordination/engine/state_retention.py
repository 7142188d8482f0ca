# SPDX-License-Identifier: Apache-2.0

"""The shell around a ``FileRetention``: which files of states the storage deletes, and which checkpoints it may write.

It belongs to the tracker's actor, tells the machine what becomes of each checkpoint, and carries out its effects
through a ``StatesPort``. It is off until there are files: until the storage has some at the start, or a checkpoint
names some. So an operator without files pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeVar

from actors import ActorContext
from actors.coordination.engine.messages import RecordsListed, TrackerMessage
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.describing import describe
from protocol.file_retention import (
    AllowStore,
    AttemptOver,
    CheckpointBegan,
    CheckpointDurable,
    CheckpointGivenUp,
    ClaimConfirmed,
    ConfirmClaim,
    DeleteFiles,
    DoubtEnded,
    FileRetention,
    FilesDeleted,
    FilesListed,
    FilesNamed,
    ListFiles,
    RecordRestore,
    RecordsRemoved,
    RefuseStore,
    RestoreChosen,
    RestoreRecorded,
    RetentionEffect,
    RetentionInput,
)
from protocol.wire.state_handles import StateHandle

T = TypeVar("T")

_FIRST_RETRY_S = 1.0
_RETRY_S_MAX = 60.0


Gathered = tuple[frozenset[str], dict[StateHandle, StateHandle], int]
"""What a checkpoint needs of the operator's folder of states, and the rest as in ``FilesGathered``."""


class StatesPort(Protocol):
    """The files of one operator's states. All methods are called on the event loop, and may raise.

    ``epoch``: this application, as in the names of its files. ``found``: whether there were files when it started.
    """

    @property
    def epoch(self) -> int: ...

    @property
    def found(self) -> bool: ...

    async def kept(self) -> dict[int, frozenset[str]]:
        """What each checkpoint names that the storage keeps and may restore. Called once the restore is recorded."""

    async def kept_ids(self) -> frozenset[int]:
        """The checkpoints that the storage still has. The others have been removed durably."""

    async def gather(self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]) -> Gathered:
        """Copy these states, which are elsewhere, into the operator's folder; read all manifests of the checkpoint."""

    async def gather_for_savepoint(
        self, checkpoint: CompletedCheckpoint, to_copy: Sequence[StateHandle]
    ) -> frozenset[str]:
        """Return what ``copy_for_savepoint`` needs of the operator's folder; read the manifests of the savepoint."""

    async def copy_for_savepoint(self, checkpoint_id: int, to_copy: Sequence[StateHandle]) -> None:
        """Copy these states into the folder of the savepoint (H193)."""

    async def names(self) -> tuple[str, ...]:
        """The names of all files in the operator's folder."""

    async def has_claim(self) -> bool:
        """Whether this application still has the storage."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete these files."""


class StateRetention:
    """See the module. Loop only.

    ``allowed(checkpoint_id)`` and ``refused(checkpoint_id, reason)`` answer ``named``. They come before it returns,
    unless it is not known yet what the storage keeps.
    """

    def __init__(
        self,
        context: ActorContext[TrackerMessage],
        port: StatesPort | None,
        allowed: Callable[[int], None],
        refused: Callable[[int, str], None],
    ) -> None:
        self._context = context
        self._port = port
        self._allowed = allowed
        self._refused = refused
        self._machine: FileRetention | None = None
        self._waiting: list[RetentionInput] | None = None  # until it is known what the storage keeps
        self._kept: set[int] = set()  # as the machine knows them
        self._over: list[int] = []  # attempts that have ended before there was a machine
        self._completed = 0

    @property
    def is_on(self) -> bool:
        return self._machine is not None

    def start(self) -> None:
        """The restore of this application is recorded, and no checkpoint has begun."""
        port = self._port
        if port is not None and port.found:
            self._machine, self._waiting = FileRetention(port.epoch), []
            self._run(port.kept, RestoreChosen)

    def turn_on(self, begun: Collection[int], written: Collection[int]) -> None:
        """A checkpoint names files, the first one that does so in this storage.

        ``begun``: the checkpoints that are not over, ascending. ``written``: those of them that are being written.
        """
        port = self._port
        if port is None or self._machine is not None:
            return
        self._machine = FileRetention(port.epoch)
        self._take(RestoreChosen({}))
        for checkpoint_id in begun:
            self._take(CheckpointBegan(checkpoint_id))
        for task_attempt_id in self._over:  # as if they had ended now, because some may still be in these checkpoints
            self._take(AttemptOver(task_attempt_id))
        self._over.clear()
        for checkpoint_id in written:
            self._take(FilesNamed(checkpoint_id, frozenset()))

    # --- what becomes of the checkpoints ---

    def began(self, checkpoint_id: int) -> None:
        self.tell(CheckpointBegan(checkpoint_id))

    def named(self, checkpoint_id: int, names: frozenset[str]) -> None:
        """The checkpoint is to be written, and names these files."""
        self.tell(FilesNamed(checkpoint_id, names))

    def given_up(self, checkpoint_id: int, *, in_doubt: bool = False) -> None:
        """The checkpoint was aborted or refused, or it is a savepoint that is over."""
        self.tell(CheckpointGivenUp(checkpoint_id, in_doubt))

    def doubt_ended(self, checkpoint_id: int) -> None:
        self.tell(DoubtEnded(checkpoint_id))

    def attempt_over(self, task_attempt_id: int) -> None:
        """An attempt of an operator that may have files has finished or failed."""
        if self._machine is None:
            self._over.append(task_attempt_id)
        self.tell(AttemptOver(task_attempt_id))

    def completed(self, checkpoint_id: int) -> None:
        if self._machine is None:
            return
        assert self._port is not None
        self._kept.add(checkpoint_id)
        self._completed = checkpoint_id
        self.tell(CheckpointDurable(checkpoint_id))
        self._run(self._port.kept_ids, RecordsListed)

    def records_listed(self, kept: frozenset[int]) -> None:
        """The storage has these checkpoints, some time after the last completion."""
        removed = sorted(n for n in self._kept - kept if n < self._completed)
        self._kept.difference_update(removed)
        self.tell(RecordsRemoved(tuple(removed)))

    def tell(self, input: RetentionInput) -> None:
        """Give the machine an input, or keep it for later."""
        if self._machine is None:
            return
        waiting = self._waiting
        if waiting is None:
            self._take(input)
        elif type(input) is RestoreChosen:
            self._waiting = None
            self._take(input)
            for later in waiting:
                self._take(later)
        else:
            waiting.append(input)

    # --- effects ---

    def _take(self, input: RetentionInput) -> None:
        assert self._machine is not None
        if type(input) is RestoreChosen:
            self._kept.update(input.kept)
        for effect in self._machine.handle(input):
            self._carry_out(effect)

    def _carry_out(self, effect: RetentionEffect) -> None:
        port = self._port
        assert port is not None
        match effect:
            case RecordRestore():
                self._take(RestoreRecorded())  # before the operator started
            case AllowStore(checkpoint_id):
                self._allowed(checkpoint_id)
            case RefuseStore(checkpoint_id, names):
                self._refused(
                    checkpoint_id,
                    f"it names files of states that have been deleted, or are about to be, among them {names[0]}",
                )
            case ListFiles():
                self._run(port.names, FilesListed)
            case ConfirmClaim():
                self._run(port.has_claim, ClaimConfirmed)
            case DeleteFiles(names):
                self._context.log.info("files of states deleted", files=len(names))
                self._context.run(self._delete, port, names, on_result=lambda _: FilesDeleted())

    def _run(self, call: Callable[[], Awaitable[T]], to_input: Callable[[T], TrackerMessage]) -> None:
        self._context.run(self._until_done, call, on_result=to_input)

    async def _until_done(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try again after each failure: without an answer, nothing is ever deleted."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                return await call()
            except Exception as error:
                self._context.log.warning("files of states not examined", error=describe(error), retry_s=delay_s)
            await self._context.clock.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_S_MAX)

    async def _delete(self, port: StatesPort, names: tuple[str, ...]) -> None:
        try:
            await port.delete(names)
        except Exception as error:  # a later sweep finds what is left
            self._context.log.warning("files of states not deleted", error=describe(error))


__all__ = ["Gathered", "StateRetention", "StatesPort"]
