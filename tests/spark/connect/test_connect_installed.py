# SPDX-License-Identifier: Apache-2.0

"""A server whose operator has installed the relay, and has given secrets to two clients and a sidecar."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headgate import Addresses, Sidecar, SidecarConfig
from protocol.wire.keys import Holder, KeyRing, Purpose
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect import driver
from spark_bridge.connect import relay as connect_relay
from spark_bridge.connect.opening import Installed, Wanted
from spark_bridge.connect.relay import ConnectRelay
from spark_bridge.standalone.secret_file import read_secret
from tests.spark.connect import strict_server
from tests.spark.connect.attached_keys import keys_around
from tests.spark.connect.beside import run_through_a_kill
from tests.spark.connect.conftest import SHOWING
from tests.spark.connect.foreign_jobs import (
    InAnothersName,
    another_clients_job_cannot_be_told_from_none,
    sessions_that_follow_have_their_own_relays,
)
from tests.spark.connect.jobs import Numbers, read
from tests.spark.connect.secrets_in_texts import found_in, texts_of
from tests.spark.connect.server import ConnectServer, with_relay
from tests.spark.faults.own_process import SidecarProgram, attach
from tests.spark.faults.waiting import wait_until
from tests.spark.memory import SECRET, can_look, check

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the operator has, with the secrets of two clients and a sidecar."""
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    """The options that the documented command prints."""
    return with_relay(folder, "ann", "bob", "sidecar")


