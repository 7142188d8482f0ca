# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate version`` and ``check``: what is installed here, and whether Headgate works with it."""

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
from pathlib import Path
from typing import Any

from protocol.describing import type_name
from spark_bridge.common import foreign_packages

__all__ = ["JAVA_MAJOR_MIN", "add_commands", "check_packages", "find_java", "java_major"]

JAVA_MAJOR_MIN = 17
_INSTALL_JAVA = (
    f"install Java {JAVA_MAJOR_MIN} or later (Debian: apt-get install openjdk-17-jre-headless, macOS: brew install "
    "openjdk@17) and set JAVA_HOME to its folder"
)


class CheckFailed(Exception):
    """A check did not pass; the message says why and what to do."""


def add_commands(commands: Any) -> None:
    """Add ``version`` and ``check`` to argparse's subcommands."""
    version = commands.add_parser("version", help="print the versions of Headgate, Python and Spark")
    version.set_defaults(run=run_version)
    check = commands.add_parser(
        "check",
        help="check that Headgate works here: its packages, Java, the workers' Python, the relay, one task",
        description="Start a local Spark, load the relay, and let one task ask its coordinator a question. Takes "
        "about ten seconds.",
        epilog="Exit status: 0 everything works, 1 something does not; the last line says what to do.",
    )
    check.set_defaults(run=run_check)


def run_version(_: argparse.Namespace) -> int:
    for name, version in versions():
        _say(f"{name:10}{version}")
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """The distributions that matter, each with its version."""
    for name in ("headgate", "pyspark"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:  # started from an archive, or Spark's own Python folder
            yield name, "not installed as a distribution"
    yield "python", platform.python_version()


def run_check(_: argparse.Namespace) -> int:
    """Check one thing after the other, and end with the first that fails."""
    with_spark = _WithSpark()
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("packages", check_packages),
        ("Java", check_java),
        ("Spark", with_spark.start),
        ("workers' Python", with_spark.check_workers),
        ("sidecar and task", with_spark.ask_from_a_task),
    )
    try:
        for name, check in checks:
            try:
                _say(f"{name + ':':18}{check()}")
            except CheckFailed as failure:
                _say(f"{name + ':':18}FAILED: {failure}")
                return 1
    finally:
        with_spark.stop()
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


def check_java() -> str:
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
    return f"ok, {major} ({java})"


class _WithSpark:
    """The checks that need a Spark, which is started for them and stopped after them."""

    def __init__(self) -> None:
        self._spark: Any = None

    def start(self) -> str:
        try:
            import pyspark
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise CheckFailed(f"{error}: pip install pyspark") from error
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.log.level": "OFF"}
        builder: SparkSession.Builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        try:
            self._spark = builder.master("local[1]").appName("headgate check").getOrCreate()
        except Exception as error:  # Py4J, PySpark and the operating system have their own
            raise CheckFailed(
                f"Spark did not start ({type_name(error)}: {error}): run `pyspark --master local[1]` to see its own log"
            ) from error
        return f"ok, {pyspark.__version__}"

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
                answers = self._spark.sparkContext.parallelize([0], 1).mapPartitions(handle.subtask(operator)).collect()
                relay = sidecar.relay_kind
        except (SidecarError, RelayError) as error:
            raise CheckFailed(str(error)) from error
        except Exception as error:  # the job's: Spark has a class for each of its sides
            raise CheckFailed(
                f"the request of a task to its coordinator failed ({type_name(error)}: {error})"
            ) from error
        if answers != ["answer"]:
            raise CheckFailed(f"a task sent its coordinator a request and received {answers!r}")
        if relay != "jvm":
            return f"ok, but the JVM does not load the relay, so events of Spark go through Py4J ({relay})"
        return "ok, a task sent its coordinator a request and received the answer"

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()


def _question_and_answer() -> tuple[Any, Any]:
    from actors.coordination import OperatorCoordinator
    from spark_bridge.subtask import SubtaskContext, SubtaskOperator

    class Answers(OperatorCoordinator):
        async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
            return "answer"

    class Asks(SubtaskOperator):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            self.context = context

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield self.context.request("question")

    return Answers, Asks
