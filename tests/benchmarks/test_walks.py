# SPDX-License-Identifier: Apache-2.0

"""``benchmarks.walks`` takes its five walks from one end to the other."""

from __future__ import annotations

import sys

from benchmarks import walks


def test_each_walk_passes_the_modules_of_both_halves_and_those_between_them() -> None:
    before = sys.getprofile()
    result = walks.measure(attempts=1)
    assert sys.getprofile() is before
    assert set(result) == {"registration", "confirmation", "echo", "checkpoint", "failure"}
    for name, walk in result.items():
        modules = set(walk["modules"])
        assert {"protocol.gateway.machine", "spark_bridge.server.connection"} <= modules, name
        assert ("spark_bridge.subtask.channel" in modules) is (name != "failure")
        assert walk["calls"] >= len(modules)
    assert {"protocol.wire.handshake", "spark_bridge.task_entry"} <= set(result["registration"]["modules"])
    assert "protocol.attempts.ledger" in result["failure"]["modules"]
