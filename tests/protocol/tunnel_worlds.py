# SPDX-License-Identifier: Apache-2.0

"""Random histories of two ``TunnelEnd``s over calls that fail and responses that break off (H196, H197).

Larger than the worlds of ``tests/exploration/tunnel.py``: four channels, hundreds of bytes, every fault at any time.
"""

from __future__ import annotations

import random
from collections import deque

from protocol.tunnel import ChannelEnded, ChannelOpened, ChannelReset, DataReceived, Packet, TunnelEnd, TunnelLimits

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
                assert channel not in self.finished | self.over
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

    def check(self) -> None:
        """What was given has arrived, and both ends agree on what is over."""
        for sender, receiver in ((self.server, self.client), (self.client, self.server)):
            assert sender.given.keys() == receiver.received.keys()
            for channel, data in sender.given.items():
                over = channel in sender.over | receiver.over
                assert data.startswith(receiver.received[channel]) if over else data == receiver.received[channel]
                if not over:
                    assert (channel in sender.ended) == (channel in receiver.finished)


def check_tunnel(seed: int, steps: int | None = None) -> None:
    """Run one history. An error has its steps, and the seed."""
    rng = random.Random(seed)
    world = World(rng, SMALL)
    try:
        for _ in range(rng.randint(1, 400) if steps is None else steps):
            world.step()
        world.settle()
        world.check()
    except Exception as error:
        error.add_note(f"seed {seed}, after {len(world.story)} steps, the last ones: {' '.join(world.story[-30:])}")
        raise
