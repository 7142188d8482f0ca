# SPDX-License-Identifier: Apache-2.0

"""Mutants: one peer makes a part of the process keep, or wait for, as much as it likes."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

HOSTILE_PARTS = catalogue(
    """
strangers-of-a-ring-have-no-deadline [found; H158]
  A stranger at a group's port stays as long as it sends a byte now and then.
  @ spark_bridge.primitives.group.ring:Ring._accept
  - .until < now:
  + .until < 0:
the-newest-stranger-goes [new; H158]
  At the limit of a group's port, the stranger that came last goes.
  @ spark_bridge.primitives.group.ring:Ring._meet
  - next(iter(strangers.values()))
  + next(reversed(strangers.values()))
each-exchange-has-its-own-time [found; H158]
  A collective that moves a byte now and then never times out.
  @ spark_bridge.primitives.group.ring:Ring.exchange
  - poll = select.poll()
  + poll = select.poll(); self.begin()
blobs-may-exceed-their-size [found; H157]
  A member sends more of a blob than it has said, and the driver keeps it.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator._take_blob
  - or offset + len(data) > size
  + or False
anybody-has-a-blob [found; H157]
  The driver keeps a blob of each attempt, whatever its rank and generation.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator._take_blob
  - if not self.machine.is_first(member, generation):
  + if False:
items-of-tasks-are-not-counted [found; H157]
  A task adds items to a work queue without end.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._take_report
  - self._account.charge(_ITEMS, len(encoded) + ITEM_BYTES)
  + pass
combinations-of-flags-stay [found; H157]
  Each combination of flags that a peer sends is kept forever.
  @ protocol.wire.event_classes:_flags
  - while len(known) > count:
  + while False:
an-attempt-reserves-all-permits [found; H157]
  An attempt that asks a thousand times delays others by a thousand permits.
  @ spark_bridge.primitives.permits.book:PermitBook._has_enough
  - return self._schedule.due(now) - now > AHEAD_S
  + return False
"""
)
