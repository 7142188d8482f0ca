# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect server that ends, or ends a session: who notices it, and what follows. tests/spark/connect kills real
ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, cast

import anyio
import pytest
import structlog.testing

from protocol.facts import ApplicationEnded
from protocol.restart import FixedDelay
from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.bridge.relay.interface import ApplicationLost, RelayError
from spark_bridge.common.certificates import Encryption
from spark_bridge.common.errors import ConnectRefused, RestartsExhausted, ServerLost, SidecarError
from spark_bridge.connect import driver, relay, sessions
from spark_bridge.connect.driver import LOOKS_PER_RENEWAL, AttachedSession
from spark_bridge.connect.opening import Opening, Wanted
from spark_bridge.connect.reach import Reach
from spark_bridge.connect.relay import PINGS_PER_LEASE, ConnectRelay
from spark_bridge.connect.remote_session import HERE, RemoteSession
from spark_bridge.connect.sessions import run_across_sessions
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.standalone.driver_end import SidecarElsewhere
from spark_bridge.subtask import TaskEndpoint
from tests.spark.facts_log import FactsLog
from tests.spark_bridge.test_jvm_link import FakeJvm

KEYS = KeyRing(b"s" * 32)
PING, HOLD_BACK, GOODBYE = 4, 8, 9


class Server:
    """In place of a remote session: what it says of its server, and what it is told."""

    session_id = "the-session"
    listener = HERE

    def __init__(self) -> None:
        self.unreachable: str | None = None
        self.closed: str | None = None
        self.watched = self.stopped = self.unwatched = 0
        self.looks = self.looks_at_the_session = 0
        self.looked_at: list[tuple[str, int]] = []
        self.shipped: list[bool] = []

    def why_unreachable(self) -> str | None:
        self.looks += 1
        return self.unreachable

    def why_closed(self) -> str | None:
        self.looks_at_the_session += 1
        return self.closed

    def watch_retries(self) -> None:
        self.watched += 1

    def stop_retries(self) -> None:
        self.stopped += 1

    def unwatch_retries(self) -> None:
        self.unwatched += 1

    def check_version(self) -> None:
        raise ConnectRefused("too old")

    def ship_packages(self, *, needed: bool) -> None:
        self.shipped.append(needed)

    def check_executors(self, host: str, port: int) -> None:
        self.looked_at.append((host, port))

    def marked(self, action_id: str) -> Any:
        return suppress(KeyError) if action_id == "7" else None


# --- a session that is attached to a sidecar elsewhere ------------------------------------------------------------


class Opened:
    """In place of the way to open a relay."""

    def __init__(self) -> None:
        self.wanted: Wanted | None = None

    def open(self, session: object, wanted: Wanted) -> None:
        self.wanted = wanted

    def why_silent(self, address: tuple[str, int], listener: object) -> str:
        return f"silent at {address[0]}:{address[1]}"


class Sidecar(SidecarElsewhere):
    """In place of the sidecar elsewhere. ``at_renewal`` is called each time."""

    def __init__(self, joins: bool = True, at_renewal: Callable[[], None] = lambda: None) -> None:
        self._joins = joins
        self._at_renewal = at_renewal

    def joined(self, within_s: float) -> bool:
        return self._joins

    def renew(self) -> None:
        self._at_renewal()


PLACE = {"host": "10.0.0.1", "relay_port": 7077}
KEY = KEYS.key(Purpose.RELAY, b"i" * 16)


