# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.fuzz.vanisher``: a driver that attaches step by step, and tells each step, until it is killed.

It reads one line of JSON with the settings. ``until`` is the step after which it does nothing more.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from protocol.wire.keys import Key, KeyRing, Purpose
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.standalone.control_client import ControlAddress
from spark_bridge.standalone.secret_file import read_secret
from tests.fuzz.line import Line
from tests.fuzz.played_driver import PlayedDriver, PlayedJvm

BEFORE_ITS_OPERATORS = ("connected", "attached", "reached", "greeted", "held", "joined")
STEPS = (*BEFORE_ITS_OPERATORS, "started", "at work")
"""It has a connection for its requests; an answer to its first one; a connection for its JVM; the sidecar knows this
JVM, and sends a command; that is answered, and another comes; both are; it has its operators; its tasks run."""


class VanishingJvm(PlayedJvm):
    """Does nothing more after one of the steps from "greeted" to "joined"."""

    def __init__(self, address: tuple[str, int], key: Key, pin: bytes, until: str) -> None:
        super().__init__(address, key, pin)
        self._until = until
        self._commands = 0

    def _carry_out(self, body: bytes) -> bytes:
        self._commands += 1
        if (self._until, self._commands) in (("greeted", 1), ("held", 2)):
            tell(self._until, self._until)
        elif (self._until, self._commands) == ("joined", 2):
            asyncio.get_running_loop().call_soon(tell, "joined", self._until)  # after it has sent the answer
        return super()._carry_out(body)


def tell(step: str, until: str) -> None:
    """Say that a step is done. After the last one, block the loop: nothing happens any more, and nothing is closed."""
    print(step, flush=True)
    if step == until:
        sys.stdin.read()


async def main(settings: dict[str, Any]) -> None:
    until, keys = settings["until"], KeyRing(read_secret(settings["secret_file"]))
    pin = certificate_digest(settings["tls"], keys)
    address = ControlAddress("127.0.0.1", settings["port"], keys, pin)
    driver = PlayedDriver(address)
    if until in BEFORE_ITS_OPERATORS:
        line = await Line.open((address.host, address.port), pin)
        tell("connected", until)
        await line.close()
        place = await driver.ask("attach")
        tell("attached", until)
        relay = (address.host, place["relay_port"])
        line = await Line.open(relay, pin)
        tell("reached", until)
        await line.close()
        await VanishingJvm(relay, keys.key(Purpose.RELAY, driver.identity), pin, until).run()
    async with driver:
        tell("started", until)
        await driver.start_tasks()
        await driver.until_at_work()
        tell("at work", until)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))
