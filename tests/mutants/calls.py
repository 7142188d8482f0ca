# SPDX-License-Identifier: Apache-2.0

"""Bugs in what surrounds the calls of a driver: their cancellation, their threads, and the tasks they are made in."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

CALLS = catalogue(r"""
await-of-a-call-that-blocks-is-not-seen [new; H122]
  A caller that awaits what blocks learns of it from Python, after the call has done everything.
  @ actors.waiting_at:awaited_at
  ~ return _describe(caller.f_code, caller.f_lineno) if awaits else "" => return ""
later-job-of-a-cancelled-action-runs [found; H160]
  A job that a cancelled action submits afterwards is left alone.
  @ spark_bridge.bridge.actor:BridgeActor._hear
  - self._commands.ask(CancelJobs((job_id,), why))
  + pass
queued-job-of-a-cancelled-action-runs [found; H160]
  Only the jobs whose tasks have registered end with their action.
  @ spark_bridge.bridge.runs:RunningJobs.stop_actions
  ~ return self.jobs_of(action_ids) => return ()
leaving-forgets-queued-jobs [found; H160]
  Leaving the sidecar ends only the jobs whose tasks have registered.
  @ spark_bridge.driver.runtime:SidecarRuntime._end_runs
  ~ if running or self._running_jobs.action_ids or self._running_jobs.stopped_jobs: => if running:
cancelled-checkpoint-is-taken-later [found; H160 H176]
  A checkpoint that only waits is taken, and refuses others, although its caller was cancelled.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._withdraw
  - self._handle(AbortRequested(checkpoint_id, "its requester no longer waits for it"), now)
  + pass
cancelled-checkpoint-is-not-known [found; H160 H176]
  The operator is not told that the caller who waits for a checkpoint was cancelled.
  @ spark_bridge.driver.operators:Operators.checkpoint
  - operator.tracker_ref.tell(WithdrawCheckpoint(reply_to))
snapshot-of-an-aborted-checkpoint-is-taken-later [found; H160]
  A coordinator that was busy takes a snapshot for a checkpoint that was given up meanwhile.
  @ actors.coordination.engine.coordinator:CoordinatorActor._take_snapshot
  F if not self._is_pending(checkpoint_id):
savepoint-of-a-cancelled-call-stays [found; H160 H176]
  The file of a savepoint stays, although its caller was cancelled and nobody knows its name.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._end_checkpoint
  ~ self._writes.take_back(checkpoint_id, self._ports.discard_savepoint) => self._writes.kept(checkpoint_id)
call-is-left-halfway [found; H160]
  A cancellation reaches the caller while its call still goes on.
  @ spark_bridge.driver.operators:WholeCalls.run
  - cancelled = error
  + raise
release-is-cut-short [found; H160]
  A cancelled release frees the name and leaves the actors of the operator.
  @ spark_bridge.driver.runtime:SidecarRuntime._release
  ~ with anyio.CancelScope(shield=True): => with anyio.CancelScope():
skipped-checkpoints-of-a-start-that-failed [new; H160]
  A start that is cancelled skips the stored checkpoints all the same.
  @ spark_bridge.driver.operators:Operators.add
  ~ with anyio.CancelScope(shield=record is not None): => with anyio.CancelScope():
choice-is-recorded-after-the-coordinator [found; H52]
  A coordinator commits what its checkpoint has prepared, before the storage knows that it was started from it.
  @ spark_bridge.driver.operators:Operators.add
  - await record()
  @ spark_bridge.driver.operators:Operators.add
  - await self._accept_tasks(config, tracker_ref)
  + await self._accept_tasks(config, tracker_ref); record and await record()
interrupt-breaks-a-wait [found; H160]
  A Ctrl-C is raised in the middle of waiting for the loop.
  @ spark_bridge.driver.interrupts:Interrupts.__call__
  ~ self._held_back.append(frame) => self._handler(number, frame)
interrupted-wait-never-ends [feared; H160]
  A Ctrl-C that is held back does not end a wait for the loop.
  @ spark_bridge.driver.interrupts:Interrupts.wait
  - self._raise_held_back()
entered-and-interrupted [found; H160]
  A Ctrl-C when the sidecar has just been entered leaves it running, and nobody leaves it.
  @ spark_bridge.driver.sidecar:Sidecar.__enter__
  - self.__exit__(type(error), error, error.__traceback__)
leaving-that-never-began [found; H160]
  A Ctrl-C before leaving has begun leaves the sidecar running.
  @ spark_bridge.driver.sidecar:Sidecar.__exit__
  F if self.is_running:
begun-action-is-never-ended [found; H160]
  The end of an action is not carried out if a Ctrl-C comes before it has begun.
  @ spark_bridge.driver.loop:LoopCalls.start
  ~ outcome.set_result(await function()) => outcome.set_result(await function()) if not cancelled else outcome.cancel()
trace-without-end [found; H160]
  A Ctrl-C before the end of a trace leaves it being written.
  @ spark_bridge.driver.sidecar:Sidecar.trace
  ~ except KeyboardInterrupt: => except ZeroDivisionError:
interrupted-driver-leaves-its-job [found; H160]
  An interrupted action of an attached driver leaves its job running.
  @ spark_bridge.standalone.attached:AttachedSidecar.run
  F if end.lost is None:
request-outlives-its-client [found; H160]
  The sidecar's process carries on with a request whose client has gone.
  @ spark_bridge.standalone.control_server:_Requests.disconnected
  - scope.cancel()
run-is-repeated-without-a-context [found; H160]
  A failed action is called again after the SparkContext has stopped.
  @ spark_bridge.driver.actions:Actions.fenced
  ~ or self._lost() or over or None => or self._lost() or None
fork-removes-the-archive [found; H120]
  A forked process that exits removes the archive of its parent.
  @ spark_bridge.driver.shipping:_remove
  T if os.getpid() == process_id:
text-that-hangs-a-worker [found; H178]
  An exception whose text cannot be encoded reaches Spark's worker.
  @ spark_bridge.subtask.runner:run_subtask_with
  ~ if (escaped := _escaped(error)) is not None: => if (escaped := _escaped(error)) is not None and False:
texts-without-bounds [found; H178]
  The text of an exception is kept however long it is.
  @ protocol.describing:readable
  F if len(text) > TEXT_CHARS_MAX:
tracebacks-without-bounds [found; H178]
  The traceback of a log line is as long as the text of its exception.
  @ actors.logs:_shortened
  ~ return None if shown == text.rstrip("\n") and not text.endswith(LEFT_OUT) else shown => return None
threads-of-those-who-wait [found; H161]
  Users' blocking code has forty threads, whatever it waits for.
  @ actors.threads:ThreadPool.run
  ~ limiter = anyio.CapacityLimiter(self._threads_max) => limiter = anyio.CapacityLimiter(min(self._threads_max, 40))
body-outlives-what-it-has-entered [feared; H163]
  If what was entered fails, the body of the block is not told.
  @ actors.host:Host.cancel_body
  T if body is None or body.done() or self._left.done():
cancelled-scope-stays-outside [feared; H163]
  A cancelled scope around the caller does not reach the host.
  @ actors.host:Host._forward_scope
  - self._scope.cancel()
session-without-a-sidecar-stays-open [found; H160]
  A new session is left open if no sidecar can be made for it.
  @ spark_bridge.connect.sessions:_run_in_one_session
  ~ _stop(session, remote) => remote and _stop(session, remote)
""")
