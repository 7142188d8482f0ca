# SPDX-License-Identifier: Apache-2.0

"""A short soak of states in files; ``make soak-states`` has larger states and more runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark_bridge.object_stores import STORES
from tests.states.soak import soak_states

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.parametrize("store", STORES)
def test_all_values_survive_every_death_and_nothing_is_left(store: str, tmp_path: Path) -> None:  # H190, H191, H193
    outcome = soak_states(str(tmp_path), seed=4, runs=2, mib=8, say=print, store=store)
    assert outcome.is_right, outcome
    assert outcome["rescaled"]
    assert any(what.endswith(" struck") for what in outcome), "nothing has died"
