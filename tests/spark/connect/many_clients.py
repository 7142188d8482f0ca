# SPDX-License-Identifier: Apache-2.0

"""What clients that come and go leave in a Spark Connect server: ``python -m tests.spark.connect.many_clients``.

Each client opens a session and a sidecar, runs a job, and leaves. Exits with 1 if more of Headgate's is left after them
all than after the first ones. With ``--plain``, each runs one Python function without Headgate, which shows what Spark
itself leaves of a session. With ``--tunnel``, the tasks reach each client through the server.

Spark keeps the class loaders of some sessions that have ended, and with them the constants of Headgate's classes that
the sessions had loaded: those for whose queries it has generated code, and those whose files an executor has copied.
Both are in caches of 100 entries, which have one entry here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headgate import Addresses, Sidecar, SidecarConfig
from spark_bridge.driver.config import Way
from tests.spark.connect import jobs
from tests.spark.connect.server import ConnectServer

WARM = 20
"""So many clients come first: a JVM loads classes and fills caches for them."""
SETTLE_S = 60.0
OURS = ("headgate-relay-", "headgate-tunnel", "spark-listener-group-headgate")
PACKAGE = "headgate.relay."
ENDING = (".SessionRelay", ".Tunnel", ".TunnelEnd")
"""The classes of which each client has one, until it has left."""
SHOWN = 25
SMALL_CACHES = {"spark.sql.codegen.cache.maxEntries": "1", "spark.executor.isolatedSessionCache.size": "1"}


@dataclass(frozen=True)
class Left:
    """What is in the server after a garbage collection. ``objects``: how many live ones of each class."""

    objects: Counter[str]
    figures: dict[str, int]

    def of_ours(self) -> Counter[str]:
        """The live objects of Headgate's classes."""
        return Counter({name: count for name, count in self.objects.items() if name.startswith(PACKAGE)})

    def is_settled(self) -> bool:
        """Whether no client is left."""
        return not (self.figures["headgate threads"] or any(name.endswith(ENDING) for name in self.of_ours()))


def jcmd(server: ConnectServer, *command: str) -> str:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "jcmd")) if home else "jcmd"
    done = subprocess.run([program, str(server.process.pid), *command], capture_output=True, text=True, check=True)
    return done.stdout


def artifacts(server: ConnectServer, kind: str) -> int:
    """How many of Headgate's files are in the server's temporary folders of this kind."""
    temporary = Path(server.settings["java.io.tmpdir"])
    return sum(f"/{kind}-" in path.as_posix() for path in temporary.rglob("headgate-*") if path.is_file())


def open_files(server: ConnectServer) -> dict[str, int]:
    """How many file descriptors the server has, by what they are for. Each session leaves the pipes of its workers."""
    folder, kinds = Path("/proc", str(server.process.pid), "fd"), Counter[str]()
    for descriptor in folder.iterdir():
        with suppress(OSError):  # it has just been closed
            name = str(descriptor.readlink())
            ours = "headgate-relay-" in name
            kinds["files of Headgate's" if ours else "pipes" if name.startswith("pipe:") else "other open files"] += 1
    return {kind: kinds[kind] for kind in ("files of Headgate's", "pipes", "other open files")}


def left(server: ConnectServer) -> Left:
    """What is in the server now."""
    jcmd(server, "GC.run")
    histogram = jcmd(server, "GC.class_histogram")  # of live objects
    objects: Counter[str] = Counter()
    total = 0
    for count, size, name in re.findall(r"^\s*\d+:\s+(\d+)\s+(\d+)\s+(\S+)", histogram, re.MULTILINE):
        objects[re.sub(r"(Lambda|LambdaForm\$\w+)[/$].*", r"\1", name)] += int(count)  # the rest is an address
        total += int(size)
    threads = server.threads()
    return Left(
        objects,
        {
            "threads": len(threads),
            "headgate threads": sum(name.startswith(OURS) for name in threads),
            "threads of Python workers": sum("bin/python" in name for name in threads),
            **open_files(server),
            "artifacts of sessions": artifacts(server, "artifacts"),
            "copies for executors": artifacts(server, "userFiles"),
            "live heap KiB": total // 1024,
        },
    )


def run_plain(server: ConnectServer) -> None:
    session = server.session()
    assert session.range(0, 1, 1, 1).mapInArrow(lambda batches: batches, "id long").count() == 1
    session.stop()


def serve_one(server: ConnectServer, way: Way = "direct") -> None:
    session = server.session()
    with Sidecar(session, SidecarConfig(addresses=Addresses(way=way))) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: jobs.Numbers(range(2)), parallelism=1)
        assert sidecar.run(lambda: jobs.read(session, handle)) == [0, 1]
    session.stop()


def settled(server: ConnectServer) -> Left:
    """What is left when no client is, or after a minute."""
    end = time.monotonic() + SETTLE_S
    while not (found := left(server)).is_settled() and time.monotonic() < end:
        time.sleep(1.0)
    return found


def measure(server: ConnectServer, clients: int, warm: int, once: Callable[[ConnectServer], None]) -> tuple[Left, Left]:
    """What is left of the first clients, and of so many more."""
    for _ in range(warm):
        once(server)
    before = settled(server)
    for _ in range(clients):
        once(server)
    return before, settled(server)


@contextmanager
def a_server(options: tuple[str, ...] = ()) -> Iterator[ConnectServer]:
    """A server with temporary folders to itself."""
    with tempfile.TemporaryDirectory(prefix="headgate-clients-", ignore_cleanup_errors=True) as temporary:
        folders = {"java.io.tmpdir": temporary, "spark.local.dir": temporary}
        showing = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
        server = ConnectServer(settings={**showing, **folders, **SMALL_CACHES}, options=options)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--warm", type=int, default=WARM, help="so many come before")
    parser.add_argument("--plain", action="store_true", help="without Headgate")
    parser.add_argument("--tunnel", action="store_true", help="the tasks reach the clients through the server")
    options = parser.parse_args()
    once = run_plain if options.plain else partial(serve_one, way="tunnel" if options.tunnel else "direct")
    with jobs.travelling_by_value(jobs), a_server() as server:
        before, after = measure(server, options.clients, options.warm, once)
    print(told(before, after))
    return 1 if grown(before, after, options.clients) or not after.is_settled() else 0


def grown(before: Left, after: Left, clients: int) -> dict[str, int]:
    """What may be Headgate's, and has grown with the number of clients: by one for ten of them, or more."""
    more = {"objects of Headgate's": (after.of_ours() - before.of_ours()).total()}
    for kind in ("headgate threads", "artifacts of sessions", "files of Headgate's", "other open files"):
        more[kind] = after.figures[kind] - before.figures[kind]
    return {kind: count for kind, count in more.items() if count >= max(clients // 10, 1)}


def told(before: Left, after: Left) -> str:
    """What has grown, as lines."""
    lines = [f"{name:26} {count:8} then {after.figures[name]}" for name, count in before.figures.items()]
    lines.append(f"objects of Headgate's: {dict(before.of_ours())}, then {dict(after.of_ours())}")
    lines += [f"{count:+8} {name}" for name, count in (after.objects - before.objects).most_common(SHOWN)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
