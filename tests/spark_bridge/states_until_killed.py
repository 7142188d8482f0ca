# SPDX-License-Identifier: Apache-2.0

"""A driver with states in files that is killed: ``python -m tests.spark_bridge.states_until_killed PLACE CALL``.

It takes checkpoints and savepoints, and kills itself before its CALLth change of a file below PLACE. It prints the
number of the changes when it comes to its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.spark_bridge.states_in_files import an_application

_CHANGES = frozenset({"os.remove", "os.rename", "os.link", "os.mkdir", "os.rmdir"})


def kill_at(call: int) -> list[int]:
    """Kill this process before the change of this number; the list has how many there were."""
    count = [0]

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event in _CHANGES or writes:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    return count


async def run(place: Path, call: int) -> None:
    async with an_application(place, parallelism=2, retained=1) as application:
        count = kill_at(call)
        running, finishing = await application.tasks_of(0, 1)
        finishing.write(f"last-{application.epoch}")
        finishing.end()
        await application.settle()
        application.finish(finishing)
        for number in range(4):
            running.write("same", b"%d-%d" % (application.epoch, number))
            running.write(f"other-{application.epoch}-{number}")
            await application.completed_checkpoint()
            await application.settle()
            running.remove(f"other-{application.epoch}-{number}")
        await application.savepoint()
        await application.completed_checkpoint()
        await application.settle()
        print(count[0], flush=True)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
