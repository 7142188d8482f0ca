# SPDX-License-Identifier: Apache-2.0

"""The client's half of a tunnel: ports on the server's host that lead to the ports of this process.

``protocol.tunnel`` has the machine, ``tunnel_calls`` the calls, and ``Tunnel.java`` is the other half. Each connection
to one of the server's doors becomes one from here to the port that the door leads to, so what listens there need not
know of the tunnel, and the two ends authenticate as they always do.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from struct import Struct
from typing import cast

import anyio

from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.errors import RemoteProtocolError
from protocol.tunnel import ChannelEnded, ChannelOpened, DataReceived, Packet, TunnelEnd, TunnelLimits
from spark_bridge.connect.tunnel_calls import SMALL_BYTES_MAX, TunnelCalls, TunnelClosed

__all__ = ["Tunnel"]

log = get_logger("headgate.connect")

UP_MAX = 4
"""So many calls bring packets up at the same time."""
LARGE_MAX = 2
"""So many of them may be large. A large call costs tens of milliseconds, and little more if it carries megabytes, which
collect while others are under way."""
PAUSES_PER_LEASE = 6
SILENT_PAUSES = 3
"""After so many pauses without a word from the server, its responses are asked for again."""
RETRY_PAUSE_S = 0.2
JOIN_S = 1.0
_RESET = Struct("ii").pack(1, 0)
"""A socket that lingers for zero seconds resets its connection when it is closed."""
SETTLE_S = 2.0
"""What was written last has so long to leave when the tunnel is closed."""


class Tunnel:
    """``open`` it, have its doors ``lead`` to addresses, and ``close`` it. Loop only.

    ``on_lost(why)`` is called once if it breaks permanently: after ``lease_s`` without an answer, when the server has
    closed it, or when ``why_gone()``, which blocks, says that there is no server any more.
    """

    def __init__(
        self,
        calls: TunnelCalls,
        doors: int,
        lease_s: float,
        why_gone: Callable[[], str | None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._calls = calls
        self._why_gone = why_gone
        self._lease_s = lease_s
        self._pause_s = lease_s / PAUSES_PER_LEASE
        self._on_lost = on_lost
        self._machine = TunnelEnd()
        self._host = ""
        self._ports = [0] * doors
        self._targets: dict[int, tuple[str, int]] = {}
        self._connections: dict[int, _Connection] = {}
        self._connections_max = _connections_max()
        self._packets: SimpleQueue[Packet | None] = SimpleQueue()
        self._calling = 0
        self._large = 0  # of those
        self._pump_due = False
        self._is_open = False
        self._heard_up = self._heard_down = 0.0
        self._pauses: asyncio.TimerHandle | None = None
        self._dials: set[asyncio.Task[None]] = set()
        self._settled: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop
        self._threads: list[threading.Thread] = []

    # --- for its owner --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Have the server listen. Raises ``ConnectRefused``."""
        self._loop = asyncio.get_running_loop()
        self._host, self._ports = await DRIVER.run(self._calls.open, self._lease_s, len(self._ports))
        self._is_open = True
        self._heard_up = self._heard_down = self._loop.time()
        self._threads = [threading.Thread(target=self._bring, daemon=True) for _ in range(UP_MAX)]
        self._threads.append(threading.Thread(target=self._listen, daemon=True))
        for thread in self._threads:
            thread.name = "headgate-tunnel"
            thread.start()
        self._pauses = self._loop.call_later(self._pause_s, self._keep)

    def lead(self, door: int, target: tuple[str, int]) -> tuple[str, int]:
        """Have a door lead to an address here; returns the address that the server's side dials."""
        self._targets[door] = target
        return self._host, self._ports[door]

    async def close(self) -> None:
        """Let what was written last leave, and have the server close its doors. Idempotent."""
        if self._is_open:
            self._settled = asyncio.Event()
            self._check_settled()
            with anyio.move_on_after(SETTLE_S):
                await self._settled.wait()
        if self._threads:
            was_open = self._is_open
            self._end()
            if was_open:
                with anyio.CancelScope(shield=True):
                    await DRIVER.run(self._calls.close)
            await DRIVER.run(self._join)

    def _join(self) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(JOIN_S)

    def _end(self) -> None:
        self._is_open = False
        self._calls.stopped = True
        if self._pauses is not None:
            self._pauses.cancel()
        for task in self._dials:
            task.cancel()
        for connection in list(self._connections.values()):
            connection.abort()
        self._connections.clear()
        for _ in range(UP_MAX):
            self._packets.put(None)
        self._calls.interrupt()
        if self._settled is not None:
            self._settled.set()

    def _lost(self, why: str) -> None:
        if self._is_open:
            log.error("tunnel lost", why=why)
            self._end()
            self._on_lost(why)

    def _keep(self) -> None:
        """Show the server that this end lives, and look whether the server's does."""
        now = self._loop.time()
        self._pauses = self._loop.call_later(self._pause_s, self._keep)
        if now - self._heard_up > self._lease_s:
            self._lost(f"the server has not answered for {self._lease_s:g} s")
            return
        if now - self._heard_down > SILENT_PAUSES * self._pause_s:
            self._heard_down = now
            self._calls.interrupt()
        if self._may_call:
            packet = self._machine.next_packet(keepalive=True)
            assert packet is not None
            self._call(packet)

    # --- up -------------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Send what there is at the end of this turn."""
        if not self._pump_due and self._is_open:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if not self._is_open:
            return
        while self._may_call and (packet := self._machine.next_packet()) is not None:
            self._call(packet)
        for channel in self._machine.take_drained():
            if channel in self._connections:
                self._connections[channel].read_again()
        self._check_settled()

    @property
    def _may_call(self) -> bool:
        return self._calling < UP_MAX and self._large < LARGE_MAX

    def _call(self, packet: Packet) -> None:
        self._calling += 1
        self._large += len(packet.data) > SMALL_BYTES_MAX
        self._packets.put(packet)

    def _bring(self) -> None:
        """On a thread: bring packets up."""
        while (packet := self._packets.get()) is not None:
            error: Exception | None = None
            try:
                self._calls.up(packet.data)
            except Exception as failure:
                error = failure
            self._on_loop(self._brought, packet, error)

    def _brought(self, packet: Packet, error: Exception | None) -> None:
        self._calling -= 1
        self._large -= len(packet.data) > SMALL_BYTES_MAX
        if error is None:
            self._heard_up = self._loop.time()
            self._machine.arrived(packet.number)
            self._pump()
        elif isinstance(error, TunnelClosed):
            self._lost(str(error))
        else:
            log.debug("tunnel call failed", error=str(error))
            self._loop.call_later(RETRY_PAUSE_S, self._send_again, packet.number)

    def _send_again(self, number: int) -> None:
        self._machine.send_again(number)
        self.pump_soon()

    def _check_settled(self) -> None:
        if self._settled is not None and self._machine.is_settled and not self._calling:
            self._settled.set()

    # --- down -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """On a thread: take the server's packets, and ask for them again whenever that has broken off."""
        paused = threading.Event()
        while not self._calls.stopped:
            try:
                self._calls.down(self._pause_s, self._machine.received_up_to, self._take)
            except TunnelClosed as closed:
                self._on_loop(self._lost, str(closed))
                return
            except Exception as error:
                if not self._calls.stopped:
                    log.debug("tunnel responses ended", error=str(error))
                    if (why := self._why_gone()) is not None:
                        self._on_loop(self._lost, why)
                        return
                    paused.wait(RETRY_PAUSE_S)

    def _take(self, packet: bytes) -> None:
        self._on_loop(self._received, packet)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed
            self._calls.stopped = True

    def _received(self, packet: bytes) -> None:
        if not self._is_open:
            return
        self._heard_down = self._loop.time()
        try:
            events = self._machine.receive(packet)
        except RemoteProtocolError as error:
            self._lost(str(error))
            return
        for event in events:
            if isinstance(event, ChannelOpened):
                self._opened(event)
            elif (connection := self._connections.get(event.channel)) is None:
                if isinstance(event, DataReceived):
                    self._machine.consumed(event.channel, len(event.data))
            elif isinstance(event, DataReceived):
                connection.pass_on(event.data)
            elif isinstance(event, ChannelEnded):
                connection.end()
            else:
                connection.abort()
        self.pump_soon()

    # --- connections ----------------------------------------------------------------------------------------------

    def _opened(self, event: ChannelOpened) -> None:
        target = self._targets.get(event.door)
        if target is None or len(self._connections) >= self._connections_max:
            self._machine.reset(event.channel)
            return
        connection = self._connections[event.channel] = _Connection(self, self._machine, event.channel)
        dial = self._loop.create_task(self._dial(connection, target))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _dial(self, connection: _Connection, target: tuple[str, int]) -> None:
        try:
            await self._loop.create_connection(lambda: connection, *target)
        except OSError:  # nothing listens there any more
            self._machine.reset(connection.channel)
            self.forget(connection.channel)

    def forget(self, channel: int) -> None:
        """The connection of a channel is over."""
        self._connections.pop(channel, None)
        self.pump_soon()


