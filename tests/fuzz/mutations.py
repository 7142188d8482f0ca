# SPDX-License-Identifier: Apache-2.0

"""Ways to corrupt bytes: blind ones, and ones that know msgpack and frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

# Headers with the largest possible claims: lists, maps, strings, binaries, extensions, each at its widest length.
HUGE_CLAIMS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
)
# Valid msgpack values that no field of any message can have, or that Python reads differently.
ODD_VALUES = (
    b"\xc1",  # never used by msgpack
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\xff\xf0\x00\x00\x00\x00\x00\x00",  # minus infinity
    b"\xca\x7f\xc0\x00\x00",  # NaN in 32 bits
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",  # above 63 bits
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",  # the least 64-bit integer
    b"\xa3\xed\xa0\x80",  # a lone surrogate in a string
    b"\xa1\xff",  # not UTF-8
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xd4\x05\x00",  # an extension
    b"\xc7\x00\x05",  # an extension of no bytes
    b"\x82\x01\x02\x01\x03",  # the same key twice
    b"\x81\x90\x01",  # a list as a key
    b"\x90",
    b"\x80",
    b"\xc3",
    b"\xc0",
    b"\xff",
)
_TYPE_BYTES = bytes((0x80, 0x90, 0x9F, 0xA0, 0xC0, 0xC1, 0xC4, 0xC5, 0xC6, 0xC7, 0xCA, 0xCB, 0xCC, 0xCF, 0xD0, 0xD3,
                     0xD4, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF))  # fmt: skip
_BOMBS = (b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01", b"\xdc\x00\x02\x90")

Mutation = Callable[[Random, bytes], bytes]


def truncations(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` cut off at each of its bytes, starting with nothing."""
    return (data[:length] for length in range(len(data)))


def mutated(random: Random, data: bytes) -> bytes:
    """Return ``data`` after one to four mutations, often only one, so that most of it still makes sense."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice(MUTATIONS)(random, data)
    return data


def _place(random: Random, data: bytes) -> int:
    """Choose a place; the front is hit more often, because headers are there."""
    if not data:
        return 0
    return random.randrange(min(len(data), 12)) if random.random() < 0.5 else random.randrange(len(data))


def _flip_bit(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :] if data else b"\x01"


def _change_byte(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + random.randbytes(1) + data[place + 1 :]


def _change_type(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + bytes([random.choice(_TYPE_BYTES)]) + data[place + 1 :]


def _insert(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + random.randbytes(random.choice((1, 1, 2, 8))) + data[place:]


def _delete(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + data[place + random.choice((1, 1, 2, 8)) :]


def _truncate(random: Random, data: bytes) -> bytes:
    return data[: _place(random, data)]


def _append(random: Random, data: bytes) -> bytes:
    return data + random.choice((b"\x00", b"\xc0", data, random.randbytes(9)))


def _claim_much(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + random.choice(HUGE_CLAIMS) + data[place + random.randrange(2) :]


def _put_odd_value(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    return data[:place] + random.choice(ODD_VALUES) + data[place + 1 :]


def _nest(random: Random, data: bytes) -> bytes:
    place = _place(random, data)
    depth = random.choice((5, 17, 70, 600, 5000))
    return data[:place] + random.choice(_BOMBS) * depth + data[place:]


def _splice(random: Random, data: bytes) -> bytes:
    """Repeat a piece of the data elsewhere."""
    start = _place(random, data)
    place = _place(random, data)
    return data[:place] + data[start : start + random.choice((1, 4, 20))] + data[place:]


def _widen_integer(random: Random, data: bytes) -> bytes:
    """Replace a length or a number with eight bytes near an edge."""
    place = _place(random, data)
    value = random.choice((0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1))
    width = random.choice((1, 2, 4, 8))
    return data[:place] + value.to_bytes(8, "big")[-width:] + data[place + width :]


MUTATIONS: tuple[Mutation, ...] = (
    _flip_bit,
    _change_byte,
    _change_type,
    _insert,
    _delete,
    _truncate,
    _append,
    _claim_much,
    _put_odd_value,
    _nest,
    _splice,
    _widen_integer,
)
