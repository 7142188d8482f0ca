# SPDX-License-Identifier: Apache-2.0

"""Drivers whose connections to a sidecar's process end or stall after any byte, who come and leave, or come together.

The process is in this one. ``tests/fuzz/test_vanishing_drivers.py`` has real processes that die and freeze.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, ClassVar

import anyio
import pytest

from protocol.wire.codec import encode_event
from protocol.wire.framing import frame
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import Purpose
from spark_bridge.bridge.relay import awaited
from spark_bridge.common.control import CONTROL_LIMITS
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.standalone import process as standalone
from spark_bridge.standalone.process import Ports, SidecarProcess
from tests.fuzz.driver_half import HONEST, PARALLELISM, HonestCoordinator
from tests.fuzz.line import Line
from tests.fuzz.played_driver import PATIENCE_S, PlayedDriver, PlayedJvm
from tests.spark_bridge.test_attached_drivers import KEYS, Served, a_process
from tests.spark_bridge.test_relay_records import record, text


class CutOff(Exception):
    """So many bytes have been sent, and no more are."""


class CutLine(Line):
    """Sends ``budget`` bytes, and is then closed, or stays open without a word if it ``stalls``."""

    budget = 2**62
    stalls = False
    lines: ClassVar[list[CutLine]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent = 0
        self.lines.append(self)

    async def send_raw(self, data: bytes) -> None:
        now = data[: CutLine.budget - self.sent]
        self.sent += len(now)
        await super().send_raw(now)
        if self.sent == CutLine.budget:
            raise CutOff

    async def close(self) -> None:
        if not CutLine.stalls:
            await super().close()


@pytest.fixture
async def cut(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[type[CutLine]]:
    """The lines of the peer, all closed at the end. The process waits for such a peer only for moments."""
    monkeypatch.setattr(standalone, "RESERVED_S", 0.01)
    monkeypatch.setattr(awaited, "JOIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(CutLine, "budget", 2**62)
    monkeypatch.setattr(CutLine, "stalls", False)
    CutLine.lines = []
    yield CutLine
    for line in CutLine.lines:
        line.reset()


class Peer(PlayedDriver):
    """A driver that has the secret, and whose connections are cut."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.address)

    async def attach(self) -> None:
        """Ask to attach, on a line that is cut."""
        address = self._address
        with suppress(CutOff):
            line = await CutLine.open((address.host, address.port), address.certificate_sha256)
            try:
                await line.greet(address.keys.key(Purpose.CONTROL, self.identity), secrets.token_bytes(NONCE_BYTES))
                await line.send(frame(encode_event(["attach", None], CONTROL_LIMITS)))
                await line.frames()
            finally:
                await line.close()

    async def join(self) -> None:
        """Attach, and have the JVM join on a line that is cut."""
        address = self._address
        place = await self.ask("attach")
        relay = (address.host, place["relay_port"])
        key, pin = address.keys.key(Purpose.RELAY, self.identity), address.certificate_sha256
        with suppress(CutOff):
            line = await CutLine.open(relay, pin)
            try:
                await PlayedJvm(relay, key, pin)._serve(line)
            finally:
                await line.close()


class Echoing(HonestCoordinator):
    """Tells the driver what it has seen."""

    async def handle_client_request(self, payload: Any) -> Any:
        return {"taken": list(self.taken.values()), "faults": self.faults}


class Echoed(Served):
    """Has tasks that behave, too."""

    async def coordinate(self, runtime: SidecarRuntime) -> None:
        self.runtimes.append(runtime)
        await runtime.coordinate(HONEST, Echoing(), parallelism=PARALLELISM[HONEST])


async def works(served: Served, *, job: bool = False) -> None:
    """Attach an honest driver, which asks its coordinator, or runs a job whose events all come once and in order."""
    async with PlayedDriver(served.address) as driver:
        assert (await driver.reading())["faults"] == []
        if job:
            await driver.start_tasks()
            await driver.until_at_work()
            await driver.finish_tasks()


