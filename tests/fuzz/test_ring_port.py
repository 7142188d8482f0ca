# SPDX-License-Identifier: Apache-2.0

"""The port of a group's member with strangers at it (H157)."""

from __future__ import annotations

from tests.fuzz import ring_port
from tests.fuzz.target import run_cases


def test_strangers_at_a_ring_keep_its_members_from_nothing() -> None:  # H157
    for target in ring_port.TARGETS:
        run_cases(target, first=1, count=3)
