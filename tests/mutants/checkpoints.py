# SPDX-License-Identifier: Apache-2.0

"""Mutants of the barrier tracker: who takes part, which checkpoints complete or abort, the target of a reset."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

CHECKPOINTS = catalogue(r"""
reset-overtakes-completion [FLINK-20290; H18]
  A reset refers to a checkpoint that is being written, ahead of its completion.
  @ protocol.barrier_tracker.tracker:BarrierTracker._step
  - self._under_way.take(input, out)
  + self._under_way.take(input, out); self._completed = next((e.checkpoint for e in out if hasattr(e, \
  + 'checkpoint')), self._completed)
reset-names-the-newest [FLINK-20290; H18]
  A reset names the checkpoint that was begun last, complete or not.
  @ protocol.barrier_tracker.tracker:BarrierTracker._subtask_reset
  - SubtaskResetToCheckpoint(input.subtask, self.restore_id)
  + SubtaskResetToCheckpoint(input.subtask, self._highest_id)
batch-restores-a-checkpoint [feared; H18]
  In batch mode too a retry restores the last completed checkpoint.
  @ protocol.barrier_tracker.tracker:BarrierTracker._restore_point
  ~ return self._completed if self._mode is RestoreMode.STREAMING else None => return self._completed
aborts-the-last [G4; H44]
  Whatever checkpoint is to be given up, it is the last one that goes.
  @ protocol.barrier_tracker.tracker:BarrierTracker._abort_requested
  - self._under_way.abort(input.checkpoint_id, input.reason, out)
  + self._under_way.abort((self.pending_ids or (input.checkpoint_id,))[-1], input.reason, out)
abort-is-not-told [G5; H16 H45]
  The failure of an attempt gives the pending checkpoint up, and nobody is told.
  @ protocol.barrier_tracker.tracker:BarrierTracker._failed
  ~ (f"{attempt}: {input.reason}", out) => (f"{attempt}: {input.reason}", [])
abort-comes-after-the-failure [feared; H16]
  The abort of the pending checkpoint is told after the failure that caused it.
  @ protocol.barrier_tracker.tracker:BarrierTracker._failed
  ~ (f"{attempt}: {input.reason}", out) => (f"{attempt}: {input.reason}", aborts := [])
  @ protocol.barrier_tracker.tracker:BarrierTracker._failed
  ~ out.append(input) => out.extend([input, *aborts])
checkpoint-survives-a-failure [feared; H16 H45]
  A checkpoint goes on when an attempt that has a part in it fails.
  @ protocol.barrier_tracker.tracker:BarrierTracker._failed
  - self._under_way.abort_all(f"{attempt}: {input.reason}", out)
stale-acknowledgement-of-another-attempt [G7; H44]
  The acknowledgement of another attempt of the subtask counts.
  Argued: a third line of defence: a message counts on its own attempt's connection alone, a gateway refuses what is
  said of a checkpoint that it was not asked to close for, and the failure of an attempt ends every checkpoint in
  which it has a part before another one is accepted
  @ protocol.barrier_tracker.pending:PendingCheckpoint.judge
  ~ if part is None or not part.is_of(report.attempt) or => if part is None or
stale-acknowledgement-of-another-checkpoint [G7; H44]
  A subtask's report about a checkpoint that is over counts for the one that is pending.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.why_stale
  - pending = self.pending.get(report.checkpoint_id)
  + pending = self.pending.get(report.checkpoint_id, next(iter(self.pending.values()), None))
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.take
  - pending = self.pending[report.checkpoint_id]
  + pending = self.pending.get(report.checkpoint_id, next(iter(self.pending.values())))
subsumed-goes-on [feared; H43]
  A checkpoint that completes leaves the lower ones pending.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.complete
  - [other for other in lower if not other.savepoint]
  + []
coordinator-asked-out-of-order [feared; H43]
  The coordinator is asked for the snapshot of the highest id first.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.move_on
  - for pending in self.pending.values():
  + for pending in reversed(list(self.pending.values())):
complete-before-durable [feared; H40 H50]
  Both sides are notified of the completion when the write begins.
  @ protocol.barrier_tracker.tracker:BarrierTracker._step
  - self._under_way.take(input, out)
  + self._under_way.take(input, out); [self._stored(CheckpointStored(p.checkpoint_id), now, out) for p in \
  + list(self._under_way.pending.values()) if p.phase is Phase.STORING]
savepoint-is-a-restore-point [G6; H49]
  A savepoint becomes the checkpoint that resets refer to.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.complete
  ~ if pending.savepoint or pending.stored is None: => if pending.stored is None:
savepoint-subsumes [G6; H49]
  A savepoint that is stored ends the lower checkpoints, and is told as complete.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.complete
  - if pending.savepoint:
  + if False:
ready-is-not-withheld [feared; H47]
  An attempt is announced while the others are closing, ahead of the coordinator's snapshot.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._withholds
  - pending.phase is Phase.CLOSING and
  + False and
forgotten-while-at-rest [feared; H47]
  A subtask that waits for its restart takes part as empty, though it will restore something.
  @ protocol.barrier_tracker.tracker:BarrierTracker._start_queued
  ~ self._restore_point(), closes => None, closes
starts-while-a-reset-is-owed [feared; H16]
  A checkpoint begins although a subtask has failed and is not yet reset.
  @ protocol.barrier_tracker.tracker:BarrierTracker._obstacle
  ~ if self._attempts.resets_owed and => if False and
