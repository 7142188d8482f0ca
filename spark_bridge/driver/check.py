# SPDX-License-Identifier: Apache-2.0

"""``headgate check`` and ``headgate.check``: whether Headgate works where Spark runs, and what to do if not."""

from __future__ import annotations

import argparse
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar

from protocol.arguments import checked
from protocol.describing import describe, text_of, type_name
from protocol.errors import HeadgateError
from spark_bridge.common import command_line
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.environment import (
    SPARK,
    check_worker_python,
    driver_context,
    executor_ids,
    is_local,
    is_remote,
    why_no_subtask,
)
from spark_bridge.driver.installation import CheckFailed, InstalledSpark, check_java, check_packages, place
from spark_bridge.task_entry import LOOK_SCHEMA, ExecutorLook, Looked

__all__ = ["add_command", "check"]

T = TypeVar("T")
Step = tuple[str, Callable[[], str]]

TIMEOUT_S: Final = 120.0
PROGRESS_S: Final = 10.0
CANCEL_S: Final = 10.0
LOOKS_MAX: Final = 3
TASKS_OF_A_SERVER: Final = 16
"""A server does not say how many executors it has."""
_PROPERTY = "java_method('java.lang.System', 'getProperty', '{}')"
_OF_THE_JVM = (
    f"regexp_extract({_PROPERTY.format('sun.java.command')}, '--executor-id ([^ ]+)', 1) AS executor",
    f"regexp_extract({_PROPERTY.format('sun.java.command')}, '--hostname ([^ ]+)', 1) AS host",
    f"{_PROPERTY.format('java.version')} AS java",
)
"""What an executor's JVM knows. Spark evaluates it in the task, because a Java method may return anything."""


def add_command(commands: Any) -> None:
    """Add ``check`` to argparse's subcommands."""
    made = commands.add_parser(
        "check",
        help="check that Headgate works here: its packages, Spark, Java, the workers' Python, the relay, each executor",
        description="Start Spark, or connect to a Spark Connect server, load the relay, look from each executor "
        "whether it reaches the sidecar, and let tasks ask their coordinator a question. Takes about ten seconds with "
        "a local Spark. In a notebook or a job that has a session: headgate.check(spark).",
        epilog="Exit status: 0 everything that was checked works, 1 something does not; the last line says what to do.",
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "--remote",
        metavar="URL",
        type=command_line.server,
        default=os.environ.get("SPARK_REMOTE"),
        help="the Spark Connect server to check, such as sc://HOST:15002; by default that of SPARK_REMOTE, and "
        "otherwise a local Spark. Give a URL with a token in SPARK_REMOTE, where other users do not see it",
    )
    where.add_argument(
        "--master",
        metavar="URL",
        type=command_line.text,
        help="start Spark on this cluster, such as spark://HOST:7077, yarn or k8s://https://HOST:443, with the "
        "settings that spark-submit has: those of spark-defaults.conf and of PYSPARK_SUBMIT_ARGS",
    )
    made.add_argument(
        "--conf",
        metavar="NAME=VALUE",
        type=command_line.setting,
        action="append",
        default=[],
        help="a setting of the Spark that is started, such as spark.driver.host=HOST; may be given several times",
    )
    made.add_argument(
        "--port",
        type=command_line.port,
        default=0,
        help="the port on which the sidecar listens here, such as one that a firewall lets pass; by default a free one",
    )
    made.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=command_line.seconds,
        default=TIMEOUT_S,
        help=f"how long Spark may take to start, and how long tasks may take, {TIMEOUT_S:g} by default",
    )
    made.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Check one thing after the other, and end with the first that fails."""
    installed, master = InstalledSpark.look(), arguments.master
    remote = None if master else arguments.remote
    steps: list[Step] = [*_installed(installed)]
    untried = installed.is_client_alone and remote is None
    if untried and not master:
        if not _all(steps):
            return 1
        _say("No task was tried: a client starts no Spark. To check a server: headgate check --remote sc://HOST:15002")
        return 0
    if not (remote or "").startswith("sc://"):
        steps.append(("Java", partial(check_java, installed.version)))
    start = _Start(remote, master, dict(one.split("=", 1) for one in arguments.conf), arguments.timeout)
    try:
        if not _all([*steps, ("session", start.start)]):
            return 1
        return 0 if _session_works(start.spark, SidecarConfig(port=arguments.port), arguments.timeout) else 1
    finally:
        start.stop()


@checked(spark=SPARK)
def check(spark: Any, config: SidecarConfig | None = None, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Check that Headgate works with this session: print what was found, and return whether all of it works.

    It does what the command ``headgate check`` does, in a notebook or in a job that has a session already: it looks
    from each executor whether it reaches the sidecar, and lets tasks ask their coordinator a question. If something
    does not work, the last line says what to do. It starts a sidecar with ``config``, and stops it at the end; the
    session stays. ``spark`` and ``config`` are as for ``Sidecar``; ``config`` names the port that a firewall lets pass.

    Each of its jobs may take ``timeout_s`` seconds; then it is cancelled, and the check has failed. A line every
    ten seconds says what it waits for. Raises ``TypeError`` for something that is neither a session nor a context.
    """
    steps: list[Step] = [*_installed(InstalledSpark.look()), ("session", partial(_shown_session, spark))]
    return _all(steps) and _session_works(spark, config or SidecarConfig(), timeout_s)


