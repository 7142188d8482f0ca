# SPDX-License-Identifier: Apache-2.0

"""An honest driver without Spark: its requests, its JVM and its tasks, at the three ports of a sidecar's process.

The requests and the tasks are made by the product's own clients. The JVM is played: it connects again as the listener
does, sends facts of one job, and answers each command.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from protocol.wire.framing import frame
from protocol.wire.handshake import NONCE_BYTES
from protocol.wire.keys import IDENTITY_BYTES, Key, Purpose, identity_of
from protocol.wire.messages import RestoreMode
from spark_bridge.common.endpoint import StateStorage, TaskEndpoint
from spark_bridge.standalone.control_client import ControlAddress, ask
from tests.fuzz.driver_half import HONEST, PARALLELISM, STAGES
from tests.fuzz.honest import HonestTask
from tests.fuzz.line import Line
from tests.spark_bridge.test_relay_records import record, text

PATIENCE_S = 300.0
FIRST_PAUSE_S, PAUSE_MAX_S = 0.025, 2.0


class PlayedJvm:
    """Plays the listener in the driver's JVM. ``faults``: what the sidecar asked for and must not."""

    def __init__(self, address: tuple[str, int], key: Key, pin: bytes) -> None:
        self.faults: list[str] = []
        self.connections = 0
        self._address = address
        self._key = key
        self._pin = pin
        self._records: list[bytes] = []
        self._line: Line | None = None

    async def run(self) -> None:
        """Stay connected until cancelled."""
        failures = 0
        while True:
            connections = self.connections
            with suppress(OSError, TimeoutError):
                line = await Line.open(self._address, self._pin)
                try:
                    await self._serve(line)
                finally:
                    self._line = None
                    await line.close()
            failures = 0 if self.connections > connections else failures + 1
            await asyncio.sleep(min(PAUSE_MAX_S, FIRST_PAUSE_S * 2 ** min(failures, 10)))

    async def _serve(self, line: Line) -> None:
        """Answer commands until the connection ends, or nothing is asked for a long time."""
        await line.greet(self._key, secrets.token_bytes(NONCE_BYTES))
        if not line.authenticated:
            return
        self.connections += 1
        self._line = line
        await line.send(b"".join(self._records))  # those that have arrived are skipped by their numbers
        while bodies := await line.frames():
            for body in bodies:
                await line.send(frame(struct.pack(">q", 0) + self._carry_out(body)))

    async def tell(self, *bodies: bytes) -> None:
        """Send facts, or keep them until the connection stands."""
        frames = [
            frame(struct.pack(">q", number) + body) for number, body in enumerate(bodies, start=len(self._records) + 1)
        ]
        self._records += frames
        if self._line is not None:
            await self._line.send(b"".join(frames))

    async def spoil(self, data: bytes) -> None:
        """Send bytes that are not a frame, so that the sidecar ends the connection and this one comes back."""
        before = self.connections
        while self._line is None:  # noqa: ASYNC110 - another task connects
            await asyncio.sleep(FIRST_PAUSE_S)
        await self._line.send(data)
        async with asyncio.timeout(PATIENCE_S):
            while self.connections == before:  # noqa: ASYNC110 - as above
                await asyncio.sleep(FIRST_PAUSE_S)

    def _carry_out(self, body: bytes) -> bytes:
        operation, request_id = struct.unpack_from(">Bq", body)
        arguments = body[9:]
        match operation:  # see jvm_commands
            case 3:
                return _status(request_id, arguments)
            case 5:  # the active stages: none
                return record(12, struct.pack(">qI", request_id, 0))
            case 6:  # a look at a stage
                return record(13, struct.pack(">qiIII", request_id, 0, 0, 0, 0))
            case 1 | 2:  # a task or a job
                self.faults.append(f"the sidecar asked for a kill: {body!r}")
        return record(10, struct.pack(">q?", request_id, True), text(""))


