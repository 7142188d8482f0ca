# SPDX-License-Identifier: Apache-2.0

"""Files of other tools, read in a process with a zone; `tests/spark/matrix` does the same on a real Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.spark.matrix.program import FORMATS, read_here, refusal, verdicts
from tests.spark.matrix.test_matrix import PAGE, names
from tests.spark.matrix.values import ORIGINAL
from tests.spark.matrix.writers import ALL, FILES, REFUSED, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("by-others")
    write_all(path)
    return path


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def zone(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(("tool", "kind"), FILES, ids=lambda one: one.replace(", ", "-").replace(" ", "-"))
def test_each_value_that_another_tool_writes_arrives_as_it_was(folder: Path, zone: None, tool: str, kind: str) -> None:
    # H171
    written = [name for name in ORIGINAL.schema.names if name not in FILES[tool, kind][1]]
    found = verdicts(
        read_here(f"{folder}/{tool}/{kind}", {"format": FORMATS.get(kind, kind)}), ORIGINAL.select(written)
    )
    assert set(found.values()) <= {"kept", "text"}, {name: one for name, one in found.items() if "DIFFERENT" in one}
    texts = ", ".join(f"`{name}`" for name in sorted(found) if found[name] == "text")
    row = f"| {tool} | {kind} | {names(ALL - FILES[tool, kind][1])} | {texts} |"
    assert row in PAGE.read_text(), "the page shows something else"


@pytest.mark.parametrize("what", REFUSED, ids=lambda one: one.replace(" ", "-"))
def test_what_would_not_arrive_is_refused(folder: Path, what: str) -> None:
    """H171. What Arrow has and Spark lacks is only refused where Spark would get it."""
    _, name, words = REFUSED[what]
    place = folder / "refused" / what / (name if name != "table" else "")
    outcome = refusal(
        partial(read_here, str(place), {"format": "json" if name.endswith("jsonl") else "parquet"}), words
    )
    assert f"| {what} | {outcome} |" in PAGE.read_text()
    assert outcome == "refused" or words.startswith("column") or "cannot be" in words
