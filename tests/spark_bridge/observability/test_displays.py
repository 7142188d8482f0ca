# SPDX-License-Identifier: Apache-2.0

"""Displays that fail while a job runs: the job goes on, the failure is logged once, counted and shown (H155)."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from structlog.testing import capture_logs

from actors import Actor, ActorContext
from actors.coordination import OperatorCoordinator
from actors.coordination.engine.operator_config import UNBOUNDED
from actors.logs import failures, get_logger
from actors.testing import deterministic_system
from headgate.testing import RecordingCoordinator
from protocol.facts import TaskOutcome
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.operators import Operators
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.observability import event_log, journal, observer, progress, spark_metrics, spark_ui, trace
from spark_bridge.observability.collector import Process, StatusCollector
from spark_bridge.observability.diagnosis import explain
from spark_bridge.observability.displays import FAILURES_MAX, PAUSE_S, Displays
from spark_bridge.observability.event_log import EventLogActor, subscribe
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.meters import LatencySketch
from spark_bridge.observability.observer import ObserverActor
from spark_bridge.observability.page_files import page_routes
from spark_bridge.observability.prometheus import metrics_route
from spark_bridge.observability.spans import Spans
from spark_bridge.observability.spark_metrics import SparkGaugesActor
from spark_bridge.observability.spark_ui import SparkTabActor
from spark_bridge.observability.status import RelayStatus, SidecarStatus
from spark_bridge.observability.status_server import Request, Unavailable
from spark_bridge.observability.trace import start_tracing
from tests.conformance.application import OPERATOR, Application, application
from tests.spark_bridge.simulated_driver import SimulatedDriver

pytestmark = pytest.mark.anyio


class Broken(Exception):
    """What a display raises here."""


def breaks(*args: Any, **kwargs: Any) -> Any:
    raise Broken("as it was told")


class Talking(RecordingCoordinator):
    """Sends each subtask an event, whose confirmation the trace draws."""

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await super().subtask_ready(subtask, gateway)
        gateway.send_event_nowait("hello")


class Tab:
    """A tab whose object in the JVM takes everything."""

    _java = SimpleNamespace(put=len)

    def open(self) -> str:
        return "/headgate"

    def is_watched(self) -> bool:
        return True

    def show(self, status: SidecarStatus) -> None:
        spark_ui.SparkTab.show(self, status)  # type: ignore[arg-type]

    def close(self) -> None: ...


class Gauges:
    """In place of the gauges in the JVM."""

    def publish(self, status: SidecarStatus) -> None:
        spark_metrics.gauges(status)

    def close(self) -> None: ...


class Notes:
    """In place of the object in the JVM that posts notes."""

    def post(self, notes: list[dict[str, Any]]) -> None:
        self.posted = notes


@asynccontextmanager
async def shown(tmp_path: Path) -> AsyncIterator[tuple[Application, StatusCollector, Displays]]:
    """An application with all its displays, as a sidecar has them."""
    async with application(parallelism=2) as app:
        system, now = app.kit.system, app.kit.clock.now
        displays = Displays(now)
        told = Journal(1000.0, displays)
        app.operators = Operators(app.operators._config, system, app.bridge_ref, app, app.storage, journal=told)  # type: ignore[arg-type]

        async def cores() -> int:
            return 2

        process = Process("here", 7, False, lambda: RelayStatus("none", 0, 0, 0), now(), cores)
        collector = StatusCollector(app.bridge_ref, app.kit.clock, told, process, lambda: app.operators.observed)
        tab, gauges, notes = Tab(), Gauges(), Notes()
        displays.spawn(system, lambda: SparkTabActor(tab, collector.take), "spark-ui-tab")  # type: ignore[arg-type]
        displays.spawn(system, lambda: SparkGaugesActor(gauges, collector.take), "spark-metrics")  # type: ignore[arg-type]
        actor = displays.spawn(system, lambda: EventLogActor(notes), "event-log", UNBOUNDED)  # type: ignore[arg-type]
        end_notes = subscribe(told, actor)
        displays.spawn(system, lambda: ObserverActor(collector, lambda: app.operators.observed, 3.0), "observer")
        spans = displays.run("spans", Spans, told, TracerProvider())
        tracing = await app.kit.drive(start_tracing(tmp_path / "job.json", system, told, collector, app.operators))
        yield app, collector, displays
        end_notes()
        if spans is not None:
            displays.run("spans", spans.close)
        await app.kit.drive(tracing.end())


BREAKABLE: dict[str, tuple[str, object, str]] = {
    "the tab's data": ("spark-ui-tab", spark_ui, "page_parts"),
    "the tab": ("spark-ui-tab", Tab, "is_watched"),
    "the diagnosis on the tab": ("spark-ui-tab", spark_ui, "explain"),
    "the gauges": ("spark-metrics", spark_metrics, "gauges"),
    "the notes": ("event-log", event_log, "note_of"),
    "the event log": ("event-log", Notes, "post"),
    "the observer": ("observer", observer, "waits"),
    "the latencies": ("latencies", LatencySketch, "status"),
    "the spans": ("spans", Spans, "_start"),
    "the ends of spans": ("spans", Spans, "_end"),
    "the trace": ("trace", trace.Trace, "_emit"),
    "the samples of the trace": ("trace", trace.Trace, "sample"),
    "the calls in the trace": ("trace", trace.Trace, "_call_ended"),
    "the events in the trace": ("trace", trace.Trace, "_event_confirmed"),
    "the checkpoints in the trace": ("trace", trace.Trace, "_observe_checkpoint"),
    "the history": ("journal", journal.OperatorJournal, "observe"),
}


@pytest.mark.parametrize(("display", "owner", "function"), BREAKABLE.values(), ids=BREAKABLE)
async def test_a_display_that_breaks_harms_no_job_and_is_shown_as_not_available(
    display: str, owner: object, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    with capture_logs() as lines:
        async with shown(tmp_path) as (app, collector, _):
            await app.coordinate(Talking())
            monkeypatch.setattr(owner, function, breaks)
            tasks = await app.running()
            await app.kit.advance(11.0)
            await app.checkpoint()
            for task in tasks:
                task.finish()
            await app.settle()
            for task in tasks:
                await app.end(task, TaskOutcome.SUCCESS, "")
            await app.settle()
            await app.kit.advance(11.0)
            assert not app.cancelled
            status = await app.kit.drive(collector.take())
            monkeypatch.undo()
    assert status.display_failures[display] >= 1
    (said,) = [one for one in explain(status) if repr(display) in one]
    assert "not available" in said
    assert status.operators[OPERATOR].counts["attempts"] == 2
    failed = [line for line in lines if line["event"] == "display failed, jobs not affected"]
    assert [line["display"] for line in failed] == [display], "logged once, however often it fails"
    assert "as it was told" in failed[0]["error"]


async def test_the_pages_of_the_status_port_say_that_they_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    displays = Displays()
    routes = {"/metrics": metrics_route(breaks), **page_routes(breaks)}
    guarded = {path: displays.route(f"status-page {path}", route) for path, route in routes.items()}
    for path in ("/metrics", "/status.json"):
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"^not available: this display has failed"):
                guarded[path](Request(path, {}, ""))
        assert displays.failures()[f"status-page {path}"] == 3
    assert guarded["/page.js"](Request("/page.js", {}, "")).body


class Flaky(Actor[str]):
    """Fails as often as it is told."""

    def __init__(self, tried: list[str]) -> None:
        self.tried = tried

    async def receive(self, context: ActorContext[str], message: str) -> None:
        self.tried.append(message)
        match message:
            case "fail":
                raise Broken("again")
            case "exit":
                raise SystemExit(3)
            case "cancelled":
                raise asyncio.CancelledError


async def test_a_display_that_is_broken_for_good_pauses_and_may_come_back() -> None:  # H155
    async with deterministic_system(seed=1) as kit:
        displays, tried = Displays(kit.clock.now), list[str]()
        with capture_logs() as lines:
            ref = displays.spawn(kit.system, lambda: Flaky(tried), "flaky")
            for _ in range(100):
                ref.tell("fail")
                await kit.advance(0.1)
            assert tried == ["fail"] * FAILURES_MAX
            await kit.advance(PAUSE_S)
            ref.tell("work")
            ref.tell("work")
            await kit.run_until_idle()
            assert tried[FAILURES_MAX:] == ["work", "work"]
        assert displays.failures()["flaky"] == FAILURES_MAX
        assert [line["event"] for line in lines] == ["display failed, jobs not affected", "display paused"]


@pytest.mark.parametrize("way", ["an actor", "a call", "a route"])
async def test_only_failures_in_a_row_make_a_display_pause(way: str) -> None:  # H155
    said = (["fail"] * (FAILURES_MAX - 1) + ["work"]) * 3
    async with deterministic_system(seed=1) as kit:
        displays, tried = Displays(kit.clock.now), list[str]()

        def carry_out(what: str) -> None:
            tried.append(what)
            if what == "fail":
                raise Broken("again")

        ref = displays.spawn(kit.system, lambda: Flaky(tried), "flaky")
        route = displays.route("flaky", lambda request: carry_out(request.path))  # type: ignore[arg-type,return-value]
        for what in said:
            if way == "an actor":
                ref.tell(what)
                await kit.run_until_idle()
            elif way == "a call":
                displays.run("flaky", carry_out, what)
            else:
                with suppress(Unavailable):
                    route(Request(what, {}, ""))
        assert tried == said
        assert displays.may_run("flaky")


async def test_the_last_step_of_a_display_is_taken_while_it_pauses_and_its_failure_is_counted() -> None:  # H155
    displays, ended = Displays(), list[str]()

    async def end(what: str, *, how: str) -> None:
        ended.append(f"{what} {how}")
        raise Broken("no end")

    for _ in range(FAILURES_MAX):
        displays.run("flaky", breaks)
    assert not displays.may_run("flaky")
    await displays.run_async("flaky", end, "closed", how="late")
    assert ended == ["closed late"]
    assert displays.failures()["flaky"] == FAILURES_MAX + 1


@pytest.mark.parametrize("end", ["exit", "cancelled"])
async def test_what_a_display_may_raise_besides_does_not_end_the_system_either(end: str) -> None:  # H155
    async with deterministic_system(seed=1) as kit:
        displays, tried = Displays(kit.clock.now), list[str]()
        ref = displays.spawn(kit.system, lambda: Flaky(tried), "flaky")
        ref.tell(end)
        ref.tell("work")
        await kit.run_until_idle()
        assert tried == [end, "work"]


@pytest.mark.parametrize("name", ["the factory", "started", "stopped"])
async def test_a_display_that_cannot_start_or_stop_harms_nobody(name: str) -> None:  # H155
    class Never(Flaky):
        def __init__(self, tried: list[str]) -> None:
            super().__init__(tried)
            if name == "the factory":
                raise Broken("no")

        async def started(self, context: ActorContext[str]) -> None:
            if name == "started":
                raise Broken("no")

        async def stopped(self, context: ActorContext[str], cause: BaseException | None) -> None:
            if name == "stopped":
                raise Broken("no")

    async with deterministic_system(seed=1) as kit:
        displays = Displays(kit.clock.now)
        displays.spawn(kit.system, lambda: Never([]), "never").tell("work")
        await kit.run_until_idle()
    assert displays.failures()["never"] == 1


# --- the log ------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How many lines are lost in the block."""
    before, told = failures.count, set(failures._told)
    failures._told.clear()
    yield lambda: failures.count - before
    failures._told.update(told)


