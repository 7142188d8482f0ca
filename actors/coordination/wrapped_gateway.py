# SPDX-License-Identifier: Apache-2.0

"""A gateway in front of another one, which shows that one's attempt and figures."""

from __future__ import annotations

from actors.coordination.interface import SubtaskGateway
from protocol.ids import ExecutionAttempt

__all__ = ["WrappedGateway"]


class WrappedGateway:
    """What a ``SubtaskGateway`` in front of another one need not say itself. Sending is left to the subclass."""

    __slots__ = ("_gateway",)

    def __init__(self, gateway: SubtaskGateway) -> None:
        self._gateway = gateway

    @property
    def attempt(self) -> ExecutionAttempt:
        return self._gateway.attempt

    @property
    def events_pending(self) -> int:
        return self._gateway.events_pending

    @property
    def bytes_pending(self) -> int:
        return self._gateway.bytes_pending
