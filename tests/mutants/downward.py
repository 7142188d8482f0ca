# SPDX-License-Identifier: Apache-2.0

"""Mutants of the downward path: the gateway, its valve, its confirmations, and the subtask's intake."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

GATEWAY = "protocol.gateway.machine:GatewayMachine."
OUTBOUND = "protocol.gateway.outbound:GatewayOutbound."
INBOUND = "protocol.subtask.inbound:SubtaskInbound."

DOWNWARD = (
    Mutant(
        "completes-with-confirmations-pending",
        "A gateway is drained at its cut, whatever is unconfirmed.",
        "FLINK-21996",
        ("H42",),
        (
            Edit(
                f"{OUTBOUND}_report_drained",
                "and self._settled >= checkpoint.submitted_at_cut",
                "and self._settled >= 0",
            ),
        ),
    ),
    Mutant(
        "drains-on-failure",
        "An event that has failed counts as confirmed for the checkpoint that waits for it.",
        "FLINK-23233",
        ("H42",),
        (
            Edit(
                f"{OUTBOUND}fail_all",
                "self._settled = self._submitted",
                "self._settled = self._submitted; self._report_drained(effects)",
            ),
        ),
    ),
    Mutant(
        "confirms-when-sent",
        "An event is confirmed when it is written, not when it is in the mailbox.",
        "FLINK-23233",
        ("H23",),
        (
            Edit(
                f"{OUTBOUND}_send_submitted",
                "stream.append(item, len(payload), submitted.event_id)",
                "stream.append(item, len(payload)); effects.append(ConfirmEvent(submitted.event_id))",
            ),
        ),
    ),
    Mutant(
        "reopens-at-barrier-injection",
        "The gateway reopens when the barrier leaves, not at the subtask's own acknowledgement.",
        "FLINK-28606",
        ("H41",),
        (
            Edit(
                f"{GATEWAY}_send_barrier",
                "self._outbound.send_barrier(input.checkpoint_id, input.apart, effects)",
                "self._outbound.send_barrier(input.checkpoint_id, input.apart, effects);"
                " self._outbound._reopen(input.checkpoint_id, now, effects)",
            ),
            Edit(
                f"{OUTBOUND}_reopen",
                "closed.remove(checkpoint_id)",
                "closed.remove(checkpoint_id) if checkpoint_id in closed else None",
            ),
        ),
    ),
    Mutant(
        "forgets-the-unconfirmed-on-abort",
        "An aborted checkpoint empties the tracker: the next one does not wait for what was unconfirmed.",
        "G3",
        ("H42",),
        (
            Edit(
                f"{OUTBOUND}end_checkpoint",
                "if checkpoint_id in self.closed:",
                "self._settled = self._submitted if outcome is CheckpointOutcome.ABORTED else self._settled\n"
                "    if checkpoint_id in self.closed:",
            ),
        ),
    ),
    Mutant(
        "opens-the-last-on-abort",
        "A checkpoint that is over opens the gateway for the last one that has closed it.",
        "G4",
        ("H44", "H43"),
        (
            Edit(
                f"{OUTBOUND}end_checkpoint",
                "self._reopen(checkpoint_id, now, effects)",
                "self._reopen(self.closed[-1], now, effects)",
            ),
        ),
    ),
    Mutant(
        "reopens-for-any",
        "With several checkpoints, a held event leaves when any of them opens.",
        "feared",
        ("H43",),
        (
            Edit(
                f"{OUTBOUND}_reopen",
                "while held and not (closed and closed[0] <= held[0][0]):",
                "while held:",
            ),
        ),
    ),
    Mutant(
        "barrier-overtakes",
        "A barrier that comes on its own way does not wait for the events before it.",
        "G8",
        ("H23",),
        (
            Edit(
                f"{INBOUND}take_barrier_apart",
                "self._apart[checkpoint_id] = barrier.events_before",
                "self._apart[checkpoint_id] = 0",
            ),
        ),
    ),
    Mutant(
        "barrier-names-too-little",
        "A barrier names the last event but one as the one that it follows.",
        "G8",
        ("H23",),
        (
            Edit(
                f"{OUTBOUND}send_barrier",
                "events_before = self._last_event_seq",
                "events_before = self._last_event_seq - 1",
            ),
        ),
    ),
    Mutant(
        "barrier-twice",
        "A barrier is put twice into the mailbox.",
        "feared",
        ("H22",),
        (
            Edit(
                f"{INBOUND}_meet_barrier",
                "effects.append(PutInMailbox(MailboxBarrier(checkpoint_id)))",
                "effects.extend([PutInMailbox(MailboxBarrier(checkpoint_id))] * 2)",
            ),
        ),
    ),
    Mutant(
        "events-twice",
        "An event is put twice into the mailbox.",
        "feared",
        ("H22",),
        (
            Edit(
                f"{INBOUND}take",
                "effects.append(PutInMailbox(MailboxEvent(item.payload)))",
                "effects.extend([PutInMailbox(MailboxEvent(item.payload))] * 2)",
            ),
        ),
    ),
    Mutant(
        "resend-without-suppression",
        "What is sent again after a reconnect is taken again.",
        "G9",
        ("H22", "H30"),
        (
            Edit(
                "protocol.streams:IncomingStream.is_new",
                "return seq == expected",
                "self.received_seq = seq - 1; return True",
            ),
        ),
    ),
    Mutant(
        "forgets-to-resend-down",
        "After a reconnect the gateway sends all that is unconfirmed again but the first.",
        "feared",
        ("H24",),
        (
            Edit(
                f"{OUTBOUND}attach",
                "for item in self.stream.unconfirmed()]",
                "for item in list(self.stream.unconfirmed())[1:]]",
            ),
        ),
    ),
    Mutant(
        "held-not-failed",
        "Events that are held when the attempt is over are forgotten, not failed.",
        "feared",
        ("H26",),
        (Edit(f"{OUTBOUND}fail_all", "for _, _, held in self._held:", "for _, _, held in ():"),),
    ),
    Mutant(
        "unconfirmed-not-failed",
        "Events that are unconfirmed when the attempt is over are forgotten, not failed.",
        "feared",
        ("H26",),
        (Edit(f"{OUTBOUND}fail_all", "for event_id in self.stream.tags():", "for event_id in ():"),),
    ),
    Mutant(
        "answers-pass-the-valve",
        "The answer to a request passes the closed gateway.",
        "G14",
        ("H33", "H41"),
        (Edit(f"{OUTBOUND}submit_answer", "if self.closed:", "if False:"),),
        argued=(
            "with the actors around it, the machine never holds an answer: the coordinator answers within the "
            "call that brings the request, and no request comes between its cut and the subtask's snapshot, "
            "because the upward valve is closed all that time and what left before lies in front of the cut"
        ),
    ),
    Mutant(
        "drain-forgets-answers",
        "A checkpoint does not wait for the answers of before its cut.",
        "G14",
        ("H33", "H42"),
        (Edit(f"{OUTBOUND}submit_answer", "self._submitted += 1", "pass"),),
    ),
    Mutant(
        "waits-for-the-loss-tolerant",
        "An attempt that does not confirm a loss-tolerant event is failed for it.",
        "G10",
        ("H28",),
        (Edit(f"{OUTBOUND}_send_submitted", "awaited = not submitted.loss_tolerant", "awaited = True"),),
    ),
    Mutant(
        "tolerates-for-ever",
        "The wait for a loss-tolerant event that is not confirmed never ends.",
        "E15",
        ("H72",),
        (
            Edit(
                f"{OUTBOUND}tolerant_deadline",
                "if not self._tolerated:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "expires-twice",
        "The wait for a loss-tolerant event that has ended ends again.",
        "feared",
        ("H72",),
        (
            Edit(
                f"{OUTBOUND}expire_tolerant",
                "effects.append(ExpireEvent(event_id, ConfirmationTimeout(reason)))",
                "effects.extend([ExpireEvent(event_id, ConfirmationTimeout(reason))] * 2)",
            ),
        ),
    ),
    Mutant(
        "expires-too-soon",
        "The clock of a loss-tolerant event does not stand still while no connection is up.",
        "feared",
        ("H72",),
        (
            Edit(
                f"{OUTBOUND}tolerant_deadline",
                "return self._tolerated[0][1] + self._limits.confirm_timeout_s + self._paused_s",
                "return self._tolerated[0][1] + self._limits.confirm_timeout_s",
            ),
        ),
    ),
    Mutant(
        "delivers-before-ready",
        "Events come to the coordinator before it knows that their subtask is ready.",
        "feared",
        ("H10", "H11"),
        (
            Edit(
                "protocol.gateway.inbound:GatewayInbound._take_item",
                "if not self._ready and (self._kept or isinstance(item, PAYLOAD)):",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "confirms-before-taken",
        "An upward event is confirmed when it arrives, not when the coordinator has taken it.",
        "feared",
        ("H27", "H30"),
        (
            Edit(
                "protocol.streams:IncomingStream.confirmable_seq",
                "return self._untaken[0][0] - 1 if self._untaken else self.received_seq",
                "return self.received_seq",
            ),
        ),
    ),
)
