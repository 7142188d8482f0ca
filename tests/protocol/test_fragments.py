# SPDX-License-Identifier: Apache-2.0

"""Large messages in fragments: whole and in order at the other end, with small ones between (H62, H112 to H115)."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.wire import fragments
from protocol.wire import messages as m
from protocol.wire.codec import DEFAULT_LIMITS, WireLimits, encode_message
from protocol.wire.fragments import FragmentDecoder, LargeMessage, Outbox, encode_frames, encode_whole
from protocol.wire.framing import frame
from tests.protocol.test_gateway import a_gateway

PART = 100
LIMITS = WireLimits(message_bytes_max=4096, event_bytes_max=2000, text_chars_max=5, fragment_bytes=PART)


_payloads = st.one_of(st.binary(max_size=60), st.integers(60, 2000).map(lambda size: (bytes(range(251)) * 8)[:size]))
_messages = st.one_of(
    st.builds(m.EventMessage, st.integers(0, 9), st.integers(1, 9), _payloads),
    st.builds(m.UrgentEventMessage, st.integers(0, 9), st.integers(1, 9), _payloads),
    st.builds(m.RequestMessage, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), _payloads),
    st.builds(m.AnswerMessage, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.just("no"), _payloads),
    st.builds(m.RestoredEventMessage, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), _payloads),
    st.builds(m.CheckpointAcknowledged, st.just(7), st.just(1), st.just(1), _payloads, st.just(()), st.just((3,))),
    st.builds(m.CheckpointCompleted, st.just(7), st.just(1), st.just(1)),
    st.builds(m.Confirm, st.integers(0, 9), st.integers(0, 9)),
    st.builds(m.Heartbeat, st.integers(0, 9)),
)


def start(size: int, envelope: bytes = b"") -> bytes:
    return frame(b"\xc0" + size.to_bytes(4, "big") + envelope)


def part(data: bytes) -> bytes:
    return frame(b"\xc1" + data)


def envelope(message: m.Message) -> bytes:
    return encode_message(message, LIMITS)[4:]


EMPTY = m.EventMessage(7, 1, b"")


# --- there and back -------------------------------------------------------------------------------------------


@given(
    st.lists(_messages, max_size=8), st.lists(st.integers(1, 400), max_size=60), st.lists(st.booleans(), max_size=40)
)
def test_every_message_comes_once_and_in_order_whatever_the_portions(
    messages: list[m.Message], sizes: list[int], pumped: list[bool]
) -> None:  # H22, H112
    outbox, turns, stream = Outbox(LIMITS), iter(pumped), b""
    for message in messages:
        stream += outbox.put(message)
        if next(turns, False):
            stream += outbox.next()
    while outbox.busy:
        written = outbox.next()
        assert 0 < len(written) <= 2 * PART + 100
        stream += written
    assert outbox.next() == b""
    assert outbox.waiting_bytes == outbox.kept_bytes == 0
    decoder, received, cuts = FragmentDecoder(LIMITS), list[m.Message](), iter(sizes)
    while stream:
        cut = next(cuts, 77)
        received += decoder.messages(stream[:cut])
        stream = stream[cut:]
    assert decoder.buffered_bytes == 0

    def ordered(all_of_them: list[m.Message]) -> list[m.Message]:
        return [one for one in all_of_them if type(one) not in fragments.PASSING]

    def passing(all_of_them: list[m.Message]) -> list[m.Message]:
        return [one for one in all_of_them if type(one) in fragments.PASSING]

    assert ordered(received) == ordered(messages)
    assert passing(received) == passing(messages)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 6, 99, 104, 105, 106, 10_000])
def test_large_messages_one_after_another_come_whole_in_portions_of_any_size(size: int) -> None:  # H112
    messages = [m.EventMessage(7, seq, bytes(seq for _ in range(150 + 50 * seq))) for seq in range(1, 7)]
    small = encode_message(m.Confirm(7, 1), LIMITS)
    stream = small.join(encode_whole(message, LIMITS) for message in messages) + small
    decoder, received = FragmentDecoder(LIMITS), list[m.Message]()
    for place in range(0, len(stream), size):
        received += decoder.messages(stream[place : place + size])
    assert [message for message in received if isinstance(message, m.EventMessage)] == messages
    assert len(received) == 12
    assert decoder.buffered_bytes == 0


def test_only_what_has_no_place_among_the_items_passes_a_large_message() -> None:  # H112
    outbox = Outbox(LIMITS)
    large, small = m.EventMessage(7, 1, bytes(350)), m.EventMessage(7, 2, b"small")
    assert outbox.put(large) == b""
    assert outbox.put(small) == b""
    stream = outbox.next()
    for passing in (m.Confirm(7, 3), m.Heartbeat(7), m.AttemptEnded(7, "over"), m.CoordinatorAwaited(7, "", 0.0, "")):
        frames = outbox.put(passing)
        assert frames == encode_message(passing, LIMITS)
        stream += frames
    assert outbox.put(m.CheckpointCompleted(7, 3, 1)) == b""
    assert outbox.kept_bytes > 0
    while outbox.busy:
        stream += outbox.next()
    kinds = [type(message) for message in FragmentDecoder(LIMITS).messages(stream)]
    assert kinds[:4] == [m.Confirm, m.Heartbeat, m.AttemptEnded, m.CoordinatorAwaited]
    assert kinds[4:] == [m.EventMessage, m.EventMessage, m.CheckpointCompleted]


def test_a_large_message_refers_to_its_payload_and_copies_one_part_at_a_time() -> None:  # H113
    message = m.EventMessage(7, 1, bytes(32 * 2**20))
    limits = WireLimits.for_events(64 * 2**20)
    tracemalloc.start()
    outbox = Outbox(limits)
    outbox.put(message)
    for _ in range(20):
        outbox.next()
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_message_of_a_fragments_size_leaves_in_one_frame() -> None:
    overhead = len(encode_message(EMPTY, LIMITS)) - 4
    assert isinstance(encode_frames(m.EventMessage(7, 1, bytes(PART - overhead)), LIMITS), bytes)
    assert isinstance(encode_frames(m.EventMessage(7, 1, bytes(PART + 1)), LIMITS), LargeMessage)


@pytest.mark.parametrize(
    "message",
    [
        m.EventMessage(7, 1, bytes(2001)),
        m.EventMessage(7, 0, bytes(200)),
        m.CheckpointAcknowledged(7, 1, 1, bytes(4096), (), ()),
    ],
    ids=["payload", "field", "message"],
)
def test_a_message_over_a_limit_is_refused_before_anything_leaves(message: m.Message) -> None:  # H62
    outbox = Outbox(LIMITS)
    with pytest.raises(LocalProtocolError):
        outbox.put(message)
    assert not outbox.busy


def test_an_outbox_that_is_cleared_has_nothing_to_send() -> None:  # H115
    outbox = Outbox(LIMITS)
    outbox.put(m.EventMessage(7, 1, bytes(500)))
    outbox.put(m.EventMessage(7, 2, b"small"))
    outbox.clear()
    assert (outbox.busy, outbox.kept_bytes, outbox.waiting_bytes, outbox.next()) == (False, 0, 0, b"")


# --- hostile peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (part(b"x"), "has not begun"),
        (start(2001, envelope(EMPTY)), "2001 bytes, where 101 to 2000"),
        (start(4097), "4097 bytes, where 101 to 4096"),
        (start(100), "100 bytes, where 101"),
        (start(0), "0 bytes"),
        (start(2**32 - 1), "4294967295 bytes"),
        (start(200) + start(200), "before the one before it was complete"),
        (start(200) + part(bytes(99)), "a part of 99 bytes, where 100"),
        (start(150) + part(bytes(100)) + part(bytes(49)), "a part of 49 bytes, where 50"),
        (start(150) + part(bytes(100)) + part(bytes(51)), "a part of 51 bytes, where 50"),
        (start(150) + part(b""), "a part of 0 bytes"),
        (frame(b"\xc0\x00\x00"), "without its size"),
        (start(200, envelope(m.EventMessage(7, 1, b"x"))), "as the envelope"),
        (start(200, envelope(m.Confirm(7, 1))), "Confirm as the envelope"),
        (start(200, b"\x93"), "EventMessage|msgpack|tag"),
        (frame(bytes(PART + 2)), "a frame of 102 bytes, over 101"),
        (start(150) + part(bytes(100)) + part(bytes(50)), "EventMessage|msgpack|tag"),
    ],
)
def test_fragments_that_no_sender_makes_are_refused(stream: bytes, why: str) -> None:  # H62, H113
    decoder = FragmentDecoder(LIMITS)
    with pytest.raises(RemoteProtocolError, match=why):
        decoder.messages(stream)


def test_a_decoder_that_has_failed_stays_broken_and_keeps_nothing() -> None:  # H113
    decoder = FragmentDecoder(LIMITS)
    decoder.feed(start(2000, envelope(EMPTY)) + part(bytes(PART)))
    with pytest.raises(RemoteProtocolError):
        decoder.feed(part(b""))
    assert decoder.buffered_bytes == 0
    with pytest.raises(RemoteProtocolError):
        decoder.feed(encode_message(m.Confirm(7, 1)))


def test_only_a_message_that_comes_alone_is_taken_as_a_whole() -> None:  # H112
    decoder, small = FragmentDecoder(LIMITS), encode_message(m.Confirm(7, 1))
    assert decoder.whole(small) == small[4:]
    assert decoder.whole(start(150)) == b""
    decoder.feed(start(150))
    assert decoder.whole(small) == decoder.whole(part(bytes(PART))) == b""
    with pytest.raises(RemoteProtocolError):
        decoder.feed(start(150))
    assert decoder.whole(small) == b""


def test_a_claim_takes_no_memory() -> None:  # H62, H113
    decoder = FragmentDecoder(DEFAULT_LIMITS)
    stream = start(DEFAULT_LIMITS.event_bytes_max, encode_message(EMPTY)[4:]) + part(
        bytes(DEFAULT_LIMITS.fragment_bytes)
    )
    tracemalloc.start()
    decoder.feed(stream)
    assert tracemalloc.get_traced_memory()[1] < 4 * DEFAULT_LIMITS.fragment_bytes
    tracemalloc.stop()
    assert DEFAULT_LIMITS.fragment_bytes < decoder.buffered_bytes == len(stream)


def test_small_messages_do_not_hide_that_a_large_one_does_not_grow() -> None:  # H62, H113
    decoder, noise = FragmentDecoder(LIMITS), encode_message(m.Heartbeat(7))
    decoder.feed(start(300, envelope(EMPTY)))
    assert decoder.is_another
    for data in (part(bytes(100)), noise, noise + noise[:3]):
        decoder.feed(data)
        assert not decoder.is_another
    decoder.feed(noise[3:] + part(bytes(100)) + part(bytes(100)) + start(300)[:4])
    assert decoder.is_another, "the large one is complete, and another frame has begun"


def test_the_frames_of_a_message_are_those_of_the_specification() -> None:  # H60, H112
    payload = bytes(range(150))
    whole = encode_whole(m.EventMessage(7, 1, payload), LIMITS)
    assert whole == start(150, envelope(EMPTY)) + part(payload[:100]) + part(payload[100:])
    body = envelope(snapshot := m.CheckpointAcknowledged(7, 1, 1, payload[:140], (), ()))
    assert encode_whole(snapshot, LIMITS) == start(len(body)) + part(body[:100]) + part(body[100:])


# --- the gateway's patience -------------------------------------------------------------------------------------


def test_what_is_late_is_counted_from_the_last_part_that_left() -> None:  # H25, H114
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(41, b"large"), 0.0)
    gateway.handle(g.EventSubmitted(42, b"small", loss_tolerant=True), 0.0)
    for now in (9.0, 18.0):
        gateway.handle(g.SendProgressed(), now)
        assert gateway.next_deadline() == now + 10
        assert gateway.handle(g.TimePassed(), now + 1) == []
    effects = gateway.handle(g.TimePassed(), 28.0)
    assert isinstance(effects[0], g.FailAttempt)
    gateway.check_invariants()


def test_progress_means_nothing_without_a_connection() -> None:  # H114
    gateway = a_gateway(connected=False)
    before = gateway.next_deadline()
    assert gateway.handle(g.SendProgressed(), 5.0) == []
    assert before is None or gateway.next_deadline() is not None
