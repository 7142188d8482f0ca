# SPDX-License-Identifier: Apache-2.0

"""Byte streams over a link that loses, repeats and reorders: nothing is lost or doubled, and memory is bounded."""

from __future__ import annotations

import random
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.tunnel import DataReceived, TunnelEnd, TunnelLimits
from tests.protocol.tunnel_worlds import SMALL, check_tunnel

HEAD, FRAME = Struct(">QQ"), Struct(">IBI")
OPEN, DATA, END, RESET, CREDIT = range(1, 6)


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 400))
def test_nothing_is_lost_or_doubled_whatever_breaks(seed: int, steps: int) -> None:  # H196, H197
    check_tunnel(seed, steps)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_lost_or_doubled_in_thousands_of_histories(part: int) -> None:  # H196, H197
    """Each run has other seeds; the note of a failure has its own."""
    seeds = random.Random()
    for _ in range(1000):
        check_tunnel(seeds.getrandbits(32))


def connected(limits: TunnelLimits | None = None, channels: int = 1) -> tuple[TunnelEnd, TunnelEnd]:
    """A server and a client with open channels."""
    server, client = TunnelEnd(limits), TunnelEnd(limits)
    for _ in range(channels):
        server.open(0)
    exchange(server, client)
    return server, client


def exchange(sender: TunnelEnd, receiver: TunnelEnd, *, consume: bool = False) -> list[object]:
    """Bring everything that may be sent now; the events that follow."""
    events: list[object] = []
    while (packet := sender.next_packet()) is not None:
        sender_has = receiver.receive(packet.data)
        sender.arrived(packet.number)
        for event in sender_has:
            if consume and isinstance(event, DataReceived):
                receiver.consumed(event.channel, len(event.data))
        events += sender_has
    return events


def test_a_push_that_begins_again_sends_what_did_not_arrive_and_nothing_twice() -> None:  # H196
    server, client = connected()
    packets = []
    for letter in (b"a", b"b", b"c"):
        server.write(1, letter)
        packet = server.next_packet()
        assert packet is not None
        packets.append(packet)
    client.receive(packets[0].data)  # then `interruptAll` ends the call
    server.acknowledge(client.received_up_to)
    server.send_all_again()
    assert exchange(server, client) == [DataReceived(1, b"b"), DataReceived(1, b"c")]
    client.receive(packets[1].data)  # the old call had it still under way
    assert exchange(server, client) == []


def test_a_connection_that_is_not_read_stops_its_own_channel_and_no_other() -> None:  # H197
    """A slow client: what waits has a bound, and what is beyond it stays at the connection it came from."""
    server, client = connected(SMALL, channels=2)
    server.write(1, bytes(1000))
    assert server.is_full(1)
    got = exchange(server, client)
    assert sum(len(event.data) for event in got if isinstance(event, DataReceived)) <= SMALL.channel_bytes_max
    server.write(2, b"small")
    assert exchange(server, client) == [DataReceived(2, b"small")]
    assert server.take_drained() == []

    while not server.is_settled:
        for event in got:
            if isinstance(event, DataReceived):
                client.consumed(1, len(event.data))
        exchange(client, server)
        got = exchange(server, client)
    assert server.take_drained() == [1]


def test_many_slow_connections_hold_a_bounded_amount_and_a_quick_one_still_moves() -> None:  # H197
    limits = TunnelLimits(channels_max=50, channel_bytes_max=200, total_bytes_max=500, channel_bytes_least=8)
    server, client = connected(limits, channels=50)
    for channel in range(1, 50):
        server.write(channel, bytes(1000))
    held = sum(len(event.data) for event in exchange(server, client) if isinstance(event, DataReceived))
    assert 500 <= held <= 500 + 50 * 8
    server.write(50, bytes(500))
    moved = 0
    while events := exchange(server, client, consume=True):
        moved += sum(len(event.data) for event in events if isinstance(event, DataReceived) and event.channel == 50)
        exchange(client, server)
    assert moved == 500


def test_a_channel_whose_data_was_passed_on_does_not_wait_for_others_when_capacity_becomes_scarce() -> None:  # H197
    """The little credit that it has to get is worth no packet before that."""
    limits = TunnelLimits(channels_max=4, channel_bytes_max=64, total_bytes_max=160, channel_bytes_least=8)
    server, client = connected(limits, channels=4)
    server.write(1, bytes(10))
    exchange(server, client, consume=True)
    assert client.next_packet() is None
    for channel in (2, 3, 4):
        server.write(channel, bytes(1000))
    exchange(server, client)
    exchange(client, server)
    assert 1 not in server._uncredited


def test_a_packet_that_comes_again_is_acknowledged_again() -> None:  # H196
    """The other end has not learnt that it is here, and keeps it, perhaps until its memory is full."""
    server, client = connected()
    server.write(1, b"data")
    packet = server.next_packet()
    assert packet is not None
    assert client.receive(packet.data) == [DataReceived(1, b"data")]
    assert client.next_packet() is None
    assert client.receive(packet.data) == []
    acknowledgement = client.next_packet()
    assert acknowledgement is not None
    assert acknowledgement.number == 0
    server.receive(acknowledgement.data)
    assert server.is_settled


