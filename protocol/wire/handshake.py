# SPDX-License-Identifier: Apache-2.0

"""The mutual authentication that precedes everything else on a connection (H60, H61, H76).

    client                                                          server
      | -- hello: "HDGT", u16 version, 16 bytes identity, 32 nonce -> |
      | <- challenge: "HDGT", u16 version, 32 bytes of nonce -------- |
      | -- proof: HMAC(key, "headgate-client" + transcript) --------> |  verified before the next line is sent
      | <- proof: HMAC(key, "headgate-server" + transcript) --------- |

The identity says which key the client holds; the server derives the same key from it (``keys``), and treats an identity
that it does not know like one with a wrong key. The transcript is the version, the identity and both nonces, so a proof
is valid for one connection only. The labels differ, so neither end can be tricked into computing the other's proof. A
peer that sends our own nonce back is also refused. HMAC is HMAC-SHA256, all integers are big-endian, and every part has
a fixed size: there is nothing to parse, and less than one part is ever buffered for an unauthenticated peer.

An unauthenticated peer learns that a server speaks the protocol, and its version, but nothing else. If the versions
differ, the server still answers the hello with its own, so that both ends can report both versions. After any other
failure nothing is sent back.

Both machines are sans-IO: they take bytes and return bytes to send; the nonce is an argument. They have no deadline:
the shell times out a silent peer (H62). An object serves one connection and one thread.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from struct import Struct
from typing import NoReturn

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.keys import IDENTITY_BYTES, KEY_BYTES, Key

__all__ = [
    "NONCE_BYTES",
    "PROOF_BYTES",
    "PROTOCOL_VERSION",
    "ClientHandshake",
    "FindKey",
    "HandshakeState",
    "ServerHandshake",
]

PROTOCOL_VERSION = 11
NONCE_BYTES = 32
PROOF_BYTES = 32

FindKey = Callable[[bytes], Key | None]
"""Finds the key that belongs to the identity in a client's hello; None if there is none."""

_MAGIC = b"HDGT"
_VERSION = Struct(">H")
_HEAD_BYTES = len(_MAGIC) + _VERSION.size
_NO_KEY = bytes(KEY_BYTES)
_CLIENT_LABEL = b"headgate-client"
_SERVER_LABEL = b"headgate-server"


class HandshakeState(Enum):
    """The part that an end waits for. Client and server both pass through these in order, from ``HELLO``."""

    HELLO = "the peer's hello"
    PROOF = "the peer's proof"
    DONE = "nothing: the peer is authenticated"
    FAILED = "nothing: the connection must be closed"


