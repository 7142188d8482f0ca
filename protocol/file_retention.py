# SPDX-License-Identifier: Apache-2.0

"""Which files of states the driver may delete, and which files a task may name again (H190, H191).

Theory of operation
-------------------
Tasks upload the files of their states under names that are never used again. They delete none. The driver alone
deletes, by mark and sweep: it lists the files, and deletes those that nothing can need. ``FileRetention`` decides that
for one operator. It is pure: the shell stores, lists and deletes.

*Marks.* A checkpoint that is being written, that may be restored although its write was reported as failed (in doubt,
H64), or that the storage keeps, marks all files that it names. A checkpoint names a file as soon as its manifests are
read, before it is written. It names it until the storage has removed its record, or has promised that no restart
restores it: a record never outlives its files.

*The sweep* after the completion of checkpoint c deletes files that no mark has and that were uploaded for an earlier
checkpoint than c, by this application or an earlier one. Those of an aborted checkpoint stay until then: the next
checkpoint names again what was uploaded for it. Otherwise a first upload that takes longer than a checkpoint may would
begin again each time. It waits for everything that was triggered before that completion:

    | triggered        | its task names a file of an aborted one    | so the sweep          |
    |------------------|--------------------------------------------|-----------------------|
    | before c is told | perhaps                                    | waits until it is over |
    | after            | only one that is in its own state at c     | need not wait         |

The right column is the task's half of the bargain: ``UploadedFiles`` forgets at the completion of c what is not in the
task's own state of c. The barriers of later checkpoints come after that.

*The start.* Nothing is deleted before the restore record is durable. It says which checkpoint this application goes on
from, and that no later one of an earlier application counts, so a write of it that is still on its way harms nobody.
Then the files of earlier applications that no kept checkpoint names can be deleted.

*Fencing.* A later application may have begun. Before each batch, the shell confirms that this one still has the
storage. If it has not, nothing is deleted any more. Files of a later application are never looked at.

*The second line of defence.* What a checkpoint names is compared with what a sweep may have deleted or is about to
delete: files that no mark has, of before the last sweep. If it names one, it is refused before it is written.

*Savepoints.* The files of a savepoint are its own, in a folder of the user's (H193), and are not seen here. But it may
have to copy some of ours. So it begins, and names what it copies, like a checkpoint. When it is over, it needs nothing.

*The last state* of a subtask that has finished is in every later checkpoint of its run, and no barrier says which is
the first. So its files have the highest id there is (``LAST_STATE``), and are old only after the completion of a
checkpoint that began when their attempt was over. If it needs them, it names them, and so do those after it. Otherwise
they are of a run that is over, of an attempt that has failed, or of one that went on after it had stored them.

Effects must be carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from protocol.errors import LocalProtocolError
from protocol.values import value
from protocol.wire.state_handles import check_file_name

__all__ = [
    "LAST_STATE",
    "AllowStore",
    "AttemptOver",
    "CheckpointBegan",
    "CheckpointDurable",
    "CheckpointGivenUp",
    "ClaimConfirmed",
    "ConfirmClaim",
    "DeleteFiles",
    "DoubtEnded",
    "FileOrigin",
    "FileRetention",
    "FilesDeleted",
    "FilesListed",
    "FilesNamed",
    "ListFiles",
    "RecordRestore",
    "RecordsRemoved",
    "RefuseStore",
    "RestoreChosen",
    "RestoreRecorded",
    "RetentionEffect",
    "RetentionInput",
    "UploadedFiles",
    "file_name",
    "origin_of",
]

BATCH_MAX = 256
"""How many files are deleted after one look at the claim."""

LAST_STATE = 2**53 - 1
"""The id in the names of the files of a last state: that of no checkpoint, because ids end there."""

_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdef")


class FileOrigin(NamedTuple):
    """For which checkpoint a file was uploaded, and in which application, counted as in the storage's claims."""

    checkpoint_id: int
    epoch: int


