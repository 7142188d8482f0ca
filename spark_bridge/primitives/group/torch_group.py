# SPDX-License-Identifier: Apache-2.0

"""``torch.distributed`` among the members of a group. The only module of a group that needs torch.

The members find each other through a store at rank 0, on a port that it has bound itself, so no other process can have
taken it in the meantime. Gloo notices a peer that is killed, but waits for its timeout if one stands still.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from spark_bridge.primitives.group.ring import listen


def check_installed() -> None:
    """Raises ``ImportError`` if torch is not installed. This module can be imported without it."""
    import torch.distributed  # noqa: F401


class Store:
    """The server of the store, in the process of rank 0. It ends with this object."""

    def __init__(self, host: str, world_size: int, timeout_s: float) -> None:
        with listen(host or "127.0.0.1") as listener:
            self.port: int = listener.getsockname()[1]
            self._server = _connect(host, self.port, world_size, timeout_s, listener)


def _connect(host: str, port: int, world_size: int, timeout_s: float, listener: socket.socket | None = None) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        host or "127.0.0.1",
        port,
        world_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


class ProcessGroup:
    """This process in the default process group, until the block is left."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._begun = False

    def __enter__(self) -> ProcessGroup:
        return self

    def begin(self, host: str, port: int) -> None:
        """Connect to all members. ``host`` and ``port``: the store's."""
        import torch.distributed as dist

        # The connection of the store's server to itself is older than the guard, which would not shut it down.
        dist.init_process_group(
            "gloo",
            store=_connect(host, port, self._world_size, self._timeout_s),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=self._timeout_s),
        )
        self._begun = True

    def end(self) -> None:
        import torch.distributed as dist

        self._begun = False
        dist.destroy_process_group()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._begun:
            with suppress(Exception):  # it tells that peers are gone
                self.end()
