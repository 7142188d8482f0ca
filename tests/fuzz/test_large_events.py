# SPDX-License-Identifier: Apache-2.0

"""The largest events that a task may send, over real TCP, next to a task of another operator (H62, H65)."""

from __future__ import annotations

from typing import Any

import msgpack

from protocol.wire.codec import EVENT_STEP_BYTES, decode_event, encode_event
from protocol.wire.fragments import encode_whole
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import AttemptEnded, EventMessage
from spark_bridge.server.server import ServerConfig
from tests.fuzz.driver_half import HONEST, VICTIM, running_driver_half
from tests.fuzz.played_tasks import KEYS, PlayedTasks, until

MAPS_MAX = DEFAULT_LIMITS.event_containers_max - 1  # and the list around them


def the_largest_event() -> bytes:
    """Return an event with as many containers and bytes as one may have."""
    maps: list[Any] = [{}] * MAPS_MAX
    head_bytes = len(msgpack.packb([*maps, b""])) + 3  # a longer text has a longer head
    data = encode_event([*maps, bytes(DEFAULT_LIMITS.event_bytes_max - head_bytes)])
    assert len(data) == DEFAULT_LIMITS.event_bytes_max
    return data


async def test_another_operators_events_are_handled_while_the_largest_event_is_decoded() -> None:  # H62, H65
    payload = the_largest_event()
    async with running_driver_half(KEYS, ServerConfig()) as half, PlayedTasks(half) as tasks:
        large = await tasks.start(VICTIM, 1)
        small = await tasks.start(HONEST, 2)
        frames = encode_whole(EventMessage(1, 2, payload), DEFAULT_LIMITS)
        await large.line.send(frames[:-1])
        (receiving,) = [c for c in half.router._open.values() if c.peer == large.line.name]
        await until(lambda: receiving._decoder.buffered_bytes >= len(payload))  # all but a byte
        await large.line.send(frames[-1:])  # from here on, only the decoding remains
        round_trips = 0
        while not half.victim.events:
            await small.line.say(EventMessage(2, 2 + round_trips, encode_event(round_trips)))
            await small.until_taken(2 + round_trips)
            round_trips += 1
        print(f"{round_trips} round trips")
        assert round_trips > 10  # in one step, it would be one or two
        assert half.honest.taken[0] == round_trips
        assert half.victim.largest == MAPS_MAX + 1
        assert not half.faults


async def test_events_after_a_large_one_wait_for_it() -> None:  # H22
    async with running_driver_half(KEYS, ServerConfig()) as half, PlayedTasks(half) as tasks:
        task = await tasks.start(HONEST, 2)
        large = encode_event([0, bytes(20 * EVENT_STEP_BYTES)])
        await task.line.say(EventMessage(2, 2, large), EventMessage(2, 3, encode_event(1)))
        await until(lambda: half.honest.taken[0] == 2)  # it expects the numbers 0 and 1, and reports what else comes
        (fault,) = half.honest.faults
        assert fault.startswith("subtask 0 sent [0, b")


async def test_one_container_too_many_ends_that_attempt_by_name_and_no_other() -> None:  # H62, H65
    payload = msgpack.packb([{}] * (MAPS_MAX + 1))
    async with running_driver_half(KEYS, ServerConfig()) as half, PlayedTasks(half) as tasks:
        bad = await tasks.start(VICTIM, 1)
        good = await tasks.start(HONEST, 2)
        await bad.line.say(EventMessage(1, 2, payload))
        ended = await bad.until(AttemptEnded)
        assert isinstance(ended, AttemptEnded)
        assert "unreadable event" in ended.reason
        assert "more than 131072 lists and maps" in ended.reason
        await good.line.say(EventMessage(2, 2, encode_event(0)))
        await good.until_taken(2)
        assert half.honest.taken[0] == 1
        assert half.victim.events == 0
        assert not half.faults


def test_the_largest_event_is_within_the_limits_of_both_ends() -> None:  # H62
    event = decode_event(the_largest_event())
    assert len(event) == MAPS_MAX + 1
