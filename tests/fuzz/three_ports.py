# SPDX-License-Identifier: Apache-2.0

"""Target: the ports of a sidecar in a separate process, and ``python -m tests.fuzz.three_ports``.

The process is ``headgate sidecar``: its ports are for drivers' requests, for the driver's JVM, and for tasks.
A fourth one shows the status while a driver is attached.
The command lays a crowd of strangers around all of them, and prints how long an honest driver needs to attach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio

from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.standalone.control_client import ControlAddress
from spark_bridge.standalone.secret_file import read_secret
from tests.fuzz.attackers import INSIDERS, STRANGERS, Attack, Intruder, register_nonsense
from tests.fuzz.driver_half import HONEST, PARALLELISM, HonestCoordinator
from tests.fuzz.line import Line
from tests.fuzz.played_driver import PATIENCE_S, PlayedDriver
from tests.fuzz.port_attackers import ATTACHED, CONTROL_INSIDERS
from tests.fuzz.processes import running_process
from tests.fuzz.siege import MEMORY_GROWTH_BYTES_MAX, TLS_ATTACKS, run
from tests.fuzz.status_attackers import GOOD, STATUS_ATTACKS
from tests.fuzz.target import Target

_NAME = "tests.fuzz.three_ports"
FILES_MAX = 1024
_LISTEN = "0A"
"""The state in Linux's table of connections."""
PORT_NAMES = ("control", "relay", "tasks")
_BELOW_THE_SYSTEMS_OWN = range(20_000, 32_000)
"""A connection that is opened gets a port above these, which would be taken when the sidecar listens again."""


class _Coordinator(HonestCoordinator):
    """Tells the driver what it has seen."""

    async def handle_client_request(self, payload: Any) -> Any:
        return {"taken": list(self.taken.values()), "faults": self.faults}


async def factory(sidecar: SidecarRuntime) -> None:
    """The operator of the besieged sidecar."""
    await sidecar.coordinate(HONEST, _Coordinator(), parallelism=PARALLELISM[HONEST])


class BesiegedSidecar:
    """A running process, as seen from outside."""

    def __init__(self, process: Process, folder: Path, ports: tuple[int, int, int], *, tls: bool) -> None:
        self._process = process
        self._folder = folder
        self.secret_file = folder / "secret"
        self.keys = KeyRing(read_secret(self.secret_file))
        self.pin = certificate_digest(tls, self.keys)
        self.ports = dict(zip(PORT_NAMES, (("127.0.0.1", port) for port in ports), strict=True))
        self.status_address = ("127.0.0.1", ports[-1] + 1)
        self.address = ControlAddress(*self.ports["control"], self.keys, self.pin)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def files(self) -> int:
        """The number of files that the process has open."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def open_files(self) -> list[str]:
        """What each of them is; of a connection, the ports of both ends and its state, as Linux writes it."""
        connections = _connections()
        found = []
        for name in os.listdir(f"/proc/{self._process.pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                link = os.readlink(f"/proc/{self._process.pid}/fd/{name}")
                found.append(connections.get(link, link))
        return sorted(found)

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def files_at_rest(self) -> int:
        """Return the number of its open files, once it has closed the last driver's application and awaits a driver.

        In between it listens at the port for requests alone, and has one file less.
        """
        _, relay, tasks = (port for _, port in self.ports.values())
        await self.until(lambda: _listened_at() & {relay, tasks} == {relay}, "that it awaits a driver")
        return self.files

    def log(self) -> str:
        """What it has logged."""
        return (self._folder / "log").read_text()

    def errors(self) -> list[str]:
        """The lines of its log that name a defect, or the loop's."""
        lines = self.log().splitlines()
        return [line for line in lines if "[error" in line or "[critical" in line or "Traceback" in line]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return when ``condition`` is true."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():  # noqa: ASYNC110 - it is about another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{what} has not come to pass; these files are open: {self.open_files()}") from None


def _connections() -> dict[str, str]:
    """This machine's connections over IPv4: the link that a process has to each, and its addresses and its state."""
    found = {}
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, own, other, state, _, _, _, _, _, inode, *_ = line.split()
        found[f"socket:[{inode}]"] = f"{_port(own)} to {_port(other)}, {state}"
    return found


def _port(address: str) -> int:
    return int(address.split(":")[1], 16)


def _listened_at() -> set[int]:
    """The ports at which this machine's processes listen, over IPv4."""
    listening = [one.split(" to ")[0] for one in _connections().values() if one.endswith(f", {_LISTEN}")]
    return set(map(int, listening))


