# SPDX-License-Identifier: Apache-2.0

"""What a task on an executor of a Spark Connect server tells before a client's first job; no server is needed."""

from __future__ import annotations

import socket

import pyarrow

from spark_bridge.task_entry import ExecutorLook


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
