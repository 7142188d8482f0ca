"""Checkpoint ids that rise for the life of a storage, and the fence between applications (H4).

Both are told by empty marker files, whose names say all (``layout.Claim``): an application claims the storage with an
epoch above every other one's, and a block of ids with the highest of them. A marker is written before what it claims
is used, so neither a crash nor a restart brings an id back.

The later of two applications fences the earlier: it writes its marker before it looks for the newest checkpoint, and
every application looks at the markers just before and just after it gives a checkpoint its name. So where a
listing shows every file that was there when it began (a local disk, HDFS, S3, GCS), either the later one finds the
checkpoint or the earlier one is told ``StorageFenced``. Where listings lag (NFS with cached attributes), the window is
narrowed to that lag, not closed.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from spark_bridge.storage.errors import StorageError, StorageFenced
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import CLAIMS_FOLDER, Claim, Owner, parse_claim


class Claims:
    """One application's claims. Blocking; may be called from any thread."""

    def __init__(self, files: Files, token: str) -> None:
        self._files = files
        self._token = token
        self._lock = Lock()
        self._claim: Claim | None = None

    @property
    def owner(self) -> Owner:
        """Raises ``StorageError`` before ``take_over``."""
        return self._own().owner

    def exist(self) -> bool:
        """Whether any application has ever used this storage."""
        return bool(self._read())

    def take_over(self, highest_stored: int, highest_epoch: int = 0) -> None:
        """Fence every application before this one; no id up to ``highest_stored`` is given out. Once only.

        ``highest_epoch``: the highest that is found elsewhere, in case the markers here were deleted.
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
        """The next ``count`` ids above ``above``; nobody else has had or will have them. Raises ``StorageFenced``."""
        if count < 1:
            raise ValueError(f"count must be at least 1, is {count}")
        with self._lock:
            first = max([above, self._own().last, *(claim.last for claim in self._check())]) + 1
            last = first + count - 1
            self._write(Claim(self._own().owner, last))
            self._check()
            return range(first, last + 1)

    def check(self) -> None:
        """Raises ``StorageFenced`` when a later application has taken over."""
        self._check()

    def _check(self) -> list[Claim]:
        own = self._own()
        claims = self._read()
        for claim in claims:
            if claim.owner > own.owner:
                raise StorageFenced(
                    f"{self._files.url} was taken over by a later application (number {claim.owner.epoch}, this one is "
                    f"{own.owner.epoch}): two applications must not use one checkpoint directory at the same time"
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
            # A marker goes when this one says all that it says; one that stays is harmless.
            if other != claim and other.owner <= claim.owner and other.last <= claim.last:
                with suppress(StorageError):
                    self._files.remove(f"{CLAIMS_FOLDER}/{other.name}")
