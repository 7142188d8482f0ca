"""The storage, which outlives every driver. It is slow, it fails, and what it is to take away may lie there for long.

A checkpoint appears whole or not at all (H50). When its driver dies in the middle of a write it may still appear; one
that was given up may not have been taken away yet. Both are whole, so the next driver may start from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from protocol.barrier_tracker import CompletedCheckpoint
from tests.simulation.application import Stored

BLOCK = 8
"""So many ids a driver reserves at a time; what it does not use is lost (H4)."""


@dataclass
class Storage:
    """``given``: the highest id that was ever given out."""

    random: Random
    files: dict[int, Stored] = field(default_factory=dict)
    savepoints: dict[int, Stored] = field(default_factory=dict)
    writing: dict[int, tuple[Stored, bool]] = field(default_factory=dict)  # and whether it is a savepoint
    unwanted: list[int] = field(default_factory=list)
    given: int = -1
    reserved: int = -1

    def next_id(self, may_fail: bool) -> int | None:
        """None when no more ids could be reserved."""
        if self.given == self.reserved:
            if may_fail and self.random.random() < 0.2:
                return None
            self.reserved += BLOCK
        self.given += 1
        return self.given

    def begin(self, checkpoint: CompletedCheckpoint, ways: tuple[int, ...], savepoint: bool) -> None:
        self.writing[checkpoint.checkpoint_id] = Stored(checkpoint, ways), savepoint

    def end_one(self, may_fail: bool) -> tuple[int, bool]:
        """A write ends, any one of them; False if it has failed, which may leave the file behind."""
        checkpoint_id = self.random.choice(list(self.writing))
        failed = may_fail and self.random.random() < 0.05
        if not failed:
            self._appear(checkpoint_id)
        elif self.random.random() < 0.3 and not self.writing[checkpoint_id][1]:
            self._appear(checkpoint_id)
            self.unwanted.append(checkpoint_id)
        else:
            del self.writing[checkpoint_id]
        return checkpoint_id, not failed

    def _appear(self, checkpoint_id: int) -> None:
        stored, savepoint = self.writing.pop(checkpoint_id)
        (self.savepoints if savepoint else self.files)[checkpoint_id] = stored

    def discard(self, checkpoint_id: int, savepoint: bool) -> None:
        """Stop the write, if it still runs, unless the file is appearing; then it is taken away, some day."""
        if checkpoint_id in self.writing:
            if self.random.random() < 0.5:
                self._appear(checkpoint_id)
            else:
                del self.writing[checkpoint_id]
        if not savepoint and checkpoint_id in self.files and checkpoint_id not in self.unwanted:
            self.unwanted.append(checkpoint_id)

    def take_away_one(self) -> None:
        checkpoint_id = self.unwanted.pop(self.random.randrange(len(self.unwanted)))
        self.files.pop(checkpoint_id, None)

    def lose_driver(self) -> None:
        """Each write that was under way has appeared, or never will; nobody takes anything away any more."""
        for checkpoint_id in list(self.writing):
            if self.random.random() < 0.5:
                self._appear(checkpoint_id)
        self.writing.clear()
        self.unwanted.clear()
        self.given = self.reserved

    def choose(self) -> Stored | None:
        """What the next driver starts from: the newest one, or now and then another that the user names (H52)."""
        others = [*self.files.values(), *self.savepoints.values()]
        if others and self.random.random() < 0.2:
            return self.random.choice(others)
        return self.files[max(self.files)] if self.files else None
