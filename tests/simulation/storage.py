"""The storage, which outlives every driver. It is slow, it fails, and what it is to take away may lie there for long.

A checkpoint appears whole or not at all (H50). When its driver dies in the middle of a write it may still appear; one
that was given up may not have been taken away yet. Both are whole, so the next driver may start from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.barrier_tracker import CompletedCheckpoint
from tests.simulation.application import Stored

BLOCK = 8
"""So many ids a driver reserves at a time; what it does not use is lost (H4)."""


@dataclass
class Write:
    """``end`` is called with whether it has succeeded."""

    stored: Stored
    savepoint: bool
    end: Callable[[bool], None]


@dataclass
class Storage:
    """``given``: the highest id that was ever given out."""

    random: Random
    files: dict[int, Stored] = field(default_factory=dict)
    savepoints: dict[int, Stored] = field(default_factory=dict)
    writing: dict[int, Write] = field(default_factory=dict)
    unwanted: list[int] = field(default_factory=list)
    given: int = -1
    reserved: int = -1
    slowness: float = 0.0  # how likely a write goes on a little longer, while something else can happen

    def __post_init__(self) -> None:
        self.slowness = self.random.choice([0.0, 0.0, 0.95, 0.998])

    def next_id(self, may_fail: bool) -> int | None:
        """None when no more ids could be reserved."""
        if self.given == self.reserved:
            if may_fail and self.random.random() < 0.2:
                return None
            self.reserved += BLOCK
        self.given += 1
        return self.given

    def begin(
        self, checkpoint: CompletedCheckpoint, ways: tuple[int, ...], savepoint: bool, end: Callable[[bool], None]
    ) -> None:
        self.writing[checkpoint.checkpoint_id] = Write(Stored(checkpoint, ways), savepoint, end)

    def end_one(self, may_fail: bool) -> None:
        """A write ends, any one of them; one that has failed may leave the file behind."""
        checkpoint_id = self.random.choice(list(self.writing))
        write = self.writing[checkpoint_id]
        failed = may_fail and self.random.random() < 0.05
        if not failed:
            self._appear(checkpoint_id)
        elif self.random.random() < 0.3 and not write.savepoint:
            self._appear(checkpoint_id)
            self.unwanted.append(checkpoint_id)
        else:
            del self.writing[checkpoint_id]
        write.end(not failed)

    def _appear(self, checkpoint_id: int) -> None:
        write = self.writing.pop(checkpoint_id)
        (self.savepoints if write.savepoint else self.files)[checkpoint_id] = write.stored

    def give_up(self, checkpoint_id: int) -> None:
        """Stop the write, if it still runs, unless the file is appearing at this moment."""
        if checkpoint_id in self.writing:
            if self.random.random() < 0.5:
                self._appear(checkpoint_id)
            else:
                del self.writing[checkpoint_id]

    def discard(self, checkpoint_id: int) -> None:
        """Stop the write, if it still runs; what is there all the same is taken away, some day."""
        self.give_up(checkpoint_id)
        if checkpoint_id in self.files and checkpoint_id not in self.unwanted:
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
