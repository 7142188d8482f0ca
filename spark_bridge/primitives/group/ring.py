# SPDX-License-Identifier: Apache-2.0

"""Connections between the members of one generation, in a ring: each sends to the next rank and receives from the one
before.

Both ends of a connection prove that they know the generation's key, which the driver gave to its members, before
anything else is read. The data is not encrypted, so an operator with TLS does not use this.

Anybody on the network can connect to the port, so nobody there is waited for alone. All that have not proved the key
are served at the same time, each until a deadline that no byte moves. If there are too many, the oldest one goes
(H158). A member that goes in this way connects again.
"""

from __future__ import annotations

import hmac
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress

from spark_bridge.subtask.errors import TimedOut

HANDSHAKE_S = 5.0
"""How long one that has connected may take to prove the key, whatever it sends meanwhile."""
STRANGERS_MAX = 64
"""So many connections may prove the key at the same time. The oldest is dismissed when another one comes."""
NONCE_BYTES = 16
PROOF_BYTES = 32
AGAIN_S = 0.1
"""A member that went before it could prove the key waits this long before it connects again."""
_WELCOME = b"\1"
_POLL_MS = 1000

_Handshake = Generator[int, bytes, None]
"""Yields how many bytes it needs next. If it returns, the member is at the other end; if it raises, a stranger is."""


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


class Ring:
    """This member's two connections. For one thread, except ``cancel``. ``close`` it."""

    def __init__(self, rank: int, world_size: int, key: bytes, timeout_s: float) -> None:
        self._rank = rank
        self._before, self._after = (rank - 1) % world_size, (rank + 1) % world_size
        self._key = key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []  # of members
        self._cancelled = False
        self._until = 0.0
        self._left: socket.socket
        self._right: socket.socket

    def connect(self, listener: socket.socket, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to the next rank, and accept the one before. Raises ``OSError``, or ``TimedOut``."""
        self.begin()
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=self._accept, args=(listener, accepted), name="headgate-ring", daemon=True)
        thread.start()
        try:
            self._right = self._dial(addresses[self._after])
        except BaseException:
            self.cancel()
            raise
        finally:
            thread.join()
        self._check_cancelled()
        if not accepted:
            raise TimedOut(
                f"rank {self._before} of the group did not connect to rank {self._rank} within {self._timeout_s:g} s: "
                "allow connections between the executors, or raise timeout_s of the group"
            )
        self._left = accepted[0]
        for one in (self._left, self._right):
            one.setblocking(False)

    def begin(self) -> None:
        """A collective begins. It may take ``timeout_s`` as a whole, in all its exchanges."""
        self._until = time.monotonic() + self._timeout_s

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of ``out`` to the next rank, and fill ``into`` from the one before, both at the same time.

        Raises ``OSError`` if a connection is gone or ``cancel`` was called, and ``TimedOut`` if the collective takes
        too long.
        """
        poll = select.poll()
        left, right = self._left.fileno(), self._right.fileno()
        if out:
            poll.register(right, select.POLLOUT)
        if into:
            poll.register(left, select.POLLIN)
        while out or into:
            for descriptor, _ in poll.poll(_POLL_MS):
                if descriptor == right:
                    out = out[self._right.send(out) :]
                elif count := self._left.recv_into(into):
                    into = into[count:]
                else:
                    raise ConnectionError(
                        f"the connection to rank {self._before} of the group is gone: its process or host has "
                        "died, or cannot be reached"
                    )
                if not (out if descriptor == right else into):
                    poll.unregister(descriptor)
            if time.monotonic() > self._until and (out or into):
                waits_for = f"rank {self._before} to send" if into else f"rank {self._after} to receive"
                raise TimedOut(
                    f"a collective was not complete within {self._timeout_s:g} s: rank {self._rank} of the group waits "
                    f"for {waits_for} the rest; look at what that member does, or raise timeout_s of the group"
                )

    def cancel(self) -> None:
        """Make what waits fail, and everything after. Any thread."""
        with self._lock:
            self._cancelled = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._cancelled = True
            for one in self._sockets:
                one.close()

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise ConnectionError(
                "this generation of the group is broken, because a member was lost: enter the group again"
            )

    def _add(self, one: socket.socket) -> None:
        with self._lock:
            self._sockets.append(one)
            self._check_cancelled()
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _proof(self, who: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.digest(self._key, b"headgate ring " + who + first + second, "sha256")

    def _dial(self, address: tuple[str, int]) -> socket.socket:
        while True:
            one = socket.create_connection(address, max(0.001, min(self._until - time.monotonic(), 60.0)))
            self._add(one)
            try:
                self._introduce(one, address)
            except (_Ended, ConnectionResetError, BrokenPipeError):
                # It was dismissed among strangers. If its process is gone, nobody answers the next time.
                with self._lock:
                    self._sockets.remove(one)
                    one.close()
                    self._check_cancelled()
                time.sleep(AGAIN_S)
            else:
                return one

    def _introduce(self, one: socket.socket, address: tuple[str, int]) -> None:
        """Prove the key to the next rank, which proves it too, and wait until it has let this member in."""
        ours = os.urandom(NONCE_BYTES) + self._rank.to_bytes(4, "big")
        answer = self._ask(one, ours, NONCE_BYTES + PROOF_BYTES)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"accepts", ours, theirs)):
            raise ConnectionError(
                f"the process that answers at {address[0]}:{address[1]} is not rank {self._after} of the group, "
                "because it does not know the group's key: let no other program and no proxy take connections between "
                "executors"
            )
        self._ask(one, self._proof(b"dials", ours, theirs), len(_WELCOME))

    def _ask(self, one: socket.socket, data: bytes, size: int) -> bytes:
        """Send, and read the answer, both before the deadline. Raises ``_Ended`` if the other end closes."""
        answer = b""
        while len(answer) < size:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise TimedOut(
                    f"rank {self._after} of the group did not let rank {self._rank} in within {self._timeout_s:g} s: "
                    "look at what that member does, or raise timeout_s of the group"
                )
            one.settimeout(left_s)
            with suppress(TimeoutError):
                one.sendall(data)  # a few bytes, which fit into the buffer of the connection
                data = b""
                piece = one.recv(size - len(answer))
                if not piece:
                    raise _Ended
                answer += piece
        return answer

    def _accept(self, listener: socket.socket, accepted: list[socket.socket]) -> None:
        """Let the member before this one in, however many strangers come."""
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
            try:
                while not (accepted or self._cancelled) and time.monotonic() < self._until:
                    for key, _ in selector.select(AGAIN_S):
                        if key.fileobj is listener:
                            self._meet(listener, selector, strangers)
                        elif (stranger := strangers.get(key.fileobj)) and not stranger.read():  # type: ignore[call-overload]
                            selector.unregister(strangers.pop(stranger.socket).socket)
                            if stranger.is_member:
                                accepted.append(stranger.socket)
                                self._add(stranger.socket)
                                return
                            stranger.socket.close()
                    now = time.monotonic()
                    while strangers and (oldest := next(iter(strangers.values()))).until < now:
                        _dismiss(oldest, selector, strangers)
            except ConnectionError:  # cancelled, which the caller sees
                pass
            finally:
                for one in strangers:
                    one.close()

    def _meet(
        self, listener: socket.socket, selector: selectors.BaseSelector, strangers: dict[socket.socket, _Stranger]
    ) -> None:
        with suppress(OSError):
            one, _ = listener.accept()
            one.setblocking(False)
            if len(strangers) >= STRANGERS_MAX:
                _dismiss(next(iter(strangers.values())), selector, strangers)
            strangers[one] = _Stranger(one, self._handshake(one))
            selector.register(one, selectors.EVENT_READ)

    def _handshake(self, one: socket.socket) -> _Handshake:
        """The other end of ``_introduce``, on a connection that never blocks."""
        theirs = yield NONCE_BYTES + 4
        ours = os.urandom(NONCE_BYTES)
        _send(one, ours + self._proof(b"accepts", theirs, ours))
        proof = yield PROOF_BYTES
        genuine = hmac.compare_digest(proof, self._proof(b"dials", theirs, ours))
        if not genuine or theirs[NONCE_BYTES:] != self._before.to_bytes(4, "big"):
            raise ConnectionError("a stranger")
        _send(one, _WELCOME)


