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
    """

    __slots__ = ("_established", "_incoming", "_object", "_outgoing", "_pin", "_waiting")

    def __init__(self, context: ssl.SSLContext, *, pin: bytes | None = None) -> None:
        """``pin``: the digest of the only certificate that is accepted, for a client; None for the server."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=pin is None)
        self._pin = pin
        self._established = False
        self._waiting = bytearray()

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
        ``RemoteProtocolError`` for bytes that were altered on the way.
        """
        self._incoming.write(data)
        if not self._established and not self._shake_hands():
            return b"", self._outgoing.read()
        plain = []
        try:
            while part := self._object.read(_RECORD_BYTES):
                plain.append(part)
                if not self._incoming.pending and not self._object.pending():
                    break  # cheaper than the error that a further read would raise
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"the encrypted connection is damaged: {_reason(error)}") from None
        return plain[0] if len(plain) == 1 else b"".join(plain), self._outgoing.read()

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
