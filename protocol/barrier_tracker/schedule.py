# SPDX-License-Identifier: Apache-2.0

"""Decides when a checkpoint is due without a request.

There are two reasons. While an attempt runs, a checkpoint is due every ``interval_s``, but not before ``min_pause_s``
have passed since the last one ended. After a run that succeeded in streaming mode, a *final* one is due, because
otherwise the last output would never be committed. It is due immediately, and again if it fails, until one that started
after the run's end completes. A checkpoint that is due but cannot start stays due until it can: it is late, but never
asked for twice.

Asking means ``TriggerCheckpoint``: the shell takes an id and answers with ``CheckpointTriggered``. If no answer comes,
for example because there was no id, the schedule asks again after ``timeout_s``. It asks for the final one only as
often as failures are tolerated in a row, because the end of the run waits for it (H48).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from protocol.barrier_tracker.vocabulary import CheckpointConfig


@dataclass(slots=True)
class CheckpointSchedule:
    """The due times of one operator's checkpoints. All times are readings of the tracker's clock, in seconds."""

    config: CheckpointConfig
    due_at: float = inf  # by the interval
    final_at: float = inf  # the final one; inf if none is pending
    final_id: int | None = None  # the pending checkpoint that becomes the final one if it completes
    not_before: float = -inf  # the pause after the last one
    asked_until: float = -inf  # until when an answer to the last question is awaited
    final_asked: int = 0  # how often in a row the final one was asked for

    def see_attempts(self, running: bool, now: float) -> None:
        """Start the interval's clock with the first attempt that runs, and stop it with the last."""
        if not running:
            self.due_at = inf
        elif self.due_at == inf and self.config.interval_s is not None:
            self.due_at = now + self.config.interval_s

    def run_ended_well(self, now: float) -> None:
        """Record that the last output waits for a checkpoint that starts from here on."""
        self.final_at, self.final_id, self.final_asked = now, None, 0

    def reset(self) -> None:
        """Forget what is due, because its run no longer counts."""
        self.due_at, self.final_at, self.final_id = inf, inf, None
        self.triggered()

    def triggered(self) -> None:
        """Record that the answer has come, or another request, which has the same effect."""
        self.asked_until, self.final_asked = -inf, 0

    def started(self, checkpoint_id: int) -> None:
        """A checkpoint has started; it covers everything up to here."""
        if self.final_pending and self.final_id is None:
            self.final_id = checkpoint_id

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint is durable, and the coordinator will be told."""
        if self.final_id is not None and checkpoint_id >= self.final_id:
            self.final_at, self.final_id = inf, None

    def ended(self, checkpoint_id: int, now: float) -> None:
        """A checkpoint is over, completed or not."""
        self.not_before = now + self.config.min_pause_s
        if checkpoint_id == self.final_id:
            self.final_at, self.final_id = self.not_before, None

    @property
    def final_pending(self) -> bool:
        """Whether the last output of a successful run is not committed yet."""
        return self.final_at < inf

    def next_deadline(self) -> float | None:
        """When a checkpoint is due, provided that it can start."""
        due_at = self._due_at()
        return None if due_at == inf else due_at

    def is_due(self, now: float) -> bool:
        """Whether to call ``ask``, provided that a checkpoint can start; this check is cheaper."""
        return now >= self._due_at()

    def ask(self, now: float) -> bool:
        """Whether to ask for a checkpoint now. Call it only if one can start."""
        if -inf < self.asked_until <= now:
            self.asked_until = -inf
            if self.final_asked > self.config.tolerated_failures:
                self.final_at = inf
        if now < self._due_at():
            return False
        self.asked_until = now + self.config.timeout_s
        self.final_asked += self.final_pending
        if self.config.interval_s is not None and self.due_at <= now:
            self.due_at += self.config.interval_s
            if self.due_at <= now:  # late by more than an interval: the missed ones are skipped
                self.due_at = now + self.config.interval_s
        return True

    def _due_at(self) -> float:
        due_at = self.not_before if self.due_at < self.not_before else self.due_at  # by the interval
        if self.final_id is None and self.final_at < due_at:
            due_at = self.final_at
        return self.asked_until if due_at < self.asked_until else due_at
