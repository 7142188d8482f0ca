# SPDX-License-Identifier: Apache-2.0

"""How soon a client hears that its server was killed: ``python -m tests.spark.connect.server_loss``.

Each time, a server is started, and killed while a job waits. Prints the milliseconds until ``sidecar.run`` has raised.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import suppress

from pyspark import cloudpickle

from headgate import Sidecar
from spark_bridge.common.errors import ServerLost
from tests.spark.actions import Action
from tests.spark.connect import jobs
from tests.spark.connect.server import ConnectServer


def once() -> float:
    """Milliseconds."""
    server = ConnectServer()
    server.start()
    killer = None
    try:
        session = server.session()
        with Sidecar(session) as sidecar:
            numbers = jobs.Held(range(2))
            handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=1)
            heard = threading.Event()

            def run() -> None:
                with suppress(ServerLost):
                    sidecar.run(lambda: jobs.read(session, handle))
                heard.set()

            job = Action(run)
            assert numbers.waiting.wait(300)
            killer = threading.Thread(target=server.kill)
            began = time.perf_counter()
            killer.start()
            assert heard.wait(300)
            took = time.perf_counter() - began
            job.result()
        return 1e3 * took
    finally:
        if killer is not None:
            killer.join()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    cloudpickle.register_pickle_by_value(jobs)  # type: ignore[no-untyped-call]
    took = [once() for _ in range(options.times)]
    print(f"{len(took)} times: {min(took):.0f} to {max(took):.0f} ms, median {statistics.median(took):.0f} ms")


if __name__ == "__main__":
    main()