def test_what_a_reset_channel_had_waiting_counts_as_passed_on() -> None:  # H197
    """Otherwise the connections that come and go would use up what all may have."""
    limits = TunnelLimits(channels_max=2, channel_bytes_max=64, total_bytes_max=100, channel_bytes_least=1)
    server, client = TunnelEnd(limits), TunnelEnd(limits)
    for _ in range(20):
        channel = server.open(0)
        server.write(channel, bytes(64))
        exchange(server, client)
        client.reset(channel)
        exchange(client, server)
    assert server._uncredited_total <= 64


def test_no_channel_is_opened_while_the_other_end_is_away() -> None:  # H197
    """A stranger who connects and leaves again and again cannot fill the memory."""
    limits = TunnelLimits(total_bytes_max=1000)
    server = TunnelEnd(limits)
    for _ in range(100):
        if server.can_open:
            server.reset(server.open(0))
            server.next_packet()
    assert not server.can_open
    with pytest.raises(LocalProtocolError, match="no capacity"):
        server.open(0)


def test_data_after_the_end_is_refused_here() -> None:
    server, _ = connected()
    server.end(1)
    with pytest.raises(LocalProtocolError, match="has been ended here"):
        server.write(1, b"late")


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"short", "has no head"),
        (HEAD.pack(0, 1), "acknowledged before it was sent"),
        (HEAD.pack(2000, 0), "too far ahead"),
        (HEAD.pack(2, 0) + b"\0" * 5, "are not a frame"),
        (HEAD.pack(2, 0) + FRAME.pack(1, DATA, 2**32 - 1) + b"x", "claims 4294967295 bytes of 1"),
        (HEAD.pack(2, 0) + FRAME.pack(1, DATA, 0), "claims 0 bytes"),
        (HEAD.pack(2, 0) + FRAME.pack(7, DATA, 1) + b"x", "channel 7 was never opened"),
        (HEAD.pack(2, 0) + FRAME.pack(7, RESET, 0), "channel 7 was never opened"),
        (HEAD.pack(2, 0) + FRAME.pack(1, OPEN, 0), "cannot be opened"),
        (HEAD.pack(2, 0) + FRAME.pack(5, OPEN, 0), "cannot be opened"),
        (HEAD.pack(2, 0) + FRAME.pack(1, 9, 0), "unknown kind of frame: 9"),
        (HEAD.pack(2, 0) + FRAME.pack(1, CREDIT, 1), "credit of 1 bytes too much"),
        (HEAD.pack(2, 0) + FRAME.pack(1, END, 0) * 2, "ended twice"),
        (HEAD.pack(2, 0) + FRAME.pack(1, END, 0) + FRAME.pack(1, DATA, 1) + b"x", "data after its end"),
        (HEAD.pack(2, 0) + FRAME.pack(1, DATA, 65) + bytes(65), "more than its credit"),
    ],
)
def test_what_the_other_end_must_not_say_ends_the_tunnel(packet: bytes, why: str) -> None:  # H197
    _, client = connected(TunnelLimits(channel_bytes_max=64, channel_bytes_least=8))
    with pytest.raises(RemoteProtocolError, match=why):
        client.receive(packet)


def test_an_end_that_gives_no_credit_but_wants_more_than_all_may_have_is_refused() -> None:  # H197
    _, client = connected(SMALL, channels=4)
    for number in range(2, 5):
        client.receive(HEAD.pack(number, 0) + FRAME.pack(number, DATA, 60) + bytes(60))
    with pytest.raises(RemoteProtocolError, match="more than its credit"):
        client.receive(HEAD.pack(5, 0) + FRAME.pack(1, DATA, 60) + bytes(60))


def test_packets_that_come_too_early_have_a_bound() -> None:  # H197
    _, client = connected(SMALL)
    for number in range(3, 5):
        client.receive(HEAD.pack(number, 0) + FRAME.pack(1, DATA, 100) + bytes(100))
    with pytest.raises(RemoteProtocolError, match="too early"):
        client.receive(HEAD.pack(5, 0) + FRAME.pack(1, DATA, 100) + bytes(100))


def test_a_call_that_fails_for_long_does_not_let_the_later_ones_run_too_far_ahead() -> None:  # H196, H197
    """Those have arrived, but wait at the other end for the one that has not."""
    server, client = connected(SMALL)
    first = None
    for letter in b"abcdefghijkl":
        client.write(1, bytes([letter]))
        packet = client.next_packet()
        if packet is None:
            break
        first = first or packet
        if packet is not first:
            assert server.receive(packet.data) == []
            client.arrived(packet.number)
    assert first is not None
    assert len(server._early) == SMALL.packets_max - 1
    client.send_again(first.number)
    assert b"".join(event.data for event in exchange(client, server) if isinstance(event, DataReceived)) == b"abcdefghi"


def test_large_data_of_two_channels_takes_turns() -> None:  # H197
    server, client = connected(channels=2)
    server.write(1, bytes(2**20))
    server.write(2, bytes(2**20))
    channels = [event.channel for event in exchange(server, client) if isinstance(event, DataReceived)]
    assert channels[:4] == [1, 2, 1, 2]


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="channel_bytes_least must not be more"):
        TunnelLimits(channel_bytes_max=1, channel_bytes_least=2)
