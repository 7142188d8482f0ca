# SPDX-License-Identifier: Apache-2.0

"""Driver programs that tests interrupt, kill, or watch as they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.spark.cluster import ROOT

HANG_S = 450.0  # below pytest's own limit, which ends the tests and shows no stack of another process


class Program:
    """Runs a Python program in a separate session and reads its progress line by line.

    After ``hang_s`` seconds it is killed, and the test's message shows the stacks of its threads and of its JVM's.
    """

    def __init__(self, *arguments: str, hang_s: float = HANG_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONFAULTHANDLER": "1"},
        )
        self.said = ""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._kill_if_it_hangs, args=(hang_s,))

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in self.said:
            line = self.process.stdout.readline()
            assert line, f"it has ended and never said {text!r}: {self.said}"
            self.said += line

    def ends_with(self, status: int) -> None:
        """Fail unless it ends by itself with this status."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()  # communicate() would lose what read_until has buffered
        self.process.wait()
        assert self.process.returncode == status, self.said

    def _kill_if_it_hangs(self, hang_s: float) -> None:
        if self._over.wait(hang_s):
            return
        for process in self.left_behind():
            name, pid = process.rsplit(" ", 1)
            if name == "java":
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGQUIT)
        self._over.wait(5.0)  # for the JVM to write its stacks
        self.process.send_signal(signal.SIGABRT)
        self._over.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def left_behind(self) -> list[str]:
        """The processes that still belong to its session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, fields = stat.read_text(errors="replace").split("(", 1)[1].rsplit(")", 1)
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, session = fields.split()[:4]
            if int(session) == self.process.pid and state != "Z":
                found.append(f"{name} {stat.parent.name}")
        return found

    def __enter__(self) -> Program:
        self._watcher.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._watcher.join()
        if self.process.poll() is None or self.left_behind():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def wait_until_nobody_is_left(program: Program) -> None:
    """The JVM and the helpers of multiprocessing end when a pipe from their Python process closes: a moment later."""
    nobody = threading.Event()
    for _ in range(100):
        if not program.left_behind():
            return
        nobody.wait(0.1)
    raise AssertionError(f"left behind: {program.left_behind()}")
