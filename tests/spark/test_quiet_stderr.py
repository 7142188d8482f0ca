# SPDX-License-Identifier: Apache-2.0

"""A job that succeeds writes nothing to standard error, whatever its tasks went through (H59)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.spark.cluster import ROOT
from tests.spark.quiet_program import MARKER

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.timeout(600)
def test_jobs_that_succeed_write_nothing_to_standard_error() -> None:
    # Tasks that raise or are killed once, iterators that are left early, and events for tasks that have just ended.
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.quiet_program"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    told = done.stderr.partition(MARKER)[2].splitlines()
    # As any handler does, and any loop, where something else has the processor.
    about_the_machine = ("handler blocked the event loop", "or the machine is overloaded")
    assert [line for line in told if line.strip() and not any(text in line for text in about_the_machine)] == []
