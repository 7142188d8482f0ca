# SPDX-License-Identifier: Apache-2.0

"""A Redis server of the tests' own, on loopback, from the program that `.ci/find-redis` finds."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["RedisServer", "RedisServers"]

_START_TIMEOUT_S = 120.0


class RedisServer:
    """One empty server that keeps what it has confirmed, also over a kill."""

    def __init__(self, *settings: str) -> None:
        self._settings = settings
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
            self._process = subprocess.Popen(
                [self._program, *place, *settings, *self._settings], stdout=log, stderr=log
            )
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


class RedisServers:
    """A Redis Cluster: two primaries with half of the slots each, and a replica of the first one."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        self._buses: list[int] = []
        for _ in range(3):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                bus = probe.getsockname()[1]
            self._buses.append(bus)
            self.servers.append(RedisServer("--cluster-enabled", "yes", "--cluster-port", str(bus)))
        clients: list[Any] = [server.connect() for server in self.servers]
        first, second, replica = clients
        first.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        for server, bus in zip(self.servers[1:], self._buses[1:], strict=True):
            first.execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        wait_until(lambda: all(one.cluster("INFO")["cluster_state"] == "ok" for one in clients))
        wait_until(lambda: all(one.cluster("INFO")["cluster_known_nodes"] == "3" for one in clients))
        replica.execute_command("CLUSTER REPLICATE", first.execute_command("CLUSTER MYID"))
        wait_until(lambda: replica.info("replication").get("master_link_status") == "up")
        wait_until(lambda: all("slave" in str(one.execute_command("CLUSTER NODES")) for one in clients))
        for client in clients:
            client.close()

    def fail_over(self) -> None:
        """Kill the first primary after its replica has everything, and let that take over."""
        first: Any
        replica: Any
        with self.servers[0].connect() as first, self.servers[2].connect() as replica:
            first.set("{last}", "written")
            first.execute_command("WAIT", 1, 0)
            self.servers[0].kill()
            replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
            wait_until(lambda: replica.info("replication")["role"] == "master")

    def close(self) -> None:
        for server in self.servers:
            server.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("the servers of the cluster do not agree")
        time.sleep(0.05)
