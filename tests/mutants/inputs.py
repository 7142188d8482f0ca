# SPDX-License-Identifier: Apache-2.0

"""Mutants: a run takes the records of another input for its own."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

INPUTS = catalogue(
    """
positions-of-the-run-before-are-used [new; H174]
  A run after one that ended well skips its first records.
  @ protocol.barrier_tracker.tracker:BarrierTracker._input_began
  ~ VIRTUAL_EMPTY_CHECKPOINT if input.same else latest => VIRTUAL_EMPTY_CHECKPOINT
positions-of-an-interrupted-run-are-lost [new; H174]
  A run that continues an interrupted one processes its records again.
  @ protocol.barrier_tracker.tracker:BarrierTracker._input_began
  ~ VIRTUAL_EMPTY_CHECKPOINT if input.same else latest => latest
states-at-rest-change-their-input [new; H174]
  A checkpoint takes the state of a subtask at rest for one of the running input.
  @ protocol.barrier_tracker.tracker:BarrierTracker._start_queued
  - at_rest = {subtask: replace(one, earlier_input=True) for subtask, one in at_rest.items()}
an-earlier-checkpoint-completes-as-that-of-the-run [new; H174]
  A checkpoint that began before the run counts as one of its input if it completes later.
  @ protocol.barrier_tracker.tracker:BarrierTracker._input_began
  ~ latest = max((*self._under_way.pending, self.completed_id)) => latest = self.completed_id
rescaled-states-forget-their-input [new; H174]
  A state of an earlier input counts as one of the label's after a change of parallelism.
  @ protocol.barrier_tracker.rescale:rescaled
  ~ earlier_input=earlier => earlier_input=False
positions-count-in-other-partitions [found; H174]
  A run of the same input in another number of partitions skips as many records as other partitions had processed.
  @ protocol.barrier_tracker.tracker:BarrierTracker._partitions_before
  ~ return point.partitions if has_positions else 0 => return 0
a-wrong-number-of-partitions-becomes-the-right-one [new; H174]
  A checkpoint during a run whose operator is never ready says that its positions count in the partitions of that run.
  @ protocol.barrier_tracker.tracker:BarrierTracker._accepted
  - self._partitions = input.partitions or self._attempts.parallelism
  + self._counted_in = self._partitions = input.partitions or self._attempts.parallelism
an-earlier-input-fixes-the-partitions [new; H174]
  A run is refused because an earlier input was in another number of partitions.
  @ protocol.barrier_tracker.tracker:BarrierTracker._partitions_before
  ~ any(not part.earlier_input for part in point.subtask_states.values()) => True
a-change-of-parallelism-is-forgotten [new; H174 H52]
  After a change of parallelism, positions count as if the input had always been in so many partitions.
  @ protocol.barrier_tracker.rescale:rescaled
  ~ partitions = checkpoint.partitions or checkpoint.parallelism => partitions = parallelism
partitions-are-not-waited-for [new; H174 H58]
  A run begins before Spark has said in how many partitions its input is, and counts as one in all of them.
  @ protocol.attempts.admission:decide
  - return Wait(WaitsFor.PARTITIONS)
  + return Acceptance()
an-operator-with-positions-begins-all-the-same [new; H174]
  A task that counts records begins, although its input is in another number of partitions.
  @ spark_bridge.subtask.runner:_Run.open
  F if registered.positions_refused and parts.counts_records:
nobody-asks-whose-records-a-state-counts [new; H174]
  An operator that never asks for its input skips as many of today's records as yesterday's state counts.
  @ spark_bridge.subtask.context:to_one_that_asks
  F if not context._has_asked:
code-that-asks-later-is-not-found [new; H174]
  An operator that asks for its input in ``process``, when it needs to know, fails with other input.
  @ spark_bridge.subtask.parts:OperatorParts._might_skip
  ~ counts and restores and not mentions(type(operator), "input_begins_again") => counts and restores
a-base-class-asks-in-a-method-that-is-overridden [new; H174]
  An operator that never asks counts as one that does, because its base class has code that is never called.
  @ protocol.overrides:mentions
  - overridden.add(attribute)
  + pass
one-streaming-operator-counts-the-outputs-of-another [found; H174]
  Two operators in streaming mode run in the same tasks, and the second one loses rows after a retry.
  @ protocol.attempts.admission:why_not_both
  T if len(task.streaming) < 2 or not task.confirmed:
a-claim-fails-a-streaming-operator [new; H174 H75]
  A registration for a task that Spark has not confirmed fails the run of another operator.
  @ protocol.attempts.admission:why_not_both
  - if len(task.streaming) < 2 or not task.confirmed:
  + if len(task.streaming) < 2:
