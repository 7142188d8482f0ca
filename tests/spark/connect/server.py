# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect server in another process, whose Python has neither Headgate nor msgpack."""

from __future__ import annotations

import io
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from spark_bridge import command
from tests.conftest import SHORT_LIVED_JVM
from tests.spark.cluster import SparkProcess

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
SPARK_HOME = Path(pyspark.__file__).parent
START_SCRIPT = SPARK_HOME / "sbin" / "start-connect-server.sh"  # PySpark's package has it since 4.3
STARTED_BY = (
    (str(START_SCRIPT), "--wait")
    if START_SCRIPT.exists()
    else (str(SPARK_HOME / "bin" / "spark-submit"), "--class", SERVER)
)
# What Spark's own worker imports, and what it needs in turn.
WORKER_PACKAGES = (
    "pyspark",
    "py4j",
    "pandas",
    "pyarrow",
    "numpy",
    "numpy.libs",
    "pytz",
    "dateutil",
    "six.py",
    "tzdata",
)
# What the tasks of sinks import; those of tables need PyArrow only.
SINK_PACKAGES = ("psycopg", "psycopg_binary", "psycopg_binary.libs")
# `foreachBatch` over Connect runs a separate client on the server.
CLIENT_PACKAGES = ("grpc", "grpc_status", "google", "zstandard", "typing_extensions.py")


def page(url: str) -> str:
    """The text at a URL; its bytes as they are, one character each."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode("latin-1"))


def bare_python(folder: Path, base: Path) -> Path:
    """Make an environment of ``base`` with PySpark and what that needs, and return its interpreter."""
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    here = next(Path(path) for path in site.getsitepackages() if Path(path, "pyspark").is_dir())
    [there] = folder.glob("lib/python3.*/site-packages")
    for name in (*WORKER_PACKAGES, *CLIENT_PACKAGES, *SINK_PACKAGES):
        if (here / name).exists():
            (there / name).symlink_to(here / name)
    return folder / "bin" / "python"


def with_relay(folder: Path, *clients: str) -> tuple[str, ...]:
    """Install the relay in ``folder``, with a secret for each client there; the options of the start that it prints."""
    said = io.StringIO()
    for client in clients:
        said = io.StringIO()
        with redirect_stdout(said):  # in this process, so that a mutant of the relay's source is in the jar
            assert command.main(["connect-server", str(folder), "--new-client", str(folder / client)]) == 0
    program, *words = said.getvalue().replace("\\\n", " ").split()
    assert program == "sbin/start-connect-server.sh"
    return tuple(words)


@dataclass
class ConnectServer:
    """``start`` it, make ``session``s, ``stop`` it.

    ``settings`` are those of Spark, and ``events`` is the folder of its event log. With ``options``, Spark's own script
    starts it, with these.
    """

    master: str = "local[2,4]"
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    events: Path | None = None
    options: tuple[str, ...] = ()
    _sessions: list[Any] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Returns when clients can connect."""
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-connect-"))
        self.python = bare_python(self.folder / "python", Path(sys.executable))
        try:
            self.launch()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start its process, perhaps again, on the same port as before."""
        settings = {
            "spark.master": self.master,
            "spark.app.name": "headgate-connect-tests",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.executor.extraJavaOptions": SHORT_LIVED_JVM,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            **self.settings,
        }
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")},
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": str(self.python),
            "PYSPARK_DRIVER_PYTHON": str(self.python),
            **self.environment,
        }
        if self.options:
            pairs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
            environment["SPARK_LOG_DIR"] = environment["SPARK_PID_DIR"] = str(self.folder)
            self.process = SparkProcess([*pairs, *self.options], environment, self.folder, script=STARTED_BY)
        else:
            options = [f"-D{name}={value}" for name, value in settings.items()]
            self.process = SparkProcess([*options, SERVER], environment, self.folder)
        started = self.process.wait_for(r"Spark Connect server started at: \S+:(\d+)")
        self.port = int(started.group(1))

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return "\n".join(self.process.lines)

    @property
    def ui(self) -> str:
        """The address of its UI."""
        port = self.process.wait_for(r"'SparkUI' on port (\d+)").group(1)
        return f"http://127.0.0.1:{port}"

    def threads(self) -> list[str]:
        """The names of the threads in its JVM, from Spark's REST interface."""
        return [thread["threadName"] for thread in self.rest("executors/driver/threads")]

    def rest(self, path: str) -> Any:
        """What its REST interface says about its application."""
        [application] = json.loads(page(f"{self.ui}/api/v1/applications"))
        return json.loads(page(f"{self.ui}/api/v1/applications/{application['id']}/{path}"))

    def session(self) -> Any:
        """Make a new session of a new client, the active one: an earlier one's server may be gone."""
        from pyspark.sql.connect.session import SparkSession as Remote

        Remote._default_session = Remote._active_session.session = None
        session = SparkSession.Builder().remote(self.url).create()
        self._sessions.append(session)
        return session

    def kill(self) -> None:
        """Kill its process and all that it has started."""
        self.process.kill()

    def stop(self) -> None:
        """Kill it, and remove what it has written. Idempotent.

        Its clients are closed without a word to it. A test that failed leaves one open, which would call the server,
        without success, for ten minutes when this process ends.
        """
        for session in self._sessions:
            session.client.close()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
