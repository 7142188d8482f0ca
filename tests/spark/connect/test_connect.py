# SPDX-License-Identifier: Apache-2.0

"""A sidecar in the process of a Spark Connect client, with a server that has nothing of Headgate installed."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate import Addresses, Sidecar, SidecarConfig
from protocol.wire.keys import NO_IDENTITY, Holder, KeyRing, Purpose, identity_of
from spark_bridge.common.errors import ConnectRefused, SidecarError
from spark_bridge.connect.opening import Artifact, Wanted
from spark_bridge.connect.relay import ConnectRelay
from tests.spark import held, yielding
from tests.spark.connect.attached_keys import keys_around
from tests.spark.connect.foreign_jobs import (
    WAIT_S,
    InAnothersName,
    another_clients_job_cannot_be_told_from_none,
    sessions_that_follow_have_their_own_relays,
)
from tests.spark.connect.jobs import DieOnce, Held, Numbers, read, travelling_by_value
from tests.spark.connect.secrets_in_texts import found_in, texts_of
from tests.spark.connect.server import ConnectServer
from tests.spark.faults import file_gates, waiting
from tests.spark.faults.own_process import SidecarProgram, attach
from tests.spark.memory import SECRET, Name, can_look, check, children, command_of, keys_in
from tests.spark.test_streams import add_files

pytestmark = pytest.mark.spark


def test_a_killed_task_of_a_client_is_reset_and_every_row_counts_once(server: ConnectServer, session: Any) -> None:
    """H12, H18: events, requests and Spark's facts arrive, though the server has nothing installed."""
    numbers = Numbers(range(20), DieOnce(3))

    with Sidecar(session) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=2)
        assert sidecar.run(lambda: read(session, handle)) == list(range(20))
        status = sidecar.status()

    assert numbers.lost == ["FAILED"]
    assert status.relay.kind == "jvm"
    assert handle.statistics()["runs"] == 1
    assert handle.statistics()["failures"] == 1


def test_run_returns_the_values_that_tasks_yield_as_in_a_driver(session: Any) -> None:  # H166
    with travelling_by_value(yielding), Sidecar(session) as sidecar:
        yielding.check_values(sidecar.coordinate("values", parallelism=yielding.SUBTASKS))
        job = sidecar.coordinate("squares", yielding.squares, parallelism=2)
        assert sorted(job.run(yielding.Squares)) == [number * number for number in range(10)]


def test_no_operator_is_coordinated_after_the_session_has_stopped(server: ConnectServer) -> None:
    session = server.session()
    with Sidecar(session) as sidecar:
        session.stop()
        with pytest.raises(SidecarError, match="Connect session of this sidecar has stopped, so no operator can be"):
            sidecar.coordinate("late", lambda: Numbers(range(4)), parallelism=1)


def test_two_clients_with_the_same_operator_name_learn_only_of_their_jobs(server: ConnectServer) -> None:
    """Both run at the same time on one server; the second dies once, and the first is not notified of it.

    H77: the second one's connections are encrypted.
    """
    together = threading.Barrier(2, timeout=300)
    sessions = [server.session(), server.session()]
    coordinators = [Numbers(range(8)), Numbers(range(100, 108), DieOnce(103))]

    def client(index: int) -> tuple[list[int], int, int]:
        session = sessions[index]
        session.addTag(f"a_Session_{sessions[1 - index].session_id}_Operation_b")  # gives no job to the other session
        with Sidecar(session, SidecarConfig(tls=index == 1)) as sidecar:
            assert sidecar.status().tls == (index == 1)
            handle = sidecar.coordinate("numbers", lambda: coordinators[index], parallelism=1)
            together.wait()
            rows = sidecar.run(lambda: read(session, handle))
            together.wait()  # both have run, so all facts of the other one could have come
            return rows, sidecar.status().relay.facts, handle.statistics()["runs"]

    with ThreadPoolExecutor(2) as clients:
        first, second = clients.map(client, range(2))
    for session in sessions:
        session.stop()

    assert first[0] == list(range(8))
    assert second[0] == list(range(100, 108))
    assert [coordinator.lost for coordinator in coordinators] == [[], ["FAILED"]]
    # The look at an executor: a job and its stage. Then a job, its stage and its tasks; the second client lost one.
    assert (first[1], second[1]) == (10, 12)
    assert first[2] == second[2] == 1


def test_no_key_is_in_anything_that_the_server_shows_or_writes(server: ConnectServer, session: Any) -> None:
    """H76: neither that of the relay nor that of the tasks, in plans, SQL texts, UI, REST, event log and log."""
    with Sidecar(session) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: Numbers(range(2)), parallelism=1)
        read(session, handle)
        relay = sidecar._entered()[1]._relay
        assert isinstance(relay, ConnectRelay)
        secrets = [handle.endpoint.key.secret, relay._key.secret]
        texts = texts_of(server)

    public = relay._key.identity.hex()
    assert any(public in text for text in texts.values()), "the search must find what is there"
    assert found_in(texts, secrets) == []


