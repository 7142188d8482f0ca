# SPDX-License-Identifier: Apache-2.0

"""Call a paid API for each row: one limit, one budget and one cache for all tasks, and a worker that dies.

It needs ``headgate[pyspark]``. The API is made up, and runs in this process; it keeps a log of the calls that it was
paid for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote
from urllib.request import urlopen

from pyspark.sql import SparkSession

from headgate import Retry, Sidecar, SidecarConfig, concurrently

# What the API has been paid for, and what it has refused, by address and by status.
paid: Counter[str] = Counter()
refused: Counter[int] = Counter()
lock = threading.Lock()


class Geocoder(BaseHTTPRequestHandler):
    """Dawdles, is sometimes busy (429, with Retry-After), and sometimes broken (503)."""

    def do_GET(self) -> None:
        time.sleep(0.03)
        address = unquote(self.path[1:])
        with lock:
            calls = paid.total() + refused.total()
            status = 429 if calls % 40 == 1 else 503 if calls % 17 == 2 else 404 if "Nowhere" in address else 200
            if status == 200:
                paid[address] += 1
            else:
                refused[status] += 1
        body = json.dumps([51.5, len(address) / 100]).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


ADDRESSES = [*(f"{number} Long Lane" for number in range(99)), "1 Nowhere"]
ROWS = [{"id": row, "address": ADDRESSES[row * 7 % 100]} for row in range(3_000)]
api = ThreadingHTTPServer(("127.0.0.1", 0), Geocoder)
threading.Thread(target=api.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{api.server_port}"
died = Path(tempfile.mkdtemp(), "died")


def die_once() -> None:
    """End this worker as one that runs out of memory."""
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


# The program of a user begins here.
def ask(address: str) -> Any:
    with urlopen(f"{url}/{quote(address)}", timeout=10) as response:  # raises HTTPError, which has status and headers
        return json.load(response)


spark = SparkSession.builder.master("local[2,4]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")  # it would print the trace of the worker that dies
with Sidecar(spark, SidecarConfig(storage=tempfile.mkdtemp())) as sidecar:
    permits = sidecar.permits("calls", per_s=100, burst=20)
    cache = sidecar.cache("geocode", durable=True)
    budget = sidecar.budget("usd", 2.00)
    job = sidecar.coordinate("locate", parallelism=2, uses=[permits, cache, budget])

    async def ask_and_pay(address: str) -> Any:
        async with permits, budget.reserve(0.01) as spent:
            try:
                return await asyncio.to_thread(ask, address)
            except HTTPError:  # the API has answered, and does not charge for errors
                spent.refund()
                raise

    async def locate(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1_200:
            die_once()
        return row | {"place": await cache.get_async(row["address"], lambda: ask_and_pay(row["address"]))}

    again = Retry(tries=8, pause_s=0.1)
    stage = concurrently(locate, limit=100, ordered=False, timeout_s=60, retry=again, on_error="skip")
    places = job.run(stage, ROWS)
    print(f"{len(places)} of {len(ROWS)} rows have a place; a worker was killed: {died.exists()}")
    print(f"spent: {budget.spent:.2f} usd")
# It ends here.

spark.stop()
print(f"the API was paid for {paid.total()} calls, with {len(paid)} different addresses")
print("and refused " + ", ".join(f"{count} with {status}" for status, count in sorted(refused.items())))
