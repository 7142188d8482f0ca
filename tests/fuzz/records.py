# SPDX-License-Identifier: Apache-2.0

"""Records of TLS 1.3 that no library sends: an attacker's own record layer, above a real handshake.

``ssl`` gives no access to what is below the plaintext. So the handshake is a real one, of which the context notes the
secrets, and from these this module derives the keys of the client's records (RFC 8446, 7.1 and 7.3).
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from spark_bridge.common.tls import TlsStream, client_context

__all__ = [
    "ALERT",
    "APPLICATION_DATA",
    "CLOSE_NOTIFY",
    "HANDSHAKE",
    "NotedSecrets",
    "RecordLayer",
    "cleartext_record",
    "shaken",
]

ALERT, HANDSHAKE, APPLICATION_DATA = 21, 22, 23
"""The types of a record."""
CLOSE_NOTIFY = b"\x01\x00"
KEY_UPDATE, KEY_UPDATE_ANSWERED = b"\x18\x00\x00\x01\x00", b"\x18\x00\x00\x01\x01"
"""New keys for what the sender sends, and the same with a request for new keys of the other end."""
_TAG_BYTES = 16


def cleartext_record(kind: int, body: bytes, *, claimed: int | None = None) -> bytes:
    """A record as it is before the handshake; ``claimed`` is the length that its head names, if it is not the right
    one."""
    size = len(body) if claimed is None else claimed
    return bytes([kind, 3, 3]) + size.to_bytes(2, "big") + body


class NotedSecrets:
    """A context for the client's end that notes the secrets of its connections. Each serves one connection at a time.

    The file of notes is deleted with the object.
    """

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(suffix=".keys")  # noqa: SIM115 - it is deleted with this object
        self.context: ssl.SSLContext = client_context()
        self.context.keylog_filename = self._file.name

    def records(self, client: TlsStream) -> RecordLayer:
        """The record layer of this client's end, which is the newest, and whose handshake is done."""
        notes = Path(self._file.name).read_text(encoding="ascii").splitlines()
        secret = next(note.split()[2] for note in reversed(notes) if note.startswith("CLIENT_TRAFFIC_SECRET_0"))
        cipher = client._object.cipher()
        assert cipher is not None
        return RecordLayer(bytes.fromhex(secret), cipher[0])


class RecordLayer:
    """Encrypts records of any type and content, in the order in which they are sent."""

    def __init__(self, secret: bytes, cipher: str) -> None:
        """``secret``: the sender's traffic secret. ``cipher``: the name of the cipher suite, as ``ssl`` says it."""
        self._digest = "sha384" if cipher.endswith("SHA384") else "sha256"
        self._kind = ChaCha20Poly1305 if "CHACHA20" in cipher else AESGCM
        self._key_bytes = 16 if "AES_128" in cipher else 32
        self._use(secret)

    def record(self, kind: int, content: bytes, *, padding: int = 0) -> bytes:
        """The next record. ``padding``: so many zeros after its type."""
        inner = content + bytes([kind]) + bytes(padding)
        head = bytes([APPLICATION_DATA, 3, 3]) + (len(inner) + _TAG_BYTES).to_bytes(2, "big")
        nonce = (int.from_bytes(self._iv, "big") ^ self._sent).to_bytes(12, "big")
        self._sent += 1
        return head + self._cipher.encrypt(nonce, inner, head)

    def new_keys(self, *, answered: bool) -> bytes:
        """A record that announces new keys, which the next record uses. ``answered``: the other end must send one."""
        record = self.record(HANDSHAKE, KEY_UPDATE_ANSWERED if answered else KEY_UPDATE)
        self._use(self._expand(self._secret, b"traffic upd", hashlib.new(self._digest).digest_size))
        return record

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = self._kind(self._expand(secret, b"key", self._key_bytes))
        self._iv = self._expand(secret, b"iv", 12)
        self._sent = 0

    def _expand(self, secret: bytes, label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\x00"
        return hmac.digest(secret, info + b"\x01", self._digest)[:size]


def shaken(context: ssl.SSLContext, pin: bytes) -> tuple[TlsStream, TlsStream, RecordLayer]:
    """Both ends after the handshake, the server's first; and a record layer that continues the client's."""
    noted = NotedSecrets()
    server, client = TlsStream(context), TlsStream(noted.context, pin=pin)
    up = client.start()
    while not (server.established and client.established):
        _, down = server.receive(up)
        _, up = client.receive(down)
    server.receive(up)
    return server, client, noted.records(client)
