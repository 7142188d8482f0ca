# SPDX-License-Identifier: Apache-2.0

"""A plugin of pytest that runs chosen tests, and keeps which one runs and how it failed, for a process that watches."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--found", type=Path, metavar="FILE", help="write the test that runs, and how it failed, to FILE")
    group.addoption("--listed", type=Path, metavar="FILE", help="run only the tests whose functions FILE names")


def pytest_configure(config: pytest.Config) -> None:
    if found := config.getoption("--found"):
        config.pluginmanager.register(_Recorder(found))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if listed := config.getoption("--listed"):
        names = set(listed.read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid.partition("[")[0] in names]


class _Recorder:
    """Keeps the latest test in a file, and the reason if it failed. A process that dies leaves the test it died in."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self._failed:
            self._file.write_text(nodeid + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = True
            self._file.write_text(f"{report.nodeid}\n{_message_of(report)}", encoding="utf-8")


def _message_of(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)
