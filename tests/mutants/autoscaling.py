# SPDX-License-Identifier: Apache-2.0

"""Mutants: an operator gets another parallelism than its backlog needs, too soon, or from a part of the figures."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

AUTOSCALING = catalogue(r"""
grows-beyond-the-largest-number [feared; H199]
  An operator gets more subtasks than it may have.
  @ protocol.autoscaling:Autoscaler._wanted
  ~ max(policy.min, min(policy.max, needed)) => max(policy.min, needed)
grows-beyond-the-slots [feared; H199]
  An operator gets more subtasks than Spark can run at the same time.
  @ protocol.autoscaling:Autoscaler._wanted
  F if slots is not None and wanted > max(slots, parallelism):
shrinks-to-the-slots [feared; H199]
  An operator loses subtasks because Spark has fewer slots for a moment.
  @ protocol.autoscaling:Autoscaler._wanted
  - wanted = max(slots, parallelism)
  + wanted = slots
one-change-after-the-other [feared; H199]
  Nothing waits between two changes.
  @ protocol.autoscaling:Autoscaler.decide
  F if now - self._changed_at < self.policy.pause_s:
grows-to-the-peak [feared; H199]
  An operator grows to the largest number that was wanted, however briefly.
  @ protocol.autoscaling:Autoscaler.__init__
  ~ _Window(policy.up_after_s, le) => _Window(policy.up_after_s, ge)
shrinks-to-the-least [feared; H199]
  An operator shrinks to the smallest number that was wanted, however briefly.
  @ protocol.autoscaling:Autoscaler.__init__
  ~ _Window(policy.down_after_s, ge) => _Window(policy.down_after_s, le)
first-figure-decides [feared; H199]
  A window is taken for complete when it has one figure.
  @ protocol.autoscaling:Autoscaler.decide
  F if now - self._sampled_at > GAP_S:
refused-change-every-second [feared; H199]
  A change that was refused is tried again immediately.
  @ protocol.autoscaling:Autoscaler.decide
  F if now < self._again_at:
missing-subtasks-have-nothing [feared; H199]
  What is in the splits of subtasks that do not run does not count, and the operator shrinks.
  @ actors.coordination.sources.source:SourceCoordinator._whole_backlog
  F if missing := self._context.parallelism - len(readers | self._finished):
silent-subtasks-have-nothing [feared; H199]
  What is in the splits of a subtask that has just been restored does not count, and the operator shrinks.
  @ actors.coordination.sources.source:SourceCoordinator._whole_backlog
  F if silent := sorted(readers & ((reading - self._backlogs.keys()) | (readers - self._heard))):
nobody-reports-so-nothing-is-left [found; H199]
  A source whose readers report nothing counts as read.
  @ actors.coordination.sources.source:SourceCoordinator._whole_backlog
  F if known.amount is None and not self._reported:
scales-what-has-its-name [feared; H199]
  An operator that replaces another one is scaled by what that one had.
  @ spark_bridge.driver.autoscaling:Autoscaling._is_mine
  ~ operator.autoscaling is self => True
change-by-hand-ends-the-scaling [feared; H199]
  An operator that is away for a change by hand is taken for one that is released.
  @ spark_bridge.driver.autoscaling:Autoscaling._run
  F if self._rescaling.is_under_way(self._operator_id):
refusal-is-not-noted [feared; H199]
  What refuses a change is not in the status, and is asked again immediately.
  @ spark_bridge.driver.autoscaling:Autoscaling._change
  - self._scaler.refused(anyio.current_time())
scaling-ends-with-its-first-change [feared; H199]
  The operator that has started again is not scaled any more.
  @ spark_bridge.driver.rescaling:Rescaling._continue
  - operator.autoscaling, operator.observed.autoscale = before.autoscaling, before.observed.autoscale
""")