def _status(request_id: int, arguments: bytes) -> bytes:
    """Every job and every task is running."""
    (job_count,) = struct.unpack_from(">I", arguments)
    jobs = struct.unpack_from(f">{job_count}i", arguments, 4)
    (task_count,) = struct.unpack_from(">I", arguments, 4 + 4 * job_count)
    tasks = struct.unpack_from(f">{task_count}q", arguments, 8 + 4 * job_count)
    answer = struct.pack(">qI", request_id, job_count)
    answer += b"".join(struct.pack(">i?", job, True) for job in jobs) + struct.pack(">I", task_count)
    stage = STAGES[HONEST]
    return record(11, answer, *(struct.pack(">qBii", task, 0, stage, task - 1) for task in tasks))


class PlayedDriver:
    """``async with PlayedDriver(address) as driver``: attaches, and detaches. One with a ``name`` has its identity."""

    def __init__(self, address: ControlAddress, name: str = "") -> None:
        self.identity = identity_of(name) if name else secrets.token_bytes(IDENTITY_BYTES)
        self.jvm: PlayedJvm
        self._address = address
        self._endpoint: TaskEndpoint
        self._connected: asyncio.Task[None] | None = None
        self._tasks: list[HonestTask] = []

    async def ask(self, method: str, argument: Any = None) -> Any:
        """See ``control_client.ask``."""
        call = partial(ask, self._address, self.identity, method, argument)
        return await asyncio.to_thread(call, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)

    async def __aenter__(self) -> PlayedDriver:
        address = self._address
        place = await self.ask("attach")
        key = address.keys.key(Purpose.RELAY, self.identity)
        self.jvm = PlayedJvm((address.host, place["relay_port"]), key, address.certificate_sha256)
        self._connected = asyncio.get_running_loop().create_task(self.jvm.run())
        try:
            description = (await self.ask("operators"))[HONEST]
        except BaseException:
            self._connected.cancel()
            raise
        assert (description.pop("stages"), description.pop("parts")) == ([], {})
        states = description.pop("state_storage")
        self._endpoint = TaskEndpoint(
            **{**description, "mode": RestoreMode(description["mode"])},
            state_storage=states and StateStorage(options=None, **states),
            key=address.keys.task_key(HONEST),
            certificate_sha256=address.certificate_sha256,
        )
        return self

    async def start_tasks(self) -> None:
        """Start a job with one task for each subtask. They count, until ``finish_tasks``."""
        stage, count = STAGES[HONEST], PARALLELISM[HONEST]
        started = [
            record(5, struct.pack(">qiiii?", subtask + 1, stage, 0, subtask, 0, False), text("1"), text("here"))
            for subtask in range(count)
        ]
        await self.jvm.tell(
            record(1, struct.pack(">iIi", 1, 1, stage)),
            record(3, struct.pack(">iii?i", stage, 0, count, False, count)),
            *started,
        )
        self._tasks = [HonestTask(self._endpoint, subtask + 1, subtask, stage) for subtask in range(count)]

    async def reading(self) -> dict[str, Any]:
        """What the coordinator has seen."""
        reading: dict[str, Any] = await self.ask("request", [HONEST, "reading", PATIENCE_S, None, ""])
        return reading

    async def until_at_work(self, events: int = 10) -> None:
        """Return when the coordinator has taken some events of each task."""
        async with asyncio.timeout(PATIENCE_S):
            while min((await self.reading())["taken"]) < events:  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(FIRST_PAUSE_S)

    async def finish_tasks(self) -> int:
        """End the tasks; return the number of events, each of which has come once, in order, and gone back."""
        tasks, self._tasks = self._tasks, []
        sent = await asyncio.gather(*(asyncio.to_thread(task.finish) for task in tasks))
        reading = await self.reading()
        assert reading["taken"] == sent, f"events are missing, or came twice: {sent} were sent, {reading['taken']} came"
        faults = reading["faults"] + self.jvm.faults
        assert not faults, faults
        stage = STAGES[HONEST]
        ended = [
            record(6, struct.pack(">qiiiiB", subtask + 1, stage, 0, subtask, 0, 0), text(""))
            for subtask in range(len(sent))
        ]
        await self.jvm.tell(
            *ended,
            record(4, struct.pack(">ii?", stage, 0, False), text("")),
            record(2, struct.pack(">i?", 1, True), text("")),
        )
        return sum(sent)

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.stop()
        if self._connected is not None:
            self._connected.cancel()
            with suppress(asyncio.CancelledError):
                await self._connected
        if exception is None:
            await self.ask("detach")