def _say(line: str) -> None:
    command_line.tell(sys.stdout, line)
    sys.stdout.flush()


def _all(steps: list[Step]) -> bool:
    """Print what each of them finds, up to the first that fails."""
    for name, step in steps:
        try:
            _say(f"{name + ':':18}{step()}")
        except CheckFailed as failure:
            _say(f"{name + ':':18}FAILED: {failure}")
            return False
    return True


def _installed(spark: InstalledSpark) -> Iterator[Step]:
    yield "place", lambda: f"{place()}; {socket.gethostname()}, Python {platform.python_version()} ({sys.executable})"
    yield "packages", check_packages
    yield "Spark", spark.check


def _shown_session(spark: Any) -> str:
    session = _as_session(spark)
    try:
        where = session.client.host if is_remote(session) else session.sparkContext.master
        version = session.version  # of the server, which is asked here
    except Exception as error:  # Py4J and PySpark have their own
        raise CheckFailed(f"the session does not answer ({describe(error)}): make a new one") from error
    return f"ok, Spark {version} at {where}{_java_of_driver(session)}"


def _as_session(spark: Any) -> Any:
    """The session of a context."""
    if is_remote(spark) or hasattr(spark, "sparkContext"):
        return spark
    from pyspark.sql import SparkSession

    return SparkSession(spark)


def _java_of_driver(session: Any) -> str:
    """Spark evaluates a local relation on the driver. Nothing, if it does not say."""
    try:
        [[java]] = session.sql(f"SELECT {_PROPERTY.format('java.version')} FROM VALUES (0)").collect()
    except Exception:  # a platform may allow no Java methods
        return ""
    return f", Java {java}"


def _session_works(spark: Any, config: SidecarConfig, timeout_s: float) -> bool:
    trial = _Trial(_as_session(spark), config, timeout_s)
    steps: list[Step] = [("sidecar", trial.enter), ("executors", trial.look), ("sidecar and task", trial.ask)]
    if not is_remote(spark) and is_local(driver_context(spark)):
        steps.insert(0, ("workers' Python", trial.check_workers))
    try:
        works = _all(steps)
    finally:
        trial.leave()
    if works:
        _say("Headgate works here.")
    return works


