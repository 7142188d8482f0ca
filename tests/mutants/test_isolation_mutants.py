# SPDX-License-Identifier: Apache-2.0

"""Bugs of the driver's half that no simulated world covers, each caught by its own test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.actors.coordination.test_failures_behind_a_run import (
    test_a_coordinator_that_fails_behind_a_good_run_says_so_when_it_is_settled as say_so,
)
from tests.mutants.mutant import catalogue
from tests.spark_bridge.test_actions import (
    test_a_failure_belongs_to_the_action_of_its_run_and_to_no_other as attribute,
)

ANOTHERS_FAILURE, SILENT_COMMIT = catalogue(r"""
another's-failure [E2: a counter of the whole sidecar; H65]
  A failed run of any operator counts for every action that is being called.
  @ spark_bridge.bridge.runs:RunningJobs.failed
  - else its_action == action_id:
  + else True:
silent-commit [E13: nothing was raised; H71]
  A coordinator that cannot commit the final checkpoint of a good run is logged, and nobody is told.
  @ actors.coordination.coordinator:CoordinatorActor.receive
  - replace(settled, failed=self._failed_behind)
  + settled
""")


def test_a_failure_that_counts_for_every_action_is_caught() -> None:  # H65
    attribute()
    with pytest.MonkeyPatch.context() as monkeypatch:
        ANOTHERS_FAILURE.apply(monkeypatch)
        with pytest.raises(AssertionError):
            attribute()


async def test_a_failed_commit_of_which_nobody_is_told_is_caught() -> None:  # H71
    check: Callable[[str], Awaitable[None]] = say_so
    await check("notify_checkpoint_complete")
    with pytest.MonkeyPatch.context() as monkeypatch:
        SILENT_COMMIT.apply(monkeypatch)
        with pytest.raises(AssertionError):
            await check("notify_checkpoint_complete")
