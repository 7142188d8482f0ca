# SPDX-License-Identifier: Apache-2.0

"""The envelope of a part's event: its name and the event come out as they went in (H21, H62, H95)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import EventEncodeError, RemoteProtocolError
from protocol.wire.codec import (
    DEFAULT_LIMITS,
    decode_event,
    decode_event_in_steps,
    encode_event,
    run_steps,
)
from protocol.wire.extension_types import ExtensionType, PartEvent
from tests.protocol.test_codec import SMALL, either_msgpack, values

__all__ = ["either_msgpack"]  # a fixture, for the tests that name it

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)


@pytest.mark.usefixtures("either_msgpack")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(names, values, st.integers(1, 40))
def test_a_name_and_an_event_come_out_as_they_went_in(name: str, value: Any, step_bytes: int) -> None:  # H21
    data = encode_event(PartEvent(name, value))
    assert decode_event(data) == PartEvent(name, value)
    assert run_steps(decode_event_in_steps(data, step_bytes=step_bytes)) == PartEvent(name, value)


def test_the_envelope_is_a_msgpack_list_with_a_mark() -> None:  # H95
    mark = msgpack.ExtType(ExtensionType.PART_EVENT, b"")
    assert msgpack.unpackb(encode_event(PartEvent("rules", {"a": 1}))) == [mark, "rules", {"a": 1}]


def test_the_limits_of_the_event_hold_inside_the_envelope() -> None:  # H62, H95
    assert decode_event(encode_event(PartEvent("p", [[[[1]]]]), SMALL), SMALL) == PartEvent("p", [[[[1]]]])
    for value, here, there in (
        ([[[[[]]]]], "nests deeper than 4", "nests deeper than 4"),
        ([0] * 11, "more than 10", "exceeds max_"),
        (bytes(995), "exceeds the limit of 1000", "exceeds the limit of 1000"),
    ):
        with pytest.raises(EventEncodeError, match=here):
            encode_event(PartEvent("p", value), SMALL)
        with pytest.raises(RemoteProtocolError, match=there):
            decode_event(encode_event(PartEvent("p", value)), SMALL)


@pytest.mark.parametrize("name", ["", "x" * 21, b"p", None, "\ud800"])
def test_a_name_that_is_none_does_not_leave(name: Any) -> None:  # H62
    with pytest.raises(EventEncodeError, match="the name of a part must be"):
        encode_event(PartEvent(name, 1), SMALL)


HEAD = encode_event(PartEvent("p", 1))[:4]


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"\xa0\x01",  # an empty name
        b"\xa1p",  # no event
        b"\xa2p\x01",  # the name takes all
        b"\xa1\xff\x01",  # not UTF-8
        b"\xa3\xed\xa0\x80\x01",  # a lone surrogate
        b"\xc4\x01p\x01",  # bytes
        b"\xdb\xff\xff\xff\xff\x01",  # a length that no name has
        b"\xd9\x15" + b"x" * 21 + b"\x01",  # too long
        b"\xda\xff",
        b"\xa1p\x01\x02",  # two events
        b"\xa1p\xc1",
        b"\xa1p" + HEAD + b"\xa1q\x01",  # an envelope in an envelope
        b"\xa1p\x91" + HEAD + b"\xa1q\x01",
    ],
)
def test_a_broken_envelope_is_a_remote_error(rest: bytes) -> None:  # H62
    limits = replace(SMALL, name_chars_max=20)
    with pytest.raises(RemoteProtocolError):
        decode_event(HEAD + rest, limits)
    with pytest.raises(RemoteProtocolError):
        run_steps(decode_event_in_steps(HEAD + rest, limits))


def test_a_part_event_is_the_whole_event_only() -> None:  # H95
    for value in ([PartEvent("p", 1)], PartEvent("p", PartEvent("q", 1)), {"a": PartEvent("p", 1)}):
        with pytest.raises(EventEncodeError, match="PartEvent"):
            encode_event(value)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_after_the_mark_are_an_event_or_a_remote_error(data: bytes) -> None:  # H62
    try:
        event = decode_event(HEAD + data)
    except RemoteProtocolError:
        return
    assert isinstance(event, PartEvent)
    encode_event(event, DEFAULT_LIMITS)


def test_the_values_can_be_imported_without_msgpack() -> None:
    program = "import sys; sys.modules['msgpack'] = None; from protocol.wire.extension_types import PartEvent"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
