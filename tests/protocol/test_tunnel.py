# SPDX-License-Identifier: Apache-2.0

"""Byte streams over a link that loses, repeats and reorders: nothing is lost or doubled, and memory is bounded."""

from __future__ import annotations

import random
from collections import deque
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.tunnel import (
    ChannelEnded,
    ChannelOpened,
    ChannelReset,
    DataReceived,
    Packet,
    TunnelEnd,
    TunnelLimits,
)

HEAD, FRAME = Struct(">QQ"), Struct(">IBI")
OPEN, DATA, END, RESET, CREDIT = range(1, 6)
SMALL = TunnelLimits(
    channels_max=4,
    channel_bytes_max=64,
    total_bytes_max=160,
    channel_bytes_least=8,
    packet_bytes_max=40,
    packets_max=8,
)


class End:
    """One end, and what each of its channels was given and has received."""

    def __init__(self, limits: TunnelLimits) -> None:
        self.limits = limits
        self.machine = TunnelEnd(limits)
        self.given: dict[int, bytes] = {}
        self.received: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.over: set[int] = set()  # reset here or there
        self.finished: set[int] = set()  # the other end has ended it
        self.waiting: dict[int, int] = {}

    def receive(self, data: bytes) -> None:
        for event in self.machine.receive(data):
            channel = event.channel
            if isinstance(event, ChannelOpened):
                assert channel not in self.given
                self.given[channel] = self.received[channel] = b""
            elif isinstance(event, DataReceived):
                assert channel not in self.finished
                self.received[channel] += event.data
                self.waiting[channel] = self.waiting.get(channel, 0) + len(event.data)
            elif isinstance(event, ChannelEnded):
                self.finished.add(channel)
            else:
                assert isinstance(event, ChannelReset)
                self.over.add(channel)
                self.waiting.pop(channel, None)
        limits, machine = self.limits, self.machine
        waiting = self.waiting.values()
        assert all(count <= limits.channel_bytes_max for count in waiting)
        assert sum(waiting) <= limits.total_bytes_max + limits.channel_bytes_least * len(waiting)
        assert machine._kept_bytes <= limits.total_bytes_max + 2 * limits.packet_bytes_max + 500  # heads and credits


class World:
    """Two ends, an ordered stream of responses down, and calls up, of which some are under way at a time."""

    def __init__(self, rng: random.Random, limits: TunnelLimits) -> None:
        self.rng = rng
        self.server, self.client = End(limits), End(limits)
        self.down: deque[bytes] = deque()
        self.up: list[Packet] = []
        self.story: list[str] = []

    def step(self) -> None:
        step = self.rng.choice(self.STEPS)
        self.story.append(step.__name__)
        step(self)

    def open(self) -> None:
        if self.server.machine.can_open:
            channel = self.server.machine.open(1)
            self.server.given[channel] = self.server.received[channel] = b""

    def write(self) -> None:
        end = self.rng.choice([self.server, self.client])
        live = [one for one in end.given if one not in end.ended | end.over]
        if live:
            channel = self.rng.choice(live)
            data = self.rng.randbytes(self.rng.choice([1, 7, 40, 130]))
            if not end.machine.is_full(channel):
                end.machine.write(channel, data)
                end.given[channel] += data

    def end(self) -> None:
        end = self.rng.choice([self.server, self.client])
        if end.given:
            channel = self.rng.choice(list(end.given))
            end.machine.end(channel)
            end.ended.add(channel)

    def reset(self) -> None:
        end = self.rng.choice([self.server, self.client])
        if end.given and self.rng.random() < 0.3:
            channel = self.rng.choice(list(end.given))
            end.machine.reset(channel)
            end.over.add(channel)
            end.waiting.pop(channel, None)

    def consume(self) -> None:
        end = self.rng.choice([self.server, self.client])
        if end.waiting:
            channel = self.rng.choice(list(end.waiting))
            count = self.rng.randint(1, end.waiting[channel])
            end.machine.consumed(channel, count)
            end.waiting[channel] -= count
            if not end.waiting[channel]:
                del end.waiting[channel]

    def push(self) -> None:
        packet = self.server.machine.next_packet(keepalive=self.rng.random() < 0.05)
        if packet is not None:
            self.down.append(packet.data)

    def take_push(self) -> None:
        if self.down:
            self.client.receive(self.down.popleft())

    def break_push(self) -> None:
        """What is under way is lost, and the next push says up to where the client has everything."""
        if self.rng.random() < 0.2:
            self.down.clear()
            self.server.machine.acknowledge(self.client.machine.received_up_to)
            self.server.machine.send_all_again()

    def call(self) -> None:
        if len(self.up) < 4:
            packet = self.client.machine.next_packet(keepalive=self.rng.random() < 0.05)
            if packet is not None:
                self.up.append(packet)

    def take_call(self) -> None:
        if self.up:
            packet = self.up.pop(self.rng.randrange(len(self.up)))
            self.server.receive(packet.data)
            if self.rng.random() < 0.2:  # its result is lost
                self.client.machine.send_again(packet.number)
            else:
                self.client.machine.arrived(packet.number)

    def lose_call(self) -> None:
        if self.up and self.rng.random() < 0.3:
            packet = self.up.pop(self.rng.randrange(len(self.up)))
            self.client.machine.send_again(packet.number)

    STEPS = (
        *(open, write, write, write, end, reset, consume, consume),
        *(push, push, take_push, take_push, break_push),
        *(call, call, take_call, take_call, lose_call),
    )

    def settle(self) -> None:
        """Nothing is lost any more, and both ends pass on what they have received."""
        for _ in range(2000):
            for end in (self.server, self.client):
                for channel, count in end.waiting.items():
                    end.machine.consumed(channel, count)
                end.waiting.clear()
            self.server.machine.acknowledge(self.client.machine.received_up_to)
            self.server.machine.send_all_again()
            while (down := self.server.machine.next_packet()) is not None:
                self.down.append(down.data)
            while self.down:
                self.take_push()
            while (up := self.client.machine.next_packet()) is not None:
                self.up.append(up)
            while self.up:
                up = self.up.pop(self.rng.randrange(len(self.up)))
                self.server.receive(up.data)
                self.client.machine.arrived(up.number)
            if not self.server.waiting and self.server.machine.is_settled and self.client.machine.is_settled:
                return
        raise AssertionError("something never arrives")


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 400))
def test_nothing_is_lost_or_doubled_whatever_breaks(seed: int, steps: int) -> None:
    world = World(random.Random(seed), SMALL)
    for _ in range(steps):
        world.step()
    world.settle()
    for sender, receiver in ((world.server, world.client), (world.client, world.server)):
        assert sender.given.keys() == receiver.received.keys()
        for channel, data in sender.given.items():
            over = channel in sender.over | receiver.over
            assert data.startswith(receiver.received[channel]) if over else data == receiver.received[channel]
            if not over:
                assert (channel in sender.ended) == (channel in receiver.finished)


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


