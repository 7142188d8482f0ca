# SPDX-License-Identifier: Apache-2.0

"""The examples of ``headgate.testing`` are tests themselves, and they also run from a separate folder."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from examples.testing import test_troubles
from examples.testing.test_file_sink import test_rows_become_visible_with_the_checkpoint_that_covers_them
from examples.testing.test_kill_and_retry import (
    test_killed_task_goes_on_from_the_checkpoint,
    test_total_is_right_whatever_the_order_of_messages,
)
from examples.testing.test_rate_limit import (
    test_all_callers_together_keep_the_rate,
    test_permits_come_back_at_the_agreed_rate,
)

__all__ = [
    "test_all_callers_together_keep_the_rate",
    "test_killed_task_goes_on_from_the_checkpoint",
    "test_permits_come_back_at_the_agreed_rate",
    "test_rows_become_visible_with_the_checkpoint_that_covers_them",
    "test_total_is_right_whatever_the_order_of_messages",
]

TROUBLES = [
    test
    for name, test in vars(test_troubles).items()
    if name.startswith("test_") and not inspect.signature(test).parameters  # the other one needs its fixture
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "testing"


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_trouble_looks_as_its_example_says(trouble: Callable[[], Awaitable[None]]) -> None:
    await trouble()


@pytest.mark.parametrize(
    ("files", "passed"),
    [("test_[!o]*.py", "23 passed"), pytest.param("test_own_*.py", "2 passed", marks=pytest.mark.long)],
)
def test_the_examples_can_be_copied(tmp_path: Path, files: str, passed: str) -> None:
    for file in EXAMPLES.glob(files):
        shutil.copy(file, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "--asyncio-mode", "auto", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed in done.stdout