def an_attached(server: Server, monkeypatch: pytest.MonkeyPatch, secret: bytes | None = None) -> AttachedSession:
    monkeypatch.setattr(driver, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(driver, "RemoteSession", lambda session, listener: server)
    return AttachedSession(None, secret)


def opened(session: AttachedSession, sidecar: Sidecar) -> Opened:
    opening = Opened()
    session._opening = cast(Any, opening)
    session.open(PLACE, KEY, b"\xca\xfe", sidecar)
    return opening


def test_an_attached_session_has_the_server_dial_the_sidecar_and_renews_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, renewed = Server(), threading.Event()
    session = an_attached(server, monkeypatch)
    looks: list[tuple[int, int]] = []

    def renew() -> None:
        looks.append((server.looks, server.looks_at_the_session))
        if len(looks) == 2:
            renewed.set()
        raise SidecarError("it is starting again")

    opening = opened(session, Sidecar(at_renewal=renew))
    assert renewed.wait(60)
    session.close()
    assert opening.wanted == Wanted(KEY, ("10.0.0.1", 7077), None, session.lease_s, b"\xca\xfe")
    assert looks[:2] == [(LOOKS_PER_RENEWAL, 1), (2 * LOOKS_PER_RENEWAL, 2)]
    assert (server.watched, server.unwatched, server.stopped, session.lost) == (1, 1, 0, None)
    assert server.shipped == [False]
    after = server.looks
    assert session._thread is not None
    assert not session._thread.is_alive()
    assert server.looks == after


@pytest.mark.parametrize("what", ["unreachable", "closed"])
def test_an_attached_session_whose_server_is_gone_says_so_and_ends_its_retries(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    session = an_attached(server, monkeypatch)
    setattr(server, what, "it has ended")
    opened(session, Sidecar())
    assert session._thread is not None
    session._thread.join(60)
    assert not session._thread.is_alive()
    assert str(session.lost).startswith("the Spark Connect server, or the session there, is gone: it has ended. Attach")
    assert server.stopped == 1
    setattr(server, what, None)
    opened(session, Sidecar())
    assert session.lost is None, "it has been attached again"
    session.close()


def test_an_attached_session_whose_server_does_not_dial_is_refused_with_the_most_probable_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    session = an_attached(server, monkeypatch)
    with pytest.raises(ConnectRefused, match=r"silent at 10\.0\.0\.1:7077"):
        opened(session, Sidecar(joins=False))
    assert (server.watched, session._thread) == (0, None)
    session.close()
    with pytest.raises(ConnectRefused, match="too old"):
        session.check()


@pytest.mark.parametrize(("secret", "needed"), [(None, True), (b"s" * 32, False)])
def test_the_packages_are_needed_unless_the_relay_is_installed(
    secret: bytes | None, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    session = an_attached(server, monkeypatch, secret)
    monkeypatch.setattr(type(session._opening), "open", lambda self, session, wanted: None)
    session.open(PLACE, KEY, b"", Sidecar())
    session.close()
    assert server.shipped == [needed]


def test_executors_are_looked_at_one_time_for_each_place_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    session = an_attached(server, monkeypatch)
    places = [("b", 2), ("a", 1), ("b", 2)]
    session.equip([TaskEndpoint(host, port, KEYS.task_key("op"), "op", 1) for host, port in places])
    assert server.looked_at == [("a", 1), ("b", 2)]
    with session.marked("7"):
        raise KeyError


# --- the relay of a session ---------------------------------------------------------------------------------------


class Dialling(Opening):
    """The way to open a relay: it has a JVM connect, whose commands are answered as long as ``answers``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks = set[asyncio.Task[None]]()
        self.wanted: Wanted | None = None
        self.jvms: list[FakeJvm] = []
        self.commands: list[int] = []
        self.heard = asyncio.Event()
        self.answers = True

    def keys(self, own: KeyRing) -> KeyRing:
        return own

    def open(self, session: object, wanted: Wanted | None) -> None:
        self.wanted = wanted
        self._loop.call_soon_threadsafe(lambda: self._tasks.add(self._loop.create_task(self.dial())))

    def why_silent(self, *_: object) -> str:
        return "nobody knows"

    async def dial(self) -> None:
        assert self.wanted is not None
        jvm = await FakeJvm.connect(self.wanted.address, self.wanted.key)
        self.jvms.append(jvm)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                operation, request_id = await jvm.next_command()
                self.commands.append(operation)
                if self.answers:
                    jvm.answer(request_id)
                self.heard.set()

    async def next(self) -> int:
        self.heard.clear()
        await self.heard.wait()
        return self.commands[-1]

    async def hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for jvm in self.jvms:
            jvm.writer.close()
            with suppress(ConnectionError):
                await jvm.writer.wait_closed()


class Owner:
    """Of a relay: it keeps what it hears."""

    def __init__(self, server: Server, dialling: Dialling, lease_s: float) -> None:
        self.facts = FactsLog()
        self.lost: list[RelayError] = []
        self.told = asyncio.Event()
        self.relay = ConnectRelay(
            cast(RemoteSession, server),
            dialling,
            Reach(cast(RemoteSession, server), "direct", lease_s, "127.0.0.1", ships=True, on_lost=print),
            self.facts.receive,
            self._hear,
            listens_at=("127.0.0.1", 0, "127.0.0.1"),
            tasks_at=lambda: ("127.0.0.1", 1),
            lease_s=lease_s,
            encryption=Encryption(),
            keys=KEYS,
        )

    def _hear(self, error: RelayError) -> None:
        self.lost.append(error)
        self.told.set()


@asynccontextmanager
async def a_relay(lease_s: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Owner, Server, Dialling]]:
    monkeypatch.setattr(relay, "LOOK_PAUSE_S", 0.0)
    server, dialling = Server(), Dialling(asyncio.get_running_loop())
    others = asyncio.all_tasks()
    owner = Owner(server, dialling, lease_s)
    with anyio.fail_after(60):
        await owner.relay.start()
        try:
            yield owner, server, dialling
        finally:
            await owner.relay.close()
            await dialling.hang_up()
            assert asyncio.all_tasks() <= others, "a relay that is closed does nothing any more"


async def test_a_relay_says_where_it_listens_and_leaves_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_relay(60.0, monkeypatch) as (_, server, dialling):
        assert dialling.wanted is not None
        assert (dialling.wanted.tasks_at, dialling.wanted.lease_ms) == (("127.0.0.1", 1), 60_000)
        assert (dialling.commands, server.watched) == ([HOLD_BACK], 1)
    assert dialling.commands == [HOLD_BACK, GOODBYE]
    assert server.unwatched == 1


async def test_a_lease_is_renewed_until_the_relay_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_relay(0.01 * PINGS_PER_LEASE, monkeypatch) as (_, _, dialling):
        assert [await dialling.next() for _ in range(3)] == [PING] * 3
    assert dialling.commands[-1] == GOODBYE


@pytest.mark.parametrize("what", ["unreachable", "closed"])
async def test_a_server_that_ends_or_ends_the_session_ends_the_jobs_of_its_relay(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_relay(60.0, monkeypatch) as (owner, server, dialling):
        setattr(server, what, "it has ended")
        await dialling.hang_up()
        await owner.told.wait()
        [error] = owner.lost
        assert isinstance(error, ApplicationLost)
        assert str(error) == "the Spark Connect server, or the session there, is gone: it has ended"
        assert [type(fact) for fact in owner.facts.facts] == [ApplicationEnded]
        assert server.stopped == 1
        with pytest.raises(RelayError, match="it has ended"):
            await owner.relay.ping()


async def test_a_connection_that_only_breaks_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_relay(60.0, monkeypatch) as (owner, server, dialling):
        await dialling.hang_up()
        dialling.open(None, dialling.wanted)
        await owner.relay.ping()
        looks = server.looks
        await anyio.lowlevel.checkpoint()
        server.unreachable = server.closed = "nobody looks any more"
        await owner.relay.ping()
        assert (owner.lost, server.stopped) == ([], 0)
        assert server.looks - looks <= 1


@pytest.mark.parametrize("closed", [True, False])
async def test_after_a_failed_action_the_session_is_looked_at(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_relay(60.0, monkeypatch) as (owner, server, _):
        server.closed = "INVALID_HANDLE" if closed else None
        await anyio.to_thread.run_sync(owner.relay.look_for_session)
        if closed:
            await owner.told.wait()
            owner.relay.look_for_session()
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        assert server.looks_at_the_session == 1 + closed
        assert len(owner.lost) == len(owner.facts.facts) == server.stopped == closed


# --- one job over several sessions --------------------------------------------------------------------------------


class Listening:
    """A session of a server that listens, or does not."""

    def __init__(self, port: int, made: list[Listening]) -> None:
        self.client = self
        self._builder = self
        self.endpoint = f"127.0.0.1:{port}"
        self.stopped = 0
        self.policies: list[Any] | None = None
        made.append(self)

    def get_retry_policies(self) -> list[Any]:
        return []

    def set_retry_policies(self, policies: list[Any]) -> None:
        self.policies = policies

    def stop(self) -> None:
        self.stopped += 1
        raise OSError("nobody listens")


class Entered:
    """In place of a sidecar. ``losses``: what each of them has lost, when its job ends."""

    losses: ClassVar[list[ServerLost | None]] = []
    configs: ClassVar[list[SidecarConfig]] = []

    def __init__(self, session: Any, config: SidecarConfig) -> None:
        self.configs.append(config)
        self.lost = self.losses.pop(0) if self.losses else None

    def __enter__(self) -> Entered:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Runs:
    """Runs jobs over sessions of a server on this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *losses: ServerLost | None) -> None:
        self.sessions: list[Listening] = []
        self.slept: list[float] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._port = self._listening.getsockname()[1]
        monkeypatch.setattr(Entered, "losses", list(losses))
        monkeypatch.setattr(Entered, "configs", [])
        monkeypatch.setattr(sessions, "Sidecar", Entered)
        monkeypatch.setattr(sessions, "LOOK_PAUSE_S", 0.0)
        monkeypatch.setattr(time, "sleep", self.slept.append)

    def end_the_server(self) -> None:
        self._listening.close()

    def run(self, job: Callable[[Any, Any], str], **options: Any) -> str:
        try:
            return run_across_sessions(lambda: Listening(self._port, self.sessions), job, **options)
        finally:
            self._listening.close()


def test_a_job_without_a_loss_runs_once_and_its_session_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    config = SidecarConfig()
    assert runs.run(lambda session, sidecar: f"job of {type(sidecar).__name__}", config=config) == "job of Entered"
    assert [session.stopped for session in runs.sessions] == [1]
    assert runs.sessions[0].policies is None, "the server is there, and is told"
    assert (runs.slept, Entered.configs) == ([], [config])


def test_each_loss_gets_a_new_session_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, ServerLost("first"), ServerLost("second"), None)
    counted = iter(range(9))

    def job(session: Any, sidecar: Any) -> str:
        if (number := next(counted)) < 2:
            raise RuntimeError("what PySpark says")
        return f"job {number}"

    with structlog.testing.capture_logs() as logs:
        assert runs.run(job, restart=FixedDelay(2, 7.5)) == "job 2"
    assert [session.stopped for session in runs.sessions] == [1, 1, 1]
    assert runs.slept == [7.5, 7.5]
    assert [(line["error"], line["restart"]) for line in logs] == [("first", 1), ("second", 2)]


def test_more_losses_than_the_strategy_allows_end_the_job_with_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, ServerLost("first"), ServerLost("second"), None)

    def job(session: Any, sidecar: Any) -> str:
        raise RuntimeError("what PySpark says")

    with pytest.raises(RestartsExhausted, match=r"after 1 new sessions, and .* allows no more: second") as end:
        runs.run(job, restart=FixedDelay(1, 0.0))
    assert isinstance(end.value.__cause__, ServerLost)
    assert isinstance(end.value.__cause__.__cause__, RuntimeError)
    assert [session.stopped for session in runs.sessions] == [1, 1]


