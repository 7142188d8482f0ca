# SPDX-License-Identifier: Apache-2.0

"""What is read of the driver's settings: its hosts, its limits, and the Python of its workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext
from structlog.testing import capture_logs

from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.environment import (
    advertised_and_bind_host,
    allocates_executors,
    check_worker_python,
    driver_context,
    encrypts_files,
    is_local,
    task_failures_max,
    task_slots,
)


class Context:
    """As much of a SparkContext as these functions read."""

    def __init__(self, master: str = "spark://a:1", python: str = "", **settings: str) -> None:
        self.master = master
        self.pythonExec = python
        self._settings = {name.replace("_", "."): text for name, text in settings.items()}

    def getConf(self) -> dict[str, str]:
        return self._settings


def hosts(context: Context, bind: str | None = None, advertised: str | None = None) -> tuple[str, str]:
    return advertised_and_bind_host(context, bind, advertised)


@pytest.mark.parametrize("master", ["local", "local[4]", "local[2,3]", "local-cluster[2,1,512]"])
def test_where_tasks_run_on_this_machine_it_listens_on_loopback_whatever_the_driver_is_called(master: str) -> None:
    context = Context(master, spark_driver_host="driver.example", spark_driver_bindAddress="10.0.0.1")
    assert is_local(context)
    assert hosts(context) == ("127.0.0.1", "127.0.0.1")
    assert hosts(context, bind="10.0.0.7") == ("10.0.0.7", "10.0.0.7")
    assert hosts(context, advertised="10.0.0.8") == ("127.0.0.1", "10.0.0.8")


def test_elsewhere_it_listens_where_the_driver_does_and_is_called_as_the_driver_is() -> None:  # H63
    both = Context(spark_driver_host="driver.example", spark_driver_bindAddress="10.0.0.1")
    assert not is_local(both)
    assert hosts(both) == ("10.0.0.1", "driver.example")
    assert hosts(Context(spark_driver_host="driver.example")) == ("driver.example", "driver.example")
    assert hosts(both, bind="0.0.0.0") == ("0.0.0.0", "driver.example")
    assert hosts(both, advertised="gate.example") == ("10.0.0.1", "gate.example")
    assert hosts(Context(), bind="10.0.0.7") == ("10.0.0.7", "10.0.0.7")


@pytest.mark.parametrize(("bind", "advertised"), [(None, None), (None, "gate.example")])
def test_a_driver_without_a_name_has_to_be_given_one(bind: str | None, advertised: str | None) -> None:
    with pytest.raises(SidecarError, match="Spark does not name a driver host"):
        hosts(Context(), bind, advertised)


@pytest.mark.parametrize(
    ("master", "settings", "count"),
    [
        ("local[2,3]", {}, 3),
        ("local[*, 7]", {"spark_task_maxFailures": "2"}, 7),
        ("local[2]", {}, 4),
        ("local[2]", {"spark_task_maxFailures": "2"}, 2),
        ("spark://a:1", {"spark_task_maxFailures": "9"}, 9),
        ("spark://a:1", {}, 4),
    ],
)
def test_how_often_a_task_may_fail_is_said_by_the_master_or_the_setting(
    master: str, settings: dict[str, str], count: int
) -> None:
    assert task_failures_max(Context(master, **settings)) == count


@pytest.mark.parametrize(("said", "encrypted"), [("true", True), ("TRUE", True), ("false", False), (None, False)])
def test_files_are_encrypted_if_spark_says_so(said: str | None, encrypted: bool) -> None:
    assert encrypts_files(Context(**({} if said is None else {"spark_io_encryption_enabled": said}))) is encrypted


def with_executors(*cores: int, **settings: str) -> Any:
    context: Any = Context(**settings)
    executors = [SimpleNamespace(totalCores=lambda count=count: count) for count in cores]
    seen = SimpleNamespace(size=lambda: len(executors), apply=executors.__getitem__)
    store = SimpleNamespace(executorList=lambda only_active: seen if only_active else None)
    context._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: store))
    return context


def test_as_many_tasks_run_at_a_time_as_the_active_executors_have_cores_for() -> None:
    assert task_slots(with_executors(4, 3)) == 7
    assert task_slots(with_executors(4, 3, spark_task_cpus="2")) == 3
    assert task_slots(with_executors()) == 0


@pytest.mark.parametrize(("said", "allocates"), [(None, False), ("false", False), ("TRUE", True)])
def test_executors_come_when_tasks_wait_if_spark_says_so(said: str | None, allocates: bool) -> None:  # H199
    settings = {} if said is None else {"spark_dynamicAllocation_enabled": said}
    assert allocates_executors(Context(**settings)) is allocates


def test_nobody_knows_how_many_tasks_a_stopped_context_can_run() -> None:
    stopped: Any = Context()
    stopped._jsc = None
    assert task_slots(stopped) is None
    refused: Any = Context()

    def sc() -> None:
        raise Py4JError("gone")

    refused._jsc = SimpleNamespace(sc=sc)
    assert task_slots(refused) is None


@pytest.mark.parametrize("given", [None, "a session", 7, SimpleNamespace(sparkContext="a context")])
def test_what_is_not_a_session_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="spark must be the SparkSession or the SparkContext"):
        driver_context(given)


def a_context(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """Return what is taken for the SparkContext of a PySpark with this version."""
    context: Any = object.__new__(SparkContext)
    context._jsc = object()
    monkeypatch.setattr(pyspark, "__version__", version)
    return context


@pytest.mark.parametrize("version", ["3.5.9", "4.0.2", "unknown", ""])
def test_a_spark_that_is_too_old_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was installed with Headgate has chosen it. H170"""
    says = f"^this Python has Spark {version}, but Headgate supports 4.1 and later: update PySpark$"
    with pytest.raises(SidecarError, match=says):
        driver_context(a_context(monkeypatch, version))


