# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in a directory: a local path, or any URL that fsspec knows (H50 to H52)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock
from typing import Any
from urllib.parse import unquote

from actors.logs import get_logger
from protocol.arguments import AT_LEAST_1, checked
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.wire.checkpoint_format import StoredCheckpoint
from protocol.wire.messages import RestoreMode
from protocol.wire.state_handles import StateHandle
from spark_bridge.common.endpoint import StateStorage
from spark_bridge.storage import single_files
from spark_bridge.storage.claims import Claims, IgnoredNames, Named
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.interface import (
    DEFAULT_WRITE,
    CheckpointInfo,
    Permit,
    WriteOptions,
    always_permitted,
    describe,
)
from spark_bridge.storage.layout import (
    CACHES_FOLDER,
    CLAIMS_FOLDER,
    STATES_FOLDER,
    Owner,
    RestoreRecord,
    cache_folder,
    checkpoint_name,
    is_savepoint_folder,
    operator_folder,
    parse_checkpoint,
    parse_record,
    parse_temporary,
    parse_void,
    temporary_name,
    void_name,
)
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.validity import NOTHING, Validity, base_is_elsewhere, no_longer_kept, why_not_recorded
from spark_bridge.storage.value_log import ValueLog

log = get_logger("headgate.storage")

_LOOKS_MAX = 5
_HINT = (
    "restore the file from a backup, or allow an older checkpoint "
    "(allow_older=True; of a sidecar: storage_details=StorageDetails(allow_older_checkpoint=True))"
)


class _Folder:
    """The information in the file names of an operator's folder."""

    def __init__(self, names: Sequence[str]) -> None:
        self._voids = {name: void for name in names if (void := parse_void(name)) is not None}
        self._records = {name: record for name in names if (record := parse_record(name)) is not None}
        self.temporaries = {name: writing for name in names if (writing := parse_temporary(name)) is not None}
        self._checkpoints = {name: id_ for name in names if (id_ := parse_checkpoint(name)) is not None}
        self.ids = list(self._checkpoints.values())
        self.validity = Validity.of(self._voids.values(), self._records.values())

    @property
    def highest_id(self) -> Named:
        """Ids up to this one must not be assigned again, and the file that says so.

        What is being written counts too: its writer may be alive, if its claim was deleted.
        """
        records = [(id_, name) for name, record in self._records.items() for id_ in (record.base, record.first)]
        marked = [(id_, name) for name, (id_, _) in (*self._voids.items(), *self.temporaries.items())]
        return max([(0, ""), *((id_, name) for name, id_ in self._checkpoints.items()), *marked, *records])

    @property
    def highest_epoch(self) -> Named:
        """The highest epoch of the applications that have written something here, and a file that says so."""
        records = [(record.owner.epoch, name) for name, record in self._records.items()]
        marked = [(owner.epoch, name) for name, (_, owner) in (*self._voids.items(), *self.temporaries.items())]
        return max([(0, ""), *records, *marked])

    def markers_below(self, oldest_kept: int) -> list[str]:
        """The markers that are only about checkpoints older than this one; never the latest record."""
        latest = self.validity.records[0] if self.validity.records else None
        records = [name for name, record in self._records.items() if record.first <= oldest_kept and record != latest]
        return [*(name for name, (id_, _) in self._voids.items() if id_ < oldest_kept), *records]


