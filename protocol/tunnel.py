# SPDX-License-Identifier: Apache-2.0

"""Many byte streams over one link that loses, repeats and reorders: the tunnel of a client behind NAT.

Theory of operation
-------------------
Nobody can dial a Spark Connect client behind NAT. So a program in the server's JVM listens in its place, and what the
tasks say there travels over Connect's own channel: down in the responses of a call, up in calls. Both ends of this link
are the same machine, here in Python and in ``TunnelEnd.java``. It has two layers.

*The link* makes the calls reliable. Each *packet* has a number. The receiver takes packets in this order, keeps the
ones that come early, drops those that it has, and says in the head of every packet up to which number it has all. The
sender keeps a packet until it knows that it has arrived. A call that failed is made again with the same packet
(``send_again``). If the responses end, the next call begins with those that were not acknowledged (``send_all_again``).
So nothing is lost or doubled, however often either direction breaks. A packet with the number 0 only acknowledges.

*The channels* are the connections. Each has data and an end in both directions, or is reset.

| frame  | number  | then the channel ...                                     |
|--------|---------|----------------------------------------------------------|
| OPEN   | a door  | is open; the door says which port was dialled            |
| DATA   | a size  | has these bytes more                                     |
| END    | 0       | has no more data in this direction                       |
| RESET  | 0       | is over in both directions; what has not left is dropped |
| CREDIT | a count | may carry so many bytes more                             |

*Memory is bounded at both ends, and no channel can stop the others.* Data that has been sent counts until the receiver
gives credit, which it does after it has passed the data on. A channel may have so many bytes without credit: half of
what the limit for all leaves, at most ``channel_bytes_max``, and at least ``channel_bytes_least``. So the more is
waiting, the less each channel may add, but a channel whose peer reads always moves. The receiver checks the same
limits. What waits for credit stays at the connection that it came from: ``write`` takes everything, and ``is_full``
says when that connection should not be read for a while.

A false length, number or kind ends the tunnel: ``receive`` raises, and the machine must not be used any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from struct import Struct
from typing import NamedTuple

from protocol.arguments import AT_LEAST_1, check_fields
from protocol.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["ChannelEnded", "ChannelOpened", "ChannelReset", "DataReceived", "Packet", "TunnelEnd", "TunnelLimits"]

_HEAD = Struct(">QQ")
_FRAME = Struct(">IBI")
_OPEN, _DATA, _END, _RESET, _CREDIT = range(1, 6)
_CHUNK_BYTES = 64 * 1024
"""A channel adds so many bytes to a packet before it is the next one's turn."""


@dataclass(frozen=True, slots=True)
class TunnelLimits:
    """The limits of a tunnel. Both ends must use the same.

    At most ``channels_max`` channels are open. Of the data that is on its way, a channel has at most
    ``channel_bytes_max``, and all channels together have about ``total_bytes_max``, but each may always have
    ``channel_bytes_least``. A packet has about ``packet_bytes_max`` bytes. From the oldest one on that has not arrived,
    at most ``packets_max`` are sent, with about ``total_bytes_max``.
    """

    channels_max: int = 10_000
    channel_bytes_max: int = 16 * 2**20
    total_bytes_max: int = 48 * 2**20
    channel_bytes_least: int = 16 * 1024
    packet_bytes_max: int = 4 * 2**20
    packets_max: int = 1024

    def __post_init__(self) -> None:
        check_fields(self, **{limit.name: AT_LEAST_1 for limit in fields(self)})
        if self.channel_bytes_least > self.channel_bytes_max:
            raise ValueError("channel_bytes_least must not be more than channel_bytes_max")


class Packet(NamedTuple):
    """What one call carries. Its number is 0 if it only acknowledges: then it need not arrive."""

    number: int
    data: bytes


class ChannelOpened(NamedTuple):
    """The other end has opened a channel, through one of its doors."""

    channel: int
    door: int


class DataReceived(NamedTuple):
    """Pass the data on, and then call ``consumed``."""

    channel: int
    data: bytes


class ChannelEnded(NamedTuple):
    """The other end sends no more data on the channel."""

    channel: int


class ChannelReset(NamedTuple):
    """The other end has given the channel up."""

    channel: int


TunnelEvent = ChannelOpened | DataReceived | ChannelEnded | ChannelReset


class _Kept(NamedTuple):
    """A packet that was sent; without its body once it has arrived, until all before it have, too."""

    size: int
    body: bytes | None


class _Channel:
    """One open channel: ``unsent`` is what ``write`` was given."""

    __slots__ = ("end_sent", "ends", "peer_ended", "unsent", "unsent_bytes", "was_full")

    def __init__(self) -> None:
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.was_full = self.ends = self.end_sent = self.peer_ended = False


