# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate connect-server``: the files of a server's operator, and those of his clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_bridge.command import main
from spark_bridge.relay_jar import jar_bytes
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
