# SPDX-License-Identifier: Apache-2.0

"""The sidecar's process and its drivers, without Spark: whose requests it answers, and where it writes for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, use_span

from actors.coordination import OperatorCoordinator
from protocol.wire.keys import KeyRing
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.common.errors import SidecarError, SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig, StorageDetails
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.standalone import attached
from spark_bridge.standalone.attached import AttachedSidecar
from spark_bridge.standalone.control_client import ControlAddress
from spark_bridge.standalone.process import Ports, SidecarProcess
from spark_bridge.standalone.status_bytes import unpack_status
from tests.fuzz.driver_half import HONEST, PARALLELISM
from tests.fuzz.played_driver import PlayedDriver

KEYS = KeyRing(b"the secret of this application!!")
ACTION = "an action"
OF_AN_ACTION = [ACTION, None]
SPAN = SpanContext(0xA, 0xB, is_remote=False, trace_flags=TraceFlags.get_default())
TRACEPARENT = f"00-{SPAN.trace_id:032x}-{SPAN.span_id:016x}-00"


class Asked(OperatorCoordinator):
    """Keeps what drivers ask."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []

    async def handle_client_request(self, payload: Any) -> Any:
        self.requests.append(payload)
        self.span = get_current_span().get_span_context()
        return payload


class Served:
    """A process that serves drivers, seen from inside."""

    def __init__(self) -> None:
        self.address = ControlAddress("127.0.0.1", 0, KEYS)
        self.runtimes: list[SidecarRuntime] = []
        self.coordinators: list[Asked] = []

    async def coordinate(self, runtime: SidecarRuntime) -> None:
        self.runtimes.append(runtime)
        self.coordinators.append(Asked())
        await runtime.coordinate(HONEST, self.coordinators[-1], parallelism=PARALLELISM[HONEST])


@asynccontextmanager
async def a_process(config: SidecarConfig | None = None, served: Served | None = None) -> AsyncIterator[Served]:
    """Serve drivers until the block ends."""
    served = served or Served()
    if config is not None:
        pin = certificate_digest(config.tls, KEYS)
        served.address = replace(served.address, certificate_sha256=pin)
    process = SidecarProcess(served.coordinate, config or SidecarConfig(), KEYS, "127.0.0.1", Ports(0, 0, 0))
    listening = anyio.Event()

    def started(port: int) -> None:
        served.address = replace(served.address, port=port)
        listening.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(process.run, started=started))
        await listening.wait()
        yield served
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("operators", None),
        ("begin", ["another action", None]),
        ("end", ACTION),
        ("failures", OF_AN_ACTION),
        ("settle", OF_AN_ACTION),
        ("statistics", HONEST),
        ("status", None),
        ("failure", HONEST),
        ("checkpoint", [HONEST, 1.0]),
        ("savepoint", [HONEST, "/anywhere", 1.0]),
        ("request", [HONEST, "from another driver", 1.0, None, ""]),
        ("uncommitted", None),
    ],
)
async def test_a_request_of_another_driver_is_refused_and_changes_nothing(method: str, argument: Any) -> None:
    """H76. The other one knows the secret: it was attached before, or it serves another application."""
    async with a_process() as served, PlayedDriver(served.address) as driver:
        await driver.ask("begin", OF_AN_ACTION)
        with pytest.raises(SidecarError, match="this driver is no longer attached to the sidecar, which serves anoth"):
            await PlayedDriver(served.address).ask(method, argument)
        (runtime,), (coordinator,) = served.runtimes, served.coordinators
        assert runtime._actions.jobs.knows(ACTION)
        assert not runtime._actions.jobs.knows("another action")
        assert await driver.ask("request", [HONEST, "from its own", 1.0, None, ""]) == "from its own"
        assert coordinator.requests == ["from its own"]


@pytest.mark.parametrize("text", [TRACEPARENT, "", "not one"])
async def test_a_request_to_another_process_is_handled_below_its_span(text: str) -> None:  # H179
    async with a_process() as served, PlayedDriver(served.address) as driver:
        assert await driver.ask("request", [HONEST, 1, 1.0, None, text]) == 1
        (coordinator,) = served.coordinators
        assert coordinator.span.span_id == (SPAN.span_id if text == TRACEPARENT else 0)