class _Ended(ConnectionError):
    """The other end closed the connection in the handshake."""


class _Stranger:
    """One that has connected and has yet to prove the key.

    Attributes:
        until: its deadline, which nothing moves.
        is_member: whether it has proved that it is the member that is expected.
    """

    def __init__(self, one: socket.socket, handshake: _Handshake) -> None:
        self.socket = one
        self.until = time.monotonic() + HANDSHAKE_S
        self.is_member = False
        self._handshake = handshake
        self._needs = next(handshake)
        self._data = b""

    def read(self) -> bool:
        """Take what has arrived, at most what the handshake needs. Return False at its end; do not call it again."""
        try:
            piece = self.socket.recv(self._needs - len(self._data))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._data += piece
        if not piece or len(self._data) < self._needs:
            return bool(piece)
        data, self._data = self._data, b""
        try:
            self._needs = self._handshake.send(data)
        except StopIteration:
            self.is_member = True
            return False
        except OSError:
            return False
        return True


def _dismiss(stranger: _Stranger, selector: selectors.BaseSelector, strangers: dict[socket.socket, _Stranger]) -> None:
    del strangers[stranger.socket]
    selector.unregister(stranger.socket)
    stranger.socket.close()


def _send(one: socket.socket, data: bytes) -> None:
    """Send a few bytes without waiting. If they do not fit, it is not a member."""
    if one.send(data) != len(data):
        raise ConnectionError("a stranger, which does not read")
