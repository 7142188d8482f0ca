# SPDX-License-Identifier: Apache-2.0

"""``headgate version`` and ``check``: their output and advice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.testing import running_operator
from spark_bridge.command import main
from spark_bridge.driver.installation import _question_and_answer, java_major

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("banner", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_401"', 8),
        ("command not found", None),
    ],
)
def test_the_major_version_is_read_from_what_java_prints(banner: str, major: int | None) -> None:
    assert java_major(banner) == major


async def test_the_operator_of_the_check_gets_the_answer_of_its_coordinator() -> None:
    coordinator, operator = _question_and_answer()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, operator, [0])
        assert task.outputs == ["answer"]


def test_version_prints_headgate_python_and_spark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["headgate", "pyspark", "python"]
    assert lines[2].split()[1] == ".".join(str(part) for part in sys.version_info[:3])


def test_check_without_java_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["check"]) == 1
    assert "FAILED: no java on PATH, and JAVA_HOME is not set: install Java 17 or later" in capsys.readouterr().out


def test_check_with_a_java_home_that_holds_none_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["check"]) == 1
    assert f"FAILED: JAVA_HOME is {tmp_path}, which has no bin/java" in capsys.readouterr().out


def test_check_refuses_a_java_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["check"]) == 1
    assert f"FAILED: {java} is Java 11, which is too old: install Java 17 or later" in capsys.readouterr().out


def check(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate", "check"]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
@pytest.mark.spark
def test_check_lets_a_task_ask_its_coordinator() -> None:
    done = check(PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "packages",
        "Java",
        "Spark",
        "workers' Python",
        "sidecar and task",
        "Headgate works here.",
    ]
    assert "ok, a task sent its coordinator a request and received the answer" in done.stdout


@pytest.mark.long
@pytest.mark.spark
def test_check_names_a_worker_python_that_does_not_exist() -> None:
    assert shutil.which("python-that-is-missing") is None
    done = check(PYSPARK_PYTHON="python-that-is-missing")
    assert done.returncode == 1
    assert (
        "workers' Python:  FAILED: cannot start Spark's workers: Python 'python-that-is-missing' was not found"
        in done.stdout
    )
