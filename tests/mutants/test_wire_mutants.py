# SPDX-License-Identifier: Apache-2.0

"""Bugs in the limits of events, which no simulated world reaches, each caught by its own test."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.fuzz.pure import _forest as fuzz_counts
from tests.fuzz.test_large_events import (
    test_another_operators_events_are_handled_while_the_largest_event_is_decoded as share_the_loop,
)
from tests.mutants.mutant import Mutant, catalogue
from tests.protocol.test_codec import COUNTED
from tests.protocol.test_codec import (
    test_the_containers_and_entries_of_a_whole_event_are_bounded_on_both_ends as bound,
)

NO_CONTAINER_BOUND, NO_ENTRY_BOUND, NO_BOUND_AT_THE_SENDER, LARGE_MAPS, IN_ONE_STEP = catalogue(r"""
no-container-bound [X8; H62]
  An event may have any number of lists and maps: 4 MiB of empty maps take 300 MiB and seconds.
  @ protocol.wire.codec:_Counts.add
  - self._containers > self._limits.event_containers_max
  + False
no-entry-bound [X8; H62]
  Only each list by itself has a limit of entries, and an event has many lists.
  @ protocol.wire.codec:_Counts.add
  - self._items > self._limits.event_items_max
  + False
no-container-bound-at-the-sender [X8; H62]
  A sender learns only from the end of its attempt that an event has too many lists and maps.
  @ protocol.wire.codec:_check_value
  - containers > limits.event_containers_max
  + False
large-maps [X8; H62]
  A map may have as many entries as a list: with crafted keys one map takes seconds.
  @ protocol.wire.codec:_event_unpacker
  - , limits.event_map_entries_max
  +
decoded-in-one-step [X8; H62 H65]
  The coordinator's actor decodes an event of any size in one turn of the loop.
  @ actors.coordination.event_decoding:decode_in_turns
  - await checkpoint()
  + pass
""")
Case = tuple[Any, Any, str, str]
TOO_MANY_MAPS: Case = ([{}] * 299, [{}] * 300, "more than 300 lists and maps", "more than 300 lists and maps")
TOO_MANY_ENTRIES = ([[0] * 198] * 10, [[0] * 200] * 10, "more than 2000 entries", "more than 2000 entries")
ONE_LARGE_MAP = (dict.fromkeys(range(400)), dict.fromkeys(range(401)), "a map at most 400", "exceeds max_")


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (NO_CONTAINER_BOUND, TOO_MANY_MAPS),
        (NO_BOUND_AT_THE_SENDER, TOO_MANY_MAPS),
        (NO_ENTRY_BOUND, TOO_MANY_ENTRIES),
        (LARGE_MAPS, ONE_LARGE_MAP),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_limit_that_one_end_does_not_check_is_caught(mutant: Mutant, case: Case) -> None:
    # H62
    assert COUNTED.event_containers_max == 300
    bound(*case)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            bound(*case)


def fuzz_some_counts() -> None:
    for seed in range(10):
        fuzz_counts(Random(seed))


@pytest.mark.parametrize("mutant", [NO_CONTAINER_BOUND, NO_ENTRY_BOUND], ids=lambda mutant: mutant.name)
def test_the_fuzzer_catches_a_missing_limit(mutant: Mutant) -> None:  # H62
    fuzz_some_counts()
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises(AssertionError, match="too many was decoded"):
            fuzz_some_counts()


async def test_a_large_event_that_is_decoded_in_one_turn_is_caught() -> None:  # H62, H65
    with pytest.MonkeyPatch.context() as monkeypatch:
        IN_ONE_STEP.apply(monkeypatch)
        with pytest.raises(AssertionError, match="> 10"):
            await share_the_loop()
