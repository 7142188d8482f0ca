# SPDX-License-Identifier: Apache-2.0

"""Files and tables of other tools, in each zone: no value differs silently, and the page says what becomes of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import Postgres
from tests.spark.cluster import ROOT
from tests.spark.matrix.program import OMITTED, TURNS, Outcomes
from tests.spark.matrix.values import ORIGINAL
from tests.spark.matrix.writers import ALL, write_all

pytestmark = [pytest.mark.spark, pytest.mark.long]

CLUSTER = "local-cluster[1,2,1024]"
ZONES = [
    ("UTC", "local[2]", "UTC", "UTC"),
    ("America/New_York", "local[2]", "America/New_York", "America/New_York"),
    ("Asia/Kolkata", "local[2]", "Asia/Kolkata", "Asia/Kolkata"),
    ("America/New_York", CLUSTER, "Asia/Kolkata", "UTC"),
    ("UTC", CLUSTER, "America/New_York", "Asia/Kolkata"),
]
PAGE = ROOT / "docs" / "reference" / "files-by-others.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix")
    write_all(path)
    return path


def names(chosen: set[str]) -> str:
    """The columns in their order, or those that are missing, whichever is shorter."""
    missing = ALL - chosen
    listed = ", ".join(
        f"`{name}`" for name in ORIGINAL.schema.names if name in (chosen if len(missing) > 12 else missing)
    )
    return listed if len(missing) > 12 else f"all but {listed}" if missing else "all"


def tables(found: Outcomes) -> Iterator[str]:
    """The lines of the page that show what became of each cell."""
    for (tool, kind), omitted in OMITTED.items():
        ways = {how: one for how, one in found.items() if how.startswith(f"{tool}|{kind}|")}
        texts = {name for one in ways.values() for name, verdict in one.items() if verdict == "text"}
        yield f"| {tool} | {kind} | {names(ALL - omitted)} | {', '.join(f'`{name}`' for name in sorted(texts))} |"
    for place, one in found.items():
        what, kind, how = place.split("|")
        if kind == "refused" and how == "spark.read":
            yield f"| {what} | {found[f'{what}|refused|task']['a']} | {one['a']} |"
        elif how in ("reads", "writes") or kind == "PostgreSQL":
            yield f"| {kind} | {what} | {names(set(one))} |"


@pytest.mark.parametrize("zones", ZONES, ids=lambda zones: "-".join(zones).replace("/", "_"))
def test_each_value_of_another_tool_arrives_as_it_was_or_is_refused(
    folder: Path, postgres: Postgres, zones: tuple[str, str, str, str]
) -> None:  # H170, H171
    driver, master, session, workers = zones
    turn = str(ZONES.index(zones) % TURNS)
    command = [sys.executable, "-m", "tests.spark.matrix.program", str(folder), turn, master, session, workers]
    environment = {**os.environ, "TZ": driver, "PYTHONPATH": str(ROOT), "POLARS_ICEBERG_PLANNER": "pyiceberg"}
    command.append(postgres.conninfo)
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (place,) = folder.glob(f"zones-{'-'.join((driver, session, workers)).replace('/', '-')}/found.json")
    found: Outcomes = json.loads(place.read_text())
    different = {how: one for how, one in found.items() if "DIFFERENT" in str(one)}
    assert not different
    # Heads of tables begin with "| *", and the table that explains the columns has their names in front.
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line[2] not in "*`"]
    assert sorted(tables(found)) == sorted(shown), "the page shows something else"
