# SPDX-License-Identifier: Apache-2.0

"""``headgate version`` and ``headgate check``: what is installed here, and whether Headgate works with it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.describing import type_name
from spark_bridge.common import command_line, foreign_packages

__all__ = ["JAVA_MAJOR_MIN", "add_commands", "check_packages", "find_java", "java_major"]

JAVA_MAJOR_MIN = 17
JAVA_MAJOR_MAX = {(4, 1): 22}
"""Of releases of Spark that start with no later Java: 23 removed what the Hadoop in them calls (``getSubject``)."""
_INSTALL_JAVA = (
    f"install Java {JAVA_MAJOR_MIN} or later (Debian: apt-get install openjdk-17-jre-headless, macOS: brew install "
    "openjdk@17) and set JAVA_HOME to its folder"
)
_GET_SPARK = (
    "pip install 'headgate[pyspark]' brings Spark, and pip install 'headgate[pyspark-client]' the client of a Spark "
    "Connect server. If a platform brings Spark, run this with the platform's Python, or put SPARK_HOME/python and "
    "SPARK_HOME/python/lib/py4j-*.zip on PYTHONPATH"
)


class CheckFailed(Exception):
    """A check did not pass; the message says why and what to do."""


def add_commands(commands: Any) -> None:
    """Add ``version`` and ``check`` to argparse's subcommands."""
    version = commands.add_parser("version", help="print the versions of Headgate, Python and Spark")
    version.set_defaults(run=run_version)
    check = commands.add_parser(
        "check",
        help="check that Headgate works here: its packages, Spark, Java, the workers' Python, the relay, one task",
        description="Start a local Spark, or connect to a Spark Connect server, load the relay, and let one task ask "
        "its coordinator a question. Takes about ten seconds.",
        epilog="Exit status: 0 everything that was checked works, 1 something does not; the last line says what to do.",
    )
    check.add_argument(
        "--remote",
        metavar="URL",
        type=command_line.server,
        default=os.environ.get("SPARK_REMOTE"),
        help="the Spark Connect server to check, such as sc://HOST:15002; by default that of SPARK_REMOTE, and "
        "otherwise a local Spark. Give a URL with a token in SPARK_REMOTE, where other users do not see it",
    )
    check.set_defaults(run=run_check)


def run_version(_: argparse.Namespace) -> int:
    for name, version in versions():
        _say(f"{name:10}{version}")
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yield what matters here, each with its version."""
    try:
        yield "headgate", metadata.version("headgate")
    except metadata.PackageNotFoundError:  # started from an archive
        yield "headgate", "not installed as a distribution"
    yield "pyspark", _InstalledSpark.look().version or "not installed"
    yield "python", platform.python_version()


def run_check(arguments: argparse.Namespace) -> int:
    """Check one thing after the other, and end with the first that fails."""
    spark, remote = _InstalledSpark.look(), arguments.remote
    trial = _Trial(remote)
    checks: list[tuple[str, Callable[[], str]]] = [("packages", check_packages), ("Spark", spark.check)]
    if not (remote or "").startswith("sc://"):
        checks.append(("Java", lambda: check_java(spark.version)))
    checks.append(("session", trial.start))
    if remote is None:
        checks.append(("workers' Python", trial.check_workers))
    checks.append(("sidecar and task", trial.ask_from_a_task))
    untried = spark.is_client_alone and remote is None
    try:
        for name, check in checks[:2] if untried else checks:
            try:
                _say(f"{name + ':':18}{check()}")
            except CheckFailed as failure:
                _say(f"{name + ':':18}FAILED: {failure}")
                return 1
    finally:
        trial.stop()
    if untried:
        _say("No task was tried: a client starts no Spark. To check a server: headgate check --remote sc://HOST:15002")
    else:
        _say("Headgate works here.")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def check_packages() -> str:
    """Find what another distribution wrote over our packages; one in front of them was refused at import."""
    found = foreign_packages.overwritten()
    if found is not None:
        raise CheckFailed(found)
    return f"ok, in {Path(__file__).resolve().parent.parent.parent}"


class _InstalledSpark:
    """The PySpark that Python finds.

    Attributes:
        version: empty if there is none, or if it cannot be imported.
        is_client_alone: it is the client of Spark Connect, without Java and RDDs.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._problem = ""
        self.version = ""
        self.is_client_alone = False
        if folder is not None:
            try:
                from pyspark.util import is_remote_only

                from spark_bridge.driver.environment import pyspark_version

                self.version, self.is_client_alone = pyspark_version(), is_remote_only()
            except Exception as error:  # Py4J is missing, or files of another release were left in the folder
                self._problem = f"{type_name(error)}: {error}"

    @classmethod
    def look(cls) -> _InstalledSpark:
        spec = find_spec("pyspark")
        # A folder without __init__.py is what an earlier installation left behind.
        return cls(None if spec is None or spec.origin is None else str(Path(spec.origin).parent))

    def check(self) -> str:
        if self._folder is None:
            raise CheckFailed(f"Spark is not installed for this Python, {sys.executable}: {_GET_SPARK}")
        brought_by = foreign_packages.distributions_with("pyspark", str(Path(self._folder).parent))
        if len(brought_by) > 1:
            names = " ".join(one.partition(" ")[0] for one in brought_by)
            raise CheckFailed(
                f"{' and '.join(brought_by)} are installed in the same folder, {self._folder}, and each has "
                f"overwritten files of the other: pip uninstall {names}, then install the one that you use"
            )
        if self._problem:
            raise CheckFailed(f"the pyspark in {self._folder} cannot be imported ({self._problem}): {_GET_SPARK}")
        from spark_bridge.common.errors import SidecarError
        from spark_bridge.driver.environment import check_release

        try:
            check_release("this Python has", self.version, "PySpark")
        except SidecarError as error:
            raise CheckFailed(str(error)) from error
        kind = ", a client of Spark Connect, which needs no Java" if self.is_client_alone else ""
        return f"ok, {self.version}{kind} ({brought_by[0] if brought_by else self._folder})"


