# SPDX-License-Identifier: Apache-2.0

"""The limits of what a driver and a sidecar in another process say to each other."""

from __future__ import annotations

from protocol.wire.framing import WireLimits

__all__ = ["CONTROL_LIMITS"]

CONTROL_LIMITS = WireLimits(message_bytes_max=64 * 2**20, event_bytes_max=4 * 2**20)