class _Connection(asyncio.Protocol):
    """One connection from here to a port of this process, in place of one to the server's door."""

    def __init__(self, tunnel: Tunnel, machine: TunnelEnd, channel: int) -> None:
        self.channel = channel
        self._tunnel = tunnel
        self._machine = machine
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # before it stands
        self._ended = self._peer_ended = self._aborted = False
        self._passing = 0  # bytes that the transport has taken, and the port may not have read
        self._is_paused = False

    # --- for the tunnel -------------------------------------------------------------------------------------------

    def pass_on(self, data: bytes) -> None:
        """Write what the other side has said."""
        if self._transport is None:
            self._early.append(data)
            return
        self._transport.write(data)
        if self._is_paused:
            self._passing += len(data)
        else:
            self._machine.consumed(self.channel, len(data))

    def end(self) -> None:
        """The other side sends no more."""
        self._ended = True
        if self._transport is not None and not self._transport.is_closing():
            if self._peer_ended:
                self._transport.close()
            else:
                self._transport.write_eof()

    def abort(self) -> None:
        """The channel is over: the port sees a reset, as it would of the other side itself."""
        self._aborted = True
        if self._transport is not None and not self._transport.is_closing():
            one = self._transport.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def read_again(self) -> None:
        """The channel has capacity again."""
        if self._transport is not None:
            self._transport.resume_reading()

    # --- for asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        early, self._early = self._early, []
        for data in early:
            self.pass_on(data)
        if self._ended:
            self._transport.write_eof()
        if self._aborted:
            self.abort()
        self._tunnel.pump_soon()

    def data_received(self, data: bytes) -> None:
        self._machine.write(self.channel, data)
        if self._transport is not None and self._machine.is_full(self.channel):
            self._transport.pause_reading()
        self._tunnel.pump_soon()

    def eof_received(self) -> bool:
        self._peer_ended = True
        self._machine.end(self.channel)
        self._tunnel.pump_soon()
        return not self._ended

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._machine.consumed(self.channel, self._passing)
        self._passing = 0
        self._tunnel.pump_soon()

    def connection_lost(self, error: Exception | None) -> None:
        self._machine.consumed(self.channel, self._passing)
        if error is not None or not self._ended:
            self._machine.reset(self.channel)
        self._tunnel.forget(self.channel)


def _connections_max() -> int:
    """Each takes a file descriptor here, and one at the port: a quarter of what this process may open, for each."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptors // 4 if descriptors > 0 else TunnelLimits().channels_max
