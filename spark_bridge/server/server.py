# SPDX-License-Identifier: Apache-2.0

"""The server of every port of a sidecar: for tasks, for the driver's JVM, for a driver's requests (H61, H62, H63).

It listens, counts connections by state, and limits each count. ``connection`` does the rest. When the process has no
file descriptor left, the event loop logs that and stops accepting for a second; nothing ends.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

import anyio

from actors.clock import LoopClock
from actors.logs import LimitedLog, get_logger
from protocol.wire.handshake import FindKey
from spark_bridge.common.addresses import written
from spark_bridge.common.errors import SidecarError
from spark_bridge.common.forks import let_go_in_forks
from spark_bridge.server.connection import (
    Connection,
    ConnectionHandler,
    ConnectionState,
    Dialect,
    IncompleteFrames,
    ServerConfig,
    Turns,
)

__all__ = [
    "AuthenticatedServer",
    "Connection",
    "ConnectionHandler",
    "Dialect",
    "ServerConfig",
    "ServerStartError",
    "ServerStatistics",
]

log = get_logger("headgate.server")

_UNAUTHENTICATED = (ConnectionState.AUTHENTICATING, ConnectionState.REFUSED)
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_BACKLOG = 1024
"""The number of connections that the system queues: all tasks of a large stage may connect at the same time."""
_ACCEPTED_TOGETHER = 8
"""The number of connections that one turn of the loop accepts.

If it were larger, the server would drop legitimate peers as the oldest unauthenticated ones before the loop has read
what they sent. It could also run out of file descriptors before it drops any.
"""


class ServerStartError(SidecarError):
    """The server cannot listen on its address. The message names the address, the cause and the fix."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Current connections by state, and totals. ``unauthenticated`` includes the refused ones."""

    unauthenticated: int
    unidentified: int
    identified: int
    closing: int
    accepted_total: int
    turned_away_total: int


