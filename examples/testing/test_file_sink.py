# SPDX-License-Identifier: Apache-2.0

"""A test of files that a checkpoint makes visible, with the real sink: it uses threads, and waits between its tries.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_file_sink.py``.
"""

from __future__ import annotations

from pathlib import Path

from headgate import CheckpointConfig
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator
from headgate.testing import running_operator


def visible_rows(folder: Path) -> list[str]:
    """The rows that a reader of the folder sees: names that begin with a dot or an underscore are hidden."""
    return sorted(row for file in folder.glob("[!._]*") for row in file.read_text().splitlines())


async def test_rows_become_visible_with_the_checkpoint_that_covers_them(tmp_path: Path) -> None:
    every_minute = CheckpointConfig(interval_s=60.0)
    sink = FileSink(str(tmp_path))
    coordinator = TwoPhaseSinkCoordinator(sink)
    async with running_operator(coordinator, parallelism=1, mode="streaming", checkpoint=every_minute) as world:
        task = await world.launch_operator(0, lambda: TwoPhaseSinkOperator(sink))
        task.feed("a", "b")
        await world.advance(59.0)
        assert visible_rows(tmp_path) == []
        await world.advance(1.0)
        assert visible_rows(tmp_path) == ["a", "b"]

        task.feed("c")
        await world.settle()
        await world.kill(task)  # "c" is in a file that no checkpoint covers
        task = await world.retry(task, ["a", "b", "c", "d"])  # Spark computes the same records again
        assert visible_rows(tmp_path) == ["a", "b", "c", "d"]