class _Handshake(ABC):
    """The common part of both ends: it collects the expected part, and a failure is permanent."""

    _own_label: bytes
    _peer_label: bytes
    _peer_name: str
    _peer_identity_bytes: int

    def __init__(self, nonce: bytes, version: int) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce must have {NONCE_BYTES} bytes, has {len(nonce)}")
        if not 0 <= version < 2**16:
            raise ValueError(f"the version must fit 16 bits, is {version}")
        self._nonce = nonce
        self._version = version
        self._head = _MAGIC + _VERSION.pack(version)
        self._key = _NO_KEY
        self._transcript = b""
        self._buffer = b""
        self._failure: RemoteProtocolError | None = None
        self._last_words = b""
        self.state = HandshakeState.HELLO

    @property
    def done(self) -> bool:
        """Whether the peer has proved that it knows the secret; ``receive`` then returned the last bytes to send."""
        return self.state is HandshakeState.DONE

    @property
    def trailing_data(self) -> bytes:
        """Once ``done``: bytes that came after the handshake's last part; they belong to frames."""
        return self._buffer if self.done else b""

    @property
    def last_words(self) -> bytes:
        """After a failure: what to send before closing the connection. Empty unless the versions differ."""
        return self._last_words

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the peer, in any portions; return what to send to it now (often nothing).

        Raises ``VersionMismatch`` or ``HandshakeFailed``, and the same again on every later call; then send
        ``last_words`` and close. Raises ``ValueError`` once ``done``, because further bytes belong to frames.
        """
        if self._failure is not None:
            raise self._failure
        if self.done:
            raise ValueError("the handshake is done: these bytes belong to frames")
        self._buffer += data
        if self.state is HandshakeState.HELLO:
            if not self._take_hello():
                return b""
            answer = self._answer_hello()
            self.state = HandshakeState.PROOF
            return answer + self._take_proof()
        return self._take_proof()

    def _take_hello(self) -> bool:
        """Check the hello as far as it has arrived: its first wrong byte fails the handshake."""
        if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
            self._fail(HandshakeFailed(f"the {self._peer_name} does not speak this protocol: check address and port"))
        if len(self._buffer) >= _HEAD_BYTES:
            (theirs,) = _VERSION.unpack_from(self._buffer, len(_MAGIC))
            if theirs != self._version:
                self._last_words = self._words_on_mismatch()
                self._fail(VersionMismatch(self._version, theirs))
        identity_end = _HEAD_BYTES + self._peer_identity_bytes
        hello_end = identity_end + NONCE_BYTES
        if len(self._buffer) < hello_end:
            return False
        identity, peer_nonce = self._buffer[_HEAD_BYTES:identity_end], self._buffer[identity_end:hello_end]
        if peer_nonce == self._nonce:
            self._fail(
                HandshakeFailed(
                    f"the {self._peer_name} sent our own nonce back, so it repeats what it receives and is not "
                    "Headgate: check address and port"
                )
            )
        self._buffer = self._buffer[hello_end:]
        self._transcript = _VERSION.pack(self._version) + self._identify(identity) + self._in_order(peer_nonce)
        return True

    def _take_proof(self) -> bytes:
        if len(self._buffer) < PROOF_BYTES:
            return b""
        right = hmac.compare_digest(self._buffer[:PROOF_BYTES], self._proof(self._peer_label))
        if not right or self._key is _NO_KEY:
            self._fail(
                HandshakeFailed(
                    f"the {self._peer_name} does not know this application's secret: "
                    "it belongs to another application, or is not Headgate; check address and port"
                )
            )
        self._buffer = self._buffer[PROOF_BYTES:]
        self.state = HandshakeState.DONE
        return self._answer_proof()

    def _proof(self, label: bytes) -> bytes:
        return hmac.digest(self._key, label + self._transcript, hashlib.sha256)

    def _fail(self, failure: RemoteProtocolError) -> NoReturn:
        self._failure = failure
        self._buffer = b""
        self.state = HandshakeState.FAILED
        raise failure

    @abstractmethod
    def _identify(self, identity: bytes) -> bytes:
        """Find the key, given the identity in the peer's hello; returns the client's identity."""

    @abstractmethod
    def _in_order(self, theirs: bytes) -> bytes:
        """Both nonces, the client's first."""

    @abstractmethod
    def _answer_hello(self) -> bytes:
        """What to send after the peer's hello."""

    @abstractmethod
    def _answer_proof(self) -> bytes:
        """What to send after the peer's proof."""

    @abstractmethod
    def _words_on_mismatch(self) -> bytes:
        """What to send to tell the peer our version."""


class ClientHandshake(_Handshake):
    """The end that connects: the task. Send ``initial_bytes()`` first; then call ``receive`` until ``done``."""

    _own_label = _CLIENT_LABEL
    _peer_label = _SERVER_LABEL
    _peer_name = "server"
    _peer_identity_bytes = 0

    def __init__(self, key: Key, nonce: bytes, version: int = PROTOCOL_VERSION) -> None:
        """``nonce``: 32 random bytes, never used before.

        Raises ``ValueError`` for another length, or a version that does not fit 16 bits.
        """
        super().__init__(nonce, version)
        self._identity = key.identity
        self._key = key.secret

    def initial_bytes(self) -> bytes:
        """The hello."""
        return self._head + self._identity + self._nonce

    def _identify(self, identity: bytes) -> bytes:
        return self._identity

    def _in_order(self, theirs: bytes) -> bytes:
        return self._nonce + theirs

    def _answer_hello(self) -> bytes:
        return self._proof(self._own_label)

    def _answer_proof(self) -> bytes:
        return b""

    def _words_on_mismatch(self) -> bytes:
        return b""


class ServerHandshake(_Handshake):
    """The end that listens: the sidecar. It sends nothing before the client's hello, and proves itself last."""

    _own_label = _SERVER_LABEL
    _peer_label = _CLIENT_LABEL
    _peer_name = "client"
    _peer_identity_bytes = IDENTITY_BYTES

    def __init__(self, find_key: FindKey, nonce: bytes, version: int = PROTOCOL_VERSION) -> None:
        """``find_key`` is called once, with what an unauthenticated peer claims; ``nonce`` as for the client."""
        super().__init__(nonce, version)
        self._find_key = find_key
        self._identity = b""

    @property
    def identity(self) -> bytes:
        """Once ``done``: the identity that the client has proved. Empty before."""
        return self._identity if self.done else b""

    def initial_bytes(self) -> bytes:
        """Nothing: the client sends first."""
        return b""

    def _identify(self, identity: bytes) -> bytes:
        self._identity = identity
        key = self._find_key(identity)
        self._key = _NO_KEY if key is None else key.secret
        return identity

    def _in_order(self, theirs: bytes) -> bytes:
        return theirs + self._nonce

    def _answer_hello(self) -> bytes:
        return self._head + self._nonce

    def _answer_proof(self) -> bytes:
        return self._proof(self._own_label)

    def _words_on_mismatch(self) -> bytes:
        return self._head + self._nonce
