# SPDX-License-Identifier: Apache-2.0

"""Label an operator's checkpoints with the input that they belong to, and compare it with that of a run that begins.

Checkpoints that begin before a run has succeeded are labelled ``begun``. Those that begin later, from the final
checkpoint on, are labelled ``done``. So a restore that finds ``done`` finds all of the work. No restore finds the
output without the label, or the label without the output. ``inputs`` decides what a label means for a run.
"""

from __future__ import annotations

from actors.coordination.engine.inputs import (
    ActionId,
    BatchInput,
    Comparison,
    Input,
    InputPosition,
    NamedInput,
    NoInput,
    RestoredInput,
    UnnamedInput,
    compare,
    why_not_counted,
    why_refused,
)
from protocol.barrier_tracker import CompletedCheckpoint

NAMES_KEPT = 100
"""How many names of finished inputs a label has, the latest ones."""
CALLS_KEPT = 1024
"""The number of calls of ``run`` whose place is remembered, more than can be in progress at the same time."""


class CheckpointLabels:
    """The labels of one operator in streaming mode. Loop only.

    ``restored`` is the checkpoint that it starts from. ``said`` is what the user says about the first run after it.
    """

    def __init__(self, restored: CompletedCheckpoint | None = None, said: RestoredInput | None = None) -> None:
        self.completed = str(InputPosition(NoInput(), done=True)) if restored is None else restored.label
        """The label of the last completed checkpoint."""
        self.runs = 0
        """How many runs have begun since the last ``announce``."""
        self._restored = restored
        self._said = None if restored is None else said
        self._first: Input | None = None  # of which that was said
        self._now = self.completed
        self._input: Input = NoInput()
        self._batch: BatchInput | None = None
        self._adopted = False
        self._of: dict[int, str] = {}
        self._began_before: set[int] = set()  # checkpoints in progress that began before the first run
        self._has_begun = False
        self._finished = 0  # inputs of this application
        self._finished_before: dict[str, int] = {}  # by call of ``run``
        self._action = ""
        self._runs_of_action = 0
        self._names: tuple[str, ...] = ()  # of the inputs that were finished before the present one
        self._last_batch: InputPosition | None = None

    def announce(self, batch: BatchInput, *, adopted: bool) -> None:
        """The next run is this batch, for the first time or again. ``adopted``: whatever the restored checkpoint is."""
        self._batch, self._adopted = batch, adopted
        self.runs = 0

    def withdraw(self) -> None:
        """The next run is not a batch, unless another one is announced."""
        self._batch = None

    def done_without_run(self, batch: BatchInput) -> None:
        """The batch had nothing for the operator: the next checkpoint commits it."""
        self._input, self._names, self._last_batch = batch, _names_before(self._found(), batch), None
        self._now = self._label(done=True)

    def run_begins(self, action: str) -> tuple[bool, str]:
        """Return whether the run has the input of the last completed checkpoint, and why it may not begin, if so.

        ``action`` is the id of the call of an action that it belongs to; empty for none. If the run may begin, or not,
        the checkpoints from here on belong to it.
        """
        self.runs += 1
        begins = self._input = self._batch or self._input_of(action)
        found = self._found()
        is_done = found is not None and found.done and found.input == begins
        if self._batch and is_done:
            return True, f"a second run, although one run has done {begins} and committed its output"
        comparison = Comparison.OTHER if self._has_no_state() else compare(found, begins)
        if self._said is not None:
            comparison = self._as_said(begins, comparison)
        if comparison.refused and self._batch and self._adopted:
            comparison = Comparison.OTHER
        if comparison.refused:
            return False, why_refused(comparison, found, begins)
        self._has_begun = True
        same = comparison is Comparison.SAME
        self._names = _names_before(found, begins)
        self._last_batch = None if found is None or isinstance(begins, BatchInput) else found.batch
        # What is done stays done while a run of the same input skips it.
        self._now = self._label(done=same and is_done)
        return same, ""

    def why_not_counted(self, before: int, now: int) -> str:
        """Why the run must not count the records of a partition: its input was in another number of them before."""
        return why_not_counted(self._input, before, now)

    def _as_said(self, begins: Input, comparison: Comparison) -> Comparison:
        """What the user has said of the first run and its repetitions, until a checkpoint of a run completes."""
        if self._said == "other":
            return Comparison.OTHER
        self._first = self._first or begins
        repeats = compare(InputPosition(self._first, done=False), begins) is Comparison.SAME
        return Comparison.SAME if repeats else comparison

    def _label(self, *, done: bool) -> str:
        return str(InputPosition(self._input, done, self._names, self._last_batch))

    def _found(self) -> InputPosition | None:
        return InputPosition.read(self.completed)

    def _input_of(self, action: str) -> Input:
        self._runs_of_action = self._runs_of_action + 1 if action == self._action else 0
        self._action = action
        its = ActionId.read(action)
        if not its.call:
            return UnnamedInput(finished_before=self._finished)
        if its.input_id is not None:
            return NamedInput(its.input_id, self._runs_of_action)
        if its.call not in self._finished_before:
            while len(self._finished_before) >= CALLS_KEPT:
                del self._finished_before[next(iter(self._finished_before))]
            self._finished_before[its.call] = self._finished
        return UnnamedInput(its.call, self._runs_of_action, self._finished_before[its.call])

    def _has_no_state(self) -> bool:
        """Whether an earlier release wrote the restored checkpoint, and it holds nothing that could be mistaken."""
        point = self._restored
        return (
            point is not None
            and not point.label
            and not point.coordinator_state
            and not any(state.state or part.held for part in point.subtask_states.values() for state in part.states)
        )

    def run_ended(self, succeeded: bool) -> None:
        """Checkpoints that begin from here on contain everything that the run did."""
        if not succeeded:
            return
        self._now = self._label(done=True)
        match self._input:
            case UnnamedInput() as unnamed:
                self._finished = max(self._finished, unnamed.place + 1)
            case NamedInput():
                self._finished += 1

    def see(self, pending_ids: tuple[int, ...]) -> None:
        """Note which checkpoints are in progress: new ones have just begun, missing ones are over."""
        if pending_ids == tuple(self._of):
            return
        if not self._has_begun:
            self._began_before.update(pending_ids)
        self._of = {checkpoint_id: self._of.get(checkpoint_id, self._now) for checkpoint_id in pending_ids}

    def of(self, checkpoint_id: int) -> str:
        """The label of a checkpoint that is in progress."""
        return self._of[checkpoint_id]

    def complete(self, checkpoint_id: int) -> None:
        """The checkpoint is durable."""
        self.completed = self.of(checkpoint_id)
        if checkpoint_id not in self._began_before:  # otherwise it is what was restored, and the first run is to come
            self._restored = self._said = None


def _names_before(found: InputPosition | None, begins: Input) -> tuple[str, ...]:
    """The names of the inputs that were finished before ``begins``."""
    if found is None:
        return ()
    begins_id = begins.input_id if isinstance(begins, NamedInput) else None
    names = found.finished
    if found.done and isinstance(found.input, NamedInput):
        names = (*names, found.input.input_id)
    return tuple(name for name in names if name != begins_id)[-NAMES_KEPT:]


__all__ = ["CheckpointLabels"]
