# SPDX-License-Identifier: Apache-2.0

"""Clients and servers of Spark Connect that end, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.connect_client import sum_although_the_server_ends, sum_of_squares
from headgate import (
    NO_RESTART,
    Sidecar,
    SidecarConfig,
    SubtaskContext,
    WorkQueue,
    run_across_sessions,
)
from headgate.errors import RestartsExhausted
from spark_bridge.common.errors import ConnectRefused, ServerLost
from spark_bridge.connect.relay import ConnectRelay
from tests.release.pythons import find_python
from tests.spark.connect.bench import by_two_lines
from tests.spark.connect.beside import exchange, run_through_a_kill
from tests.spark.connect.jobs import CountInArrow, DieOnce, Held, Numbers, read
from tests.spark.connect.server import ConnectServer, bare_python
from tests.spark.connect.server_restarts import continue_after_the_server_has_died
from tests.spark.faults.network import Line
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, attach

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 300.0
CLIENTS = 4


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.1)


def ours(server: ConnectServer) -> list[str]:
    """The threads that Headgate has in the server's JVM: of relays, and of the queue of its listeners."""
    return [name for name in server.threads() if name.startswith(("headgate-relay-", "spark-listener-group-headgate"))]


def test_nothing_is_left_of_clients_that_have_left(server: ConnectServer) -> None:
    """Thread by thread; a listener of ours would keep its queue's thread alive."""
    for count in range(CLIENTS):
        session = server.session()
        with Sidecar(session, SidecarConfig(tls=count % 2 == 1)):
            wait_until(lambda: len(ours(server)) == 3)  # a writer, a reader, and the queue of the listener
        wait_until(lambda: ours(server) == [])
        session.stop()


def test_a_client_that_dies_leaves_nothing_after_its_lease(server: ConnectServer) -> None:
    """SIGKILL, while its job runs: the task fails with a clear text, and the listener leaves Spark's bus."""
    client = start_client(server, "10")
    try:
        wait_until(lambda: len(ours(server)) == 3)
    finally:
        client.kill()
        client.communicate()

    wait_until(lambda: ours(server) == [])
    server.process.wait_for(r"CannotReachSidecar: .*127\.0\.0\.1")


def test_a_connection_of_the_relay_that_breaks_comes_back_and_no_fact_is_lost(session: Any) -> None:
    """H24: both ends go on where they were, and the job that runs meanwhile is not touched."""
    numbers = Numbers(range(20), DieOnce(15))
    with Sidecar(session) as sidecar:
        relay = sidecar._entered()[1]._relay
        assert isinstance(relay, ConnectRelay)

        unbroken = True

        def break_once(split: int) -> str:
            nonlocal unbroken
            if split == 5 and unbroken and relay._server._link is not None:  # the split is read again if its task dies
                unbroken = False
                relay._server._link.abort("broken by the test")
            return die(split)

        die, numbers.fate = numbers.fate, break_once
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=2)
        assert sidecar.run(lambda: read(session, handle)) == list(range(20))
        status = sidecar.status()

    assert numbers.lost == ["FAILED"]
    assert (status.relay.reconnects, status.relay.dropped) == (1, 0)


def test_a_session_that_is_stopped_ends_the_run_of_its_job(server: ConnectServer) -> None:
    """H57: the server lives on, but not the job; the coordinator is told before ``run`` raises."""
    session = server.session()
    held = Held(range(2))
    with Sidecar(session) as sidecar, ThreadPoolExecutor(1) as client:
        handle = sidecar.coordinate("numbers", lambda: held, parallelism=1)
        job = client.submit(sidecar.run, lambda: read(session, handle))
        assert held.waiting.wait(WAIT_S)
        session.stop()
        with pytest.raises(ServerLost, match="the session there, is gone"):
            job.result(WAIT_S)
        assert held.ended != []
    wait_until(lambda: ours(server) == [])


def test_a_relay_that_is_cut_off_for_longer_than_its_lease_ends_the_run(server: ConnectServer) -> None:
    """Nothing more can be known of the job then, so ``run`` does not wait for it."""
    session = server.session()
    held = Held(range(2))
    with Line() as tasks, Line() as relay:
        config = by_two_lines(tasks, relay, relay_lease_s=4.0)
        with Sidecar(session, config) as sidecar, ThreadPoolExecutor(1) as client:
            handle = sidecar.coordinate("numbers", lambda: held, parallelism=1)
            job = client.submit(sidecar.run, lambda: read(session, handle))
            assert held.waiting.wait(WAIT_S)
            relay.break_off()
            with pytest.raises(ServerLost):
                job.result(WAIT_S)
            assert held.ended != []
        wait_until(lambda: ours(server) == [])
    session.stop()


