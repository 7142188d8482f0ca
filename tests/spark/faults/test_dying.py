"""What ends an attempt from inside or below: its code, its process, its executor, its node. docs/spark-faults.md."""

from __future__ import annotations

import pytest

from tests.spark.faults.bench import Bench
from tests.spark.operators import Listening
from tests.spark.script import Script

pytestmark = pytest.mark.spark


def test_an_exception_in_user_code(bench: Bench) -> None:
    """H10, H12, H18."""
    script = Script({(1, 0): ["raise"]}, ["hello", "stop"])

    results = bench.collect(script, Listening)

    assert [received for _, _, received in results] == [["hello"], ["hello"]]
    assert [callback[0] for callback in script.of_subtask(1)] == ["ready", "failed", "reset", "ready"]
    assert [callback[0] for callback in script.of_subtask(0)] == ["ready"]
