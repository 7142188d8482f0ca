# SPDX-License-Identifier: Apache-2.0

"""Every hostile number and text on every way out of a sidecar: its reader can read what comes, and runs none of it."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from html.parser import HTMLParser
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from actors.logs import get_logger
from protocol.attempts import FailureKind, FailureReason, OperatorReset, RunEnded, RunStarted, SubtaskFailed
from protocol.barrier_tracker import CheckpointTriggered, NotifyCheckpointAborted
from protocol.describing import as_json
from protocol.ids import ExecutionAttempt
from spark_bridge.command import main
from spark_bridge.common import command_line
from spark_bridge.observability.event_log import note_of
from spark_bridge.observability.history import NOTES, read_timeline
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.page_data import page_json
from spark_bridge.observability.page_files import page_routes
from spark_bridge.observability.progress import Progress
from spark_bridge.observability.prometheus import metrics_route
from spark_bridge.observability.spark_metrics import gauges
from spark_bridge.observability.status import (
    CallStatus,
    CheckpointRecord,
    FailureRecord,
    SidecarStatus,
    SourceStatus,
    SplitStatus,
    TimelineRecord,
)
from spark_bridge.observability.status_server import Request
from spark_bridge.standalone.status_bytes import pack_status, unpack_status
from spark_bridge.standalone.top import lines_of
from spark_bridge.storage.inspection import _as_text
from spark_bridge.storage.interface import CheckpointInfo
from tests.spark_bridge.observability.statuses import NOW, attempt, operator, sidecar
from tests.spark_bridge.observability.test_spans import Recorded
from tests.spark_bridge.observability.test_trace import Bench

NUMBERS: dict[str, Any] = {
    "NaN": nan,
    "infinity": inf,
    "-infinity": -inf,
    "-0.0": -0.0,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "2**4095": 2**4095,
    "2**20000": 2**20000,
    "True": True,
    "Decimal": Decimal("1.5"),
    "Decimal NaN": Decimal("NaN"),
    "Fraction": Fraction(1, 3),
    **{
        kind.__name__: kind(1)
        for kind in (np.bool_, np.int8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.longdouble)
    },
    "NumPy's NaN": np.float32("nan"),
}
TEXTS = {
    "a plain text": "crawl",
    "an empty one": "",
    "a lone surrogate": "a\ud800b",
    "NUL": "a\0b",
    "a terminal's title and clearing": "\x1b]0;owned\x07\x1b[2J\x1b[H",
    "C1 control characters": "\x9b2J\x9d0;owned\x9c",
    "text from right to left": "\u202edaer\u202c",
    "line ends": "a\r\nb\u2028c\x85d",
    "HTML": "</td></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'",
    "JSON": '"}],\\u0000 {{',
    "Prometheus": 'a"} 1\n# EOF\nheadgate_operators 7',
    "10 MB": "x" * 10_000_000,
}
CASES = [
    *(pytest.param(number, "crawl", id=name) for name, number in NUMBERS.items()),
    *(pytest.param(1, text, id=name) for name, text in TEXTS.items()),
]
of_every_value = pytest.mark.parametrize(("number", "text"), CASES)
ATTEMPT = ExecutionAttempt("op", 0, 0, 77)


def hostile(number: Any, text: str) -> SidecarStatus:
    """A status with the number and the text wherever one of a user, or of Spark, may be."""
    one = operator(
        operator_id=text,
        attempts=(attempt(0, host=text, executor_id=text), attempt(1)),
        counters={text or "n": number, "other": number},
        parts={text: {"spent": number}},
        sources={text: SourceStatus(number, 1, number, (SplitStatus(0, text, number),))},
        failures=(FailureRecord(NOW, 0, 0, "failed", text),),
        timeline=(TimelineRecord(NOW, "run ended", None, None, text),),
        checkpoint_history=(CheckpointRecord(1, False, NOW, 1.0, {"closing": 1.0}, "aborted", text),),
        call=CallStatus(text, 7.0, text),
    )
    return sidecar(one, display_failures={"trace": 1})


def strict(written: bytes | str) -> Any:
    """Read JSON as the strictest readers do."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"no JSON: {constant}")

    read = json.loads(written, parse_constant=refuse)
    json.dumps(read, ensure_ascii=False).encode()  # no lone surrogates
    return read


def harmless(text: str) -> bool:
    """Whether a terminal that shows the lines obeys none of them."""
    return all(one.isprintable() for one in text.split("\n"))


@of_every_value
def test_the_tab_and_the_status_page_get_json(number: Any, text: str) -> None:  # H156
    status = hostile(number, text)
    page = strict(page_json(status, ["a sentence", text]))
    assert page["operators"][0]["counters"]
    assert strict(page_routes(lambda: status)["/status.json"](Request("/status.json", {}, "")).body)


@of_every_value
def test_a_status_is_json_and_comes_back_from_it_and_from_another_process(number: Any, text: str) -> None:  # H156
    status = hostile(number, text)
    written = json.dumps(status.to_dict(), allow_nan=False)
    again = SidecarStatus.from_dict(strict(written))
    packed = unpack_status(pack_status(status))
    for read in (again, packed):
        (one,) = read.operators.values()
        (counted, *_), expected = one.counters.values(), number
        if type(number) is float and isnan(number):
            assert isnan(counted)
        elif type(number) in (int, float) and abs(number) != 2**20000:
            assert counted == expected
        else:
            assert type(counted) in (bool, int, float)


