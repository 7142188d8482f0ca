# SPDX-License-Identifier: Apache-2.0

"""``headgate top``, against a control port as a sidecar's process has one."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.wire.keys import KeyRing
from spark_bridge.command import main
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.status import LatencyStatus, Percentiles
from spark_bridge.server.server import ServerConfig
from spark_bridge.standalone.control_server import serve_control
from spark_bridge.standalone.secret_file import read_or_make_secret
from spark_bridge.standalone.status_bytes import pack_status
from spark_bridge.standalone.top import lines_of
from tests.spark_bridge.observability.statuses import NOW, attempt, operator, sidecar

ROOT = Path(__file__).resolve().parents[2]

# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_shows_operators_and_what_their_subtasks_wait_for() -> None:
    busy = operator(
        attempts=(attempt(0), attempt(1, requested_at=NOW - 41), attempt(2, state="over")),
        events_up_per_s=1234.5,
        confirm=LatencyStatus(10, last_minute=Percentiles(1500.0, 20_000.0, None)),
        last_completed_checkpoint_id=7,
        counts={"failures": 3},
    )
    text = lines_of(sidecar(busy), 200, subtasks_max=10)
    assert text[0].startswith("sidecar 127.0.0.1:4242  up 1 min 40 s")
    assert text[1].startswith("! subtask 1 has waited 41 s")
    (row,) = [line.split() for line in text if line.startswith("crawl") and "stage" in line]
    assert row == ["crawl", "batch", "stage", "7", "2/4", "1234", "0", "0", "1.5/20.0", "7", "3", "0"]
    subtasks = [line.split()[1] for line in text if line.startswith("crawl") and "ready" in line]
    assert subtasks == ["1", "0"], "what waits comes first, and what is over does not come"
    assert any(line.endswith("the answer to its request") for line in text)


def test_what_does_not_fit_is_counted() -> None:
    many = operator(attempts=tuple(map(attempt, range(30))), attempts_left_out=5)
    text = lines_of(sidecar(many), 40, subtasks_max=10)
    assert text[-1] == "and 25 more"
    assert max(map(len, text)) <= 40


def test_nothing_of_the_users_can_move_the_cursor() -> None:
    text = lines_of(sidecar(operator(operator_id="\x1b[2J\nevil", mode="\r\x9b")), 200, subtasks_max=10)
    assert all(line.isprintable() for line in text)


def test_a_sidecar_without_a_driver_says_so() -> None:
    assert lines_of(None, 80, subtasks_max=10) == ["no driver is attached to this sidecar"]


# --- the command --------------------------------------------------------------------------------------------------

Answer = Callable[[], Any]


async def top_of(secret_file: Path, answer: Answer, use: Callable[[list[str]], Any]) -> Any:
    """Serve ``answer`` to those who look, and return what ``use`` does with the arguments of the command."""
    asked: list[tuple[bytes, str]] = []

    async def reply(driver: bytes, method: str, argument: Any) -> Any:
        asked.append((driver, method))
        return answer()

    async with anyio.create_task_group() as tasks:
        keys = KeyRing(read_or_make_secret(secret_file))
        port = await tasks.start(serve_control, reply, keys, ServerConfig())
        done = await anyio.to_thread.run_sync(use, ["top", "--port", str(port), "--secret-file", str(secret_file)])
        tasks.cancel_scope.cancel()
    assert {method for _, method in asked} <= {"look"}, "it must not attach"
    return done


def run(arguments: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate", *arguments, *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def packed() -> bytes:
    return pack_status(sidecar(operator()))


async def test_once_prints_one_table(tmp_path: Path) -> None:
    done = await top_of(tmp_path / "secret", packed, lambda arguments: run(arguments, "--once"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sidecar 127.0.0.1:4242")
    assert done.stdout.count("OPERATOR") == 2
    assert "\x1b" not in done.stdout


async def test_where_no_terminal_is_it_prints_tables_until_the_reader_leaves(tmp_path: Path) -> None:
    def first_two(arguments: list[str]) -> tuple[str, int, str]:
        command = [sys.executable, "-m", "headgate", *arguments, "--interval", "0.01"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            seen = ""
            while seen.count("sidecar 127") < 3:
                seen += process.stdout.readline()
            process.stdout.close()
            return seen, process.wait(60), process.stderr.read()

    seen, status, said = await top_of(tmp_path / "secret", packed, first_two)
    assert "\x1b" not in seen
    assert (status, said) == (0, "")


@pytest.mark.parametrize("ends", ["q", "ctrl-c", "sigterm"])
async def test_in_a_terminal_it_draws_until_it_is_told_to_end_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, ends: str
) -> None:
    statuses = iter([None, SidecarError("gone for a moment")])

    def answer() -> Any:
        status = next(statuses, packed)
        if isinstance(status, Exception):
            raise status
        return status and status()

    seen, status = await top_of(tmp_path / "secret", answer, partial(in_a_terminal, ends))
    for text in ("no driver is attached", "gone for a moment", "sidecar 127.0.0.1:4242"):
        assert text in seen
    assert status == 0
    drawn = [line.rstrip("\r") for line in seen.split("\n") if line.startswith("crawl") and "stage" in line]
    assert {line[-3:] for line in drawn} == {"\x1b[K"}, "the rest of a longer line is erased"
    assert seen.index("\x1b[?1049h") < seen.index("\x1b[H"), "it draws on the second screen"
    assert seen.rindex("\x1b[?1049l") > seen.rindex("\x1b[H"), "back to the first screen"
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "with its cursor"


def in_a_terminal(ends: str, arguments: list[str]) -> tuple[str, int]:
    child, terminal = pty.fork()
    if not child:  # pragma: no cover
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "headgate", *arguments, "--interval", "0.01"])
    seen = ""
    while "sidecar 127" not in seen:
        seen += os.read(terminal, 65_536).decode()
    if ends == "sigterm":
        os.kill(child, signal.SIGTERM)
    else:
        os.write(terminal, b"q" if ends == "q" else b"\x03")
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data.decode()
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return seen, os.waitstatus_to_exitcode(status)


def test_what_cannot_work_is_one_line_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read_or_make_secret(tmp_path / "secret")
    assert main(["top", "--port", "1", "--secret-file", str(tmp_path / "secret"), "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("top: no sidecar answers at 127.0.0.1:1 ")


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--help"])
    out = capsys.readouterr().out
    assert all(option in out for option in ("--secret-file", "--port", "--host", "--tls", "--interval", "--once"))
