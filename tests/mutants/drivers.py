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
""")
