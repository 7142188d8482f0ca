# SPDX-License-Identifier: Apache-2.0

"""A plugin of pytest that runs tests on a product with a mutant in it.

``python -m pytest -p tests.mutants.plugin --mutant NAME tests/protocol`` shows which tests notice that mutant.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import BY_NAME


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutant", choices=list(BY_NAME), metavar="NAME", help="put this mutant into the product")
    group.addoption("--found", type=Path, metavar="FILE", help="write the test that runs, and how it failed, to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--mutant"):
        BY_NAME[name].apply(pytest.MonkeyPatch())  # never undone: the process runs nothing else
    if found := config.getoption("--found"):
        config.pluginmanager.register(_Recorder(found))


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
