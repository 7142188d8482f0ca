# SPDX-License-Identifier: Apache-2.0

"""The figures of a real job: in Spark's own metrics, as its UI shows them to every sink, and at ``/metrics``."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from pyspark.sql import SparkSession

from headgate import AttachedSidecar, Sidecar, SidecarConfig, Watching
from spark_bridge.observability import spark_metrics
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import LOCAL, NewProgram, SparkOn
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = [pytest.mark.spark, pytest.mark.long]


def in_spark(spark: SparkSession) -> dict[str, float]:
    """The gauges of Headgate that Spark's UI shows, without the part of the name that Spark adds."""
    with urlopen(f"{spark.sparkContext.uiWebUrl}/metrics/json", timeout=60) as answer:
        every = json.load(answer)["gauges"]
    return {
        name.partition(".LiveListenerBus.")[2]: gauge["value"]
        for name, gauge in every.items()
        if ".LiveListenerBus.headgate." in name
    }


def scraped(sidecar: Sidecar) -> dict[str, float]:
    """What Prometheus would read, for series whose labels are only the operator."""
    assert sidecar.status_address is not None
    host, port = sidecar.status_address
    with urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        families = parse(answer.read().decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) <= {"operator"}
    }


def test_the_gauges_of_a_job_come_and_go_with_the_operator_and_the_sidecar(
    spark_on: SparkOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_metrics, "PUBLISH_EVERY_S", 0.1)
    spark = spark_on(LOCAL, spark_ui_enabled="true", spark_ui_port="0")
    script = Script({}, ["hello", "stop"])
    with Sidecar(spark, SidecarConfig(watching=Watching(status_port=0))) as sidecar:
        handle = sidecar.coordinate("my.op", script, parallelism=2)
        action = Action(one_task_each(spark, 2).mapPartitions(handle.subtask(Listening)).collect)
        while in_spark(spark).get("headgate.my_op.events_received_total", 0) < 2:
            continue
        read = scraped(sidecar)
        assert read["headgate_events_received_total"] == 2
        assert read["headgate_attempts_ready_total"] == 2
        assert read["headgate_event_confirm_seconds_count"] >= 2
        action.result()
        while in_spark(spark)["headgate.my_op.run_active"]:
            continue
        assert in_spark(spark)["headgate.my_op.subtasks"] == 2
        assert "headgate.my_op.run_start_time_seconds" not in in_spark(spark)
        assert in_spark(spark)["headgate.operators"] == 1
        monkeypatch.undo()
        sidecar.release("my.op")
        while "headgate.my_op.subtasks" in in_spark(spark):
            continue
        while "headgate_subtasks" in scraped(sidecar):  # the server keeps a status for a moment
            continue
    assert in_spark(spark) == {}


def test_a_name_in_use_is_left_to_its_owner_and_switched_off_gauges_do_not_appear(
    spark_on: SparkOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_metrics, "PUBLISH_EVERY_S", 0.1)
    spark = spark_on(LOCAL, spark_ui_enabled="true", spark_ui_port="0")
    with Sidecar(spark, SidecarConfig(watching=Watching(spark_metrics=False))) as off:
        off.coordinate("op", Script({}, []), parallelism=1)
        with Sidecar(spark) as first:
            first.coordinate("one", Script({}, []), parallelism=1)
            while "headgate.one.subtasks" not in in_spark(spark):
                continue
            with Sidecar(spark) as second:
                second.coordinate("two", Script({}, []), parallelism=1)
                while "headgate.two.subtasks" not in in_spark(spark):
                    continue
            assert "headgate.operators" in in_spark(spark)  # the first one's
            assert "headgate.two.subtasks" not in in_spark(spark)
        assert in_spark(spark) == {}


def test_a_sidecar_in_its_own_process_is_scraped_with_its_token_while_a_driver_is_attached(
    spark_on: SparkOn, program: NewProgram, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-process\n")
    with socket.create_server(("127.0.0.1", 0)) as held:  # so that the program's other ports differ
        port = held.getsockname()[1]
        sidecar = program("streaming", "--status-port", str(port), "--status-token-file", str(token))
    request = Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token.read_text().strip()}"}
    )
    with pytest.raises(URLError):
        urlopen(request, timeout=60)
    with AttachedSidecar(spark_on(LOCAL), sidecar.address, secret_file=sidecar.secret_file) as attached:
        (name,) = attached.status().operators
        with pytest.raises(HTTPError, match="401"):
            urlopen(request.full_url, timeout=60)
        with urlopen(request, timeout=60) as answer:
            assert f'headgate_operator_info{{mode="streaming",operator="{name}"}} 1.0' in answer.read().decode()
