# SPDX-License-Identifier: Apache-2.0

"""Bugs of the server that only its own tests reach, each caught by one of them."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import catalogue
from tests.spark_bridge.test_server_shares import (
    test_a_single_message_waits_for_one_share_of_four_floods as share_the_turn,
)

WHOLE_READS = catalogue(r"""
whole-reads [X9; H65]
  A connection hands over everything that a read delivers, in one turn of the loop.
  @ spark_bridge.server.connection:Connection._take_frames
  - len(bodies) > LIGHT
  + False
""")[0]


async def test_a_read_that_is_handled_whole_is_caught() -> None:  # H65
    with pytest.MonkeyPatch.context() as monkeypatch:
        WHOLE_READS.apply(monkeypatch)
        with pytest.raises(AssertionError):
            await share_the_turn()
