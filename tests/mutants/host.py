# SPDX-License-Identifier: Apache-2.0

"""Mutants of the driver's host of parts: who may act, and what reaches whom."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

HOST = catalogue(
    """
replaced-coordinator-acts [G16; H26]
  What a coordinator does after a reset has replaced it has an effect.
  @ actors.coordination.host.incarnation:Incarnation.may_act
  ~ self.part.acting == self.number => True
replaced-coordinator-works-on-in-the-background [G16; H9]
  A function that a replaced coordinator runs in the background is not cancelled.
  @ actors.coordination.host.incarnation:Incarnation.cancel_guarded
  - scope.cancel()
handler-before-the-start-of-its-coordinator [feared; H5]
  A handler of a new coordinator is called while its start is still in progress.
  @ actors.coordination.host.incarnation:Incarnation.takes_calls
  F if not self.begun.is_set():
sender-of-a-restored-message-is-an-address [found; H151]
  A coordinator fails if it answers a restored message of a subtask that a lower parallelism does not have.
  @ actors.coordination.host.gateway:GatewayTable.of
  - if subtask >= self.parallelism and self._handles_restored():
  + if False:
no-subtask-is-too-high [new; H151]
  A coordinator that sends to a subtask that never was is not told so.
  @ actors.coordination.host.gateway:GatewayTable.of
  - if subtask >= self.parallelism and self._handles_restored():
  + if subtask >= self.parallelism:
own-part-is-not-held-for-the-cut [found; H80 H41]
  What the user's own coordinator sends while its state is joined to those of the parts is before the cut.
  @ actors.coordination.host.part:Parts.snapshot_taken
  ~ part.held = self._held => part.held = self._held if part.name else None
started-incarnation-is-not-closed [R105; H6]
  A coordinator whose start was in progress at a reset is never closed.
  @ actors.coordination.host.part:Part._begin
  - self._unclosed.append(new)
failed-start-takes-calls [feared; H7]
  A coordinator whose start has failed gets the calls after it.
  @ actors.coordination.host.part:Part._begin
  ~ new.failure = error => new.failure = error; new.live = new.coordinator
background-of-a-plan-outlives-it [G16; H133]
  What an enumerator of a stream runs in the background goes on after the plan has closed it.
  @ actors.coordination.host.alone:HostAlone.close
  - self._incarnation.cancel_guarded()
plan-goes-on-after-fail-job [new; H8]
  An enumerator that fails its job while a stream is planned is ignored.
  @ actors.coordination.host.alone:HostAlone.check
  F if self._failure is not None:
"""
)
