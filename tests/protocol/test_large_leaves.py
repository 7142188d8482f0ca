# SPDX-License-Identifier: Apache-2.0

"""Large leaves are cut out of an event and copied once: the event and its bytes are the same as without that (H62)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol.errors import RemoteProtocolError
from protocol.wire import events
from protocol.wire.codec import DEFAULT_LIMITS, decode_event, decode_event_in_steps, encode_event
from protocol.wire.large_leaves import LEAF_BYTES, PLACEHOLDER, skim
from tests.fuzz import mutations, samples

LIMITS = samples.LIMITS


@contextmanager
def cutting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat each event as a large one, and each leaf of some bytes as large."""
    with monkeypatch.context() as patch:
        patch.setattr(events, "LARGE_EVENT_BYTES", 0)
        patch.setattr(events, "LEAF_BYTES", 10)
        yield


def an_event(random: Random) -> Any:
    leaves = (
        random.randbytes(random.randrange(30)),
        "ä" * random.randrange(20),
        np.arange(random.randrange(1, 30)).astype(random.choice(("<f8", ">i4", "u1", "?", "M8[s]", "c16"))),
        np.asfortranarray(np.ones((3, 4))),
    )
    return random.choice(
        ([samples.event(random), *leaves], {"a": leaves, 1: samples.event(random)}, random.choice(leaves), leaves)
    )


def same(one: Any, other: Any) -> bool:
    return bool(encode_event(one, LIMITS) == encode_event(other, LIMITS))


def outcome(data: bytes) -> Any:
    try:
        return decode_event(data, LIMITS)
    except RemoteProtocolError:
        return RemoteProtocolError


@pytest.mark.parametrize("seed", range(30))
def test_cut_out_or_not_the_event_and_its_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = Random(seed)
    event = an_event(random)
    data = encode_event(event, LIMITS)
    whole = decode_event(data, LIMITS)
    with cutting(monkeypatch):
        encoded = encode_event(event, LIMITS)
        cut = outcome(data)
    assert same(cut, whole)
    assert same(decode_event(encoded, LIMITS), whole)
    for _ in range(40):
        spoilt = mutations.mutated(random, data)
        plain = outcome(spoilt)
        with cutting(monkeypatch):
            cut = outcome(spoilt)
        if plain is RemoteProtocolError or cut is RemoteProtocolError:
            assert plain is cut, spoilt.hex()
        else:
            assert repr(plain) == repr(cut), spoilt.hex()


@pytest.mark.parametrize("value", [bytes(LEAF_BYTES), "x" * LEAF_BYTES, [bytes(LEAF_BYTES)] * 4], ids=["b", "s", "l"])
def test_large_values_come_back(value: Any) -> None:
    value = [value, 2**20 * b"x"]
    assert decode_event(encode_event(value)) == value


def test_a_large_array_is_writable_and_belongs_to_nobody_else() -> None:  # H96
    array = np.arange(2**18, dtype="f8").reshape(2, -1)
    data = encode_event({"weights": array})
    first, second = decode_event(data)["weights"], decode_event(data)["weights"]
    first += 1
    assert (second == array).all()
    assert second.flags.aligned
    assert second.shape == array.shape


def test_no_step_copies_a_whole_leaf() -> None:  # H62
    data = encode_event([bytes(8 * 2**20), np.zeros(2**20)])
    assert sum(1 for _ in decode_event_in_steps(data)) >= 16


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb(msgpack.ExtType(PLACEHOLDER, b"\0\0\0\0")),
        msgpack.packb([bytes(100), msgpack.ExtType(PLACEHOLDER, b"\0\0\0\0")]),
        msgpack.packb([bytes(100), msgpack.ExtType(PLACEHOLDER, bytes(100))]),
        msgpack.packb([bytes(100), msgpack.ExtType(23, b"\xff" * 100)]),
        msgpack.packb([bytes(100)])[:-1],
        msgpack.packb([bytes(100)]) + b"\0",
        b"\x91\xc1",
        b"\x92" + msgpack.packb("ä" * 10)[:-1] + b"\xff\xff",
        b"\xc7",
        b"\xc9\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_not_an_event_are_refused(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:  # H62
    with cutting(monkeypatch), pytest.raises(RemoteProtocolError):
        decode_event(data, LIMITS)


def test_claims_are_checked_before_anything_is_built() -> None:  # H62
    limits = DEFAULT_LIMITS
    for data, why in (
        (b"\xdd" + (limits.event_items_max + 1).to_bytes(4, "big") + bytes(limits.event_items_max + 1), "entries"),
        (b"\x91" * (limits.event_containers_max + 1) + b"\x90", "lists and maps"),
        (b"\xdd\x00\x00\xff\xff" + bytes(100), "before its last value"),
    ):
        with pytest.raises(ValueError, match=why):
            for _ in skim(data, limits):
                pass
