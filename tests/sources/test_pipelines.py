# SPDX-License-Identifier: Apache-2.0

"""Chains from files to files (H80, H130): every row is written once, whatever is lost and however many tasks go on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from headgate import chain
from headgate.sinks import FileSink
from headgate.sources import FileSource
from headgate.types import Chain
from tests.sources.incarnations import run_until_the_end

pytestmark = pytest.mark.anyio

FILES, ROWS = 5, 60


def lines(batches: Iterator[Any]) -> Iterator[str]:
    """Two lines for each row."""
    for batch in batches:
        for number in batch["id"].to_pylist():
            yield f"{number} a"
            yield f"{number} b"


@pytest.mark.parametrize("seed", range(6))
async def test_every_row_reaches_the_files_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(FILES):
        ids = pyarrow.table({"id": list(range(number * ROWS, (number + 1) * ROWS))})
        pyarrow.parquet.write_table(ids, folder / f"{number}.parquet", row_group_size=20)

    def stages() -> Chain:
        source = FileSource(str(folder), batch_rows=7, split_bytes=300, rate_limit_per_s=60.0)
        return chain(source=source, transform=lines, sink=FileSink(str(out)))

    await run_until_the_end(stages, chance, seed, incarnations=6)
    found = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
    assert sorted(found) == sorted(f"{number} {letter}" for number in range(FILES * ROWS) for letter in "ab")
