# SPDX-License-Identifier: Apache-2.0

"""A TCP line between the tasks and the sidecar that a test controls: it can be cut, broken, torn and slow.

The sidecar listens on its own address, and the tasks are given the line's. The line reads what comes, keeps it while
nothing may pass, and writes it to the other side. It does not interpret the bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal

from spark_bridge.driver.config import Addresses, SidecarConfig

WAIT_S = 300.0
LINES_HOST = "127.0.0.1"
SIDECARS_HOST = "127.0.0.9"
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # linger for zero seconds: closing such a socket resets the connection

T = TypeVar("T")


class LineState(Enum):
    """How the line treats incoming data."""

    OPEN = "everything passes"
    CUT = "nothing passes, and nobody is told"
    BROKEN = "every connection has been reset, and so is each new one"


class End(asyncio.Protocol):
    """One of a connection's two sockets. What it reads waits here until it may be written to the other one."""

    def __init__(self, connection: LineConnection) -> None:
        self.other: End
        self.waiting_bytes = 0
        self.passed_bytes = 0
        self.silenced = False  # nothing more that this side sends will arrive
        self._connection = connection
        self._line = connection.line
        self._waiting: deque[tuple[float, bytes]] = deque()  # when it may pass, and the data
        self._transport: asyncio.Transport | None = None
        self._writable = True
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._tear_after: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether neither this side nor its peer has ended it, as far as this process knows."""
        return self._transport is not None and not self._ended

    # --- for asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.end_made(self)

    def data_received(self, data: bytes) -> None:
        due = asyncio.get_running_loop().time() + self._line.delay_s
        step = self._line.buffer_bytes or len(data)
        self._waiting.extend((due, data[at : at + step]) for at in range(0, len(data), step))
        self.waiting_bytes += len(data)
        self.pass_on()

    def eof_received(self) -> bool:
        self._ended = True
        self.pass_on()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._ended = True
        self.pass_on()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.other.pass_on()

    # --- what the line does ---------------------------------------------------------------------------------------

    def pass_on(self) -> None:
        """Write what may pass now, and schedule the rest for its time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting and self._passes():
            due, data = self._waiting[0]
            if due > loop.time():
                self._timer = loop.call_at(due, self.pass_on)
                break
            self._waiting.popleft()
            self.waiting_bytes -= len(data)
            self._write_to_other(data)
        if self._ended and not self._waiting and self._passes():
            self.other.hang_up()
        self._read_on_if_the_buffer_allows()
        self._line.note()

    def tear_after(self, count: int) -> None:
        """Let this many bytes pass, and then reset both sides."""
        self._tear_after = count

    def hang_up(self) -> None:
        """Close the socket after the pending data."""
        if self._transport is not None:
            self._transport.close()

    @property
    def can_take(self) -> bool:
        """Whether data may be written to it now."""
        return self._transport is not None and self._writable

    def reset(self) -> None:
        """Close the socket immediately; its peer sees a connection reset."""
        self._waiting.clear()
        self.waiting_bytes = 0
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            self._transport.abort()
            self._transport = None

    def _passes(self) -> bool:
        return self._line.state is LineState.OPEN and self.other.can_take and not self.silenced

    def _write_to_other(self, data: bytes) -> None:
        if self._tear_after is not None:
            data = data[: self._tear_after]
            self._tear_after -= len(data)
        self.other.write(data)
        self.passed_bytes += len(data)
        if self._tear_after == 0:
            self._connection.torn = True
            self._connection.reset()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _read_on_if_the_buffer_allows(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._ended:
            return
        bound = self._line.buffer_bytes
        if bound and self.waiting_bytes >= bound:
            self._line.filled += self._transport.is_reading()
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class LineConnection:
    """One connection of a task, and the one to the sidecar that continues it. ``torn``: ``tear_after`` has reset it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.torn = False
        self.of_task, self.of_sidecar = End(self), End(self)
        self.of_task.other, self.of_sidecar.other = self.of_sidecar, self.of_task

    def end_made(self, end: End) -> None:
        if end is self.of_task:
            self.line.called(self)
        else:
            self.of_task.pass_on()

    def reset(self) -> None:
        """Reset the connection on both sides."""
        self.of_task.reset()
        self.of_sidecar.reset()

    def leave_half_open(self) -> None:
        """Reset the connection to the sidecar; the task is told nothing, now or later."""
        self.of_task.silenced = self.of_sidecar.silenced = True
        self.of_sidecar.reset()


class Line:
    """A TCP line as the module describes it. Its methods may be called from any thread.

    ``buffer_bytes``: how much it keeps in each direction before it stops reading, and the most it passes on in one
    write; 0 for no limit. ``delay_s``: how long everything takes. ``leads_to`` is the address at its other end, by
    default the sidecar of ``config()``. ``connections`` holds every connection made to it, the oldest first;
    ``turned_away`` counts those that it reset immediately, ``filled`` how often it had to stop reading.
    """

    def __init__(self, *, buffer_bytes: int = 0, delay_s: float = 0.0) -> None:
        self.buffer_bytes = buffer_bytes
        self.delay_s = delay_s
        self.state = LineState.OPEN
        self.connections: list[LineConnection] = []
        self.turned_away = 0
        self.filled = 0
        self.port = 0
        self.leads_to = SIDECARS_HOST, 0  # port 0: the same as the line's
        self._portal: BlockingPortal
        self._server: asyncio.Server
        self._connecting: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._stop: Callable[..., Any]

    def __enter__(self) -> Line:
        manager = start_blocking_portal("asyncio", name="line")
        self._portal, self._stop = manager.__enter__(), manager.__exit__
        self._portal.call(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._portal.call(self._close)
        finally:
            self._stop(None, None, None)

    def config(self, **more: Any) -> SidecarConfig:
        """Settings for a sidecar at the other end of the line."""
        return SidecarConfig(
            host=SIDECARS_HOST,
            port=self.port,
            **more,
            addresses=Addresses(advertised_host=LINES_HOST, advertised_port=self.port),
        )

    # --- what the test does to it ---------------------------------------------------------------------------------

    def cut(self) -> None:
        """Let nothing pass from now on, not even the end of a connection."""
        self._call(lambda: self._enter(LineState.CUT))

    def break_off(self) -> None:
        """Reset every connection, and reject each new one."""
        self._call(lambda: self._enter(LineState.BROKEN))

    def heal(self) -> None:
        """Let everything that has waited pass, and accept connections again."""
        self._call(lambda: self._enter(LineState.OPEN))

    def leave_half_open(self, connection: LineConnection) -> None:
        """See ``LineConnection.leave_half_open``."""
        self._call(connection.leave_half_open)

    def tear_after(self, end: End, count: int) -> None:
        """Let ``count`` more bytes from this side pass, then reset the connection."""
        self._call(lambda: end.tear_after(count))

    def wait_for(self, condition: Callable[[Line], bool], what: str) -> None:
        """Wait for a condition; ``what`` describes it in the error if it does not come true."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), WAIT_S):
                ways = [(one.of_task.waiting_bytes, one.of_sidecar.waiting_bytes) for one in self.connections]
                raise AssertionError(f"not within {WAIT_S:g} s: {what}; waiting: {ways}, {self.turned_away=}")

    # --- on its own loop ------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Wake the waiting test: the state has changed."""
        with self._changed:
            self._changed.notify_all()

    def called(self, connection: LineConnection) -> None:
        """A task has connected."""
        if self.state is LineState.BROKEN:
            self.turned_away += 1
            connection.of_task.reset()
        else:
            self.connections.append(connection)
            task = asyncio.get_running_loop().create_task(self._continue(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        self.note()

    async def _continue(self, connection: LineConnection) -> None:
        sock = self._socket()
        try:
            host, port = self.leads_to
            await asyncio.get_running_loop().sock_connect(sock, (host, port or self.port))
        except OSError:  # the sidecar has closed: close the task's side, too
            sock.close()
            connection.of_task.reset()
            return
        await asyncio.get_running_loop().create_connection(lambda: connection.of_sidecar, sock=sock)

    async def _listen(self) -> None:
        listener = self._socket()
        listener.bind((LINES_HOST, 0))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(
            lambda: LineConnection(self).of_task, sock=listener
        )

    async def _close(self) -> None:
        self._server.close()
        for connection in self.connections:
            connection.reset()
        if self._connecting:
            await asyncio.wait(self._connecting)
        await self._server.wait_closed()

    def _enter(self, state: LineState) -> None:
        self.state = state
        for connection in self.connections:
            if state is LineState.BROKEN:
                connection.reset()
            for end in (connection.of_task, connection.of_sidecar):
                end.pass_on()

    def _socket(self) -> socket.socket:
        """Use small kernel buffers, too, if the line's own are small."""
        sock = socket.socket()
        sock.setblocking(False)
        if self.buffer_bytes:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, self.buffer_bytes)
        return sock

    def _call(self, do: Callable[[], T]) -> T:
        async def call() -> T:
            return do()

        return self._portal.call(call)
