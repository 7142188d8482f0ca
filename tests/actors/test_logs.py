# SPDX-License-Identifier: Apache-2.0

"""Where log lines go: to standard error by default, to the standard library's handlers, or to structlog."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture, capture_logs

from actors.logs import get_logger

log = get_logger("headgate.under_test")


@contextmanager
def handled_by_nobody() -> Iterator[None]:
    """As in a program that has configured no logging: pytest's handlers are at the root."""
    root = logging.getLogger()
    handlers, root.handlers[:] = root.handlers[:], []
    try:
        yield
    finally:
        root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def not_configured() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    logging.getLogger("headgate").setLevel(logging.NOTSET)


def test_a_program_that_configures_nothing_gets_warnings_on_standard_error_and_nothing_on_standard_output() -> None:
    program = (
        "from actors.logs import get_logger\n"
        "log = get_logger('headgate.bridge')\n"
        "log.debug('one'); log.info('two', n=2)\n"
        "log.bind(operator_id='crawl').warning('attempt failed', subtask=3, reason='a\\nb', seconds=0.5, why='')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    (line,) = done.stderr.splitlines()
    _day, _time, rest = line.split(" ", 2)
    expected = r"attempt failed operator_id=crawl subtask=3 reason='a\nb' seconds=0.5 why=''"
    assert rest == f"WARNING headgate.bridge: {expected}"
    assert done.stdout == ""


def test_a_level_is_enough_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    with handled_by_nobody():
        logging.getLogger("headgate").setLevel(logging.INFO)
        log.info("seen")
        log.debug("not seen")
        logging.getLogger("headgate").setLevel(logging.ERROR)
        log.warning("not seen")
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "INFO headgate.under_test: seen" in err


def test_handlers_get_the_record_with_its_keys_and_where_it_was_written(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = log.bind(operator_id="crawl").bind(subtask=1).unbind("operator_id")
    bound.warning("attempt failed", kind="lost")
    (record,) = caplog.records
    assert record.getMessage() == "attempt failed subtask=1 kind=lost"
    assert vars(record)["headgate"] == {"event": "attempt failed", "subtask": 1, "kind": "lost"}
    assert record.funcName == "test_handlers_get_the_record_with_its_keys_and_where_it_was_written"
    assert "headgate.under_test" not in capsys.readouterr().err, "pytest's handler has it"


def test_context_variables_are_keys(caplog: pytest.LogCaptureFixture) -> None:
    with structlog.contextvars.bound_contextvars(actor="talker"):
        log.warning("said")
    assert caplog.messages == ["said actor=talker"]


def test_an_exception_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    for write in (log.exception, lambda event: log.warning(event, exc_info=True)):
        caplog.clear()
        try:
            raise ValueError("no such topic")
        except ValueError:
            write("failed")
        assert 'raise ValueError("no such topic")' in caplog.text
        assert caplog.messages == ["failed"]
    caplog.clear()
    log.error("failed", exc_info=ValueError("given"))
    assert "ValueError: given" in caplog.text


def test_a_value_that_cannot_be_shown_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    log.warning("odd", value=Broken(), other=1)
    assert caplog.messages == ["odd value=<not shown: RuntimeError> other=1"]


def test_what_is_not_enabled_is_not_even_rendered() -> None:
    class Watched:
        def __repr__(self) -> str:
            raise AssertionError("it was rendered")

    log.debug("quiet", value=Watched())


def test_structlog_gets_the_keys_once_it_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    bound = log.bind(operator_id="crawl")  # made before the configuration
    bound.warning("to the standard library")
    for _ in range(2):  # also after another configuration
        entries = LogCapture()
        structlog.configure(processors=[entries])
        bound.info("attempt failed", subtask=3)
        log.debug("also this", n=1)
        assert [{**entry} for entry in entries.entries] == [
            {"operator_id": "crawl", "subtask": 3, "event": "attempt failed", "log_level": "info"},
            {"n": 1, "event": "also this", "log_level": "debug"},
        ]
    assert "attempt failed" not in "".join(capsys.readouterr())


def test_structlogs_capture_logs_sees_every_line() -> None:
    with capture_logs() as lines:
        log.bind(a=1).info("said", b=2)
    assert lines == [{"a": 1, "b": 2, "event": "said", "log_level": "info"}]


def test_a_method_that_only_structlog_has_needs_structlog() -> None:
    with pytest.raises(AttributeError, match="'ainfo'"):
        _ = log.ainfo
    structlog.configure()
    method: Any = log.ainfo
    assert callable(method)


def failure(text: str) -> Exception:
    try:
        raise LookupError(text)
    except LookupError as error:
        return error


LONG = "begins" + "x" * 10_000_000 + "ends"


@pytest.mark.parametrize("text", [LONG, "begins \udc80 ends"], ids=["long", "not valid Unicode"])
def test_any_text_of_an_exception_gives_a_line_that_is_short_and_can_be_written(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:  # H178
    with handled_by_nobody():
        log.error("operator failed", error=text, exc_info=failure(text))
    err = capfd.readouterr().err
    assert len(err) < 100_000
    assert "Logging error" not in err
    assert err.count("begins") == err.count("ends") == 2
    assert "LookupError" in err

    structlog.configure(processors=[captured := LogCapture()])
    log.error("operator failed", error=text, exc_info=failure(text))
    (entry,) = captured.entries
    assert len(entry["error"]) + len(entry["exception"]) < 100_000
    assert "LookupError: begins" in entry["exception"].encode().decode()
    assert entry["exc_info"] is None


def test_ordinary_exceptions_are_passed_on_as_they_are() -> None:
    structlog.configure(processors=[captured := LogCapture()])
    error = failure("plain")
    log.error("operator failed", error="plain", exc_info=error)
    assert captured.entries[0]["exc_info"] is error
