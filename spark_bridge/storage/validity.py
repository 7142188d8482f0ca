# SPDX-License-Identifier: Apache-2.0

"""Which of the checkpoints in a storage a restart may restore (pure).

A file in the storage may be a checkpoint that both sides consider aborted: its write succeeded although an error was
reported, or it hung and succeeded at any time after its driver had died. Deleting the file guarantees nothing, because
it may appear afterwards. What counts are two kinds of markers, empty files next to the checkpoints, which carry all
information in their names:

* A **void marker**: the application that wrote checkpoint N has discarded it. It does not count if another application,
  which is not earlier, used the ids from N on. That happens if somebody deleted the claims: both were assigned N.
* A **restore record**: an application has started the operator from checkpoint ``base`` (0 for nothing), and all its
  own checkpoints have ids of ``first`` or more. It is written before that application destroys anything.

So a checkpoint between ``base`` and ``first`` is void permanently: it did not exist when the application chose, or it
was skipped, and what it refers to may be gone. Below ``base``, the earlier records decide. The base itself may be
restored again whatever the markers say: only a fenced application can have marked it, and that was too late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spark_bridge.storage.layout import Owner, RestoreRecord

NOTHING = 0
"""The base of an application that has started an operator from nothing; ids start at 1."""


@dataclass(frozen=True)
class Validity:
    """The meaning of the markers of one operator. ``records`` has the latest first."""

    voided: Collection[int] = frozenset()
    records: Sequence[RestoreRecord] = ()

    @classmethod
    def of(cls, voids: Iterable[tuple[int, Owner]], records: Iterable[RestoreRecord]) -> Validity:
        """Read markers, given in any order. Each void marker has the owner that wrote it."""
        records = sorted(records, reverse=True)
        return cls(frozenset(id_ for id_, owner in voids if not _belongs_to_another(id_, owner, records)), records)

    @property
    def base(self) -> int:
        """The checkpoint that the operator was last started from; 0 for nothing or unknown."""
        return self.records[0].base if self.records else NOTHING

    def may_restore(self, checkpoint_id: int) -> bool:
        """Whether ``latest`` may return this checkpoint, if it exists."""
        for record in self.records:
            if checkpoint_id >= record.first:
                break
            if checkpoint_id >= record.base:
                return checkpoint_id == record.base
        return checkpoint_id not in self.voided

    def superseded(self) -> list[RestoreRecord]:
        """The records that no longer have an effect, because later ones decide everything they could."""
        useless, base = [], None
        for record in self.records:
            if base is not None and record.base >= base:
                useless.append(record)
            else:
                base = record.base
        return useless


def _belongs_to_another(checkpoint_id: int, owner: Owner, records: Iterable[RestoreRecord]) -> bool:
    """Whether a checkpoint with this id is certainly not one of ``owner``."""
    return any(
        record.first <= checkpoint_id and record.owner != owner and record.owner.epoch >= owner.epoch
        for record in records
    )


def no_longer_kept(
    ids: Iterable[int], validity: Validity, retained: int, completed_id: int, not_counted: Collection[int] = ()
) -> list[int]:
    """The ``ids`` that retention deletes: void ones, and those older than the ``retained`` last completed ones.

    ``completed_id`` is the last completed one. A later one is being written or in doubt, so it is neither counted nor
    deleted. ``not_counted`` holds others that do not count, because they were given up or are damaged.
    """
    ids = sorted(ids)
    counted = [id_ for id_ in ids if id_ <= completed_id and id_ not in not_counted and validity.may_restore(id_)]
    oldest_kept = counted[-retained:][0] if counted else NOTHING
    return [id_ for id_ in ids if id_ < oldest_kept or not validity.may_restore(id_)]


def why_not_recorded(operator_id: str, base: int, first: int) -> str:
    """The reason why an operator cannot be started from ``base`` with ids from ``first``; empty if it can."""
    if base < first:
        return ""
    return (
        f"operator {operator_id!r} cannot start from checkpoint {base}, because this storage assigns ids from {first} "
        "on: if the file was copied there by hand, restart the application, or name the file "
        "(restore=CheckpointFile(FILE))"
    )


def base_is_elsewhere(operator_id: str, base: int) -> str:
    """The reason why only a checkpoint that the user names can be restored."""
    return (
        f"operator {operator_id!r} was last started from checkpoint {base}, which is not in this storage (a "
        "savepoint or a file of another storage), and no checkpoint has completed since: name that file again "
        "(restore=CheckpointFile(FILE)), start from nothing (restore='none'), or allow an older checkpoint "
        "(allow_older=True; of a sidecar: storage_details=StorageDetails(allow_older_checkpoint=True)), whose output "
        "since then may be written twice"
    )
