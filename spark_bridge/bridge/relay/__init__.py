# SPDX-License-Identifier: Apache-2.0

"""Brings the events of Spark's listener bus to the sidecar, and a few commands to Spark."""

from __future__ import annotations

from spark_bridge.bridge.relay.interface import (
    ApplicationLost,
    OnFact,
    OnLost,
    Relay,
    RelayError,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
    require_driver,
)
from spark_bridge.bridge.relay.opening import RelayKind, open_relay
from spark_bridge.bridge.relay.records import RelayedFact

__all__ = [
    "ApplicationLost",
    "OnFact",
    "OnLost",
    "Relay",
    "RelayError",
    "RelayKind",
    "RelayRefused",
    "RelayStatistics",
    "RelayStopped",
    "RelayedFact",
    "open_relay",
    "require_driver",
]
