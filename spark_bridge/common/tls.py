# SPDX-License-Identifier: Apache-2.0

"""TLS over the bytes of a connection, for both ends: no certificate authority, but a pinned certificate (H77).

Only the standard library is used, because tasks have nothing else. A client is given the SHA-256 digest of the
sidecar's certificate and accepts no other. So neither names nor dates in the certificate matter, and nothing has to be
installed on the executors.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl

from protocol.errors import HandshakeFailed, RemoteProtocolError

__all__ = ["TlsStream", "check_certificate", "client_context", "digest_of"]

_RECORD_BYTES = 16_384
_HEAD_BYTES = 5
_AROUND_CONTENT_BYTES = 17
"""Of each record after the handshake, so many bytes are its type and its tag."""
PORTION_BYTES = 4096
"""So many bytes are decrypted before what they held is checked: with new keys in each record, they take about 2 ms."""
HANDSHAKE_BYTES_MAX = {"client": 16_384, "server": 131_072}
"""What an end may send until the handshake is done. A client needs some hundred bytes, a server its certificates."""
HIDDEN_BYTES_MAX = 2048
"""What an end may send after the handshake that is not data, over the life of a connection. Honest ends send the
tickets of a session, and new keys after each 128 GiB. Each announcement of new keys has 5 bytes and costs 15 µs."""
_MIXED_UP = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")


def digest_of(certificate: bytes) -> bytes:
    """The SHA-256 digest of a certificate in DER form, which a client pins."""
    return hashlib.sha256(certificate).digest()


def client_context() -> ssl.SSLContext:
    """TLS 1.3 only. It accepts every certificate: call ``check_certificate`` after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def check_certificate(certificate: bytes | None, pin: bytes) -> None:
    """Raise ``HandshakeFailed`` unless the server's certificate, in DER form, has the digest ``pin``."""
    if certificate is None or not hmac.compare_digest(digest_of(certificate), pin):
        raise HandshakeFailed(
            "the server's certificate is not the one that belongs to this application: it is another sidecar, "
            "or somebody between the two machines reads the connection; check address and port"
        )


class TlsStream:
    """One end of one TLS connection, without its socket: bytes in, bytes out. Not thread-safe.

    Pass what the socket delivers to ``receive``, and send what ``receive`` and ``encrypt`` return, in that order. The
    client calls ``start`` first. What is encrypted before the handshake is done waits for its end.

    ``ended``: the peer has said that it sends no more (``close_notify``). Whatever still comes is not kept.

    It keeps at most one incomplete record, and of a handshake what ``HANDSHAKE_BYTES_MAX`` allows (H157). So that no
    peer can occupy this end with records that hold nothing for it, the content of all records is counted, as their
    heads say it, and compared with the data that came out.
    """

    __slots__ = (
        "_established",
        "_head",
        "_hidden",
        "_incoming",
        "_incomplete",
        "_last",
        "_left",
        "_object",
        "_outgoing",
        "_pin",
        "_waiting",
        "ended",
    )

    def __init__(self, context: ssl.SSLContext, *, pin: bytes | None = None) -> None:
        """``pin``: the digest of the only certificate that is accepted, for a client; None for the server."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=pin is None)
        self._pin = pin
        self._established = self.ended = False
        self._waiting = bytearray()
        self._left = HANDSHAKE_BYTES_MAX["client" if pin is None else "server"]
        self._head = b""  # of a record, as far as it has come
        self._last = self._incomplete = 0  # the size of the last record, and how much of it has yet to come
        self._hidden = 0

    @property
    def established(self) -> bool:
        """Whether the handshake is done, and the peer's certificate is the pinned one."""
        return self._established

    def start(self) -> bytes:
        """The first bytes of the handshake; empty for the server."""
        self._shake_hands()
        return self._outgoing.read()

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take bytes from the peer; returns the decrypted ones, and what to send now (often nothing).

        Raises ``HandshakeFailed`` if the peer does not speak TLS or has another certificate, and
        ``RemoteProtocolError`` for bytes that were altered on the way, and for a peer whose records hold too much other
        than data.
        """
        if len(data) <= PORTION_BYTES:
            return self._receive(data), self._outgoing.read()
        portions = range(0, len(data), PORTION_BYTES)
        plain = b"".join([self._receive(data[start : start + PORTION_BYTES]) for start in portions])
        return plain, self._outgoing.read()

    def _receive(self, data: bytes) -> bytes:
        if self.ended:
            return b""
        self._count(data)
        self._incoming.write(data)
        if not self._established:
            self._left -= len(data)
            if not self._shake_hands():
                if self._left < 0:
                    raise HandshakeFailed("the TLS handshake failed: the peer sends more than any handshake has")
                return b""
            self._hidden = self._last if self._incomplete else 0
        plain = []
        try:
            while part := self._object.read(_RECORD_BYTES):
                plain.append(part)
                if not self._incoming.pending and not self._object.pending():
                    break  # cheaper than the error that a further read would raise
            else:
                self.ended = True  # nothing, instead of an error, is the peer's close_notify
                self._incoming.read()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"the encrypted connection is damaged: {_reason(error)}") from None
        self._hidden = max(0, self._hidden - sum(map(len, plain)))
        if self._hidden > HIDDEN_BYTES_MAX + (self._last if self._incomplete else 0):
            raise RemoteProtocolError("the peer's encrypted records hold too much other than data")
        return plain[0] if len(plain) == 1 else b"".join(plain)

    def _count(self, data: bytes) -> None:
        """Add up the contents of the records that begin in ``data``; their heads are in the clear."""
        if self._head:
            data = self._head + data
        position, end = self._incomplete, len(data)
        while end - position >= _HEAD_BYTES:
            self._last = size = data[position + 3] << 8 | data[position + 4]
            self._hidden += size - _AROUND_CONTENT_BYTES
            position += _HEAD_BYTES + size
        self._head = data[position:]
        self._incomplete = max(0, position - end)

    def encrypt(self, data: bytes) -> bytes:
        """The bytes to send for ``data``; empty as long as the handshake is not done."""
        if not self._established:
            self._waiting += data
            return b""
        self._object.write(data)
        return self._outgoing.read()

    def _shake_hands(self) -> bool:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            reason = _reason(error)
            if reason in _MIXED_UP:
                raise HandshakeFailed(
                    "the peer does not speak TLS here: set tls at both ends or at neither, and check address and port"
                ) from None
            raise HandshakeFailed(f"the TLS handshake failed: {reason}") from None
        if self._pin is not None:
            check_certificate(self._object.getpeercert(binary_form=True), self._pin)
        self._established = True
        if self._waiting:
            self._object.write(self._waiting)
            self._waiting = bytearray()
        return True


def _reason(error: ssl.SSLError) -> str:
    return error.reason or str(error)