def test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them(server: ConnectServer) -> None:
    """H159: Ann knows the ids."""
    another_clients_job_cannot_be_told_from_none(server, [SidecarConfig(), SidecarConfig(tls=True)])


def test_each_session_of_a_client_has_its_own_relay_which_ends_with_it(server: ConnectServer) -> None:
    """H159"""
    sessions_that_follow_have_their_own_relays(server, SidecarConfig())


def test_a_client_whose_jobs_bear_the_name_of_another_session_gets_no_relay_for_that(server: ConnectServer) -> None:
    """H159: Spark copies the settings of a session into the properties of its jobs, spark.job.tags too."""
    anns, bobs = server.session(), server.session()
    key = KeyRing(bytes(32)).key(Purpose.RELAY, bytes(16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ConnectRefused, match=r"spark\.job\.tags is set in this session: .*unset"):
            Artifact().open(InAnothersName(anns, bobs), Wanted(key, listener.getsockname(), None, 60.0, b""))
    for session in (anns, bobs):
        session.stop()


@pytest.mark.skipif(not can_look(), reason="the system hides the memory of processes")
def test_each_process_of_a_client_has_the_keys_of_the_table_and_no_others(
    server: ConnectServer, session: Any, tmp_path: Path
) -> None:
    """H76: client, server, planner and tasks, in all of their memory: a stream, and another operator."""
    add_files(tmp_path / "in", range(1))
    numbers = Held(range(2))
    config = SidecarConfig(storage=str(tmp_path / "plans"), tls=True)
    with (
        Sidecar(session, config) as sidecar,
        travelling_by_value(held, file_gates, waiting),
        ThreadPoolExecutor(1) as thread,
    ):
        source = held.HeldSource(tmp_path, str(tmp_path / "in"), discover_every_s=0.01)
        sidecar.source("growing", source, parallelism=1)
        writer = session.readStream.format("growing").load().writeStream.format("noop")
        query = writer.option("checkpointLocation", str(tmp_path / "query")).start()
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=1)
        job = thread.submit(read, session, handle)
        runtime: Any = sidecar._entered()[1]
        names: dict[str, Name] = {
            "TASKS growing": ("TASKS", identity_of("growing")),
            "TASKS numbers": ("TASKS", identity_of("numbers")),
            "RELAY": ("RELAY", runtime._relay._key.identity),
            "CONTROL": ("CONTROL", runtime._driver.identity),
            "STREAMS": ("STREAMS", identity_of("growing")),
            "ATTEMPTS": ("ATTEMPTS", runtime._driver.identity),
            "CERTIFICATE": ("CERTIFICATE", NO_IDENTITY),
        }
        try:
            assert numbers.waiting.wait(WAIT_S)
            tasks = [held.pid_of(tmp_path, "reader"), *numbers.pids]
            [planner] = [pid for pid in children(server.process.pid) if held.PLANS in command_of(pid)]
            client, machine, of_planner, *of_tasks = keys_in(
                [os.getpid(), server.process.pid, planner, *tasks], runtime._driver.keys, names
            )
        finally:
            file_gates.open_gates(tmp_path, [0])
            numbers.release()
            job.result()
            query.stop()

    check(client, Holder.CLIENT, {SECRET, "TASKS growing", "TASKS numbers", "RELAY"})
    check(machine, Holder.CONNECT_SERVER, {"TASKS growing", "TASKS numbers", "RELAY", "STREAMS"})
    check(of_planner, Holder.PLANNER, {"TASKS growing", "STREAMS"})
    assert "TASKS numbers" not in of_planner
    assert of_tasks == [{"TASKS growing"}, {"TASKS numbers"}]


@pytest.mark.skipif(not can_look(), reason="the system hides the memory of processes")
def test_each_process_of_an_attached_client_has_the_keys_of_the_table_and_no_others(
    server: ConnectServer, session: Any, tmp_path: Path
) -> None:
    """H76: client, sidecar, server and tasks."""
    program = SidecarProgram(tmp_path, "streaming")
    program.start()
    try:
        with attach(session, program) as sidecar:
            machine, *of_tasks = keys_around(sidecar, program, session, server)
    finally:
        program.kill()
    check(machine, Holder.CONNECT_SERVER, {"TASKS", "RELAY"}, without=frozenset({"STREAMS"}))
    assert of_tasks == [{"TASKS"}, {"TASKS"}]


def test_an_address_that_the_server_cannot_reach_is_refused_before_any_job(session: Any) -> None:
    with socket.socket() as unused:  # bound but not listening: a port where nobody answers
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        config = SidecarConfig(addresses=Addresses(advertised_host="127.0.0.1", advertised_port=port, way="direct"))
        with pytest.raises(ConnectRefused, match=rf"cannot reach this process at 127.0.0.1:{port} \(.*advertised_host"):
            with Sidecar(session, config):
                pass