class CheckpointStorage:
    """The checkpoints of one application's operators, in a directory that outlives the application.

    ``url`` is a path or an fsspec URL (``s3://bucket/folder``, ``hdfs://...``, ``memory://...``), and ``options`` are
    the arguments for that filesystem. ``retained`` is how many completed checkpoints of each operator are kept, at
    least 1. To look at the checkpoints of a running or finished application, use ``list``, ``latest``, ``read`` and
    ``verify``. They change nothing and do not need ``prepare``.

    All methods block, and may be called from several threads concurrently. One object stands for one application:
    ``prepare`` fences every application that has prepared the same directory before. There is nothing to close.

    All methods raise ``StorageError`` for any failure of the filesystem. The constructor raises it for an unknown kind
    of URL, and ``ValueError`` for an invalid ``retained``.
    """

    @checked(retained=AT_LEAST_1)
    def __init__(
        self, url: str | os.PathLike[str], *, retained: int = 3, options: Mapping[str, Any] | None = None
    ) -> None:
        self._files = Files(url, options)
        self._options = options
        self._retained = retained
        self._claims = Claims(self._files, secrets.token_hex(8))
        self._ignored = IgnoredNames(self._files)
        self._damaged: set[str] = set()
        self._with_states: set[str] = set()  # the folders of operators that have files of states
        self._lock = Lock()
        self._choosing: dict[str, Lock] = {}  # by folder: held by each restore and each discard
        self._restores = 0

    @property
    def url(self) -> str:
        """The directory, as an absolute path or a URL."""
        return self._files.url

    @property
    def state_storage(self) -> StateStorage:
        """What tasks need to know of it, for their states in files. Raises ``StorageError`` before ``prepare``.

        Its ``options`` are not for tasks: they may delete everything.
        """
        owner = self._claims.owner
        return StateStorage(self.url, None, owner.epoch, owner.token)

    def exists(self) -> bool:
        """Whether the directory is a checkpoint storage, that is, whether an application has prepared it."""
        return self._claims.exist()

    @property
    def options(self) -> Mapping[str, Any] | None:
        """The arguments for its filesystem."""
        return self._options

    # --- the application's hold on the directory ------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the directory, check that it can be written, fence earlier applications, and delete their leftovers.

        A second call has no effect. A temporary file of an earlier application is deleted even if that application is
        still running: it is fenced, so its write must fail.
        """
        self._files.make_folder()
        operators = {folder: self._look(folder) for folder in self._folders()}
        self._claims.take_over(
            [(id_, f"{folder}/{name}") for folder, found in operators.items() for id_, name in (found.highest_id,)],
            [
                (epoch, f"{folder}/{name}")
                for folder, found in operators.items()
                for epoch, name in (found.highest_epoch,)
            ],
        )
        for folder in operators:
            for name, (_, writer) in self._look(folder).temporaries.items():
                if writer < self._claims.owner:
                    log.info("temporary file of earlier application removed", file=f"{folder}/{name}")
                    self._files.remove(f"{folder}/{name}")

    @checked(count=AT_LEAST_1)
    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        """Reserve the next ``count`` ids: above ``above``, all ids ever reserved here, and all stored here.

        Ids that are never used are lost, for example after a crash. Raises ``StorageFenced``.
        """
        # H4
        return self._claims.reserve(count, above)

    @property
    def owner(self) -> Owner:
        """This application, as it marks its files. Raises ``StorageError`` before ``prepare``."""
        return self._claims.owner

    def has_claim(self) -> bool:
        """Look whether no later application has taken over. False is final."""
        try:
            self._claims.check()
        except StorageFenced:
            return False
        return True

    # --- writing --------------------------------------------------------------------------------------------------

    @checked()
    def store(self, operator_id: str, checkpoint: CompletedCheckpoint, options: WriteOptions = DEFAULT_WRITE) -> str:
        """Write a checkpoint durably and atomically, delete those no longer retained, and return its file.

        The ``retained`` newest checkpoints up to ``options.completed_id`` are kept, so at least one always remains.
        Later ones may still be written or in doubt, so they stay too. ``options.permit`` is called just before the
        file gets its name.

        Raises ``StorageFenced`` if a later application has taken over. After any error, the file may exist or appear
        later. This method tries to discard it, but only a successful ``discard`` guarantees that.
        """
        # H64
        folder = operator_folder(operator_id)
        name = checkpoint_name(checkpoint.checkpoint_id)
        data = single_files.encoded(operator_id, checkpoint, options.mode)
        temporary = temporary_name(name, self._claims.owner)

        def before_move() -> None:
            self._claims.check()
            options.permit()

        self._files.make_folder(folder)
        try:
            self._files.write(f"{folder}/{name}", data, temporary=f"{folder}/{temporary}", before_move=before_move)
            self._claims.check()
        except StorageFenced:
            raise
        except StorageError as error:
            try:
                self.discard(operator_id, checkpoint.checkpoint_id)
            except StorageFenced as fenced:
                raise fenced from error
            except StorageError:
                pass  # the filesystem does not answer; the failed write is the error to report
            raise
        self._retain(folder, options.completed_before(checkpoint), options.given_up)
        return self._files.name_of(f"{folder}/{name}")

    @checked()
    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        """Mark a checkpoint as void, durably, and delete its file if it exists. Harmless if there is none.

        When this returns, no restart with ``"latest"`` restores the checkpoint, even if a hanging write of it succeeds
        later. The marker is written before the claims are checked for the last time, so every application that takes
        over later sees the marker. A failure to delete the file is only logged.

        Raises ``StorageFenced``, and deletes nothing, if a later application has taken over, because that one may have
        restored this checkpoint. After any error, the checkpoint remains in doubt.
        """
        # H64
        folder, name = operator_folder(operator_id), checkpoint_name(checkpoint_id)
        with self._choice(folder):
            self._claims.check()
            self._files.make_folder(folder)
            self._files.create_empty(f"{folder}/{void_name(checkpoint_id, self._claims.owner)}")
            self._claims.check()
            if self._look(folder).validity.may_restore(checkpoint_id):
                where = self._files.name_of(f"{folder}/{name}")
                raise StorageError(f"{where}: cannot be discarded, because the operator was started from it again")
            for path in (f"{folder}/{name}", f"{folder}/{temporary_name(name, self._claims.owner)}"):
                try:
                    self._files.remove(path)
                except StorageError as error:  # it is void anyway; retention tries again
                    log.warning("void checkpoint deletion failed", file=path, error=str(error))

    @checked()
    def store_savepoint(
        self,
        directory: str | os.PathLike[str],
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
        permit: Permit = always_permitted,
        name: str = "",
    ) -> str:
        """Like ``single_files.store_savepoint``, with this storage's options."""
        return single_files.store_savepoint(
            directory, operator_id, checkpoint, mode=mode, options=self._options, permit=permit, name=name
        )

    @checked()
    def delete_savepoint(self, file: str) -> None:
        """Like ``single_files.delete_savepoint``, with this storage's options."""
        single_files.delete_savepoint(file, self._options)

    @checked()
    def value_log(self, cache: str) -> ValueLog:
        """The values of a durable cache. Needs ``prepare``. Only one object at a time may write it."""
        return ValueLog(self._files, self._claims, cache_folder(cache))

    def _retain(self, folder: str, completed_id: int, given_up: Collection[int]) -> None:
        """Delete what is no longer retained.

        A file that is known to be damaged does not count, and is deleted with those of its age. A marker is deleted
        when all checkpoints that it is about are older than those kept.
        """
        try:
            found = self._look(folder)
            damaged = {id_ for id_ in found.ids if f"{folder}/{checkpoint_name(id_)}" in self._damaged}
            stale = no_longer_kept(found.ids, found.validity, self._retained, completed_id, damaged.union(given_up))
            for checkpoint_id in stale:
                path = f"{folder}/{checkpoint_name(checkpoint_id)}"
                if checkpoint_id in damaged:
                    log.warning("expired damaged checkpoint deleted", file=path)
                self._files.remove(path)
            oldest_kept = min((id_ for id_ in found.ids if id_ not in stale and id_ <= completed_id), default=0)
            for name in found.markers_below(oldest_kept):
                self._files.remove(f"{folder}/{name}")
        except StorageError as error:  # the checkpoint is stored; the next one tries again
            log.warning("expired checkpoint deletion failed", error=str(error))

    # --- files of states ---------------------------------------------------------------------------------------------

    @checked()
    def state_folder(self, operator_id: str) -> StateFolder:
        """Where tasks store the files of this operator's states."""
        return StateFolder.of_operator(self._files, operator_id)

    @checked()
    def had_states(self, operator_id: str) -> bool:
        """Whether the operator had such files when its folder was last listed. Looks at nothing."""
        return operator_folder(operator_id) in self._with_states

    def state_folders(self) -> dict[str, StateFolder]:
        """The folders with such files, as ``list`` has seen them; the keys are the names of the operators' folders."""
        return {folder: StateFolder(self._files, f"{folder}/{STATES_FOLDER}") for folder in sorted(self._with_states)}

    @checked()
    def kept_states(self, operator_id: str) -> dict[int, list[StateHandle] | None]:
        """The states in files of each checkpoint that a restart may restore; None for one that cannot be read."""
        folder = operator_folder(operator_id)
        found = self._look(folder)
        kept: dict[int, list[StateHandle] | None] = {}
        for checkpoint_id in filter(found.validity.may_restore, found.ids):
            with suppress(FileNotFoundError):  # deleted since it was listed
                try:
                    kept[checkpoint_id] = files_of(self._read(operator_id, checkpoint_id)[0].checkpoint)
                except CheckpointUnreadable:
                    kept[checkpoint_id] = None
        return kept

    @checked()
    def kept_ids(self, operator_id: str) -> frozenset[int]:
        """The checkpoints that the storage has. The others have been deleted durably."""
        folder = operator_folder(operator_id)
        ids = frozenset(self._look(folder).ids)
        self._files.sync(folder)
        return ids

    # --- restoring ------------------------------------------------------------------------------------------------

    @checked()
    def restore_latest(self, operator_id: str, *, first: int, allow_older: bool = False) -> CompletedCheckpoint | None:
        """``latest``, then ``start_from`` its result. Raises as both of them do."""
        with self._choice(operator_folder(operator_id)):
            found = self.latest(operator_id, allow_older=allow_older)
            self._record(operator_id, NOTHING if found is None else found.checkpoint_id, first)
            return found

    @checked()
    def start_from(self, operator_id: str, checkpoint_id: int | None, *, first: int) -> None:
        """Record that this application starts an operator from a checkpoint, here or elsewhere, or from nothing (None).

        ``first`` is an id that ``reserve_ids`` has returned to this application and that no checkpoint of this operator
        has yet. From now on, every checkpoint between the two is void (see ``validity``), even if it appears later:

        * A checkpoint of an earlier application has an id below ``first``: that application reserved the id before this
          one took over, or its reservation failed, and ids that are reserved later are higher.
        * This application listed the storage after it had taken over. So it saw everything that an earlier application
          had completed after its own last check of the claims, before ``checkpoint_id`` was chosen.
        * The claims are checked once more after the record is written. So if this returns, each later application takes
          over later and sees the record. If it raises ``StorageFenced``, nothing may be done because of it.
        """
        with self._choice(operator_folder(operator_id)):
            self._record(operator_id, NOTHING if checkpoint_id is None else checkpoint_id, first)

    def _record(self, operator_id: str, base: int, first: int) -> None:
        folder = operator_folder(operator_id)
        problem = why_not_recorded(operator_id, base, first)
        if problem:
            raise StorageError(f"{self._files.name_of(folder)}: {problem}")
        with self._lock:
            self._restores += 1
            record = RestoreRecord(self._claims.owner, self._restores, base, first)
        self._claims.check()
        self._files.make_folder(folder)
        self._files.create_empty(f"{folder}/{record.name}")
        try:
            self._claims.check()
        except StorageFenced:  # nothing was done because of it, and the other application may have the same ids
            self._files.sweep(f"{folder}/{record.name}")
            raise
        try:
            for superseded in self._look(folder).validity.superseded():
                self._files.remove(f"{folder}/{superseded.name}")
        except StorageError as error:  # a superseded record has no effect
            log.warning("superseded restore record deletion failed", error=str(error))

    @contextmanager
    def _choice(self, folder: str) -> Iterator[None]:
        """Keep discards of this application out of the time between the listing and the record of a restore."""
        with self._lock:
            lock = self._choosing.setdefault(folder, Lock())
        with lock:
            yield

    # --- reading --------------------------------------------------------------------------------------------------

    @checked()
    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        """The operator's newest checkpoint that is not void, or None if it has none.

        A damaged one raises ``CheckpointUnreadable``, which names the file. With ``allow_older``, the newest intact one
        is returned instead and the damaged ones are logged; if no intact one is left, that is still an error. A file
        that a later release wrote, or that cannot be read at the moment, is never skipped. If the operator was last
        started from a file outside this storage, and nothing has completed since, this raises ``StorageError``; with
        ``allow_older``, the newest earlier one is returned.
        """
        folder = operator_folder(operator_id)
        for _ in range(_LOOKS_MAX):  # a running application may delete what was just listed
            with suppress(FileNotFoundError):
                return self._newest(operator_id, folder, allow_older)
        raise StorageError(
            f"{self._files.name_of(folder)}: cannot read the newest checkpoint, because another application keeps "
            "deleting it; try again"
        )

    def _newest(self, operator_id: str, folder: str, allow_older: bool) -> CompletedCheckpoint | None:
        first: CheckpointUnreadable | None = None
        found = self._look(folder)
        restorable = sorted(filter(found.validity.may_restore, found.ids), reverse=True)
        if max(restorable, default=NOTHING) < found.validity.base:
            missing = base_is_elsewhere(operator_id, found.validity.base)
            if not allow_older:
                raise StorageError(f"{self._files.name_of(folder)}: {missing}")
            log.warning("last restored checkpoint skipped", problem=missing)
        for checkpoint_id in restorable:
            try:
                return self._read(operator_id, checkpoint_id)[0].checkpoint
            except CheckpointUnreadable as error:
                if error.too_new:
                    raise
                if not allow_older:
                    raise CheckpointUnreadable(error.file, error.problem, _HINT) from error
                log.warning("damaged checkpoint skipped", file=error.file, problem=error.problem)
                self._damaged.add(f"{folder}/{checkpoint_name(checkpoint_id)}")
                first = first or error
        if first is not None:
            raise CheckpointUnreadable(first.file, first.problem, "and no older checkpoint is intact") from first
        return None

    @checked()
    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        """Read one checkpoint. Raises ``StorageError`` if there is none, ``CheckpointUnreadable`` if it is damaged."""
        try:
            return self._read(operator_id, checkpoint_id)[0].checkpoint
        except FileNotFoundError:
            folder = self._files.name_of(operator_folder(operator_id))
            raise StorageError(
                f"{folder}: there is no checkpoint {checkpoint_id} of {operator_id!r}. `headgate "
                "checkpoints` lists those that there are"
            ) from None

    @checked()
    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """Read and verify all checkpoints, or those of one operator; sorted by operator and id."""
        folders = sorted(self._folders()) if operator_id is None else [operator_folder(operator_id)]
        return [info for folder in folders for info in self._infos(folder)]

    def verify(self) -> Sequence[CheckpointInfo]:
        """The damaged checkpoints, each with its ``problem``."""
        return [info for info in self.list() if info.problem]

    @staticmethod
    @checked()
    def read_file(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> StoredCheckpoint:
        """Like ``single_files.read_file``: read a checkpoint or savepoint by the path or URL of its file."""
        return single_files.read_file(url, options)

    def _infos(self, folder: str) -> Iterator[CheckpointInfo]:
        found = self._look(folder)
        for checkpoint_id in sorted(found.ids):
            path = f"{folder}/{checkpoint_name(checkpoint_id)}"
            void = not found.validity.may_restore(checkpoint_id)
            with suppress(FileNotFoundError):  # deleted since it was listed
                try:
                    stored, size = single_files.read_one(self._files, path)
                    self._require_its_name(stored, folder, checkpoint_id)
                    yield replace(describe(stored, self._files.name_of(path), size), void=void)
                except CheckpointUnreadable as error:
                    size, problem = self._files.size(path), "" if void else error.problem
                    yield CheckpointInfo(unquote(folder), checkpoint_id, error.file, size, problem, void=void)

    def _read(self, operator_id: str, checkpoint_id: int) -> tuple[StoredCheckpoint, int]:
        folder = operator_folder(operator_id)
        stored, size = single_files.read_one(self._files, f"{folder}/{checkpoint_name(checkpoint_id)}")
        self._require_its_name(stored, folder, checkpoint_id)
        return stored, size

    def _require_its_name(self, stored: StoredCheckpoint, folder: str, checkpoint_id: int) -> None:
        found = stored.checkpoint.checkpoint_id
        if operator_folder(stored.operator_id) != folder or found != checkpoint_id:
            raise CheckpointUnreadable(
                self._files.name_of(f"{folder}/{checkpoint_name(checkpoint_id)}"),
                f"contains checkpoint {found} of {stored.operator_id!r}, which does not match its name",
            )

    def _look(self, folder: str) -> _Folder:
        names = self._files.names(folder)
        self._ignored.report(folder, names)
        if STATES_FOLDER in names:
            self._with_states.add(folder)
        return _Folder(names)

    def _folders(self) -> Sequence[str]:
        names = self._files.folders()
        return [name for name in names if name not in (CLAIMS_FOLDER, CACHES_FOLDER) and not is_savepoint_folder(name)]
