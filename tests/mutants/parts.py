# SPDX-License-Identifier: Apache-2.0

"""Bugs in the ready-made parts, and the hunter for them: random histories of operators with parts.

The simulation finds them too: a part of its worlds have an operator that is a chain, of ready-made parts or of stages.
"""

from __future__ import annotations

import asyncio

from tests.mutants.mutant import catalogue
from tests.primitives.histories import HISTORIES


def check_parts(seed: int) -> None:
    """Run one history of each part; raise the violation that it finds."""
    for history in HISTORIES:
        asyncio.run(history(seed))


PARTS = catalogue(
    r"""
found-again-counts-twice [new; H100]
  An item that a retried task finds again is added again.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._take_report
  T if id_ not in self._seen:
work-ends-while-some-is-done [new; H100]
  Tasks are told that there is no more while another task works on an item, which may add some.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._hand_out
  T if not self._in_work:
kept-back-from-a-copy [new; H100]
  An attempt that starts beside another one does not get that one's items.
  @ actors.coordination.sources.source:SourceCoordinator.subtask_ready
  - await _send_splits(gateway.send_event, [decode_split(split) for _, split in recorded])
item-in-work-is-in-no-snapshot [new; H100]
  A snapshot leaves out the item that the task works on.
  @ spark_bridge.primitives.work_queue.task:WorkQueuePart.snapshot_state
  ~ (self._current, *self._hand) => tuple(self._hand)
found-items-leave-after-the-snapshot [new; H100]
  What a task has found and not reported is neither in its snapshot nor sent before it.
  @ spark_bridge.primitives.work_queue.task:WorkQueuePart.snapshot_state
  F if self._finished or self._found or self._given_back:
hand-of-a-streaming-task-is-taken [new; H100]
  A task gives back items that a checkpoint holds for it.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._hand_out
  T elif self._is_batch:
lost-attempt-keeps-its-counts [new; H101]
  The counts of an attempt that is lost stay in the sum.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator.subtask_failed
  - self._attempts.get(subtask, {}).pop(attempt, None)
copies-count-together [new; H101]
  The counts of all attempts of a subtask are added.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator._counting
  ~ yield books[min(books)] => yield added_up(books.values())
counts-are-in-no-checkpoint [new; H101]
  The driver does not know the counts of a checkpoint until the tasks report them again.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator.checkpoint_coordinator
  T if self._is_batch:
counts-are-in-no-snapshot [new; H101]
  A restored task counts from zero.
  @ spark_bridge.primitives.counters.task:CountersPart.snapshot_state
  ~ return self._book.to_bytes() => return b""
place-of-a-lost-attempt-is-lost [new; H111 H183]
  An attempt that is over keeps its place among the users, and the keys that it computes.
  @ spark_bridge.primitives.primitive:Half.subtask_failed
  - self.forget(subtask, attempt)
one-user-too-many [new; H111]
  One more user is let in than allowed.
  @ spark_bridge.primitives.permits.book:PermitBook._serve_waiting
  ~ self.in_use >= self._slots => self.in_use > self._slots
idle-place-is-kept-from-others [new; H111]
  A task keeps an idle place although another one waits for it.
  @ spark_bridge.primitives.permits.task:PermitsPart.handle_event
  F if self._contended[1] and self._idle_slots:
older-news-of-a-wait-counts [new; H111]
  A task keeps an idle place although another one waits, because of older news that came later.
  @ spark_bridge.primitives.permits.task:PermitsPart.handle_event
  T if version > self._contended[0]:
permit-of-a-wait-that-failed-is-used-up [new; H176]
  A permit that nobody has used is not handed out again.
  @ spark_bridge.primitives.permits.book:PermitBook._give_back_permit
  - self._schedule.give_back(permit)
place-that-crosses-the-give-up-is-kept [new; H176]
  A place that was granted when its task had given up stays taken.
  @ spark_bridge.primitives.permits.book:PermitBook.give_up
  - self._free_slot(ticket)
permits-are-reserved-for-those-who-will-be-gone [new; H176]
  A permit is reserved for a task that will have given up when it is due.
  @ spark_bridge.primitives.permits.book:PermitBook._grant
  F if due > request.until + _ROUNDING_S:
interrupted-task-keeps-what-it-asked-for [new; H176]
  Only a timeout gives back what was reserved, no other end of a wait.
  @ spark_bridge.primitives.permits.task:PermitsPart._acquire
  ~ except BaseException: => except TimedOut:
ahead-beyond-need [new; H176]
  Permits ahead of need are handed out however far in the future they are due.
  @ spark_bridge.primitives.permits.book:PermitBook.take_ahead
  - len(delays) < most and schedule.due(now) - now <= AHEAD_S
  + len(delays) < most and (not delays or schedule.due(now) - now <= AHEAD_S)
weight-of-a-use-is-ignored [new; H111]
  A use takes one permit of the rate, whatever its weight.
  @ spark_bridge.primitives.permits.schedule:RateSchedule._find
  ~ weight * self._interval_s => self._interval_s
what-a-use-weighed-above-is-lost [new; H111]
  What a use weighed above its weight delays no later use.
  @ spark_bridge.primitives.permits.book:PermitBook.correct
  - self._schedule.add(now, after - before)
what-a-use-did-not-weigh-is-lost [new; H111]
  What a use did not weigh is not there for others.
  @ spark_bridge.primitives.permits.schedule:RateSchedule.shorten
  - self.give_back(Permit(end, permit.end))
late-permits-beside-a-whole-burst [new; H111]
  Permits that are held ahead may be used late, and a use takes the whole burst at the same time.
  @ spark_bridge.primitives.permits.schedule:RateSchedule.stop_sharing
  ~ max(self._full_at, now) + self._late_s => max(self._full_at, now)
lost-reservation-comes-back [new; H182]
  What a lost attempt had reserved is given back.
  @ spark_bridge.primitives.budget.book:BudgetBook.forget
  - self.spent += amount
lost-attempt-is-not-heard-of [new; H182]
  The budget does not hear that an attempt is lost.
  @ spark_bridge.primitives.budget.driver:_Coordinator.subtask_failed
  - await super().subtask_failed(subtask, attempt, reason)
ceiling-is-written-after-the-grant [new; H182]
  More is reserved than the ceiling that is in the storage.
  @ spark_bridge.primitives.budget.book:BudgetBook.serve
  ~ self.total if self.ceiling is None else min(self.total, self.ceiling) => self.total
settled-for-less-keeps-the-rest [new; H182]
  What a call did not cost is not there for others.
  @ spark_bridge.primitives.budget.book:BudgetBook.settle
  ~ self.spent += amount => self.spent += reserved
token-of-a-lease-is-ignored [new; H183]
  A value that comes after its lease was lost ends the lease of another one.
  @ spark_bridge.primitives.cache.book:CacheBook.put
  ~ leased is not None and leased.ticket == ticket => leased is not None and self._keys
late-value-replaces-one [new; H183]
  A value that comes after another one takes its place.
  @ spark_bridge.primitives.cache.book:CacheBook.put
  ~ key in self.values or key in self.arriving => key in self.arriving
lease-goes-to-two [new; H183]
  One that asks for a value that is computed computes it too.
  @ spark_bridge.primitives.cache.book:CacheBook.get
  ~ key in self._leased or key in self.arriving => key in self.arriving
value-on-its-way-is-computed-again [new; H183]
  While a value is written to the storage, another one computes it.
  @ spark_bridge.primitives.cache.book:CacheBook.get
  ~ key in self._leased or key in self.arriving => key in self._leased
lease-goes-to-another-call-of-the-lost-attempt [new; H183]
  What an attempt that is over computed is given to another call of it.
  @ spark_bridge.primitives.cache.book:CacheBook.forget
  F if ticket in self._waiting.get(key, ()):
value-is-seen-before-it-is-safe [new; H183]
  A durable value is answered before it is written.
  @ spark_bridge.primitives.cache.driver:_Desk.put
  T if self._port is None:
files-are-deleted-by-one-that-has-lost-the-storage [new; H183]
  An application that was taken over deletes the files of its durable cache.
  @ spark_bridge.storage.value_log:ValueLog.merge_if_due
  - self._claims.check()
call-that-was-given-up-takes-part [new; H176]
  A member's call that timed out completes a round with those of the others.
  @ protocol.group:GroupMachine._give_up
  F if self._is_inside(member, generation):
wait-that-is-over-joins [new; H176]
  An attempt whose wait is over is admitted, because its message was held back.
  @ protocol.group:GroupMachine._end_waits
  T if until >= now:
spare-tasks-are-let-in-without-end [new; H109]
  Members of a full group are told that a spare task waits.
  @ protocol.group:GroupMachine.waiting
  ~ free = max(0, self.config.max_size - len(current.members)) => free = len(self._candidates)
members-that-let-others-in-are-left-behind [new; H109]
  A generation is formed without a member that has left to let others in and comes back.
  @ protocol.group:GroupMachine._patience_s
  ~ if self._expected else => if False else
urgent-event-for-a-part-without-a-handler [new; H90]
  A part that does not define handle_urgent gets urgent events on the thread of those that do.
  @ protocol.subtask.inbound:SubtaskInbound._take_urgent
  ~ if self.handles_urgent and part not in self.parts_without_urgent: => if self.handles_urgent:
open-calls-stay-open [new; H104]
  Calls that wait when a member is lost are not refused.
  @ protocol.group:GroupMachine._break
  ~ waiting = [one for one in generation.members if one in generation.calls or one in self._errors] => waiting = []
first-checkpoint-stays [new; H105]
  A later checkpoint does not replace the first one.
  @ spark_bridge.primitives.group.driver:_GroupCoordinator._carry_out
  - self.checkpoint = GroupCheckpoint(step, blob.getvalue())
  + self.checkpoint = self.checkpoint or GroupCheckpoint(step, blob.getvalue())
finished-subtasks-are-waited-for [new; H106]
  A task that is lost after the others have finished waits for them.
  @ protocol.group:GroupMachine.handle
  - self._finished.setdefault(member.subtask, set()).add(member)
late-task-has-the-first-value [new; H110]
  A task that starts later gets the change of the newest version instead of its value.
  @ spark_bridge.primitives.shared_value.driver:_Coordinator.subtask_ready
  ~ whole=True => whole=False
a-key-keeps-its-type-in-the-tasks [found; H110]
  If a dict's key 1 becomes True, tasks that get the difference keep 1.
  @ spark_bridge.primitives.shared_value.encoding:difference
  ~ if key in kept and _same(kept[key], key)} => if key in kept}
event-of-a-part-reaches-the-main-coordinator [new; H80]
  The main coordinator of a chain gets the events of the parts.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_event
  ~ part = self._called = self._parts[index] => part = self._called = self._own
state-of-a-part-is-not-restored [new; H80]
  A part begins from nothing although the checkpoint has a state of it.
  @ actors.coordination.engine.coordinator:CoordinatorActor._reset
  ~ states.get(part.name) if part.name else own => None if part.name else own
parts-are-not-told-of-failures [new; H80]
  Only the main coordinator is told that an attempt has failed.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("subtask_failed"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "subtask_failed"
parts-are-not-reset [new; H80]
  Only the main coordinator resets a subtask.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("subtask_reset"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "subtask_reset"
event-of-a-stage-reaches-the-last-coordinator [new; H80]
  Events of all stages reach the coordinator of the last one.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_event
  - part.method("handle_event_from_operator")
  + (self._parts[-1] if part.name else part).method("handle_event_from_operator")
event-for-a-stage-reaches-the-last-operator [new; H80]
  Events of all coordinators reach the operator of the last stage.
  @ spark_bridge.subtask.parts:OperatorParts._handle
  - operator = self.operators[self._channel.table.names[part]]
  + operator = self.operators[self._channel.table.names[part and -1]]
event-of-a-stage-loses-its-name [new; H80]
  What the operator of a stage sends is for the main coordinator.
  @ spark_bridge.subtask.context:SubtaskContext.send_event
  ~ self._channel.submit_event(payload, self._part) => self._channel.submit_event(payload)
request-of-a-stage-reaches-the-last-coordinator [new; H80]
  Requests of all stages reach the coordinator of the last one.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_request
  ~ part.method("handle_request") => (self._parts[-1] if part.name else part).method("handle_request")
request-of-a-stage-loses-its-name [new; H80]
  What the operator of a stage asks is for the main coordinator.
  @ spark_bridge.subtask.context:SubtaskContext.request
  ~ self._channel.ask(encoded, timeout_s, self._part) => self._channel.ask(encoded, timeout_s)
calls-reach-the-stages-backwards [new; H80]
  What concerns all stages reaches the last one first.
  @ actors.coordination.engine.coordinator:CoordinatorActor._of_each
  ~ for part in self._parts.in_order: => for part in reversed(self._parts.in_order):
stages-are-not-told-of-completed-checkpoints [new; H80]
  Only the main coordinator is told that a checkpoint is complete.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("notify_checkpoint_complete"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "notify_checkpoint_complete"
stages-are-not-told-of-aborted-checkpoints [new; H80]
  Only the main coordinator is told that a checkpoint is aborted.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("notify_checkpoint_aborted"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "notify_checkpoint_aborted"
stages-are-not-told-of-successes [new; H80]
  Only the main coordinator is told that a subtask has finished.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("subtask_finished"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "subtask_finished"
stages-are-not-told-of-the-end-of-a-run [new; H80]
  Only the main coordinator is told that a run has ended.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._tell_each("run_ended"
  + (lambda name, *args: self._guarded(name, call_user(name, self._own.method(name), *args)))( \
  + context, "run_ended"
only-the-last-stage-is-told-of-a-suspicion [new; H80]
  The other stages are not told that an attempt may be dead.
  @ actors.coordination.engine.coordinator:CoordinatorActor._give_hint
  - self._tell_each(hint.method
  + (lambda name, *args: self._guarded(name, call_user(name, self._parts[-1].method(name), *args)))( \
  + context, hint.method
state-of-a-stage-is-in-no-checkpoint [new; H80]
  The checkpoint has no state of the coordinators of the stages.
  @ actors.coordination.engine.coordinator:CoordinatorActor._state
  - join_states_in_steps(states.pop(""), states, stages)
  + join_states_in_steps(states.pop(""), {name: one for name, one in states.items() if name not in stages})
sent-between-the-cuts-of-two-stages [new; H80]
  What a stage sends between its own snapshot and the cut of the chain is before the cut.
  @ actors.coordination.host.part:Parts.snapshot_taken
  - part.held = self._held
held-for-the-cut-and-lost [new; H80]
  What a stage sends between its own snapshot and the cut of the chain is never sent.
  @ actors.coordination.host.part:Parts.cut_reached
  ~ for send in held: => for send in held[:0]:
state-of-a-stage-is-in-no-snapshot [new; H80]
  The snapshot of a task has no states of its stages.
  @ spark_bridge.subtask.parts:OperatorParts._joined
  - return join_states(states.pop("", b""), states, self.stages)
  + return join_states(states.pop("", b""), {name: one for name, one in states.items() if name not in self.stages})
only-the-last-operator-is-told-of-a-completed-checkpoint [new; H80]
  The operators of the other stages are not told that a checkpoint is complete.
  @ spark_bridge.subtask.parts:OperatorParts._tell
  - for operator in self.operators.values():
  + for operator in list(self.operators.values())[-1 if method == "notify_checkpoint_complete" else 0 :]:
only-the-last-operator-is-told-of-an-aborted-checkpoint [new; H80]
  The operators of the other stages are not told that a checkpoint is aborted.
  @ spark_bridge.subtask.parts:OperatorParts._tell
  - for operator in self.operators.values():
  + for operator in list(self.operators.values())[-1 if method == "notify_checkpoint_aborted" else 0 :]:
stages-are-closed-forwards [new; H80]
  The operators of the stages are closed in the order in which data flows.
  @ spark_bridge.subtask.parts:OperatorParts.close
  ~ reversed(self.operators.values()) => self.operators.values()
event-for-a-stage-loses-its-name [new; H80]
  What the coordinator of a stage sends is for the main operator.
  @ actors.coordination.host.gateway:AttemptSends._accept
  - send = SendEvent(payload, loss_tolerant, confirmation, urgent, part.index)
  + send = SendEvent(payload, loss_tolerant, confirmation, urgent, 0)
state-of-a-stage-is-not-restored-in-the-task [new; H80]
  The operator of a stage begins from nothing although the checkpoint has its state.
  @ spark_bridge.subtask.parts:OperatorParts.open
  ~ states.get(name) => None if name in self.stages else states.get(name)
states-of-stages-are-not-merged [new; H80]
  With a lower parallelism, a stage gets the state of one subtask instead of all.
  @ protocol.parts:states_by_part
  ~ in_bytes.setdefault(name, {})[one.subtask] = state => in_bytes[name] = {one.subtask: state}
stages-are-cut-in-the-middle-of-a-record [new; H80]
  A snapshot is taken after any output of any stage.
  @ spark_bridge.subtask.parts:OperatorParts._consistent
  - return all(stage.snapshot_anywhere or k in self._ended for k, stage in enumerate(self._feeding[:count]))
  + return True
stages-after-the-running-one-count [new; H80]
  The stage that runs is taken for the one after it, which has not got the record yet.
  @ spark_bridge.subtask.parts:OperatorParts._outputs_of
  - self._running = after
  -             yield output
  + self._running = index
  +             yield output
what-a-function-makes-for-a-stage-is-not-checked [new; H59 H80]
  A stage that a function makes may have methods that cannot work.
  @ spark_bridge.subtask.parts:OperatorParts._make
  ~ (not name or name in self.stages) => not name
a-part-of-another-operator-is-found [new; H80]
  After an output, the next operator of Spark's pipeline finds the parts of the one before.
  @ spark_bridge.subtask.parts:OperatorParts._outputs_found
  - _local.parts = previous
a-part-is-found-after-its-task [new; H80]
  The parts of a task that has ended are found by what runs in the process later.
  @ spark_bridge.subtask.parts:OperatorParts.close
  ~ _open.discard(self) => globals().setdefault("_kept", []).append(self)
a-reader-inside-of-two-names-the-last-one [new; H132]
  The events of a reader in a hybrid source of hybrid sources say its place in the inner one only.
  @ spark_bridge.subtask.context:inner_context
  ~ inner._way = (index, *context._way) => inner._way = (index,)
requests-of-all-parts-are-shown-to-each [new; H73 H80]
  A part sees the restored requests of the other parts as its own.
  @ spark_bridge.subtask.parts:OperatorParts.open
  ~ asked.get(name, ()) => sum(asked.values(), [])
snapshot-without-the-positions [new; H130]
  A restored reader reads the splits in hand from their beginning.
  @ spark_bridge.subtask.source:SplitReader.snapshot_state
  ~ in_hand = [SplitAt(one.split, one.position) for one in self._open] => in_hand = [one.split for one in self._open]
snapshot-without-the-open-splits [new; H130]
  A split that is being read is in no snapshot.
  @ spark_bridge.subtask.source:SplitReader.snapshot_state
  ~ in_hand = [SplitAt(one.split, one.position) for one in self._open] => in_hand: list[Any] = []
position-before-the-output [new; H130]
  The position in a snapshot is that before the last output, which is read again.
  @ spark_bridge.subtask.source:SplitReader._one_turn
  - reading.position, output = item  # from here on, a snapshot has this output
  -         yield output
  + position, output = item
  +         yield output
  +         reading.position = position
hybrid-hears-of-no-early-return [new; H132]
  A task that returned early and succeeded counts as still reading, so that the next source never begins.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.attempt_ended
  F if succeeded:
hybrid-hands-over-too-early [new; H132]
  The next source begins while a task still has something of the one before.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator._hand_over_if_read
  ~ or self._unread => or False
hybrid-gives-reports-to-the-newest [new; H132]
  What a reader reports on a split of an earlier source reaches the enumerator of the newest one.
  @ actors.coordination.sources.enumerators:HybridSplitEnumerator.handle_source_event
  ~ await self._begun[index] => await self._begun[-1]
hybrid-keeps-no-states [new; H132]
  The readers of a hybrid source are not given their states.
  @ spark_bridge.sources.hybrid:HybridReader.open
  ~ reader.open(inner_context(context, index), its_own) => reader.open(inner_context(context, index), None)
hybrid-completes-alone [new; H132]
  The readers of a hybrid source are not notified of completed checkpoints.
  @ spark_bridge.sources.hybrid:HybridReader.notify_checkpoint_complete
  - reader.notify_checkpoint_complete(checkpoint_id)
splits-of-a-checkpoint-go-back [new; H130]
  A reset gives back splits that the checkpoint holds for the reader.
  @ actors.coordination.sources.source:SourceCoordinator.checkpoint_coordinator
  - self._splits.on_checkpoint(checkpoint_id)
state-has-the-limits-of-events [feared; H164]
  An entry of a state is refused if it nests deeper, or has more entries, than an event may.
  @ protocol.wire.state:_chunks
  ~ encode_event(taken, STATE_LIMITS) => encode_event(taken)
state-is-encoded-in-one-turn [new; H164]
  The event loop stands still while a state of a million splits is encoded.
  @ protocol.wire.state:encode_state_in_steps
  - _write(out, _LIST, name, chunk)
  -                 yield
  + _write(out, _LIST, name, chunk)
  +                 continue
known-split-is-forgotten-while-it-exists [new; H164 H131]
  A split that each look finds is forgotten, and read again.
  @ protocol.known_keys:KnownKeys.see
  F if bucket[at + _REST] != self._period:
known-splits-are-lost-in-a-restore [new; H164 H131]
  A restored source finds again what was read.
  @ actors.coordination.sources.enumerators:DiscoveringSplitEnumerator._restore_known
  - self._known.restore_in_steps(fields["known"], fields["period"])
  + self._known.restore_in_steps([], fields["period"])
users-value-is-compared [new; H164]
  An event that begins with a NumPy array fails the job.
  @ protocol.source_events:parse_source_event
  ~ case [str(name)] if name == _REQUEST: => case [name] if name == _REQUEST:
items-of-a-checkpoint-cannot-be-given-back [new; H100]
  In batch mode, an item that a task had at a checkpoint is lost when the task gives it back.
  @ actors.coordination.sources.source:SourceCoordinator.checkpoint_coordinator
  T if self._context.mode is RestoreMode.STREAMING:
taken-back-beside-a-copy [new; H100]
  Another task gets an item that a copy may have begun.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._take_back
  F if len(self._context.attempts(subtask)) > 1:
items-for-a-copy-that-is-gone [new; H100]
  Items are handed to a subtask that has finished, because a copy of the attempt that counts wanted some.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.attempt_ended
  F if succeeded or not copies:
what-a-copy-has-done-counts [new; H100]
  Items that only a copy has done count as done by the attempt that returned early and succeeded.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._put_back_of_returned
  - in_work if undone is None else undone
  + in_work
others-wait-for-what-a-finished-streaming-task-keeps [found; H100]
  A function returns early in streaming mode, and the other tasks wait without end for what it had in hand.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._hand_out
  - await self._check_somebody_works()
  + pass
others-wait-for-what-is-restored-for-nobody [found; H100]
  An input comes again in fewer partitions, and the tasks wait without end for what a missing subtask had in hand.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._check_somebody_works
  - look.partition_count and not any(map(self._may_work, range(look.partition_count)))
  + False
a-run-is-not-awaited-that-has-all-its-partitions [new; H100]
  A job fails while a task that is not there yet may still bring what it had in hand.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._check_somebody_works
  - not any(map(self._may_work, range(look.partition_count)))
  + True
what-a-finished-streaming-task-had-restored-is-nobodys [new; H100]
  A function returns early in streaming mode, and the other tasks wait for what it had restored.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._keep
  F if worker == NOBODY:
what-comes-too-late-for-a-function-stays-in-work [new; H100]
  An item is assigned in streaming mode while a function returns, and nobody does it.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._put_back_of_returned
  - in_work - self._kept.get(subtask, set())
  + set()
what-a-function-keeps-is-done-twice [new; H100]
  What a function that has returned keeps in its state goes to another task, too.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator._put_back_of_returned
  - in_work - self._kept.get(subtask, set())
  + in_work
a-revoked-success-leaves-items-to-nobody [new; H100 H17]
  A job fails although the subtask of a revoked success works again on what it had in hand.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.add_splits_back
  - for known in (self._undone, self._returned, self._superseded, self._kept, self._working):
  + for known in (self._undone, self._returned, self._kept, self._working):
a-restored-report-ends-the-next-attempt [new; H100 H151]
  A report of a function that had returned, held in the checkpoint, keeps the next attempt of its subtask from items.
  @ spark_bridge.primitives.work_queue.driver:_Enumerator.handle_source_event
  F if self._context.coordinator.handles_restored:
restored-reports-count [new; H101]
  A report of an earlier attempt, held in the checkpoint, counts beside that of the attempt that has restored it.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator.handle_event_from_operator
  F if self._context.handles_restored:
counts-of-a-failed-run-stay [new; H101]
  In streaming mode, counts of subtasks that had finished stay when the run is begun again without a checkpoint.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator.reset_to_checkpoint
  ~ elif not (self._run_over and self._is_batch): => elif not self._run_over:
exit-of-a-class-while-decoding-gets-out [feared; H62 H97]
  An exit that a user's class raises while its event is decoded is none of the errors of an event.
  @ protocol.wire.events:_build_registered
  ~ except BaseException as error => except Exception as error
"""
)
