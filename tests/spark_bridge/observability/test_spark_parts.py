# SPDX-License-Identifier: Apache-2.0

"""The gauges in Spark's metrics and the tab in its UI, with a stand-in for the JVM. tests/spark/observability has both
in a real one."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
from py4j.protocol import Py4JError

from actors import ActorStopped
from actors.testing import deterministic_system
from spark_bridge.observability import spark_metrics, spark_ui
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.spark_metrics import (
    PUBLISH_EVERY_S,
    Forget,
    SparkGauges,
    SparkGaugesActor,
    close_gauges,
    gauges,
)
from spark_bridge.observability.spark_ui import LOOK_EVERY_S, WATCHED_MS, SparkTab, SparkTabActor, close_tab
from spark_bridge.observability.status import SidecarStatus
from tests.spark_bridge.observability.statuses import operator, sidecar


class Jvm:
    """The Java objects: it keeps what it is given. ``fails``: what is called, and how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_ui: bool = True) -> None:
        self.story: list[str] = []
        self.published: dict[str, float] = {}
        self.pages: list[Any] = []
        self.asked_ms_ago = -1
        self.fails: dict[str, Exception] = {}
        self.stopped = False
        ui = SimpleNamespace(isEmpty=lambda: not has_ui)
        java_context = SimpleNamespace(ui=lambda: ui, isStopped=lambda: self.stopped)
        self.context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: java_context))
        for module in (spark_metrics, spark_ui):
            monkeypatch.setattr(module, "new_compiled_object", lambda context, name, source: self.made(source))

    def made(self, source: Callable[[], str]) -> Jvm:
        assert "package headgate.observability" in source()
        self._meet("made")
        return self

    def _meet(self, what: str) -> None:
        self.story.append(what)
        if what in self.fails:
            raise self.fails[what]

    def open(self, java_context: Any, *page: str) -> str:
        self._meet("open")
        return "/headgate" if page else ""

    def publish(self, names: str, values: bytes) -> None:
        self._meet("publish")
        self.published = dict(zip(names.split("\n"), struct.unpack(f">{len(values) // 8}d", values), strict=True))

    def askedMillisAgo(self) -> int:
        return self.asked_ms_ago

    def put(self, packed: bytes) -> None:
        self._meet("put")
        self.pages.append(json.loads(gzip.decompress(packed)))

    def close(self) -> None:
        self._meet("close")


STATUS = sidecar(operator())


async def take() -> SidecarStatus:
    return STATUS


async def test_all_figures_are_published_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch)
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: SparkGaugesActor(SparkGauges(jvm.context), take))
        await kit.advance(PUBLISH_EVERY_S - 0.1)
        assert jvm.story == []
        await kit.advance(0.2)
        assert jvm.story == ["made", "open", "publish"]
        assert jvm.published == gauges(STATUS)
        await kit.advance(2 * PUBLISH_EVERY_S)
        assert jvm.story == ["made", "open", *["publish"] * 3]


async def test_the_gauges_of_an_operator_that_is_released_go_now_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jvm = Jvm(monkeypatch)
    async with deterministic_system() as kit:
        ref = kit.system.spawn(lambda: SparkGaugesActor(SparkGauges(jvm.context), take))
        ref.tell(Forget())
        await kit.advance(0.1)
        assert jvm.story == []
        await kit.advance(PUBLISH_EVERY_S)
        ref.tell(Forget())
        await kit.advance(0.1)
        assert jvm.story.count("publish") == 2


async def test_an_operator_that_is_just_being_released_costs_one_look_and_a_problem_of_open_gauges_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jvm = Jvm(monkeypatch)
    errors: list[Exception] = [ActorStopped("/operators/a")]

    async def take_or_fail() -> SidecarStatus:
        if errors:
            raise errors.pop()
        return STATUS

    async with deterministic_system() as kit:
        displays = Displays(kit.system.clock.now)
        displays.spawn(kit.system, lambda: SparkGaugesActor(SparkGauges(jvm.context), take_or_fail), "spark-metrics")
        await kit.advance(2 * PUBLISH_EVERY_S + 0.1)
        assert jvm.story.count("publish") == 1
        jvm.fails["publish"] = Py4JError("no")
        with structlog.testing.capture_logs() as logs:
            await kit.advance(2 * PUBLISH_EVERY_S)
            del jvm.fails["publish"]
            await kit.advance(PUBLISH_EVERY_S)
        assert jvm.story.count("publish") == 4
    assert [line["event"] for line in logs] == ["display failed, jobs not affected"]
    assert displays.failures() == {"spark-metrics": 2}


