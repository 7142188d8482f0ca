# SPDX-License-Identifier: Apache-2.0

"""Mutants: what a coordinator knows does not return with its tasks, or a restored message gets an answer."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

BOOKKEEPING = catalogue(
    """
finished-items-stay-finished [found; H153 H100]
  A queue says that there is no more while a restored task works again on what it had finished.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.subtask_reset
  - self._work_again(subtask, (id_ for id_, _ in finished))
items-of-a-lost-copy-stay-finished [new; H153 H100]
  A queue says that there is no more while an attempt works on what a copy of it had done that is lost.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.attempt_ended
  - self._work_again(subtask, copies_undone[0].intersection(*copies_undone[1:]))
end-of-a-superseded-copy-takes-back [found; H100]
  When the second copy beside a success is lost, what the success has done is in work again.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.attempt_ended
  F if not succeeded and subtask in self._superseded:
what-one-copy-has-done-is-undone-for-all [new; H100]
  When a copy is lost, what one of the others has done is in work, too.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.attempt_ended
  ~ copies_undone[0].intersection(*copies_undone[1:]) => copies_undone[0].union(*copies_undone[1:])
items-that-are-found-too-late-are-lost [new; H100]
  What only the attempt that counts has added, after the work had ended, is done by nobody.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._put_back_of_returned
  - if (subtask, attempt) in self._too_late and self._waiting_count:
  + if False:
finished-items-are-in-no-checkpoint [new; H153]
  A reset also returns what was finished before the checkpoint.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.snapshot_state
  - self._finished.on_checkpoint(checkpoint_id)
items-are-known-by-their-place [found; H100 H153]
  What a task adds in its second visit of an item is taken for what it added in the same place in the first.
  @ spark_bridge.primitives.work_queue.messages:id_of_child
  ~ + encoded) => + b"")
equal-items-of-one-parent-count-once [new; H100]
  Of equal items that one item adds, only the first is done.
  @ spark_bridge.primitives.work_queue.task:WorkQueuePart._id_of
  ~ return id_of_child(parent.id, encoded, number) if number else first => return first
restored-requests-for-splits-are-answered [found; H151]
  A split is assigned to the first sender of a restored request, which may not exist.
  @ actors.coordination.sources.source:SourceCoordinator.handle_event_from_operator
  - case SplitRequested() | BacklogReported() if self._context.handles_restored:
  + case SplitRequested() | BacklogReported() if False:
answers-to-first-senders-fail-the-job [found; H151]
  An enumerator that assigns a split to the first sender of a restored event fails the job.
  @ actors.coordination.sources.source:SourceCoordinator._handle_restored
  - self._unsent = unsent
splits-for-first-senders-are-lost [new; H151]
  A split that is assigned to the first sender of a restored event does not come back.
  @ actors.coordination.sources.source:SourceCoordinator._handle_restored
  - await self._ask(self.enumerator.add_splits_back, splits, sender)
progress-counts-what-is-read-again [new; H153]
  After a reset, the progress of a source counts splits in the restored state as read.
  @ actors.coordination.sources.source:SourceCoordinator.subtask_reset
  ~ self._reading[subtask] = self._reading_at.get(checkpoint_id, {}).get(subtask, 0) => self._reading.pop(subtask, None)
restored-wishes-for-a-value-are-granted [found; H151]
  A shared value is sent to the first sender of a restored message.
  @ spark_bridge.primitives.shared_value.driver:_Coordinator.handle_event_from_operator
  F if self._context.handles_restored:
hybrid-waits-for-everybody-after-a-restore [found; H132 H153]
  The next source waits for subtasks for which the checkpoint has nothing, and which may have no slot.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.start
  T if self._unread_restored is None:
hybrid-waits-for-nobody-after-a-restore [new; H132 H153]
  The next source begins before restored readers have read what the checkpoint has for them.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.start
  - self._unread.update(subtask % context.parallelism for subtask in self._unread_restored)
hybrid-waits-for-every-lost-task [found; H132 H153]
  The next source waits for a lost task to which its checkpoint returns nothing.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.subtask_reset
  T if subtask in self._unread_at.get(checkpoint_id, self._unread_first):
hybrid-waits-for-no-lost-task [new; H132 H153]
  The next source begins before a lost reader has read what its checkpoint has for it.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.subtask_reset
  F if subtask in self._unread_at.get(checkpoint_id, self._unread_first):
aborted-checkpoints-take-counts-along [found; H153 H101]
  Counts that a task has filed under a checkpoint that is aborted are missing in the next one.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator._needed
  ~ return {one: filed[one] for one in (*needed, *ids[-1:])} => return {one: filed[one] for one in ids if one in cuts}
end-of-the-changes-is-not-rolled-back [new; H153]
  A checkpoint says where changes have ended that a restored task reads again.
  @ spark_bridge.sources.postgres.driver:PostgresEnumerator.add_splits_back
  F if low == CHANGES_READ:
"""
)
