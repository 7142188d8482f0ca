# SPDX-License-Identifier: Apache-2.0

"""Mutants of a sidecar's process: drivers that die, freeze, come together or come late."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

DRIVERS = catalogue(r"""
lost-driver-ends-the-process [feared; H48]
  What a relay raises for a driver that is lost during its start ends the process.
  @ spark_bridge.standalone.process:SidecarProcess._serve_application
  - not isinstance(error, RelayError) and not relay.lost
  + True
frozen-driver-is-not-replaced [feared; H48]
  A driver whose connection stands keeps its place, whether it answers or not.
  @ spark_bridge.standalone.process:SidecarProcess._free_relay
  - await relay.answers()
  + relay.connected
second-driver-takes-the-place [feared; H48]
  A driver that has attached loses its place to the next one before its JVM has joined.
  @ spark_bridge.standalone.process:SidecarProcess._free_relay
  - reserved_s <= 0
  + True
late-jvm-takes-the-place [feared; H48]
  A JVM that has begun its handshake joins although another driver has attached since.
  @ spark_bridge.bridge.relay.jvm_link:RelayServer.connected
  - self.driver not in (None, connection.authenticated_as)
  + False
lost-start-counts-as-an-application [feared; H48]
  A process for one application ends with a driver that was lost before its operators had started.
  @ spark_bridge.standalone.process:SidecarProcess._serve_application
  - served = self._runtime is not None
  + served = True
""")
