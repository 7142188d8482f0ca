# SPDX-License-Identifier: Apache-2.0

"""A driver that forks: the child cannot use the sidecar, and keeps nothing of it (H120)."""

from __future__ import annotations

import pytest

from tests.spark.program import Program, wait_until_nobody_is_left

pytestmark = pytest.mark.spark

REFUSED = ("request", "status", "coordinate", "run")


@pytest.mark.parametrize("how", ["fork", "exit", "multiprocessing", "subprocess"])
def test_a_child_refuses_and_keeps_nothing_and_the_driver_works_on(how: str) -> None:  # H120
    with Program("-W", "ignore::DeprecationWarning", "-m", "tests.spark.fork_program", how) as program:
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert "parent 2" in program.said
    assert "job [0, 10, 20, 30]" in program.said
    assert "the port is free" in program.said
    if how == "exit":
        assert "archives 1 True" in program.said, "the child has removed what new executors need"
    if how != "subprocess":
        for name in REFUSED:
            assert f"child {name}: SidecarError: the sidecar runs in process " in program.said, program.said
        for name in ("start", "another"):  # they would share the connections to the JVM with the parent
            assert f"child {name}: SidecarError: this process was forked from the driver" in program.said, program.said
        for line in ("child stop: None", "child leave: None", "child runs: False", "child epolls: 0"):
            assert line in program.said, program.said
