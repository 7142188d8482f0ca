# SPDX-License-Identifier: Apache-2.0

"""Target: the server and everything behind it, under attack, while honest tasks continue their work.

The driver's half is a separate process (``tests.fuzz.besieged``); the attackers and the honest tasks are here. Honest
tasks must lose nothing and receive nothing twice, and a new one must still be accepted. The process must stay within
its limits of memory and files, and have none left over in the end. Its log must have one line for each connection at
fault.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

from protocol.wire.keys import KeyRing
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.subtask import TaskEndpoint
from tests.fuzz.attackers import INSIDERS, STRANGERS, TLS_STRANGERS, Attack, Intruder
from tests.fuzz.below import BELOW
from tests.fuzz.driver_half import HONEST, PARALLELISM, STAGES, VICTIM
from tests.fuzz.honest import HonestTask
from tests.fuzz.hostile_tasks import HOSTILE_TASKS, HostileTask, Slot
from tests.fuzz.processes import running_process
from tests.fuzz.target import Target

PATIENCE_S = 120.0
FILES_MAX = 512
UNAUTHENTICATED_MAX = 64
SERVER = {
    "authenticate_timeout_s": 1.0,
    "close_timeout_s": 1.0,
    "unauthenticated_max": UNAUTHENTICATED_MAX,
    "write_buffer_bytes_max": 2 * 2**20,
    "log_lines_max": 10**9,  # the line of each connection is looked for
}
# The attackers make it hold read and write buffers of each connection, each hostile task's window, the data
# sent to that task, and snapshots. The rest is memory that the allocator does not return.
MEMORY_GROWTH_BYTES_MAX = 128 * 2**20
CONCURRENT = 12
"""The number of concurrent attacks, those of hostile tasks not included: they have one subtask each."""
TLS_ATTACKS = (*TLS_STRANGERS, *BELOW)


class Besieged:
    """The driver's half, as seen from this process."""

    def __init__(self, process: Process, secret: bytes, address: tuple[str, int], *, tls: bool) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self.secret = secret
        self.keys = KeyRing(secret)
        self.address = address
        self.pin = certificate_digest(tls, self.keys)
        self.log: list[dict[str, Any]] = []
        self._task_ids = iter(range(1, 2**31))

    async def ask(self, *command: Any) -> Any:
        async with self._lock, asyncio.timeout(PATIENCE_S):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            return await _answer(self._process)

    async def reading(self) -> dict[str, Any]:
        """Return the current figures. Lines logged since the last reading are added to ``log``."""
        reading: dict[str, Any] = await self.ask("reading")
        self.log += reading.pop("log")
        return reading

    async def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Return the first reading for which ``condition`` is true."""
        reading: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(reading := await self.reading()):  # noqa: ASYNC110 - it is in another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{what} has not come to pass: {reading}") from None
        return reading

    async def honest_task(self, subtask: int) -> HonestTask:
        task_attempt_id = await self.introduce(HONEST, subtask, 0)
        key, parallelism = self.keys.task_key(HONEST), PARALLELISM[HONEST]
        endpoint = TaskEndpoint(*self.address, key, HONEST, parallelism, certificate_sha256=self.pin)
        return HonestTask(endpoint, task_attempt_id, subtask, STAGES[HONEST])

    async def introduce(self, operator: str, subtask: int, attempt_number: int) -> int:
        task_attempt_id = next(self._task_ids)
        await self.ask("introduce", operator, task_attempt_id, subtask, attempt_number)
        return task_attempt_id


async def _answer(process: Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the driver's half has ended"
    return json.loads(line)


@asynccontextmanager
async def besieged(*, tls: bool = False, **server: float) -> AsyncIterator[Besieged]:
    """Run the driver's half in a separate process, which must end well. ``server`` are changes of ``SERVER``."""
    async with running_process(sys.executable, "-m", "tests.fuzz.besieged", limit=2**26) as process:
        assert process.stdin is not None
        secret = secrets.token_bytes(32)
        settings = {"secret": secret.hex(), "files_max": FILES_MAX, "server": SERVER | server, "tls": tls}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            host, port = await _answer(process)
        yield Besieged(process, secret, (host, port), tls=tls)
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0, "the driver's half did not end well"


# --- the siege ----------------------------------------------------------------------------------------------------


