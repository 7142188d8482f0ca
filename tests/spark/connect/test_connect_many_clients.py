# SPDX-License-Identifier: Apache-2.0

"""Clients come to one server and go; ``python -m tests.spark.connect.many_clients`` has a hundred of them."""

from __future__ import annotations

import pytest

from spark_bridge.driver.config import Way
from tests.spark.connect.many_clients import a_server, grown, measure, serve_one, told
from tests.spark.connect.server import ConnectServer

pytestmark = [pytest.mark.spark, pytest.mark.long]

CLIENTS, WARM = 10, 6
WAYS: tuple[Way, ...] = ("tunnel", "direct")


def serve_both_ways(server: ConnectServer) -> None:
    for way in WAYS:
        serve_one(server, way)


def test_clients_that_come_and_go_leave_no_object_thread_or_file_in_the_server() -> None:
    """Every other one has a tunnel."""
    with a_server() as server:
        before, after = measure(server, CLIENTS // 2, WARM // 2, serve_both_ways)
    said = told(before, after)
    print(said)
    assert after.is_settled(), said
    assert grown(before, after, CLIENTS) == {}, said