def find_java() -> str:
    """The path of the ``java`` that Spark would start: that of ``JAVA_HOME``, else the first on ``PATH``."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not java.is_file():
            raise CheckFailed(f"JAVA_HOME is {home}, which has no bin/java: {_INSTALL_JAVA}")
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise CheckFailed(f"no java on PATH, and JAVA_HOME is not set: {_INSTALL_JAVA}")
    return found


def java_major(banner: str) -> int | None:
    """The major version in what ``java -version`` prints; 8 for the old "1.8.0". None if there is none."""
    found = re.search(r'version "(?:1\.)?(\d+)', banner)
    return int(found.group(1)) if found else None


def check_java(spark_version: str) -> str:
    """Check the Java that would start this release of Spark."""
    from spark_bridge.driver.environment import spark_release

    java = find_java()
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailed(f"{java} does not run ({error}): {_INSTALL_JAVA}") from error
    major = java_major(done.stderr + done.stdout)
    if major is None:
        raise CheckFailed(f"{java} -version does not name a version: {_INSTALL_JAVA}")
    if major < JAVA_MAJOR_MIN:
        raise CheckFailed(f"{java} is Java {major}, which is too old: {_INSTALL_JAVA}")
    if major > JAVA_MAJOR_MAX.get(spark_release(spark_version), major):
        raise CheckFailed(
            f"{java} is Java {major}, which is too new for Spark {spark_version}: set JAVA_HOME to the folder of a "
            "Java 17 or 21, or update Spark to 4.2 or later"
        )
    return f"ok, {major} ({java})"


class _Trial:
    """The checks that need a running Spark: one that is started for them and stopped after them, or a server."""

    def __init__(self, remote: str | None) -> None:
        self._remote = remote
        self._spark: Any = None

    def start(self) -> str:
        from pyspark.sql import SparkSession

        builder: SparkSession.Builder = SparkSession.builder
        if self._remote is None:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.log.level": "OFF"}
            for key, value in settings.items():
                builder = builder.config(key, value)
        try:
            if self._remote is None:
                self._spark = builder.master("local[1]").appName("headgate check").getOrCreate()
            else:
                self._spark = builder.remote(self._remote).getOrCreate()
                # By default, ten minutes pass until it says that there is none.
                self._spark.client.set_retry_policies([])
            version = self._spark.version  # of the server, which is asked here
        except Exception as error:  # Py4J, PySpark and the operating system have their own
            raise CheckFailed(self._why_not_started(error)) from error
        return f"ok, Spark {version} at {self._place}"

    @property
    def _place(self) -> str:
        """Where it runs; what follows the address of a server may be a token."""
        return "local[1]" if self._remote is None else self._remote.partition("/;")[0]

    def _why_not_started(self, error: Exception) -> str:
        if self._remote is None:
            return (
                f"Spark did not start ({type_name(error)}: {error}): run `pyspark --master local[1]` to see its own log"
            )
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

    def check_workers(self) -> str:
        from spark_bridge.common.errors import SidecarError
        from spark_bridge.driver.environment import check_worker_python

        context = self._spark.sparkContext
        try:
            check_worker_python(context)
        except SidecarError as error:
            raise CheckFailed(str(error)) from error
        return f"ok, {sys.version_info.major}.{sys.version_info.minor} ({context.pythonExec})"

    def ask_from_a_task(self) -> str:
        from spark_bridge.bridge.relay import RelayError
        from spark_bridge.common.errors import SidecarError
        from spark_bridge.driver.sidecar import Sidecar

        try:
            with Sidecar(self._spark) as sidecar:
                coordinator, operator = _question_and_answer()
                handle = sidecar.coordinate("headgate-check", coordinator, parallelism=1)
                answered = self._collect(handle.subtask(operator))
                relay = sidecar.relay_kind
        except (SidecarError, RelayError) as error:
            raise CheckFailed(str(error)) from error
        except Exception as error:  # the job's: Spark has a class for each of its sides
            raise CheckFailed(
                f"the request of a task to its coordinator failed ({type_name(error)}: {error})"
            ) from error
        if answered != [0]:
            raise CheckFailed(f"a task sent its coordinator a request for the record 0, and passed on {answered!r}")
        if relay == "py4j":
            return f"ok, but the JVM does not load the relay, so events of Spark go through Py4J ({relay})"
        return "ok, a task sent its coordinator a request and received the answer"

    def _collect(self, task: Any) -> list[int]:
        if self._remote is None:
            answered: list[int] = self._spark.sparkContext.parallelize([0], 1).mapPartitions(task).collect()
            return answered
        return [row.id for row in self._spark.range(0, 1, 1, 1).mapInArrow(task, "id long").collect()]

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()


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
