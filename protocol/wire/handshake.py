"""Mutual challenge and response, before anything else is parsed (H60, H61).

    client                                                     server
      | -- hello:     "HDGT", u16 version, 32 bytes of nonce --> |
      | <- challenge: "HDGT", u16 version, 32 bytes of nonce --- |
      | -- proof: HMAC(secret, "headgate-client" + transcript) > |  verified before the next line is sent
      | < proof: HMAC(secret, "headgate-server" + transcript) -- |

The transcript is the version and both nonces, so a proof is good for one connection only. The labels differ,
so no end can be made to compute the other's proof; a peer that sends our own nonce back is refused besides.
HMAC is HMAC-SHA256, all integers are big-endian, and every part has a fixed size: there is nothing to parse,
and less than one part is ever kept for a stranger.

A stranger learns that a server speaks the protocol, and its version, nothing else. With another version the
server still answers the hello with its own, so that both ends can name both. After any other failure nothing
is sent back.

Both machines are sans-IO: bytes in, bytes to send out; the nonce is an argument. They carry no deadline: a
peer that falls silent is the shell's to time out (H62). An object serves one connection and one thread.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from enum import Enum
from struct import Struct
from typing import NoReturn

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch

PROTOCOL_VERSION = 3
NONCE_BYTES = 32
SECRET_BYTES_MIN = 16
PROOF_BYTES = 32

_MAGIC = b"HDGT"
_VERSION = Struct(">H")
_HELLO_BYTES = len(_MAGIC) + _VERSION.size + NONCE_BYTES
_CLIENT_LABEL = b"headgate-client"
_SERVER_LABEL = b"headgate-server"


class HandshakeState(Enum):
    """What an end waits for. The client goes down this list from ``HELLO``, and so does the server."""

    HELLO = "the peer's hello"
    PROOF = "the peer's proof"
    DONE = "nothing: the peer is authenticated"
    FAILED = "nothing: the connection is to be closed"


class _Handshake(ABC):
    """What both ends share: collecting the part that is due, and failing once and for all."""

    _own_label: bytes
    _peer_label: bytes
    _peer_name: str

    def __init__(self, secret: bytes, nonce: bytes, version: int = PROTOCOL_VERSION) -> None:
        """``secret``: at least 16 bytes. ``nonce``: 32 random bytes, never used before.

        Raises ``ValueError`` for other lengths, or a version that does not fit 16 bits.
        """
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the secret must have at least {SECRET_BYTES_MIN} bytes, has {len(secret)}")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce must have {NONCE_BYTES} bytes, has {len(nonce)}")
        self._secret = secret
        self._nonce = nonce
        self._version = version
        self._hello = _MAGIC + _VERSION.pack(version) + nonce if 0 <= version < 2**16 else b""
        if not self._hello:
            raise ValueError(f"the version must fit 16 bits, is {version}")
        self._transcript = b""
        self._buffer = b""
        self._failure: RemoteProtocolError | None = None
        self._last_words = b""
        self.state = HandshakeState.HELLO

    @property
    def done(self) -> bool:
        """The peer has proved that it knows the secret, and what ``receive`` returned completes our own
        part."""
        return self.state is HandshakeState.DONE

    @property
    def trailing_data(self) -> bytes:
        """Once ``done``: the bytes after the handshake that came with its last part; they belong to
        frames."""
        return self._buffer if self.done else b""

    @property
    def last_words(self) -> bytes:
        """After a failure: what is to be sent before the connection is closed. Empty unless the versions
        differ."""
        return self._last_words

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the peer, in any portions; return what is to be sent to it now (often nothing).

        Raises ``VersionMismatch`` or ``HandshakeFailed``, and the same again on every later call; send
        ``last_words`` and close. Once ``done`` it must not be called again: the bytes belong to frames
        (``ValueError``).
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
        """Judge the hello as far as it is here: a stranger is turned away at its first wrong byte."""
        if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
            self._fail(HandshakeFailed(f"the {self._peer_name} does not speak this protocol"))
        if len(self._buffer) >= len(_MAGIC) + _VERSION.size:
            (theirs,) = _VERSION.unpack_from(self._buffer, len(_MAGIC))
            if theirs != self._version:
                self._last_words = self._words_on_mismatch()
                self._fail(VersionMismatch(self._version, theirs))
        if len(self._buffer) < _HELLO_BYTES:
            return False
        peer_nonce = self._buffer[_HELLO_BYTES - NONCE_BYTES : _HELLO_BYTES]
        if peer_nonce == self._nonce:
            self._fail(HandshakeFailed(f"the {self._peer_name} sent our own nonce back"))
        self._buffer = self._buffer[_HELLO_BYTES:]
        self._transcript = _VERSION.pack(self._version) + self._in_order(self._nonce, peer_nonce)
        return True

    def _take_proof(self) -> bytes:
        if len(self._buffer) < PROOF_BYTES:
            return b""
        if not hmac.compare_digest(self._buffer[:PROOF_BYTES], self._proof(self._peer_label)):
            self._fail(
                HandshakeFailed(
                    f"the {self._peer_name} does not know this application's secret: "
                    "it belongs to another application, or is no headgate at all"
                )
            )
        self._buffer = self._buffer[PROOF_BYTES:]
        self.state = HandshakeState.DONE
        return self._answer_proof()

    def _proof(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + self._transcript, hashlib.sha256)

    def _fail(self, failure: RemoteProtocolError) -> NoReturn:
        self._failure = failure
        self._buffer = b""
        self.state = HandshakeState.FAILED
        raise failure

    @abstractmethod
    def _in_order(self, ours: bytes, theirs: bytes) -> bytes:
        """The client's nonce first."""

    @abstractmethod
    def _answer_hello(self) -> bytes:
        """What follows the peer's hello."""

    @abstractmethod
    def _answer_proof(self) -> bytes:
        """What follows the peer's proof."""

    @abstractmethod
    def _words_on_mismatch(self) -> bytes:
        """What tells the peer our version."""


class ClientHandshake(_Handshake):
    """The end that connects: the task. Send ``initial_bytes()`` first; then feed ``receive`` until
    ``done``."""

    _own_label = _CLIENT_LABEL
    _peer_label = _SERVER_LABEL
    _peer_name = "server"

    def initial_bytes(self) -> bytes:
        """The hello."""
        return self._hello

    def _in_order(self, ours: bytes, theirs: bytes) -> bytes:
        return ours + theirs

    def _answer_hello(self) -> bytes:
        return self._proof(self._own_label)

    def _answer_proof(self) -> bytes:
        return b""

    def _words_on_mismatch(self) -> bytes:
        return b""


class ServerHandshake(_Handshake):
    """The end that listens: the sidecar. It says nothing before the client's hello, and proves itself
    last."""

    _own_label = _SERVER_LABEL
    _peer_label = _CLIENT_LABEL
    _peer_name = "client"

    def initial_bytes(self) -> bytes:
        """Nothing: the client speaks first."""
        return b""

    def _in_order(self, ours: bytes, theirs: bytes) -> bytes:
        return theirs + ours

    def _answer_hello(self) -> bytes:
        return self._hello

    def _answer_proof(self) -> bytes:
        return self._proof(self._own_label)

    def _words_on_mismatch(self) -> bytes:
        return self._hello