@pytest.mark.parametrize(("version", "logged"), [("4.1.0", 0), ("4.3.1+vendor", 0), ("4.4.0.dev1", 1), ("5.0.0", 1)])
def test_a_spark_that_is_newer_than_any_tested_one_is_logged(
    version: str, logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = a_context(monkeypatch, version)
    with capture_logs() as lines:
        assert driver_context(context) is context
    assert [(line["version"], line["newest"]) for line in lines] == [(version, "4.3")] * logged


def program(folder: Path, text: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[1,1,512]"])
def test_workers_of_another_python_are_refused_before_a_task_is_tried(master: str, tmp_path: Path) -> None:
    context = Context(master, program(tmp_path, "echo 3.5"))
    with pytest.raises(SidecarError, match=rf"\(Python 3.5\), but the driver runs Python {HERE}: set PYSPARK_PYTHON="):
        check_worker_python(context)


def test_workers_without_what_a_subtask_needs_are_refused_with_the_reason(tmp_path: Path) -> None:
    text = f"echo {HERE}; echo Traceback >&2; echo 'No module named msgpack' >&2; exit 1"
    with pytest.raises(SidecarError, match=r"lacks what a subtask needs \(No module named msgpack\)"):
        check_worker_python(Context("local", program(tmp_path, text)))
    with pytest.raises(SidecarError, match=r"lacks what a subtask needs \(it failed\)"):
        check_worker_python(Context("local", program(tmp_path, "exit 1")))


def test_workers_that_do_not_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match="Python 'no-such-python' was not found"):
        check_worker_python(Context("local", "no-such-python"))
    broken = tmp_path / "python"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(SidecarError, match="does not run"):
        check_worker_python(Context("local", str(broken)))


def test_workers_with_the_same_python_are_accepted(tmp_path: Path) -> None:
    check_worker_python(Context("local", program(tmp_path, f"echo {HERE}")))


def test_only_another_interpreter_on_this_machine_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was started"))
    check_worker_python(Context("spark://a:1", program(tmp_path, "exit 1")))
    check_worker_python(Context("local", sys.executable))
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    check_worker_python(Context("local", "the-same"))