async def bytes_to(step: str, served: Served) -> int:
    """How many bytes a peer sends that is not cut, until it has attached or joined."""
    peer = Peer(served)
    if step == "attach":
        await peer.attach()
    else:
        async with asyncio.TaskGroup() as group:
            joining = group.create_task(peer.join())
            while not CutLine.lines:  # noqa: ASYNC110 - the line is opened in another task
                await asyncio.sleep(0.01)
            await peer.ask("operators")
            joining.cancel()
    await peer.ask("detach")
    return CutLine.lines.pop().sent


def some_of(count: int, seed: int, *, all_of_them: bool) -> list[int]:
    """Numbers from 1 to ``count``: all, or some that include the last ones."""
    if all_of_them:
        return list(range(1, count + 1))
    return sorted({*Random(seed).sample(range(1, count), min(count - 1, 25)), *range(count - 3, count + 1)})


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("stalls", [False, True], ids=["ends", "stalls"])
@pytest.mark.parametrize("step", ["attach", "join"])
async def test_a_driver_cut_off_after_any_byte_leaves_a_process_that_serves_the_next_one(
    step: str, stalls: bool, tls: bool, seed: int, cut: type[CutLine]
) -> None:  # H48
    print(f"seed {seed}")
    async with a_process(SidecarConfig(tls=tls), Echoed()) as served:
        count = await bytes_to(step, served)
        every = seed > 1 and not tls and not stalls
        for number in some_of(count - (step == "join"), seed, all_of_them=every):
            cut.budget, cut.stalls = number, stalls
            await getattr(Peer(served), step)()
            cut.budget = 2**62
            if number % 5 == 0:
                await works(served)
        await works(served, job=True)


class Refusing(PlayedJvm):
    """Joins, and refuses every command."""

    def _carry_out(self, body: bytes) -> bytes:
        _, request_id = struct.unpack_from(">Bq", body)
        return record(10, struct.pack(">q?", request_id, False), text("no"))


async def test_a_jvm_that_refuses_every_command_does_not_end_the_process(cut: type[CutLine]) -> None:  # H48
    async with a_process(served=Echoed()) as served:
        for _ in range(3):
            peer = Peer(served)
            place = await peer.ask("attach")
            key = KEYS.key(Purpose.RELAY, peer.identity)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Refusing(("127.0.0.1", place["relay_port"]), key, b"").run)
                await works(served)
                tasks.cancel_scope.cancel()


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "only-attached"])
async def test_a_driver_that_comes_and_leaves_a_hundred_times_is_served_each_time(joins: bool) -> None:  # H48
    async with a_process(served=Echoed()) as served:
        for _ in range(100):
            driver = PlayedDriver(served.address)
            if joins:
                async with driver:
                    pass
            else:
                await driver.ask("attach")
                await driver.ask("detach")
        await works(served)
        assert len(served.runtimes) == 101 * joins + (not joins)


async def test_the_second_of_two_drivers_at_a_time_is_refused_and_the_first_not_hurt() -> None:  # H48
    async with a_process(served=Echoed()) as served, PlayedDriver(served.address) as first:
        await first.start_tasks()
        await first.until_at_work()
        for _ in range(5):
            with pytest.raises(SidecarError, match="another driver is attached to this sidecar"):
                await PlayedDriver(served.address).ask("attach")
        await first.finish_tasks()
        assert len(served.runtimes) == 1


@pytest.mark.parametrize("together", [2, 5])
async def test_of_drivers_that_attach_at_the_same_moment_one_is_served_and_the_others_are_refused(
    together: int,
) -> None:  # H48
    """Also before the JVM of the first has joined."""
    outcomes: list[str] = []
    all_known = anyio.Event()

    def note(outcome: str) -> None:
        outcomes.append(outcome)
        if len(outcomes) == together:
            all_known.set()

    async def one(driver: PlayedDriver) -> None:
        try:
            async with driver:
                await driver.reading()
                note("served")
                await all_known.wait()
        except SidecarError as error:
            note(str(error))

    async with a_process(served=Echoed()) as served:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(together):
                    tasks.start_soon(one, PlayedDriver(served.address))
        assert outcomes.count("served") == 1, outcomes
        assert sum(outcome.startswith("another driver is attached") for outcome in outcomes) == together - 1, outcomes
        await works(served)


