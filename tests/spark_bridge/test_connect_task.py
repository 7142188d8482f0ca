# SPDX-License-Identifier: Apache-2.0

"""What a task on an executor tells about it; no Spark is needed."""

from __future__ import annotations

import platform
import socket

import pyarrow
from pyspark.sql import Row

from spark_bridge.task_entry import ExecutorLook, Looked


def look(host: str, port: int) -> list[str]:
    batches = iter([pyarrow.RecordBatch.from_pydict({"id": [0]})])
    return [problem for batch in ExecutorLook(host, port)(batches) for problem in batch.column("problem").to_pylist()]


def test_an_executor_that_reaches_the_sidecar_has_no_problem_and_leaves_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert look(*server.getsockname()) == [""]
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(60)
            assert accepted.recv(1) == b""


def test_an_executor_that_cannot_dial_says_where_it_is_and_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    (problem,) = look(*address)
    assert problem.startswith(f"{socket.gethostname()}: ")
    assert "refused" in problem.lower()


def test_a_task_over_rows_passes_on_what_its_jvm_says() -> None:
    rows = iter([Row(executor="3", host="10.0.0.7", java="21.0.2")])
    with socket.create_server(("127.0.0.1", 0)) as server:
        [looked] = ExecutorLook(*server.getsockname())(rows)
    assert looked == Looked("", "", "3", "10.0.0.7", platform.python_version(), "21.0.2")


def test_a_task_whose_jvm_says_nothing_names_its_own_host_and_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    [looked] = ExecutorLook(*address)(iter([Row(id=0)]))
    assert looked[1:] == ("ConnectionRefusedError", "", socket.gethostname(), platform.python_version(), "")
