# SPDX-License-Identifier: Apache-2.0

"""``headgate check`` and ``headgate.check``: what they say of each executor, and how they end.

tests/spark/test_check.py runs them on clusters.
"""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import SidecarConfig
from headgate.testing import running_operator
from spark_bridge.command import main
from spark_bridge.driver import check
from spark_bridge.driver.check import _question_and_answer, _Trial, _within, why_apart
from spark_bridge.driver.environment import why_no_subtask
from spark_bridge.driver.installation import CheckFailed
from spark_bridge.task_entry import Looked


async def test_the_operator_of_the_check_gets_the_answer_of_its_coordinator() -> None:
    coordinator, operator = _question_and_answer()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, operator, [0])
        assert task.outputs == [0]


# --- each executor ------------------------------------------------------------------------------------------------


TASK = SimpleNamespace(endpoint=SimpleNamespace(host="10.0.0.1", port=7650))


def looked(executor: str, problem: str = "", error: str = "") -> Looked:
    return Looked(problem, error, executor, f"host-{executor}", "3.12.1", "21.0.2")


def a_trial(monkeypatch: pytest.MonkeyPatch, there: set[str], *looks: list[Looked]) -> _Trial:
    """One that finds these executors, each time that it looks."""
    monkeypatch.setattr(check, "executor_ids", lambda context: there)
    session: Any = SimpleNamespace(sparkContext=None)
    trial = _Trial(session, SidecarConfig(), 60.0)
    trial._task = TASK
    found = list(looks)
    monkeypatch.setattr(trial, "_looked", lambda: found.pop(0))
    return trial


def test_each_executor_is_shown_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = a_trial(monkeypatch, {"0", "1"}, [looked("1"), looked("0"), looked("1")])
    assert trial.look() == "ok, 2 of 2 reach the sidecar"
    assert capsys.readouterr().out.splitlines() == [
        f"{'':18}executor {n} at host-{n}: Python 3.12.1, Java 21.0.2, reaches 10.0.0.1:7650" for n in (0, 1)
    ]


def test_it_looks_again_for_executors_that_have_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = a_trial(monkeypatch, {"0", "1"}, [looked("0")], [looked("1")])
    assert trial.look() == "ok, 2 of 2 reach the sidecar"


def test_an_executor_that_never_runs_a_task_is_not_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = a_trial(monkeypatch, {"0", "1"}, *([[looked("0")]] * 3))
    assert trial.look() == "ok, 1 of 1 reach the sidecar"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.strip() == "executor 1: not checked, because no task was run there"


def test_an_executor_that_does_not_reach_the_sidecar_is_named_with_what_to_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = a_trial(monkeypatch, {"0", "1"}, [looked("0"), looked("1", "host-1: timed out", "TimeoutError")])
    with pytest.raises(CheckFailed) as failed:
        trial.look()
    assert "executor 1 at host-1: Python 3.12.1, Java 21.0.2, does not reach 10.0.0.1:7650 (host-1: timed out)" in (
        capsys.readouterr().out
    )
    said = str(failed.value)
    assert said.startswith("1 of 2 executors cannot reach the sidecar at 10.0.0.1:7650: a firewall or a network policy")
    assert "Open TCP port 7650 of the driver to the executors" in said


@pytest.mark.parametrize(
    ("errors", "is_remote", "said"),
    [
        ({"gaierror"}, False, r"^'driver' is a name that they do not know: set spark\.driver\.host, or SidecarConfig"),
        ({"gaierror"}, True, r"^'driver' is a name that they do not know: set SidecarConfig"),
        ({"ConnectionRefusedError"}, False, r"^something refuses .* Open TCP port 7650 of the driver to the executors"),
        (
            {"TimeoutError"},
            True,
            r"drops what they send.* Open TCP port 7650 of this machine to the server's executors",
        ),
        ({"TimeoutError", "gaierror"}, False, r"if the address is wrong for them, set spark\.driver\.host"),
    ],
)
def test_what_to_do_depends_on_what_the_network_said(errors: set[str], is_remote: bool, said: str) -> None:
    assert re.search(said, why_apart(errors, "driver", 7650, is_remote))


def test_workers_with_another_python_are_named_with_what_to_set() -> None:
    text = "stack\n[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11"
    assert why_no_subtask(text, of_server=False).startswith(
        "Spark's workers run Python 3.9, but the driver runs Python 3."
    )
    assert "set PYSPARK_PYTHON to a Python" in why_no_subtask(text, of_server=False)


class AServer:
    """As much of a Connect session as is asked. With ``forbids``, it allows no Java methods."""

    def __init__(self, forbids: bool) -> None:
        self.forbids = forbids
        self.expressions: tuple[str, ...] = ()

    def range(self, *numbers: int) -> AServer:
        return self

    def selectExpr(self, *expressions: str) -> AServer:
        asked = AServer(self.forbids)
        asked.expressions = expressions
        return asked

    @property
    def schema(self) -> str:
        if self.forbids:
            raise RuntimeError("UNSUPPORTED_FUNCTION")
        return "known"

    def mapInArrow(self, look: Any, schema: str) -> AServer:
        return self

    def collect(self) -> list[Looked]:
        return [looked("0")._replace(java="21.0.2" if self.expressions else "")]

    def sql(self, query: str) -> AServer:
        raise RuntimeError("UNSUPPORTED_FUNCTION")


@pytest.mark.parametrize("forbids", [False, True])
def test_executors_are_looked_at_where_no_java_method_may_be_called(
    forbids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = _Trial(AServer(forbids), SidecarConfig(), 60.0)
    trial._is_remote = True
    trial._task = TASK
    monkeypatch.setattr(trial, "_as_job", lambda collect: collect())
    assert [one.java for one in trial._looked()] == ["" if forbids else "21.0.2"]


def test_a_driver_that_does_not_tell_its_java_is_shown_without() -> None:
    assert check._java_of_driver(AServer(forbids=True)) == ""


# --- how it ends --------------------------------------------------------------------------------------------------


def test_what_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()
    with pytest.raises(CheckFailed, match=r"^waiting took longer than 0\.01 s, and was given up: look there"):
        _within(0.01, "waiting", "look there", cancelled.wait, cancelled.set)
    assert cancelled.is_set()


def test_an_interrupt_cancels_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "PROGRESS_S", 0.0)
    monkeypatch.setattr(check, "_say", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _within(600.0, "waiting for tasks", "", cancelled.wait, cancelled.set)
    assert cancelled.is_set()


def test_what_is_waited_for_is_shown_and_its_result_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line.strip())
        shown.set()

    monkeypatch.setattr(check, "PROGRESS_S", 0.0)
    monkeypatch.setattr(check, "_say", say)
    assert _within(600.0, "waiting for tasks", "", shown.wait) is True
    assert lines[0] == "waiting for tasks, for 0 s so far"


def test_a_client_alone_starts_no_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pyspark.util.is_remote_only", lambda: True)
    assert main(["check", "--master", "yarn"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "FAILED: pyspark-client starts no Spark: install pyspark instead, or check a server" in last


def test_a_master_or_a_server_is_checked_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--master", "yarn", "--remote", "sc://127.0.0.1:1"])
    assert "not allowed with argument" in capsys.readouterr().err
