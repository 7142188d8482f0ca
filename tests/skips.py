# SPDX-License-Identifier: Apache-2.0

"""A plugin of pytest: in continuous integration (CI=true), a skipped test fails unless ``allowed_skips.toml`` names it.

A test that is skipped on every machine tests nothing, and nobody notices.

A whole run takes an hour, and twice as long on a slow machine, where it is ended from outside and shows nothing.
With ``HEADGATE_TESTS_END``, a time in seconds since 1970, tests that have not begun by then are skipped, and listed.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("allowed_skips.toml")
END = "HEADGATE_TESTS_END"
OUT_OF_TIME = "this machine is slow, and the time for the tests is over"


@dataclass(frozen=True)
class AllowedSkip:
    """``test``: its file and function. ``reason``: how the reason begins. ``why``: why nothing is lost."""

    test: str
    reason: str
    why: str


def read() -> tuple[AllowedSkip, ...]:
    return tuple(AllowedSkip(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["skip"])


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure, in continuous integration and unless it is allowed."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI", "").lower() not in ("1", "true"):
        return
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason == OUT_OF_TIME:
        return
    test = report.nodeid.partition("[")[0]
    if any(one.test == test and reason.startswith(one.reason) for one in read()):
        return
    report.outcome = "failed"
    report.longrepr = (
        f"{test} was skipped in continuous integration: {reason}\n"
        "A test that is skipped there shows nothing. Let .ci install what it needs, as .ci/find-chromium does, or name "
        f"the test, this reason and why nothing is lost in tests/{LIST.name}."
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks
def pytest_runtest_setup(item: pytest.Item) -> None:
    if END in os.environ and time.time() >= float(os.environ[END]):
        item.add_marker(pytest.mark.skip(reason=OUT_OF_TIME))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    judge(report)
    return report
