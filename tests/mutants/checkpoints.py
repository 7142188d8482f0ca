# SPDX-License-Identifier: Apache-2.0

"""Mutants of the barrier tracker: who takes part, which checkpoints complete or abort, the target of a reset."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

TRACKER = "protocol.barrier_tracker.tracker:BarrierTracker."
UNDER_WAY = "protocol.barrier_tracker.under_way:CheckpointsUnderWay."
PENDING = "protocol.barrier_tracker.pending:PendingCheckpoint."
KNOWN = "protocol.barrier_tracker.attempts:KnownAttempts."
SCHEDULE = "protocol.barrier_tracker.schedule:CheckpointSchedule."

CHECKPOINTS = (
    Mutant(
        "reset-overtakes-completion",
        "A reset refers to a checkpoint that is being written, ahead of its completion.",
        "FLINK-20290",
        ("H18",),
        (
            Edit(
                f"{TRACKER}_step",
                "self._under_way.take(input, out)",
                "self._under_way.take(input, out);"
                " self._completed = next((e.checkpoint for e in out if hasattr(e, 'checkpoint')), self._completed)",
            ),
        ),
    ),
    Mutant(
        "reset-names-the-newest",
        "A reset names the checkpoint that was begun last, complete or not.",
        "FLINK-20290",
        ("H18",),
        (
            Edit(
                f"{TRACKER}_subtask_reset",
                "SubtaskResetToCheckpoint(input.subtask, self.restore_id)",
                "SubtaskResetToCheckpoint(input.subtask, self._highest_id)",
            ),
        ),
    ),
    Mutant(
        "batch-restores-a-checkpoint",
        "In batch mode too a retry restores the last completed checkpoint.",
        "feared",
        ("H18",),
        (
            Edit(
                f"{TRACKER}_restore_point",
                "return self._completed if self._mode is RestoreMode.STREAMING else None",
                "return self._completed",
            ),
        ),
    ),
    Mutant(
        "aborts-the-last",
        "Whatever checkpoint is to be given up, it is the last one that goes.",
        "G4",
        ("H44",),
        (
            Edit(
                f"{TRACKER}_abort_requested",
                "self._under_way.abort(input.checkpoint_id, input.reason, out)",
                "self._under_way.abort((self.pending_ids or (input.checkpoint_id,))[-1], input.reason, out)",
            ),
        ),
    ),
    Mutant(
        "abort-is-not-told",
        "The failure of an attempt gives the pending checkpoint up, and nobody is told.",
        "G5",
        ("H16", "H45"),
        (
            Edit(
                f"{TRACKER}_failed",
                '(f"{attempt}: {input.reason}", out)',
                '(f"{attempt}: {input.reason}", [])',
            ),
        ),
    ),
    Mutant(
        "abort-comes-after-the-failure",
        "The abort of the pending checkpoint is told after the failure that caused it.",
        "feared",
        ("H16",),
        (
            Edit(
                f"{TRACKER}_failed",
                '(f"{attempt}: {input.reason}", out)',
                '(f"{attempt}: {input.reason}", aborts := [])',
            ),
            Edit(
                f"{TRACKER}_failed",
                "out.append(input)",
                "out.extend([input, *aborts])",
            ),
        ),
    ),
    Mutant(
        "checkpoint-survives-a-failure",
        "A checkpoint goes on when an attempt that has a part in it fails.",
        "feared",
        ("H16", "H45"),
        (Edit(f"{TRACKER}_failed", 'self._under_way.abort_all(f"{attempt}: {input.reason}", out)', "pass"),),
    ),
    Mutant(
        "stale-acknowledgement-of-another-attempt",
        "The acknowledgement of another attempt of the subtask counts.",
        "G7",
        ("H44",),
        (Edit(f"{PENDING}judge", "if part is None or not part.is_of(word.attempt) or", "if part is None or"),),
        argued=(
            "a third line of defence: a message counts on its own attempt's connection alone, a gateway refuses "
            "what is said of a checkpoint that it was not asked to close for, and the failure of an attempt "
            "ends every checkpoint in which it has a part before another one is accepted"
        ),
    ),
    Mutant(
        "stale-acknowledgement-of-another-checkpoint",
        "A subtask's word about a checkpoint that is over counts for the one that is pending.",
        "G7",
        ("H44",),
        (
            Edit(
                f"{UNDER_WAY}why_stale",
                "pending = self.pending.get(word.checkpoint_id)",
                "pending = self.pending.get(word.checkpoint_id, next(iter(self.pending.values()), None))",
            ),
            Edit(
                f"{UNDER_WAY}take",
                "pending = self.pending[word.checkpoint_id]",
                "pending = self.pending.get(word.checkpoint_id, next(iter(self.pending.values())))",
            ),
        ),
    ),
    Mutant(
        "subsumed-goes-on",
        "A checkpoint that completes leaves the lower ones pending.",
        "feared",
        ("H43",),
        (Edit(f"{UNDER_WAY}complete", "[other for other in lower if not other.savepoint]", "[]"),),
    ),
    Mutant(
        "coordinator-asked-out-of-order",
        "The coordinator is asked for the snapshot of the highest id first.",
        "feared",
        ("H43",),
        (
            Edit(
                f"{UNDER_WAY}move_on",
                "for pending in self.pending.values():",
                "for pending in reversed(list(self.pending.values())):",
            ),
        ),
    ),
    Mutant(
        "complete-before-durable",
        "Both sides are notified of the completion when the write begins.",
        "feared",
        ("H40", "H50"),
        (
            Edit(
                f"{TRACKER}_step",
                "self._under_way.take(input, out)",
                "self._under_way.take(input, out);"
                " [self._stored(CheckpointStored(p.checkpoint_id), now, out)"
                " for p in list(self._under_way.pending.values()) if p.phase is Phase.STORING]",
            ),
        ),
    ),
    Mutant(
        "savepoint-is-a-restore-point",
        "A savepoint becomes the checkpoint that resets refer to.",
        "G6",
        ("H49",),
        (Edit(f"{UNDER_WAY}complete", "None if pending.savepoint else pending.whole", "pending.whole"),),
    ),
    Mutant(
        "savepoint-subsumes",
        "A savepoint that is stored ends the lower checkpoints, and is told as complete.",
        "G6",
        ("H49",),
        (Edit(f"{UNDER_WAY}complete", "if pending.savepoint:", "if False:"),),
    ),
    Mutant(
        "ready-is-not-withheld",
        "An attempt is announced while the others are closing, ahead of the coordinator's snapshot.",
        "feared",
        ("H47",),
        (Edit(f"{UNDER_WAY}_withholds", "pending.phase is Phase.CLOSING and", "False and"),),
    ),
    Mutant(
        "forgotten-while-at-rest",
        "A subtask that waits for its restart takes part as empty, though it will restore something.",
        "feared",
        ("H47",),
        (
            Edit(
                f"{TRACKER}_start_queued",
                "self._attempts.parts(self._restore_point())",
                "self._attempts.parts(None)",
            ),
        ),
    ),
    Mutant(
        "starts-while-a-reset-is-owed",
        "A checkpoint begins although a subtask has failed and is not yet reset.",
        "feared",
        ("H16",),
        (Edit(f"{TRACKER}_obstacle", "if self._attempts.resets_owed and", "if False and"),),
    ),
    Mutant(
        "copies-take-checkpoints",
        "A checkpoint is taken although a subtask has two attempts at the same time.",
        "feared",
        ("H13",),
        (Edit(f"{KNOWN}copies", "if not self._crowded:", "if True:"),),
    ),
    Mutant(
        "finished-has-no-final-state",
        "A subtask that ends during a checkpoint gives nothing to it, and the checkpoint waits in vain.",
        "feared",
        ("H47",),
        (Edit(f"{TRACKER}_final_state", "self._under_way.end_part(attempt, final, out)", "pass"),),
    ),
    Mutant(
        "final-checkpoint-not-owed",
        "A run that ended well owes no checkpoint: its last output is never committed.",
        "feared",
        ("H45", "H57"),
        (Edit(f"{SCHEDULE}run_ended_well", "= now, None, 0", "= inf, None, 0"),),
    ),
    Mutant(
        "final-checkpoint-is-an-earlier-one",
        "A checkpoint that was begun before the run's end passes for the one that commits its last output.",
        "feared",
        ("H45",),
        (
            Edit(
                f"{SCHEDULE}completed",
                "if self.final_id is not None and checkpoint_id >= self.final_id:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "final-checkpoint-is-not-repeated",
        "A final checkpoint that fails is not asked for again.",
        "feared",
        ("H45",),
        (
            Edit(
                f"{SCHEDULE}ended",
                "self.final_at, self.final_id = self.not_before, None",
                "self.final_at, self.final_id = inf, None",
            ),
        ),
    ),
    Mutant(
        "aborted-write-stays",
        "A checkpoint that is aborted while it is being written is not taken back from the storage.",
        "feared",
        ("H44", "H50"),
        (Edit(f"{UNDER_WAY}_end", "if written:", "if False:"),),
    ),
    Mutant(
        "failures-are-not-counted",
        "However many checkpoints fail in a row, the operator is not failed over.",
        "G13",
        ("H45",),
        (Edit(f"{UNDER_WAY}_fail", "self.failures += 1", "pass"),),
    ),
    Mutant(
        "late-completion-counts",
        "A subtask hears of the end of a checkpoint that it does not know.",
        "G5",
        ("H44",),
        (
            Edit(
                "protocol.gateway.outbound:GatewayOutbound.end_checkpoint",
                "if self._checkpoints.pop(checkpoint_id, None) is None:",
                "if self._checkpoints.pop(checkpoint_id, None) is False:",
            ),
            Edit(
                "protocol.subtask.inbound:SubtaskInbound._end_checkpoint",
                "if self._outbound.phase(item.checkpoint_id) is None:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "barrier-before-every-drain",
        "Barriers leave when the first gateway is drained.",
        "feared",
        ("H40", "H42"),
        (
            Edit(
                f"{PENDING}advance",
                "not self._in_step[Step.AWAITING_DRAIN]:",
                "self._in_step[Step.AWAITING_DRAIN] < len(self.parts):",
            ),
            Edit(
                f"{PENDING}advance",
                "if part.step is Step.AWAITING_ACKNOWLEDGE",
                "if True",
            ),
        ),
    ),
    Mutant(
        "doubt-is-told-as-discarded",
        "A checkpoint that is aborted while it is being written is reported as discarded immediately.",
        "E1",
        ("H64",),
        (Edit(f"{UNDER_WAY}_end", "in_doubt = written and not pending.savepoint", "in_doubt = False"),),
    ),
    Mutant(
        "a-reset-ends-the-doubt",
        "A failure or a reset tells every checkpoint in doubt as discarded.",
        "E1",
        ("H64",),
        (
            Edit(
                f"{UNDER_WAY}abort_all",
                "self.give_up(list(self.pending.values()), reason, out)",
                "self.give_up(list(self.pending.values()), reason, out);"
                " out.extend(map(NotifyCheckpointDiscarded, sorted(self.in_doubt))); self.in_doubt.clear()",
            ),
        ),
    ),
)
