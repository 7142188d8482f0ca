# SPDX-License-Identifier: Apache-2.0

"""The fixtures for users' tests that need a real Spark; ``tests/test_distribution.py`` has the others, in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.long]  # another JVM

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "testing" / "test_fixtures.py"
PROGRAM = """
import pytest

def count(records):
    return [sum(1 for _ in records)]

@pytest.mark.parametrize("mode", ["batch", "streaming"] * 2)
def test_each_test_has_its_own_operators_and_checkpoints(headgate_sidecar, mode):
    job = headgate_sidecar.coordinate("count", parallelism=2, mode=mode)
    assert job.run(count, range(5)) == [2, 3]
    assert len(headgate_sidecar.status().operators) == 1
    assert job.statistics()["runs"] == 1

def test_the_session_is_shared(headgate_spark):
    assert headgate_spark.sparkContext.master == "local[2,4]"
    assert headgate_spark.range(3).count() == 3
"""


def test_a_test_of_a_user_has_a_sidecar_of_a_shared_session(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = spark: needs Java\n", encoding="utf-8")
    (tmp_path / "test_program.py").write_text(PROGRAM, encoding="utf-8")
    plugin = ["-p", "no:headgate", "-p", "headgate._pytest"]  # whether this environment has its entry point or not
    options = ["-c", "pytest.ini", "-p", "no:cacheprovider", "--asyncio-mode", "auto"]
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *options, "test_program.py", EXAMPLE],
        cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert "7 passed" in done.stdout, done.stdout + done.stderr
