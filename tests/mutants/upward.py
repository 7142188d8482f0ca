# SPDX-License-Identifier: Apache-2.0

"""Mutants of the upward path: the subtask's valve, its snapshots, and the coordinator's intake."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

OUTBOUND = "protocol.subtask.outbound:SubtaskOutbound."
NOBODY_COMPARES = Edit("protocol.barrier_tracker.pending:Part.why_torn", "if self.snapshot is None or", "if True or")
"""The tracker would abort a torn checkpoint (H32); the checkers have to detect it without that."""

UPWARD = (
    Mutant(
        "upward-not-held",
        "The upward valve holds nothing during a checkpoint, and nobody compares the two halves.",
        "FLINK-26029",
        ("H31",),
        (
            Edit(f"{OUTBOUND}submit", "if self._closed or (in_snapshot", "if (in_snapshot"),
            NOBODY_COMPARES,
        ),
    ),
    Mutant(
        "held-missing-from-snapshot",
        "What the upward valve holds is left out of the snapshot.",
        "G1",
        ("H31",),
        (Edit(f"{OUTBOUND}_snapshot_held", "for submitted in self._held", "for submitted in ()"),),
    ),
    Mutant(
        "last-held-missing-from-snapshot",
        "The newest of the held events is left out of the snapshot.",
        "G1",
        ("H31",),
        (Edit(f"{OUTBOUND}_snapshot_held", "for submitted in self._held", "for submitted in list(self._held)[:-1]"),),
    ),
    Mutant(
        "held-in-wrong-order",
        "Held events leave, and lie in the snapshot, in the wrong order.",
        "feared",
        ("H30", "H31"),
        (Edit(f"{OUTBOUND}submit", "self._held.append(submitted)", "self._held.appendleft(submitted)"),),
    ),
    Mutant(
        "upward-release-while-another-is-closed",
        "The upward valve opens for one checkpoint while it is closed for another, and nobody compares.",
        "feared",
        ("H43",),
        (
            Edit(
                f"{OUTBOUND}_open",
                "self._make_room(effects)",
                "closed, self._closed = self._closed, []; self._make_room(effects); self._closed = closed",
            ),
            NOBODY_COMPARES,
        ),
    ),
    Mutant(
        "restored-after-new",
        "The held events of a restored snapshot leave after new ones.",
        "G1",
        ("H31",),
        (
            Edit(f"{OUTBOUND}__init__", "self._release([])", "pass"),
            Edit(f"{OUTBOUND}attach", "self._make_room(effects)", "pass"),
        ),
    ),
    Mutant(
        "forgets-to-resend-up",
        "After a reconnect the subtask sends all that is unconfirmed again but the first.",
        "feared",
        ("H24", "H30"),
        (
            Edit(
                f"{OUTBOUND}attach",
                "for item in self.stream.unconfirmed()]",
                "for item in list(self.stream.unconfirmed())[1:]]",
            ),
        ),
    ),
    Mutant(
        "window-not-given-back",
        "A confirmation makes no room at the subtask.",
        "feared",
        ("H27", "H48"),
        (Edit(f"{OUTBOUND}confirm", "self._make_room(effects)", "pass"),),
    ),
    Mutant(
        "taken-items-are-lost",
        "The gateway does not hear that the coordinator has taken an event.",
        "feared",
        ("H27", "H48"),
        (Edit("protocol.gateway.machine:GatewayMachine._take", "self._inbound.take(input.seq)", "pass"),),
    ),
    Mutant(
        "taken-items-are-not-told",
        "The subtask does not hear that the coordinator has taken an event.",
        "feared",
        ("H27", "H48"),
        (Edit("protocol.gateway.machine:GatewayMachine._take", "self._send_confirm(effects, _NOW)", "pass"),),
    ),
    Mutant(
        "held-request-becomes-an-event",
        "A request that a checkpoint holds is stored as an event.",
        "found",
        ("H73",),
        (
            Edit(
                f"{OUTBOUND}_snapshot_held",
                "HeldEvent(self._subtask, submitted.payload, isinstance(submitted, RequestSubmitted))",
                "HeldEvent(self._subtask, submitted.payload)",
            ),
        ),
    ),
    Mutant(
        "restored-request-leaves-as-an-event",
        "A restored request leaves as an event.",
        "found",
        ("H73",),
        (Edit(f"{OUTBOUND}_send_submitted", "elif submitted.is_request:", "elif False:"),),
    ),
    Mutant(
        "late-confirmation-never-leaves",
        "What a subtask has said of a checkpoint is not confirmed with the end of the checkpoint.",
        "feared",
        ("H30",),
        (
            Edit(
                "protocol.gateway.machine:GatewayMachine._end_checkpoint", "self._send_confirm(effects, _LATER)", "pass"
            ),
        ),
        argued=(
            "it only costs memory: nobody waits for this confirmation, the next close or any other confirmation takes "
            "it along, and a resume covers it; until then the task keeps its acknowledgement, state and all. "
            "tests/protocol/test_late_confirmations.py sees it"
        ),
    ),
    Mutant(
        "events-sent-not-restored",
        "After a restore, positions are counted from nothing again.",
        "feared",
        ("H32",),
        (
            Edit(
                "protocol.barrier_tracker.tracker:BarrierTracker._accepted",
                "snapshot.states, snapshot.held, snapshot.events_sent)",
                "snapshot.states, snapshot.held, 0)",
            ),
        ),
    ),
    Mutant(
        "rescale-loses-held-events",
        "With another parallelism, where the parts of two subtasks meet, the held events of one are lost.",
        "feared",
        ("H52",),
        (
            Edit(
                "protocol.barrier_tracker.rescale:rescaled",
                "SubtaskSnapshot(states, (*mine.held, *part.held))",
                "SubtaskSnapshot(states, part.held)",
            ),
        ),
    ),
    Mutant(
        "does-not-compare",
        "The tracker does not compare the two halves of a checkpoint.",
        "feared",
        ("H32",),
        (NOBODY_COMPARES,),
        argued=(
            "a second line of defence: nothing but another bug makes the two halves differ (upward-not-held and "
            "upward-release-while-another-is-closed are hunted without it)"
        ),
    ),
)
