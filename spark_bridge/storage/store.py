"""Checkpoints in a directory, local or behind any URL that fsspec knows (H50 to H52)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import structlog

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.checkpoint_format import StoredCheckpoint
from protocol.messages import RestoreMode
from spark_bridge.storage import single_files
from spark_bridge.storage.claims import Claims
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.interface import CheckpointInfo, Permit, always_permitted, describe
from spark_bridge.storage.layout import (
    CLAIMS_FOLDER,
    checkpoint_name,
    operator_folder,
    parse_checkpoint,
    parse_temporary,
    temporary_name,
)

log = structlog.get_logger("headgate.storage")

_LOOKS_MAX = 5
_MEND = (
    "restore the file from a copy, or allow an older checkpoint "
    "(allow_older=True; of a sidecar: SidecarConfig(allow_older_checkpoint=True))"
)


class CheckpointStorage:
    """The checkpoints of one application's operators, in a directory that outlives it.

    ``url`` is a path or an fsspec URL (``s3://bucket/folder``, ``hdfs://...``, ``memory://...``), ``options`` what
    fsspec hands to that filesystem. ``retained`` is how many completed checkpoints of each operator are kept.

    Blocking, for worker threads; every method may be called from any thread, several at once. One object is one
    application: ``prepare`` fences every application that prepared the same directory before. ``list`` and ``read``
    need no ``prepare`` and change nothing.

    Raises ``StorageError`` for all that can go wrong, at once for a URL of an unknown kind.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, retained: int = 3, options: Mapping[str, Any] | None = None
    ) -> None:
        if retained < 1:
            raise ValueError(f"retained must be at least 1, is {retained}")
        self._files = Files(url, options)
        self._options = options
        self._retained = retained
        self._claims = Claims(self._files, secrets.token_hex(8))
        self._damaged: set[str] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._files.url

    def exists(self) -> bool:
        """Whether the directory is a storage: some application has prepared it."""
        return self._claims.exist()

    # --- the application's hold on the directory ------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory, see that it can be written, fence earlier applications, sweep up what they left.

        Again it does nothing. A temporary file of an earlier application is removed even if that one still lives: it
        is fenced, and its write fails.
        """
        self._files.make_folder()
        operators = self._folders()
        ids = (checkpoint_id for folder in operators for checkpoint_id in self._ids(folder))
        self._claims.take_over(max(ids, default=0))
        for folder in operators:
            for name in self._files.names(folder):
                writer = parse_temporary(name)
                if writer is not None and writer < self._claims.owner:
                    log.info("removing what an earlier application was writing", file=f"{folder}/{name}")
                    self._files.remove(f"{folder}/{name}")

    def reserve_ids(self, count: int, *, above: int = 0) -> range:
        """The next ``count`` ids above ``above``, all that were ever reserved here and all that lie here (H4).

        Those that are never used are lost, after a crash too. Raises ``StorageFenced``.
        """
        return self._claims.reserve(count, above)

    # --- writing --------------------------------------------------------------------------------------------------

    def store(
        self,
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
        in_doubt_max: int = 1,
        permit: Permit = always_permitted,
    ) -> str:
        """Write it durably and atomically, then delete what is neither retained nor in doubt; returns its file.

        Durable and stored is not yet complete: the newest ``in_doubt_max`` of an operator may still be given up. They
        and the ``retained`` ones below them are kept, so a completed one always remains (H51). ``permit`` is called
        just before the file gets its name.

        Raises ``StorageFenced`` if a later application has taken over. After any other error the checkpoint is not
        there.
        """
        folder = operator_folder(operator_id)
        name = checkpoint_name(checkpoint.checkpoint_id)
        data = single_files.encoded(operator_id, checkpoint, mode)
        temporary = temporary_name(name, self._claims.owner)

        def before_move() -> None:
            self._claims.check()
            permit()

        self._files.make_folder(folder)
        try:
            self._files.write(f"{folder}/{name}", data, temporary=f"{folder}/{temporary}", before_move=before_move)
            self._claims.check()
        except StorageError as error:
            self._take_back(f"{folder}/{name}", error)
            raise
        self._retain(folder, self._retained + in_doubt_max)
        return self._files.name_of(f"{folder}/{name}")

    def _take_back(self, path: str, error: StorageError) -> None:
        """What failed must not be found later; but if this application is fenced, another may have restored it."""
        if not isinstance(error, StorageFenced):
            try:
                self._claims.check()
            except StorageFenced as fenced:
                raise fenced from error
            except StorageError:
                pass  # nothing answers; most likely the sweep will fail too
            self._files.sweep(path)

    def discard(self, operator_id: str, checkpoint_id: int) -> None:
        """Remove a checkpoint, whole or in part. Harmless where there is none. Raises ``StorageFenced``: what a
        later application may have restored is not ours to delete.
        """
        self._claims.check()
        folder, name = operator_folder(operator_id), checkpoint_name(checkpoint_id)
        self._files.remove(f"{folder}/{name}")
        self._files.remove(f"{folder}/{temporary_name(name, self._claims.owner)}")

    def store_savepoint(
        self,
        directory: str | os.PathLike[str],
        operator_id: str,
        checkpoint: CompletedCheckpoint,
        *,
        mode: RestoreMode = RestoreMode.STREAMING,
    ) -> str:
        """As ``single_files.store_savepoint``, with this storage's options."""
        return single_files.store_savepoint(directory, operator_id, checkpoint, mode=mode, options=self._options)

    def _retain(self, folder: str, kept_max: int) -> None:
        """A file that is known to be damaged counts for nothing, and goes with those of its age."""
        try:
            ids = self._ids(folder)
            sound = [id_ for id_ in ids if f"{folder}/{checkpoint_name(id_)}" not in self._damaged]
            oldest_kept = sorted(sound)[-kept_max:][0]
            for checkpoint_id in ids:
                path = f"{folder}/{checkpoint_name(checkpoint_id)}"
                if checkpoint_id < oldest_kept:
                    if path in self._damaged:
                        log.warning("deleting a damaged checkpoint that is older than those kept", file=path)
                    self._files.remove(path)
        except StorageError as error:  # the checkpoint is stored; the next one tries again
            log.warning("old checkpoints could not be deleted", error=str(error))

    # --- reading --------------------------------------------------------------------------------------------------

    def latest(self, operator_id: str, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        """The operator's newest checkpoint; None where it has none.

        A damaged one raises ``CheckpointUnreadable``, which names the file. With ``allow_older`` the newest whole one
        stands in, and the damaged ones are logged; where no whole one is left, that is an error still. A file that a
        later release wrote, or that cannot be read just now, is never passed over.
        """
        folder = operator_folder(operator_id)
        for _ in range(_LOOKS_MAX):  # a living application may delete what was just listed
            with suppress(FileNotFoundError):
                return self._newest(operator_id, folder, allow_older)
        raise StorageError(f"{self._files.name_of(folder)}: another application keeps deleting what is there")

    def _newest(self, operator_id: str, folder: str, allow_older: bool) -> CompletedCheckpoint | None:
        first: CheckpointUnreadable | None = None
        for checkpoint_id in sorted(self._ids(folder), reverse=True):
            try:
                return self._read(operator_id, checkpoint_id)[0].checkpoint
            except CheckpointUnreadable as error:
                if error.too_new:
                    raise
                if not allow_older:
                    raise CheckpointUnreadable(error.file, error.problem, _MEND) from error
                log.warning("passing over a damaged checkpoint", file=error.file, problem=error.problem)
                self._damaged.add(f"{folder}/{checkpoint_name(checkpoint_id)}")
                first = first or error
        if first is not None:
            raise CheckpointUnreadable(first.file, first.problem, "and no older one is whole") from first
        return None

    def read(self, operator_id: str, checkpoint_id: int) -> CompletedCheckpoint:
        """One checkpoint. Raises ``StorageError`` where there is none, ``CheckpointUnreadable`` for a damaged one."""
        try:
            return self._read(operator_id, checkpoint_id)[0].checkpoint
        except FileNotFoundError:
            folder = self._files.name_of(operator_folder(operator_id))
            raise StorageError(f"{folder}: there is no checkpoint {checkpoint_id} of {operator_id!r}") from None

    def list(self, operator_id: str | None = None) -> Sequence[CheckpointInfo]:
        """Every checkpoint, or one operator's, by operator and id. Reads each, one at a time, and verifies it."""
        folders = sorted(self._folders()) if operator_id is None else [operator_folder(operator_id)]
        return [info for folder in folders for info in self._infos(folder)]

    def verify(self) -> Sequence[CheckpointInfo]:
        """Those that are damaged, each with its ``problem``."""
        return [info for info in self.list() if info.problem]

    @staticmethod
    def read_file(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> StoredCheckpoint:
        """As ``single_files.read_file``: a checkpoint or a savepoint by the path or URL of its file."""
        return single_files.read_file(url, options)

    def _infos(self, folder: str) -> Iterator[CheckpointInfo]:
        for checkpoint_id in sorted(self._ids(folder)):
            path = f"{folder}/{checkpoint_name(checkpoint_id)}"
            with suppress(FileNotFoundError):  # deleted since it was listed
                try:
                    stored, size = single_files.read_one(self._files, path)
                    self._require_its_name(stored, folder, checkpoint_id)
                    yield describe(stored, self._files.name_of(path), size)
                except CheckpointUnreadable as error:
                    size = self._files.size(path)
                    yield CheckpointInfo(unquote(folder), checkpoint_id, error.file, size, error.problem)

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
                f"it holds checkpoint {found} of {stored.operator_id!r}, which is not what its name says",
            )

    def _ids(self, folder: str) -> Sequence[int]:
        return [id_ for name in self._files.names(folder) if (id_ := parse_checkpoint(name)) is not None]

    def _folders(self) -> Sequence[str]:
        return [name for name in self._files.folders() if name != CLAIMS_FOLDER]
