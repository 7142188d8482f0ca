# SPDX-License-Identifier: Apache-2.0

"""The attempts of one operator that are not over, and which of its subtasks wait for their reset.

The attempt ledger decides about attempts. This module keeps the part of its decisions that checkpoints depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.barrier_tracker.pending import Part, Step
from protocol.barrier_tracker.vocabulary import CompletedCheckpoint, SubtaskSnapshot
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Positions


@dataclass(slots=True)
class KnownAttempt:
    """An attempt that is not over: accepted, then ready, then perhaps finished, which may be revoked.

    ``events_restored``: where its count of events began (H32). ``final``: its final state.
    """

    attempt: ExecutionAttempt
    events_restored: Positions
    ready: bool = False
    finished: bool = False
    final: SubtaskSnapshot | None = None


@dataclass(slots=True)
class KnownAttempts:
    """Attempts by task attempt id, in the order of acceptance. ``resets_owed``: subtasks that failed and await a reset.

    Every input asks whether any attempt runs, and whether a subtask has several. These are counted as they change,
    because an operator may have thousands of subtasks.
    """

    parallelism: int
    by_task: dict[int, KnownAttempt] = field(default_factory=dict)
    resets_owed: set[int] = field(default_factory=set)
    _tasks_of: dict[int, list[int]] = field(default_factory=dict)  # by subtask
    _crowded: set[int] = field(default_factory=set)  # subtasks with several alive and none finished
    _running: int = 0  # that are ready and have not finished

    def get(self, attempt: ExecutionAttempt) -> KnownAttempt | None:
        """The attempt, or None if it is over or unknown."""
        return self.by_task.get(attempt.task_attempt_id)

    def accept(self, attempt: ExecutionAttempt, events_restored: Positions) -> None:
        self.by_task[attempt.task_attempt_id] = KnownAttempt(attempt, events_restored)
        self._tasks_of.setdefault(attempt.subtask, []).append(attempt.task_attempt_id)
        self._look_at(attempt.subtask)

    def become_ready(self, attempt: ExecutionAttempt) -> None:
        known = self.by_task[attempt.task_attempt_id]
        known.ready = True
        self._running += not known.finished

    def finish(self, attempt: ExecutionAttempt) -> None:
        known = self.by_task[attempt.task_attempt_id]
        known.finished = True
        self._running -= known.ready
        self._look_at(attempt.subtask)

    def fail(self, attempt: ExecutionAttempt) -> None:
        """Remove an attempt that is over. If it was the last one of its subtask, the reset is due (H13)."""
        known = self.by_task.pop(attempt.task_attempt_id, None)
        if known is None:
            return
        self._running -= known.ready and not known.finished
        self._tasks_of[attempt.subtask].remove(attempt.task_attempt_id)
        self._look_at(attempt.subtask)
        if not self._tasks_of[attempt.subtask]:
            del self._tasks_of[attempt.subtask]
            self.resets_owed.add(attempt.subtask)

    def keep_finished(self) -> None:
        """End the run: forget every attempt that has not finished."""
        self.by_task = {key: known for key, known in self.by_task.items() if known.finished}
        self._tasks_of.clear()
        for task_attempt_id, known in self.by_task.items():
            self._tasks_of.setdefault(known.attempt.subtask, []).append(task_attempt_id)
        self._crowded.clear()
        self._running = 0

    def clear(self) -> None:
        """Reset the operator: no attempt is left, and no reset is due."""
        self.by_task.clear()
        self.resets_owed.clear()
        self._tasks_of.clear()
        self._crowded.clear()
        self._running = 0

    def of_subtask(self, subtask: int) -> list[KnownAttempt]:
        return [self.by_task[task_attempt_id] for task_attempt_id in self._tasks_of.get(subtask, ())]

    def running(self) -> bool:
        """Whether any attempt is ready and has not finished."""
        return self._running > 0

    def copies(self) -> str:
        """Name a subtask with several live attempts and none finished, so without a single state; otherwise empty."""
        if not self._crowded:
            return ""
        subtask = min(self._crowded)
        return f"subtask {subtask} has {len(self._tasks_of[subtask])} concurrent attempts"

    def _look_at(self, subtask: int) -> None:
        known = self.of_subtask(subtask)
        if len(known) > 1 and not any(attempt.finished for attempt in known):
            self._crowded.add(subtask)
        else:
            self._crowded.discard(subtask)

    def parts(
        self, point: CompletedCheckpoint | None, *, closes: bool, hold_events: bool
    ) -> tuple[dict[int, Part], dict[int, SubtaskSnapshot]]:
        """The parts of a checkpoint that starts now: of running and finished subtasks, and of those at rest (H47).

        ``point`` is the checkpoint that the next attempt of a subtask at rest would restore. ``closes``: whether
        subtasks are asked to close.
        """
        first, settled = Step.AWAITING_CLOSE if closes else Step.AWAITING_ACKNOWLEDGE, Step.SETTLED
        parts: dict[int, Part] = {}
        at_rest: dict[int, SubtaskSnapshot] = {}
        for subtask in range(self.parallelism):
            known = self._speaks_for(subtask)
            if known is not None:
                step = first if known.final is None else settled
                parts[subtask] = Part(known.attempt, known.events_restored, step, known.final, None, hold_events)
            elif point is not None and subtask in point.subtask_states:
                at_rest[subtask] = point.subtask_states[subtask]
        return parts, at_rest

    def _speaks_for(self, subtask: int) -> KnownAttempt | None:
        """The attempt whose state is that of the subtask; None if the subtask is at rest."""
        tasks = self._tasks_of.get(subtask)
        if tasks is None:
            return None
        if len(tasks) == 1:  # as it usually is, of thousands of subtasks
            known = self.by_task[tasks[0]]
            return known if known.ready or known.finished else None
        running = [known for known in self.of_subtask(subtask) if known.ready or known.finished]
        ended = [known for known in running if known.finished]
        return ended[-1] if ended else running[0] if running else None

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the counts are wrong."""
        counted = KnownAttempts(self.parallelism)
        for known in self.by_task.values():
            counted.accept(known.attempt, known.events_restored)
            if known.ready:
                counted.become_ready(known.attempt)
            if known.finished:
                counted.finish(known.attempt)
        assert self._tasks_of == counted._tasks_of
        assert self._crowded == counted._crowded
        assert self._running == counted._running