def test_an_error_that_is_not_a_loss_ends_the_job_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)

    def job(session: Any, sidecar: Any) -> str:
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        runs.run(job, restart=FixedDelay(1, 0.0))
    assert [session.stopped for session in runs.sessions] == [1]


class Refused:
    """Fails to be made of whatever it is made."""

    def __init__(self, *made_of: Any) -> None:
        raise KeyError("refused")


@pytest.mark.parametrize("kind", ["Sidecar", "RemoteSession"])
def test_a_session_with_which_nothing_can_begin_is_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H160: what could not be made may be a sidecar, or the remote session of what is not one of Spark Connect."""
    runs = Runs(monkeypatch)
    monkeypatch.setattr(sessions, kind, Refused)
    with pytest.raises(KeyError, match="refused"):
        runs.run(lambda session, sidecar: "", restart=FixedDelay(1, 0.0))
    assert [session.stopped for session in runs.sessions] == [1]


def test_an_error_while_nothing_listens_any_more_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)

    def job(session: Any, sidecar: Any) -> str:
        runs.end_the_server()
        raise ValueError("what PySpark says")

    with pytest.raises(RestartsExhausted, match="after 0 new sessions") as end:
        runs.run(job, restart=FixedDelay(0, 0.0))
    assert "is gone: nothing listens at 127.0.0.1:" in str(end.value.__cause__)
    assert runs.sessions[0].policies == [], "a server that is gone is not asked again and again"


def test_a_server_that_does_not_come_back_in_time_counts_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    runs.end_the_server()
    with pytest.raises(RestartsExhausted) as end:
        runs.run(lambda session, sidecar: "", restart=FixedDelay(0, 0.0), back_within_s=0.05)
    assert "has not come back within 0.05 s (back_within_s): nothing listens at" in str(end.value.__cause__)
    assert runs.slept, "it looked more than once"
