# SPDX-License-Identifier: Apache-2.0

"""The page by itself, in a real Chromium, with statuses that no machine here could produce."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_bridge.observability.status import (
    AutoscaleStatus,
    CallStatus,
    FailureRecord,
    SidecarStatus,
    SourceStatus,
    SplitStatus,
)
from tests.browser import synthetic
from tests.browser.fixtures import NewVisit
from tests.browser.page_server import PageServer

LIVE = "document.querySelector('.hg-live')?.textContent === 'live'"
HOSTILE = "<script>window.taken=1</script>\"'><img src=x onerror=window.taken=2> &amp; Größe ☃ \u202e"


Serve = Callable[[Callable[[], SidecarStatus | None]], PageServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve the page; to be asked for before ``visit``, so that no page outlives its server."""
    with ExitStack() as stack:
        yield lambda make: stack.enter_context(PageServer(make))


def eventful(*, stuck: bool = False, name: str = "crawl") -> SidecarStatus:
    at = time.time()
    return synthetic.a_sidecar(synthetic.an_eventful_one(name, stuck=stuck, at=at), at=at)


def test_numbers_change_without_reloading(serve: Serve, visit: NewVisit) -> None:
    events = iter(range(100, 1000))

    def growing() -> SidecarStatus:
        at = time.time()
        operator = replace(
            synthetic.an_operator("crawl", [], parallelism=4, at=at), events_up_per_s=float(next(events))
        )
        return synthetic.a_sidecar(operator, at=at)

    server = serve(growing)
    seen = visit(server.url)
    seen.until(LIVE)
    seen.page.evaluate("window.stillTheSame = true")
    first = seen.page.locator(".hg-value-up").inner_text()
    seen.until(f"document.querySelector('.hg-value-up').textContent !== '{first}'")
    assert seen.page.evaluate("window.stillTheSame")
    seen.until("document.querySelector('.hg-line-up').getAttribute('points').split(' ').length >= 3")


def test_a_stuck_subtask_is_red_and_the_diagnosis_says_why(serve: Serve, visit: NewVisit) -> None:
    server = serve(lambda: eventful(stuck=True))
    seen = visit(server.url + "#/operator/crawl/subtask/3")
    seen.until(LIVE)
    text = seen.text()
    assert "Subtask 3 has waited 41 s for an answer to a request; the coordinator of 'crawl' has been in" in text
    assert "Subtask 3: stuck" in text
    assert "the answer to its request for 41 s" in text
    red, green, _ = seen.colors_of(3)
    assert red > 180
    assert green < 90
    red, green, _ = seen.colors_of(0)
    assert green > red


def test_an_operators_page_shows_attempts_checkpoints_failures_and_latencies(serve: Serve, visit: NewVisit) -> None:
    server = serve(eventful)
    seen = visit(server.url + "#/operator/crawl/subtask/1")
    seen.until(LIVE)
    page = seen.page
    assert "Nothing waits" in seen.text()
    attempts = page.get_by_role("region", name="Attempts of the selected subtask").locator("tbody tr")
    assert attempts.count() == 2
    assert "over, failed" in attempts.nth(0).inner_text()
    assert page.locator(".hg-timeline path.hg-life-failed").count() == 1
    assert page.locator(".hg-timeline path.hg-reset").count() == 1
    assert page.locator(".hg-timeline .hg-checkpoint-completed").count() == 9
    assert page.locator(".hg-timeline .hg-checkpoint-aborted").count() == 1
    assert re.search(r"\d+ tasks, \d+ started", page.locator("#headgate").inner_text())
    checkpoints = page.get_by_role("region", name="Checkpoints").locator("tbody tr")
    assert checkpoints.count() == 10
    assert "10" in checkpoints.nth(0).inner_text()
    acknowledging = [f"{80 + 50 * number} ms" for number in range(10)]
    for bar, last in zip(page.get_by_role("img", name="closing").all()[::-1], acknowledging, strict=True):
        expected = f"closing 20 ms, snapshotting 40 ms, acknowledging {last}, storing 40 ms"
        assert bar.get_attribute("aria-label") == expected
    failures = page.get_by_role("region", name="Recent failures").locator("tbody tr")
    assert "ValueError: page 17 cannot be read" in failures.nth(0).inner_text()
    latencies = page.get_by_role("region", name="Latencies").locator("tbody tr")
    assert latencies.nth(0).inner_text().split("\t") == [
        "Event confirmed",
        "48,211",
        "1.82 ms · 8.62 ms · 25.6 ms",
        "1.37 ms · 6.46 ms · 19.2 ms",
        "912 µs · 4.31 ms · 12.8 ms",
        "",
    ]
    heights = latencies.nth(0).locator(".hg-bar").evaluate_all("bars => bars.map(bar => +bar.getAttribute('height'))")
    assert [round(height) for height in heights[5:14]] == [0, 2, 28, 25, 8, 2, 2, 2, 0]
    assert seen.page.locator("table", has_text="pages fetched").inner_text().split("\n")[1:] == [
        "bytes\t10,500,001",
        "pages fetched\t48,211",
    ]