async def test_a_driver_that_never_joins_keeps_the_next_one_only_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H48
    monkeypatch.setattr(standalone, "RESERVED_S", 0.3)
    async with a_process(served=Echoed()) as served:
        lost = PlayedDriver(served.address)
        await lost.ask("attach")
        async with PlayedDriver(served.address) as driver:
            with pytest.raises(SidecarError, match="no longer attached"):
                await lost.ask("joined", 0.0)
            await driver.reading()


async def test_a_jvm_that_proves_its_key_after_another_driver_has_attached_does_not_take_its_place(
    cut: type[CutLine],
) -> None:  # H48
    async with a_process(served=Echoed()) as served:
        late, driver = PlayedDriver(served.address), PlayedDriver(served.address)
        place = await late.ask("attach")
        handshake = ClientHandshake(KEYS.key(Purpose.RELAY, late.identity), secrets.token_bytes(NONCE_BYTES))
        line = await Line.open(("127.0.0.1", place["relay_port"]))
        await line.send(handshake.initial_bytes())
        proof = handshake.receive(await line.read())
        await driver.ask("attach")
        await line.send(proof)
        await line.until_closed()
        async with driver:  # attaches again, which changes nothing
            await driver.reading()
        await line.close()


async def test_a_process_for_one_application_outlives_drivers_that_are_lost_before_theirs_has_started(
    cut: type[CutLine],
) -> None:  # H48
    """``--once`` counts applications whose operators have started."""
    served = Echoed()
    process = SidecarProcess(served.coordinate, SidecarConfig(), KEYS, "127.0.0.1", Ports(0, 0, 0))
    async with anyio.create_task_group() as tasks:
        listening = anyio.Event()

        def started(port: int) -> None:
            served.address = replace(served.address, port=port)
            listening.set()

        tasks.start_soon(partial(process.run, once=True, started=started))
        await listening.wait()
        count = await bytes_to("attach", served)
        assert count > 0
        cut.budget = 150  # the handshake, and half of an answer
        await Peer(served).join()
        cut.budget = 2**62
        await works(served)  # the process ends then


class Fails(Served):
    """The factory does ``what`` for the first drivers, and works for those after them."""

    def __init__(self, what: Callable[..., Any], drivers: int = 1) -> None:
        super().__init__()
        self.what = what
        self.left = drivers

    def coordinate(self, runtime: SidecarRuntime) -> Any:
        if self.left:
            self.left -= 1
            return self.what(runtime)
        return super().coordinate(runtime)


async def raises_in_time(runtime: SidecarRuntime) -> None:
    raise RuntimeError("the factory is wrong")


async def raises_an_exit(runtime: SidecarRuntime) -> None:
    raise SystemExit(3)


async def takes_nothing() -> None:
    """The signature is wrong."""


async def coordinates_twice(runtime: SidecarRuntime) -> None:
    await runtime.coordinate(HONEST, Echoing(), parallelism=1)
    await runtime.coordinate(HONEST, Echoing(), parallelism=1)


