# SPDX-License-Identifier: Apache-2.0

"""A corrupted checkpoint with its length and checksum corrected, so that its body is read nevertheless."""

from __future__ import annotations

import struct
from hashlib import sha256

_HEAD = struct.Struct(">8sIQ")
_MAGIC = b"\x89HGC\r\n\x1a\n"
_DIGEST_BYTES = 32


def resealed(data: bytes) -> bytes:
    """Return the file with a valid header and checksum for its current body."""
    body = data[_HEAD.size : -_DIGEST_BYTES]
    whole = _HEAD.pack(_MAGIC, 1, len(body)) + body
    return whole + sha256(whole).digest()