@pytest.fixture(scope="module")
def server(options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    events = tmp_path_factory.mktemp("events")
    server = ConnectServer(settings={**SHOWING, "spark.eventLog.dir": events.as_uri()}, events=events, options=options)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def configs(folder: Path) -> list[SidecarConfig]:
    """Bob's connections are encrypted (H77)."""
    return [
        SidecarConfig(tls=client == "bob", addresses=Addresses(relay_secret_file=folder / client))
        for client in ("ann", "bob")
    ]


def test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them(
    server: ConnectServer, configs: list[SidecarConfig]
) -> None:
    """H159: both have a secret of the server's, and Ann knows the ids."""
    another_clients_job_cannot_be_told_from_none(server, configs)


def test_each_session_of_a_client_has_its_own_relay_which_ends_with_it(
    server: ConnectServer, configs: list[SidecarConfig]
) -> None:
    """H159"""
    sessions_that_follow_have_their_own_relays(server, configs[0])


def test_a_client_whose_jobs_bear_the_name_of_another_session_gets_no_relay_for_that(
    server: ConnectServer, folder: Path
) -> None:
    """H159: Spark copies the settings of Ann's session into the properties of her jobs, spark.job.tags too."""
    anns, bobs = server.session(), server.session()
    refusal = "Headgate refused to open a relay: .*the request is that of another session"
    before = len(re.findall(refusal, server.log))
    opening = Installed(read_secret(folder / "ann"))
    key = opening.keys(KeyRing(bytes(32))).key(Purpose.RELAY, secrets.token_bytes(16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        opening.open(InAnothersName(anns, bobs), Wanted(key, listener.getsockname(), None, 60.0, b""))
        wait_until(lambda: len(re.findall(refusal, server.log)) > before, "the refusal")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    for session in (anns, bobs):
        session.stop()


def test_no_secret_is_in_anything_that_the_server_shows_or_writes(
    server: ConnectServer, configs: list[SidecarConfig], folder: Path
) -> None:
    """H76: neither a client's secret, nor a key that is derived from it, nor one of the tasks."""
    session = server.session()
    with Sidecar(session, configs[0]) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: Numbers(range(2)), parallelism=1)
        read(session, handle)
        relay = sidecar._entered()[1]._relay
        assert isinstance(relay, ConnectRelay)
        shared = [bytes.fromhex((folder / client).read_text()) for client in ("ann", "bob")]
        texts = texts_of(server)
    session.stop()

    asked = f"{relay._key.identity.hex()} ".encode().hex()
    assert any(asked in text for text in texts.values()), "the search must find what is there"
    assert found_in(texts, [handle.endpoint.key.secret, relay._key.secret, *shared]) == []

    [tag] = {
        found for text in texts.values() for found in re.findall(rf"headgate\.open\.{asked}[0-9a-f]*\.[0-9a-f]+", text)
    }
    thief = server.session()
    thief.addTag(tag)  # everybody may read it, and it opens nothing for another session
    thief.range(1).collect()
    thief.stop()
    server.process.wait_for("Headgate refused to open a relay: .*the request is that of another session")


def test_a_secret_that_the_server_does_not_have_is_refused(
    server: ConnectServer, configs: list[SidecarConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("00" * 32)
    secret.chmod(0o600)
    monkeypatch.setattr(connect_relay, "CONNECT_TIMEOUT_S", 1.0)
    session = server.session()

    with pytest.raises(ConnectRefused, match=r"did not connect to 127\.0\.0\.1.*a secret that is not in its file"):
        with Sidecar(session, replace(configs[0], addresses=Addresses(relay_secret_file=secret))):
            pass
    session.stop()
    server.process.wait_for("Headgate refused to open a relay: .*the client's secret is not in the file")


def sidecar_program(folder: Path, secret: str) -> SidecarProgram:
    """A sidecar beside the server, with encrypted ports (H77)."""
    program = SidecarProgram(folder, "streaming", "--tls")
    program.secret_file.write_text(secret)
    program.secret_file.chmod(0o600)
    program.start()
    return program


def test_a_sidecar_beside_the_server_is_served_by_the_installed_relay(
    server: ConnectServer, folder: Path, tmp_path: Path
) -> None:
    """Its secret is in the server's file. It dies in the middle of the job, and takes over when it is back.

    H76: nothing of its keys is in what the server shows or writes. H77: all its ports are encrypted.
    """
    secret = (folder / "sidecar").read_text()
    program = sidecar_program(tmp_path, secret)
    session = server.session()
    try:
        with attach(session, program, tls=True, relay_installed=True) as sidecar:
            handle = run_through_a_kill(session, sidecar, program)
            keys = [bytes.fromhex(secret), handle.endpoint.key.secret]
            assert found_in(texts_of(server), keys) == []
    finally:
        program.kill()
    session.stop()
    assert "encrypted=False" not in program.log()


@pytest.mark.skipif(not can_look(), reason="the system hides the memory of processes")
def test_a_server_with_the_relay_installed_has_the_keys_of_the_table_and_no_others(
    server: ConnectServer, folder: Path, tmp_path: Path
) -> None:
    """H76: a client that is attached to a sidecar beside the server, whose secret is in the server's file."""
    program = sidecar_program(tmp_path, (folder / "sidecar").read_text())
    session = server.session()
    try:
        with attach(session, program, tls=True, relay_installed=True) as sidecar:
            machine, *of_tasks = keys_around(sidecar, program, session, server)
    finally:
        program.kill()
    session.stop()
    check(machine, Holder.INSTALLED, {SECRET, "TASKS", "RELAY"}, without=frozenset({"STREAMS"}))
    assert of_tasks == [{"TASKS"}, {"TASKS"}]


def test_a_sidecar_beside_the_server_whose_secret_the_server_does_not_have_is_refused(
    server: ConnectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = sidecar_program(tmp_path, "00" * 32)
    monkeypatch.setattr(driver, "CONNECT_TIMEOUT_S", 1.0)
    session = server.session()
    try:
        with pytest.raises(ConnectRefused, match=r"did not connect to .*a secret that is not in its file.*--host"):
            with attach(session, program, tls=True, relay_installed=True):
                pass
    finally:
        program.kill()
    session.stop()


def test_a_server_that_forbids_java_functions_serves_its_installed_relay(
    server: ConnectServer, configs: list[SidecarConfig]
) -> None:
    with strict_server.strict(server.port, strict_server.java_functions) as url:
        session = SparkSession.Builder().remote(url).create()
        with Sidecar(session, configs[0]) as sidecar:
            handle = sidecar.coordinate("numbers", lambda: Numbers(range(4)), parallelism=1)
            assert read(session, handle) == list(range(4))
        session.stop()


def test_a_server_with_a_file_that_others_may_read_does_not_start(options: tuple[str, ...], folder: Path) -> None:
    readable = folder / "open"
    readable.write_text("00" * 32)
    readable.chmod(0o644)
    changed = (*options, "--conf", f"spark.headgate.relay.secretFile={readable}")
    server = ConnectServer(options=changed)
    try:
        with pytest.raises(AssertionError, match="is accessible to other users: run chmod 600"):
            server.start()
    finally:
        server.stop()
