# SPDX-License-Identifier: Apache-2.0

"""A sender that may have to wait for capacity."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel

from actors.coordination import Confirmation


class OneThatWaits:
    """Sends an event in a separate task, because it may have to wait for capacity."""

    def __init__(self, tasks: Any, gateway: Any, event: Any) -> None:
        self.scope = anyio.CancelScope()
        self.confirmation: Confirmation | None = None
        tasks.start_soon(self._send, gateway, event)

    def waits(self) -> bool:
        return self.confirmation is None

    async def _send(self, gateway: Any, event: Any) -> None:
        with self.scope:
            self.confirmation = await gateway.send_event(event)