class Siege:
    """Attacks on one driver's half, and the checks after them."""

    def __init__(self, half: Besieged, random: Random) -> None:
        self.half = half
        self.random = random
        self.lines: dict[str, list[range]] = {}
        self._free_subtasks = list(range(PARALLELISM[VICTIM]))
        self._attempts: Counter[int] = Counter()
        self._others = asyncio.Semaphore(CONCURRENT)
        self._slots = asyncio.Semaphore(PARALLELISM[VICTIM])

    async def attack(self, attacks: Sequence[Attack | HostileTask]) -> None:
        """Run all attacks, some at a time, each with its own ``Random``; return when all are over."""
        async with asyncio.TaskGroup() as group:
            for number, attack in enumerate(attacks):
                random = Random(self.random.random())
                intruder = Intruder(random, self.half.address, self.half.keys, self.lines, self.half.pin)
                group.create_task(self._one(attack, intruder), name=f"{number} {attack.__name__}")

    async def _one(self, attack: Any, intruder: Intruder) -> None:
        try:
            if attack in HOSTILE_TASKS:
                async with self._slots:
                    await self._hostile_task(attack, intruder)
            else:
                async with self._others:
                    await attack(intruder)
        except Exception as error:
            error.add_note(f"in the attack {attack.__name__}")
            raise

    async def _hostile_task(self, task: HostileTask, intruder: Intruder) -> None:
        subtask = self._free_subtasks.pop()
        attempt_number = self._attempts[subtask]
        self._attempts[subtask] += 1
        task_attempt_id = await self.half.introduce(VICTIM, subtask, attempt_number)
        try:
            await self.half.ask("checkpoint", VICTIM)
            await task(intruder, Slot(task_attempt_id, subtask, attempt_number, PARALLELISM[VICTIM], STAGES[VICTIM]))
        finally:
            await self.half.ask("end", task_attempt_id)
            self._free_subtasks.append(subtask)

    def check_log(self) -> None:
        """Check for one line per connection at fault, at most one for any other, and no defect (H62)."""
        log = self.half.log
        defects = [
            line
            for line in log
            if line["log_level"] in ("error", "critical") or ("exception" in line and line["event"] != "request failed")
        ]
        assert not defects, f"the driver has a defect: {defects[0]}"
        for name, worth in self.lines.items():
            said = [line for line in log if line.get("peer") == name]
            expected = range(sum(each.start for each in worth), sum(each.stop - 1 for each in worth) + 1)
            assert len(said) in expected, f"{len(said)} lines, not {expected}, are in the log about {name}: {said}"
            assert all(line.get("why") for line in said)
        assert self.half.secret.hex() not in str(log)


async def lay_siege(
    random: Random, attacks: Sequence[Attack | HostileTask], *, tls: bool = False, **server: float
) -> dict[str, Any]:
    """Attack a driver's half with honest tasks on it; return the last reading. Raises ``AssertionError``."""
    async with besieged(tls=tls, **server) as half:
        siege = Siege(half, random)
        tasks = [await half.honest_task(subtask) for subtask in range(PARALLELISM[HONEST] - 1)]
        try:
            await half.until(lambda reading: min(reading["taken"][:-1]) > 10, "that honest tasks are at work")
            before = await half.reading()
            await siege.attack(attacks)
            tasks.append(await half.honest_task(PARALLELISM[HONEST] - 1))
            await half.until(lambda reading: reading["taken"][-1] > 10, "that a new task is taken")
            after = await half.until(_only_honest_are_left, "that nothing of the attackers is left")
        finally:
            ends = await asyncio.gather(*(asyncio.to_thread(task.finish) for task in tasks), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        last = await half.until(lambda reading: reading["taken"] == ends, "that each event has come once")
        assert not last["faults"], last["faults"]
        assert after["files"] <= before["files"] + 1 + 2, f"files were left open: {before} {after}"
        assert after["tasks"] <= before["tasks"] + 1 + PARALLELISM[VICTIM], f"tasks are left: {before} {after}"
        growth = after["resident_bytes"] - before["resident_bytes"]
        assert growth <= MEMORY_GROWTH_BYTES_MAX, f"the driver's memory has grown by {growth} bytes"
        siege.check_log()
        return last | {"growth": growth}


def _only_honest_are_left(reading: dict[str, Any]) -> bool:
    connections = reading["connections"]
    others = connections["unauthenticated"] + connections["unidentified"] + connections["closing"]
    honest = PARALLELISM[HONEST]
    return bool(others == 0 and connections["identified"] == honest and reading["gateways"] == honest)


def _case(random: Random, *, tls: bool) -> None:
    attacks: tuple[Attack | HostileTask, ...] = (*STRANGERS, *INSIDERS, *HOSTILE_TASKS, *(TLS_ATTACKS if tls else ()))
    chosen = [*attacks, *random.choices(attacks, k=60)]
    random.shuffle(chosen)
    run(lambda: lay_siege(random, chosen, tls=tls))


def run(siege: Callable[[], Awaitable[Any]]) -> Any:
    """Run the siege on its own loop. A group of failures is reported as its first one, which a replay needs."""

    async def besiege() -> Any:
        return await siege()

    try:
        return asyncio.run(besiege())
    except ExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None


TARGETS = (
    Target("siege", "every form of attack, at a real server and its operators", partial(_case, tls=False), slow=True),
    Target("siege-tls", "the same over TLS, and at it", partial(_case, tls=True), slow=True),
)