def _within(
    timeout_s: float, what: str, late: str, call: Callable[[], T], cancel: Callable[[], object] | None = None
) -> T:
    """Call in a thread, and say every few seconds that it still runs. ``cancel`` ends it, whatever ends the wait.

    Raises ``CheckFailed``, with ``late``, if it takes too long.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="headgate-check", daemon=True).start()
    began = time.monotonic()
    try:
        while not wait([done], min(PROGRESS_S, max(0.0, began + timeout_s - time.monotonic()))).done:
            waited = time.monotonic() - began
            if waited >= timeout_s:
                raise CheckFailed(f"{what} took longer than {timeout_s:g} s, and was given up: {late}")
            _say(f"{'':18}{what}, for {waited:.0f} s so far")
        return done.result()
    finally:
        if cancel is not None and not done.done():
            cancel()
            wait([done], CANCEL_S)


class _Start:
    """A Spark that is started for the checks and stopped after them, or a session of a server."""

    def __init__(self, remote: str | None, master: str | None, settings: dict[str, str], timeout_s: float) -> None:
        self._remote = remote
        self._master = master or "local[1]"
        self._is_cluster = master is not None
        self._settings = settings
        self._timeout_s = timeout_s
        self.spark: Any = None

    def start(self) -> str:
        if self._is_cluster and InstalledSpark.look().is_client_alone:
            raise CheckFailed(
                "pyspark-client starts no Spark: install pyspark instead, or check a server of Spark Connect with "
                "--remote sc://HOST:15002"
            )
        try:
            _within(
                self._timeout_s,
                f"starting at {self._place}",
                "find out whether the cluster is there and has free resources, in its own UI and logs",
                self._make,  # what it has started ends with this process
            )
            version = self.spark.version  # of the server, which is asked here
        except CheckFailed:
            raise
        except Exception as error:  # Py4J, PySpark and the operating system have their own
            raise CheckFailed(self._why_not_started(error)) from error
        return f"ok, Spark {version} at {self._place}{_java_of_driver(self.spark)}"

    def _make(self) -> None:
        from pyspark.sql import SparkSession

        builder: SparkSession.Builder = SparkSession.builder
        if self._remote is not None:
            self.spark = builder.remote(self._remote).getOrCreate()
            # By default, ten minutes pass until it says that there is none.
            self.spark.client.set_retry_policies([])
            return
        settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
        if self._is_cluster:
            os.environ.pop("SPARK_REMOTE", None)  # PySpark accepts one of the two
        else:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings["spark.driver.host"] = "127.0.0.1"
        for key, value in (settings | self._settings).items():
            builder = builder.config(key, value)
        self.spark = builder.master(self._master).appName("headgate check").getOrCreate()

    @property
    def _place(self) -> str:
        """Where it runs; what follows the address of a server may be a token."""
        return self._master if self._remote is None else self._remote.partition("/;")[0]

    def _why_not_started(self, error: Exception) -> str:
        if self._remote is None:
            return f"Spark did not start ({describe(error)}): run `pyspark --master {self._master}` to see its own log"
        if isinstance(error, ImportError):  # PySpark names one of the packages that it needs, with its version
            return f"{error}: pip install 'headgate[connect]'"
        said = type_name(error)
        if self._place == self._remote:  # otherwise the text may repeat a token
            found = re.search(r'details = "(.+)"', str(error))  # gRPC says it in one of several lines
            said = found[1] if found else f"{said}: {error}"
        return (
            f"no session of the Spark Connect server {self._place} ({said}): check that it runs, "
            "that its address is sc://HOST:PORT, and that this machine may connect to it"
        )

    def stop(self) -> None:
        if self.spark is not None:
            self.spark.stop()


class _Trial:
    """The checks that need a session: a sidecar, a task on each executor, and tasks that ask."""

    def __init__(self, session: Any, config: SidecarConfig, timeout_s: float) -> None:
        self._session = session
        self._config = config
        self._timeout_s = timeout_s
        self._is_remote = is_remote(session)
        self._sidecar: Any = None
        self._task: Any = None
        self._tasks = 1

    def check_workers(self) -> str:
        context = self._session.sparkContext
        try:
            check_worker_python(context)
        except SidecarError as error:
            raise CheckFailed(str(error)) from error
        return f"ok, {sys.version_info.major}.{sys.version_info.minor} ({context.pythonExec})"

    def enter(self) -> str:
        """Start the sidecar; with it, the JVM of the driver connects to it, and, with Connect, one executor."""
        from spark_bridge.driver.sidecar import Sidecar

        try:
            self._sidecar = Sidecar(self._session, self._config).__enter__()
            self._prepare()
        except HeadgateError as error:
            raise CheckFailed(str(error)) from error
        ours = ", and the JVM does not load the relay, so events of Spark go through Py4J"
        host, port = self._address
        return f"ok, tasks connect to {host}:{port}{ours if self._sidecar.relay_kind == 'py4j' else ''}"

    def _prepare(self) -> None:
        """Tell how many tasks there will be: enough for one on each executor."""
        if self._is_remote:
            self._tasks = TASKS_OF_A_SERVER
        elif executors := executor_ids(self._session.sparkContext):
            self._tasks = 1 if executors == {"driver"} else 2 * len(executors)
        else:
            self._tasks = 2
        coordinator, operator = _question_and_answer()
        handle = self._sidecar.coordinate("headgate-check", coordinator, parallelism=self._tasks)
        self._task = handle.subtask(operator)

    @property
    def _address(self) -> tuple[str, int]:
        return self._task.endpoint.host, self._task.endpoint.port

    def look(self) -> str:
        """Have tasks look around on each executor, again while executors come that none of them has seen."""
        seen: dict[str, Looked] = {}
        unseen: set[str] = set()
        for _ in range(LOOKS_MAX):
            for one in self._looked():
                seen[f"executor {one.executor or 'driver'} at {one.host}"] = one
            there = set() if self._is_remote else executor_ids(self._session.sparkContext)
            unseen = there - {one.executor or "driver" for one in seen.values()}
            if not unseen:
                break
        host, port = self._address
        for name, one in sorted(seen.items()):
            java = f", Java {one.java}" if one.java else ""
            reaches = f"does not reach {host}:{port} ({one.problem})" if one.problem else f"reaches {host}:{port}"
            _say(f"{'':18}{name}: Python {one.python}{java}, {reaches}")
        for executor in sorted(unseen):
            _say(f"{'':18}executor {executor}: not checked, because no task was run there")
        apart = [one for one in seen.values() if one.problem]
        if apart:
            raise CheckFailed(
                f"{len(apart)} of {len(seen)} executors cannot reach the sidecar at {host}:{port}: "
                + why_apart({one.error for one in apart}, host, port, self._is_remote)
            )
        return f"ok, {len(seen)} of {len(seen)} reach the sidecar"

    def _looked(self) -> list[Looked]:
        look = ExecutorLook(*self._address)

        def collect() -> list[Looked]:
            frame = self._session.range(0, self._tasks, 1, self._tasks)
            try:
                asked = frame.selectExpr(*_OF_THE_JVM)
                asked.schema  # noqa: B018 - a platform may allow no Java methods; that is known here
            except Exception:
                asked = frame
            if self._is_remote:
                return [Looked(*row) for row in asked.mapInArrow(look, LOOK_SCHEMA).collect()]
            return list(asked.rdd.mapPartitions(look).collect())

        try:
            return self._as_job(collect)
        except CheckFailed:
            raise
        except Exception as error:  # the job's: Spark has a class for each of its sides
            raise CheckFailed(why_no_subtask(text_of(error), of_server=self._is_remote)) from error

    def ask(self) -> str:
        expected = list(range(self._tasks))

        def collect() -> list[int]:
            if self._is_remote:
                frame = self._session.range(0, self._tasks, 1, self._tasks).mapInArrow(self._task, "id long")
                return sorted(row.id for row in frame.collect())
            numbers = self._session.sparkContext.parallelize(expected, self._tasks)
            return list(numbers.mapPartitions(self._task).collect())

        try:
            answered = self._as_job(collect)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"the request of a task to its coordinator failed ({describe(error)})") from error
        if answered != expected:
            raise CheckFailed(f"tasks sent their coordinator requests for {expected}, and passed on {answered!r}")
        return "ok, a task sent its coordinator a request and received the answer"

    def _as_job(self, collect: Callable[[], T]) -> T:
        """Run the job in another thread, from which it can be cancelled."""
        tag = f"headgate.check.{secrets.token_hex(6)}"
        tagged: Any = self._session if self._is_remote else self._session.sparkContext

        def run() -> T:
            (tagged.addTag if self._is_remote else tagged.addJobTag)(tag)
            return collect()

        cancel = partial(tagged.interruptTag if self._is_remote else tagged.cancelJobsWithTag, tag)
        late = (
            "find out whether the cluster has free slots for this application, and whether its executors reach the "
            f"driver{self._of_spark()}: without that, Spark starts none"
        )
        return _within(self._timeout_s, "waiting for tasks", late, run, cancel)

    def _of_spark(self) -> str:
        """Where Spark's own executors register."""
        if self._is_remote:
            return ""
        conf = self._session.sparkContext.getConf()
        return f" at {conf.get('spark.driver.host')}:{conf.get('spark.driver.port')}"

    def leave(self) -> None:
        if self._sidecar is not None:
            self._sidecar.stop()


