"""The attempts of one operator that are not over, and which of its subtasks wait for their reset.

The tracker believes what the attempt ledger decided; here is written down what of it checkpoints depend on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol.barrier_tracker.pending import Part
from protocol.barrier_tracker.vocabulary import CompletedCheckpoint, SubtaskSnapshot
from protocol.ids import ExecutionAttempt


@dataclass(slots=True)
class KnownAttempt:
    """An attempt that is not over: accepted, then ready, then perhaps finished, a success that may be
    revoked.

    ``events_restored``: where its count of events began (H32). ``final``: what it ended with.
    """

    attempt: ExecutionAttempt
    events_restored: int
    ready: bool = False
    finished: bool = False
    final: SubtaskSnapshot | None = None


@dataclass(slots=True)
class KnownAttempts:
    """By task attempt id, in the order of their acceptance. ``resets_owed``: failed, and not yet reset."""

    parallelism: int
    by_task: dict[int, KnownAttempt] = field(default_factory=dict)
    resets_owed: set[int] = field(default_factory=set)

    def get(self, attempt: ExecutionAttempt) -> KnownAttempt | None:
        """None when it is over or unknown."""
        return self.by_task.get(attempt.task_attempt_id)

    def accept(self, attempt: ExecutionAttempt, events_restored: int) -> None:
        self.by_task[attempt.task_attempt_id] = KnownAttempt(attempt, events_restored)

    def fail(self, attempt: ExecutionAttempt) -> None:
        """It is over. When it was the last one of its subtask, the reset is owed (H13)."""
        known = self.by_task.pop(attempt.task_attempt_id, None)
        if known is not None and not self.of_subtask(attempt.subtask):
            self.resets_owed.add(attempt.subtask)

    def keep_finished(self) -> None:
        """The run is over, and so is everybody who has not finished."""
        self.by_task = {key: known for key, known in self.by_task.items() if known.finished}

    def clear(self) -> None:
        """The operator is reset: nobody is left, and nothing is owed."""
        self.by_task.clear()
        self.resets_owed.clear()

    def of_subtask(self, subtask: int) -> list[KnownAttempt]:
        return [known for known in self.by_task.values() if known.attempt.subtask == subtask]

    def running(self) -> bool:
        """Whether any is ready and has not finished."""
        return any(known.ready and not known.finished for known in self.by_task.values())

    def copies(self) -> str:
        """Name a subtask with several attempts alive and none finished, which has no single state; empty for none."""
        finished = {known.attempt.subtask for known in self.by_task.values() if known.finished}
        alive = Counter(known.attempt.subtask for known in self.by_task.values())
        for subtask, count in sorted(alive.items()):
            if count > 1 and subtask not in finished:
                return f"subtask {subtask} has {count} attempts at once"
        return ""

    def parts(self, point: CompletedCheckpoint | None) -> tuple[dict[int, Part], dict[int, SubtaskSnapshot]]:
        """Who takes part in a checkpoint that starts now: those that run or have finished, and those at rest (H47).

        ``point`` is what the next attempt of a subtask at rest would restore.
        """
        parts: dict[int, Part] = {}
        at_rest: dict[int, SubtaskSnapshot] = {}
        for subtask in range(self.parallelism):
            running = [known for known in self.of_subtask(subtask) if known.ready or known.finished]
            if running:
                ended = [known for known in running if known.finished]
                known = ended[-1] if ended else running[0]
                parts[subtask] = part = Part(known.attempt, known.events_restored)
                if known.final is not None:
                    part.settle(known.final)
            elif point is not None and subtask in point.subtask_states:
                at_rest[subtask] = point.subtask_states[subtask]
        return parts, at_rest
