# SPDX-License-Identifier: Apache-2.0

"""The tab in Spark's own UI, seen by a real Chromium, while real jobs run and lose attempts."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import structlog.testing
from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SidecarConfig, SubtaskContext, SubtaskOperator, Watching
from spark_bridge.bridge import jvm_classes
from spark_bridge.observability import spark_ui
from tests.browser.fixtures import NewVisit, Visit
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import SparkOn
from tests.spark.operators import Listening
from tests.spark.releases import HAS_DARK_MODE
from tests.spark.script import Script

pytestmark = pytest.mark.spark

LIVE = "document.querySelector('.hg-live')?.textContent === 'live'"
HOSTILE = "<script>window.taken=1<script>\"'><img src=x onerror=window.taken=2> &amp; Größe ☃"


WITHOUT_A_TAB = ("Spark UI tab not opened", "display failed, jobs not affected")


class Left(Exception):
    """The block of a sidecar is left by this exception."""


class Asking(SubtaskOperator):
    """Asks the coordinator one question."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        if self.context.subtask == 0:
            self.context.request("a question")


class Slow(OperatorCoordinator):
    """Answers only when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self.may_answer.wait()


class Failing(SubtaskOperator):
    """Fails in its first attempt, with a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        if self.context.attempt == 0:
            raise ValueError(self.text)
        yield from records
        self.context.wait_for_event()


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    """A session with Spark's UI."""
    return spark_on("local[2,3]", spark_ui_enabled="true", spark_ui_port="0")


def address(spark: SparkSession) -> str:
    return str(spark.sparkContext.uiWebUrl).rstrip("/")


def handlers(spark: SparkSession) -> list[str]:
    """The paths of everything that is attached to Spark's UI."""
    all_of_them = spark.sparkContext._jsc.sc().ui().get().getHandlers()
    return sorted(all_of_them.apply(place).getContextPath() for place in range(all_of_them.size()))


def until_attached(spark: SparkSession, path: str = "/headgate") -> None:
    """The tab is attached in the background; the test's timeout is the limit."""
    while path not in handlers(spark):
        pass


def get(url: str) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def send_to(coordinator: Script, subtask: int, event: Any) -> None:
    """Send one event, from the test's thread."""

    async def send() -> None:
        await coordinator.gateways[subtask].send_event(event)

    coordinator.context.call_soon_threadsafe(send)


def card(seen: Visit, fact: str) -> str:
    """A JavaScript expression for a fact on the card of the only operator."""
    heads = "[...document.querySelectorAll('.hg-card dt')]"
    return f"{heads}.find((one) => one.textContent === '{fact}').nextSibling.textContent"


def test_the_tab_shows_a_running_job_and_goes_with_the_sidecar(spark: SparkSession, visit: NewVisit) -> None:
    before = handlers(spark)
    coordinator = Script({}, [])
    with suppress(Left):
        with Sidecar(spark) as sidecar:
            handle = sidecar.coordinate("crawl", coordinator, parallelism=2)
            action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
            until_attached(spark)
            assert get(address(spark) + "/headgate/files/status.json") == (204, b"")  # nobody had looked
            seen = visit(address(spark) + "/jobs/")
            seen.page.get_by_role("link", name="Headgate", exact=True).click()
            seen.until("document.querySelector('.hg-ready')?.textContent === '2 of 2 ready'")
            assert "pyspark-shell" in seen.page.title() or "headgate" in seen.page.title()
            seen.page.evaluate("window.stillTheSame = true")
            coordinator.wait_for(lambda story: len([one for one in story if one[0] == "ready"]) == 2)
            coordinator.say([["echo", number] for number in range(50)])
            seen.until("Number(document.querySelector('.hg-value-up')?.textContent) > 0")
            send_to(coordinator, 1, "die")
            seen.until(card(seen, "Failures, resets") + " === '1, 1'")
            seen.page.get_by_role("link", name="crawl").click()
            seen.until("document.querySelectorAll('.hg-timeline path.hg-life-failed').length === 1")
            stage = seen.page.locator(".hg-links a", has_text="Stage").get_attribute("href")
            assert stage is not None
            assert get(address(spark) + stage)[0] == 200
            assert seen.page.evaluate("window.stillTheSame")
            seen.close()
            coordinator.wait_for(lambda story: len([one for one in story if one[0] == "ready"]) == 3)
            coordinator.say(["stop"])
            assert len(action.result()) == 2
            raise Left
    assert handlers(spark) == before
    seen = visit(address(spark) + "/jobs/")
    assert seen.page.get_by_role("link", name="Headgate", exact=True).count() == 0


