# SPDX-License-Identifier: Apache-2.0

"""What notebooks show: it never raises, never waits long, and lets nothing of the user's through unescaped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, cast

import pytest
from pyspark import SparkContext

from protocol.wire.keys import KeyRing
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.observability import html
from spark_bridge.observability.html import handle_html, shown_within, sidecar_html
from spark_bridge.observability.status import CallStatus
from tests.spark_bridge.observability.statuses import attempt, operator, run, sidecar

KEY = KeyRing(bytes(32)).task_key("words")
EVIL = "<script>alert('x')</script>\" onload=\"y"


class Seen(HTMLParser):
    """The tags, attributes and texts of a fragment; whether every tag is closed."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def handle_of(statistics: Any = dict, failure: Any = lambda: None) -> OperatorHandle:
    return OperatorHandle(TaskEndpoint("host", 1, KEY, EVIL.replace("/", ""), 4), statistics, failure)


def test_a_status_shows_its_operators() -> None:
    call = CallStatus("handle_request(subtask=1)", 40.0, "crawl.py:31")
    shown = Seen(sidecar(operator(call=call, last_completed_checkpoint_id=12))._repr_html_())
    for text in ("crawl", "4 of 4", "handle_request(subtask=1), 40 s", "12", "running"):
        assert text in shown.texts


def test_everything_is_escaped() -> None:
    status = sidecar(operator(operator_id=EVIL, mode=EVIL, call=CallStatus(EVIL, 9.0, EVIL)), host=EVIL)
    fragments = [
        status._repr_html_(),
        sidecar_html(lambda: (status, [EVIL])),
        sidecar_html(lambda: raising(ValueError(EVIL))),
        handle_of()._repr_html_(),
        handle_of(lambda: {"attempts": EVIL, "runs": EVIL}, lambda: ValueError(EVIL))._repr_html_(),
    ]
    for fragment in fragments:
        shown = Seen(fragment)
        assert shown.tags <= {"div", "b", "span", "table", "thead", "tbody", "tr", "th", "td"}
        assert shown.attributes <= {"style", "scope"}
        assert EVIL.replace("/", "") in "".join(shown.texts).replace("/", "")


def test_no_colour_is_set_that_a_dark_page_or_a_light_one_would_hide() -> None:
    fragment = sidecar(operator())._repr_html_()
    assert "background" not in fragment
    assert " color:" not in fragment


def test_an_answer_that_does_not_come_is_not_waited_for(stuck: threading.Event) -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        shown_within(stuck.wait, 0.01)
    assert "no answer within 1 s" in "".join(Seen(sidecar_html(cast(Any, stuck.wait))).texts)
    assert "no answer within 1 s" in "".join(Seen(handle_of(stuck.wait)._repr_html_()).texts)


def raising(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("broken", [None, 3, object(), sidecar(cast(Any, operator(attempts=None)))])
def test_nothing_that_is_read_makes_it_raise(broken: Any) -> None:
    Seen(html.status_html(broken))
    Seen(sidecar_html(lambda: broken))
    Seen(handle_html("x", 1, lambda: broken))


def test_a_sidecar_that_is_not_running_says_so() -> None:
    assert "the sidecar is not running" in Sidecar(object.__new__(SparkContext))._repr_html_()


def test_the_diagnosis_comes_with_the_sidecar() -> None:
    status = sidecar(operator(attempts=(attempt(3),), run=run(subtasks_seen=1)))
    shown = Seen(sidecar_html(lambda: (status, ["subtask 3 has waited 41 s"] * 20)))
    assert shown.texts.count("subtask 3 has waited 41 s") == html.SENTENCES_MAX


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert html.duration(seconds) == text
