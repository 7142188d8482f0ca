# SPDX-License-Identifier: Apache-2.0

"""Every program on a page runs, pasted into an empty file: see ``tests/pages.py`` for how a page is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, Block, Reader, Terminal, check, named, programs
from tests.release.environments import Environment, brought_by

# All programs need the first of these; a page names what else it needs.
EXTRAS = ("pyspark", "connect", "dataframe", "delta", "iceberg", "kafka", "postgres", "progress", "redis", "xgboost")
# The variables that programs read, with the fixture that starts the server, and its attribute.
SERVERS = {
    "CONNINFO": ("postgres", "conninfo"),
    "REDIS_URL": ("redis_server", "url"),
    "KAFKA_SERVERS": ("kafka", "servers"),
}
WITH_PROGRAMS = [page for page in PAGES if programs(page)]


def test_every_name_in_a_program_of_a_page_is_defined_there(tmp_path: Path) -> None:
    """One run of ruff for all pages."""
    for page in WITH_PROGRAMS:
        for name, text in programs(page).items():
            file = tmp_path / page.relative_to(ROOT) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise", "."]
    found = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    lines = [line for line in found.splitlines() if line.count(":") > 2]
    assert lines == [], "a reader cannot paste these; a page must show whole programs"


def test_what_a_page_says_is_printed_in_this_order_and_only_numbers_that_it_names_may_differ() -> None:
    printed = ["a log line", "3 rows of 10", "", "  in 0.25 s  ", "task died: killed"]
    check(Block("text", "", "7 rows of 10\nin 1.5 s\n...\ntask died: ...\n", ("7", "1.5")), iter(printed))
    for claim in ("3 rows of 11", "in 0.25 s\n3 rows of 10", "rows of 10"):
        with pytest.raises(AssertionError, match="the page says"):
            check(Block("text", "", claim, ("3",)), iter(printed))


@pytest.fixture(scope="module")
def terminal(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal in an environment with the wheel, and with what the pages let a reader install."""
    linked = brought_by(EXTRAS, "pyspark[pipelines]", "pytest", "pytest-asyncio", "pyiceberg[sql-sqlite]")
    installed = Environment(tmp_path_factory.mktemp("reader") / ".venv", wheel, linked=linked)
    with Terminal(installed.folder / "bin") as terminal:
        yield terminal


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=named)
def test_a_page_can_be_followed_to_the_letter(
    page: Path, terminal: Terminal, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its programs and commands, in its order, outside of the repository, and they print what it says."""
    variables = {
        variable: getattr(request.getfixturevalue(fixture), attribute)
        for variable, (fixture, attribute) in SERVERS.items()
        if any(variable in text for text in programs(page).values())
    }
    with Reader(tmp_path, terminal, variables) as reader:
        reader.follow(page)
