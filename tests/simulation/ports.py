# SPDX-License-Identifier: Apache-2.0

"""The sidecar's ports to Spark and to the storage, answered by the world."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from unittest.mock import patch

from benchmarks.no_spark import QuietRelay
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.facts import EngineFact, StatusReported, TaskPlace
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.relay.interface import RelayError
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.storage import CheckpointStorage, StoragePort, StorageSession
from spark_bridge.storage.operator_states import OperatorStates
from spark_bridge.storage.port import PendingWrite
from tests.simulation.application import Application
from tests.simulation.checkers import demand, judged
from tests.simulation.invariant_monitor import InvariantMonitor
from tests.simulation.loop import SimulatedLoop
from tests.simulation.state_files import SimulatedStates
from tests.simulation.storage import BLOCK, SAVEPOINTS, Threads
from tests.simulation.threads import Operation, SimulatedLock, this_thread

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

REFUSED = 0.03
"""How often Spark ignores a request, while the world is unkind."""


class SimulatedRelay(QuietRelay):
    """Stands in for ``Relay``. A request reaches Spark immediately; its actions and answers may take time."""

    def __init__(
        self, world: World, monitor: InvariantMonitor, loop: SimulatedLoop, tell: Callable[[EngineFact], None]
    ) -> None:
        super().__init__()
        self._tell = tell
        self.queries: deque[tuple[asyncio.Future[StatusReported], frozenset[int], frozenset[int]]] = deque()
        self._world = world
        self._monitor = monitor
        self._loop = loop

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        self._world.tell(f"the ledger kills task {task_attempt_id}: {reason}")
        self._perhaps_refuse("kill a task")
        self._world.engine.request_kill(task_attempt_id, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self._world.tell(f"the ledger cancels job {job_id}: {reason}")
        self._monitor.bridge_checker.cancelled(job_id)
        self._perhaps_refuse("cancel a job")
        self._world.engine.cancel((job_id,), reason)

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        self._perhaps_refuse("take note of a stage")
        self._world.watch(stage_id, task_attempt_id)

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        self._perhaps_refuse("look at its books")
        answer: asyncio.Future[StatusReported] = self._loop.create_future()
        self.queries.append((answer, task_attempt_ids, job_ids))
        return await answer

    def answer_query(self) -> None:
        answer, task_attempt_ids, job_ids = self.queries.popleft()
        if not answer.done():
            for started in self._world.engine.starts_of_jobs():
                self._tell(started)
            answer.set_result(self._world.engine.status(task_attempt_ids, job_ids))

    def _perhaps_refuse(self, what: str) -> None:
        if self._world.engine.faults.spend(self._world.random, REFUSED):
            self._world.figures.happen("Spark refuses")
            raise RelayError(f"Spark does not {what}")


class SimulatedWrite(PendingWrite):
    """Stands in for ``PendingWrite``; a simulated thread that waits for its end lets the world go on."""

    def wait_over(self, timeout_s: float) -> bool:
        thread = this_thread()
        if thread is not None and timeout_s > 0:
            over = partial(super().wait_over, 0)
            thread.ask(Operation("wait", "for a write that was stopped", lambda: None, over, timeout_s))
            timeout_s = 0
        return super().wait_over(timeout_s)


@contextmanager
def simulated_waits() -> Iterator[None]:
    """Let the storage's threads wait for one another under the world's control."""
    storage = "spark_bridge.storage"
    with (
        patch(f"{storage}.port.PendingWrite", SimulatedWrite),
        patch(f"{storage}.store.Lock", SimulatedLock),
        patch(f"{storage}.claims.Lock", SimulatedLock),
    ):
        yield


class SimulatedSession(StorageSession):
    """One driver's access to the storage that outlives it: a ``StorageSession`` whose threads the world controls."""

    def __init__(
        self,
        world: World,
        application: Application,
        monitor: InvariantMonitor,
        running: RunningJobs,
        threads: Threads,
    ) -> None:
        super().__init__(world.storage.open(), block_ids=BLOCK)
        self.last_id = -1
        self.read_id = -1  # the checkpoint that it has read last
        self._threads_of_world = threads
        self.world = world
        self._application = application
        self._monitor = monitor
        self._running = running

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        over: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def finished(result: T, error: BaseException | None) -> None:
            if over.done():
                return  # the waiting caller was cancelled
            checkpoint = getattr(result, "checkpoint", result)
            if isinstance(checkpoint, CompletedCheckpoint):
                self.read_id = checkpoint.checkpoint_id
            if error is None:
                over.set_result(result)
            else:
                over.set_exception(error)

        self._threads_of_world.start(function, finished)
        return await over

    def port(self, operator_id: str, mode: RestoreMode) -> StoragePort:
        return SimulatedPort(self, operator_id, mode)

    @property
    def epoch(self) -> int:
        """This application, as in the names of its files."""
        assert isinstance(self.storage, CheckpointStorage)
        return self.storage.owner.epoch

    def next_checkpoint_id(self) -> int:
        world = self.world
        checkpoint_id = super().next_checkpoint_id()
        with judged(world):
            demand(checkpoint_id > self.last_id, f"H4: checkpoint {checkpoint_id} after {self.last_id}")
        self.last_id = checkpoint_id
        world.figures.final += not self._running.operator_ids
        self._monitor.triggered(checkpoint_id)
        return checkpoint_id

    def check(self, checkpoint: CompletedCheckpoint, *, savepoint: bool) -> None:
        """Check a checkpoint that is about to be written."""
        with judged(self.world):
            self._monitor.check_stored(checkpoint, self._application, savepoint=savepoint)
        self.world.storage.begin(checkpoint, self._application.ways)


class SimulatedPort(StoragePort):
    """Stands in for ``StoragePort``; each checkpoint is judged before it is written."""

    _session: SimulatedSession

    async def store(self, checkpoint: CompletedCheckpoint) -> None:
        self._session.check(checkpoint, savepoint=False)
        await super().store(checkpoint)

    async def store_savepoint(self, directory: str | os.PathLike[str], checkpoint: CompletedCheckpoint) -> str:
        self._session.check(checkpoint, savepoint=True)
        return await super().store_savepoint(directory, checkpoint)

    def states(self) -> OperatorStates | None:
        world = self._session.world
        if not world.settings.files:
            return None
        return SimulatedStates(world, self._session, self._savepoint_folder, self._elsewhere)

    async def discard_savepoint(self, checkpoint_id: int) -> None:
        wanted = self._savepoints.get(checkpoint_id)
        url = "" if wanted is None else self._savepoint_folder(checkpoint_id).url
        await super().discard_savepoint(checkpoint_id)
        self._session.world.storage.state_files.pop(url, None)

    def name_savepoint(self, checkpoint_id: int, directory: str) -> str:
        return super().name_savepoint(checkpoint_id, SAVEPOINTS)
