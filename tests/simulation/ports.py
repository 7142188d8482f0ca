"""The sidecar's doors to Spark and to the storage, as the world answers them."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.facts import StatusReported
from protocol.messages import RestoreMode
from spark_bridge.relay.interface import RelayError, RelayStatistics
from spark_bridge.runs import RunningJobs
from spark_bridge.storage import StorageError
from tests.simulation.application import Application
from tests.simulation.checkers import demand, judged
from tests.simulation.loop import SimulatedLoop
from tests.simulation.overseer import Overseer
from tests.simulation.shared import DriverWorld

REFUSED = 0.03
"""How often Spark does not do what it is asked to, while the world is unkind."""


class SimulatedRelay:
    """As ``Relay``. A wish is Spark's at once, and carried out when the engine pleases; answers take their time."""

    kind = "simulated"

    def __init__(self, world: DriverWorld, overseer: Overseer, loop: SimulatedLoop) -> None:
        self.statistics = RelayStatistics()
        self.queries: deque[tuple[asyncio.Future[StatusReported], frozenset[int], frozenset[int]]] = deque()
        self._world = world
        self._overseer = overseer
        self._loop = loop

    async def start(self) -> None:
        """It is there from the beginning."""

    async def close(self) -> None:
        """It ends with the world."""

    async def kill_task(self, task_attempt_id: int, reason: str) -> None:
        self._world.tell(f"the ledger kills task {task_attempt_id}: {reason}")
        self._perhaps_refuse("kill a task")
        self._world.engine.request_kill(task_attempt_id, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self._world.tell(f"the ledger cancels job {job_id}: {reason}")
        self._overseer.witness.cancelled(job_id)
        self._perhaps_refuse("cancel a job")
        self._world.engine.cancel((job_id,), reason)

    async def cancel_stage(self, stage_id: int, reason: str) -> None:
        raise AssertionError(f"nobody cancels stages: {stage_id}, {reason}")

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        self._perhaps_refuse("look at its books")
        answer: asyncio.Future[StatusReported] = self._loop.create_future()
        self.queries.append((answer, task_attempt_ids, job_ids))
        return await answer

    def answer_query(self) -> None:
        answer, task_attempt_ids, job_ids = self.queries.popleft()
        if not answer.done():
            answer.set_result(self._world.engine.status(task_attempt_ids, job_ids))

    def _perhaps_refuse(self, what: str) -> None:
        if self._world.engine.faults.spend(self._world.random, REFUSED):
            self._world.figures.happen("Spark refuses")
            raise RelayError(f"Spark does not {what}")


class SimulatedSession:
    """As ``StorageSession``: one driver's way to the storage that outlives it."""

    def __init__(
        self,
        world: DriverWorld,
        application: Application,
        overseer: Overseer,
        running: RunningJobs,
        loop: SimulatedLoop,
    ) -> None:
        self.last_id = -1 if application.restored is None else application.restored.checkpoint_id
        self._world = world
        self._application = application
        self._overseer = overseer
        self._running = running
        self._loop = loop

    def port(self, operator_id: str, mode: RestoreMode, *, concurrent_max: int = 1) -> SimulatedSession:
        return self

    def next_checkpoint_id(self) -> int:
        world = self._world
        checkpoint_id = world.storage.next_id(not world.calm)
        if checkpoint_id is None:
            raise StorageError("no checkpoint id is left")
        with judged(world):
            demand(checkpoint_id > self.last_id, f"H4: checkpoint {checkpoint_id} after {self.last_id}")
        self.last_id = checkpoint_id
        world.figures.final += not self._running.operator_ids
        self._overseer.triggered(checkpoint_id)
        return checkpoint_id

    async def latest(self, *, allow_older: bool = False) -> CompletedCheckpoint | None:
        return self._application.restored

    async def store(self, checkpoint: CompletedCheckpoint) -> None:
        await self._write(checkpoint, savepoint=False)

    async def store_savepoint(self, directory: str, checkpoint: CompletedCheckpoint) -> str:
        await self._write(checkpoint, savepoint=True)
        return f"{directory}/{checkpoint.checkpoint_id}"

    async def discard(self, checkpoint_id: int) -> None:
        self._world.storage.discard(checkpoint_id)

    async def _write(self, checkpoint: CompletedCheckpoint, *, savepoint: bool) -> None:
        storage, checkpoint_id = self._world.storage, checkpoint.checkpoint_id
        with judged(self._world):
            self._overseer.check_stored(checkpoint, self._application, savepoint=savepoint)
        over: asyncio.Future[None] = self._loop.create_future()
        fail = partial(StorageError, f"checkpoint {checkpoint_id}: no space")

        def end(stored: bool) -> None:
            if over.done():
                return
            if stored:
                over.set_result(None)
            else:
                over.set_exception(fail())

        storage.begin(checkpoint, self._application.ways, savepoint, end)
        try:
            await over
        except asyncio.CancelledError:
            storage.give_up(checkpoint_id)
            raise
