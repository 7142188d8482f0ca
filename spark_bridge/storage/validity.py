"""Which of the checkpoints that lie in a storage a restart may restore (pure).

A file that lies there may be one that both sides were told is aborted: its write succeeded although an error was
reported, or hung and succeeded after its driver had died, whenever that is. Removing it promises nothing, for it may
appear afterwards. What counts are two kinds of markers, empty files beside the checkpoints whose names say all:

* A **void marker**: the application that wrote checkpoint N has discarded it.
* A **restore record**: an application has started the operator from checkpoint ``base`` (0 for nothing), and every
  checkpoint of its own has an id of ``first`` or more. It is written before that application destroys anything.

So a checkpoint between ``base`` and ``first`` is void for ever: it was not there when the application chose, or it was
passed over, and what it refers to may be gone. Below ``base`` the records before it decide. The base itself may be
restored again whatever markers say: only a fenced application can have marked it, too late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spark_bridge.storage.layout import RestoreRecord

NOTHING = 0
"""The base of an application that has started an operator from nothing; ids are from 1."""


@dataclass(frozen=True)
class Validity:
    """What the markers of one operator say. ``records``: the latest first."""

    voided: Collection[int] = frozenset()
    records: Sequence[RestoreRecord] = ()

    @classmethod
    def of(cls, voided: Iterable[int], records: Iterable[RestoreRecord]) -> Validity:
        """From markers in any order."""
        return cls(frozenset(voided), sorted(records, reverse=True))

    @property
    def base(self) -> int:
        """What the operator was last started from; 0 for nothing, or if that is not known."""
        return self.records[0].base if self.records else NOTHING

    def may_restore(self, checkpoint_id: int) -> bool:
        """Whether ``latest`` may return this checkpoint, if it lies there."""
        for record in self.records:
            if checkpoint_id >= record.first:
                break
            if checkpoint_id >= record.base:
                return checkpoint_id == record.base
        return checkpoint_id not in self.voided

    def superseded(self) -> list[RestoreRecord]:
        """The records that say nothing any more, because later ones decide all that they could."""
        useless, base = [], None
        for record in self.records:
            if base is not None and record.base >= base:
                useless.append(record)
            else:
                base = record.base
        return useless


def no_longer_kept(
    ids: Iterable[int], validity: Validity, retained: int, completed_id: int, not_counted: Collection[int] = ()
) -> list[int]:
    """Of ``ids``, those that retention deletes: void ones, and those older than the ``retained`` last completed ones.

    ``completed_id`` is the last completed one. What is above it is being written or in doubt: it neither counts nor
    goes. ``not_counted`` holds others that count for nothing, because they were given up or are damaged.
    """
    ids = sorted(ids)
    counted = [id_ for id_ in ids if id_ <= completed_id and id_ not in not_counted and validity.may_restore(id_)]
    oldest_kept = counted[-retained:][0] if counted else NOTHING
    return [id_ for id_ in ids if id_ < oldest_kept or not validity.may_restore(id_)]


def why_not_recorded(operator_id: str, base: int, first: int) -> str:
    """Why an operator cannot be started from ``base`` with ids from ``first``; empty if it can."""
    if base < first:
        return ""
    return (
        f"operator {operator_id!r} cannot start from checkpoint {base}: this storage gives out ids from {first} only; "
        "if the file was put there by hand, restart the application, or name the file (restore=FILE)"
    )


def base_is_elsewhere(operator_id: str, base: int) -> str:
    """Why nothing can be restored without being named."""
    return (
        f"operator {operator_id!r} was last started from checkpoint {base}, which does not lie in this storage (a "
        "savepoint or another storage's file), and no checkpoint has completed since: name that file again "
        "(restore=FILE), start from nothing (restore='none'), or allow an older checkpoint (allow_older=True; of a "
        "sidecar: SidecarConfig(allow_older_checkpoint=True)), whose output since then may be written twice"
    )
