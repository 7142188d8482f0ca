# SPDX-License-Identifier: Apache-2.0

"""Cutting a byte stream into frames: every length is checked before memory is allocated (H60, H62)."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from protocol.wire.framing import FrameDecoder, WireLimits, frame


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.lists(st.integers(1, 500), max_size=60))
def test_bodies_come_out_as_they_went_in_whatever_the_portions(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(frame(body) for body in bodies)
    decoder, received, cuts = FrameDecoder(1000), list[bytes](), iter(sizes)
    while stream:
        cut = next(cuts, 7)
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert received == bodies
    assert decoder.buffered_bytes == 0


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=9), st.lists(st.integers(1, 30), max_size=60))
def test_what_is_taken_as_a_whole_frame_is_what_feed_would_return(bodies: list[bytes], sizes: list[int]) -> None:
    """``whole`` takes a portion only if it is one frame, and otherwise leaves everything to ``feed``."""
    stream = b"".join(frame(body) for body in bodies)
    decoder, received, cuts, edges = FrameDecoder(1000), list[bytes](), iter(sizes), [0]
    for body in bodies:
        edges.append(edges[-1] + 4 + len(body))
    position = 0
    while position < len(stream):
        ends = [edge for edge in edges if edge > position]
        end = min(position + next(cuts, ends[0] - position), len(stream))
        body = decoder.whole(stream[position:end])
        assert bool(body) == (position in edges and end == ends[0])
        received += [body] if body else decoder.feed(stream[position:end])
        position = end
    assert received == bodies


def test_a_whole_frame_over_the_bound_and_one_after_a_failure_are_left_to_feed() -> None:  # H62
    decoder = FrameDecoder(5)
    assert decoder.whole(frame(b"12345")) == b"12345"
    assert decoder.whole(frame(b"123456")) == b""
    with pytest.raises(RemoteProtocolError, match="6 bytes, over 5"):
        decoder.feed(frame(b"123456"))
    assert decoder.whole(frame(b"12345")) == b""


def test_what_looks_like_a_frame_within_another_one_is_left_to_feed() -> None:
    decoder, outer = FrameDecoder(20), frame(frame(b"inner"))
    assert decoder.feed(outer[:4]) == []
    assert decoder.whole(outer[4:]) == b""
    assert decoder.feed(outer[4:]) == [frame(b"inner")]


def test_a_frame_at_the_bound_passes_and_one_byte_more_does_not() -> None:  # H62
    assert FrameDecoder(5).feed(frame(b"12345")) == [b"12345"]
    with pytest.raises(RemoteProtocolError, match="6 bytes, over 5"):
        FrameDecoder(5).feed(frame(b"123456"))


def test_a_length_over_the_bound_is_refused_at_its_fourth_byte() -> None:  # H62
    decoder = FrameDecoder(1000)
    assert decoder.feed(b"\xff\xff\xff") == []
    with pytest.raises(RemoteProtocolError, match="over 1000"):
        decoder.feed(b"\xff")


def test_an_empty_frame_is_refused() -> None:  # H62
    with pytest.raises(RemoteProtocolError, match="empty frame"):
        FrameDecoder().feed(b"\0\0\0\0")


def test_a_decoder_that_has_failed_stays_broken() -> None:
    decoder = FrameDecoder(10)
    with pytest.raises(RemoteProtocolError):
        decoder.feed(b"\0\0\0\0")
    with pytest.raises(RemoteProtocolError):
        decoder.feed(frame(b"fine"))
    assert decoder.buffered_bytes == 0


def test_a_claimed_length_takes_no_memory() -> None:  # H62
    decoder = FrameDecoder(2**30)
    tracemalloc.start()
    try:
        decoder.feed((2**30).to_bytes(4, "big") + b"only this")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 100_000


def test_a_large_frame_in_many_portions_is_not_looked_at_again_and_again() -> None:
    # With quadratic copying this would copy 64 GiB and never end.
    body = bytes(8 * 2**20)
    decoder, portion = FrameDecoder(2**24), bytes(512)
    assert decoder.feed(len(body).to_bytes(4, "big")) == []
    for _ in range(len(body) // len(portion) - 1):
        assert decoder.feed(portion) == []
    assert decoder.feed(portion) == [body]


@pytest.mark.parametrize(
    "limits",
    [
        {"event_bytes_max": 0},
        {"message_bytes_max": 2**32},
        {"event_nesting_max": 513},
        {"event_containers_max": 0},
        {"event_map_entries_max": 0},
        {"message_bytes_max": 2**20, "event_bytes_max": 2**20},
    ],
)
def test_limits_that_cannot_hold_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="_max"):
        WireLimits(**limits)
