# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.load.strangers``: the strangers of ``tests.fuzz`` at the port for tasks, until the input ends.

With ``insiders``, they have the key of the operator ``victim``, and do their worst from the first command on. ``kind``:
the only attack, by its name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random
from typing import Any

from benchmarks.many_endpoints import allow_files, say
from protocol.wire.keys import KeyRing
from tests.fuzz.attackers import INSIDERS, STRANGERS, TLS_STRANGERS, Intruder
from tests.fuzz.below import BELOW
from tests.load.checker import Tally

PAUSE_S = 0.05
"""Each stranger's pause between two attacks."""
FILES = 4096


async def lay_siege(task: dict[str, Any]) -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    tally = Tally()
    intruders: list[Intruder] = []
    connections_before = 0
    # The right keys are used only to be nearly right.
    address, keys = (task["host"], task["port"]), KeyRing(bytes.fromhex(task["secret"]))
    pin = bytes.fromhex(task["pin"])
    attacks = (*STRANGERS, *(TLS_STRANGERS if pin else ()))
    if task.get("insiders"):
        attacks = (*INSIDERS, *(BELOW if pin else ()))
        await commands.readline()
        say(begun=True)
    attacks = tuple(one for one in attacks if one.__name__ == task.get("kind", one.__name__))

    def connections() -> int:
        return connections_before + sum(len(lines) for each in intruders for lines in each.lines.values())

    async def stranger(intruder: Intruder) -> None:
        nonlocal connections_before
        while True:
            attack = intruder.random.choice(attacks)
            try:
                await attack(intruder)
            except (AssertionError, TimeoutError) as error:
                tally.fault(f"a stranger, {attack.__name__}: {error!r}")
            await asyncio.sleep(PAUSE_S)
            connections_before += sum(map(len, intruder.lines.values()))
            intruder.lines.clear()

    random = Random(task["seed"])
    async with asyncio.TaskGroup() as group:
        intruders += [Intruder(Random(random.random()), address, keys, pin=pin) for _ in range(task["count"])]
        strangers = [group.create_task(stranger(intruder)) for intruder in intruders]
        while await commands.readline():
            say(connections=connections(), faults=tally.faults, stories=tally.stories)
        for each in strangers:
            each.cancel()


def main() -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as commands:
        task = json.loads(commands.readline())
    allow_files(FILES)
    asyncio.run(lay_siege(task))


if __name__ == "__main__":
    main()
