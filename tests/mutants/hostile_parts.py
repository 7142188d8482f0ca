# SPDX-License-Identifier: Apache-2.0

"""Mutants: one peer makes a part of the process keep, or wait for, as much as it likes."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

HOSTILE_PARTS = catalogue(
    """
strangers-of-a-ring-have-no-deadline [found; H158]
  A stranger at a group's port stays as long as it sends a byte now and then.
  @ spark_bridge.primitives.group.ring:Ring._accept
  ~ .until < now: => .until < 0:
the-newest-stranger-goes [new; H158]
  At the limit of a group's port, the stranger that came last goes.
  @ spark_bridge.primitives.group.ring:Ring._meet
  ~ next(iter(strangers.values())) => next(reversed(strangers.values()))
each-exchange-has-its-own-time [found; H158]
  A collective that moves a byte now and then never times out.
  @ spark_bridge.primitives.group.ring:Ring.exchange
  ~ poll = select.poll() => poll = select.poll(); self.begin()
blobs-may-exceed-their-size [found; H157]
  A member sends more of a blob than it has said, and the driver keeps it.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator._take_blob
  ~ or offset + len(data) > size => or False
anybody-has-a-blob [found; H157]
  The driver keeps a blob of each attempt, whatever its rank and generation.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator._take_blob
  F if not self.machine.is_first(member, generation):
items-of-tasks-are-not-counted [found; H157]
  A task adds items to a work queue without end.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._take_report
  - self._account.charge(_ITEMS, len(encoded) + ITEM_BYTES)
combinations-of-flags-stay [found; H157]
  Each combination of flags that a peer sends is kept forever.
  @ protocol.wire.event_classes:_flags
  ~ while len(known) > count: => while False:
an-attempt-reserves-all-permits [found; H157]
  An attempt that asks a thousand times delays others by a thousand permits.
  @ spark_bridge.primitives.permits.book:PermitBook._has_enough
  ~ return self._schedule.due(now, request.weight) - AHEAD_S > now => return False
items-of-others-are-finished [found; H157]
  A task finishes the items of others, so that nobody does them.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._take_report
  T if self._in_work.get(id_) in (subtask, NOBODY):
restored-items-are-free [found; H157]
  What tasks have added counts no more after a restart, so each allows as much again.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._restore
  ~ keep = self._account.keep_beside if id_ in own else self._account.keep => keep = self._account.keep_beside
counts-of-any-checkpoint-stay [found; H157]
  A task counts for checkpoints that there are not, and the driver keeps the counts of each.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator.handle_event_from_operator
  ~ if checkpoint_id in self._cuts: => if checkpoint_id is not None:
buckets-without-number [found; H157]
  A task fills the driver with buckets of its distributions.
  @ spark_bridge.primitives.counters.book:Book.check_names
  F if self.buckets > BUCKETS_MAX:
a-large-backlog-stays [found; H157]
  A task says how much is left of splits of any size, and the driver keeps them.
  @ actors.coordination.sources.source:SourceCoordinator.handle_event_from_operator
  T if len(encode_event(event)) <= BACKLOG_BYTES_MAX:
ranges-without-number [found; H157]
  A task has read more ranges than the table has.
  @ spark_bridge.sources.postgres.driver:PostgresEnumerator._note_read
  F if low not in self._read and len(self._read) >= self._count:
an-event-to-the-last-source-of-all [found; H157]
  An event to the source -1 reaches the last one.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.handle_source_event
  T if index >= 0:
lists-without-number [found; H157]
  A task lists parts for checkpoints that never come, and the driver keeps them.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.prepared
  - self._account.charge(name, size)
committed-parts-count-on [new; H157]
  A sink fails when it has committed a million parts.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits._commit
  - self._account.release(committable.name)
destroyed-parts-count-on [new; H157]
  A sink fails when a million parts of dead attempts were destroyed.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.subtask_reset
  - self._settle()
payloads-are-not-looked-at [found; H157]
  A checkpoint keeps a part that no commit can understand, and each restart fails.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits._sizes
  - self._committer.check_payload(part.payload)
restored-events-of-anybody [found; H157]
  A task sends events of any subtask as if its snapshot had held them.
  @ protocol.gateway.inbound:GatewayInbound._check_sender
  ~ item.sender not in self._senders => False
"""
)
