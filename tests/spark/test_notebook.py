# SPDX-License-Identifier: Apache-2.0

"""Notebooks in a real kernel: cells are run again and interrupted, and the kernel is restarted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.spark.cluster import ROOT
from tests.spark.faults.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.long]

ANSWER_S = 300.0

CELLS = re.split(r"^# %%.*\n", (ROOT / "examples" / "notebook.py").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
RESULT = "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18] from a total of 45\n"

ENDLESS_JOB = """
from pathlib import Path
from threading import Event, Thread

folder = Path({folder!r})

class Closing(headgate.OperatorCoordinator):
    async def subtask_ready(self, subtask, gateway):
        (folder / "ready").touch()

    async def close(self):
        (folder / "closed").touch()

def wait(context, records):
    while True:
        context.wait_for_event()

waiting = sidecar.coordinate("waiting", Closing, parallelism=1)
tasks = spark.sparkContext.parallelize([0], 1).mapPartitions(waiting.subtask(wait))
"""


class Notebook:
    """A kernel and its only client."""

    def __init__(self, folder: Path) -> None:
        self._manager: Any = KernelManager(kernel_name="python3")
        self._manager.shutdown_wait_time = ANSWER_S  # before the kernel is killed; this machine may be busy
        self._manager.start_kernel(cwd=str(folder))
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=ANSWER_S)

    def begin(self, cell: str) -> None:
        """Run a cell and do not wait for it."""
        self._asked = self._client.execute(cell)

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Wait for the cell; return what it has printed, and what it shows."""
        printed, shown = "", []
        while True:
            message = self._client.get_iopub_msg(timeout=ANSWER_S)
            if message["parent_header"].get("msg_id") != self._asked:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    printed += content["text"]
                case "execute_result":
                    shown.append(content["data"])
                case "error":
                    printed += f"{content['ename']}: {content['evalue']}"
                case "status" if content["execution_state"] == "idle":
                    return printed, shown

    def run(self, cell: str) -> tuple[str, list[dict[str, Any]]]:
        self.begin(cell)
        return self.end()

    def number(self, expression: str) -> int:
        return int(self.run(f"print({expression})")[0])

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        self._manager.restart_kernel()
        self._client.wait_for_ready(timeout=ANSWER_S)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    yield made
    made.close()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has no memory any more."""
    try:
        return not Path(f"/proc/{pid}/statm").read_text(encoding="ascii").partition(" ")[0].strip("0")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_every_cell_can_be_run_again(notebook: Notebook, tmp_path: Path) -> None:  # H120, H121
    start, halves, job = CELLS
    assert [notebook.run(cell)[0] for cell in (start, halves, job)] == ["", "", RESULT]
    assert [notebook.run(cell)[0] for cell in (job, start, job, halves, start, job)] == [
        RESULT,
        "",
        RESULT,
        "",
        "",
        RESULT,
    ]
    _, (shown,) = notebook.run("sidecar")
    assert "total" in shown["text/html"]

    # a cell that waits for its job is interrupted, and run again
    jvm = notebook.number("spark.sparkContext._gateway.proc.pid")
    folder = str(tmp_path)
    notebook.run(ENDLESS_JOB.format(folder=folder))
    # Py4J then closes its connections, and PySpark may meet one that closes on its way out of `collect`.
    by_py4j = "Py4JNetworkError: Answer from Java side is empty"
    for action, ends in (
        ("sidecar.run(tasks.collect)", ["KeyboardInterrupt: "]),
        ("tasks.collect()", ["KeyboardInterrupt: ", by_py4j]),
    ):
        notebook.begin(action)
        wait_until((tmp_path / "ready").exists, "the task is ready")
        notebook.interrupt()
        assert notebook.end()[0] in ends
        assert not gone(jvm)  # the signal reaches all processes of the kernel
        (tmp_path / "ready").unlink()
        if action.startswith("sidecar"):
            notebook.run(ENDLESS_JOB.format(folder=folder).replace("parallelism=1", "parallelism=1, replace=True"))
            (tmp_path / "closed").unlink()
    again = ENDLESS_JOB.format(folder=folder).replace("parallelism=1", "parallelism=1, replace=True")
    assert "SidecarError: operator 'waiting' cannot be replaced during a run" in notebook.run(again)[0]
    assert not (tmp_path / "closed").exists()
    notebook.run("spark.sparkContext.cancelAllJobs()")
    assert notebook.run(again)[0] == ""
    assert (tmp_path / "closed").exists()

    # the kernel is restarted while a job runs in another thread
    (tmp_path / "closed").unlink()
    pids = [notebook.number("__import__('os').getpid()"), jvm]
    notebook.run("Thread(target=tasks.collect).start()")
    wait_until((tmp_path / "ready").exists, "the task is ready")
    notebook.restart()
    assert (tmp_path / "closed").exists()
    wait_until(lambda: all(map(gone, pids)), "the old kernel and its JVM have ended")
    assert [notebook.run(cell)[0] for cell in CELLS] == ["", "", RESULT]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_of_the_documentation_prints_what_it_shows_and_each_cell_can_be_run_again(
    file: Path, notebook: Notebook
) -> None:
    cells = [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in cells]
    assert any(shown)
    for times in (1, 2):
        for cell, expected in zip(cells, shown, strict=True):
            for _ in range(times if cell is not cells[-1] else 1):  # the last one stops what the others need
                assert notebook.run("".join(cell["source"]))[0] == expected, cell["id"]