def file_name(origin: FileOrigin, token: str, subtask: int, task_attempt_id: int, nonce: str, number: int | str) -> str:
    """Return a name that no other file has or gets (H191).

    ``token``: random, of the application. ``nonce``: random, of the attempt. ``number``: the attempt counts its
    uploads, and never uses a number twice.
    """
    checkpoint_id, epoch = origin
    return check_file_name(f"{checkpoint_id}-{epoch}-{token}/{subtask}-{task_attempt_id}-{nonce}-{number}")


def origin_of(name: str) -> FileOrigin | None:
    """Return what the name of a file says about its origin. None for a file that is not ours, which is left alone."""
    pieces = name.replace("/", "-", 1).split("-")
    if len(pieces) != 7 or name.count("/") != 1:
        return None
    checkpoint_id, epoch, token, subtask, task_attempt_id, nonce, number = pieces
    if pieces[:3] != name.partition("/")[0].split("-") or not (number.isascii() and number.isalnum()):
        return None
    numbers = (checkpoint_id, 19), (epoch, 10), (subtask, 10), (task_attempt_id, 19)
    if not all(0 < len(digits) <= most and _DIGITS.issuperset(digits) for digits, most in numbers):
        return None
    if not all(0 < len(word) <= 64 and _HEX.issuperset(word) for word in (token, nonce)) or checkpoint_id[0] == "0":
        return None
    return FileOrigin(int(checkpoint_id), int(epoch))


def _attempt_of(name: str) -> int:
    """The attempt that has uploaded a file of ours."""
    return int(name.partition("/")[2].split("-")[1])


# --- inputs -------------------------------------------------------------------------------------------------------


@value
class RestoreChosen:
    """The first input: this application goes on from a checkpoint, or from none.

    ``kept``: what each checkpoint names that the storage keeps and may restore.
    """

    kept: dict[int, frozenset[str]]


@value
class RestoreRecorded:
    """The answer to ``RecordRestore``: the record is durable."""


@value
class CheckpointBegan:
    """A checkpoint begins. Its id is higher than all before."""

    checkpoint_id: int


@value
class FilesNamed:
    """Everything that the checkpoint names, from its manifests, and these themselves. The answer is ``AllowStore`` or
    ``RefuseStore``."""

    checkpoint_id: int
    names: frozenset[str]


@value
class CheckpointGivenUp:
    """The checkpoint is aborted. ``in_doubt``: a restart may restore it nevertheless (H64).

    Also for a savepoint that is over, whatever its outcome is.
    """

    checkpoint_id: int
    in_doubt: bool = False


@value
class DoubtEnded:
    """The storage has promised that no restart restores the checkpoint that was in doubt."""

    checkpoint_id: int


@value
class CheckpointDurable:
    """The checkpoint is durable. Restarts prefer it to every earlier one."""

    checkpoint_id: int


@value
class RecordsRemoved:
    """After each completion: the storage has durably removed the checkpoints that it no longer keeps; perhaps none."""

    checkpoint_ids: tuple[int, ...]


@value
class AttemptOver:
    """The attempt has finished, and its last state is known, or it has failed: no checkpoint gets a new file of it."""

    task_attempt_id: int


@value
class FilesListed:
    """The answer to ``ListFiles``."""

    names: tuple[str, ...]


@value
class ClaimConfirmed:
    """The answer to ``ConfirmClaim``: whether this application still has the storage."""

    held: bool


@value
class FilesDeleted:
    """The answer to ``DeleteFiles``. What could not be deleted is found by a later sweep."""


RetentionInput = (
    RestoreChosen
    | RestoreRecorded
    | CheckpointBegan
    | FilesNamed
    | CheckpointGivenUp
    | DoubtEnded
    | CheckpointDurable
    | RecordsRemoved
    | AttemptOver
    | FilesListed
    | ClaimConfirmed
    | FilesDeleted
)


# --- effects ------------------------------------------------------------------------------------------------------


