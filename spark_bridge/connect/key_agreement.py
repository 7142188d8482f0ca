# SPDX-License-Identifier: Apache-2.0

"""Hands a key to the server's JVM, in texts that everybody may read.

What a client says to a Spark Connect server is in the texts of plans, and so in the server's UI and event log. The two
ends therefore exchange Diffie-Hellman values (RFC 3526, group 14) with new random exponents each time. The key is sent
combined, bit by bit, with a digest of what they have in common, which is used for nothing else.
``SessionFunction.java`` is the other end.

Somebody who can change what client and server say to each other can take the place of either end. But then he can also
run code on the server; encrypt Spark Connect itself against that.
"""

from __future__ import annotations

import hashlib
import secrets

from protocol.wire.keys import KEY_BYTES

__all__ = ["PRIME", "KeyAgreement"]

PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
    "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
    "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
    "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
    "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
    "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_BASE = 2
_VALUE_BYTES = 256


class KeyAgreement:
    """One exchange of values, for one key."""

    def __init__(self) -> None:
        self._exponent = secrets.randbelow(PRIME - 2) + 1

    @property
    def value(self) -> str:
        """What the other end is told, in hexadecimal digits."""
        return f"{pow(_BASE, self._exponent, PRIME):x}"

    def seal(self, key: bytes, theirs: str) -> str:
        """The key, for the end that has said ``theirs`` and nobody else. Raises ``ValueError`` for an invalid value."""
        value = int(theirs, 16)
        if not 2 <= value <= PRIME - 2:
            raise ValueError("not a value of the group")
        shared = pow(value, self._exponent, PRIME).to_bytes(_VALUE_BYTES, "big")
        pad = hashlib.sha256(shared).digest()
        assert len(key) == len(pad) == KEY_BYTES
        return bytes(a ^ b for a, b in zip(key, pad, strict=True)).hex()