@pytest.mark.long
def test_a_stuck_subtask_turns_red_and_the_page_says_who_waits_for_whom(spark: SparkSession, visit: NewVisit) -> None:
    coordinator = Slow()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("crawl", coordinator, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Asking)).collect)
        until_attached(spark)
        seen = visit(address(spark) + "/headgate/#/operator/crawl/subtask/0", color_scheme="dark")
        seen.until("[...document.querySelectorAll('.hg-key')].some((key) => key.textContent === '1 stuck')")
        red, green, _ = seen.colors_of(0)
        assert red > 180 > green
        assert "Subtask 0 has waited" in seen.text()
        assert "the coordinator of 'crawl' has been in handle_request(subtask=0, attempt=0) for" in seen.text()
        assert "test_spark_ui.py:" in seen.text()
        if HAS_DARK_MODE:
            assert seen.page.evaluate("document.documentElement.dataset.bsTheme") == "dark"
        assert seen.violations("#headgate") == []
        sidecar._entered()[1]._loop.call_soon_threadsafe(coordinator.may_answer.set)
        seen.until("!document.querySelector('.hg-diagnosis').textContent.includes('Subtask 0 has waited')")
        seen.close()
        action.result()


@pytest.mark.long
def test_hostile_names_of_a_real_job_are_shown_as_text(spark: SparkSession, visit: NewVisit) -> None:
    coordinator = Script({}, [])
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate(HOSTILE, coordinator, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Failing, HOSTILE)).collect)
        until_attached(spark)
        seen = visit(address(spark) + "/headgate/")
        seen.until("document.querySelector('.hg-card') !== null")
        seen.page.get_by_role("link", name=HOSTILE).click()
        seen.until("document.querySelectorAll('.hg-timeline path.hg-life-failed').length === 1")
        assert f"ValueError: {HOSTILE}" in seen.page.get_by_role("region", name="Recent failures").inner_text()
        assert seen.page.locator("#headgate script, #headgate img").count() == 0
        assert seen.page.evaluate("window.taken") is None
        seen.close()
        coordinator.wait_for(lambda story: any(one[:2] == ("ready", 0) and one[2] > 0 for one in story))
        coordinator.say(["go on"])
        action.result()


@contextmanager
def a_proxy(target: str, prefix: str) -> Iterator[str]:
    """A reverse proxy that shows ``target`` under ``prefix`` only."""
    host = target.removeprefix("http://")

    class Forward(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            with closing(http.client.HTTPConnection(host)) as connection:
                connection.request("GET", self.path.removeprefix(prefix), headers=dict(self.headers))
                answer = connection.getresponse()
                body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # the browser may have left the page
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forward) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_it_works_behind_a_proxy(spark: SparkSession, visit: NewVisit) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    system = jvm.java.lang.System
    prefix = "/proxy/application-1"
    system.setProperty("spark.ui.proxyBase", prefix)  # as Spark does it for spark.ui.reverseProxy, and YARN
    try:
        with a_proxy(address(spark), prefix) as outside, Sidecar(spark) as sidecar:
            sidecar.coordinate("crawl", Script({}, []), parallelism=2)
            until_attached(spark)
            seen = visit(outside + "/jobs/")
            seen.page.get_by_role("link", name="Headgate", exact=True).click()
            seen.until(LIVE)
            assert seen.page.url.startswith(outside + "/headgate/")
            seen.page.get_by_role("link", name="crawl").click()
            assert seen.page.get_by_role("link", name="Executors").last.get_attribute("href") == prefix + "/executors/"
            seen.close()
    finally:
        system.clearProperty("spark.ui.proxyBase")


@pytest.mark.long
def test_who_may_not_see_sparks_ui_sees_neither_the_page_nor_its_data(spark_on: SparkOn) -> None:
    spark = spark_on(
        "local[2,3]",
        spark_ui_enabled="true",
        spark_ui_port="0",
        spark_acls_enable="true",
        spark_ui_view_acls="alice",
    )
    with Sidecar(spark):
        until_attached(spark)
        for path in ("/headgate/", "/headgate/files/status.json", "/headgate/files/page.js", "/headgate/json/"):
            assert get(f"{address(spark)}{path}?doAs=mallory")[0] == 403, path
            assert get(f"{address(spark)}{path}?doAs=alice")[0] in (200, 204), path


