# SPDX-License-Identifier: Apache-2.0

"""Every call of a driver to a sidecar in another process is interrupted by a Ctrl-C at every point (H160).

The sidecar's process and the driver's JVM are on the loop of another thread. The JVM is played.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark import SparkContext

from actors.coordination import OperatorCoordinator
from protocol.errors import EventEncodeError
from protocol.wire.keys import Key, KeyRing
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.standalone import attached
from spark_bridge.standalone.attached import AttachedSidecar
from spark_bridge.standalone.process import Ports, SidecarProcess
from tests.fuzz.driver_half import HONEST
from tests.fuzz.played_driver import PlayedJvm
from tests.spark_bridge.interrupting import Point, interrupted_at, python_handles_interrupts
from tests.spark_bridge.test_interrupted_calls import every_point, points
from tests.spark_bridge.test_relay_records import record, text

SECRET = b"the secret of this application!!"
JOB = 7

NOT_ASKED = object.__new__(SparkContext)
"""The driver of these tests starts no Spark."""


class Waiting(OperatorCoordinator):
    """Answers with the payload, and waits for what is called "wait" until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self.given_up = threading.Event()

    async def handle_client_request(self, payload: Any) -> Any:
        return bytes(payload) if isinstance(payload, int) else payload

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""


class Jvm(PlayedJvm):
    """Ends a job when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cancelled: list[int] = []

    def _carry_out(self, body: bytes) -> bytes:
        operation, _, job_id = struct.unpack_from(">Bqi", body.ljust(13, b"\0"))
        if operation != 2:
            return super()._carry_out(body)
        self.cancelled.append(job_id)
        self._ended = True
        return record(10, struct.pack(">q?", struct.unpack_from(">q", body, 1)[0], True), text(""))


class PlayedEnd:
    """A ``DriverEnd``. The JVM is on another thread."""

    lease_s: float | None = None
    lost = None
    portal: BlockingPortal

    def __init__(self, context: object) -> None:
        self.jvm: Jvm
        self._running: Any = None

    def check(self) -> None:
        pass

    def open(self, place: Any, key: Key, certificate_sha256: bytes, sidecar: Any) -> None:
        with interrupts_held_back():
            self.jvm = Jvm((place["at"], place["relay_port"]), key, certificate_sha256)
            self._running = self.portal.start_task_soon(self.jvm.run)

    def equip(self, endpoints: Any) -> None:
        pass

    def close(self) -> None:
        with interrupts_held_back():
            running, self._running = self._running, None
            if running is not None:
                running.cancel()

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        return nullcontext()


class Served:
    """The process, seen from outside."""

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal
        self.runtimes: list[SidecarRuntime] = []
        self.port = 0

    async def coordinate(self, runtime: SidecarRuntime) -> None:
        self.runtimes.append(runtime)
        await runtime.coordinate(HONEST, Waiting, parallelism=1)

    async def run(self, *, task_status: Any) -> None:
        process = SidecarProcess(self.coordinate, SidecarConfig(), KeyRing(SECRET), "127.0.0.1", Ports(0, 0, 0))

        def started(port: int) -> None:
            self.port = port
            task_status.started()

        await process.run(started=started)

    def ask(self, call: Callable[[SidecarRuntime], Awaitable[Any]]) -> Any:
        return self.portal.call(call, self.runtimes[-1])

    def idle(self) -> None:
        """Nothing of an interrupted call is left: no action, and no request of a driver that has gone."""

        async def look(runtime: SidecarRuntime) -> None:
            assert not runtime._running_jobs.action_ids

        self.ask(look)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(attached, "driver_context", lambda spark: spark)
    monkeypatch.setattr(attached, "_DriverHere", PlayedEnd)
    with python_handles_interrupts(), start_blocking_portal("asyncio") as portal:
        monkeypatch.setattr(PlayedEnd, "portal", portal, raising=False)
        served = Served(portal)
        portal.start_task(served.run)
        yield served
        portal.call(portal.stop, True)  # a driver that could not detach must not keep the loop


@pytest.fixture
def attach(served: Served, tmp_path: Path) -> Callable[[], AttachedSidecar]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET.hex())
    secret.chmod(0o600)
    return lambda: AttachedSidecar(NOT_ASKED, f"127.0.0.1:{served.port}", secret_file=secret, connect_timeout_s=60.0)


CALLS: dict[str, Callable[[AttachedSidecar], object]] = {
    "request": lambda sidecar: sidecar.request(HONEST, "x"),
    "status": lambda sidecar: sidecar.status(),
    "explain": lambda sidecar: sidecar.explain(),
    "statistics": lambda sidecar: sidecar.operator(HONEST).statistics(),
    "run": lambda sidecar: sidecar.run(lambda: 7),
}


@pytest.mark.filterwarnings(  # a socket that its own method loses when it is interrupted is closed by Python
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
@every_point
@pytest.mark.parametrize("name", CALLS)
def test_request_interrupted_at_any_point_leaves_nothing(
    name: str, many: int | None, served: Served, attach: Callable[[], AttachedSidecar]
) -> None:  # H160
    with attach() as sidecar:

        def call(number: int) -> Point:
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as point:
                CALLS[name](sidecar)
            print(f"{name} interrupted at {number}: {point}")
            assert sidecar.request(HONEST, "x") == "x"
            served.idle()
            return point

        points(call, many)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@every_point
def test_attaching_and_detaching_interrupted_at_any_point_lets_the_next_driver_attach(
    many: int | None, served: Served, attach: Callable[[], AttachedSidecar]
) -> None:  # H160
    def call(number: int) -> Point:
        interrupted = interrupted_at(number, skip="__enter__", spare="AttachedSidecar.__exit__")
        with contextlib.suppress(KeyboardInterrupt), interrupted as point, attach():
            pass
        print(f"interrupted at {number}: {point}")
        with attach() as sidecar:
            assert sidecar.request(HONEST, "x") == "x"
        return point

    points(call, many)


def test_interrupted_action_ends_its_job_and_no_other(served: Served, attach: Callable[[], AttachedSidecar]) -> None:
    # H160: no task has registered yet; the JVM knows the job by the id of the action
    with attach() as sidecar:
        end = sidecar._end
        assert isinstance(end, PlayedEnd)

        def action() -> None:
            (action_id,) = served.runtimes[-1]._running_jobs.action_ids
            served.portal.call(
                end.jvm.tell,
                record(1, struct.pack(">iIi", JOB, 1, 1), text(action_id)),
                record(1, struct.pack(">iIi", JOB + 1, 1, 2), text("another")),
            )
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sidecar.run(action)
        assert end.jvm.cancelled == [JOB]
        served.idle()
        assert sidecar.run(lambda: 7) == 7


def test_payload_that_cannot_be_sent_is_refused_before_anything_is_sent(
    served: Served, attach: Callable[[], AttachedSidecar]
) -> None:
    with attach() as sidecar:
        with pytest.raises(EventEncodeError, match=r"request to operator 'honest' .* limit of 4194304"):
            sidecar.request(HONEST, bytes(5 * 2**20))
        with pytest.raises(EventEncodeError, match=r"the payload of a request .* is of type builtins.object"):
            sidecar.request(HONEST, object())
        with pytest.raises(SidecarError, match=r"the answer to this 'request' cannot be sent: .* the limit of 4194304"):
            sidecar.request(HONEST, 5 * 2**20)
        assert sidecar.request(HONEST, "x") == "x"


async def test_request_of_a_client_that_has_gone_is_cancelled() -> None:  # H160
    """It would otherwise keep its place in the coordinator's queue."""
    from spark_bridge.server.server import ServerConfig
    from spark_bridge.standalone.control_client import ControlAddress, ask
    from spark_bridge.standalone.control_server import serve_control

    began, over = anyio.Event(), anyio.Event()

    async def answer(driver: bytes, method: str, argument: Any) -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            over.set()

    keys = KeyRing(SECRET)
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_control, answer, keys, ServerConfig(bind_host="127.0.0.1"))

        def give_up() -> None:
            with contextlib.suppress(SidecarError):
                address = ControlAddress("127.0.0.1", port, keys)
                ask(address, b"d" * 16, "request", timeout_s=0.2, connect_timeout_s=60.0)

        await anyio.to_thread.run_sync(give_up)
        await began.wait()
        with anyio.fail_after(30.0):
            await over.wait()
        tasks.cancel_scope.cancel()
