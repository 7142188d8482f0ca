# SPDX-License-Identifier: Apache-2.0

"""Bugs of the server that only its own tests reach, each caught by one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.mutants.mutant import Mutant, catalogue
from tests.spark_bridge.test_server_incomplete import (
    test_a_frame_that_makes_no_progress_between_two_checks_is_dropped as drop_the_stalled,
)
from tests.spark_bridge.test_server_incomplete import (
    test_states_that_exceed_the_limit_together_wait_at_their_sockets_and_all_arrive as bound_all_frames,
)
from tests.spark_bridge.test_server_shares import (
    test_a_single_message_waits_for_one_share_of_four_floods as share_the_turn,
)

WHOLE_READS, NO_BOUND, NO_DEADLINE = catalogue(r"""
whole-reads [X9; H65]
  A connection hands over everything that a read delivers, in one turn of the loop.
  @ spark_bridge.server.connection:Connection._take_frames
  - len(bodies) > LIGHT
  + False
no-bound-over-incomplete-frames [X11; H62]
  Each connection may have an incomplete frame of the largest size at the same time.
  @ spark_bridge.server.incomplete:IncompleteFrames.changed
  - self._total <= self._bytes_max
  + True
no-deadline-of-a-frame [X11; H62]
  A peer that never sends the rest of a frame is kept.
  @ spark_bridge.server.incomplete:IncompleteFrames._check
  - frame.size - before < PROGRESS_BYTES
  + False
""")


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(WHOLE_READS, share_the_turn), (NO_BOUND, bound_all_frames), (NO_DEADLINE, drop_the_stalled)],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
async def test_a_bug_of_the_server_is_caught(mutant: Mutant, check: Callable[[], Awaitable[None]]) -> None:
    # H62, H65
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises(AssertionError):
            await check()
