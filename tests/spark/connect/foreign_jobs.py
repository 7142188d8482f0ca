# SPDX-License-Identifier: Apache-2.0

"""One client of a Spark Connect server that asks about, and commands, the jobs of another one (H159)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from headgate import NO_RESTART, Sidecar, SidecarConfig
from protocol.facts import TaskPlace, TaskState
from spark_bridge.bridge.relay import RelayStopped
from spark_bridge.common.errors import ServerLost
from spark_bridge.connect.relay import ConnectRelay
from spark_bridge.connect.remote_session import RemoteSession
from tests.spark.connect.jobs import Held, Numbers, read
from tests.spark.connect.server import ConnectServer
from tests.spark.faults.waiting import wait_until

WAIT_S = 300.0
NOBODYS = 1_000_000
"""Added to an id, it gives one that does not exist."""

T = TypeVar("T")


@dataclass(frozen=True)
class Running:
    """The ids of a job with one task."""

    job: int
    stage: int
    task: int

    @classmethod
    def at(cls, server: ConnectServer) -> Running:
        """What runs on the server, as it says itself: exactly one job."""

        def tasks() -> list[Any]:
            return [
                (job["jobId"], stage["stageId"], task["taskId"])
                for job in server.rest("jobs?status=running")
                for stage in server.rest("stages?status=active")
                for task in server.rest(f"stages/{stage['stageId']}/0/taskList")
                if stage["stageId"] in job["stageIds"] and task["status"] == "RUNNING"
            ]

        wait_until(lambda: len(tasks()) == 1, "one running task")
        return cls(*tasks()[0])

    @property
    def nobodys(self) -> Running:
        return Running(self.job + NOBODYS, self.stage + NOBODYS, self.task + NOBODYS)


class Client:
    """A client with its sidecar, which says whatever it is told to the relay on the server."""

    def __init__(self, sidecar: Sidecar) -> None:
        relay = sidecar._entered()[1]._relay
        assert isinstance(relay, ConnectRelay)
        self.sidecar = sidecar
        self.relay = relay

    def say(self, command: Coroutine[Any, Any, T]) -> T:
        assert self.relay._loop is not None
        return asyncio.run_coroutine_threadsafe(command, self.relay._loop).result(WAIT_S)

    def answers(self, ids: Running) -> list[Any]:
        """What it is answered to each question about these ids, and to each command; without the ids themselves."""
        relay, place = self.relay, TaskPlace(ids.stage, 0)
        status = self.say(relay.query_status(frozenset({ids.task}), frozenset({ids.job})))
        return [
            list(status.jobs.values()),
            list(status.tasks.values()),
            list(status.places.values()),
            self.say(relay.look_at_stage(ids.stage)),
            [row for row in self.say(relay.active_stages()) if row.job_id == ids.job],
            self.say(relay.watch(ids.stage, ids.task)),
            self.say(relay.kill_task(ids.task, "not mine", place)),
            self.say(relay.kill_task(ids.task, "not mine")),
            self.say(relay.cancel_job(ids.job, "not mine")),
        ]


@contextmanager
def a_held_job(session: Any, sidecar: Sidecar) -> Iterator[tuple[Held, Future[list[int]]]]:
    """A job whose only task waits, until the end of the block."""
    held = Held(range(4))
    with ThreadPoolExecutor(1) as thread:
        handle = sidecar.coordinate(f"held-{id(held)}", lambda: held, parallelism=1)
        job = thread.submit(sidecar.run, lambda: read(session, handle), restart=NO_RESTART)
        try:
            assert held.waiting.wait(WAIT_S)
            yield held, job
        finally:
            held.release()


def another_clients_job_cannot_be_told_from_none(server: ConnectServer, configs: list[SidecarConfig]) -> None:
    """Ann asks and commands Bob's job and his task by their ids, which she knows. Then Bob does it himself."""
    sessions = [server.session(), server.session()]
    with Sidecar(sessions[0], configs[0]) as anns, Sidecar(sessions[1], configs[1]) as bobs:
        ann, bob = Client(anns), Client(bobs)
        with a_held_job(sessions[1], bobs) as (held, job):
            ids = Running.at(server)
            facts = anns.status().relay.facts
            assert ann.answers(ids) == ann.answers(ids.nobodys)
            assert (held.lost, job.done()) == ([], False)
            assert anns.status().relay.facts == facts, "Ann was told something about Bob's job"
        assert job.result(WAIT_S) == list(range(4))
        assert held.lost == []
        wait_until(lambda: not server.rest("jobs?status=running"), "Spark's store has the end of the job")
        assert bob.say(bob.relay.query_status(frozenset({ids.task}), frozenset())).tasks == {
            ids.task: TaskState.SUCCEEDED
        }
        assert ann.answers(ids) == ann.answers(ids.nobodys), "Ann learns from the store how Bob's task has ended"

        with a_held_job(sessions[1], bobs) as (held, job):
            ids = Running.at(server)
            status = bob.say(bob.relay.query_status(frozenset({ids.task}), frozenset({ids.job})))
            assert (status.jobs, status.tasks) == ({ids.job: True}, {ids.task: TaskState.RUNNING})
            assert bob.say(bob.relay.look_at_stage(ids.stage)).partition_count == 1
            assert [row.job_id for row in bob.say(bob.relay.active_stages())] == [ids.job]
            bob.say(bob.relay.kill_task(ids.task, "mine", TaskPlace(ids.stage, 0)))
            wait_until(lambda: held.lost != [], "Bob's task is killed by Bob")
        assert job.result(WAIT_S) == list(range(4))

        with a_held_job(sessions[1], bobs) as (held, job):
            bob.say(bob.relay.cancel_job(Running.at(server).job, "mine"))
            wait_until(job.done, "Bob's job is cancelled by Bob")
    for session in sessions:
        session.stop()


