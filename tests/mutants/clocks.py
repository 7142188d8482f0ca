# SPDX-License-Identifier: Apache-2.0

"""Mutants without a clock: each disables one timeout (H48)."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

CLOCKS = catalogue(r"""
confirm-timeout-never-fires [feared; H25 H48]
  An attempt that confirms nothing is never failed.
  @ protocol.gateway.outbound:GatewayOutbound.confirm_deadline
  ~ return self._deadline_of(self.awaited) => return None
reconnect-timeout-never-fires [feared; H24 H48]
  The gateway waits forever for its task to come back.
  @ protocol.gateway.machine:GatewayMachine.next_deadline
  ~ return None if stopped_at is None else => return None if True else
task-waits-forever-for-the-driver [feared; H24 H48]
  A task that cannot reach the driver waits forever.
  @ protocol.subtask.machine:SubtaskMachine.next_deadline
  ~ return self._beat_at if self._detached_at is None else => return self._beat_at if True else
a-hanging-method-is-not-reported [E8; H70]
  A method of the coordinator that does not return is never named.
  @ actors.coordination.user_calls:CallWatch.begin
  - if not self._closed and (self._timer is None or self._timer_at > now + self._report_s):
  + if False:
confirm-clock-runs-while-disconnected [feared; H24 H25]
  The time without a connection counts against the confirmation of an event.
  @ protocol.gateway.outbound:GatewayOutbound.attach
  - self._paused_s += now - self.stopped_at
checkpoint-timeout-never-fires [feared; H45 H48]
  A checkpoint that does not complete is never given up.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.next_deadline
  - [pending.deadline for pending in self.pending.values()]
  + []
queued-request-never-refused [feared; H45 H48]
  A request for a checkpoint that cannot start is never refused.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.next_deadline
  - if self.queued is not None:
  + if False:
registration-is-given-up-late [feared; H19 H48]
  A registration that no fact decides is given up at the next look, and not at its own time.
  Argued: looks at Spark's records follow one another while anything is held, and each of them gives up what has
  waited too long: the answer comes late by less than one look
  @ protocol.attempts.ledger:AttemptLedger.next_deadline
  ~ held.since + self._config.give_up_after_s for held in record.held.values() => held.since for held in ()
""")
