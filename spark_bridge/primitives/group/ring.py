# SPDX-License-Identifier: Apache-2.0

"""Connections between the members of one generation, in a ring: each sends to the next rank and receives from the one
before.

Both ends of a connection prove that they know the generation's key, which the driver gave to its members, before
anything else is read. The data is not encrypted, so an operator with TLS does not use this.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from spark_bridge.subtask.errors import TimedOut

__all__ = ["Ring", "listen"]

HANDSHAKE_S = 5.0
NONCE_BYTES = 16
PROOF_BYTES = 32
_POLL_MS = 1000


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
        self._sockets: list[socket.socket] = []
        self._cancelled = False
        self._left: socket.socket
        self._right: socket.socket

    def connect(self, listener: socket.socket, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to the next rank, and accept the one before. Raises ``OSError``, or ``TimedOut``."""
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
        if not accepted:
            raise TimedOut(
                f"rank {self._before} of the group did not connect to rank {self._rank} within {self._timeout_s:g} s: "
                "allow connections between the executors, or raise timeout_s of the group"
            )
        self._left = accepted[0]
        for one in (self._left, self._right):
            one.setblocking(False)

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of ``out`` to the next rank, and fill ``into`` from the one before, both at the same time.

        Raises ``OSError`` if a connection is gone or ``cancel`` was called, and ``TimedOut`` if nothing moves.
        """
        poll, deadline = select.poll(), time.monotonic() + self._timeout_s
        left, right = self._left.fileno(), self._right.fileno()
        if out:
            poll.register(right, select.POLLOUT)
        if into:
            poll.register(left, select.POLLIN)
        while out or into:
            for descriptor, _ in poll.poll(_POLL_MS):
                deadline = time.monotonic() + self._timeout_s
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
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"no data arrived at rank {self._rank} from rank {self._before} of the group for "
                    f"{self._timeout_s:g} s: look at what that member does, or raise timeout_s of the group"
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

    def _add(self, one: socket.socket) -> None:
        with self._lock:
            self._sockets.append(one)
            if self._cancelled:
                raise ConnectionError(
                    "this generation of the group is broken, because a member was lost: enter the group again"
                )
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _proof(self, who: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.digest(self._key, b"headgate ring " + who + first + second, "sha256")

    def _dial(self, address: tuple[str, int]) -> socket.socket:
        one = socket.create_connection(address, min(self._timeout_s, 60.0))
        self._add(one)
        one.settimeout(self._timeout_s)
        ours = os.urandom(NONCE_BYTES) + self._rank.to_bytes(4, "big")
        one.sendall(ours)
        answer = _read(one, NONCE_BYTES + PROOF_BYTES)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"accepts", ours, theirs)):
            raise ConnectionError(
                f"the process that answers at {address[0]}:{address[1]} is not rank {self._after} of the group"
            )
        one.sendall(self._proof(b"dials", ours, theirs))
        return one

    def _accept(self, listener: socket.socket, accepted: list[socket.socket]) -> None:
        deadline = time.monotonic() + self._timeout_s
        listener.settimeout(0.1)
        while not (accepted or self._cancelled) and time.monotonic() < deadline:
            with suppress(OSError):
                one, _ = listener.accept()
                if self._is_member(one):
                    accepted.append(one)
                else:
                    one.close()

    def _is_member(self, one: socket.socket) -> bool:
        """Whether the member before this one is at the other end. A stranger has ``HANDSHAKE_S``."""
        try:
            self._add(one)
            one.settimeout(HANDSHAKE_S)
            theirs = _read(one, NONCE_BYTES + 4)
            ours = os.urandom(NONCE_BYTES)
            one.sendall(ours + self._proof(b"accepts", theirs, ours))
            proof = _read(one, PROOF_BYTES)
        except OSError:
            return False
        genuine = hmac.compare_digest(proof, self._proof(b"dials", theirs, ours))
        return genuine and theirs[NONCE_BYTES:] == self._before.to_bytes(4, "big")


def _read(one: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = one.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection ended in the handshake")
        data += piece
    return data