@pytest.mark.long
def test_two_sidecars_have_a_tab_each(spark: SparkSession, visit: NewVisit) -> None:
    before = handlers(spark)
    with Sidecar(spark) as first:
        first.coordinate("first", Script({}, []), parallelism=1)
        until_attached(spark)
        with Sidecar(spark) as second:
            second.coordinate("second", Script({}, []), parallelism=1)
            until_attached(spark, "/headgate-2")
            seen = visit(address(spark) + "/jobs/")
            seen.page.get_by_role("link", name="Headgate 2").click()
            seen.until("document.querySelector('.hg-card a')?.textContent === 'second'")
            seen.page.get_by_role("link", name="Headgate", exact=True).click()
            seen.until("document.querySelector('.hg-card a')?.textContent === 'first'")
            seen.close()
        assert "/headgate-2" not in handlers(spark)
        assert "/headgate" in handlers(spark)
    assert handlers(spark) == before


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["off", "not compiled", "refused"])
def test_without_a_tab_the_job_runs_and_one_line_says_why(
    spark_on: SparkOn, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ui = "false" if trouble == "off" else "true"
    spark = spark_on("local[2,3]", spark_ui_enabled=ui, spark_ui_port="0")
    monkeypatch.setattr(jvm_classes, "_loaded", {})
    if trouble == "not compiled":
        monkeypatch.setattr(spark_ui, "_source", lambda: "public class Broken {")
    if trouble == "refused":
        monkeypatch.setattr(spark_ui, "CLASS_NAME", "headgate.observability.NoSuchClass")
    coordinator = Script({}, ["stop"])
    with structlog.testing.capture_logs() as lines:
        with Sidecar(spark) as sidecar:
            handle = sidecar.coordinate("crawl", coordinator, parallelism=2)
            assert len(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect()) == 2
            while not any(line["event"] in WITHOUT_A_TAB for line in lines):
                time.sleep(0.01)
            failures = sidecar.status().display_failures
    (said,) = [line for line in lines if line["event"] in WITHOUT_A_TAB]
    assert failures == ({} if trouble == "off" else {"spark-ui-tab": 1})
    assert (said["log_level"], said.get("display")) == (
        ("info", None) if trouble == "off" else ("warning", "spark-ui-tab")
    )
    expected = {"off": "spark.ui.enabled", "not compiled": "CompileException", "refused": "NoSuchClass"}
    assert expected[trouble] in said.get("cause", said.get("error"))


@pytest.mark.long
def test_a_context_that_stops_first_takes_the_tab_with_it(spark_on: SparkOn) -> None:
    spark = spark_on("local[2,3]", spark_ui_enabled="true", spark_ui_port="0")
    with Sidecar(spark) as sidecar:
        sidecar.coordinate("crawl", Script({}, []), parallelism=1)
        until_attached(spark)
        spark.stop()


@pytest.mark.long
def test_the_setting_switches_the_tab_off(spark: SparkSession) -> None:
    before = handlers(spark)
    with Sidecar(spark, SidecarConfig(watching=Watching(spark_ui_tab=False))) as sidecar:
        handle = sidecar.coordinate("crawl", Script({}, ["stop"]), parallelism=1)
        one_task_each(spark, 1).mapPartitions(handle.subtask(Listening)).collect()
        assert handlers(spark) == before


@pytest.mark.long
def test_the_status_server_shows_the_same_page(spark_on: SparkOn, visit: NewVisit) -> None:
    spark = spark_on("local[2,3]")
    coordinator = Script({}, [])
    with Sidecar(spark, SidecarConfig(watching=Watching(status_port=0))) as sidecar:
        handle = sidecar.coordinate("crawl", coordinator, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        assert sidecar.status_address is not None
        host, port = sidecar.status_address
        seen = visit(f"http://{host}:{port}/", color_scheme="dark")
        seen.until("document.querySelector('.hg-ready')?.textContent === '2 of 2 ready'")
        assert seen.violations() == []
        seen.page.get_by_role("link", name="crawl").click()
        assert seen.page.get_by_role("link", name="Executors").count() == 0
        seen.close()
        coordinator.say(["stop"])
        action.result()