@asynccontextmanager
async def besieged_sidecar(random: Random, *, tls: bool = False, files_max: int = FILES_MAX) -> AsyncIterator[Any]:
    """Run ``headgate sidecar`` with so many files. It must be alive at the end, with no error in its log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = random.randrange(_BELOW_THE_SYSTEMS_OWN.start, _BELOW_THE_SYSTEMS_OWN.stop)
        ports = (first, first + 1, first + 2)
        command = [
            *("sh", "-c", f'ulimit -n {files_max} && exec "$@"', "sh"),
            *(sys.executable, "-m", "headgate", "sidecar", f"{_NAME}:factory"),
            *("--secret-file", str(folder / "secret"), "--port", str(first), "--status-port", str(first + 3)),
            *(["--tls"] if tls else []),
        ]
        with (folder / "log").open("w") as log:
            async with running_process(*command, stderr=log) as process:
                assert process.stdout is not None
                async with asyncio.timeout(PATIENCE_S):
                    told = await process.stdout.readline()
                assert b"listening" in told, (folder / "log").read_text()
                sidecar = BesiegedSidecar(process, folder, ports, tls=tls)
                try:
                    yield sidecar
                except BaseException as error:
                    error.add_note(f"the sidecar's log ends with: {(folder / 'log').read_text()[-2000:]}")
                    raise
                assert sidecar.is_alive, (folder / "log").read_text()[-2000:]
                assert not sidecar.errors(), sidecar.errors()[:5]
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    assert await process.wait() == 0, "the sidecar did not end well"


class Crowd:
    """The strangers' process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.opened = dict.fromkeys(PORT_NAMES, 0)

    async def watch(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.opened = json.loads(line)


@asynccontextmanager
async def crowd_around(sidecar: BesiegedSidecar, per_s: float | None = None) -> AsyncIterator[Crowd]:
    """Let so many strangers come to each port in a second, or as many as possible, until the block is left."""
    async with running_process(sys.executable, "-m", "tests.fuzz.crowd") as process:
        assert process.stdin is not None
        settings = {"ports": sidecar.ports, "tls": bool(sidecar.pin), "per_s": per_s}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        crowd = Crowd(process)
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.watch())
            yield crowd
            assert process.returncode is None, "the strangers have ended"
            process.stdin.close()


async def attach_in_a_crowd(
    random: Random,
    strangers: int,
    *,
    tls: bool,
    attaches: int = 3,
    files_max: int = FILES_MAX,
    per_s: float | None = None,
) -> dict[str, Any]:
    """Attach a driver, several times, while at least so many strangers come to each port; return the figures."""
    async with besieged_sidecar(random, tls=tls, files_max=files_max) as sidecar:
        events = await _serve_once(sidecar, [])
        files = await sidecar.files_at_rest()
        times: list[tuple[float, float]] = []
        files_most, attached = files, 0
        async with crowd_around(sidecar, per_s) as crowd:
            while attached < attaches or min(crowd.opened.values()) < strangers:
                events += await _serve_once(sidecar, times)
                attached += 1
                files_most = max(files_most, sidecar.files)
        events += await _serve_once(sidecar, [])
        await sidecar.files_at_rest()
        await sidecar.until(lambda: sidecar.files <= files, f"that {files} files are open again")
        return {"opened": crowd.opened, "times": times, "events": events, "files_most": files_most}


async def _serve_once(sidecar: BesiegedSidecar, times: list[tuple[float, float]]) -> int:
    """Attach a driver, run a job, detach. Returns the number of events, none of which was lost or came twice.

    Adds to ``times`` how long it took to attach, and then until each of the tasks had sent and received events.
    """
    began_s = time.monotonic()
    async with PlayedDriver(sidecar.address) as driver:
        attached_s = time.monotonic()
        await driver.start_tasks()
        await driver.until_at_work()
        times.append((attached_s - began_s, time.monotonic() - attached_s))
        return await driver.finish_tasks()


# --- the siege of the three ports ---------------------------------------------------------------------------------

_PURPOSES = {"control": Purpose.CONTROL, "relay": Purpose.RELAY, "tasks": Purpose.TASKS}
READER_TRIES, READER_PAUSE_S = 5, 0.05
_SPOILT_FRAMES = (b"\xff" * 4, b"\x00" * 4, b"\x00\x00\x00\x03abc")
CONCURRENT = 12
"""The number of concurrent attacks."""


