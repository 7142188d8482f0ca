# SPDX-License-Identifier: Apache-2.0

"""The separate sidecar process without Spark: its arguments, its secret, and the requests of drivers."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.coordination import CheckpointFailed
from protocol.wire.keys import KeyRing
from spark_bridge.command import main
from spark_bridge.common.certificates import Encryption, TlsCertificate, certificate_digest, encryption
from spark_bridge.common.errors import SidecarError
from spark_bridge.server.server import ServerConfig
from spark_bridge.standalone.command import find
from spark_bridge.standalone.control_client import ControlAddress, SidecarUnreachable, ask
from spark_bridge.standalone.control_server import serve_control
from spark_bridge.standalone.secret_file import read_or_make_secret, read_secret

ROOT = Path(__file__).resolve().parents[2]
KEYS = KeyRing(b"s" * 32)
DRIVER = b"this driver's id"
NOT_ENCRYPTED = Encryption()


# --- the secret (H61) ---------------------------------------------------------------------------------------------


def test_a_secret_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = read_or_make_secret(file)
    assert len(secret) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_or_make_secret(file) == read_secret(file) == secret


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ("ab" * 32, 0o640, "chmod 600"),
        ("ab" * 4, 0o600, "holds a secret of 4 bytes"),
        ("no hex at all", 0o600, "is not what a sidecar wrote, .* hexadecimal digits. Pass"),
        ("ab" * 5_000, 0o600, "more than 4096 bytes"),
    ],
)
def test_an_invalid_secret_file_is_refused_with_the_fix(tmp_path: Path, content: str, mode: int, text: str) -> None:
    file = tmp_path / "secret"
    file.touch(mode)
    file.chmod(mode)
    file.write_text(content)
    with pytest.raises(SidecarError, match=text):
        read_secret(file)


def test_what_is_not_a_regular_file_is_neither_waited_for_nor_read_without_end(tmp_path: Path) -> None:
    """H157"""
    os.mkfifo(pipe := tmp_path / "pipe")
    (zero := tmp_path / "zero").symlink_to("/dev/zero")
    (certificate := tmp_path / "certificate").write_text(f"{ssl.PEM_HEADER}\nMA==\n{ssl.PEM_FOOTER}\n")
    for file in (pipe, zero, tmp_path):
        with pytest.raises(SidecarError, match="it is not a regular file"):
            read_secret(file)
        with pytest.raises(SidecarError, match="it is not a regular file"):
            certificate_digest(TlsCertificate(file), KeyRing(b"k" * 32))
        with pytest.raises(SidecarError, match="it is not a regular file"):
            encryption(TlsCertificate(certificate, file), KeyRing(b"k" * 32))


def test_a_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    read_or_make_secret(file)
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + 1)
    if file.stat().st_uid == 0:  # root's files are believed: give it to somebody else
        os.chown(file, 12_345, -1)
    with pytest.raises(SidecarError, match="belongs to another user"):
        read_secret(file)


def test_processes_that_start_together_share_one_whole_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    together = 16
    barrier = threading.Barrier(together)

    def start(_: int) -> bytes:
        barrier.wait()
        return read_or_make_secret(file)

    for _ in range(25):
        with ThreadPoolExecutor(together) as threads:
            assert len(set(threads.map(start, range(together)))) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["secret"], "no temporary file is left"
        file.unlink()


def test_a_missing_secret_file_says_that_the_sidecar_creates_it(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match="creates it when it starts"):
        read_secret(tmp_path / "nowhere")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "expected MODULE:NAME"),
        (["no.such.module:factory"], "was not found"),
        (["json:no_such_name"], "was not found"),
        (["json:__name__"], "is not a function"),
        (["json:loads", "--port", "65534"], "--port must be at most 65533"),
        (["json:loads", "--config", "json:loads"], "is not a SidecarConfig"),
    ],
)
def test_an_invalid_argument_is_reported_in_one_line(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sidecar", *arguments, "--secret-file", str(tmp_path / "secret")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("sidecar: ")
    assert text in told
    assert told.count("\n") == 1


def test_a_missing_package_for_tls_is_reported_in_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from spark_bridge.command import main\n"
        f"sys.exit(main(['sidecar', 'json:loads', '--tls', '--secret-file', {str(tmp_path / 'secret')!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "pip install 'headgate[tls]'" in line


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["json:loads", "--secret-file", str(tmp_path / "secret"), "--port", str(port)]
        command = [sys.executable, "-m", "headgate", "sidecar", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"sidecar: cannot listen on 127.0.0.1:{port}: ")


def test_a_dotted_name_is_found() -> None:
    assert find("pathlib:Path.cwd")() == Path.cwd()


# --- questions ----------------------------------------------------------------------------------------------------


async def answer(driver: bytes, method: str, argument: Any) -> Any:
    match method:
        case "who":
            return driver
        case "surrogate":
            raise LookupError("\udc80" * 3)
        case "much":
            raise LookupError("x" * 5_000_000)
        case "unspeakable":
            raise Unspeakable
        case "object":
            return object()
        case "twice":
            return [argument, argument]
        case "checkpoint":
            raise CheckpointFailed("no space")
        case "hang":
            await anyio.sleep_forever()
    raise LookupError(f"what is {method}?")


async def asked(
    method: str,
    argument: Any = None,
    *,
    keys: KeyRing = KEYS,
    timeout_s: float = 30.0,
    encryption: Encryption = NOT_ENCRYPTED,
) -> Any:
    """Ask over a real connection to a separate server."""
    outcome: list[Any] = []
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_control, answer, KEYS, ServerConfig(tls=encryption.context))
        question = partial(
            ask,
            ControlAddress("127.0.0.1", port, keys, encryption.certificate_sha256),
            DRIVER,
            method,
            argument,
            timeout_s=timeout_s,
            connect_timeout_s=1.0,
        )
        try:
            outcome.append(await asyncio.to_thread(question))
        except (SidecarError, CheckpointFailed) as error:  # outside the group it would come in a separate group
            outcome.append(error)
        tasks.cancel_scope.cancel()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


async def test_a_request_is_answered() -> None:
    assert await asked("twice", {"n": [1, b"x"]}) == [{"n": [1, b"x"]}, {"n": [1, b"x"]}]


async def test_an_error_of_the_sidecar_keeps_its_class_or_names_it() -> None:
    with pytest.raises(CheckpointFailed, match=r"^no space$"):
        await asked("checkpoint")
    with pytest.raises(SidecarError, match=r"LookupError: what is that\?"):
        await asked("that")


async def test_the_sidecar_knows_which_driver_asks() -> None:  # H76
    assert await asked("who") == DRIVER


class Unspeakable(LookupError):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("surrogate", r"LookupError: \\udc80\\udc80\\udc80"),
        ("much", r"LookupError: x{1000,32767}…"),
        ("unspeakable", r"Unspeakable: .its __str__ raised ValueError."),
        ("object", r"the answer to this .object. cannot be sent: .* is of type builtins.object"),
    ],
)
async def test_an_error_that_cannot_be_sent_as_it_is_ends_one_request_only(method: str, text: str) -> None:
    with pytest.raises(SidecarError, match=text):
        await asked(method)


async def test_a_driver_refuses_a_sidecar_with_another_certificate() -> None:  # H77
    made, other = (encryption(True, keys) for keys in (KEYS, KeyRing(b"t" * 32)))
    assert await asked("who", encryption=made) == DRIVER
    with pytest.raises(SidecarUnreachable, match="certificate is not the one that belongs to this application"):
        await asked("who", encryption=replace(other, certificate_sha256=made.certificate_sha256))


async def test_a_driver_without_the_secret_learns_nothing() -> None:  # H61
    with pytest.raises(SidecarUnreachable, match="give both ends the same --secret-file"):
        await asked("twice", keys=KeyRing(b"t" * 32))


async def test_a_late_answer_is_an_error() -> None:  # H48
    with pytest.raises(SidecarUnreachable, match="stopped before it answered 'hang'"):
        await asked("hang", timeout_s=0.2)


def test_a_missing_sidecar_is_an_error_that_says_how_to_start_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SidecarUnreachable, match="headgate sidecar"):
        ask(ControlAddress("127.0.0.1", port, KEYS), DRIVER, "twice", timeout_s=1.0, connect_timeout_s=0.2)