def sessions_that_follow_have_their_own_relays(server: ConnectServer, config: SidecarConfig) -> None:
    """A clone of a session, and the next session of a client whose first one has ended."""
    first = server.session()
    with Sidecar(first, config) as sidecar:
        ended = Client(sidecar)
        clone = first.cloneSession()
        if not hasattr(clone, "release_session_on_close"):  # Spark 4.1 forgets it, and could not stop the clone
            clone.release_session_on_close = True
        assert runs(clone, config) == list(range(3))
        first.stop()
        wait_until(lambda: not ended.relay._server.linked, "the relay of a session that has ended leaves")
        try:
            ended.say(ended.relay.active_stages())
        except (RelayStopped, ServerLost):
            pass
        else:
            raise AssertionError("the relay of a session that has ended answers")
    assert runs(server.session(), config) == list(range(3))


def runs(session: Any, config: SidecarConfig) -> list[int]:
    """The rows of a job in this session, with a separate sidecar."""
    try:
        with Sidecar(session, config) as sidecar:
            handle = sidecar.coordinate("numbers", lambda: Numbers(range(3)), parallelism=1)
            return sidecar.run(lambda: read(session, handle))
    finally:
        session.stop()


class InAnothersName(RemoteSession):
    """Ann's session. She says that it is Bob's, and has Spark write into her jobs that they are his."""

    def __init__(self, session: Any, bobs: Any) -> None:
        super().__init__(session)
        self._bobs = bobs
        origin = f"User_{bobs.client._user_id or ''}_Session_{bobs.session_id}"
        session.conf.set("spark.job.tags", f"SparkConnect_OperationTag_{origin}_Operation_{bobs.session_id}")

    def run_tagged(self, tag: str) -> None:
        """The tag as Spark writes one into a job's property, too."""
        forged = f"{self._session.conf.get('spark.job.tags')},SparkConnect_SessionTag_User__Session_x_Tag_{tag}"
        self._session.conf.set("spark.job.tags", forged)
        super().run_tagged(tag)

    @property
    def session_id(self) -> str:
        return str(self._bobs.session_id)
