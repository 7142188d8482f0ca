# SPDX-License-Identifier: Apache-2.0

"""A driver that forks: ``python -m tests.spark.fork_program HOW``.

A child asks its copy of the sidecar, leaves its block and lives on until its standard input ends. The driver works on,
closes its sidecar, and listens on the sidecar's port again. Both print what they see.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SidecarConfig, Watching, start
from spark_bridge.driver import shipping


class Answering(OperatorCoordinator):
    async def handle_client_request(self, request: Any) -> Any:
        return request + 1

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request * 10


def ask_in_the_child(sidecar: Sidecar, done: int) -> None:
    """Use the copy in every way, and tell the parent, whose end of the pipe keeps this process alive."""
    attempts: dict[str, Callable[[], Any]] = {
        "request": lambda: sidecar.request("q", 1, timeout_s=2.0),
        "status": sidecar.status,
        "coordinate": lambda: sidecar.coordinate("other", Answering, parallelism=1),
        "run": lambda: sidecar.run(lambda: None),
        "start": lambda: start(SparkSession.getActiveSession()),
        "another": lambda: Sidecar(SparkSession.getActiveSession()).__enter__(),
        "stop": sidecar.stop,
        "leave": lambda: sidecar.__exit__(None, None, None),
    }
    lines = []
    for name, attempt in attempts.items():
        try:
            lines.append(f"child {name}: {attempt()}")
        except Exception as error:
            lines.append(f"child {name}: {type(error).__name__}: {error}")
    lines.append(f"child runs: {sidecar.is_running}")
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    os.write(done, ("\n".join(lines) + f"\nchild epolls: {sum('eventpoll' in one for one in links)}\n").encode())


def main(how: str) -> None:
    read, write = os.pipe()
    stay, release = os.pipe()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2,2]").config("spark.ui.enabled", "false").getOrCreate()
    with Sidecar(spark, SidecarConfig(watching=Watching(status_port=0))) as sidecar:
        job = sidecar.coordinate("q", Answering, parallelism=2)
        port = job.endpoint.port

        def child() -> None:
            os.close(release)
            ask_in_the_child(sidecar, write)
            os.close(write)
            os.read(stay, 1)

        if how in ("fork", "exit"):
            if os.fork() == 0:
                child()
                if how == "exit":
                    sys.exit()
                os._exit(0)
        elif how == "multiprocessing":
            multiprocessing.get_context("fork").Process(target=child).start()
        else:
            subprocess.Popen([sys.executable, "-c", "import os; os.read(0, 1)"], stdin=stay, close_fds=False)
            os.write(write, b"child is another program\n")
        os.close(write)
        with os.fdopen(read) as said:
            print(said.read(), flush=True)
        if how == "exit":
            os.write(release, b"x")
            os.wait()
            archives = list(shipping._shipped.values())
            print("archives", len(archives), all(map(os.path.exists, archives)), flush=True)
        print("parent", sidecar.request("q", 1), flush=True)
        numbers = spark.sparkContext.parallelize(range(4), 2)

        def ask(context: Any, records: Any) -> Any:
            for record in records:
                yield context.request(record)

        print("job", sidecar.run(numbers.mapPartitions(job.subtask(ask)).collect), flush=True)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of tasks are in TIME_WAIT
        again.bind(("127.0.0.1", port))
        again.listen()
        print("the port is free", flush=True)
    os.write(release, b"x")
    os.close(release)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
