# SPDX-License-Identifier: Apache-2.0

"""The ordered stream on its own."""

from __future__ import annotations

import pytest

from protocol.errors import RemoteProtocolError
from protocol.streams import IncomingStream, OutgoingStream
from protocol.wire.messages import EventMessage


def a_stream_of(count: int) -> OutgoingStream[EventMessage]:
    stream: OutgoingStream[EventMessage] = OutgoingStream()
    for seq in range(1, count + 1):
        stream.append(EventMessage(7, seq, b"xy"), 2, 100 + seq)
    return stream


def test_a_confirmation_is_cumulative_and_frees_what_it_covers() -> None:  # H24, H27
    stream = a_stream_of(5)
    assert [tag for _, _, tag, _ in stream.confirm(3)] == [101, 102, 103]
    assert (stream.confirmed_seq, stream.counted()) == (3, (2, 4))
    assert [item.seq for item in stream.unconfirmed()] == [4, 5]
    assert list(stream.tags()) == [104, 105]
    stream.check_invariants()


@pytest.mark.parametrize("old", [-1, 0, 1, 3])
def test_an_old_confirmation_changes_nothing(old: int) -> None:
    stream = a_stream_of(5)
    stream.confirm(3)
    assert stream.confirm(old) == []
    assert stream.confirmed_seq == 3


def test_a_confirmation_of_what_was_never_sent_is_the_peers_fault_and_changes_nothing() -> None:
    stream = a_stream_of(2)
    with pytest.raises(RemoteProtocolError, match="item 3 is confirmed"):
        stream.confirm(3)
    assert (stream.confirmed_seq, len(stream)) == (0, 2)


def test_a_peer_cannot_resume_before_what_it_has_confirmed() -> None:
    # Confirmed items are gone here, so such a peer could only ever see a gap.
    stream = a_stream_of(4)
    stream.confirm(3)
    with pytest.raises(RemoteProtocolError, match="resumes after item 2"):
        stream.resume(2)
    assert [tag for _, _, tag, _ in stream.resume(4)] == [104]


def test_items_of_the_protocol_itself_count_against_no_bound() -> None:  # H27
    stream: OutgoingStream[EventMessage] = OutgoingStream()
    stream.append(EventMessage(7, 1, b"xy"))
    assert (len(stream), stream.counted()) == (1, (0, 0))
    assert list(stream.tags()) == []


def test_numbers_stay_used_when_everything_is_forgotten() -> None:
    stream = a_stream_of(3)
    stream.clear()
    assert (stream.last_seq, stream.confirmed_seq, len(stream), stream.counted()) == (3, 3, 0, (0, 0))
    stream.check_invariants()


def test_a_confirmation_never_passes_an_item_that_is_not_taken() -> None:  # H27
    stream = IncomingStream()
    stream.advance()
    stream.advance(10)
    stream.advance()
    stream.advance(20)
    assert (stream.confirmable_seq, stream.untaken_events, stream.untaken_bytes) == (1, 2, 30)
    stream.take(2)
    assert (stream.confirmable_seq, stream.untaken_events, stream.untaken_bytes) == (3, 1, 20)
    stream.take(2)
    stream.take(4)
    assert (stream.confirmable_seq, stream.untaken_events) == (4, 0)
    stream.check_invariants()
