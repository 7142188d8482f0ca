# SPDX-License-Identifier: Apache-2.0

"""``torch.distributed`` among the members of a group, in real processes (H104, H107). Torch is in no lock."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from headgate import GroupMember
from tests.primitives.group_processes import Members, said

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes through /proc"),
]


def added_up(member: GroupMember, rounds: int = 3) -> list[float]:
    """The processes of torch, in the order of their ranks."""
    import torch
    import torch.distributed as dist

    result: Any = None
    for _ in range(rounds):
        result = torch.zeros(member.world_size)
        result[dist.get_rank()] = member.rank
        dist.all_reduce(result)
    return list(map(float, result))


def survive(member: GroupMember) -> list[float]:
    with member.torch():
        return added_up(member, 10**9 if member.generation in (2, 3) else 3)


def stop_before_it_connects(member: GroupMember) -> None:
    member.broadcast()  # as the others do in `torch`, which now wait for this process
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_the_middle(member: GroupMember) -> list[float]:
    with member.torch():
        added_up(member)
        if member.generation == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return added_up(member)


def die_in_the_middle(member: GroupMember) -> list[float]:
    with member.torch():
        added_up(member, 3 if member.generation == 3 else 10**9)
        os.kill(os.getpid(), signal.SIGKILL)
        return added_up(member)


def test_processes_have_the_ranks_of_the_group_and_leave_the_collective_when_one_is_lost() -> None:
    """H104: one stops while the others connect, one in the middle, and one is killed."""
    members = Members([survive, survive, die_in_the_middle, stop_in_the_middle, stop_before_it_connects])
    members.run()
    for subtask in range(2):
        *lost, last = said(members.said[subtask])
        assert [reason.partition(": ")[2] for reason in lost] == [
            f"subtask {number} (attempt 0) is lost: gone" for number in (4, 3, 2)
        ]
        assert last == [0.0, 1.0]
    assert [members.exit_codes[subtask] for subtask in range(2)] == [0, 0]


def make_a_mistake(member: GroupMember) -> list[float]:
    with member.torch():
        added_up(member)
        raise KeyError("my own error")


def survive_it(member: GroupMember) -> list[float]:
    with member.torch():
        return added_up(member, 10**9 if member.world_size > 1 else 1)


def test_an_error_of_ones_own_passes_unchanged_and_is_not_blamed_on_others() -> None:
    """H107"""
    members = Members([survive_it, make_a_mistake], error_grace_s=0.1)
    members.run()
    assert said(members.said[1]) == ["KeyError: 'my own error'"]
    lost, alone = said(members.said[0])
    assert lost.endswith("subtask 1 (attempt 0) left with an error: KeyError: 'my own error'")
    assert alone == [0.0]