def why_apart(errors: set[str], host: str, port: int, is_remote: bool) -> str:
    """What to do about executors whose connections to the sidecar failed with these errors."""
    another = "SidecarConfig(addresses=Addresses(advertised_host=...))"
    if is_remote:
        at = f"Open TCP port {port} of this machine to the server's executors"
    else:
        at = f"Open TCP port {port} of the driver to the executors"
        another = f"spark.driver.host, or {another}"
    fixed = "with --port or SidecarConfig(port=...), so that it is the same each time"
    if errors == {"gaierror"}:
        return f"{host!r} is a name that they do not know: set {another}, to an address that they reach"
    if errors == {"ConnectionRefusedError"}:
        why = "something refuses the connection, a firewall or another machine that has this address"
    else:
        why = "a firewall or a network policy drops what they send, or the address is not one of their network"
    return f"{why}. {at}, and fix it {fixed}; if the address is wrong for them, set {another}"


def _question_and_answer() -> tuple[Any, Any]:
    """Return a coordinator, and an operator that passes on each record (or batch) for which it gets an answer."""
    from actors.coordination import OperatorCoordinator
    from spark_bridge.subtask import SubtaskContext, SubtaskOperator

    class Answers(OperatorCoordinator):
        async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
            return "answer"

    class Asks(SubtaskOperator):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            self.context = context

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield from (record for record in records if self.context.request("question") == "answer")

    return Answers, Asks
