# SPDX-License-Identifier: Apache-2.0

"""A Python worker runs many tasks: what one task leaves in it, and what the next task can see of that."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import AttemptOver
from tests.spark.faults.bench import Bench
from tests.spark.faults.directing import Director, Gathering
from tests.spark.faults.file_gates import all_together, wait_for_files

pytestmark = pytest.mark.spark

SLOTS = 4  # two hosts with two cores each
ROUNDS_MAX = 10


def open_sockets() -> int:
    """The number of sockets that this process holds."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            found += os.readlink(entry.path).startswith("socket:")
        except FileNotFoundError:  # the descriptor that the scan itself used
            continue
    return found


def what_is_here(partition: int, records: Iterable[Any]) -> Iterator[tuple[int, list[str], int]]:
    """In a plain task: list the process, its threads and its sockets."""
    list(records)
    yield os.getpid(), sorted(thread.name for thread in threading.enumerate()), open_sockets()


def look(bench: Bench, folder: Path) -> dict[int, tuple[list[str], int]]:
    """Run ``what_is_here`` in all workers in use, by plain tasks, one in each slot."""
    folder.mkdir()
    found = bench.numbers(SLOTS).each(all_together(folder, SLOTS)).each(what_is_here)
    return {pid: (threads, sockets) for pid, threads, sockets in found.collect()}


class Tenant(Gathering):
    """Yields its process, its identity, the events it received, and how many of Headgate's threads it saw."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for subtask, attempt, received, _ in super().process(records):
            ours = [thread for thread in threading.enumerate() if thread.name.startswith("headgate-")]
            yield os.getpid(), subtask, attempt, received, len(ours)


def test_the_next_task_of_a_reused_worker_inherits_nothing(bench: Bench, tmp_path: Path) -> None:
    """spark-facts 18: the same process, but another attempt: it sees nothing of the one before it."""
    director = Director("hello", "stop", "never read")
    before = look(bench, tmp_path / "before")
    tenants: dict[int, list[tuple[int, int]]] = {}
    with bench.coordinated(director, SLOTS) as handle:
        for number in range(ROUNDS_MAX):
            for pid, subtask, attempt, received, ours in bench.numbers(SLOTS).through(handle, Tenant).collect():
                assert attempt == number
                assert received in (["hello"], ["hello", "never read"])
                assert ours == 1
                tenants.setdefault(pid, []).append((subtask, attempt))
            if any(len(lives) > 1 for lives in tenants.values()):
                break
    after = look(bench, tmp_path / "after")
    assert any(len(lives) > 1 for lives in tenants.values()), tenants
    same = before.keys() & tenants.keys() & after.keys()
    assert same
    for pid in same:
        assert after[pid] == before[pid]
    assert director.named("failed", "reset") == []


class Haunted(Gathering):
    """Leaves a thread behind that still has the context and uses it when the test tells it to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        threading.Thread(target=self._haunt, name="ghost", daemon=True).start()
        for subtask, *_ in super().process(records):
            yield os.getpid(), subtask

    def _haunt(self) -> None:
        wait_for_files(self._folder, "haunt", 1)
        said = []
        for call in (lambda: self.context.send_event("boo"), lambda: self.context.request("boo", 1.0)):
            try:
                call()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        self._folder.joinpath(f"said-{os.getpid()}").write_text("\n".join(said))


def test_a_thread_that_outlives_its_task_cannot_send(bench: Bench, tmp_path: Path) -> None:
    """H3, H57: the thread gets an error, and the task that now runs in its process is not disturbed."""
    director = Director("stop")
    with bench.coordinated(director, SLOTS) as handle:
        processes = dict(bench.numbers(SLOTS).through(handle, Haunted, tmp_path).collect())
        director.wait_for(lambda story: ("run_ended", True) in story)
        director.greet(range(SLOTS))
        action = bench.start_collecting(bench.numbers(SLOTS).through(handle, Tenant))
        director.wait_until_ready((subtask, 1) for subtask in range(SLOTS))
        (tmp_path / "haunt").touch()
        wait_for_files(tmp_path, "said-*", len(processes))
        for subtask in range(SLOTS):
            director.hear((subtask, 1), "undisturbed")
            director.tell((subtask, 1), "stop")
        outputs = action.result()
    for said in tmp_path.glob("said-*"):
        assert all(line.startswith(AttemptOver.__name__) for line in said.read_text().splitlines())
    assert {pid for pid, *_ in outputs} & processes.keys()
    assert [received for _, _, _, received, _ in outputs] == [["undisturbed"]] * SLOTS
    assert not [callback for callback in director.named("event", "request") if callback[-1] == "boo"]
    assert director.named("failed", "reset") == []