class AuthenticatedServer:
    """Listens, and hands authenticated connections to ``handler``. One loop, one start.

    ``find_key`` returns the key of the identity that a peer claims (H76). ``purpose`` says in logs what the port is
    for.
    """

    def __init__(
        self,
        handler: ConnectionHandler,
        find_key: FindKey,
        dialect: Dialect,
        config: ServerConfig | None = None,
        *,
        purpose: str = "tasks",
    ) -> None:
        """Raises ``ServerStartError`` if no address can be advertised."""
        self._handler = handler
        self._find_key = find_key
        self._dialect = dialect
        self._purpose = purpose
        self._configured = self._config = config or ServerConfig()
        self._server: asyncio.Server | None = None
        self._peer_log: LimitedLog
        self._turns: Turns
        self._incomplete: IncompleteFrames
        self._ids = count(1)
        # By state, in the order of entering it: the first one is the oldest.
        self._by_state: dict[ConnectionState, dict[int, Connection]] = {state: {} for state in ConnectionState}
        self._state_of: dict[int, ConnectionState] = {}
        self._authenticated: Counter[bytes] = Counter()  # open connections, by what each has authenticated as
        self._address: tuple[str, int] | None = None
        self._accepted_total = 0
        self._turned_away_total = 0
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        if self._config.advertised_host is None:
            _check_advertised(self._config.bind_host, "bind_host")
        else:
            _check_advertised(self._config.advertised_host, "advertised_host")

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that clients connect to, never a wildcard (H63).

        Raises ``RuntimeError`` before ``start``.
        """
        if self._address is None:
            raise RuntimeError("the server has not started")
        return self._address

    @property
    def port(self) -> int:
        """The port that it listens on. Raises ``RuntimeError`` before ``start``."""
        if self._server is None:
            raise RuntimeError("the server has not started")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def statistics(self) -> ServerStatistics:
        """The current figures."""
        return ServerStatistics(
            unauthenticated=sum(len(self._by_state[state]) for state in _UNAUTHENTICATED),
            unidentified=len(self._by_state[ConnectionState.UNIDENTIFIED]),
            identified=len(self._by_state[ConnectionState.IDENTIFIED]),
            closing=len(self._by_state[ConnectionState.CLOSING]),
            accepted_total=self._accepted_total,
            turned_away_total=self._turned_away_total,
        )

    async def start(self) -> None:
        """Listen. If that fails, raises ``ServerStartError`` and leaves nothing open."""
        if self._server is not None:
            raise RuntimeError("the server has already been started")
        self._config = config = _within_descriptors(self._configured)
        listener = await _listen(config)
        let_go_in_forks(self)
        bound_host, bound_port = listener.getsockname()[:2]
        self._address = (config.advertised_host or bound_host, config.advertised_port or bound_port)
        self._peer_log = LimitedLog(log, LoopClock(), config.log_lines_max)
        loop = asyncio.get_running_loop()
        self._turns = Turns(loop)
        self._incomplete = IncompleteFrames(loop, config.incomplete_bytes_max, config.frame_timeout_s)
        # Serving starts only when ``_server`` is set, or the first peers would be refused.
        # asyncio's backlog is both what it listens with and how many connections it accepts in one turn.
        self._server = await loop.create_server(
            self._connection, sock=listener, backlog=_ACCEPTED_TOGETHER, start_serving=False
        )
        await self._server.start_serving()
        listener.listen(_BACKLOG)
        log.info(
            "listening",
            purpose=self._purpose,
            bound=written(bound_host, bound_port),
            advertised=written(*self._address),
            connections_max=config.connections_max,
            encrypted=config.tls is not None,
        )

    async def close(self) -> None:
        """Stop listening, and close every connection after its last bytes, within ``close_timeout_s``.

        The handler is notified for each connection. On return, no socket of this server is open. Idempotent, also
        before ``start``. If it is cancelled, connections are dropped immediately.
        """
        try:
            if self._server is not None:
                await _stop_accepting(self._server)
            for connection in self._open():
                if connection.state in _UNAUTHENTICATED:
                    connection.abort("the server is closing")
                else:
                    connection.close(reason="the server is closing")
            await self._all_gone.wait()
        finally:
            for connection in self._open():
                connection.abort("the server is closing")
        if self._server is not None:
            await self._server.wait_closed()
            self._incomplete.close()
            self._peer_log.close()

    def descriptors(self) -> Iterable[int]:
        """See ``OwnsSockets``: a connection from which nothing is read at the moment is not watched by the loop."""
        listening = () if self._server is None else self._server.sockets
        return [*(one.fileno() for one in listening), *(connection.descriptor for connection in self._open())]

    def _open(self) -> list[Connection]:
        return [connection for group in self._by_state.values() for connection in group.values()]

    def _connection(self) -> Connection:
        return Connection(
            next(self._ids),
            self._handler,
            self._find_key,
            self._dialect,
            self._config,
            self._state_changed,
            self._turns,
            self._incomplete,
            self._peer_log,
        )

    def _state_changed(self, connection: Connection) -> None:
        """Update the counts, and keep each within its limit (H62)."""
        key, state = connection.connection_id, connection.state
        before = self._state_of.pop(key, None)
        if before is not None:
            del self._by_state[before][key]
        if state is ConnectionState.CLOSED:
            if connection.authenticated_as:
                self._authenticated[connection.authenticated_as] -= 1
                if not self._authenticated[connection.authenticated_as]:
                    del self._authenticated[connection.authenticated_as]
            if not self._state_of:
                self._all_gone.set()
            return
        self._state_of[key] = state
        self._by_state[state][key] = connection
        self._all_gone.clear()
        if before is None:
            self._accepted_total += 1
            if self._server is None or not self._server.is_serving():
                connection.abort("the server is closing")
                return
        if state is ConnectionState.UNIDENTIFIED:
            self._authenticated[connection.authenticated_as] += 1
            if self._authenticated.total() > self._config.connections_max:
                self._drop_one_too_many(connection.authenticated_as)
        if state in (*_UNAUTHENTICATED, ConnectionState.UNIDENTIFIED):
            self._keep_within_bound(state)

    def _drop_one_too_many(self, newcomer: bytes) -> None:
        """Drop the newest connection of the identity that has the most, which is the newcomer's if it has as many."""
        connections_max, configured = self._config.connections_max, self._configured.connections_max
        why = f"the limit of {connections_max} connections is reached"
        if connections_max < configured:
            why += " (of the files that this process may open, five eighths: raise ulimit -n)"
        most = max(self._authenticated, key=lambda one: (self._authenticated[one], one == newcomer))
        states = (ConnectionState.CLOSING, ConnectionState.UNIDENTIFIED, ConnectionState.IDENTIFIED)
        newest = (one for state in states for one in reversed(self._by_state[state].values()))
        self._turn_away(next(one for one in newest if one.authenticated_as == most), why)

    def _keep_within_bound(self, state: ConnectionState) -> None:
        """Drop the oldest peer of a state if it has too many; of those with a key, of the identity with the most."""
        group = self._by_state[state]
        if len(group) <= self._config.unauthenticated_max:
            return
        [(most, _)] = Counter(one.authenticated_as for one in group.values()).most_common(1)
        oldest = next(one for one in group.values() if one.authenticated_as == most)
        self._turn_away(oldest, f"too many peers are {state.value} ({len(group)}), and this is the oldest")

    def _turn_away(self, connection: Connection, why: str) -> None:
        if connection.state in (ConnectionState.REFUSED, ConnectionState.CLOSING):
            connection.abort(why)  # already logged, or not at fault
        else:
            self._turned_away_total += 1
            connection.drop(why)


def _within_descriptors(config: ServerConfig) -> ServerConfig:
    """Leave almost a quarter of the process's file descriptors to Spark, to storage and to the driver's own code."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections_max = max(1, 5 * descriptors // 8)
    if descriptors < 0 or config.connections_max <= connections_max:  # below 0: unlimited
        return config
    unauthenticated_max = max(1, min(config.unauthenticated_max, 3 * descriptors // 32))
    return replace(config, connections_max=connections_max, unauthenticated_max=unauthenticated_max)


def _check_advertised(host: str, name: str) -> None:
    if host in _WILDCARDS:
        raise ServerStartError(
            f"{name} is {host!r}, which nothing can connect to: "
            "set advertised_host to the name or address by which executors reach this machine"
        )


async def _stop_accepting(server: asyncio.Server) -> None:
    """Close the listening socket, but not in the turn of the loop in which it may just have accepted connections.

    asyncio makes the transport of such a connection in the next turn. If its server is closed then, it drops the
    transport half made, and only the garbage collector closes the socket.
    """
    loop = asyncio.get_running_loop()
    try:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(0)
    finally:
        server.close()


async def _listen(config: ServerConfig) -> socket.socket:
    """Open one socket, so that there is one port to advertise; IPv4 if a name has both."""
    host, port = config.bind_host, config.port
    listener: socket.socket | None = None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
        if config.advertised_host is None:  # a name may also mean every address
            _check_advertised(listener.getsockname()[0], "bind_host")
    except (OSError, OverflowError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        raise ServerStartError(
            f"cannot listen on {written(host, port)}: {getattr(error, 'strerror', None) or error}. "
            "If another application uses the port, choose another one (0 takes any free port); "
            "bind_host must be an address of this machine"
        ) from error
    except ServerStartError:
        if listener is not None:
            listener.close()
        raise
    return listener
