# SPDX-License-Identifier: Apache-2.0

"""The short ways of small events with classes, tuples and leaves do what the long ways do: same bytes, values, errors.

The long ways look at every container, and are what the limits are defined by (H62, H95, H97).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol.errors import EventEncodeError, RemoteProtocolError
from protocol.wire import events
from protocol.wire.codec import WireLimits, decode_event, encode_event
from protocol.wire.event_classes import event
from protocol.wire.large_leaves import LEAF_BYTES
from tests.fuzz import samples
from tests.fuzz.mutations import mutated
from tests.fuzz.samples import Sample

CASES = 4000


@event("tests.forms.picky")
@dataclass
class Picky:
    number: Any

    def __post_init__(self) -> None:
        if self.number == 7:
            raise ValueError("never seven")


def a_value(random: Random) -> Any:
    match random.randrange(7):
        case 0:
            return [Sample(samples.event(random, 3), Picky(random.randrange(6))) for _ in range(random.randrange(40))]
        case 1:
            value: Any = samples.event(random, 3)
            for _ in range(random.randrange(9)):
                value = random.choice((Sample(value), Sample(1, value), Picky(value), [value], (value,)))
            return value
        case 2:
            return random.choice((samples._leaf(random), np.zeros(2 if random.random() < 0.99 else LEAF_BYTES)))
        case 3:
            return Sample(msgpack.ExtType(5, b"") if random.random() < 0.2 else bytearray(b"x"), msgpack.Timestamp(1))
        case 4:
            value = 1
            for _ in range(random.randrange(9)):
                value = [value]
            return random.choice((Sample(value), (value,), value))
        case _:
            return Sample(samples.event(random, 2), samples.event(random, 2))


def some_limits(random: Random) -> WireLimits:
    few = {
        "event_nesting_max": random.randrange(1, 8),
        "event_containers_max": random.randrange(1, 20),
        "event_items_max": random.randrange(1, 60),
        "event_map_entries_max": random.randrange(1, 20),
    }
    return WireLimits(**{name: limit for name, limit in few.items() if random.random() < 0.25})


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    try:
        return call(*arguments), ""
    except (EventEncodeError, RemoteProtocolError) as error:
        return None, f"{type(error).__name__}: {error}"


@pytest.fixture
def the_long_way() -> Any:
    def call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(events, "_form_of", lambda *_: None)
            patch.setattr(events, "_decode_marked", events._decode_extended)
            patch.setattr(events, "_nests_little", lambda *_: False)
            return outcome(function, *arguments)

    return call


@pytest.mark.parametrize("seed", [1, SystemRandom().randrange(10**9)], ids=["fixed", "random"])
def test_the_short_ways_make_the_same_bytes_and_values_and_refuse_the_same(seed: int, the_long_way: Any) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    sent = refused = built = wrong = 0
    for case in range(CASES):
        value, limits = a_value(random), some_limits(random)
        data, text = outcome(encode_event, value, limits)
        assert (data, text) == the_long_way(encode_event, value, limits), (seed, case, value)
        sent, refused = sent + (not text), refused + bool(text)
        if data is None:
            continue
        numbers = [place for place, byte in enumerate(data) if byte < 0x80]
        place = random.choice(numbers or [0])
        odd = data[:place] + random.choice((b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x01")) + data[place + 1 :]
        for payload in (data, mutated(random, data), odd, data.replace(b"\x06", b"\x07")):
            limits = some_limits(random)
            got, why = outcome(decode_event, payload, limits)
            expected, why_not = the_long_way(decode_event, payload, limits)
            assert bool(why) == bool(why_not), (seed, case, payload, why, why_not)
            assert outcome(encode_event, got) == outcome(encode_event, expected), (
                seed,
                case,
                payload,
            )  # NaN equals nothing
            built, wrong = built + (not why), wrong + bool(why)
    assert min(sent, refused, built, wrong) > CASES // 20
