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
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from spark_bridge.storage.errors import StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import CLAIMS_FOLDER, Claim, Owner, parse_claim


class Claims:
    """The claims of one application. The methods block, and may be called from any thread."""

    def __init__(self, files: Files, token: str) -> None:
        self._files = files
        self._token = token
        self._lock = Lock()
        self._claim: Claim | None = None

    @property
    def owner(self) -> Owner:
        """This application, as it marks its files. Raises ``StorageError`` before ``take_over``."""
        return self._own().owner

    def exist(self) -> bool:
        """Whether any application has ever used this storage."""
        return bool(self._read())

    def take_over(self, highest_stored: int, highest_epoch: int = 0) -> None:
        """Fence every earlier application, and assign no id up to ``highest_stored``. Idempotent.

        ``highest_epoch`` is the highest epoch that was found elsewhere, in case the markers here were deleted.
        """
        with self._lock:
            if self._claim is not None:
                return
            self._files.make_folder(CLAIMS_FOLDER)
            claims = self._read()
            epoch = max([highest_epoch, *(claim.owner.epoch for claim in claims)]) + 1
            last = max([highest_stored, 0, *(claim.last for claim in claims)])
            self._write(Claim(Owner(epoch, self._token), last))

    def reserve(self, count: int, above: int) -> range:
        """The next ``count`` ids above ``above``, which are never reserved again. Raises ``StorageFenced``."""
        if count < 1:
            raise ValueError(f"count must be at least 1, is {count}")
        with self._lock:
            first = max([above, self._own().last, *(claim.last for claim in self._check())]) + 1
            last = first + count - 1
            self._write(Claim(self._own().owner, last))
            self._check()
            return range(first, last + 1)

    def check(self) -> None:
        """Raise ``StorageFenced`` if a later application has taken over."""
        self._check()

    def _check(self) -> list[Claim]:
        own = self._own()
        claims = self._read()
        for claim in claims:
            if claim.owner > own.owner:
                raise StorageFenced(
                    f"{self._files.url} was taken over by a later application (number {claim.owner.epoch}, this one is "
                    f"{own.owner.epoch}): do not use one checkpoint directory for two applications at the same time"
                )
        return claims

    def _own(self) -> Claim:
        if self._claim is None:
            raise StorageError(f"{self._files.url} is not prepared: call prepare() first")
        return self._claim

    def _read(self) -> list[Claim]:
        return [claim for name in self._files.names(CLAIMS_FOLDER) if (claim := parse_claim(name)) is not None]

    def _write(self, claim: Claim) -> None:
        self._files.create_empty(f"{CLAIMS_FOLDER}/{claim.name}")
        self._claim = claim
        for other in self._read():
            # A marker is deleted if this one says everything that it says. One that is left is harmless.
            if other != claim and other.owner <= claim.owner and other.last <= claim.last:
                with suppress(StorageError):
                    self._files.remove(f"{CLAIMS_FOLDER}/{other.name}")
