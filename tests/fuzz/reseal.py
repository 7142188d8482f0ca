"""A spoilt checkpoint with its length and checksum put right, so that its body is looked at all the same."""

from __future__ import annotations

import struct
from hashlib import sha256

_HEAD = struct.Struct(">8sIQ")
_MAGIC = b"\x89HGC\r\n\x1a\n"
_DIGEST_BYTES = 32


def resealed(data: bytes) -> bytes:
    """Whatever stands where the body does, as a file that is whole by all that its two ends say."""
    body = data[_HEAD.size : -_DIGEST_BYTES]
    whole = _HEAD.pack(_MAGIC, 1, len(body)) + body
    return whole + sha256(whole).digest()
