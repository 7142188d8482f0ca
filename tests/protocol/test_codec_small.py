# SPDX-License-Identifier: Apache-2.0

"""A message of at most 1 KiB decodes in one go to the same result as value by value, or falls back to the latter.

The second way reports every error. So it must accept every message that the first one accepts, with the same result.
It also decodes every valid message that the first one declines (H60, H62).
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.wire import codec
from protocol.wire.codec import DEFAULT_LIMITS, WireLimits, decode_message, encode_message
from protocol.wire.format import BY_TAG
from protocol.wire.messages import Finished, Message
from tests.fuzz import mutations, samples
from tests.fuzz.target import about_input, within_memory
from tests.protocol.test_codec import SAMPLES, SMALL, body_of, either_msgpack, packed

__all__ = ["either_msgpack"]  # a fixture, for the tests that name it

BYTES_MAX = 1024
LIMITS = (DEFAULT_LIMITS, samples.LIMITS, SMALL, WireLimits(held_events_max=1, name_chars_max=1, text_chars_max=1))
MUTATIONS = 30
in_both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def compare(body: bytes) -> Message | None:
    """Check that both ways agree on ``body`` under all limits; return the first one's result under the usual limits."""
    with about_input(body):
        for limits in LIMITS:
            in_one_go = codec._decode_small(body, limits)
            value_by_value = outcome(codec._decode_checked, body, limits)
            assert in_one_go is None or exactly(in_one_go) == value_by_value
            assert outcome(decode_message, body, limits) == value_by_value
    return codec._decode_small(body, DEFAULT_LIMITS)


def outcome(decode: Any, body: bytes, limits: WireLimits) -> str:
    try:
        return exactly(decode(body, limits))
    except RemoteProtocolError as error:
        return f"refused: {error}"


def exactly(message: Message) -> str:
    """Return its type, and the values and types of its fields: 1, 1.0, True and an enumeration's member all differ."""
    return repr(message)


def a_small_body(random: Random, kind: type[Message]) -> bytes:
    while True:
        body = encode_message(samples.message(random, kind), samples.LIMITS)[4:]
        if len(body) <= BYTES_MAX:
            return body


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_kind_of_message_is_decoded_in_one_go(message: Message) -> None:  # H60
    assert compare(body_of(message)) == message


@pytest.mark.usefixtures("either_msgpack")
@in_both
@given(st.sampled_from(samples.MESSAGE_KINDS), st.integers(0, 2**32))
def test_whatever_its_fields_hold_it_is_the_same_value_by_value(kind: type[Message], seed: int) -> None:  # H60
    random = Random(seed)
    body = a_small_body(random, kind)
    assert isinstance(codec._decode_small(body, samples.LIMITS), kind)
    compare(body)


@pytest.mark.usefixtures("either_msgpack")
@in_both
@given(st.sampled_from(samples.MESSAGE_KINDS), st.integers(0, 2**32))
def test_nothing_is_accepted_in_one_go_that_is_refused_value_by_value(kind: type[Message], seed: int) -> None:  # H62
    random = Random(seed)
    body = a_small_body(random, kind)
    for _ in range(MUTATIONS):
        compare(mutations.mutated(random, body)[:BYTES_MAX])


integers = st.integers(-(2**63), 2**64 - 1)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    integers,
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
)
pairs = st.lists(st.one_of(st.tuples(st.integers(-1, 3), st.binary(max_size=3)), st.lists(scalars, max_size=3)))
fields = st.one_of(scalars, pairs, st.dictionaries(st.one_of(integers, st.text()), scalars, max_size=2))


@pytest.mark.usefixtures("either_msgpack")
@in_both
@given(st.data())
def test_fields_of_any_kind_are_judged_alike(data: st.DataObject) -> None:
    # H62: for both ways, a bool is not a number, a whole float is not an integer, and so on
    tag: Any = data.draw(
        st.one_of(st.sampled_from(sorted(BY_TAG)), st.sampled_from([True, 1.0, "1", b"\x01", None, []]))
    )
    count = len(BY_TAG[tag][1]) if type(tag) is int else 2
    row = data.draw(st.lists(fields, min_size=max(0, count - 1), max_size=count + 1))
    compare(packed(tag, *row)[:BYTES_MAX])


@pytest.mark.usefixtures("either_msgpack")
@in_both
@given(st.data())
def test_one_field_of_another_kind_is_judged_alike(data: st.DataObject) -> None:  # H62
    values = msgpack.unpackb(body_of(data.draw(st.sampled_from(SAMPLES))), strict_map_key=False)
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = data.draw(fields)
    compare(packed(*values)[:BYTES_MAX])


@pytest.mark.usefixtures("either_msgpack")
@in_both
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_judged_alike(body: bytes) -> None:  # H62
    compare(body)


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("odd", mutations.ODD_VALUES, ids=bytes.hex)
@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_an_odd_value_in_any_place_is_judged_alike(message: Message, odd: bytes) -> None:
    # H62: bytes that Python reads in its own way, and bytes that msgpack allows but no message contains
    values = msgpack.unpackb(body_of(message), strict_map_key=False)
    rows = [msgpack.packb(value) for value in values]
    for place in range(len(rows)):
        changed = [odd if other == place else row for other, row in enumerate(rows)]
        compare(bytes([0x90 | len(rows)]) + b"".join(changed))


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("body", [{2: 0, 5: 0, 6: 0}, b"\x02\x05\x06", bytearray(b"\x0c\x07\x01"), "\x02\x05\x06"])
def test_what_is_not_a_list_is_not_a_message_whatever_its_entries_are(body: object) -> None:
    # H60: the keys of a map and the bytes of a value would make one
    data = bytes(msgpack.packb(body))
    assert compare(data) is None
    with pytest.raises(RemoteProtocolError, match="not a list"):
        decode_message(data)


def of_size(size: int) -> tuple[Finished, bytes]:
    """Return a completion message whose body takes this many bytes, at least some hundreds."""
    empty = Finished(7, 4, "", bytes(300), (12,))
    message = Finished(7, 4, "", bytes(300 + size - len(body_of(empty))), (12,))
    body = body_of(message)
    assert len(body) == size
    return message, body


@pytest.mark.parametrize(("size", "in_one_go"), [(BYTES_MAX - 1, 1), (BYTES_MAX, 1), (BYTES_MAX + 1, 0)])
def test_no_more_than_a_kibibyte_is_decoded_in_one_go(
    size: int, in_one_go: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # H62: a larger one could allocate lists of the claimed length, not of the length that it holds
    message, body = of_size(size)
    seen: list[bytes] = []
    decode_small = codec._decode_small

    def watched(body: bytes, limits: WireLimits) -> Message | None:
        seen.append(body)
        return decode_small(body, limits)

    monkeypatch.setattr(codec, "_decode_small", watched)
    assert decode_message(body) == message
    assert len(seen) == in_one_go


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("claim", [b"\xdc\x03\xff", b"\xdd\x00\x00\x03\xff", b"\xde\x03\xff", b"\x9f"])
def test_a_kibibyte_of_claims_takes_no_more_memory_than_is_said(claim: bytes) -> None:  # H62
    body = (b"\x93\x0c\x07" + claim * BYTES_MAX)[:BYTES_MAX]
    assert compare(body) is None
    assert within_memory(lambda data: codec._decode_small(data, DEFAULT_LIMITS), body, 4096) is None
