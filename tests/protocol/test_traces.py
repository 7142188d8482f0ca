# SPDX-License-Identifier: Apache-2.0

"""The text of a span in front of an event: its bytes, its limits, and what a peer may send instead (H179)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import CODEC_LIMITS
from protocol.wire.traces import TRACED_START, TRACEPARENT_BYTES_MAX, join_traceparent, split_traceparent

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENT = encode_event(["an event", 1])


def test_the_bytes_are_those_of_the_specification() -> None:
    """H179, H95: a msgpack list of the mark 6, the text, and the event."""
    payload = join_traceparent(TRACEPARENT, EVENT)
    assert payload == b"\x93" + b"\xc7\x00\x06" + b"\xd9\x37" + TRACEPARENT.encode() + EVENT
    assert split_traceparent(payload) == (TRACEPARENT, EVENT)


@pytest.mark.parametrize("text", ["", "0" * (TRACEPARENT_BYTES_MAX + 1)])
def test_without_a_text_that_fits_an_event_has_no_byte_more(text: str) -> None:  # H179
    assert join_traceparent(text, EVENT) == EVENT
    assert split_traceparent(EVENT) == ("", EVENT)


def test_an_event_at_its_limit_leaves_without_the_text() -> None:  # H62, H179
    size = len(join_traceparent(TRACEPARENT, EVENT))
    fits, too_small = (dataclasses.replace(CODEC_LIMITS, event_bytes_max=bound) for bound in (size, size - 1))
    assert split_traceparent(join_traceparent(TRACEPARENT, EVENT, fits)) == (TRACEPARENT, EVENT)
    assert join_traceparent(TRACEPARENT, EVENT, too_small) == EVENT


@example(b"0" * TRACEPARENT_BYTES_MAX)
@example(b"0" * (TRACEPARENT_BYTES_MAX + 1))
@given(st.binary(max_size=255))
def test_whatever_a_peer_sends_in_place_of_a_text_the_event_is_its_event(text: bytes) -> None:  # H179
    found, event = split_traceparent(TRACED_START + b"\xd9" + bytes((len(text),)) + text + EVENT)
    assert event == EVENT
    assert len(found) <= TRACEPARENT_BYTES_MAX
    assert found.encode("ascii", "replace") == (
        text.decode("ascii", "replace").encode("ascii", "replace") if len(text) <= TRACEPARENT_BYTES_MAX else b""
    )


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(TRACED_START, id="the mark alone"),
        pytest.param(TRACED_START + b"\xd9", id="no length"),
        pytest.param(TRACED_START + b"\xd9\x37" + b"0" * 10, id="no end of the text"),
        pytest.param(TRACED_START + b"\xd9\x01" + b"0", id="no event"),
        pytest.param(TRACED_START + b"\xc0\xc0", id="no text"),
        pytest.param(join_traceparent(TRACEPARENT, join_traceparent(TRACEPARENT, EVENT)), id="two texts"),
        pytest.param(b"\x91" + join_traceparent(TRACEPARENT, EVENT), id="inside of an event"),
    ],
)
def test_a_text_elsewhere_than_in_front_of_one_whole_event_is_refused(payload: bytes) -> None:  # H62, H95
    with pytest.raises(RemoteProtocolError):
        decode_event(split_traceparent(payload)[1])