async def test_somebody_who_looks_sees_the_status_and_changes_nothing() -> None:
    async with a_process() as served:
        onlooker = PlayedDriver(served.address)
        assert await onlooker.ask("look") is None, "no driver is attached"
        async with PlayedDriver(served.address) as driver:
            await driver.ask("operators")  # they are ready
            seen = unpack_status(await onlooker.ask("look"))
            own = unpack_status(await driver.ask("status"))
            assert list(seen.operators) == list(own.operators) == [HONEST]
            assert seen.operators[HONEST].parallelism == PARALLELISM[HONEST]
            with pytest.raises(SidecarError, match="no longer attached"):
                await onlooker.ask("request", [HONEST, "more than a look", 1.0, None, ""])
            assert await driver.ask("request", [HONEST, 1, 1.0, None, ""]) == 1
            assert len(served.runtimes) == 1


@pytest.mark.parametrize("method", ["attach", "detach"])
async def test_another_driver_neither_replaces_the_attached_one_nor_detaches_it(method: str) -> None:  # H76
    async with a_process() as served, PlayedDriver(served.address) as driver:
        other = PlayedDriver(served.address)
        if method == "attach":
            with pytest.raises(SidecarError, match="another driver is attached to this sidecar"):
                await other.ask(method)
        else:
            assert await other.ask(method) is None
        assert await driver.ask("request", [HONEST, 1, 1.0, None, ""]) == 1
        assert len(served.runtimes) == 1


async def test_the_driver_before_is_refused_when_the_next_one_is_served() -> None:  # H76
    async with a_process() as served:
        before = PlayedDriver(served.address)
        async with before:
            assert await before.ask("request", [HONEST, "first", 1.0, None, ""]) == "first"
        async with PlayedDriver(served.address) as driver:
            with pytest.raises(SidecarError, match="no longer attached"):
                await before.ask("request", [HONEST, "late", 1.0, None, ""])
            assert await driver.ask("request", [HONEST, "second", 1.0, None, ""]) == "second"
        assert [coordinator.requests for coordinator in served.coordinators] == [["first"], ["second"]]


@pytest.mark.parametrize("storage", [None, "checkpoints"])
async def test_a_separate_process_writes_savepoints_only_into_its_storage(tmp_path: Path, storage: str | None) -> None:
    """Unless it is configured: the driver that asks may run as another user, on another machine."""
    inside, outside = tmp_path / "checkpoints", tmp_path / "elsewhere"
    config = SidecarConfig(storage=None if storage is None else tmp_path / storage)
    allowed = "none" if storage is None else str(inside)
    async with a_process(config) as served, PlayedDriver(served.address) as driver:
        for directory in (outside, inside / ".." / "elsewhere", "/"):
            with pytest.raises(SidecarError, match=rf"does not write savepoints .* allows {allowed}\."):
                await driver.ask("savepoint", [HONEST, str(directory), 60.0])
        assert not outside.exists()


@pytest.mark.parametrize("roots", [pytest.param(None, marks=pytest.mark.long), ["savepoints"]])
async def test_a_separate_process_writes_savepoints_where_it_may(tmp_path: Path, roots: list[str] | None) -> None:
    """Roots that are given replace the storage."""
    here = {name: tmp_path / name for name in ("checkpoints", "savepoints")}
    given = None if roots is None else [here[name] for name in roots]
    allowed, refused = ("savepoints", "checkpoints") if roots else ("checkpoints", "savepoints")
    async with (
        a_process(
            SidecarConfig(storage=here["checkpoints"], storage_details=StorageDetails(savepoint_roots=given))
        ) as served,
        PlayedDriver(served.address) as driver,
    ):
        await driver.start_tasks()
        with pytest.raises(SidecarError, match="does not write savepoints"):
            await driver.ask("savepoint", [HONEST, str(here[refused] / "today"), 60.0])
        await driver.ask("savepoint", [HONEST, str(here[allowed] / "today"), 60.0])
        assert any(path.is_file() for path in (here[allowed] / "today").rglob("*"))
        assert not (here[refused] / "today").exists()


async def test_tasks_write_no_value_in_clear_if_the_process_does_not_know_whether_spark_encrypts_files() -> None:
    async with a_process() as served, PlayedDriver(served.address) as driver:
        assert (await driver.ask("operators"))[HONEST]["local_files"] is False


