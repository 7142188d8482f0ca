# SPDX-License-Identifier: Apache-2.0

"""Label an operator's checkpoints, so that a restore shows how far the work had come.

A piece of work is one run. Checkpoints that begin before the run has succeeded are labelled ``during``. Those that
begin later, from the final checkpoint on, are labelled ``after``. So a restore that finds ``after`` finds all of the
work. No restore finds the output without the label, or the label without the output.
"""

from __future__ import annotations


class CheckpointLabels:
    """The labels of one operator. ``restored`` is the label of the checkpoint that it starts from. Loop only."""

    def __init__(self, restored: str = "") -> None:
        self.completed = restored
        """The label of the last completed checkpoint."""
        self.runs = 0
        """How many runs have begun since the last ``announce``."""
        self._now = restored
        self._during = self._after = ""
        self._of: dict[int, str] = {}

    def announce(self, during: str, after: str) -> None:
        """The next run is a new piece of work, or another attempt at one that has failed."""
        self._now, self._during, self._after = during, during, after
        self.runs = 0

    def run_begins(self) -> str:
        """Return why a run may not begin: the announced work is done and committed. Empty if it may.

        If nothing was announced, the checkpoints of the run have no label.
        """
        self.runs += 1
        if self._after and self.completed == self._after:
            return f"a second run, although one run has done it and committed its output: {self._after}"
        self._now = self._during
        return ""

    def run_ended(self, succeeded: bool) -> None:
        """Checkpoints that begin from here on contain everything that the run did."""
        if succeeded:
            self._now = self._after

    def see(self, pending_ids: tuple[int, ...]) -> None:
        """Note which checkpoints are in progress: new ones have just begun, missing ones are over."""
        if pending_ids == tuple(self._of):
            return
        self._of = {checkpoint_id: self._of.get(checkpoint_id, self._now) for checkpoint_id in pending_ids}

    def of(self, checkpoint_id: int) -> str:
        """The label of a checkpoint that is in progress."""
        return self._of[checkpoint_id]

    def complete(self, checkpoint_id: int) -> None:
        """The checkpoint is durable."""
        self.completed = self.of(checkpoint_id)


__all__ = ["CheckpointLabels"]
