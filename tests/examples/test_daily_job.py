# SPDX-License-Identifier: Apache-2.0

"""The daily job writes each day once, also if a scheduler repeats one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.examples.conftest import RunExample


@pytest.mark.long
@pytest.mark.spark
def test_every_day_is_written_once_although_one_is_repeated(run_example: RunExample, tmp_path: Path) -> None:  # H174
    for days, day in ((1, "2026-11-26"), (2, "2026-11-27"), (2, "2026-11-27")):
        ended = run_example("daily_job", day, str(tmp_path))
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1].count(": 100") == days, "the counters have all days"
    files = Path(tmp_path, "headgate-daily-job", "orders").glob("part-*")
    lines = Counter(line for file in files for line in file.read_text().splitlines())
    assert set(lines.values()) == {1}
    assert Counter(line.partition(" ")[0] for line in lines) == {"2026-11-26": 100, "2026-11-27": 100}
