# SPDX-License-Identifier: Apache-2.0

"""A sidecar's process survives drivers that die, freeze or leave at any moment, and serves the next one (H48).

The drivers have the secret: strangers are the subject of ``test_three_ports``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest

from tests.fuzz.played_driver import PATIENCE_S, PlayedDriver
from tests.fuzz.processes import running_process
from tests.fuzz.three_ports import BesiegedSidecar, besieged_sidecar
from tests.fuzz.vanisher import STEPS

AWAITED = ("attached", "reached")
"""A driver whose JVM has not joined yet is waited for, for some seconds."""


async def works(sidecar: BesiegedSidecar) -> None:
    """Attach an honest driver, which runs a job whose events all come once and in order."""
    async with PlayedDriver(sidecar.address) as driver:
        await driver.start_tasks()
        await driver.until_at_work()
        await driver.finish_tasks()


@asynccontextmanager
async def vanishing(sidecar: BesiegedSidecar, until: str, how: signal.Signals) -> AsyncIterator[int]:
    """A driver in a separate process, which gets the signal after this step; its process id."""
    async with running_process(sys.executable, "-m", "tests.fuzz.vanisher") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        settings = {
            "until": until,
            "secret_file": str(sidecar.secret_file),
            "tls": bool(sidecar.pin),
            "port": sidecar.ports["control"][1],
        }
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        with anyio.fail_after(PATIENCE_S):
            while (step := (await process.stdout.readline()).decode().strip()) != until:
                assert step in STEPS, f"the driver has ended at {step!r}"
        os.kill(process.pid, how)
        yield process.pid


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "tls"])
def test_drivers_that_die_at_any_step_leave_a_sidecar_that_serves_the_next_one(*, tls: bool) -> None:  # H48
    async def main() -> None:
        async with besieged_sidecar(Random(), tls=tls) as sidecar:
            for step in STEPS:
                if tls or step not in AWAITED:
                    async with vanishing(sidecar, step, signal.SIGKILL):
                        await works(sidecar)
            await works(sidecar)

    anyio.run(main)


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_drivers_that_freeze_at_any_step_are_replaced_and_do_no_harm_when_they_go_on(*, tls: bool) -> None:  # H48
    async def main() -> None:
        async with besieged_sidecar(Random(), tls=tls) as sidecar:
            for step in STEPS:
                async with vanishing(sidecar, step, signal.SIGSTOP) as frozen, PlayedDriver(sidecar.address) as driver:
                    await driver.start_tasks()
                    await driver.until_at_work()
                    os.kill(frozen, signal.SIGCONT)
                    await driver.until_at_work(events=100)
                    await driver.finish_tasks()
            await works(sidecar)

    anyio.run(main)


@pytest.mark.long
def test_the_process_outlives_a_driver_that_freezes_just_after_it_has_joined() -> None:  # H48
    """Nobody else comes, until the sidecar has given it up."""

    async def main() -> None:
        async with besieged_sidecar(Random()) as sidecar, vanishing(sidecar, "greeted", signal.SIGSTOP):
            await sidecar.until(lambda: "driver lost" in sidecar.log(), "that the driver is given up")
            await works(sidecar)

    anyio.run(main)
