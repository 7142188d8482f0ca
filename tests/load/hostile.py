# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.load.hostile``: one kind of hostile peer at a time, for so many seconds.

It reads lines of JSON: first the ports and the secret, then commands. After each it answers with how many connections
or messages there were.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.many_endpoints import allow_files, say
from protocol.errors import EventEncodeError
from protocol.wire.codec import encode_event
from protocol.wire.keys import KeyRing
from protocol.wire.messages import Confirm, EventMessage, Opened, RequestMessage, RestoreMode
from spark_bridge.subtask.parts import COUNTERS
from tests.fuzz.attackers import INSIDERS, STRANGERS, TLS_STRANGERS, Attack, Intruder
from tests.fuzz.below import BELOW
from tests.fuzz.hostile_parts import PARTS, Part, name_of_part, nearly
from tests.fuzz.hostile_tasks import Slot, registered
from tests.fuzz.line import Line
from tests.fuzz.ring_port import besiege_ring
from tests.fuzz.status_attackers import STATUS_ATTACKS

PAUSE_S = 0.01
"""Each attacker's pause between two attacks."""
COUNT = 8
"""So many attack at the same time."""
FILES = 4096
NICENESS = 5
"""On a cluster, the hostile process would not take the processor from the sidecar."""
TOGETHER = 5
KINDS: Mapping[str, tuple[Attack, ...]] = {
    "stranger": STRANGERS,
    "insider": INSIDERS,
    "stranger with TLS": TLS_STRANGERS,
    "below TLS": BELOW,
    "status port": STATUS_ATTACKS,
}


async def attack(command: dict[str, Any], peers: dict[str, Any], keys: KeyRing) -> int:
    """Let several peers attack in this way until the time is over; return how many connections they had."""
    (one,) = (each for each in KINDS[command["kind"]] if each.__name__ == command["name"])
    address = tuple(peers["status" if command["kind"] == "status port" else "tasks"])
    random = Random(command["seed"])
    intruders = [
        Intruder(Random(random.random()), (address[0], address[1]), keys, pin=bytes.fromhex(peers["pin"]))
        for _ in range(COUNT)
    ]
    times = 0

    async def again_and_again(intruder: Intruder) -> None:
        nonlocal times
        while True:
            with suppress(AssertionError, TimeoutError, OSError):  # the benchmark looks at the other side
                await one(intruder)
            times += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(again_and_again(intruder)) for intruder in intruders]
        await asyncio.sleep(command["seconds"])
        for task in tasks:
            task.cancel()
    return max(times, sum(len(lines) for intruder in intruders for lines in intruder.lines.values()))


async def hostile_task(command: dict[str, Any], peers: dict[str, Any], keys: KeyRing) -> int:
    """Be a task that says anything to its part, until the time is over or it is ended; return how much was said."""
    (part,) = (each for each in PARTS if each.name == command["part"])
    random, slot = Random(command["seed"]), Slot(*command["slot"])
    address = peers["tasks"]
    intruder = Intruder(random, (address[0], address[1]), keys, pin=bytes.fromhex(peers["pin"]))
    until = time.monotonic() + command["seconds"]
    line = None
    with suppress(TimeoutError):
        async with asyncio.timeout(command["seconds"]):
            line = await registered(intruder, slot, command["operator"], RestoreMode.named(part.mode))
    if line is None:
        return 0
    await line.say(Opened(slot.task_attempt_id, 1))
    seq = 1
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(max(0.1, until - time.monotonic())):
            heard = True
            while heard:
                for message in _said(part, random, slot.task_attempt_id, seq):
                    await line.say(message)
                    seq += 1
                heard = await _heard(line, seq)
    line.reset()
    await line.close()
    return seq


def _said(part: Part, random: Random, task: int, seq: int) -> list[EventMessage | RequestMessage]:
    said: list[EventMessage | RequestMessage] = []
    name = name_of_part(part)
    index = ("", COUNTERS, name).index(name)  # in the operator's table, which has at most one part more
    asks = bool(part.requests) and random.random() < 0.5
    make = random.choice(part.requests if asks else part.events)
    while len(said) < TOGETHER:
        value = make(random)
        value = nearly(random, value) if random.random() < 0.02 else value
        with suppress(EventEncodeError):
            payload, number = encode_event(value), seq + len(said) + 1
            said.append(
                RequestMessage(task, number, number, payload, index) if asks
                else EventMessage(task, number, payload, index)
            )  # fmt: skip
    return said


async def _heard(line: Line, seq: int) -> bool:
    """Wait until everything is confirmed, as an honest task would; False if the driver has ended the connection."""
    while messages := await line.messages():
        if any(isinstance(one, Confirm) and one.seq >= seq for one in messages):
            return True
    return False


async def ring(command: dict[str, Any]) -> int:
    """Strangers at the port of a member of a group; this process has its members, too."""
    until, times = time.monotonic() + command["seconds"], 0
    while time.monotonic() < until:
        await besiege_ring(Random(command["seed"] + times), 8)
        times += 8
    return times


async def serve(peers: dict[str, Any]) -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    keys = KeyRing(bytes.fromhex(peers["secret"]))
    while line := await commands.readline():
        command = json.loads(line)
        if "part" in command:
            count = await hostile_task(command, peers, keys)
        elif command["kind"] == "ring":
            count = await ring(command)
        else:
            count = await attack(command, peers, keys)
        say(count=count)


def main() -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as commands:
        peers = json.loads(commands.readline())
    allow_files(FILES)
    os.nice(NICENESS)
    asyncio.run(serve(peers))


if __name__ == "__main__":
    main()
