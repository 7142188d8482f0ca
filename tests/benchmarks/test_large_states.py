# SPDX-License-Identifier: Apache-2.0

"""``benchmarks.large_states`` measures each kind of state, and notices a split that is lost."""

from __future__ import annotations

import pytest

from benchmarks.large_states import ENUMERATORS, best, figures, known

pytestmark = pytest.mark.anyio


async def test_each_kind_of_state_is_started_written_and_restored() -> None:
    found = await figures(2000, 1)
    for kind in ENUMERATORS:
        assert list(found[kind]) == ["start", "checkpoint", "write", "read", "restore"]
    assert list(found["stream"]) == ["start", "checkpoint", "restore"]
    assert list(found["reset"]) == ["reset"]


def test_the_best_of_several_rounds_is_the_lowest_of_each_number() -> None:
    assert best([{"start": (3.0, 1.0)}, {"start": (2.0, 4.0)}]) == {"start": (2.0, 1.0)}


def test_the_memory_of_what_is_known_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    known(1000)
    assert capsys.readouterr().out.startswith("1,000 files: ")
