# SPDX-License-Identifier: Apache-2.0

"""What is installed here, which ``headgate version`` prints, and whether Headgate works with it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.describing import type_name
from spark_bridge.common import foreign_packages

__all__ = [
    "JAVA_MAJOR_MIN",
    "CheckFailed",
    "InstalledSpark",
    "add_command",
    "check_java",
    "check_packages",
    "find_java",
    "java_major",
    "place",
]

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


_EMR_NODE = Path("/mnt/var/lib/info/job-flow.json")
_PLACES = {
    "DATABRICKS_RUNTIME_VERSION": "Databricks",
    "GLUE_VERSION": "AWS Glue",
    "SERVERLESS_EMR_JOB_ID": "Amazon EMR, on EKS or Serverless",
    "DATAPROC_IMAGE_VERSION": "Google Dataproc",
    "DATAPROC_WORKLOAD_TYPE": "Google Dataproc, serverless",
    "KUBERNETES_SERVICE_HOST": "a pod of Kubernetes",
}
"""Platforms by a variable that their processes have. A platform comes before what it may run on."""


class CheckFailed(Exception):
    """A check did not pass; the message says why and what to do."""


def add_command(commands: Any) -> None:
    """Add ``version`` to argparse's subcommands."""
    version = commands.add_parser("version", help="print the versions of Headgate, Python and Spark")
    version.set_defaults(run=run_version)


def run_version(_: argparse.Namespace) -> int:
    for name, version in versions():
        sys.stdout.write(f"{name:10}{version}\n")
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yield what matters here, each with its version."""
    try:
        yield "headgate", metadata.version("headgate")
    except metadata.PackageNotFoundError:  # started from an archive
        yield "headgate", "not installed as a distribution"
    yield "pyspark", InstalledSpark.look().version or "not installed"
    yield "python", platform.python_version()


def place(environment: Mapping[str, str] = os.environ, emr_node: Path = _EMR_NODE) -> str:
    """Where this process runs, as far as its environment says."""
    if environment.get("AZURE_SERVICE") == "Microsoft.ProjectArcadia":
        return "Microsoft Fabric or Synapse"
    found = next((name for variable, name in _PLACES.items() if environment.get(variable)), None)
    if found is not None:
        return found
    if emr_node.exists():
        return "Amazon EMR, on EC2"
    if environment.get("CONTAINER_ID", "").startswith("container_"):
        return "a container of YARN"
    return "no platform that is known"


def check_packages() -> str:
    """Find what another distribution wrote over our packages; one in front of them was refused at import."""
    found = foreign_packages.overwritten()
    if found is not None:
        raise CheckFailed(found)
    return f"ok, in {Path(__file__).resolve().parent.parent.parent}"


class InstalledSpark:
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
    def look(cls) -> InstalledSpark:
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