def test_the_example_runs_after_all_that(server: ConnectServer, session: Any) -> None:
    assert sum_of_squares(session) == 285
    assert sum_although_the_server_ends(server.url, SidecarConfig()) == 285


def test_a_sidecar_beside_the_server_serves_a_client_that_nobody_can_reach(
    server: ConnectServer, session: Any, tmp_path: Path
) -> None:
    """The client only dials. The sidecar dies in the middle of the job, and takes over when it is back.

    H77: all connections to the sidecar are encrypted.
    """
    program = SidecarProgram(tmp_path, "streaming", "--tls")
    program.start()
    try:
        with attach(session, program, tls=True) as sidecar:
            wait_until(lambda: len(ours(server)) == 3)
            run_through_a_kill(session, sidecar, program)
            assert sidecar.request(OPERATOR, "wrong") == []
        wait_until(lambda: ours(server) == [])

        client_process = start_client(server, "10", program.address, str(program.secret_file))
        wait_until(lambda: len(ours(server)) == 3)
        client_process.kill()
        client_process.communicate()
        wait_until(lambda: ours(server) == [])
    finally:
        program.kill()


def test_a_sidecar_beside_the_server_makes_parts_for_the_tasks_of_a_client(session: Any, tmp_path: Path) -> None:
    def crawl(context: SubtaskContext, _: Iterator[Any], pages: WorkQueue[int]) -> Iterator[Any]:
        import pyarrow

        for page in pages:
            pages.add([linked for linked in (2 * page, 2 * page + 1) if linked <= 50], key=lambda page: page)
            context.count("pages")
            yield pyarrow.RecordBatch.from_pydict({"page": [page]})

    program = SidecarProgram(tmp_path, "with_parts")
    program.start()
    try:
        with attach(session, program) as sidecar:
            job = sidecar.operator("crawl")
            tasks = session.range(0, 2, 1, 2).mapInArrow(job.subtask(crawl, job.part("pages")), "page long")
            assert sorted(row.page for row in sidecar.run(tasks.collect)) == list(range(1, 51))
            assert job.counters() == {"pages": 50}
    finally:
        program.kill()


def start_client(server: ConnectServer, *arguments: str) -> subprocess.Popen[str]:
    """Start ``client_program.py``; its job runs when this returns."""
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.connect.client_program", server.url, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "waiting\n"
    return client


def test_a_job_continues_in_a_new_session_from_its_last_checkpoint_after_the_server_has_died(tmp_path: Path) -> None:
    server = ConnectServer(master="local[4,4]")
    server.start()
    try:
        continue_after_the_server_has_died(server, SidecarConfig(storage=tmp_path))
        lose_two_jobs(server, tmp_path)
    finally:
        server.stop()


def lose_two_jobs(server: ConnectServer, folder: Path) -> None:
    """The server dies under a job that may not be restarted, and under that of a sidecar beside the server."""

    def end_the_server(session: Any, sidecar: Sidecar) -> None:
        handle = sidecar.coordinate("numbers", lambda: Numbers(range(4), fate), parallelism=1)
        sidecar.run(lambda: read(session, handle))

    def fate(split: int) -> str:
        server.kill()
        return "go on"

    beside = SidecarProgram(folder)
    beside.start()
    try:
        session = server.session()
        with attach(session, beside) as attached, ThreadPoolExecutor(1) as client:
            tasks = session.range(0, 2, 1, 2).mapInArrow(
                attached.operator(OPERATOR).subtask(CountInArrow), "subtask long, last long"
            )
            job_to_lose = client.submit(attached.run, tasks.collect)
            exchange(attached, 1, seen=1)
            with pytest.raises(RestartsExhausted, match="lost again after 0 new sessions") as raised:
                run_across_sessions(server.session, end_the_server, restart=NO_RESTART)
            with pytest.raises(ServerLost, match="Attach a new session"):
                job_to_lose.result(WAIT_S)
    finally:
        beside.kill()
    assert isinstance(raised.value.__cause__, ServerLost)
    assert "SidecarConfig.storage" in str(raised.value)


def test_workers_of_another_python_are_refused_before_any_job(session: Any, tmp_path: Path) -> None:
    here = sys.version_info[:2]
    others = (find_python(f"3.{minor}") for minor in range(11, 15) if (3, minor) != here)
    other = next((python for python in others if python is not None), None)
    if other is None:
        pytest.skip("there is only one supported version of Python here")
    session.conf.set("spark.sql.execution.pyspark.python", str(bare_python(tmp_path / "python", other)))
    with pytest.raises(ConnectRefused, match=rf"run Python 3\.\d+, but this client runs Python 3\.{here[1]}: use"):
        with Sidecar(session):
            pass
