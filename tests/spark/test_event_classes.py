# SPDX-License-Identifier: Apache-2.0

"""A class that a notebook registers is found in the tasks, also if it is defined again (H97)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
@pytest.mark.spark
def test_the_classes_of_a_notebook_arrive_in_its_tasks() -> None:  # H97
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.cells_of_a_notebook"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first.startswith("[0, 1, 2, 3, 4, 5] FIRST Rules ")
    assert second.startswith("[7] SECOND Rules ")
    for text in (first, second):
        assert "event '__main__.Unsendable', because its class was not sent with it" in text