def test_ten_thousand_subtasks_are_drawn(serve: Serve, visit: NewVisit) -> None:
    server = serve(lambda: synthetic.of_many_subtasks(10_000, at=time.time()))
    seen = visit(server.url + "#/operator/large/subtask/7777")
    seen.until(LIVE)
    counts = {"ready": "9,549", "finished": "104", "waiting": "318", "stuck": "10", "over": "19"}
    for state, count in counts.items():
        assert f"{count} {state}" in " ".join(seen.text().split())
    assert "Subtask 7777: ready" in seen.text()
    red, green, _ = seen.colors_of(5)
    assert red > green
    longest = seen.page.evaluate(
        "Math.max(...performance.getEntriesByName('headgate-draw').map((one) => one.duration))"
    )
    assert longest < 1000  # about 40 ms on the development machine


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["", "#/operator/crawl/subtask/3"])
def test_axe_finds_nothing_to_object_to(serve: Serve, visit: NewVisit, scheme: str, place: str) -> None:
    server = serve(lambda: eventful(stuck=True))
    seen = visit(server.url + place, color_scheme=scheme)
    seen.until(LIVE)
    assert seen.page.evaluate("document.documentElement.dataset.bsTheme") == scheme
    assert seen.violations() == []


def test_the_keyboard_reaches_every_control_and_moves_through_the_subtasks(serve: Serve, visit: NewVisit) -> None:
    server = serve(eventful)
    seen = visit(server.url)
    seen.until(LIVE)
    page = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "crawl"
    page.keyboard.press("Enter")
    seen.until("document.querySelector('.hg-map') !== null")
    seen.until("[...document.querySelectorAll('button, a')].some(one => one.textContent === '1')")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        active = page.evaluate(
            "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
        )
        outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        if page.evaluate("document.activeElement === document.body"):
            break
        assert outlined != "none"
        reached.add(active)
    assert reached == {
        "All operators", "Subtask", "Attempts of the selected subtask", "1 min", "10 min", "all", "Latencies",
        "Counters", "Ready-made parts", "Sources", "Largest splits", "Checkpoints", "Recent failures", "1",
    }  # fmt: skip
    page.locator(".hg-map").focus()
    for key, subtask in (("ArrowRight", 1), ("ArrowRight", 2), ("End", 3), ("ArrowRight", 3), ("Home", 0)):
        page.keyboard.press(key)
        assert page.locator(".hg-map").get_attribute("aria-valuenow") == str(subtask)
        assert f"Subtask {subtask}: ready" in seen.text()
    assert page.evaluate("document.activeElement.className") == "hg-map"
    page.get_by_role("button", name="1 min").press("Enter")
    assert page.get_by_role("button", name="1 min").get_attribute("aria-pressed") == "true"


def test_a_link_keeps_the_focus_while_the_time_beside_it_changes(serve: Serve, visit: NewVisit) -> None:
    seen = visit(serve(eventful).url + "#/operator/crawl")
    seen.until(LIVE)
    row = seen.page.get_by_label("Recent failures").locator("tbody tr").first
    seen.page.get_by_label("Recent failures").get_by_role("link").first.focus()
    before = row.inner_text()
    seen.until(f"document.querySelector('[aria-label=\"Recent failures\"] tbody tr').innerText !== {before!r}")
    assert seen.page.evaluate("document.activeElement.textContent") == "1"


def test_the_largest_splits_of_a_source_are_shown_with_what_is_left(serve: Serve, visit: NewVisit) -> None:
    seen = visit(serve(eventful).url + "#/operator/crawl")
    seen.until(LIVE)
    rows = seen.page.get_by_label("Largest splits").locator("tr").all_inner_texts()
    assert [row.split("\t") for row in rows[1:]] == [
        ["pages", "3", "['pages', 7]", "5,000"],
        ["pages", "0", "['pages', 1]", "40"],
    ]


