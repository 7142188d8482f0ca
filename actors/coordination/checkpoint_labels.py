"""What is written on an operator's checkpoints, so that whoever restores one knows how far the work had come.

A piece of work is one run. Checkpoints that begin before it has ended well are labelled ``during``, those that begin
afterwards, its final one first, ``after``. So a restore that finds ``after`` finds all of the work, and no restore can
find its output without the label, or the label without its output.
"""

from __future__ import annotations


class CheckpointLabels:
    """Of one operator; ``restored`` is the label of the checkpoint that it starts from. Loop only."""

    def __init__(self, restored: str = "") -> None:
        self.completed = restored
        """The label of the last completed checkpoint."""
        self.runs = 0
        """How many runs have begun since the last ``announce``."""
        self._now = restored
        self._during = self._after = ""
        self._of: dict[int, str] = {}

    def announce(self, during: str, after: str) -> None:
        """The next run is a new piece of work, or a further try at one that has not ended well."""
        self._now, self._during, self._after = during, during, after
        self.runs = 0

    def run_begins(self) -> str:
        """Return why it may not: the work that was announced is done and committed. Empty where it may.

        A run of an operator for which nothing was announced is no labelled work, and its checkpoints have no label.
        """
        self.runs += 1
        if self._after and self.completed == self._after:
            return f"a second run, although one run has done it and committed its output: {self._after}"
        self._now = self._during
        return ""

    def run_ended(self, succeeded: bool) -> None:
        """What begins from here on holds all that the run did."""
        if succeeded:
            self._now = self._after

    def see(self, pending_ids: tuple[int, ...]) -> None:
        """These are under way: those that are new have begun at this moment, those that are missing are over."""
        if pending_ids == tuple(self._of):
            return
        self._of = {checkpoint_id: self._of.get(checkpoint_id, self._now) for checkpoint_id in pending_ids}

    def of(self, checkpoint_id: int) -> str:
        """The label of one that is under way."""
        return self._of[checkpoint_id]

    def complete(self, checkpoint_id: int) -> None:
        """It is durable."""
        self.completed = self.of(checkpoint_id)


__all__ = ["CheckpointLabels"]
