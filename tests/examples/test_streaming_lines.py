# SPDX-License-Identifier: Apache-2.0

"""The streaming example runs without arguments, fails where it claims to, and writes each line once."""

from __future__ import annotations

import pytest

from tests.examples.conftest import RunExample


@pytest.mark.long
@pytest.mark.spark
def test_every_line_is_written_once_although_the_query_fails_twice(run_example: RunExample) -> None:
    """H52, H55."""
    ended = run_example("streaming_lines")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "  the query failed: ahead of the action",
        "  it is started again",
        "  the query failed: after the commit, before Spark has noted it",
        "  it is started again",
        "300 lines written, 300 different ones, of 300",
    ]
    assert ended.stderr == ""