FAILURES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises_in_time, "RuntimeError: the factory is wrong"),
    "exits": (raises_an_exit, "ExitRaised: .*coordinate.* SystemExit: 3"),
    "signature": (takes_nothing, r"TypeError: takes_nothing\(\) takes 0 positional arguments but 1 was given"),
    "not-async": (lambda runtime: None, r"TypeError: the factory .*coordinate returned None: .*`async def factory"),
    "refused": (coordinates_twice, "SidecarError: .*honest"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_driver_learns_why_the_factory_failed_and_the_next_one_is_served(name: str) -> None:  # H48
    what, cause = FAILURES[name]
    async with a_process(served=Fails(what, drivers=2)) as served:
        for _ in range(2):
            with pytest.raises(SidecarError, match=f"cannot serve this driver: {cause}.*attach again"):
                async with PlayedDriver(served.address):
                    raise AssertionError("it is attached")
        async with PlayedDriver(served.address) as driver:
            assert await driver.ask("request", [HONEST, 1, 1.0, None, ""]) == 1
            assert await driver.ask("uncommitted") == ""


@pytest.mark.parametrize("wrong", ["storage", "port"])
async def test_a_driver_learns_why_the_sidecar_could_not_start_and_the_process_goes_on(wrong: str) -> None:  # H48
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = SidecarConfig(storage="nope://x") if wrong == "storage" else SidecarConfig(port=port)
        async with a_process(config, Echoed()) as served:
            for _ in range(2):
                cause = "nope" if wrong == "storage" else str(port)
                with pytest.raises(SidecarError, match=f"cannot serve this driver: .*{cause}"):
                    async with PlayedDriver(served.address):
                        raise AssertionError("it is attached")


async def test_each_of_many_drivers_learns_its_own_cause() -> None:  # H48
    """Random: some leave without asking, some ask twice; the seed is in the failure."""
    seed = secrets.randbits(32)
    random, count = Random(seed), 12
    causes = [f"the cause of driver {number}" for number in range(count)]
    coming = iter(causes)

    async def fails(runtime: SidecarRuntime) -> None:
        raise random.choice([ValueError, SystemExit, KeyboardInterrupt, OSError])(next(coming))

    async with a_process(served=Fails(fails, drivers=count)) as served:
        for number, cause in enumerate(causes):
            driver = PlayedDriver(served.address)
            with pytest.raises(SidecarError, match=f"{cause}[.]"):
                async with driver:
                    raise AssertionError(f"driver {number} is attached, seed {seed}")
            for _ in range(random.randrange(3)):
                with pytest.raises(SidecarError, match=f"{cause}[.]"):
                    await driver.ask(random.choice(["status", "joined", "uncommitted"]), 0.0)
            await driver.ask("detach")
        async with PlayedDriver(served.address) as driver:
            assert await driver.ask("request", [HONEST, 1, 1.0, None, ""]) == 1, seed


async def test_a_process_for_one_application_tells_the_driver_and_ends_with_the_error_of_the_factory() -> None:
    served = Fails(raises_in_time)
    process = SidecarProcess(served.coordinate, SidecarConfig(), KEYS, "127.0.0.1", Ports(0, 0, 0))
    listening = anyio.Event()

    def started(port: int) -> None:
        served.address = replace(served.address, port=port)
        listening.set()

    async def attach() -> None:
        await listening.wait()
        with pytest.raises(SidecarError, match="cannot serve this driver: RuntimeError: the factory is wrong"):
            async with PlayedDriver(served.address):
                raise AssertionError("it is attached")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attach)
        wrong = pytest.RaisesExc(RuntimeError, match="the factory is wrong")
        with pytest.RaisesGroup(wrong, flatten_subgroups=True):
            await process.run(once=True, started=started)


async def test_an_error_that_comes_with_the_loss_of_its_driver_does_not_end_the_process(
    cut: type[CutLine],
) -> None:  # H48
    """The factory waits for something that the loss of the driver makes impossible."""
    served, failures = Echoed(), [True]

    async def coordinate(runtime: SidecarRuntime) -> None:
        if failures:
            failures.clear()
            attached.set()
            await lost.wait()
            raise ConnectionError("what the driver had promised is gone")
        await served.coordinate(runtime)

    attached, lost = anyio.Event(), anyio.Event()
    process = SidecarProcess(coordinate, SidecarConfig(), KEYS, "127.0.0.1", Ports(0, 0, 0))
    listening = anyio.Event()

    def started(port: int) -> None:
        served.address = replace(served.address, port=port)
        listening.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(process.run, started=started))
        await listening.wait()
        async with anyio.create_task_group() as joining:
            joining.start_soon(Peer(served).join)
            await attached.wait()
            joining.cancel_scope.cancel()
        relay = process._relay
        assert relay is not None
        while relay.connected:  # noqa: ASYNC110 - the end of a connection is on its way
            await asyncio.sleep(0.01)
        lost.set()
        await works(served)
        tasks.cancel_scope.cancel()
