# SPDX-License-Identifier: Apache-2.0

"""Every order of steps of two ``TunnelEnd``s in small worlds (H196, H197).

The calls of a server and its client are as in ``spark_bridge.connect``. Down, one call brings packets in order; when it
breaks off, the next one begins, and what the old one had on the way may be lost or still arrive. Up, several calls are
under way, and are taken in any order. One that failed may have arrived, may arrive later, or may be lost.

A state is a tuple of numbers of equal values. A step of one end depends on that end alone, so each is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from protocol.tunnel import ChannelEnded, ChannelOpened, DataReceived, Packet, TunnelEnd, TunnelLimits
from tests.exploration.freezing import clone, freeze

TINY = TunnelLimits(
    channels_max=2, channel_bytes_max=4, total_bytes_max=40, channel_bytes_least=2, packet_bytes_max=24, packets_max=8
)
SCARCE = TunnelLimits(
    channels_max=2, channel_bytes_max=16, total_bytes_max=24, channel_bytes_least=2, packet_bytes_max=12, packets_max=8
)
FEW = TunnelLimits(
    channels_max=1, channel_bytes_max=4, total_bytes_max=40, channel_bytes_least=2, packet_bytes_max=24, packets_max=2
)
SERVER, CLIENT = 0, 1


@dataclass(frozen=True)
class TunnelScope:
    """One small world.

    ``channels``: how many are opened. ``down`` and ``up``: the sizes of what is written to each, in order. ``ends``:
    whether channels are ended, after all that. ``slow``: data may wait at an end before it is passed on. ``calls``: how
    many calls up may be under way. ``resets``: how many, by either end. ``breaks``: how often the call
    with responses breaks off. ``failures``: how many calls up fail.
    """

    name: str
    channels: int = 1
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()
    ends: bool = False
    slow: bool = False
    calls: int = 1
    resets: int = 0
    breaks: int = 0
    failures: int = 0
    limits: TunnelLimits = TINY


TUNNEL_SCOPES = (
    TunnelScope("breaks", down=(3, 2), breaks=2),
    TunnelScope("failures", up=(3, 2), calls=2, failures=1),
    TunnelScope("both-ways", down=(5,), up=(2,), ends=True, slow=True),
    TunnelScope("both-ways-break", down=(2,), up=(2,), ends=True, breaks=1),
    TunnelScope("both-ways-fail", down=(2,), up=(2,), ends=True, failures=1),
    TunnelScope("resets", down=(5,), up=(1,), resets=2),
    TunnelScope("resets-break", down=(5,), slow=True, resets=1, breaks=1),
    TunnelScope("resets-fail", up=(3,), resets=1, calls=2, failures=1),
    TunnelScope("two-channels", channels=2, down=(2,), breaks=1),
    TunnelScope("scarce-down", channels=2, down=(14,), limits=SCARCE),
    TunnelScope("scarce-up", channels=2, up=(14,), slow=True, limits=SCARCE),
    TunnelScope("few-packets", up=(1, 1, 1, 1), calls=3, failures=1, limits=FEW),
)


class TunnelViolation(AssertionError):
    """A state breaks a rule. The text ends with a shortest story."""


class Broken(Exception):
    """A rule does not hold, or a machine objects to what the other one says."""


class Step(NamedTuple):
    """What an end is told."""

    what: str
    channel: int = 0
    data: bytes = b""
    number: int = 0


def demand(holds: object, text: str) -> None:
    if not holds:
        raise Broken(text)


def payload(side: int, channel: int, at: int, size: int) -> bytes:
    """What ``side`` writes to the channel from this place on: bytes that differ by place."""
    return bytes((100 * side + 40 * channel + at + step) % 251 for step in range(size))


class User:
    """A user of one channel at one end, for whom its machine works."""

    def __init__(self) -> None:
        self.writes = self.written = self.received = self.waiting = 0
        self.ends = self.finished = self.over = False

    @property
    def is_open(self) -> bool:
        return not self.over and not (self.ends and self.finished)


class End:
    """One end, with the users of its channels."""

    def __init__(self, side: int, scope: TunnelScope) -> None:
        self.side = side
        self.scope = scope
        self.machine = TunnelEnd(scope.limits)
        self.users: dict[int, User] = {}

    def form(self) -> Hashable:
        """Ends with the same form act alike."""
        machine = self.machine
        turns = tuple(machine._ready), tuple(machine._blocked), tuple(machine._credits)
        return freeze(machine, frozenset({"_limits"})), turns, freeze(self.users)

    # What the end may do next.

    def steps(self) -> Iterator[Step]:
        scope, sizes = self.scope, (self.scope.down, self.scope.up)[self.side]
        if self.side == SERVER and len(self.users) < scope.channels and self.machine.can_open:
            yield Step("open")
        for channel, user in self.users.items():
            if user.waiting:
                yield Step("consume", channel)
            if user.over or user.ends:
                continue
            if user.writes < len(sizes):
                if not self.machine.is_full(channel):
                    yield Step("write", channel)
            elif scope.ends:
                yield Step("end", channel)

    def take(self, step: Step) -> Packet | None:
        """Take one step; returns the packet to send, if it is one that sends."""
        machine = self.machine
        user = self.users.get(step.channel, User())
        if step.what == "open":
            self.users[machine.open(0)] = User()
        elif step.what == "write":
            size = (self.scope.down, self.scope.up)[self.side][user.writes]
            machine.write(step.channel, payload(self.side, step.channel, user.written, size))
            user.written += size
            user.writes += 1
        elif step.what == "consume":
            machine.consumed(step.channel, user.waiting)
            user.waiting = 0
        elif step.what == "end":
            machine.end(step.channel)
            user.ends = True
        elif step.what == "reset":
            machine.reset(step.channel)
            user.over, user.waiting = True, 0
        elif step.what == "receive":
            for event in machine.receive(step.data):
                self._event(event)
        elif step.what == "begin":
            machine.acknowledge(step.number)
            machine.send_all_again()
        elif step.what == "arrived":
            machine.arrived(step.number)
        elif step.what == "failed":
            machine.send_again(step.number)
        machine.take_drained()
        keepalive = step.what == "keepalive"
        packet = machine.next_packet(keepalive=keepalive) if step.what == "send" or keepalive else None
        self._check()
        return packet

    def _event(self, event: Any) -> None:
        channel = event.channel
        if isinstance(event, ChannelOpened):
            demand(channel not in self.users, f"channel {channel} was opened twice")
            self.users[channel] = User()
            return
        user = self.users[channel]
        demand(not user.over, f"{event} after the end of the channel")
        if isinstance(event, DataReceived):
            demand(not user.finished, f"{event} after the end of the data")
            expected = payload(1 - self.side, channel, user.received, len(event.data))
            demand(event.data == expected, f"{event}, not {expected!r}")
            user.received += len(event.data)
            if self.scope.slow:
                user.waiting += len(event.data)
            else:
                self.machine.consumed(channel, len(event.data))
        elif isinstance(event, ChannelEnded):
            demand(not user.finished, f"channel {channel} ended twice")
            user.finished = True
        else:
            user.over, user.waiting = True, 0

    def _check(self) -> None:
        """Memory is bounded: what waits at a channel, at all of them, and for an acknowledgement."""
        limits, machine = self.scope.limits, self.machine
        waiting = [user.waiting for user in self.users.values()]
        demand(max(waiting, default=0) <= limits.channel_bytes_max, "a channel has more than its limit")
        total = limits.total_bytes_max + limits.channel_bytes_least * len(waiting)
        demand(sum(waiting) <= total, "all channels together have more than their limit")
        frames = 9 * (2 * len(self.users) + 1)  # a packet ends with one frame, and with all credits
        demand(len(machine._kept) <= limits.packets_max, "too many packets are kept")
        demand(machine._kept_bytes < limits.total_bytes_max + limits.packet_bytes_max + frames, "too much is kept")
        demand(len(machine._early) < limits.packets_max, "too many packets are early")


class State(NamedTuple):
    """Both ends by number, and what is on the way: ``old`` of the responses before, ``late`` of calls that failed."""

    server: int
    client: int
    down: tuple[Packet, ...] = ()
    old: tuple[Packet, ...] = ()
    up: tuple[Packet, ...] = ()
    late: tuple[Packet, ...] = ()
    resets: int = 0
    breaks: int = 0
    failures: int = 0


class TunnelWorld:
    """The states of one scope, and the steps between them."""

    def __init__(self, scope: TunnelScope) -> None:
        self.scope = scope
        self.ends: list[End] = []
        self._numbers: dict[Hashable, int] = {}
        self._done: dict[tuple[int, Step], tuple[int, Packet | None]] = {}

    def initial(self) -> State:
        scope = self.scope
        server, client = (self._number(End(side, scope)) for side in (SERVER, CLIENT))
        return State(server, client, resets=scope.resets, breaks=scope.breaks, failures=scope.failures)

    def _number(self, end: End) -> int:
        number = self._numbers.setdefault((end.side, end.form()), len(self.ends))
        if number == len(self.ends):
            self.ends.append(end)
        return number

    def _tell(self, number: int, step: Step) -> tuple[int, Packet | None]:
        done = self._done.get((number, step))
        if done is None:
            end = clone(self.ends[number])
            packet = end.take(step)
            done = self._done[number, step] = self._number(end), packet
        return done

    def _told(self, state: State, side: int, step: Step, **changes: Any) -> tuple[State, Packet | None]:
        number, packet = self._tell(self._end_of(state, side), step)
        changes["client" if side else "server"] = number
        return state._replace(**changes), packet

    def _after(self, state: State, side: int, step: Step, **changes: Any) -> State:
        return self._told(state, side, step, **changes)[0]

    def _end_of(self, state: State, side: int) -> int:
        return state.client if side else state.server

    def steps(self, state: State) -> Iterator[tuple[str, Callable[[], State]]]:
        """What may happen next."""
        for side, name in enumerate(("server", "client")):
            end = self.ends[self._end_of(state, side)]
            for step in end.steps():
                yield f"{name}: {step.what} {step.channel}", partial(self._after, state, side, step)
            for channel, user in end.users.items():
                if state.resets and not user.over:
                    reset = Step("reset", channel)
                    yield f"{name}: reset {channel}", partial(self._after, state, side, reset, resets=state.resets - 1)
        yield from self._steps_down(state)
        yield from self._steps_up(state)

    def _steps_down(self, state: State) -> Iterator[tuple[str, Callable[[], State]]]:
        after, packet = self._told(state, SERVER, Step("send"))
        if packet is not None:
            yield f"server sends {packet.number}", partial(after._replace, down=(*state.down, packet))
        for name, packets in (("down", state.down), ("old", state.old)):
            if packets:
                receive = Step("receive", data=packets[0].data)
                rest = {name: packets[1:]}
                yield f"client takes {name} {packets[0].number}", partial(self._after, state, CLIENT, receive, **rest)
        if state.breaks:
            begin = Step("begin", number=self.ends[state.client].machine.received_up_to)
            left: dict[str, Any] = {"old": state.down, "down": (), "breaks": state.breaks - 1}
            yield "the responses begin again", partial(self._after, state, SERVER, begin, **left)

    def _steps_up(self, state: State) -> Iterator[tuple[str, Callable[[], State]]]:
        if len(state.up) < self.scope.calls:
            after, sent = self._told(state, CLIENT, Step("send"))
            if sent is not None:
                yield f"client sends {sent.number}", partial(after._replace, up=tuple(sorted((*state.up, sent))))
        for place, packet in enumerate(state.up):
            others = (*state.up[:place], *state.up[place + 1 :])
            yield f"call {packet.number} succeeds", partial(self._succeed, state, packet, others)
            if state.failures:
                late = tuple(sorted({*state.late, packet}))
                left: dict[str, Any] = {"up": others, "late": late, "failures": state.failures - 1}
                failed = Step("failed", number=packet.number)
                yield f"call {packet.number} fails", partial(self._after, state, CLIENT, failed, **left)
        for place, packet in enumerate(state.late):
            receive = Step("receive", data=packet.data)
            rest = (*state.late[:place], *state.late[place + 1 :])
            yield f"server takes late {packet.number}", partial(self._after, state, SERVER, receive, late=rest)

    def _succeed(self, state: State, packet: Packet, others: tuple[Packet, ...]) -> State:
        state, _ = self._told(state, SERVER, Step("receive", data=packet.data), up=others)
        return self._told(state, CLIENT, Step("arrived", number=packet.number))[0]

    def settle(self, state: State) -> State:
        """Bring the next keepalives of each end: an acknowledgement that was lost comes with those."""
        for side in (SERVER, CLIENT) * 3:
            state, packet = self._told(state, side, Step("keepalive"))
            assert packet is not None
            state, _ = self._told(state, 1 - side, Step("receive", data=packet.data))
            state, _ = self._told(state, side, Step("arrived", number=packet.number))
        return state

    def check_end(self, state: State) -> None:
        """Nothing is to be done: then all has arrived, and both ends agree."""
        for number in (state.server, state.client):
            machine = self.ends[number].machine
            demand(not (machine._ready or machine._blocked), "data waits for a keepalive")
        state = self.settle(state)
        server, client = self.ends[state.server], self.ends[state.client]
        demand(server.users.keys() == client.users.keys(), "an open has not arrived")
        for sender, receiver in ((server, client), (client, server)):
            demand(sender.machine.is_settled, f"end {sender.side} is not settled")
            machine = sender.machine
            demand(not machine._early, "a packet is still early")
            for channel, user in sender.users.items():
                other = receiver.users[channel]
                demand(user.is_open == other.is_open, f"channel {channel} is over at one end only")
                if not user.over and not other.over:
                    demand(user.written == other.received, f"channel {channel} lacks data")
                    demand(user.ends == other.finished, f"the end of channel {channel} has not arrived")
                if not user.is_open:
                    demand(channel not in machine._channels, f"channel {channel} is not forgotten")
                outstanding = machine._uncredited.get(channel, 0)
                owed = receiver.machine._credits.get(channel, 0) + receiver.machine._unconsumed.get(channel, 0)
                demand(outstanding == owed, f"channel {channel} waits for credit of {outstanding}, not {owed}")


@dataclass
class TunnelResult:
    """How much of a scope there is."""

    states: int = 0
    transitions: int = 0
    ends: int = 0


def explore_tunnel(scope: TunnelScope, states_max: int = 10**9) -> TunnelResult:
    """Visit every reachable state. Raises ``TunnelViolation``."""
    world, result = TunnelWorld(scope), TunnelResult()
    first = world.initial()
    came: dict[State, tuple[State, str] | None] = {first: None}
    level = [first]
    while level and len(came) < states_max:
        following: list[State] = []
        for state in level:
            must = False
            name = "look"
            try:
                for name, step in world.steps(state):
                    after = step()
                    result.transitions += 1
                    must |= _is_due(name)
                    if after not in came:
                        came[after] = state, name
                        following.append(after)
                if not must:
                    result.ends += 1
                    name = "end"
                    world.check_end(state)
            except Exception as error:  # a machine that objects to the other is wrong, whatever it raises
                story = [name]
                at = state
                while (before := came[at]) is not None:
                    at, name = before
                    story.append(name)
                lines = "\n".join(reversed(story))
                raise TunnelViolation(f"{scope.name}: {type(error).__name__}: {error}\n{lines}") from error
        level = following
    result.states = len(came)
    return result


def _is_due(name: str) -> bool:
    """Whether the step happens sooner or later; faults and late packets may be left out."""
    return not any(word in name for word in ("reset", "begin again", "fails", "late", "old"))