async def test_gauges_that_cannot_be_opened_are_counted_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H155
    jvm = Jvm(monkeypatch)
    jvm.fails["open"] = Py4JError("no")
    displays = Displays()
    with structlog.testing.capture_logs() as logs:
        async with deterministic_system() as kit:
            actor = displays.spawn(
                kit.system, lambda: SparkGaugesActor(SparkGauges(jvm.context), take), "spark-metrics"
            )
            await kit.advance(PUBLISH_EVERY_S + 0.1)
            actor.tell(Forget())
            await kit.advance(3 * PUBLISH_EVERY_S)
    assert jvm.story == ["made", "open"]
    assert displays.failures() == {"spark-metrics": 1}
    [line] = logs
    assert line["event"] == "display failed, jobs not affected"
    assert line["error"] == "SidecarError: Spark cannot register the gauges: Py4JError('no')"


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_gauges_and_the_tab_end_with_spark_and_nobody_reads_of_it(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    jvm = Jvm(monkeypatch)
    displays = Displays()

    def stop() -> None:
        jvm.stopped = True
        jvm.asked_ms_ago = 0
        jvm.fails = dict.fromkeys(["made", "open", "publish", "put"], Py4JError("no"))
        if when != "during":
            jvm.context._jsc = None  # as PySpark leaves it

    if when != "after":
        stop()
    with structlog.testing.capture_logs() as logs:
        async with deterministic_system() as kit:
            displays.spawn(kit.system, lambda: SparkTabActor(SparkTab(jvm.context), take), "spark-ui-tab")
            displays.spawn(kit.system, lambda: SparkGaugesActor(SparkGauges(jvm.context), take), "spark-metrics")
            await kit.advance(PUBLISH_EVERY_S + 0.1)
            stop()
            await kit.advance(PUBLISH_EVERY_S)
            calls = len(jvm.story)
            await kit.advance(2 * PUBLISH_EVERY_S)
    assert len(jvm.story) == calls, "neither is tried again"
    assert displays.failures() == {}
    assert [line["event"] for line in logs] == (["Spark UI tab opened"] if when == "after" else [])


async def test_gauges_are_removed_once_and_not_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch)
    made = SparkGauges(jvm.context)
    made.publish(STATUS)
    await close_gauges(made, 60.0)
    await close_gauges(made, 60.0)
    made.publish(STATUS)
    assert jvm.story == ["made", "open", "publish", "close"]
    jvm.fails["close"] = Py4JError("the JVM is gone")
    again = SparkGauges(jvm.context)
    again.publish(STATUS)
    await close_gauges(again, 60.0)
    assert jvm.story[-1] == "close"


async def test_the_tab_shows_a_status_each_second_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch)
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: SparkTabActor(SparkTab(jvm.context), take))
        await kit.advance(0.1)
        assert jvm.story == ["made", "open"]
        for asked_ms_ago, pages in ((-1, 0), (WATCHED_MS, 0), (0, 1), (WATCHED_MS - 1, 2), (WATCHED_MS + 1, 2)):
            jvm.asked_ms_ago = asked_ms_ago
            await kit.advance(LOOK_EVERY_S)
            assert len(jvm.pages) == pages
    assert "crawl" in json.dumps(jvm.pages[0])


async def test_without_an_ui_of_spark_there_is_no_tab_and_nobody_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch, has_ui=False)
    with structlog.testing.capture_logs() as logs:
        async with deterministic_system() as kit:
            kit.system.spawn(lambda: SparkTabActor(SparkTab(jvm.context), take))
            await kit.advance(5 * LOOK_EVERY_S)
    assert jvm.story == []
    assert [line["event"] for line in logs if "tab" in line["event"]] == ["Spark UI tab not opened"]


@pytest.mark.parametrize("what", ["made", "open"])
async def test_a_tab_that_the_jvm_cannot_open_is_closed_and_counted_and_the_log_has_its_words(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H155
    displays = Displays()
    jvm, problem = Jvm(monkeypatch), Py4JError("no")
    problem.java_exception = SimpleNamespace(toString=lambda: "java.lang.NoSuchMethodError: attachTab")
    jvm.asked_ms_ago = 0
    jvm.fails = {what: problem, "close": Py4JError("neither")}
    with structlog.testing.capture_logs() as logs:
        async with deterministic_system() as kit:
            displays.spawn(kit.system, lambda: SparkTabActor(SparkTab(jvm.context), take), "spark-ui-tab")
            await kit.advance(5 * LOOK_EVERY_S)
    assert jvm.story.count(what) == 1
    assert jvm.story.count("close") == (what != "made")
    assert displays.failures() == {"spark-ui-tab": 1}
    [line] = [line for line in logs if line["event"] == "display failed, jobs not affected"]
    assert line["error"] == "SidecarError: Spark's UI cannot have a tab: java.lang.NoSuchMethodError: attachTab"


async def test_the_tab_goes_on_after_an_operator_was_just_being_released(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm, errors = Jvm(monkeypatch), [ActorStopped("/operators/a")]
    jvm.asked_ms_ago = 0

    async def take_or_fail() -> SidecarStatus:
        if errors:
            raise errors.pop()
        return STATUS

    async with deterministic_system() as kit:
        displays = Displays(kit.system.clock.now)
        displays.spawn(kit.system, lambda: SparkTabActor(SparkTab(jvm.context), take_or_fail), "spark-ui-tab")
        await kit.advance(2 * LOOK_EVERY_S + 0.1)
    assert len(jvm.pages) == 1


async def test_a_tab_that_is_closed_leaves_once_and_does_not_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch)
    tab = SparkTab(jvm.context)
    assert tab.open() == "/headgate"
    await close_tab(tab, 60.0)
    await close_tab(tab, 60.0)
    assert jvm.story == ["made", "open", "close"]
    assert tab.open() == ""
    assert jvm.story.count("open") == 1


def test_a_tab_that_was_closed_meanwhile_is_not_watched_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = Jvm(monkeypatch)
    jvm.asked_ms_ago = 0
    tab = SparkTab(jvm.context)
    tab.open()
    tab.show(STATUS)
    assert tab.is_watched()
    tab.close()
    tab.show(STATUS)
    assert not tab.is_watched()
    assert jvm.story == ["made", "open", "put", "close"]
