# SPDX-License-Identifier: Apache-2.0

"""A sidecar in its own process is looked at by its driver and by ``headgate top``, while a job runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.actions import Action
from tests.spark.cluster import ROOT
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, attach
from tests.spark.faults.test_own_process import RESTART, tasks, wait_until_ready

pytestmark = [pytest.mark.spark, pytest.mark.long]


def test_the_driver_and_an_onlooker_see_the_running_job(spark: SparkSession, tmp_path: Path) -> None:
    here = SidecarProgram(tmp_path)
    here.start()
    port = here.address.rpartition(":")[2]
    command: list[str] = [
        sys.executable,
        "-m",
        "headgate",
        "top",
        "--once",
        "--port",
        port,
        "--secret-file",
        str(here.secret_file),
    ]

    def top() -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        assert done.stderr == ""
        return done.stdout

    try:
        assert top() == "no driver is attached to this sidecar\n"
        with attach(spark, here) as sidecar:
            rdd = tasks(spark, sidecar)
            action = Action(lambda: sidecar.run(rdd.collect, restart=RESTART))
            wait_until_ready(sidecar)
            status = sidecar.status()
            assert status.operators[OPERATOR].ready == 2
            assert {attempt.host for attempt in status.operators[OPERATOR].attempts} != {""}
            assert sidecar.explain() == ()
            assert "2 of 2" in sidecar._repr_html_()
            assert "2 subtasks" in sidecar.operator(OPERATOR)._repr_html_()
            shown = top().splitlines()
            (row,) = [line.split() for line in shown if line.startswith(f"{OPERATOR} ") and "stage" in line]
            assert "2/2" in row
            assert len([line for line in shown if line.startswith(f"{OPERATOR} ")]) == 3, "two subtasks below it"
            sidecar.request(OPERATOR, "stop")
            assert len(action.result()) == 2
        assert here.terminate() == 0
    finally:
        here.kill()
