# SPDX-License-Identifier: Apache-2.0

"""A plugin of pytest that keeps which test runs and how it failed, for a process that watches."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--found", type=Path, metavar="FILE", help="write the test that runs, and how it failed, to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if found := config.getoption("--found"):
        config.pluginmanager.register(Recorder(found))


class Recorder:
    """Keeps the latest test in a file, and the reason if it failed. A process that dies leaves the test it died in."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.failed = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.failed:
            self._file.write_text(nodeid + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = True
            self._file.write_text(f"{report.nodeid}\n{_message_of(report)}", encoding="utf-8")


def _message_of(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)
