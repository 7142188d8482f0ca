# SPDX-License-Identifier: Apache-2.0

"""A real Prometheus scrapes a real job, and every query of the Grafana dashboard returns data."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, Watching
from tests.spark.actions import Action, one_task_each
from tests.spark.operators import Listening
from tests.spark.script import Script
from tests.spark_bridge.observability.dashboard import alerts, queries

pytestmark = [pytest.mark.spark, pytest.mark.long]

FIND_PROMETHEUS = Path(__file__).resolve().parents[3] / ".ci" / "find-prometheus"
TOKEN = "a-token-for-prometheus"


class Asking(Listening):
    """Asks the coordinator a question for each event."""

    snapshot_anywhere = True

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        while not self.stopping:
            self.context.request("a question")
            self.context.wait_for_event()


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str) -> Any:
        with urlopen(f"{self._url}{path}", timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        """The result; raises ``HTTPError`` for an expression that Prometheus does not accept."""
        result: list[Any] = self.ask(f"/api/v1/query?query={quote(expression)}")["result"]
        return result


@contextmanager
def prometheus(folder: Path, target: tuple[str, int]) -> Iterator[Prometheus]:
    """Run Prometheus, which scrapes the target every half second with the token."""
    found = subprocess.run([FIND_PROMETHEUS], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.splitlines()[-1])
    program = found.stdout.strip()
    (folder / "token").write_text(TOKEN)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {
                "job_name": "headgate",
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": [f"{target[0]}:{target[1]}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            while True:
                try:
                    server.query("up")
                    break
                except URLError:
                    assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield server
        finally:
            process.terminate()
            process.wait()


def test_every_query_of_the_dashboard_returns_data_of_a_real_job(spark: SparkSession, tmp_path: Path) -> None:
    script = Script({(0, 0): ["die"]}, ["hello"])
    config = SidecarConfig(watching=Watching(status_port=0, status_token=TOKEN))
    with Sidecar(spark, config) as sidecar:
        assert sidecar.status_address is not None
        with prometheus(tmp_path, sidecar.status_address) as server:
            handle = sidecar.coordinate("crawl", script, parallelism=2, mode="streaming")
            action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Asking)).collect)
            script.wait_for(lambda story: ("ready", 0, 1) in [one[:3] for one in story])
            sidecar.checkpoint()
            while not server.query('up{job="headgate"} == 1'):
                for scraped in server.ask("/api/v1/targets")["activeTargets"]:  # none while Prometheus starts
                    assert scraped["health"] != "down" or "deadline" in scraped["lastError"], scraped["lastError"]
            missing = dict(queries("10s"))
            while missing:
                script.say(["ask"])
                missing = {panel: query for panel, query in missing.items() if not server.query(query)}
            for expression in alerts().values():
                server.query(expression)  # accepted; nothing is wrong enough for most of them
            (failures,) = server.query('headgate_attempt_failures_total{operator="crawl"} > 0')
            assert failures["value"][1] == "1"
            metadata = server.ask("/api/v1/metadata?metric=headgate_request_seconds")["headgate_request_seconds"]
            assert metadata[0]["type"] == "histogram"
            script.say(["stop"])
            action.result()
