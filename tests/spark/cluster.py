# SPDX-License-Identifier: Apache-2.0

"""A standalone Spark cluster of real processes on loopback: one master, and workers that act as separate hosts.

Each worker has its own address (127.0.0.2, 127.0.0.3, ...). Spark sees each address as a host, so it places
speculative copies and excludes hosts as it does in production. Everything runs from Spark's own classes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from tests.conftest import SHORT_LIVED_JVM

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 300.0
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


class SparkProcess:
    """A JVM that runs one of Spark's main classes, with its output so far. Thread-safe.

    ``inside``: the command that starts it in a separate network, if it needs one. ``script``: one of Spark's own
    scripts that starts it, instead of its main class.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        folder: Path,
        inside: tuple[str, ...] = (),
        script: tuple[str, ...] = (),
    ) -> None:
        java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
        self.lines: list[str] = []
        self._changed = threading.Condition()
        jvm = (java, "-Xmx512m", *SHORT_LIVED_JVM.split(), *_module_options(), "-cp", _class_path())
        self._process = subprocess.Popen(
            [*inside, *(script or jvm), *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"reads {arguments[0].rpartition('.')[2]}")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append("(the end)")
            self._changed.notify_all()

    def wait_for(self, pattern: str, since: int = 0, timeout_s: float = START_S) -> re.Match[str]:
        """Return the first matching line from line ``since`` on; wait for it if it has not been printed yet."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(match for line in self.lines[since:] if (match := re.search(pattern, line)))
            return bool(found) or self.lines[-1:] == ["(the end)"]

        with self._changed:
            self._changed.wait_for(look, timeout_s)
        if not found:
            raise AssertionError(f"not said: {pattern!r}, but:\n" + "\n".join(self.lines[-40:]))
        return found[0]

    def kill(self) -> None:
        """Send SIGKILL to it and to all that it has started, as if the machine were lost. Idempotent."""
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            _signal(pid, signal.SIGSTOP)  # so that a worker does not report or replace an executor that dies before it
        for pid in [*descendants(self._process.pid), self._process.pid]:
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class StandaloneCluster:
    """``start`` it, give ``master_url`` to a session, ``stop`` it. ``environment`` is added to that of its processes.

    ``inside``: for a host with a separate network, the command that starts a process in that network.
    """

    hosts: tuple[str, ...] = ("127.0.0.2", "127.0.0.3")
    master_host: str = "127.0.0.1"
    inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cores: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    master_url: str = ""
    workers: dict[str, SparkProcess] = field(default_factory=dict)

    def start(self) -> None:
        """Returns when every worker is registered."""
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-cluster-"))
        self._master = SparkProcess(
            [MASTER, "--host", self.master_host, "--port", "0", "--webui-port", "0"], self._environment(), self._folder
        )
        self.master_url = self._master.wait_for(r"Starting Spark master at (spark://\S+)").group(1)
        self._master.wait_for("New state: ALIVE")
        for host in self.hosts:
            self._launch(host)
        for host in self.hosts:
            self.workers[host].wait_for("Successfully registered with master")

    def stop(self) -> None:
        """Kill all of it. Idempotent."""
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
        self._master.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_worker(self, host: str) -> None:
        """The node is lost: kill the worker, its executors and their Python processes together."""
        self.workers.pop(host).kill()

    def start_worker(self, host: str) -> None:
        """Start a new node under this address; return when the master knows it."""
        self._launch(host)
        self.workers[host].wait_for("Successfully registered with master")

    def executor_pids(self, host: str) -> list[int]:
        """The executor JVMs of this worker that are running now."""
        return [pid for pid in children(self.workers[host].pid) if "ExecutorBackend" in command_line(pid)]

    def _launch(self, host: str) -> None:
        work = self._folder / host
        work.mkdir(exist_ok=True)
        arguments = [WORKER, "--host", host, "-c", str(self.cores), "-m", "2g", "--webui-port", "0", "-d", str(work)]
        inside = self.inside.get(host, ())
        environment = {**self._environment(), **({"SPARK_LOCAL_IP": host} if inside else {})}
        self.workers[host] = SparkProcess([*arguments, self.master_url], environment, self._folder, inside)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SPARK_LOCAL_IP": self.master_host,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_SCALA_VERSION": "2.13",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            **self.environment,
        }


def _class_path() -> str:
    """The class path that Spark's own launcher makes. An archive of shared classes needs the same one."""
    home = Path(pyspark.__file__).parent
    first = sorted((home / "jars").glob("slf4j-api-*.jar"))
    return os.pathsep.join(map(str, (home / "conf", *first, home / "jars" / "*")))


def _module_options() -> list[str]:
    """The options that Spark's own launcher adds for Java 17 and later. With Java 25, Arrow needs the last one."""
    opened = ["java.lang", "java.lang.invoke", "java.net", "java.nio", "java.util", "java.util.concurrent"]
    return [*(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in opened), "-Dio.netty.noUnsafe=false"]


def command_line(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are still running."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent(int(entry.name)) == pid:
            found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, the nearest first."""
    found, left = list[int](), children(pid)
    while left:
        one = left.pop(0)
        found.append(one)
        left.extend(children(one))
    return found


def parent(pid: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