async def lay_siege_to_ports(random: Random, rounds: int, *, tls: bool) -> dict[str, int]:
    """Attack all ports of a sidecar, whose driver has tasks at work; return the figures. Raises ``AssertionError``."""
    async with besieged_sidecar(random, tls=tls) as sidecar:
        await _serve_once(sidecar, [])
        files, resident_bytes = await sidecar.files_at_rest(), sidecar.resident_bytes
        slots, lines = asyncio.Semaphore(CONCURRENT), dict[str, list[range]]()

        async def one(attack: Attack, port: str) -> None:
            address, purpose, pin = sidecar.status_address, Purpose.TASKS, b""
            if port != "status":
                address, purpose, pin = sidecar.ports[port], _PURPOSES[port], sidecar.pin
            intruder = Intruder(Random(random.random()), address, sidecar.keys, lines, pin, purpose)
            async with slots:
                try:
                    await attack(intruder)
                except Exception as error:
                    error.add_note(f"in the attack {attack.__name__} at the port for {port}")
                    raise

        async with PlayedDriver(sidecar.address, ATTACHED) as driver:
            await driver.start_tasks()
            await driver.until_at_work()
            attacks = _attacks(tls=tls) * rounds
            random.shuffle(attacks)
            async with asyncio.TaskGroup() as readers:
                reading = readers.create_task(_read_status(sidecar))
                async with asyncio.TaskGroup() as group:
                    for attack, port in attacks:
                        group.create_task(one(attack, port))
                    for spoilt in _SPOILT_FRAMES:
                        await driver.jvm.spoil(spoilt)
                reading.cancel()
            events = await driver.finish_tasks()
        events += await _serve_once(sidecar, [])
        await sidecar.files_at_rest()
        await sidecar.until(lambda: sidecar.files <= files, f"that {files} files are open again")
        growth = sidecar.resident_bytes - resident_bytes
        assert growth <= MEMORY_GROWTH_BYTES_MAX, f"the process's memory has grown by {growth} bytes"
        connections = sum(map(len, lines.values()))
        return {"attacks": len(attacks) + len(_SPOILT_FRAMES), "connections": connections, "events": events}


async def _read_status(sidecar: BesiegedSidecar) -> None:
    """Be an honest reader of the status, again and again. A crowd may push it out now and then, but not for long."""
    pushed_out = 0
    while True:
        line = await Line.open(sidecar.status_address)
        try:
            await line.send(GOOD)
            answer = await line.until_closed()
        finally:
            await line.close()  # also if the siege ends meanwhile
        pushed_out = 0 if answer.startswith(b"HTTP/1.1 200 ") else pushed_out + 1
        assert pushed_out < READER_TRIES, f"the status port does not serve an honest reader: {answer[:300]!r}"
        await asyncio.sleep(READER_PAUSE_S)


def _attacks(*, tls: bool) -> list[tuple[Attack, str]]:
    """Every attack at every port where it makes sense."""
    strangers = (*STRANGERS, *TLS_ATTACKS) if tls else STRANGERS
    return [
        *((attack, port) for attack in strangers for port in PORT_NAMES),
        *((attack, "control") for attack in CONTROL_INSIDERS * 4),
        *((attack, "tasks") for attack in INSIDERS if attack not in _NOT_HERE),
        *((attack, "status") for attack in STATUS_ATTACKS * 4),
    ]


_NOT_HERE: tuple[Attack, ...] = (register_nonsense,)
"""Its task ids are those of the other siege."""


def _case(random: Random, *, tls: bool) -> None:
    figures = run(lambda: lay_siege_to_ports(random, 1, tls=tls))
    print(", ".join(f"{name} {count}" for name, count in figures.items()) + ", lost 0, doubled 0", flush=True)


TARGETS = (
    Target("ports", "the three ports of a sidecar's process", partial(_case, tls=False), slow=True),
    Target("ports-tls", "the same over TLS, and at it", partial(_case, tls=True), slow=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--strangers", type=int, default=20_000, help="at each port (default: 20000)")
    parser.add_argument("--attaches", type=int, default=20, help="how often a driver attaches (default: 20)")
    parser.add_argument("--files", type=int, default=FILES_MAX, help=f"of the sidecar (default: {FILES_MAX})")
    parser.add_argument("--per-second", type=float, help="strangers at each port (default: as many as possible)")
    parser.add_argument("--tls", action="store_true", help="encrypt all ports")
    options = parser.parse_args()
    figures = anyio.run(
        lambda: attach_in_a_crowd(
            Random(),
            options.strangers,
            tls=options.tls,
            attaches=options.attaches,
            files_max=options.files,
            per_s=options.per_second,
        )
    )
    print(f"strangers at each port: {figures['opened']}")
    print(f"open files: at most {figures['files_most']} of {options.files}")
    print(f"events: {figures['events']}, lost 0, doubled 0")
    for what, column in zip(
        ("attached", "tasks at work, after that"), zip(*figures["times"], strict=True), strict=True
    ):
        times_s = sorted(column)
        p99_s = times_s[len(times_s) * 99 // 100]
        p50_s = statistics.median(times_s)
        print(f"{what}: {len(times_s)} times, p50 {p50_s:.3f} s, p99 {p99_s:.3f} s, max {times_s[-1]:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