@value
class RecordRestore:
    """Write durably that this application goes on from its checkpoint, and that no later one of others counts."""


@value
class AllowStore:
    """The checkpoint may be written: what it names will not be deleted."""

    checkpoint_id: int


@value
class RefuseStore:
    """The checkpoint must not be written: these files may be deleted, or are about to be."""

    checkpoint_id: int
    names: tuple[str, ...]


@value
class ListFiles:
    """List all files below the operator's folder of states."""


@value
class ConfirmClaim:
    """Look whether this application still has the storage."""


@value
class DeleteFiles:
    """Delete these files. It does not matter if some are gone already."""

    names: tuple[str, ...]


RetentionEffect = RecordRestore | AllowStore | RefuseStore | ListFiles | ConfirmClaim | DeleteFiles
Effects = list[RetentionEffect]


class _Start(Enum):
    """How far the application's start has come."""

    CHOOSING = "not chosen"
    CHOSEN = "not recorded"
    RECORDED = "recorded"


class _Sweep(Enum):
    """What a sweep waits for."""

    NOTHING = "nothing"
    LISTING = "the list of files"
    CLAIM = "the look at the claim"
    DELETING = "the deletion of a batch"


class FileRetention:
    """The files of one operator; see the module. ``epoch``: this application, as in the names of its files."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._start = _Start.CHOOSING
        self._latest = 0
        self._pending: set[int] = set()  # triggered, and not over
        self._written: dict[int, frozenset[str]] = {}  # of these, the ones that may be written
        self._in_doubt: dict[int, frozenset[str]] = {}
        self._kept: dict[int, frozenset[str]] = {}
        self._completed = 0
        self._due: int | None = None  # the last id that was triggered before the completion that a sweep follows
        self._removing = False  # records of older checkpoints, after that completion
        self._sweep = _Sweep.NOTHING
        self._swept = 0  # files of earlier checkpoints may be deleted, unless they are marked
        self._over: dict[int, int] = {}  # attempts, each with the last id that was triggered before its end
        self._queue: list[str] = []
        self._fenced = False

    def handle(self, input: RetentionInput) -> list[RetentionEffect]:
        """Take one input; return what to do, in order.

        Raises ``LocalProtocolError``, and changes nothing, for an input that cannot come now.
        """
        act = _ACTS.get(type(input))
        if act is None:
            raise LocalProtocolError(f"not an input of a file retention: {input!r}")
        if _START_OF.get(type(input), _Start.RECORDED) is not self._start:
            raise LocalProtocolError(f"{input!r}, when the application's start is {self._start.value}")
        out: Effects = []
        act(self, input, out)
        self._begin_sweep(out)
        return out

    # --- checkpoints ---

    def _choose(self, input: RestoreChosen, out: Effects) -> None:
        self._start = _Start.CHOSEN
        self._kept = dict(input.kept)
        out.append(RecordRestore())

    def _record(self, input: RestoreRecorded, out: Effects) -> None:
        self._start = _Start.RECORDED
        self._sweep = _Sweep.LISTING
        out.append(ListFiles())

    def _trigger(self, input: CheckpointBegan, out: Effects) -> None:
        if input.checkpoint_id <= self._latest:
            raise LocalProtocolError(f"checkpoint {input.checkpoint_id} begins after {self._latest}")
        self._latest = input.checkpoint_id
        self._pending.add(input.checkpoint_id)

    def _name(self, input: FilesNamed, out: Effects) -> None:
        checkpoint_id = self._pending_one(input.checkpoint_id)
        doubtful = tuple(sorted(name for name in input.names if self._may_be_gone(name) and not self._is_marked(name)))
        if doubtful:
            out.append(RefuseStore(checkpoint_id, doubtful))
        else:
            self._written[checkpoint_id] = input.names
            out.append(AllowStore(checkpoint_id))

    def _may_be_gone(self, name: str) -> bool:
        """Whether a sweep has deleted a file that no mark has, or is about to."""
        origin = origin_of(name)
        return origin is None or origin.epoch != self._epoch or self._is_swept(name, origin)

    def _abort(self, input: CheckpointGivenUp, out: Effects) -> None:
        checkpoint_id = self._pending_one(input.checkpoint_id)
        self._pending.discard(checkpoint_id)
        names = self._written.pop(checkpoint_id, None)
        if input.in_doubt and names is not None:
            self._in_doubt[checkpoint_id] = names

    def _discard(self, input: DoubtEnded, out: Effects) -> None:
        self._in_doubt.pop(input.checkpoint_id, None)

    def _complete(self, input: CheckpointDurable, out: Effects) -> None:
        checkpoint_id = self._pending_one(input.checkpoint_id)
        if checkpoint_id not in self._written:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} is complete, and what it names is unknown")
        self._pending.discard(checkpoint_id)
        self._kept[checkpoint_id] = self._written.pop(checkpoint_id)
        self._completed = checkpoint_id
        self._in_doubt = {n: names for n, names in self._in_doubt.items() if n > checkpoint_id}
        self._due, self._removing = self._latest, True

    def _remove(self, input: RecordsRemoved, out: Effects) -> None:
        self._removing = False
        for checkpoint_id in input.checkpoint_ids:
            if checkpoint_id >= self._completed:
                raise LocalProtocolError(f"the record of {checkpoint_id} is removed, and {self._completed} is the last")
            self._kept.pop(checkpoint_id, None)

    def _end(self, input: AttemptOver, out: Effects) -> None:
        self._over.setdefault(input.task_attempt_id, self._latest)

    def _pending_one(self, checkpoint_id: int) -> int:
        if checkpoint_id not in self._pending:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} is over, or never began")
        return checkpoint_id

    # --- the sweep ---

    def _is_marked(self, name: str) -> bool:
        """Whether something may still need the file."""
        marks = *self._written.values(), *self._in_doubt.values(), *self._kept.values()
        return any(name in names for names in marks)

    def _begin_sweep(self, out: Effects) -> None:
        due = self._due
        if due is None or self._sweep is not _Sweep.NOTHING or self._removing or self._fenced:
            return
        if any(checkpoint_id <= due for checkpoint_id in self._pending):
            return
        self._due = None
        self._swept = self._completed
        self._sweep = _Sweep.LISTING
        out.append(ListFiles())

    def _list(self, input: FilesListed, out: Effects) -> None:
        self._expect(_Sweep.LISTING)
        self._queue = [name for name in input.names if self._is_old(name) and not self._is_marked(name)]
        last = {_attempt_of(name) for name in input.names if origin_of(name) == (LAST_STATE, self._epoch)}
        self._over = {one: began for one, began in self._over.items() if one in last or began >= self._swept}
        self._go_on(out)

    def _is_old(self, name: str) -> bool:
        origin = origin_of(name)
        if origin is None:
            return False
        return origin.epoch < self._epoch or (origin.epoch == self._epoch and self._is_swept(name, origin))

    def _is_swept(self, name: str, origin: FileOrigin) -> bool:
        """Whether a file of this application is of before the last sweep."""
        if origin.checkpoint_id != LAST_STATE:
            return origin.checkpoint_id < self._swept
        began = self._over.get(_attempt_of(name))
        return began is not None and began < self._swept

    def _go_on(self, out: Effects) -> None:
        self._sweep = _Sweep.CLAIM if self._queue else _Sweep.NOTHING
        if self._queue:
            out.append(ConfirmClaim())

    def _confirm(self, input: ClaimConfirmed, out: Effects) -> None:
        self._expect(_Sweep.CLAIM)
        if not input.held:
            self._fenced = True
            self._queue.clear()
            self._sweep = _Sweep.NOTHING
            return
        batch, self._queue = self._queue[:BATCH_MAX], self._queue[BATCH_MAX:]
        self._sweep = _Sweep.DELETING
        out.append(DeleteFiles(tuple(batch)))

    def _deleted(self, input: FilesDeleted, out: Effects) -> None:
        self._expect(_Sweep.DELETING)
        self._go_on(out)

    def _expect(self, phase: _Sweep) -> None:
        if self._sweep is not phase:
            raise LocalProtocolError(f"{phase.value} came, and the sweep waits for {self._sweep.value}")

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        assert set(self._written) <= self._pending
        assert not set(self._in_doubt) & self._pending
        assert all(checkpoint_id > self._completed for checkpoint_id in self._in_doubt), "superseded"
        assert not any(map(self._is_marked, self._queue)), "H190: about to be deleted, although something needs it"
        assert bool(self._queue) <= (self._sweep in (_Sweep.CLAIM, _Sweep.DELETING))
        assert self._swept <= self._completed


_START_OF: dict[type, _Start] = {RestoreChosen: _Start.CHOOSING, RestoreRecorded: _Start.CHOSEN}
"""When an input may come; any other one may after that."""

_Handler = Callable[[FileRetention, Any, Effects], None]

_ACTS: dict[type, _Handler] = {
    RestoreChosen: FileRetention._choose,
    RestoreRecorded: FileRetention._record,
    CheckpointBegan: FileRetention._trigger,
    FilesNamed: FileRetention._name,
    CheckpointGivenUp: FileRetention._abort,
    DoubtEnded: FileRetention._discard,
    CheckpointDurable: FileRetention._complete,
    RecordsRemoved: FileRetention._remove,
    AttemptOver: FileRetention._end,
    FilesListed: FileRetention._list,
    ClaimConfirmed: FileRetention._confirm,
    FilesDeleted: FileRetention._deleted,
}


class UploadedFiles:
    """What one attempt has uploaded, and may name again instead of another upload.

    A file is known by its *identity*, which says that its content is the same: path, size, inode and time of change, or
    its digest. A name alone is not enough, because an embedded store writes another file under the name of an old one.
    Files of a savepoint are never named again: the user may delete them.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, tuple[str, int]] = {}  # by identity; with the checkpoint of the upload
        self._own: dict[int, frozenset[str]] = {}  # what its state names at each checkpoint that is not over
        self._completed_id = -1

    def restored(self, files: Iterable[tuple[Hashable, str]], *, elsewhere: bool = False) -> None:
        """The attempt has restored these files: identity and name. ``elsewhere``: from a savepoint."""
        if not elsewhere:
            self._names.update((identity, (name, 0)) for identity, name in files)

    def find(self, identity: Hashable, target: str = "") -> str | None:
        """The name of a file that need not be uploaded again. None for a savepoint, which gets all its files (H193)."""
        if target:
            return None
        known = self._names.get(identity)
        return None if known is None else known[0]

    def stored(self, identity: Hashable, name: str, checkpoint_id: int, target: str = "") -> None:
        """The upload of a file for a checkpoint is complete. What becomes of the checkpoint makes no difference.

        One that ends after a later checkpoint is complete, because the storage has answered late, is as if it had been
        forgotten then.
        """
        if not target and checkpoint_id > self._completed_id:
            self._names[identity] = name, checkpoint_id

    def manifest_stored(self, checkpoint_id: int, names: Iterable[str]) -> None:
        """The state at this checkpoint names these files."""
        self._own[checkpoint_id] = frozenset(names)

    def completed(self, checkpoint_id: int) -> None:
        """Forget each file that is not in the attempt's own state at this checkpoint. The driver may delete it."""
        self._completed_id = max(self._completed_id, checkpoint_id)
        own = self._own.get(checkpoint_id, frozenset())
        self._names = {
            identity: (name, born)
            for identity, (name, born) in self._names.items()
            if name in own or born > checkpoint_id
        }
        self._own = {n: names for n, names in self._own.items() if n > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        """The checkpoint is over; what was uploaded for it may be named by the next one."""
        self._own.pop(checkpoint_id, None)
