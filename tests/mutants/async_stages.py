# SPDX-License-Identifier: Apache-2.0

"""Mutants: an async stage loses a record, pays for a result twice, or gives it out twice."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

ASYNC_STAGES = catalogue(
    """
records-are-taken-before-there-is-a-place [found; H180]
  A record that an async stage has taken waits for its place in no checkpoint.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._results
  - elif more and (pull or flights.has_capacity):
  + elif more:
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._take
  - encoded = encode_entry(record) if self._keeps else None
  + [self._context._calls.wait_until(self.has_results) for _ in iter(lambda: self._flights.has_capacity, True)]; \
encoded = encode_entry(record) if self._keeps else None
results-leave-after-they-were-taken [found; H180]
  A result that was given out is in the checkpoint that is taken before the stage goes on.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._results
  - yield value
  + self._leaving = leaving; yield value; self._leaving = None
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._results
  - leaving.clear()
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._results
  - self._spare.append(leaving)
results-wait-for-the-stage-before [new; H180]
  The result of an async stage leaves only when the async stage before it has one.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.has_results
  ~ or (fed_has_results is not None and fed_has_results()) => or False
questions-wait-for-the-snapshot [new; H152]
  What a coroutine asks is held until its task has taken its snapshot.
  @ spark_bridge.subtask.context:SubtaskContext.request_async
  F if not table.outside[part] and (questions := table.index(QUESTIONS)) is not None:
results-lose-their-effects [found; H180]
  A checkpoint holds a result without its events and counts.
  @ spark_bridge.subtask.coroutines.stage:_Record.result
  ~ self.effects] => []]
checkpoints-hold-inputs-alone [found; H180]
  A result that a checkpoint could hold is computed again.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._state
  ~ one.result() if one.landed else None => None
effects-happen-again [new; H180]
  An event of a result that is leaving is sent, and is in the next checkpoint all the same.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._happen
  - self._context.send_event(event)
  + leaving.effects.append(leaving.effects[0]); self._context.send_event(event); leaving.effects.pop()
what-is-leaving-is-in-no-checkpoint [new; H180]
  A checkpoint that is taken while an event waits for capacity loses the result.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._state
  F if self._leaving is not None:
a-plain-function-before-it-aborts-checkpoints [found; H180]
  A checkpoint that can be taken only upstream of an async stage is declined while its limit is reached.
  @ spark_bridge.subtask.context:Calls.wait_until
  F if channel.mailbox.starts_with_barrier and not self.can_cut():
records-before-the-checkpoint-are-taken-again [found; H180]
  An async stage takes the records once more that the restored checkpoint has in flight.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.open
  F if context.input_begins_again:
fewer-subtasks-lose-what-was-in-flight [new; H180]
  After a restore with fewer subtasks, what one of them had in flight is lost.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.merge_states
  ~ for state in states.values() => for state in [*states.values()][:1]
ordered-results-leave-as-they-come [new; H181]
  The results of an ordered stage leave in the order in which they come.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.__init__
  ~ ordered=settings.ordered => ordered=False
the-limit-of-calls-is-exceeded [new; H181]
  After a restore, more calls are in flight than the limit allows.
  @ protocol.in_flight:InFlight.begin
  ~ while self._waiting and self._aloft < self._limit: => while self._waiting:
results-that-have-not-left-take-no-place [new; H181]
  A stage takes records while nobody takes its results, which fill the memory.
  @ protocol.in_flight:InFlight.has_capacity
  ~ len(self._flights) < self._limit => self._aloft + len(self._waiting) < self._limit
restored-results-are-computed-again [new; H180]
  A result that the restored checkpoint has is paid for again.
  @ protocol.in_flight:InFlight.restore
  T if not flight.landed:
inputs-beyond-the-limit-are-in-no-checkpoint [new; H180]
  A checkpoint loses the record that was taken so that its barrier could be met upstream.
  @ protocol.in_flight:InFlight.held
  ~ return self._flights => return [flight for flight in self._flights if flight.begun or flight.landed]
