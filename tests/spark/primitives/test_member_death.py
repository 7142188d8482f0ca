# SPDX-License-Identifier: Apache-2.0

"""The benchmark ``member_death`` has a time of each member, even if one makes its next step long before the others."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.member_death import LOSSES, MEMBERS, TRAININGS, Step, _lose_member
from spark_bridge.primitives.group.task import GroupMember
from tests.spark.conftest import SparkOn

pytestmark = pytest.mark.spark


def uneven(member: GroupMember, step: Step) -> None:
    """All members but one are late with their steps, and notice if that one has left in the meantime."""
    for number in range(1, 1000):
        member.all_gather(number)
        if member.rank:
            time.sleep(0.1)
        with member.guard():
            pass  # raises PeerLost if it has left
        step(number)


def test_each_of_the_others_makes_a_next_step(spark_on: SparkOn, tmp_path: Path) -> None:
    training = replace(TRAININGS["all_gather"], train=uneven)
    spark = spark_on(f"local[{MEMBERS},4]")
    lost_ms, next_ms = _lose_member(spark, training, tmp_path / "marker", LOSSES["killed, elastic"])
    assert len(lost_ms) == len(next_ms) == MEMBERS - 1
    assert all(lost < went_on for lost, went_on in zip(lost_ms, next_ms, strict=True))
