# SPDX-License-Identifier: Apache-2.0

"""``headgate version`` and ``check``: their output and advice.

tests/release/test_installs.py runs them where Spark is of another kind.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from spark_bridge.command import main
from spark_bridge.common import foreign_packages
from spark_bridge.driver.installation import CheckFailed, check_java, java_major, place

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


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DATABRICKS_RUNTIME_VERSION": "18.0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Databricks"),
        ({"GLUE_VERSION": "6.0"}, "AWS Glue"),
        ({"SERVERLESS_EMR_JOB_ID": "1", "KUBERNETES_SERVICE_HOST": "x"}, "Amazon EMR, on EKS or Serverless"),
        ({"DATAPROC_IMAGE_VERSION": "3.0", "CONTAINER_ID": "container_1"}, "Google Dataproc"),
        ({"DATAPROC_WORKLOAD_TYPE": "batch"}, "Google Dataproc, serverless"),
        ({"AZURE_SERVICE": "Microsoft.ProjectArcadia"}, "Microsoft Fabric or Synapse"),
        ({"AZURE_SERVICE": "another"}, "no platform that is known"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a pod of Kubernetes"),
        ({"CONTAINER_ID": "container_e01_1_0001_01_000001"}, "a container of YARN"),
        ({"CONTAINER_ID": "4711"}, "no platform that is known"),
        ({}, "no platform that is known"),
    ],
)
def test_the_platform_is_told_from_the_environment(environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    assert place(environment, tmp_path / "missing") == expected


def test_a_node_of_emr_is_told_from_its_file(tmp_path: Path) -> None:
    assert place({"CONTAINER_ID": "container_1"}, tmp_path) == "Amazon EMR, on EC2"


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
    java = java_that_says("11.0.2", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["check"]) == 1
    assert f"FAILED: {java} is Java 11, which is too old: install Java 17 or later" in capsys.readouterr().out


def java_that_says(version: str, folder: Path) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    return java


@pytest.mark.parametrize(
    ("spark", "java", "too_new"),
    [("4.1.4", "25.0.1", True), ("4.1.4", "21.0.2", False), ("4.2.1", "25.0.1", False), ("4.3.0", "26", False)],
)
def test_check_refuses_a_java_that_this_release_of_spark_does_not_start_with(
    spark: str, java: str, too_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = java_that_says(java, tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(CheckFailed, match=r"too new for Spark 4\.1\.4: set JAVA_HOME") if too_new else nullcontext():
        assert check_java(spark) == f"ok, {java.partition('.')[0]} ({found})"


def test_check_reports_two_distributions_in_one_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["pyspark 4.3.0", "pyspark-client 4.2.0"]
    monkeypatch.setattr(foreign_packages, "distributions_with", lambda name, folder: both if name == "pyspark" else [])
    assert main(["check"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "FAILED: pyspark 4.3.0 and pyspark-client 4.2.0 are installed in the same folder" in last
    assert "pip uninstall pyspark pyspark-client, then install the one that you use" in last


def test_check_refuses_a_spark_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.1")
    assert main(["check"]) == 1
    assert "FAILED: this Python has Spark 3.5.1, but Headgate supports 4.1 and later" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_check_shows_no_token_of_a_server(where: str) -> None:
    url = "sc://127.0.0.1:1/;token=tell-nobody"
    done = check("--remote", url) if where == "argument" else check(SPARK_REMOTE=url)
    assert done.returncode == 1
    assert "FAILED: no session of the Spark Connect server sc://127.0.0.1:1 (" in done.stdout
    assert "tell-nobody" not in done.stdout + done.stderr


def check(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate", "check", *options]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
@pytest.mark.spark
def test_check_lets_a_task_ask_its_coordinator() -> None:
    done = check(PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.endswith(" s so far")]
    assert [line.partition(":")[0] for line in lines] == [
        "place",
        "packages",
        "Spark",
        "Java",
        "session",
        "workers' Python",
        "sidecar",
        f"{'':18}executor driver at {socket.gethostname()}",
        "executors",
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
