# SPDX-License-Identifier: Apache-2.0

"""Mutants without a clock: each disables one timeout (H48)."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

GATEWAY = "protocol.gateway.machine:GatewayMachine."
OUTBOUND = "protocol.gateway.outbound:GatewayOutbound."
UNDER_WAY = "protocol.barrier_tracker.under_way:CheckpointsUnderWay."

CLOCKS = (
    Mutant(
        "confirm-timeout-never-fires",
        "An attempt that confirms nothing is never failed.",
        "feared",
        ("H25", "H48"),
        (Edit(f"{OUTBOUND}confirm_deadline", "if not self._awaited:", "if True:"),),
    ),
    Mutant(
        "reconnect-timeout-never-fires",
        "The gateway waits for ever for its task to come back.",
        "feared",
        ("H24", "H48"),
        (Edit(f"{GATEWAY}next_deadline", "return None if stopped_at is None else", "return None if True else"),),
    ),
    Mutant(
        "task-waits-for-ever-for-the-driver",
        "A task that cannot reach the driver waits for ever.",
        "feared",
        ("H24", "H48"),
        (
            Edit(
                "protocol.subtask.machine:SubtaskMachine.next_deadline",
                "return None if self._detached_at is None else",
                "return None if True else",
            ),
        ),
    ),
    Mutant(
        "a-hanging-method-is-not-reported",
        "A method of the coordinator that does not return is never named.",
        "E8",
        ("H70",),
        (
            Edit(
                "actors.coordination.call_watch:CallWatch.begin",
                "if not self._closed and (self._timer is None or self._timer_at > now + self._report_s):",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "confirm-clock-runs-while-disconnected",
        "The time without a connection counts against the confirmation of an event.",
        "feared",
        ("H24", "H25"),
        (Edit(f"{OUTBOUND}attach", "self._paused_s += now - self.stopped_at", "pass"),),
    ),
    Mutant(
        "checkpoint-timeout-never-fires",
        "A checkpoint that does not complete is never given up.",
        "feared",
        ("H45", "H48"),
        (
            Edit(
                f"{UNDER_WAY}next_deadline",
                "[pending.deadline for pending in self.pending.values()]",
                "[]",
            ),
        ),
    ),
    Mutant(
        "queued-request-never-refused",
        "A request for a checkpoint that cannot start is never refused.",
        "feared",
        ("H45", "H48"),
        (Edit(f"{UNDER_WAY}next_deadline", "if self.queued is not None:", "if False:"),),
    ),
    Mutant(
        "registration-is-given-up-late",
        "A registration that no fact decides is given up at the next look, and not at its own time.",
        "feared",
        ("H19", "H48"),
        (
            Edit(
                "protocol.attempts.ledger:AttemptLedger.next_deadline",
                "held.since + self._config.give_up_after_s for held in record.held.values()",
                "held.since for held in ()",
            ),
        ),
        argued=(
            "looks at Spark's books follow one another while anything is held, and each of them gives up what has "
            "waited too long: the answer comes late by less than one look"
        ),
    ),
)