class Unwritable(io.StringIO):
    encoding = "ascii"

    def write(self, text: str) -> int:
        text.encode("ascii")
        raise OSError(28, "No space left on device")


def test_a_processor_of_the_log_that_raises_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:  # H155
    structlog.configure(processors=[breaks])
    try:
        displays = Displays()
        with counted() as lost:
            for _ in range(3):
                get_logger("headgate.test").warning("something happened", key="\x1b[2J")
            assert lost() == 3
            assert displays.failures() == {"log": 3}
            assert Displays().failures() == {}, "of a sidecar before this one"
    finally:
        structlog.reset_defaults()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("headgate.test: log line not written: 'something happened': Broken: as it was told")


def test_a_filter_and_a_stream_that_raise_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:  # H155
    log, standard = get_logger("headgate.test"), logging.getLogger("headgate.test")
    standard.addFilter(breaks)
    try:
        with counted() as lost:
            log.warning("something happened")
            assert lost() == 1
    finally:
        standard.removeFilter(breaks)
    monkeypatch.setattr(sys, "stderr", Unwritable())
    monkeypatch.setattr(sys, "stdout", Unwritable())
    structlog.configure(logger_factory=structlog.PrintLoggerFactory())
    try:
        with counted() as lost:
            log.warning("Größe")
            assert lost() == 1
    finally:
        structlog.reset_defaults()


