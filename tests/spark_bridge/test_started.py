# SPDX-License-Identifier: Apache-2.0

"""Sidecars that were started by name, and the end of the interpreter; tests/spark starts real ones."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from spark_bridge.common.errors import SidecarError
from spark_bridge.driver import started
from spark_bridge.driver.config import SidecarConfig, SidecarLimits
from spark_bridge.driver.environment import is_remote


class Context:
    """In place of a SparkContext."""

    __module__ = "pyspark.sql.connect.session"  # so nobody asks its JVM


class Stopping:
    """In place of a sidecar. ``at_stop``: what the next calls of ``stop`` raise, before they have stopped it."""

    made: list[Stopping]

    def __init__(self, spark: object, config: SidecarConfig) -> None:
        self.spark = spark
        self.config = config
        self.is_running = False
        self.at_stop: list[BaseException] = []
        self.hurried = self.stops = 0
        self.made.append(self)

    def __enter__(self) -> Stopping:
        self.is_running = True
        return self

    def stop(self) -> None:
        self.stops += 1
        if self.at_stop:
            raise self.at_stop.pop(0)
        self.is_running = False

    def _hurry(self) -> None:
        self.hurried += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stopping]:
    monkeypatch.setattr(Stopping, "made", [], raising=False)
    monkeypatch.setattr(started, "Sidecar", Stopping)
    monkeypatch.setattr(started, "_started", started._Started())
    return Stopping.made


CONTEXT: Any = Context()


def test_a_cell_that_runs_again_gets_the_sidecar_that_runs(made: list[Stopping]) -> None:
    assert is_remote(CONTEXT)
    first = started.start(CONTEXT)
    assert started.start(CONTEXT, SidecarConfig()) is first
    other = started.start(CONTEXT, name="other")
    assert other is not first
    assert [(one.is_running, one.stops) for one in made] == [(True, 0), (True, 0)]


@pytest.mark.parametrize("what", ["settings", "context"])
def test_other_settings_or_another_context_replace_it_and_the_log_says_so(what: str, made: list[Stopping]) -> None:
    first = started.start(CONTEXT)
    config = SidecarConfig(
        limits=SidecarLimits(shutdown_timeout_s=7.0 if what == "settings" else SidecarLimits().shutdown_timeout_s)
    )
    with structlog.testing.capture_logs() as logs:
        second = started.start(CONTEXT if what == "settings" else Context(), config)
    assert second is not first
    assert [(one.is_running, one.stops) for one in made] == [(False, 1), (True, 0)]
    [line] = logs
    assert line["event"] == "started sidecar replaced"
    assert what in line["why"].lower()


def test_one_that_no_longer_runs_is_replaced_without_a_word(made: list[Stopping]) -> None:
    made_first: Any = started.start(CONTEXT)
    made_first.is_running = False
    with structlog.testing.capture_logs() as logs:
        assert started.start(CONTEXT) is not made_first
    assert (logs, made[0].stops) == ([], 0)


def test_a_name_is_free_when_its_sidecar_has_been_stopped_even_if_that_failed(made: list[Stopping]) -> None:
    started.start(CONTEXT)
    made[0].at_stop = [SidecarError("not committed")]
    with pytest.raises(SidecarError, match="not committed"):
        started.stop()
    started.stop()
    started.stop("of nobody")
    assert made[0].stops == 1
    started.start(CONTEXT)
    assert len(made) == 2


def test_the_end_of_the_interpreter_stops_all_of_them_and_allows_no_more(made: list[Stopping]) -> None:
    for name in ("a", "b", "c"):
        started.start(CONTEXT, name=name)
    made[1].at_stop = [SidecarError("not committed")]
    with structlog.testing.capture_logs() as logs:
        started._stop_all()
    assert [one.stops for one in made] == [1, 1, 1]
    assert [(line["event"], line["name"]) for line in logs] == [("sidecar stopped with an error", "b")]
    assert started._started.entries == {}
    with pytest.raises(SidecarError, match="while the interpreter is ending"):
        started.start(CONTEXT)


def test_after_a_ctrl_c_at_the_end_nothing_is_waited_for_any_more(made: list[Stopping]) -> None:
    for name in ("a", "b"):
        started.start(CONTEXT, name=name)
    made[1].at_stop = [KeyboardInterrupt()]
    started._stop_all()  # the latest one first
    assert [(one.stops, one.hurried, one.is_running) for one in made] == [(1, 1, False), (2, 1, False)]


def test_a_forked_process_has_none_of_its_parents(made: list[Stopping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "_of_the_parent", [])
    started.start(CONTEXT)
    of_the_parent = started._started
    started._begin_in_a_forked_process()
    started._stop_all()
    assert (made[0].stops, made[0].is_running) == (0, True)
    assert started._of_the_parent == [of_the_parent]
