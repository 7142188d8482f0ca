# SPDX-License-Identifier: Apache-2.0

"""A plugin of pytest that runs tests on a product with a mutant in it.

``python -m pytest -p tests.mutants.plugin --mutant NAME tests/protocol`` shows which tests notice that mutant.
"""

from __future__ import annotations

import pytest

from spark_bridge.bridge import relay_jar
from tests.mutants.catalogue import BY_NAME


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutant", choices=list(BY_NAME), metavar="NAME", help="put this mutant into the product")


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--mutant"):
        BY_NAME[name].apply(pytest.MonkeyPatch())  # never undone: the process runs nothing else
        relay_jar.jar_bytes()  # a Java source that cannot be compiled would look like a mutant that is seen