def test_an_end_of_the_process_passes_through_the_log_and_a_display() -> None:  # H155
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    structlog.configure(processors=[interrupted])
    try:
        with pytest.raises(KeyboardInterrupt):
            get_logger("headgate.test").warning("something happened")
    finally:
        structlog.reset_defaults()
    with pytest.raises(KeyboardInterrupt):
        Displays().run("trace", interrupted)


# --- progress -----------------------------------------------------------------------------------------------------


def close(bar: progress.Progress) -> None:
    """Give the bar's place on the screen back, which tqdm keeps otherwise."""
    bar._bar_class._instances.clear()


@pytest.mark.parametrize("method", ["display", "clear", "close", "set_postfix", "write"])
def test_a_progress_bar_that_cannot_be_drawn_harms_nobody_and_keeps_no_lock(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    bar_class, _ = progress._bar_class()
    gc.collect()  # a bar of an earlier test closes itself when it is collected
    monkeypatch.setattr(bar_class, method, breaks)
    told = {"failures": 0, "resets": 0, "splits_done": None, "events_received": 3}
    displays = Displays()
    with capture_logs() as lines, progress.Progress("crawl", lambda: told, 10, shown=True, displays=displays) as bar:
        bar.say("a line")
    assert {line["event"] for line in lines} == {"display failed, jobs not affected"}
    assert displays.failures()["progress"] >= 1, "shown in the status, as those of the other displays"
    monkeypatch.undo()
    close(bar)
    with progress.Progress("crawl", lambda: told, 10, shown=True):
        pass  # the lock of all bars is free


@pytest.mark.parametrize("broken", ["statistics", "_begin", "_new_bar", "_look", "_figure", "_end_bar"])
def test_a_progress_bar_of_which_anything_breaks_harms_nobody_and_is_counted(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    told = {"failures": 0, "resets": 0, "splits_done": None, "events_received": 3}
    displays, ran = Displays(), False
    bar = progress.Progress("crawl", breaks if broken == "statistics" else lambda: told, shown=True, displays=displays)
    if broken != "statistics":
        monkeypatch.setattr(bar, broken, breaks)
    with capture_logs() as lines, bar:
        ran = True
    monkeypatch.undo()
    close(bar)
    assert ran
    assert {line["event"] for line in lines} == {"display failed, jobs not affected"}
    assert displays.failures()["progress"] >= 1


async def test_a_sidecar_begins_without_its_spans_and_counts_what_its_bars_fail_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H155
    monkeypatch.setattr(Spans, "__init__", breaks)
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(watching=Watching(opentelemetry=True))) as runtime:
        handle = await runtime.coordinate("crawl", OperatorCoordinator, parallelism=1)
        monkeypatch.setattr(progress.Progress, "_look", breaks)
        with handle.progress():
            pass
        failures = (await runtime.status()).display_failures
    assert failures["spans"] == 1
    assert failures["progress"] >= 1


async def test_a_setting_that_cannot_work_still_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SidecarError, match=r"pip install 'headgate\[opentelemetry\]'"):
        async with SidecarRuntime(SimulatedDriver(), SidecarConfig(watching=Watching(opentelemetry=True))):
            pass