what-was-said-is-forgotten-before-the-first-run [found; H174]
  A checkpoint completes before the first run begins, and what the user said about that run is forgotten.
  @ actors.coordination.engine.inputs:CheckpointLabels.complete
  - checkpoint_id not in self._began_before
  + True
a-plain-run-hides-the-last-batch [found; H174]
  After a plain run between two batches, a batch that Spark repeats is written again.
  @ actors.coordination.engine.inputs:CheckpointLabels.run_begins
  - else found.batch
  + else None
finished-names-are-forgotten-after-another-kind-of-run [found; H174]
  An input that was finished before a run without a name, or before a micro-batch, is written again.
  @ actors.coordination.engine.inputs:_names_before
  - if found is None:
  + if found is None or not isinstance(begins, NamedInput):
a-stray-micro-batch-runs [new; H174 H175]
  A streaming operator runs in a foreachBatch that nothing has announced, and writes repeated batches twice.
  @ spark_bridge.task_entry:_refuse_stray_batch
  F if query_id and context.getLocalProperty(BATCH_PROPERTY) != endpoint.operator_id:
another-name-is-taken-for-an-interrupted-one [new; H174]
  A run with another input_id continues the input that was interrupted.
  @ actors.coordination.engine.inputs:compare
  - return Comparison.OTHER if found.done else Comparison.INTERRUPTED
  + return Comparison.OTHER if found.done else Comparison.SAME
another-place-continues [new; H174]
  The first run of an application continues what was the second one of an earlier application.
  @ actors.coordination.engine.inputs:compare
  ~ return Comparison.SAME if old.place == new.place else Comparison.OTHER_PLACE => return Comparison.SAME
an-action-that-returned-is-taken-for-an-interrupted-one [found; H174]
  An operator fails after Spark has finished its job. The plain action returns, and the next one skips records.
  @ actors.coordination.engine.inputs:CheckpointLabels.run_ended
  - (job_succeeded and plain)
  + False
a-failed-run-hides-that-its-job-succeeded [new; H174]
  A run that failed says that its job did not succeed, although Spark called it a success.
  @ protocol.attempts.operator:OperatorLedger.end_run
  - computed, missing, job_succeeded)
  + computed, missing, succeeded)
what-is-said-of-the-first-run-holds-for-the-next [found; H174]
  After restored_input="same", a run with another input skips its first records too, until a checkpoint completes.
  @ actors.coordination.engine.inputs:CheckpointLabels._as_said
  - return Comparison.SAME if repeats else comparison
  + return Comparison.SAME
what-is-done-is-begun-while-it-is-skipped [new; H174]
  A run that skips a finished input labels its checkpoints as if the input were unfinished.
  @ actors.coordination.engine.inputs:CheckpointLabels.run_begins
  - self._label(done=same and is_done)
  + self._label(done=False)
a-batch-that-is-over-is-that-of-every-run [new; H174]
  A plain run after a micro-batch is labelled as this batch.
  @ actors.coordination.engine.inputs:CheckpointLabels.withdraw
  - self._batch = None
the-last-output-is-dropped-by-the-next-run [new; H174]
  A run that begins immediately resets the operator before the previous run's final checkpoint is complete.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._must_wait
  ~ return begins and => return False and
the-coordinator-keeps-the-run-before [new; H174]
  The first run of an application with other input does not reset the coordinator.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._start_run
  ~ if not (same or self._has_run) and => if False and
an-enumeration-of-the-day-before [new; H174]
  A run with other input gets the enumerator's state, which says that everything is read.
  @ actors.coordination.sources.source:SourceCoordinator._build_for_run
  ~ return self._build_checked(None) if self._forgets else enumerator => return enumerator
training-of-the-day-before [found; H105 H174]
  A group begins a run with other input with the checkpoint of the run before, and trains nothing.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator.reset_to_checkpoint
  ~ (self._is_batch or self._context.input_begins_again) => True
splits-in-hand-of-another-input [new; H174]
  A reader reads splits that it had in hand in an interrupted run of another input.
  @ spark_bridge.subtask.source:SplitReader.handle_event
  - self.splits.clear()
files-are-looked-for-once-ever [new; H174]
  A source that looks once does not look again on the next day.
  @ actors.coordination.sources.enumerators:DiscoveringSplitEnumerator.start
  ~ or not context.coordinator.input_begins_again: => or False:
sinks-skip-whatever-comes [new; H174]
  A sink skips as many records as its state says, whosever they are.
  @ spark_bridge.sinks.two_phase.task:TwoPhaseSinkOperator.restore_position
  ~ if position is not None and self.context.input_begins_again: => if position is not None:
"""
)
