# SPDX-License-Identifier: Apache-2.0

"""The storage, which outlives every driver: the product's own, in its own threads, on a simulated disk.

Each step of such a thread is an operation on the disk, and the world decides when it is done and what becomes of it.
A driver may die between any two of them, and its last operation may take effect after its death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any
from urllib.parse import quote

from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.storage import CheckpointStorage, StorageError
from spark_bridge.storage.layout import STATES_FOLDER, SUFFIX, savepoint_folder
from tests.simulation.application import OPERATOR, Stored
from tests.simulation.disk import PROTOCOL, Disk
from tests.simulation.threads import SimulatedThread

URL = f"{PROTOCOL}://checkpoints"
SAVEPOINTS = f"{PROTOCOL}://savepoints"
BLOCK = 8
"""How many ids a driver reserves at a time; unused ones are lost (H4)."""
THREADS_MAX = 8
"""How many threads a driver has for its storage; further work waits."""


@dataclass
class Threads:
    """The threads of one driver, limited to its storage's number of threads."""

    disk: Disk
    now: Callable[[], float]
    running: list[SimulatedThread] = field(default_factory=list)
    waiting: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = field(default_factory=deque)

    def start(self, work: Callable[[], Any], finished: Callable[[Any, BaseException | None], None]) -> None:
        """Start the work; ``finished`` is called with the result or the error, in the world."""
        self.waiting.append((work, finished))
        self.fill()

    def fill(self) -> None:
        while self.waiting and len(self.running) < THREADS_MAX:
            thread = SimulatedThread(*self.waiting.popleft())
            self._see(thread)
            if not thread.over:
                self.running.append(thread)

    def _see(self, thread: SimulatedThread) -> None:
        """Record a thread that stops here for its current operation."""
        if thread.operation is not None and thread.operation.until is not None:
            thread.hangs_until = self.now() + thread.operation.timeout_s

    def ready(self) -> list[SimulatedThread]:
        """Return the threads whose operation can be answered."""
        now = self.now()
        return [thread for thread in self.running if thread.hangs_until <= now or self._goes_on(thread)]

    @staticmethod
    def _goes_on(thread: SimulatedThread) -> bool:
        """Whether the thread's wait is over."""
        operation = thread.operation
        return operation is not None and operation.until is not None and operation.until()

    def next_relief(self) -> float | None:
        """Return when the first hanging operation is answered."""
        now = self.now()
        return min((thread.hangs_until for thread in self.running if now < thread.hangs_until < inf), default=None)

    def serve(self, thread: SimulatedThread) -> None:
        self.disk.serve(thread)
        self._see(thread)
        if thread.over:
            self.running.remove(thread)
            self.fill()

    def die(self) -> None:
        """Kill the threads; their last operations may still take effect."""
        self.waiting.clear()
        for thread in self.running:
            self.disk.abandon(thread)
        self.running.clear()


class Storage:
    """``written``: each checkpoint that any driver began to write, with the parallelisms its state passed through.

    ``stride``: how many operations of a thread may be done in one step. ``slowness``: how likely nothing is done.
    """

    def __init__(self, random: Random, now: Callable[[], float], tell: Callable[[str, str], None]) -> None:
        self.random = random
        self.disk = Disk(random, now, tell)
        self.written: dict[int, Stored] = {}
        self.states_url = f"{URL}/{OPERATOR}/{STATES_FOLDER}"
        self.state_files: dict[str, dict[str, bytes]] = {}  # of states, by folder and name
        self.savepoints: set[int] = set()  # that a user has got
        self.applications = 0
        self.slowness = random.choice([0.0, 0.0, 0.95, 0.998])  # while something else can happen
        self.stride = random.choice([30, 5, 1])
        self._now = now

    def open(self) -> CheckpointStorage:
        """Open the storage for one application."""
        self.applications += 1
        storage = CheckpointStorage(URL, options={"disk": self.disk})
        storage._claims._token = f"{self.applications:x}"  # else it would differ between runs of a seed
        return storage

    def threads(self) -> Threads:
        return Threads(self.disk, self._now)

    def serve_one(self, threads: Threads) -> None:
        """Let some thread go on by a few operations."""
        thread = self.random.choice(threads.ready())
        for _ in range(self.random.randint(1, self.stride)):
            threads.serve(thread)
            if thread.over or self.disk.dies or thread not in threads.ready():
                return

    def begin(self, checkpoint: CompletedCheckpoint, ways: tuple[int, ...]) -> None:
        self.written[checkpoint.checkpoint_id] = Stored(checkpoint, ways)

    # --- contents -------------------------------------------------------------------------------------------------

    def file_of(self, checkpoint_id: int, *, savepoint: bool = False) -> str:
        """Return its file; that of a savepoint, whose name ends with a random token, only if it exists."""
        operator = quote(OPERATOR, safe="")
        if savepoint:
            own = f"savepoints/savepoint-{operator}-{checkpoint_id}-"
            return next((file for file in self.disk.files if file.startswith(own) and file.endswith(SUFFIX)), "")
        return f"checkpoints/{operator}/checkpoint-{checkpoint_id}.hgc"

    def holds(self, checkpoint_id: int, *, savepoint: bool = False) -> bool:
        """Whether the checkpoint's file exists."""
        return self.file_of(checkpoint_id, savepoint=savepoint) in self.disk.files

    def states_of(self, checkpoint_id: int) -> str:
        """Where a savepoint has the files of its states."""
        return f"{PROTOCOL}://{savepoint_folder(self.file_of(checkpoint_id, savepoint=True))}"

    def choose(self, *, savepoints: bool) -> str:
        """Choose the next driver's start: the newest checkpoint, or sometimes a file that the user names (H52).

        ``savepoints``: only those that somebody has got. Others may be of a late write, whose files are gone.
        """
        files, share = self._starts(), 0.1
        if savepoints:
            files = {file: one for file, one in files.items() if one in self.savepoints and "/savepoint-" in file}
            share = 0.4
        return self.random.choice(list(files)) if files and self.random.random() < share else "latest"

    def _starts(self) -> dict[str, int]:
        """The files that a driver may start from, with their checkpoints."""
        return {
            f"{PROTOCOL}://{file}": checkpoint_id
            for checkpoint_id in sorted(self.written)
            for savepoint in (False, True)
            if (file := self.file_of(checkpoint_id, savepoint=savepoint)) in self.disk.files
        }

    def found(self, restore: str) -> int:
        """Return the checkpoint that a driver would find for "latest" or for a file; -1 for none."""
        return self.newest() if restore == "latest" else self._starts().get(restore, -1)

    def newest(self) -> int:
        """Return where a driver would start now, without changes; -1 for no checkpoint or if the user must name one."""
        files, folders = dict(self.disk.files), set(self.disk.folders)
        try:
            storage = CheckpointStorage(URL, options={"disk": self.disk})
            storage.prepare()
            found = storage.latest(OPERATOR)
        except StorageError:  # it was started from a savepoint, which the user has to name again
            found = None
        finally:
            self.disk.files, self.disk.folders = files, folders
        return -1 if found is None else found.checkpoint_id
