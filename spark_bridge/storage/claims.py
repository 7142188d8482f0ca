# SPDX-License-Identifier: Apache-2.0

"""Checkpoint ids that increase for the life of a storage, and the fence between applications (H4).

Both rely on empty marker files, which carry all information in their names (``layout.Claim``). An application claims
the storage with an epoch above that of every other one, and a block of ids with the highest of them. A marker is
written before anything that it claims is used, so neither a crash nor a restart brings an id back.

The later of two applications fences the earlier. It writes its marker before it looks for the newest checkpoint, and
every application checks the markers just before and just after it gives a checkpoint its name. If a listing shows every
file that existed when it began (as on a local disk, HDFS, S3 and GCS), either the later one finds the checkpoint or the
earlier one gets ``StorageFenced``. If listings lag (NFS with cached attributes), the window is narrowed to that lag,
but not closed.

An application also requires its own marker. If somebody deleted the markers, another application may have started
without knowing of this one, and may have assigned the same ids. A marker that a listing does not show is asked for by
its name before it counts as deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Lock

from actors.logs import get_logger
from spark_bridge.storage.errors import StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import CLAIMS_FOLDER, EPOCH_MAX, ID_MAX, Claim, Owner, parse_claim, why_ignored

log = get_logger("headgate.storage")

Named = tuple[int, str]
"""A number, and the file whose name contains it."""

_NOTHING: Named = (0, "")
_SPARE_IDS = 2**32
"""How many ids must be left when an application starts."""


class IgnoredNames:
    """Logs names that look like ours and cannot be, each once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._logged: set[str] = set()

    def report(self, folder: str, names: Iterable[str]) -> None:
        """Log those of ``names`` that are ignored, as one line for the folder."""
        new = [name for name in names if why_ignored(name) and f"{folder}/{name}" not in self._logged]
        if new:
            self._logged.update(f"{folder}/{name}" for name in new)
            file = self._files.name_of(f"{folder}/{new[0]}")
            log.warning("file name ignored", file=file, problem=why_ignored(new[0]), ignored_in_folder=len(new))


class Claims:
    """The claims of one application. The methods block, and may be called from any thread."""

    def __init__(self, files: Files, token: str) -> None:
        self._files = files
        self._token = token
        self._lock = Lock()
        self._claim: Claim | None = None
        self._ignored = IgnoredNames(files)

    @property
    def owner(self) -> Owner:
        """This application, as it marks its files. Raises ``StorageError`` before ``take_over``."""
        return self._own().owner

    def exist(self) -> bool:
        """Whether any application has ever used this storage."""
        return bool(self._read())

    def take_over(self, stored: Sequence[Named] = (), epochs: Sequence[Named] = ()) -> None:
        """Fence every earlier application, and assign no id that is stored. Idempotent.

        ``stored`` has the highest ids that were found elsewhere, ``epochs`` the highest epochs, in case the markers
        here were deleted. Raises ``StorageError``, with the name of the file, if one of them leaves no higher number.
        """
        with self._lock:
            if self._claim is not None:
                return
            self._files.make_folder(CLAIMS_FOLDER)
            claims = self._read()
            epoch, epoch_file = max([_NOTHING, *epochs, *((claim.owner.epoch, _file(claim)) for claim in claims)])
            if epoch >= EPOCH_MAX:
                raise StorageError(
                    f"{self._files.name_of(epoch_file)}: its name says that application number {epoch} has used this "
                    f"storage, and numbers end at {EPOCH_MAX}: delete this file if none of your applications wrote it"
                )
            last = self._last([*stored, *_lasts(claims)], _SPARE_IDS)
            self._write(Claim(Owner(epoch + 1, self._token), last))

    def reserve(self, count: int, above: int) -> range:
        """The next ``count`` ids above ``above``, which are never reserved again. Raises ``StorageFenced``."""
        if count < 1:
            raise ValueError(f"count must be at least 1, is {count}")
        with self._lock:
            own = self._own()
            known = [(above, ""), (own.last, _file(own)), *_lasts(self._check(own))]
            first = self._last(known, count) + 1
            last = first + count - 1
            self._write(Claim(own.owner, last))
            self._check(self._own())
            return range(first, last + 1)

    def check(self) -> None:
        """Raise ``StorageFenced`` if a later application has taken over, or this one's own marker is gone."""
        own = self._own()
        if own not in self._not_fenced(own):
            with self._lock:  # a reservation may have replaced it just now
                self._check(self._own())

    def _check(self, own: Claim) -> list[Claim]:
        """``check``, with the lock; returns the claims."""
        claims = self._not_fenced(own)
        if own not in claims and not self._files.exists(_file(own)):
            self._not_fenced(own)  # a later application deletes it too
            raise StorageFenced(
                f"{self._files.name_of(_file(own))}: this application's marker was deleted, so another one may have "
                "started without knowing of it. This application must end; the next one continues above every "
                f"checkpoint in the storage. Delete nothing in {CLAIMS_FOLDER} while an application is running"
            )
        return claims

    def _not_fenced(self, own: Claim) -> list[Claim]:
        """All claims. Raises ``StorageFenced`` if one of them is later than this application's."""
        claims = self._read()
        for claim in claims:
            if claim.owner > own.owner:
                raise StorageFenced(
                    f"{self._files.url} was taken over by a later application (number {claim.owner.epoch}, this one is "
                    f"{own.owner.epoch}): do not use one checkpoint directory for two applications at the same time"
                )
        return claims

    def _last(self, known: Iterable[Named], spare: int) -> int:
        """The highest of the ids. Raises ``StorageError`` if fewer than ``spare`` are left above it."""
        last, file = max([_NOTHING, *known])
        if last > ID_MAX - spare:
            raise StorageError(
                f"{self._files.name_of(file)}: no checkpoint ids are left above {last}, because they end at {ID_MAX}"
                + (": delete this file if none of your applications wrote it" if file else "")
            )
        return last

    def _own(self) -> Claim:
        if self._claim is None:
            raise StorageError(f"{self._files.url} is not prepared: call prepare() first")
        return self._claim

    def _read(self) -> list[Claim]:
        names = self._files.names(CLAIMS_FOLDER)
        self._ignored.report(CLAIMS_FOLDER, names)
        return [claim for name in names if (claim := parse_claim(name)) is not None]

    def _write(self, claim: Claim) -> None:
        """Write the claim, and delete what it makes obsolete. Raises ``StorageFenced`` if this claim must not count."""
        self._files.create_empty(_file(claim))
        if self._claim is not None:
            try:
                self._check(self._claim)  # it is not deleted yet, so nobody can have started without seeing it
            except StorageFenced:
                with suppress(StorageError):
                    self._files.remove(_file(claim))
                raise
        self._claim = claim
        for other in self._read():
            # A marker is deleted if this one says everything that it says. One that is left is harmless. One of the
            # same epoch may belong to an application that did not see this one.
            obsolete = other.owner.epoch < claim.owner.epoch or other.owner == claim.owner
            if other != claim and obsolete and other.last <= claim.last:
                with suppress(StorageError):
                    self._files.remove(_file(other))


def _file(claim: Claim) -> str:
    return f"{CLAIMS_FOLDER}/{claim.name}"


def _lasts(claims: Iterable[Claim]) -> list[Named]:
    return [(claim.last, _file(claim)) for claim in claims]
