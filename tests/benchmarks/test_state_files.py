# SPDX-License-Identifier: Apache-2.0

"""``benchmarks.state_files`` measures what it says: a second checkpoint has one new file of a hundred."""

from __future__ import annotations

from benchmarks.state_files import SUBTASKS, figures


def test_each_subtask_is_measured() -> None:
    found = figures(4.0, before_s=0.01)
    assert len(found) == SUBTASKS
    for one in found:
        assert 0.01 < one.uploaded_share < 0.02, "one file of a hundred, and the manifest"
        assert 40 < one.handle_bytes < 1024