records-are-encoded-when-the-checkpoint-comes [found; H180]
  A checkpoint has a record as its coroutine has changed it meanwhile.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._state
  ~ [one.encoded, one.result() => [one.encoded if one.record is None else encode_entry(one.record), one.result()
keys-are-those-of-the-subtask [found; H180]
  The idempotency key of a record depends on the task that has it, so a call that begins again has another one.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._key
  ~ return content_key(self._settings.name, record.encoded or encode_entry(record.record)) => \
return f"{self._context.subtask}-{self._taken}"
coroutines-stop-their-loop [found; H9]
  A blocking call in a coroutine stops all others, instead of being refused.
  @ spark_bridge.subtask.context:refuse_on_loop
  F if runs_on_loop():
awaited-request-keeps-its-place [found; H85]
  A request that a coroutine has given up keeps its place in the window.
  @ spark_bridge.subtask.channel:SubtaskChannel.abandon
  - self._handle(RequestAbandoned(request.request_id))
one-that-waits-lands [found; H181]
  A result for an input that has not begun frees capacity that it has not taken.
  @ protocol.in_flight:InFlight.land
  ~ flight.landed or not flight.begun => flight.landed
calls-outlive-their-attempt [new; H26]
  Coroutines go on, and are paid for, while the thread of a task that is over is away.
  @ spark_bridge.subtask.coroutines.loop:TaskLoop.__init__
  - channel.at_end(self._cancel_soon)
records-share-context-variables [found; H180]
  What one record sets in a context variable is found by the next.
  @ spark_bridge.subtask.coroutines.stage:_equal
  ~ return one == other => return True
records-in-flight-share-context-variables [found; H180]
  What one record sets in a context variable is found by another that is in flight beside it.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._set_to_work
  ~ variables = self._variables.copy() => variables = self._variables
cancelled-records-never-land [new; H180]
  A task waits forever for a record whose coroutine was cancelled by the program.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._has_landed
  - self._landed.append(record)
  + self._landed.extend([] if isinstance(record.error, asyncio.CancelledError) else [record])
what-is-abandoned-fails [new; H180]
  A task whose output is abandoned has no final state, because the records in flight were cancelled.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._has_landed
  F if record.error is not None and self._stopped:
coroutines-are-collected [found; H180]
  A coroutine that nothing else refers to is collected, and its task fails.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._set_to_work
  - self._workers.add(task)
results-that-wait-for-their-batch-are-lost [found; H180]
  A checkpoint is taken while results wait for the rest of their batch, and has none of them.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._state
  ~ for value in self._gathered => for value in ()
items-are-finished-before-their-results-leave [new; H100 H180]
  An item of a work queue is finished when its coroutine begins, so the work ends while it may still add some.
  @ spark_bridge.primitives.work_queue.task:WorkQueuePart.given_to_stages
  ~ self._begun[self.given] = None => self._begun[self.given] = None; self._finished.append(self.given)
items-of-async-stages-are-in-two-checkpoints [new; H180]
  The queue hands out again after a restore what the async stage has in flight.
  @ spark_bridge.primitives.work_queue.task:WorkQueuePart.snapshot_state
  ~ [item for item in (self._current, *self._hand) if item is not None] => \
[*([] if self._current is None else [self._current]), *self._hand, *((id_, 0, "r") for id_ in self._begun)]
restored-results-finish-no-item [new; H100]
  An item that was in flight at a checkpoint stays in work after a restore, so the work never ends.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.open
  ~ one.item if one.item in known else None => None
results-that-no-checkpoint-can-hold-are-kept [found; H180]
  A result that cannot be encoded fails the next checkpoint, and not the call that made it.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage._know_landed
  F if self._keeps and type(record.value) not in self._held_types:
checkpoints-do-not-name-what-they-cannot-hold [new; H180]
  A checkpoint that cannot hold a result says not which.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.snapshot_state
  F if one.landed:
retries-are-left-to-chance [found; H180]
  A history of retries is another one in each run, whatever its seed.
  @ spark_bridge.subtask.coroutines.retry:Retry.pause_after
  ~ dice.uniform(0.5, 1.0) => type(dice)().uniform(0.5, 1.0)
each-async-stage-waits-for-initial-values [new; H66]
  A stage that handles no events waits for the coordinator before its first record.
  @ spark_bridge.subtask.coroutines.stage:AsyncStage.__init__
  - self.waits_for_subtask_ready = type(self._operator).handle_event is not AsyncOperator.handle_event
coroutines-find-no-parts [found; H180]
  The parts of a task are not found on the thread of its coroutines.
  @ spark_bridge.subtask.coroutines.loop:TaskLoop._run
  ~ nullcontext() if self._parts is None else self._parts.here() => nullcontext()
"""
)
