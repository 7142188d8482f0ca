# SPDX-License-Identifier: Apache-2.0

"""``headgate connect-server``: the files of a server's operator, and those of his clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_bridge.bridge.relay_jar import jar_bytes
from spark_bridge.command import main
from spark_bridge.standalone.secret_file import read_secret


def test_each_client_has_a_secret_of_the_servers_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "server"
    for client in ("ann", "bob"):
        assert main(["connect-server", str(folder), "--new-client", str(tmp_path / client)]) == 0

    clients = [read_secret(tmp_path / client) for client in ("ann", "bob")]
    assert [bytes.fromhex(line) for line in (folder / "secrets").read_text().splitlines()] == clients
    assert clients[0] != clients[1]
    assert [file.stat().st_mode & 0o777 for file in (folder / "secrets", tmp_path / "ann")] == [0o600, 0o600]
    assert (folder / "headgate-relay.jar").read_bytes() == jar_bytes()
    assert f"--driver-class-path {folder}/headgate-relay.jar" in capsys.readouterr().out


def test_a_secret_that_exists_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = tmp_path / "ann"
    client.write_text("mine")

    assert main(["connect-server", str(tmp_path / "server"), "--new-client", str(client)]) == 1

    assert client.read_text() == "mine"
    assert not (tmp_path / "server" / "secrets").exists()
    assert "File exists" in capsys.readouterr().err


def test_a_secret_that_the_server_does_not_get_is_not_left_with_the_client(tmp_path: Path) -> None:  # H162
    server, client = tmp_path / "server", tmp_path / "ann"
    (server / "secrets").mkdir(parents=True)  # so it cannot be written

    assert main(["connect-server", str(server), "--new-client", str(client)]) == 1

    assert not client.exists(), "a second try would be refused for it"


def test_the_relay_of_a_server_that_runs_is_replaced_as_a_whole(tmp_path: Path) -> None:  # H162
    """A JVM that has the file open goes on with the one it has."""
    (tmp_path / "headgate-relay.jar").write_bytes(b"of a former release")

    with (tmp_path / "headgate-relay.jar").open("rb") as opened:
        assert main(["connect-server", str(tmp_path)]) == 0
        assert opened.read() == b"of a former release"

    assert [path.name for path in tmp_path.iterdir()] == ["headgate-relay.jar"]
    assert (tmp_path / "headgate-relay.jar").read_bytes() == jar_bytes()
