# SPDX-License-Identifier: Apache-2.0

"""Settings of the whole suite: the order of the tests, and no failures because the machine is slow."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from actors.logs import ROOT
from protocol.barrier_tracker import CheckpointConfig
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport, pytest_runtest_setup
from tests.spark.shared_classes import jvm_options

if TYPE_CHECKING:
    from tests.kafka_brokers import KafkaBrokers
    from tests.postgres import PgBouncer, Postgres
    from tests.redis_server import RedisServer
    from tests.spark_bridge.object_stores import ObjectStore

# pytest finds hooks by their names in this module.
__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport", "pytest_runtest_setup"]

# The duration of an example depends on the machine, not on the code. pytest's own timeout bounds a hang.
settings.register_profile("headgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headgate")

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that. Then
# Ctrl-C, which some tests send, would do nothing. A Python handler becomes the default again in a new process.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test's JVM lives for seconds. Its second compiler and its parallel collector would only take the cores from the
# tests, and so would loading Spark's classes again. Programs that a test starts inherit this.
SHORT_LIVED_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto{jvm_options()}"
os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED_JVM)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", SHORT_LIVED_JVM)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--events",
        choices=["hold", "record"],
        default="hold",
        help="what checkpoints do with events, where a test does not say so itself (default: hold)",
    )


@pytest.fixture(autouse=True)
def _assertions_in_operators() -> Iterator[None]:
    """Fail a test if an assertion fails in an operator of the test kit, where it only fails a task.

    It does not use the fixture ``monkeypatch``: what a test patches is undone before the end of other fixtures.
    """
    module = sys.modules.get("headgate.testing._operator_task")
    if module is None:
        yield
        return
    found: list[BaseException] = []
    run = module.OperatorTask._run_operator

    def noted(task: Any) -> None:
        try:
            run(task)
        except (AssertionError, pytest.fail.Exception) as error:
            found.append(error)
            raise

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(module.OperatorTask, "_run_operator", noted)
        yield
    for error in found:
        raise error


class ImmediateFailures:
    """Writes each failure as soon as it happens: a run that is ended from outside never gets to its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_sep("-", f"{report.when} of {report.nodeid} failed")
            report.toterminal(self._terminal._tw)


@pytest.hookimpl(trylast=True)  # when there is a terminal
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and os.environ.get("CI"):
        config.pluginmanager.register(ImmediateFailures(terminal), "immediate failures")
    if config.getoption("events") == "record":
        CheckpointConfig.__init__ = partialmethod(_recording, CheckpointConfig.__init__)  # type: ignore[assignment]


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """End the process if the teardown of a test that has failed hangs.

    pytest and pytest-timeout stop their clocks at a failure, because somebody may look at it with a debugger.
    """
    if not node.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(float(node.config.getini("timeout")), exit=True, file=2)


def _recording(config: CheckpointConfig, init: Callable[..., None], *args: Any, **settings: Any) -> None:
    init(config, *args, **{"hold_events": False, **settings})


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server on loopback, with prepared transactions."""
    from tests.postgres import Postgres

    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def pooler(postgres: Postgres) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode in front of it."""
    from tests.postgres import PgBouncer

    in_front = PgBouncer(postgres)
    yield in_front
    in_front.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis server on loopback, which keeps what it has confirmed."""
    from tests.redis_server import RedisServer

    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaBrokers]:
    """Three brokers on loopback that speak Kafka's protocol."""
    from tests.kafka_brokers import KafkaBrokers

    brokers = KafkaBrokers()
    yield brokers
    brokers.close()


@pytest.fixture(scope="session")
def object_stores() -> Iterator[Callable[[str], ObjectStore]]:
    """Start the object store of that name, once."""
    from tests.spark_bridge.object_stores import STORES

    started: dict[str, ObjectStore] = {}
    with ExitStack() as running:

        def start(name: str) -> ObjectStore:
            if name not in started:
                started[name] = running.enter_context(STORES[name]())
            return started[name]

        yield start


@pytest.fixture(scope="session")
def s3(object_stores: Callable[[str], ObjectStore]) -> dict[str, Any]:
    """The options of a filesystem on an object store that speaks S3."""
    return object_stores("s3").options


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    from tests.release.__main__ import run

    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder])
    (built,) = folder.glob("headgate-*.whl")
    return built


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """``capture_logs`` leaves structlog configured, and the log would go to standard output from then on.

    The command of the fuzzers leaves a level behind, and a later test would find no lines of the log.
    """
    configured, logger = structlog.is_configured(), logging.getLogger(ROOT)
    level = logger.level
    yield
    logger.setLevel(level)
    if not configured:
        structlog.reset_defaults()


def pytest_collection_finish() -> None:
    """Take everything that the collection has made out of the garbage collector's sight.

    Many tests collect garbage to see that nothing is left. Among the objects of all test modules, that takes half a
    second each time.
    """
    gc.collect()
    gc.freeze()


LONGEST = (
    "benchmarks/test_benchmarks_run.py",
    "spark/matrix/test_matrix.py",
    "test_pages.py",
    "fuzz/test_vanishing_drivers.py",
    "examples/test_small_examples.py",
    "spark_bridge/test_interrupted_calls.py",
    "examples/test_pipelines.py",
    "spark/connect/test_connect_conformance.py",
    "sources/test_conformance.py",
    "spark/connect/test_connect_lifetimes.py",
    "spark/test_streams.py",
    "spark/connect/test_connect_installed.py",
    "spark/test_started_exits.py",
    "days/test_days.py",
)
"""The files of the long tests that take minutes, the longest first, with which ``make test-long`` begins.

A file is tested by one process. Of a file that came late, only this process would be left at the end.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the pure tests first: they find failures within seconds, while a real Spark takes minutes."""
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in first), "a file of LONGEST has another name now"

    def place(item: pytest.Item) -> tuple[int, bool]:
        if item.path in first and item.get_closest_marker("long") is not None:
            return first[item.path], False
        return len(first), item.get_closest_marker("spark") is not None

    items.sort(key=place)
