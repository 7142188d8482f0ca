# SPDX-License-Identifier: Apache-2.0

"""A key goes to the server's JVM in public texts."""

from __future__ import annotations

import hashlib
import secrets

import pytest

from spark_bridge.connect.opening import PRIME, KeyAgreement

VALUE_BYTES = 256


def test_the_other_end_can_open_what_was_sealed_for_it() -> None:
    agreement, exponent, key = KeyAgreement(), secrets.randbelow(PRIME), secrets.token_bytes(32)

    sealed = bytes.fromhex(agreement.seal(key, f"{pow(2, exponent, PRIME):x}"))

    shared = pow(int(agreement.value, 16), exponent, PRIME).to_bytes(VALUE_BYTES, "big")
    pad = hashlib.sha256(shared).digest()
    assert bytes(a ^ b for a, b in zip(sealed, pad, strict=True)) == key
    assert sealed != key


@pytest.mark.parametrize("value", ["0", "1", f"{PRIME - 1:x}", f"{PRIME:x}", "no number"])
def test_a_value_that_would_make_the_pad_known_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"group|invalid literal"):
        KeyAgreement().seal(bytes(32), value)


def test_the_prime_is_that_of_rfc_3526() -> None:
    """2^2048 - 2^1984 - 1 + 2^64 * ([2^1918 pi] + 124476), with pi from Machin's formula."""
    one = 1 << 2046

    def arctan_of_inverse(x: int) -> int:
        total = term = one // x
        n = 3
        while term:
            term //= x * x
            total += (term // n) * (-1 if n % 4 == 3 else 1)
            n += 2
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    assert 2**2048 - 2**1984 - 1 + 2**64 * ((pi >> 128) + 124476) == PRIME
