# SPDX-License-Identifier: Apache-2.0

"""A Redis server of the tests' own, on loopback, from the program that `.ci/find-redis` finds."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["RedisServer"]

_START_TIMEOUT_S = 120.0


class RedisServer:
    """One empty server that keeps what it has confirmed, also over a kill."""

    def __init__(self) -> None:
        found = subprocess.run([ROOT / ".ci" / "find-redis"], stdout=subprocess.PIPE, text=True, check=True)
        self._program = found.stdout.strip()
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-redis-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def connect(self) -> redis.Redis:
        client: redis.Redis = redis.Redis.from_url(self.url, decode_responses=True)
        return client

    def start(self) -> None:
        """Start it, again after a kill, on the same port, and wait until it serves."""
        settings = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no"]
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen([self._program, *place, *settings], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with self.connect() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """End it without any cleaning up; it reads its log at its next start."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
