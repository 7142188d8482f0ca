# SPDX-License-Identifier: Apache-2.0

"""Mutants: a setting is taken for another one, or silently not at all."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

SETTINGS = catalogue(
    """
a-timeout-that-nothing-counts [found; H165]
  A timeout of heartbeats without an interval is taken, and means nothing.
  @ protocol.gateway.types:GatewayLimits.__post_init__
  F if self.heartbeat_timeout_s is not None:
an-operator-without-its-limits [feared; H165]
  The limits that coordinate() is given are those of the sidecar.
  @ spark_bridge.driver.runtime:SidecarRuntime.coordinate
  ~ gateway or self._config.gateway, => self._config.gateway,
a-place-that-is-not-there [feared; H165]
  The error about a former argument names a place that does not have it.
  @ protocol.arguments:_check_not_moved
  ~ f"{name} is {places[name]}" => f"{name} is {name}"
a-file-is-not-what-is-restored [found; H165]
  The file that an operator is to start from is taken for the newest checkpoint.
  @ spark_bridge.driver.operators:Operators._restored
  ~ match restore: => match "latest":
an-older-spark [new; H170]
  A Spark that Headgate does not support is taken.
  @ spark_bridge.driver.environment:driver_context
  - check_release("this Python has", pyspark_version(), "PySpark")
  + pass
the-token-of-a-server-is-shown [new; H76]
  The command that checks a server prints its whole URL.
  @ spark_bridge.driver.check:_Start._place
  ~ self._remote.partition("/;")[0] => self._remote
"""
)