def test_what_the_backlog_needs_is_shown_with_the_subtasks(serve: Serve, visit: NewVisit) -> None:  # H199
    def scaled() -> SidecarStatus:
        status = eventful()
        scaling = AutoscaleStatus(1, 8, 5, "450 left to read, at 100 for each subtask")
        crawl = replace(status.operators["crawl"], autoscale=scaling)
        return replace(status, operators={**status.operators, "crawl": crawl})

    seen = visit(serve(scaled).url + "#/operator/crawl")
    seen.until(LIVE)
    assert "; autoscale: 450 left to read, at 100 for each subtask" in seen.text()


def test_the_figures_of_ready_made_parts_are_shown(serve: Serve, visit: NewVisit) -> None:
    seen = visit(serve(eventful).url + "#/operator/crawl")
    seen.until(LIVE)
    rows = seen.page.get_by_label("Ready-made parts").locator("tr").all_inner_texts()
    assert [row.split("\t") for row in rows[1:]] == [
        ["geocode", "hit share", "0.9550"],
        ["geocode", "entries", "48,211"],
        ["usd", "spent", "12.50"],
    ]


def test_the_mouse_chooses_a_subtask_and_names_the_one_under_it(serve: Serve, visit: NewVisit) -> None:
    server = serve(eventful)
    seen = visit(server.url + "#/operator/crawl")
    seen.until(LIVE)
    box = seen.page.locator(".hg-map").bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 5)
    assert seen.page.locator(".hg-hint").inner_text() == "subtask 2: ready (works)"
    seen.page.mouse.down()
    seen.page.mouse.up()
    assert "Subtask 2: ready" in seen.text()
    assert seen.page.url.endswith("#/operator/crawl/subtask/2")


@pytest.mark.parametrize("operator_view", [False, True])
def test_hostile_names_are_shown_as_text(serve: Serve, visit: NewVisit, operator_view: bool) -> None:
    def hostile() -> SidecarStatus:
        at = time.time()
        operator = synthetic.an_eventful_one(HOSTILE, stuck=True, at=at)
        attempts = tuple(one._replace(host=HOSTILE, executor_id=HOSTILE) for one in operator.attempts)
        failures = (FailureRecord(at, 1, 1, "failed", HOSTILE + "\nsecond line"),)
        checkpoints = tuple(one._replace(reason=HOSTILE) for one in operator.checkpoint_history)
        steps = tuple(one._replace(text=HOSTILE) for one in operator.timeline)
        changed = replace(
            operator, attempts=attempts, failures=failures, checkpoint_history=checkpoints, timeline=steps
        )
        return synthetic.a_sidecar(changed, at=at)

    server = serve(hostile)
    seen = visit(server.url)
    seen.until(LIVE)
    if operator_view:
        seen.page.get_by_role("link", name=HOSTILE).click()
        seen.until("document.querySelector('.hg-map') !== null")
        assert HOSTILE + "\nsecond line" in seen.page.get_by_role("region", name="Recent failures").inner_text()
    assert HOSTILE in seen.text()
    assert seen.page.locator("#headgate script, #headgate img").count() == 0
    assert seen.page.evaluate("window.taken") is None


def test_a_page_without_figures_yet_says_so_and_shows_them_when_they_come(serve: Serve, visit: NewVisit) -> None:
    # H155
    server = serve(eventful)
    server.has_figures = False
    seen = visit(server.url)
    seen.until("document.querySelector('#headgate p:not([hidden])') !== null")
    assert "waiting for the sidecar" in seen.text()
    assert "No figures yet. The sidecar sends them within some seconds; if none come, its log says why." in seen.text()
    server.has_figures = True
    seen.until(LIVE)
    assert "No figures yet" not in seen.text()
    assert "crawl" in seen.text()


