# SPDX-License-Identifier: Apache-2.0

"""Ask for a new coordinator at each reset, for coordinators that cannot be reset in place (R101).

This only declares it. ``actors.coordination.host.part`` does it.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.coordination.interface import OperatorCoordinator
from protocol.arguments import checked
from protocol.describing import name_of

__all__ = ["RecreateOnReset"]


class RecreateOnReset:
    """A coordinator for ``coordinate`` that is built anew at each reset.

    ``coordinate`` does this by itself if it is given a class or a factory. Use this class to set ``close_timeout_s``.

    Each coordinator gets ``reset_to_checkpoint`` at most once, before its ``start``. So it begins its work in
    ``start``. Gateways are not carried over: every subtask becomes ready again after a reset. A coordinator that was
    replaced has no effect any more: what it sends fails, and its writes to the shared store raise.

    Args:
        factory: makes a coordinator, on the event loop. It must return a new one each time and must not block.
        close_timeout_s: how many seconds the next coordinator waits until the one before is closed. Then that ``close``
            is cancelled, with an error in the log, and the job continues.
        name: the coordinator's name in logs; by default the factory's.
    """

    @checked()
    def __init__(
        self,
        factory: Callable[[], OperatorCoordinator],
        *,
        close_timeout_s: float = 60.0,
        name: str | None = None,
    ) -> None:
        self.factory = factory
        self.close_timeout_s = close_timeout_s
        self.name = name or name_of(factory)

    def __repr__(self) -> str:
        return f"<RecreateOnReset {self.name}>"
