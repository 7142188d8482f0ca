# SPDX-License-Identifier: Apache-2.0

"""A PostgreSQL server of the tests' own, on loopback, from the binaries that `.ci/find-postgres` finds.

And a pooler in front of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psycopg

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["ROOT", "PgBouncer", "Postgres"]

_START_TIMEOUT_S = 120.0


def find_postgres() -> Path:
    """The folder with ``initdb`` and ``postgres``. Raises ``CalledProcessError``, after one line that says how."""
    found = subprocess.run([ROOT / ".ci" / "find-postgres"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip())


def _as_user() -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "nobody", "--"] if os.getuid() == 0 else []


class Postgres:
    """One server with an empty database. ``settings`` are those of ``postgresql.conf``."""

    def __init__(self, **settings: str) -> None:
        self._binaries = find_postgres()
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-postgres-"))
        if os.getuid() == 0:
            shutil.chown(self._folder, "nobody")
        self._data = self._folder / "data"
        # A statement that waits for a lock that nobody releases fails and is named, long before the test's own timeout.
        own = {"max_prepared_transactions": "50", "fsync": "off", "wal_level": "logical", "lock_timeout": "120s"}
        self._settings = {**own, **settings}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(self._data), "-U", "headgate", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()

    @property
    def conninfo(self) -> str:
        """How to connect to it."""
        return f"host=127.0.0.1 port={self.port} user=headgate dbname=postgres connect_timeout=30"

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.conninfo, autocommit=True)

    def start(self) -> None:
        """Start it, again after a kill, on the same port, and wait until it takes connections."""
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        place = ["-p", str(self.port), "-h", "127.0.0.1", "-k", str(self._folder)]
        command = [*_as_user(), str(self._binaries / "postgres"), "-D", str(self._data), *place, *settings]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """End the server with all its processes together, without any cleaning up; it recovers at its next start."""
        self._signal(signal.SIGQUIT)

    def close(self) -> None:
        self._signal(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_schema(self, name: str) -> psycopg.Connection:
        """An empty schema. What another test has left prepared would keep the old one, and is rolled back."""
        self.roll_back_prepared()
        connection = self.connect()
        connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}")
        return connection

    def prepared(self) -> list[str]:
        """The identifiers of all prepared transactions."""
        with self.connect() as connection:
            return [gid for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts")]

    def roll_back_prepared(self) -> None:
        for gid in self.prepared():
            with self.connect() as connection:
                connection.execute(f"ROLLBACK PREPARED '{gid}'")

    def _signal(self, number: int) -> None:
        """Send the signal to the server itself, which may be the child of ``runuser``, and wait for its end."""
        if self._process is None:
            return
        pid = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        self._process.wait(60)
        self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [*_as_user(), str(self._binaries / program), *arguments], check=True, capture_output=True, cwd=self._folder
        )


class PgBouncer:
    """A pooler in front of a server, in transaction mode: each transaction gets any of its sessions."""

    def __init__(self, server: Postgres) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-pgbouncer-"))
        found = subprocess.run([ROOT / ".ci" / "find-pgbouncer"], stdout=subprocess.PIPE, text=True, check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        place = server.conninfo.replace("connect_timeout=30", "")
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\npostgres = {place}\n[pgbouncer]\npool_mode = transaction\nauth_type = any\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\ndefault_pool_size = 3\n"
        )
        if os.getuid() == 0:
            shutil.chown(self._folder, "nobody")
            shutil.chown(settings, "nobody")
        with open(self._folder / "log", "wb") as log:
            command = [*_as_user(), found.stdout.strip(), str(settings)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        self.conninfo = f"host=127.0.0.1 port={self.port} user=headgate dbname=postgres"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.conninfo).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)

    def close(self) -> None:
        """End it. ``runuser`` passes the signal on."""
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)