TEXTS = {
    "a script": "</td></script><script>window.taken=1</script><img src=x onerror=window.taken=2>\"'`${window.taken=3}",
    "1,000 characters": "n" * 1000,
    "1,000 words": "word " * 1000,
    "a lone surrogate": "a\ud800b",
    "NUL": "a\0b",
    "a terminal's title and clearing": "\x1b]0;owned\x07\x1b[2J\x1b[H",
    "C1 control characters": "\x9b2J\x9d0;owned\x9c",
    "text from right to left": "\u202edaer\u202c",
    "line ends": "a\r\nb\u2028c\x85d",
    "percent signs": "%E0%A4%A %00 #/operator/other?x=1&y",
    "10 MB": "x" * 10_000_000,
}
NUMBERS: dict[str, tuple[Any, str]] = {
    "NaN": (nan, "NaN"),
    "infinity": (inf, "∞"),
    "a sum above all floats": (10**400 + 1, f"{10**400 + 1:,}"),
    "-infinity": (-inf, "-∞"),
    "2**70": (2**70, f"{2**70:,}"),
    "-2**70": (-(2**70), f"{-(2**70):,}"),
    "2**8191": (2**8191, f"{2**8191:,}"),
    "-0.0": (-0.0, "-0"),
    "1e300": (1e300, f"{10**300:,}"),
    "a NumPy integer": (np.int64(2**62), f"{2**62:,}"),
    "a NumPy float": (np.float32(3.0), "3"),
    "NumPy's NaN": (np.float64("nan"), "NaN"),
    "a Decimal": (Decimal(7), "7"),
    "Decimal's NaN": (Decimal("NaN"), "NaN"),
    "True": (True, "true"),
}
WIDTHS = """() => [...document.querySelectorAll("#headgate table, #headgate section, #headgate article, html")]
    .filter((one) => Math.max(one.getBoundingClientRect().right, one.scrollWidth) > window.innerWidth + 1)
    .map((one) => one.tagName + " " + one.className + " " + one.scrollWidth)"""
"""What is wider than the window."""


def full_of(text: str, at: float) -> SidecarStatus:
    """A status with the text wherever one of a user, or of Spark, may be, and with all numbers."""
    operator = synthetic.an_eventful_one(text[:100_000], stuck=True, at=at)
    changed = replace(
        operator,
        attempts=tuple(one._replace(host=text, executor_id=text) for one in operator.attempts),
        failures=(FailureRecord(at, 1, 1, "failed", text),),
        checkpoint_history=tuple(one._replace(reason=text) for one in operator.checkpoint_history),
        timeline=tuple(one._replace(text=text) for one in operator.timeline),
        counters={**{name: number for name, (number, _) in NUMBERS.items()}, text: 1},
        parts={text: {name: number for name, (number, _) in NUMBERS.items()}},
        sources={text: SourceStatus(2**70, 1, 2**70, (SplitStatus(0, text[:1000], 2**70),))},
        call=CallStatus(text, 7.0, text),
        autoscale=AutoscaleStatus(1, 8, 5, text),
    )
    return synthetic.a_sidecar(changed, at=at)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_and_no_number_runs_breaks_or_widens_the_page(
    text: str, serve: Serve, visit: NewVisit, tmp_path: Path
) -> None:  # H156
    events = iter(range(1000, 100_000))

    def hostile() -> SidecarStatus:
        status = full_of(text, time.time())
        (operator,) = status.operators.values()
        return replace(status, operators={"x": replace(operator, events_up_per_s=float(next(events)))})

    seen = visit(serve(hostile).url)
    page = seen.page
    seen.until(LIVE)
    assert page.evaluate(WIDTHS) == []
    page.screenshot(path=tmp_path / "all.png", full_page=True)
    page.locator(".hg-card a").first.click()
    seen.until("document.querySelector('.hg-map') !== null && document.querySelector('.hg-map').clientWidth > 0")
    page.screenshot(path=tmp_path / "one.png", full_page=True)
    assert page.evaluate(WIDTHS) == []
    shown = dict(
        row.split("\t")
        for row in page.get_by_label("Counters").locator("tbody tr").all_inner_texts()
        if row.split("\t")[0] in NUMBERS
    )
    assert shown == {name: text for name, (_, text) in NUMBERS.items() if name != "True"} | {"True": "1"}
    first = page.locator(".hg-value-up").inner_text()
    seen.until(f"document.querySelector('.hg-value-up').textContent !== '{first}'")
    page.get_by_role("link", name="All operators").click()
    seen.until("document.querySelector('.hg-card') !== null")
    assert page.evaluate("window.taken") is None
    assert page.locator("#headgate script, #headgate img").count() == 0


@pytest.mark.long
def test_the_page_says_that_the_sidecar_has_left_and_finds_the_next_one(serve: Serve, visit: NewVisit) -> None:
    there = True
    server = serve(lambda: eventful() if there else None)
    seen = visit(server.url)
    seen.until(LIVE)
    there = False
    seen.until("document.querySelector('.hg-live').textContent === 'the sidecar has left'")
    assert "crawl" in seen.text()
    there = True
    seen.until(LIVE)
    assert all("404" in complaint for complaint in seen.complaints)
    seen.complaints.clear()
