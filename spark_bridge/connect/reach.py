# SPDX-License-Identifier: Apache-2.0

"""How a Spark Connect server and its executors reach this process: they dial it, or use a tunnel."""

from __future__ import annotations

from collections.abc import Callable

from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.wire.keys import Purpose
from spark_bridge.connect.remote_session import RemoteSession
from spark_bridge.connect.tunnel import Tunnel
from spark_bridge.driver.config import Way

__all__ = ["Reach"]

log = get_logger("headgate.connect")

_DOORS = (Purpose.TASKS, Purpose.RELAY, Purpose.STREAMS)
_LOOPBACK = "127.0.0.1"


class Reach:
    """The way from a server to the ports of this process, which listen on ``bind_host``. Loop only.

    With ``wanted="auto"``, it is the direct one until ``to_tunnel``. ``ships``: the session brings the relay to the
    server, and with it the tunnel. ``on_lost(why)`` is called if the tunnel breaks permanently.
    """

    def __init__(
        self,
        session: RemoteSession,
        wanted: Way,
        lease_s: float,
        bind_host: str,
        *,
        ships: bool,
        on_lost: Callable[[str], None],
    ) -> None:
        self._session = session
        self._wanted = wanted
        self._lease_s = lease_s
        self._here = _LOOPBACK if bind_host in ("", "0.0.0.0", "::") else bind_host
        self._ships = ships
        self._on_lost = on_lost
        self._tunnel: Tunnel | None = None

    @property
    def way(self) -> Way:
        """The one that is used now."""
        return "direct" if self._tunnel is None else "tunnel"

    @property
    def may_change(self) -> bool:
        """Whether a server that cannot dial this process may be given a tunnel."""
        return self._wanted == "auto" and self._ships and self._tunnel is None

    async def begin(self) -> None:
        """Open the tunnel if it was asked for. Raises ``ConnectRefused``."""
        if self._wanted == "tunnel" and self._tunnel is None:
            await self.to_tunnel("way='tunnel' was set")

    async def to_tunnel(self, why: str) -> None:
        """Use a tunnel from now on. Raises ``ConnectRefused``."""
        log.info("tunnel opening", why=why)
        if self._ships:
            await DRIVER.run(self._session.ship_relay)
        calls = await DRIVER.run(self._session.tunnel_calls)
        tunnel = Tunnel(calls, len(_DOORS), self._lease_s, self._session.why_unreachable, self._on_lost)
        await tunnel.open()
        self._tunnel = tunnel

    def address(self, purpose: Purpose, port: int, advertised: tuple[str, int]) -> tuple[str, int]:
        """What the server's side dials for a port of this process that is advertised as that address."""
        if self._tunnel is None:
            return advertised
        return self._tunnel.lead(_DOORS.index(purpose), (self._here, port))

    async def close(self) -> None:
        """Close the tunnel, if there is one."""
        if self._tunnel is not None:
            await self._tunnel.close()