class TunnelEnd:
    """One end of a tunnel. Not thread-safe.

    After every call, and after every event, ask ``next_packet`` for what has to be sent.
    """

    def __init__(self, limits: TunnelLimits | None = None) -> None:
        self._limits = limits or TunnelLimits()
        self._channels: dict[int, _Channel] = {}
        self._newest = 0  # channel, that either end has opened
        # What is sent: frames that come before all data, channels that have data and may send it, and those that wait.
        self._control: deque[bytes] = deque()
        self._ready: dict[int, None] = {}
        self._blocked: dict[int, None] = {}
        self._drained: list[int] = []
        self._uncredited: dict[int, int] = {}  # bytes that were sent
        self._uncredited_total = 0
        # What was received: not passed on yet, and passed on without credit for it.
        self._unconsumed: dict[int, int] = {}
        self._credits: dict[int, int] = {}
        self._held_total = 0  # both together
        self._credit_due = False
        # The link.
        self._number = 0
        self._kept: dict[int, _Kept] = {}  # by number, without a gap: each is in the memory of one of the ends
        self._kept_bytes = 0
        self._again: deque[int] = deque()
        self._taken = 0
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0
        self._acknowledged = 0  # as the last packet said
        self._bytes_since = 0  # it did
        self._ack_due = False

    # --- channels -------------------------------------------------------------------------------------------------

    @property
    def can_open(self) -> bool:
        """Whether there may be one more channel: not, too, if the other end does not acknowledge what was sent."""
        waiting = self._kept_bytes + _FRAME.size * len(self._control)
        return len(self._channels) < self._limits.channels_max and waiting < self._limits.total_bytes_max

    def open(self, door: int) -> int:
        """Open a channel, and return its number. Only one end of a tunnel may open channels.

        Raises ``LocalProtocolError`` unless ``can_open``.
        """
        if not self.can_open:
            raise LocalProtocolError("the tunnel has no capacity for one more channel")
        self._newest += 1
        self._channels[self._newest] = _Channel()
        self._control.append(_FRAME.pack(self._newest, _OPEN, door))
        return self._newest

    def write(self, channel: int, data: bytes) -> None:
        """Send data. It is dropped if the channel is over."""
        one = self._channels.get(channel)
        if one is None or not data:
            return
        if one.ends:
            raise LocalProtocolError(f"channel {channel} has been ended here")
        one.unsent.append(memoryview(data))
        one.unsent_bytes += len(data)
        one.was_full |= self._is_full(one)
        if channel not in self._blocked:
            self._ready[channel] = None

    def is_full(self, channel: int) -> bool:
        """Whether so much waits on the channel that its source should not be read: until ``take_drained`` names it."""
        one = self._channels.get(channel)
        return one is not None and one.was_full

    def take_drained(self) -> list[int]:
        """The channels that were full, and are not any more."""
        drained, self._drained = self._drained, []
        return drained

    def end(self, channel: int) -> None:
        """Send no more data on the channel. Idempotent; does nothing for one that is over."""
        one = self._channels.get(channel)
        if one is not None and not one.ends:
            one.ends = True
            if channel not in self._blocked:
                self._ready[channel] = None

    def reset(self, channel: int) -> None:
        """Give the channel up, in both directions. Idempotent."""
        if channel in self._channels:
            self._control.append(_FRAME.pack(channel, _RESET, 0))
            self._forget(channel)

    def consumed(self, channel: int, count: int) -> None:
        """So many bytes that were received have been passed on. Too many are not counted: the channel was reset."""
        count = min(count, self._unconsumed.get(channel, 0))
        if not count:
            return
        self._unconsumed[channel] -= count
        if not self._unconsumed[channel]:
            del self._unconsumed[channel]
        self._credits[channel] = self._credits.get(channel, 0) + count
        limits = self._limits
        few = limits.channel_bytes_least // 2 if self._is_tight else limits.channel_bytes_max // 4
        self._credit_due |= self._credits[channel] >= few

    def _is_full(self, one: _Channel) -> bool:
        return one.unsent_bytes > self._limits.packet_bytes_max

    def _forget(self, channel: int) -> None:
        """The channel is over, and whatever was received counts as passed on."""
        del self._channels[channel]
        self._ready.pop(channel, None)
        self._blocked.pop(channel, None)
        self.consumed(channel, self._unconsumed.get(channel, 0))

    @property
    def _is_tight(self) -> bool:
        """Whether what is held here makes the other end give channels less than their limit."""
        return self._share(self._held_total) < self._limits.channel_bytes_max

    def _share(self, total: int) -> int:
        limits = self._limits
        return max(limits.channel_bytes_least, min(limits.channel_bytes_max, (limits.total_bytes_max - total) // 2))

    # --- sending --------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the other end has everything that was given to this one, except credit."""
        return not (self._kept or self._control or self._ready or self._blocked)

    def next_packet(self, *, keepalive: bool = False) -> Packet | None:
        """The next packet to send; None if there is nothing. With ``keepalive``, there always is one."""
        while self._again:
            number = self._again.popleft()
            body = self._body_of(number)
            if body is not None:
                return self._packet(number, body)
        if len(self._kept) < self._limits.packets_max and self._kept_bytes < self._limits.total_bytes_max:
            body = b"".join(self._frames(keepalive))
            if body:
                self._number += 1
                self._kept[self._number] = _Kept(len(body), body)
                self._kept_bytes += len(body)
                return self._packet(self._number, body)
        return self._packet(0, b"") if self._ack_due or keepalive else None

    def arrived(self, number: int) -> None:
        """The call with this packet has returned, so the other end has it. Idempotent."""
        kept = self._kept.get(number)
        if kept is None:
            return
        self._kept[number] = _Kept(kept.size, None)
        while self._kept and self._kept[first := next(iter(self._kept))].body is None:
            self._kept_bytes -= self._kept.pop(first).size

    def send_again(self, number: int) -> None:
        """The call with this packet has failed, so the other end may not have it."""
        if self._body_of(number) is not None and number not in self._again:
            self._again.append(number)

    def send_all_again(self) -> None:
        """The link has begun again: send everything that was not acknowledged, in order."""
        self._again = deque(self._kept)

    def _body_of(self, number: int) -> bytes | None:
        kept = self._kept.get(number)
        return None if kept is None else kept.body

    def _packet(self, number: int, body: bytes) -> Packet:
        self._acknowledged = self._taken
        self._bytes_since = 0
        self._ack_due = False
        return Packet(number, _HEAD.pack(number, self._taken) + body)

    def _frames(self, keepalive: bool) -> Iterator[bytes | memoryview]:
        left = self._limits.packet_bytes_max
        while self._control and left > 0:
            left -= _FRAME.size
            yield self._control.popleft()
        if self._credits and (self._credit_due or keepalive or self._ready):
            for channel, count in self._credits.items():
                left -= _FRAME.size
                self._held_total -= count
                yield _FRAME.pack(channel, _CREDIT, count)
            self._credits.clear()
            self._credit_due = False
        while self._ready and left > 0:
            channel = next(iter(self._ready))
            del self._ready[channel]
            size = 0
            for part in self._data_of(channel, min(left, _CHUNK_BYTES)):
                size += len(part)
                yield part
            left -= size

    def _data_of(self, channel: int, size_max: int) -> Iterator[bytes | memoryview]:
        """One frame of data of a ready channel, and its end if that is all. It is ready again if there is more."""
        one = self._channels[channel]
        sent = self._uncredited.get(channel, 0)
        size = min(size_max, one.unsent_bytes, self._share(self._uncredited_total) - sent)
        if size > 0:
            yield _FRAME.pack(channel, _DATA, size)
            self._uncredited[channel] = sent + size
            self._uncredited_total += size
            one.unsent_bytes -= size
            while size:
                part = one.unsent[0]
                if len(part) <= size:
                    one.unsent.popleft()
                else:
                    part, one.unsent[0] = part[:size], part[size:]
                size -= len(part)
                yield part
        elif one.unsent_bytes:
            self._blocked[channel] = None
            return
        if one.was_full and not self._is_full(one):
            one.was_full = False
            self._drained.append(channel)
        if one.unsent_bytes:
            self._ready[channel] = None
        elif one.ends and not one.end_sent:
            one.end_sent = True
            yield _FRAME.pack(channel, _END, 0)
            self._forget_if_both_ended(channel, one)

    def _forget_if_both_ended(self, channel: int, one: _Channel) -> None:
        if one.end_sent and one.peer_ended:  # what was received may still have to be passed on
            del self._channels[channel]

    # --- receiving ------------------------------------------------------------------------------------------------

    @property
    def received_up_to(self) -> int:
        """The number up to which all packets have been received."""
        return self._taken

    def acknowledge(self, number: int) -> None:
        """The other end has all packets up to this number. Raises ``RemoteProtocolError`` if it cannot."""
        if number > self._number:
            raise RemoteProtocolError(f"packet {number} was acknowledged before it was sent")
        while self._kept and (first := next(iter(self._kept))) <= number:
            self._kept_bytes -= self._kept.pop(first).size

    def receive(self, data: bytes) -> list[TunnelEvent]:
        """Take a packet; returns what follows from it, in order. Raises ``RemoteProtocolError``: the tunnel is over."""
        if len(data) < _HEAD.size:
            raise RemoteProtocolError(f"a packet of {len(data)} bytes has no head")
        number, acknowledged = _HEAD.unpack_from(data)
        self.acknowledge(acknowledged)
        if number == 0:
            return []
        if number <= self._taken or number in self._early:
            self._ack_due = True  # perhaps the other end has not learnt that it is here
            return []
        limits = self._limits
        if number > self._taken + limits.packets_max:
            raise RemoteProtocolError(f"packet {number} is too far ahead of {self._taken}")
        self._early[number] = data
        self._early_bytes += len(data)
        if self._early_bytes > 2 * limits.total_bytes_max + limits.packet_bytes_max:
            raise RemoteProtocolError("packets that came too early take too much memory")
        events: list[TunnelEvent] = []
        while (packet := self._early.pop(self._taken + 1, None)) is not None:
            self._early_bytes -= len(packet)
            self._taken += 1
            self._bytes_since += len(packet)
            self._take(packet, events)
        behind = self._taken - self._acknowledged
        self._ack_due |= self._bytes_since >= limits.packet_bytes_max or behind >= limits.packets_max // 4
        return events

    def _take(self, packet: bytes, events: list[TunnelEvent]) -> None:
        at, size = _HEAD.size, len(packet)
        while at < size:
            if size - at < _FRAME.size:
                raise RemoteProtocolError(f"{size - at} bytes at the end of a packet are not a frame")
            channel, kind, number = _FRAME.unpack_from(packet, at)
            at += _FRAME.size
            if kind == _DATA:
                if not 0 < number <= size - at:
                    raise RemoteProtocolError(f"a frame claims {number} bytes of {size - at}")
                self._take_data(channel, packet[at : at + number], events)
                at += number
            elif kind == _CREDIT:
                self._take_credit(channel, number)
            elif kind == _OPEN:
                self._take_open(channel, number, events)
            elif kind in (_END, _RESET):
                self._take_end(channel, kind, events)
            else:
                raise RemoteProtocolError(f"unknown kind of frame: {kind}")

    def _take_open(self, channel: int, door: int, events: list[TunnelEvent]) -> None:
        if channel != self._newest + 1 or len(self._channels) >= self._limits.channels_max:
            raise RemoteProtocolError(f"channel {channel} cannot be opened")
        self._newest = channel
        self._channels[channel] = _Channel()
        events.append(ChannelOpened(channel, door))

    def _take_data(self, channel: int, data: bytes, events: list[TunnelEvent]) -> None:
        limits, size = self._limits, len(data)
        self._check_known(channel)
        before = self._unconsumed.get(channel, 0)
        held = before + self._credits.get(channel, 0) + size
        self._unconsumed[channel] = before + size
        self._held_total += size
        over = self._held_total - limits.total_bytes_max
        if held > limits.channel_bytes_max or (over > 0 and over > self._channels_held * limits.channel_bytes_least):
            raise RemoteProtocolError(f"channel {channel} has sent more than its credit")
        one = self._channels.get(channel)
        if one is None:  # it was reset here
            self.consumed(channel, size)
        elif one.peer_ended:
            raise RemoteProtocolError(f"channel {channel} has data after its end")
        else:
            events.append(DataReceived(channel, data))
        if self._is_tight and self._credits:
            self._credit_due = True

    @property
    def _channels_held(self) -> int:
        return len(self._unconsumed.keys() | self._credits.keys())

    def _take_end(self, channel: int, kind: int, events: list[TunnelEvent]) -> None:
        self._check_known(channel)
        one = self._channels.get(channel)
        if one is None:  # it was reset here
            return
        if kind == _RESET:
            self._forget(channel)
            events.append(ChannelReset(channel))
        elif one.peer_ended:
            raise RemoteProtocolError(f"channel {channel} has ended twice")
        else:
            one.peer_ended = True
            self._forget_if_both_ended(channel, one)
            events.append(ChannelEnded(channel))

    def _take_credit(self, channel: int, count: int) -> None:
        left = self._uncredited.get(channel, 0) - count
        if left < 0 or not count:
            raise RemoteProtocolError(f"channel {channel} was given credit of {count} bytes too much")
        self._uncredited_total -= count
        if left:
            self._uncredited[channel] = left
        else:
            del self._uncredited[channel]
        self._ready.update(self._blocked)
        self._blocked.clear()

    def _check_known(self, channel: int) -> None:
        if not 0 < channel <= self._newest:
            raise RemoteProtocolError(f"channel {channel} was never opened")
