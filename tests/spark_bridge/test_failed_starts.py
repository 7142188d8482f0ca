# SPDX-License-Identifier: Apache-2.0

"""A relay whose start fails or is cancelled, at any step, leaves nothing behind: no listener, and no open port."""

# H160

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from py4j.protocol import Py4JError

from spark_bridge.bridge.relay import RelayRefused, jvm_relay
from spark_bridge.bridge.relay.jvm_link import JvmCommands
from spark_bridge.bridge.relay.jvm_relay import JvmRelay
from spark_bridge.bridge.relay.py4j_listener import Py4jRelay
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect.opening import Opening, Wanted
from spark_bridge.connect.reach import Reach
from spark_bridge.connect.relay import ConnectRelay
from spark_bridge.connect.remote_session import RemoteSession
from tests.spark_bridge.test_jvm_link import KEYS


class Steps:
    """What a start does elsewhere. One step fails, or never ends."""

    def __init__(self, fails: str = "", waits: str = "") -> None:
        self._fails = fails
        self._waits = waits
        self.done = Counter[str]()
        self.waiting = asyncio.Event()
        self.address = ("", 0)

    def take(self, step: str) -> None:
        if step == self._fails:
            raise Py4JError(step)
        self.done[step] += 1

    async def answer(self, *_: object) -> None:
        """In place of a command: a JVM that says nothing fails it with a timeout."""
        if self._waits == "answer":
            self.waiting.set()
            await anyio.sleep_forever()
        if self._fails == "answer":
            raise TimeoutError

    # --- in place of the Java object

    def open_listener(self, context: object, host: str, port: int, *_: object) -> Steps:
        self.address = (host, port)
        try:
            self.take("open")
        except Py4JError as error:
            raise RelayRefused("the class is not there") from error
        return self

    def attach(self) -> None:
        self.take("attach")

    def close(self) -> None:
        self.take("close")

    # --- in place of a session of Spark Connect, and of the way to open a relay there

    listener = None

    def keys(self, own: object) -> object:
        return own

    def open(self, session: object, wanted: Wanted) -> None:
        self.address = wanted.address
        try:
            self.take("open")
        except Py4JError as error:
            raise ConnectRefused("the server refuses it") from error

    def why_silent(self, *_: object) -> str:
        return "nobody knows"

    def watch_retries(self) -> None:
        self.take("watch")

    def unwatch_retries(self) -> None:
        self.take("unwatch")


async def is_closed(address: tuple[str, int]) -> bool:
    with suppress(ConnectionRefusedError):
        _, writer = await asyncio.open_connection(*address)
        writer.close()
        return False
    return True


async def cancelled_at(steps: Steps, start: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await steps.waiting.wait()
        assert not await is_closed(steps.address)
        tasks.cancel_scope.cancel()


def a_jvm_relay(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> JvmRelay:
    monkeypatch.setattr(jvm_relay, "open_listener", steps.open_listener)
    monkeypatch.setattr(JvmCommands, "ping", steps.answer)
    return JvmRelay(SimpleNamespace(_jsc=True), lambda fact: None, keys=KEYS)


@pytest.mark.parametrize(("fails", "error"), [("open", RelayRefused), ("answer", RelayRefused), ("attach", Py4JError)])
async def test_a_relay_in_the_jvm_leaves_nothing(
    fails: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(fails)
    with pytest.raises(error):
        await a_jvm_relay(steps, monkeypatch).start()
    assert steps.done["close"] == steps.done["open"]
    assert await is_closed(steps.address)


async def test_a_relay_in_the_jvm_leaves_nothing_if_its_start_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(waits="answer")
    await cancelled_at(steps, a_jvm_relay(steps, monkeypatch).start)
    assert steps.done["close"] == 1
    assert await is_closed(steps.address)


def a_connect_relay(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> ConnectRelay:
    monkeypatch.setattr(JvmCommands, "hold_back", steps.answer)
    return ConnectRelay(
        cast(RemoteSession, steps),
        cast(Opening, steps),
        Reach(cast(RemoteSession, steps), "direct", 60.0, "127.0.0.1", ships=True, on_lost=print),
        lambda fact: None,
        lambda error: None,
        listens_at=("127.0.0.1", 0, "127.0.0.1"),
        tasks_at=lambda: ("127.0.0.1", 1),
        lease_s=60.0,
        encryption=Encryption(),
        keys=KEYS,
    )


@pytest.mark.parametrize(
    ("fails", "error"), [("open", ConnectRefused), ("answer", ConnectRefused), ("watch", Py4JError)]
)
async def test_a_relay_over_spark_connect_leaves_nothing(
    fails: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(fails)
    with pytest.raises(error):
        await a_connect_relay(steps, monkeypatch).start()
    assert steps.done["unwatch"] == 1
    assert await is_closed(steps.address)


async def test_a_relay_over_spark_connect_leaves_nothing_if_its_start_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(waits="answer")
    await cancelled_at(steps, a_connect_relay(steps, monkeypatch).start)
    assert steps.done["unwatch"] == 1
    assert await is_closed(steps.address)


class Py4j:
    """As much of Py4J and of the JVM as its relay uses. One step fails."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._gateway = self._jsc = self._jvm = self.java = self.util = self.gateway_property = self.pool = self
        self.dict: dict[str, object] = {}
        self._callback_server: Any = None
        self.connections: list[Any] = []
        self.on_the_bus = 0

    def start_callback_server(self, _: object) -> None:
        self.steps.take("callback server")
        self._callback_server = self

    def shutdown_callback_server(self) -> None:
        self.steps.take("shutdown")

    def sc(self) -> Py4j:
        return self

    def isStopped(self) -> bool:
        return False

    def ArrayList(self) -> Any:
        self.steps.take("list")
        held: list[object] = []
        return SimpleNamespace(add=held.append, get=held.__getitem__)

    def listenerBus(self) -> Py4j:
        self.steps.take("bus")
        return self

    def metrics(self) -> Py4j:
        return self

    metricRegistry = metrics

    def counter(self, _: str) -> Any:
        self.steps.take("counter")
        return SimpleNamespace(getCount=lambda: 0)

    def addToQueue(self, *_: object) -> None:
        self.on_the_bus += 1
        self.steps.take("queue")  # it is there, and the answer is lost

    def removeListener(self, _: object) -> None:
        self.on_the_bus -= 1


@pytest.mark.parametrize("fails", ["callback server", "list", "bus", "counter", "queue"])
async def test_a_relay_of_py4j_leaves_nothing_and_says_what_was_refused(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    py4j = Py4j(Steps(fails))
    monkeypatch.setattr("pyspark.java_gateway.ensure_callback_server_started", py4j.start_callback_server)
    with pytest.raises(RelayRefused, match=fails):
        await Py4jRelay(py4j, lambda fact: None).start()
    assert py4j._callback_server is None
    assert py4j.steps.done["shutdown"] == py4j.steps.done["callback server"]
    assert py4j.on_the_bus <= 0


async def test_a_relay_of_py4j_leaves_a_callback_server_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    py4j = Py4j(Steps("queue"))
    monkeypatch.setattr("pyspark.java_gateway.ensure_callback_server_started", lambda gateway: None)
    py4j._callback_server = py4j
    with pytest.raises(RelayRefused):
        await Py4jRelay(py4j, lambda fact: None).start()
    assert py4j._callback_server is py4j
    assert not py4j.steps.done["shutdown"]