def test_a_push_that_begins_again_sends_what_did_not_arrive_and_nothing_twice() -> None:
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


def test_a_connection_that_is_not_read_stops_its_own_channel_and_no_other() -> None:
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


def test_many_slow_connections_hold_a_bounded_amount_and_a_quick_one_still_moves() -> None:
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


def test_a_channel_whose_data_was_passed_on_does_not_wait_for_others_when_capacity_becomes_scarce() -> None:
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


def test_a_packet_that_comes_again_is_acknowledged_again() -> None:
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


def test_what_a_reset_channel_had_waiting_counts_as_passed_on() -> None:
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


def test_no_channel_is_opened_while_the_other_end_is_away() -> None:
    """A stranger who connects and leaves again and again cannot fill the memory."""
    limits = TunnelLimits(total_bytes_max=1000)
    server = TunnelEnd(limits)
    opened = 0
    while server.can_open:
        server.reset(server.open(0))
        server.next_packet()
        opened += 1
    assert opened < 100
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
def test_what_the_other_end_must_not_say_ends_the_tunnel(packet: bytes, why: str) -> None:
    _, client = connected(TunnelLimits(channel_bytes_max=64, channel_bytes_least=8))
    with pytest.raises(RemoteProtocolError, match=why):
        client.receive(packet)


def test_an_end_that_gives_no_credit_but_wants_more_than_all_may_have_is_refused() -> None:
    _, client = connected(SMALL, channels=4)
    for number in range(2, 5):
        client.receive(HEAD.pack(number, 0) + FRAME.pack(number, DATA, 60) + bytes(60))
    with pytest.raises(RemoteProtocolError, match="more than its credit"):
        client.receive(HEAD.pack(5, 0) + FRAME.pack(1, DATA, 60) + bytes(60))


def test_packets_that_come_too_early_have_a_bound() -> None:
    _, client = connected(SMALL)
    for number in range(3, 5):
        client.receive(HEAD.pack(number, 0) + FRAME.pack(1, DATA, 100) + bytes(100))
    with pytest.raises(RemoteProtocolError, match="too early"):
        client.receive(HEAD.pack(5, 0) + FRAME.pack(1, DATA, 100) + bytes(100))


def test_a_call_that_fails_for_long_does_not_let_the_later_ones_run_too_far_ahead() -> None:
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


def test_large_data_of_two_channels_takes_turns() -> None:
    server, client = connected(channels=2)
    server.write(1, bytes(2**20))
    server.write(2, bytes(2**20))
    channels = [event.channel for event in exchange(server, client) if isinstance(event, DataReceived)]
    assert channels[:4] == [1, 2, 1, 2]


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="channel_bytes_least must not be more"):
        TunnelLimits(channel_bytes_max=1, channel_bytes_least=2)
