# SPDX-License-Identifier: Apache-2.0

"""A Spark driver that is attached to a sidecar in another process, and what it asks of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from protocol.wire.keys import Key
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import ServerLost

__all__ = ["ANSWER_TIMEOUT_S", "DriverEnd", "SidecarElsewhere"]

ANSWER_TIMEOUT_S = 150.0
"""For answers that come immediately, or as soon as the sidecar's operators have started."""
RENEW_TIMEOUT_S = 5.0


class SidecarElsewhere:
    """The sidecar, as a driver that it serves asks it. Both methods block, and raise ``SidecarError``; any thread."""

    def __init__(self, ask: Callable[..., Any], lease_s: float | None) -> None:
        self._ask = ask
        self._lease_s = lease_s

    def joined(self, within_s: float) -> bool:
        """Whether the driver's JVM has connected to it, after waiting for that up to ``within_s`` seconds."""
        return bool(self._ask("joined", within_s, timeout_s=within_s + ANSWER_TIMEOUT_S))

    def renew(self) -> None:
        """Renew the driver's lease."""
        self._ask("renew", self._lease_s, timeout_s=RENEW_TIMEOUT_S, connect_timeout_s=0.0)


class DriverEnd(Protocol):
    """The Spark driver that is attached, in this process or on a Spark Connect server. Every method blocks."""

    @property
    def lease_s(self) -> float | None:
        """After so long without a renewal, the sidecar takes this process for dead; None if Spark ends with it."""

    @property
    def lost(self) -> ServerLost | None:
        """Why the driver is gone although this process is not; None if it is not gone."""

    def check(self) -> None:
        """Raise ``SidecarError`` for a driver that cannot be served."""

    def open(self, place: Mapping[str, Any], key: Key, certificate_sha256: bytes, sidecar: SidecarElsewhere) -> None:
        """Have the driver's JVM connect to the sidecar's relay, and give the executors what a task needs.

        ``place`` has the ``host`` and ``relay_port`` that the sidecar names, and the host ``at`` which this process
        reaches it.
        """

    def equip(self, endpoints: list[TaskEndpoint]) -> None:
        """Check that tasks can reach the sidecar."""

    def close(self) -> None:
        """End what ``open`` has begun. Idempotent."""

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        """Within the block, the jobs of the calling thread belong to the action."""
