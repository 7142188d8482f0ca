# SPDX-License-Identifier: Apache-2.0

"""What clients that come and go leave in a Spark Connect server: ``python -m tests.spark.connect.many_clients``.

Each client opens a session and a sidecar, runs a job, and leaves. Exits with 1 if anything of Headgate's is left. With
``--plain``, each runs one Python function without Headgate, which shows what Spark itself leaves of a session. With
``--tunnel``, the tasks reach each client through the server.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark import cloudpickle

from headgate import Addresses, Sidecar, SidecarConfig
from spark_bridge.driver.config import Way
from tests.spark.connect import jobs
from tests.spark.connect.server import ConnectServer

WARM = 5
SETTLE_S = 60.0
OURS = ("headgate-relay-", "headgate-tunnel", "spark-listener-group-headgate")


def jcmd(server: ConnectServer, *command: str) -> str:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "jcmd")) if home else "jcmd"
    done = subprocess.run([program, str(server.process.pid), *command], capture_output=True, text=True, check=True)
    return done.stdout


def artifacts(server: ConnectServer, kind: str) -> int:
    """How many of Headgate's files are in the server's temporary folders of this kind."""
    temporary = Path(server.settings["java.io.tmpdir"])
    return sum(f"/{kind}-" in path.as_posix() for path in temporary.rglob("headgate-*") if path.is_file())


def figures(server: ConnectServer) -> dict[str, int]:
    """What is in the server now, after a garbage collection."""
    jcmd(server, "GC.run")
    histogram = jcmd(server, "GC.class_histogram")
    threads = server.threads()
    mine = re.findall(r"^\s*\d+:\s+(\d+)\s+\d+\s+(headgate\.relay\.\S+)", histogram, re.MULTILINE)
    total = re.search(r"^Total\s+\d+\s+(\d+)", histogram, re.MULTILINE)
    assert total is not None
    return {
        "threads": len(threads),
        "headgate threads": sum(name.startswith(OURS) for name in threads),
        "threads of Python workers": sum("bin/python" in name for name in threads),
        "live headgate relays": sum(int(count) for count, name in mine if name.endswith("SessionRelay")),
        "live headgate tunnels": sum(int(count) for count, name in mine if name.endswith(".Tunnel")),
        "live headgate objects": sum(int(count) for count, _ in mine),
        "artifacts of sessions": artifacts(server, "artifacts"),
        "copies for executors": artifacts(server, "userFiles"),
        "live heap KiB": int(total[1]) // 1024,
    }


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


def settled(server: ConnectServer) -> dict[str, int]:
    """The figures when nothing of Headgate's is left, or after a minute."""
    end = time.monotonic() + SETTLE_S
    while True:
        found = figures(server)
        if (
            not (found["headgate threads"] or found["live headgate relays"] or found["live headgate tunnels"])
            or time.monotonic() > end
        ):
            return found
        time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="without Headgate")
    parser.add_argument("--tunnel", action="store_true", help="the tasks reach the clients through the server")
    options = parser.parse_args()
    clients, once = options.clients, run_plain if options.plain else serve_one
    if options.tunnel:
        once = partial(serve_one, way="tunnel")
    cloudpickle.register_pickle_by_value(jobs)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="headgate-clients-", ignore_cleanup_errors=True) as temporary:
        folders = {"java.io.tmpdir": temporary, "spark.local.dir": temporary}
        server = ConnectServer(settings={"spark.ui.enabled": "true", "spark.ui.port": "0", **folders})
        server.start()
        rows = measure(server, clients, once)
    for name in rows["before"]:
        print(f"{name:26}" + "".join(f"{when}: {row[name]:<10}" for when, row in rows.items()))
    last = rows[f"after {clients}"]
    left = last["headgate threads"] + last["live headgate relays"] + last["live headgate tunnels"]
    return 1 if left + last["artifacts of sessions"] else 0


def measure(server: ConnectServer, clients: int, once: Callable[[ConnectServer], None]) -> dict[str, dict[str, int]]:
    """The figures before all clients, after the first ones, and after all."""
    try:
        rows = {"before": figures(server)}
        begun = time.monotonic()
        for number in range(1, clients + 1):
            once(server)
            if number in (WARM, clients):
                rows[f"after {number}"] = settled(server)
        print(f"{clients} clients in {time.monotonic() - begun:.0f} s")
    finally:
        server.stop()
    return rows


if __name__ == "__main__":
    sys.exit(main())
