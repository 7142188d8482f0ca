# SPDX-License-Identifier: Apache-2.0

"""Mutants of a sidecar's process: drivers that die, freeze, come together or come late."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

DRIVERS = catalogue(r"""
lost-driver-ends-the-process [feared; H48]
  What a relay raises for a driver that is lost during its start ends the process.
  @ spark_bridge.standalone.process:SidecarProcess._serve_application
  ~ isinstance(error, RelayError) or relay.lost => False
frozen-driver-is-not-replaced [feared; H48]
  A driver whose connection stands keeps its place, whether it answers or not.
  @ spark_bridge.standalone.process:SidecarProcess._free_relay
  ~ await relay.answers() => relay.connected
second-driver-takes-the-place [feared; H48]
  A driver that has attached loses its place to the next one before its JVM has joined.
  @ spark_bridge.standalone.process:SidecarProcess._free_relay
  ~ reserved_s <= 0 => True
late-jvm-takes-the-place [feared; H48]
  A JVM that has begun its handshake joins although another driver has attached since.
  @ spark_bridge.bridge.relay.jvm_link:RelayServer.connected
  ~ self.driver not in (None, connection.authenticated_as) => False
lost-start-counts-as-an-application [feared; H48]
  A process for one application ends with a driver that was lost before its operators had started.
  @ spark_bridge.standalone.process:SidecarProcess._serve_application
  ~ served = self._runtime is not None => served = True
failed-factory-ends-the-process [feared; H48]
  What the factory raises for one driver ends the process for all.
  @ spark_bridge.standalone.process:SidecarProcess._serve_application
  T if once:
failed-factory-is-not-told [feared; H48]
  A driver that asks for its operators waits although they could not be started.
  @ spark_bridge.standalone.process:SidecarProcess._served
  ~ while self._runtime is None and driver not in self._not_served => while self._runtime is None
exit-of-a-factory-ends-the-loop [feared; H48]
  An exit that the factory raises ends the event loop.
  @ spark_bridge.standalone.process:SidecarProcess._call_factory
  ~ raise contained(name, error) => raise
an-operator-that-never-ran-has-lost-output [found; H71]
  Leaving a sidecar complains of the output of an operator of which no task has run, because its checkpoint hangs.
  @ spark_bridge.driver.operators:Operators.uncommitted
  ~ for name, why in sorted(found.items()) if name in ran) => for name, why in sorted(found.items()))
end-for-another-parallelism-is-a-failure [feared; H195]
  The strategy counts the end of a run for another parallelism.
  @ spark_bridge.bridge.runs:RunningJobs.failed
  ~ action.rescaled is not None and cause is None => False
failure-beside-another-parallelism-is-none [feared; H195]
  A coordinator that fails while its operator is rescaled has not failed.
  @ spark_bridge.bridge.runs:RunningJobs.failed
  ~ action.rescaled is not None and cause is None => action.rescaled is not None
action-whose-run-is-over-is-ended-for-rescale [feared; H195]
  An action that has run the operator already is ended and called again.
  @ spark_bridge.bridge.runs:RunningJobs.end_for_rescale
  ~ and operator_id not in action.marked | action.unmarked => and True
ended-action-is-not-called-again [feared; H195]
  The error of jobs that were ended for another parallelism reaches the user.
  @ spark_bridge.driver.restarts:Restarter.failed
  ~ self._runs.rescaled is not None => False
fenced-action-is-called-again [feared; H195]
  An action that was ended for another parallelism is called again although another application has the storage.
  @ spark_bridge.driver.restarts:Restarter.failed
  ~ and self._runs.fenced is None => and True
nobody-waits-for-a-rescaled-operator [feared; H195]
  A request that comes while the operator starts again finds none.
  @ spark_bridge.driver.operators:Operators._present
  ~ while name in self._away => while False
handle-is-gone-during-a-rescale [found; H195]
  While the operator starts again, nobody finds its handle.
  @ spark_bridge.driver.operators:Operators.handles
  ~ {**self._operators, **{name: one.operator for name, one in self._away.items()}} => self._operators
operator-that-cannot-start-is-gone [feared; H195]
  An operator that cannot start with the new parallelism does not start with the old one.
  @ spark_bridge.driver.rescaling:Rescaling._start_again
  ~ except (SidecarError, ActorError) as error => except TypeError as error
rescale-in-a-micro-batch [feared; H195]
  A change of the parallelism fails the micro-batch that is under way.
  @ spark_bridge.driver.rescaling:_Turn.__aenter__
  ~ await self._turn.acquire() => self._turn = anyio.Semaphore(0)
two-rescales-at-a-time [feared; H195]
  A second change of the parallelism waits for the first instead of being refused.
  @ spark_bridge.driver.rescaling:Rescaling.rescale
  ~ if operator_id in self._under_way => if False
a-source-is-taken-for-one-that-counts [feared; H174]
  What reads after a source counts the source's records, not Spark's, and is refused a change.
  @ spark_bridge.driver.rescaling:counts_records
  ~ if kind.goes_on_after_restore => if False
""")
