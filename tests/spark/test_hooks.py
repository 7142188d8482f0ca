# SPDX-License-Identifier: Apache-2.0

"""Failures, exits and deaths in methods of an operator, as a real Spark sees them (H178)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import OperatorCoordinator, Sidecar, SubtaskOperator
from headgate.errors import RestartsExhausted
from protocol.restart import FixedDelay

pytestmark = pytest.mark.spark


class Passing(SubtaskOperator):
    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records


class DiesOnce(Passing):
    """Ends its process in a method, once: Spark runs the task again."""

    def __init__(self, where: str, mark: str) -> None:
        self.where, self.mark = where, Path(mark)

    def _die_in(self, where: str) -> None:
        if where == self.where and not self.mark.exists():
            self.mark.touch()
            os._exit(1)

    def open(self, context: Any, state: bytes | None) -> None:
        self._die_in("open")

    def final_state(self) -> bytes:
        self._die_in("final_state")
        return b""

    def close(self) -> None:
        self._die_in("close")


@pytest.mark.parametrize("where", ["open", "final_state", "close"])
def test_a_process_that_ends_in_a_method_is_replaced(spark: SparkSession, where: str, tmp_path: Path) -> None:
    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("m", parallelism=2)
        numbers = spark.sparkContext.parallelize(range(4), 2)
        operator = job.subtask(DiesOnce, where, str(tmp_path / "died"))
        assert sidecar.run(numbers.mapPartitions(operator).collect) == [0, 1, 2, 3]
    assert (tmp_path / "died").exists()


class FailsWith(Passing):
    def __init__(self, text: str) -> None:
        self.text = text

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        raise LookupError(self.text)


@pytest.mark.parametrize(
    "text", ["begins \udc80 ends", "begins" + "x" * 10_000_000 + "ends"], ids=["not valid Unicode", "long"]
)
def test_exception_with_any_text_fails_the_job_with_it(
    spark: SparkSession, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's worker cannot encode a lone surrogate, and would hang. The name can be used afterwards."""
    sc = spark.sparkContext
    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("a", OperatorCoordinator, parallelism=1)
        failing = sc.parallelize([1], 1).mapPartitions(job.subtask(lambda: FailsWith(text)))
        with pytest.raises(RestartsExhausted, match="LookupError: begins") as raised:
            sidecar.run(failing.collect, restart=FixedDelay(restarts_max=0, delay_s=0.0))
        assert len(str(raised.value)) < 100_000
        assert "ends" in str(raised.value.__cause__)
        status = sidecar.status()
        assert len(repr(status)) + sum(len(record.getMessage()) for record in caplog.records) < 500_000
        assert sc.parallelize([1], 1).mapPartitions(job.subtask(Passing)).collect() == [1]