async def test_a_separate_process_says_where_states_are_and_not_with_which_options(tmp_path: Path) -> None:
    """H76: the connection may not be encrypted, and options may be credentials."""
    config = SidecarConfig(storage=tmp_path, storage_details=StorageDetails(options={"auto_mkdir": True}))
    async with a_process(config) as served, PlayedDriver(served.address) as driver:
        states = (await driver.ask("operators"))[HONEST]["state_storage"]
    assert (states.pop("url"), states.pop("epoch"), len(states.pop("token"))) == (str(tmp_path), 1, 16)
    assert states == {}


@pytest.mark.parametrize("method", ["shared", "permits", "work_queue", "group"])
def test_a_part_is_not_made_by_an_attached_driver(method: str) -> None:
    """It would have a coordinator in no process."""
    sidecar: Any = object.__new__(AttachedSidecar)
    with pytest.raises(AttributeError, match=rf"no {method}\(\).*in the factory.*operator\(OPERATOR\).part\(NAME\)"):
        getattr(sidecar, method)


@pytest.mark.parametrize("method", ["coordinate", "release", "source", "for_each_batch"])
def test_an_operator_is_not_made_by_an_attached_driver(method: str) -> None:
    sidecar: Any = object.__new__(AttachedSidecar)
    with pytest.raises(AttributeError, match=rf"no {method}\(\).*that the factory coordinates"):
        getattr(sidecar, method)


def test_an_operator_that_an_attached_sidecar_does_not_have_is_refused_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AttachedSidecar, "_require_attached", lambda sidecar: None)
    sidecar: Any = object.__new__(AttachedSidecar)
    sidecar._operators = {"words": "its handle", "counts": "another"}
    assert sidecar.operator("words") == "its handle"
    with pytest.raises(SidecarError, match="'lines' is not coordinated by this sidecar; there is 'counts', 'words'"):
        sidecar.operator("lines")


def test_a_driver_that_is_not_attached_is_told_to_attach_whatever_it_asks() -> None:
    sidecar: Any = object.__new__(AttachedSidecar)
    sidecar._attached, sidecar._operators = False, {"words": "of an earlier block"}
    asks: tuple[Callable[[], object], ...] = (
        lambda: sidecar.operator_ids,
        lambda: sidecar.operator("words"),
        lambda: sidecar.checkpoint("words"),
        lambda: sidecar.savepoint("words", directory="/none"),
        lambda: sidecar.request("words", "how many?"),
        sidecar.status,
        lambda: sidecar.run(list),
    )
    for ask in asks:
        with pytest.raises(SidecarNotRunning, match="this driver is not attached"):
            ask()


ASKED: dict[str, tuple[Callable[[AttachedSidecar], object], list[Any]]] = {
    "checkpoint": (lambda sidecar: sidecar.checkpoint("words", timeout_s=1.0), ["words", 1.0]),
    "savepoint": (lambda sidecar: sidecar.savepoint("words", directory="/x", timeout_s=1.0), ["words", "/x", 1.0]),
    "request": (
        lambda sidecar: sidecar.request("words", 7, part="p", timeout_s=1.0),
        ["words", 7, 1.0, "p", TRACEPARENT],
    ),
}


@pytest.mark.parametrize("method", ASKED)
def test_an_attached_driver_waits_longer_for_an_answer_than_the_call_there_may_take(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(address: Any, driver: bytes, *question: Any, timeout_s: float, connect_timeout_s: float) -> str:
        asked.extend([*question, connect_timeout_s])
        assert timeout_s > 1.0, "otherwise a call that fails there in time would look like a sidecar that is gone"
        return "the answer"

    monkeypatch.setattr(attached, "ask", ask)
    sidecar = object.__new__(AttachedSidecar)
    sidecar.__dict__.update(_attached=True, _address=None, _driver=b"", _connect_timeout_s=7.0)
    call, argument = ASKED[method]
    with use_span(NonRecordingSpan(SPAN)):  # H179
        assert call(sidecar) == "the answer"
    assert asked == [method, argument, 7.0]


@pytest.mark.parametrize("text", [None, "the coordinator raised"])
def test_a_handle_of_an_attached_driver_has_the_failure_that_the_sidecar_tells(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttachedSidecar, "_ask", lambda sidecar, method, name: text if method == "failure" else name)
    failure = object.__new__(AttachedSidecar)._failure_of("words")
    assert (None if failure is None else str(failure)) == text
    assert failure is None or isinstance(failure, SidecarError)