request-waits-for-the-next-run [found; H43 H48]
  A request waits for the reset that comes with the next run, which is not started while a request waits.
  @ protocol.barrier_tracker.tracker:BarrierTracker._run_ended
  F if self._attempts.resets_owed:
request-waits-after-too-many-failures [found; H43 H45]
  A request after too many failed checkpoints waits for the reset, and the failed run does not return meanwhile.
  @ protocol.barrier_tracker.tracker:BarrierTracker._start_queued
  F if self._under_way.halted:
copies-take-checkpoints [feared; H13]
  A checkpoint is taken although a subtask has two attempts at the same time.
  @ protocol.barrier_tracker.tracker:KnownAttempts.copies
  - if not self._crowded:
  + if True:
finished-has-no-final-state [feared; H47]
  A subtask that ends during a checkpoint gives nothing to it, and the checkpoint waits for it forever.
  @ protocol.barrier_tracker.tracker:BarrierTracker._final_state
  - self._under_way.end_part(attempt, final, out)
final-checkpoint-not-owed [feared; H45 H57]
  A run that ended well owes no checkpoint: its last output is never committed.
  @ protocol.barrier_tracker.tracker:CheckpointSchedule.run_ended_well
  - = now, None, 0
  + = inf, None, 0
final-checkpoint-is-an-earlier-one [feared; H45]
  A checkpoint that was begun before the run's end passes for the one that commits its last output.
  @ protocol.barrier_tracker.tracker:CheckpointSchedule.completed
  - if self.final_id is not None and checkpoint_id >= self.final_id:
  + if True:
final-checkpoint-is-not-repeated [feared; H45]
  A final checkpoint that fails is not asked for again.
  @ protocol.barrier_tracker.tracker:CheckpointSchedule.ended
  - self.final_at, self.final_id = self.not_before, None
  + self.final_at, self.final_id = inf, None
aborted-write-stays [feared; H44 H50]
  A checkpoint that is aborted while it is being written is not taken back from the storage.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._end
  - if written:
  + if False:
rescale-that-fails-counts [found; H45 H199]
  The checkpoint of a change of the parallelism that fails is one of those that may fail in a row.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._fail
  T if pending.counts and not pending.savepoint:
failures-are-not-counted [G13; H45]
  However many checkpoints fail in a row, the operator is not failed over.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._fail
  - self.failures += 1
late-completion-counts [G5; H44]
  A subtask hears of the end of a checkpoint that it does not know.
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  ~ if self._checkpoints.pop(checkpoint_id, None) is None: => if self._checkpoints.pop(checkpoint_id, None) is False:
  @ protocol.subtask.inbound:SubtaskInbound._end_checkpoint
  F if self._outbound.phase(item.checkpoint_id) is None:
stored-before-the-cut [feared; H40 H78]
  A checkpoint whose subtasks have all acknowledged it is stored before the coordinator's snapshot is there.
  @ protocol.barrier_tracker.pending:PendingCheckpoint.advance
  - if self.phase is Phase.ACKNOWLEDGING and not self._in_step[Step.AWAITING_ACKNOWLEDGE]:
  + if self.phase in (Phase.SNAPSHOTTING, Phase.ACKNOWLEDGING) and self.parts and self.settled():
  @ protocol.barrier_tracker.pending:PendingCheckpoint._whole
  ~ assert self.coordinator_state is not None => self.coordinator_state = self.coordinator_state or b""
one-of-many-may-be-torn [feared; H32]
  The usual snapshot of a subtask is not compared with what the coordinator had taken at its cut.
  @ protocol.subtask.outbound:SubtaskOutbound.submit
  - if waits or (self._closed and not window.outside):
  + if waits:
  @ protocol.barrier_tracker.pending:PendingCheckpoint.take_one_of_many
  ~ (part.events_taken != sent and not part.agrees(sent)) => False
last-of-many-moves-nothing-on [feared; H40]
  The last report of a step is taken like the others, and the checkpoint waits for nothing.
  @ protocol.barrier_tracker.pending:PendingCheckpoint.take_one_of_many
  - if self.phase is not _CLOSING or step is not _AWAITING_CLOSE or in_step[step] == 1:
  + if self.phase is not _CLOSING or step is not _AWAITING_CLOSE:
drained-gateway-sends-no-barrier [feared; H42 H78]
  A barrier that waits for a confirmation does not leave when the confirmation comes.
  @ protocol.gateway.outbound:GatewayOutbound._trim
  F if self.closed:
barrier-waits-for-later-events [feared; H42 H78]
  A barrier leaves only when everything that was sent to its subtask so far is confirmed, of after the cut too.
  @ protocol.gateway.outbound:GatewayOutbound._send_barriers
  ~ and self._settled >= checkpoint.submitted_at_cut => and self._settled >= self._submitted
doubt-is-told-as-discarded [E1; H64]
  A checkpoint that is aborted while it is being written is reported as discarded immediately.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._end
  - in_doubt = written and not pending.savepoint
  + in_doubt = False
a-reset-ends-the-doubt [E1; H64]
  A failure or a reset tells every checkpoint in doubt as discarded.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.abort_all
  - self.give_up(list(self.pending.values()), reason, out)
  + self.give_up(list(self.pending.values()), reason, out); out.extend(map(NotifyCheckpointDiscarded, \
  + sorted(self.in_doubt))); self.in_doubt.clear()
""")