@of_every_value
@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=1.0.0", "text/plain"])
def test_prometheus_can_read_the_figures(accept: str, number: Any, text: str) -> None:  # H156
    status = hostile(number, text)
    body = metrics_route(lambda: status)(Request("/metrics", {}, accept)).body.decode()
    parse: Callable[[str], Any] = parse_openmetrics if "open" in accept else parse_text
    found = {sample.name: sample for family in parse(body) for sample in family.samples}
    assert found["headgate_operators"].value == 1
    assert "headgate_source_backlog" in found
    assert found["headgate_part"].labels["figure"] == "spent"
    assert found["headgate_display_failures_total"].labels == {"display": "trace"}


@of_every_value
def test_sparks_metrics_are_doubles_whose_names_have_one_line(number: Any, text: str) -> None:  # H156
    found = gauges(hostile(number, text))
    assert len(struct.pack(f">{len(found)}d", *found.values())) == 8 * len(found)
    assert all(re.fullmatch(r"[\w.-]*", name, re.ASCII) for name in found)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


@of_every_value
def test_a_notebook_gets_tables_that_run_nothing(number: Any, text: str) -> None:  # H156
    page = hostile(number, text)._repr_html_()
    page.encode()
    assert harmless(page)
    assert len(page) < 1_000_000
    assert Tags(page).tags <= {"div", "b", "span", "table", "thead", "tbody", "tr", "th", "td"}


@of_every_value
def test_top_prints_lines_that_a_terminal_does_not_obey(number: Any, text: str) -> None:  # H156
    for one in lines_of(hostile(number, text), 160, subtasks_max=20):
        assert one.isprintable()
        assert len(one) <= 160


@of_every_value
def test_notes_travel_through_the_event_log_to_history(
    number: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    journal = Journal(1000.0)
    reason = FailureReason(FailureKind.FAILED, text)
    seen: list[Any] = [RunStarted("op", 4), SubtaskFailed(ATTEMPT, reason), RunEnded("op", 4, False, text)]
    notes = as_json([note_of(text[:256], one, 1000.0, journal) for one in seen]).decode()
    start = {"Event": "SparkListenerApplicationStart", "App Name": text, "App ID": "local-1", "Timestamp": 1}
    log = tmp_path / "log"
    log.write_bytes(as_json(start) + b"\n" + as_json({"Event": NOTES, "notes": notes}) + b"\n")
    assert strict(notes)[1]["what"] == "attempt failed"
    assert len(notes) < 10_000
    assert read_timeline(log).notes == 3
    assert main(["history", str(log)]) == 0
    assert harmless(capsys.readouterr().out)
    assert main(["history", "--json", str(log)]) == 0
    for one in capsys.readouterr().out.splitlines():
        strict(one)


@of_every_value
def test_spans_can_be_exported(number: Any, text: str) -> None:  # H156
    recorded = Recorded()
    reason = FailureReason(FailureKind.FAILED, text)
    recorded.observe(CheckpointTriggered(1), NotifyCheckpointAborted(1, text), RunStarted("op", 4))
    recorded.observe(SubtaskFailed(ATTEMPT, reason), RunEnded("op", 4, False, text))
    recorded.spans.close()
    spans = recorded.exporter.get_finished_spans()
    assert {span.name for span in spans} >= {"headgate.run", "headgate.attempt", "headgate.checkpoint"}
    for span in spans:
        strict(span.to_json())  # the exporters send UTF-8
    assert not recorded.journal.displays.failures().get("spans")


@of_every_value
def test_a_trace_is_a_file_of_json(number: Any, text: str, tmp_path: Path) -> None:  # H156
    bench = Bench(tmp_path / "job.json")
    reason = FailureReason(FailureKind.FAILED, text)
    bench.see(OperatorReset("crawl", text), SubtaskFailed(ATTEMPT, reason), RunEnded("crawl", 4, False, text))
    bench.trace.sample(hostile(number, text))
    bench.trace.close()
    bench.file.close()
    assert strict((tmp_path / "job.json").read_text("utf-8"))
    assert not bench.journal.displays.failures().get("trace")


@of_every_value
def test_a_progress_bar_goes_on(number: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:  # H155, H156
    told = {"failures": 0, "resets": 0, "splits_done": None, "counters": [{"n": 5}, {}]}
    with Progress(text, lambda: told, 100, counter="n", shown=True) as bar:
        told["counters"] = [{"n": number}, {}]
        bar.say(text)
    assert isinstance(bar.done, int)
    error = capsys.readouterr().err
    error.encode()
    assert harmless(error.replace("\r", "").replace("\x1b[A", "").replace("\x1b[K", ""))


@of_every_value
def test_a_line_of_the_log_can_be_written(number: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:  # H156
    log = get_logger("headgate.under_test")

    class Named:
        def __repr__(self) -> str:
            return text

    try:
        raise ValueError(text)
    except ValueError:
        log.exception("something failed", why=text, count=number, what=Named())
    written = logging.Formatter().format(caplog.records[-1])
    written.encode()
    assert harmless(written)
    assert len(written) < 100_000


@of_every_value
def test_checkpoints_prints_lines_that_a_terminal_does_not_obey(number: Any, text: str) -> None:  # H156
    infos = [CheckpointInfo(text, 3, text, 10, text), CheckpointInfo(text, 3, text, 10, "", label=text)]

    class Ascii:
        encoding = "ascii"
        written = ""

        def write(self, told: str) -> None:
            told.encode("ascii")
            self.written += told

    stream: Any = Ascii()
    for one in _as_text(infos, with_files=True):
        command_line.tell(stream, one)
    assert harmless(stream.written)
    assert stream.written.count("\n") == (4 if text else 3), "the heads, two rows, and what is wrong with one"
