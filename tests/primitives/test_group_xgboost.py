# SPDX-License-Identifier: Apache-2.0

"""XGBoost among the members of a group, in real processes (H104, H107)."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest

from headgate import GroupMember
from headgate.errors import PeerLost
from spark_bridge.primitives.group import guard
from tests.primitives.group_processes import Members, said

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes through /proc"),
]


def added_up(member: GroupMember, rounds: int = 3) -> list[float]:
    """The workers of XGBoost, in the order of their ranks."""
    from xgboost import collective

    result: list[float] = []
    for _ in range(rounds):
        own = np.zeros(member.world_size)
        own[collective.get_rank()] = member.rank
        result = list(map(float, collective.allreduce(own, collective.Op.SUM)))
    return result


def survive(member: GroupMember) -> list[float]:
    guard.STUCK_S = 60.0  # as in `give_up`
    with member.xgboost():
        return added_up(member, 10**9 if member.generation == 2 else 3)


def stop_before_it_connects(member: GroupMember) -> None:
    member.broadcast()  # as the others do in `xgboost`, which now wait for this worker
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_the_middle(member: GroupMember) -> list[float]:
    with member.xgboost():
        added_up(member)
        os.kill(os.getpid(), signal.SIGSTOP)
        return added_up(member)


def make_a_mistake(member: GroupMember) -> list[float]:
    with member.xgboost():
        added_up(member)
        raise KeyError("my own error")


@pytest.mark.long
def test_workers_have_the_ranks_of_the_group_and_leave_the_collective_when_one_stands_still() -> None:
    """H104: one stops while the others connect, the next in the middle. Nothing of XGBoost is left afterwards."""
    members = Members([survive, survive, stop_in_the_middle, stop_before_it_connects])
    members.run()
    for subtask in range(2):
        first, second, last = said(members.said[subtask])
        assert first == "PeerLost from XGBoostError: subtask 3 (attempt 0) is lost: gone"
        assert second == "PeerLost from XGBoostError: subtask 2 (attempt 0) is lost: gone"
        assert last == [0.0, 1.0]
    assert members.listening == {0: 0, 1: 0}
    assert [members.exit_codes[subtask] for subtask in range(2)] == [0, 0]


@pytest.mark.long
def test_an_error_of_ones_own_passes_unchanged_and_is_not_blamed_on_others() -> None:
    """H107: it is in the process of the tracker, which the others need until they have left."""
    members = Members([make_a_mistake, survive_others], error_grace_s=0.1)
    members.run()
    assert said(members.said[0]) == ["KeyError: 'my own error'"]
    lost, alone = said(members.said[1])
    assert lost == "PeerLost from XGBoostError: subtask 0 (attempt 0) left with an error: KeyError: 'my own error'"
    assert alone == [0.0]
    assert members.listening == {0: 0, 1: 0}


def survive_others(member: GroupMember) -> list[float]:
    with member.xgboost():
        return added_up(member, 10**9 if member.world_size > 1 else 1)


def give_up(member: GroupMember) -> str:
    guard.STUCK_S = 60.0  # on a busy machine, XGBoost may take longer to notice than its task gets otherwise
    try:
        with member.xgboost():
            added_up(member, 10**9)
    except PeerLost:
        return "gave up"
    return "not lost"


@pytest.mark.long
def test_a_task_that_ends_after_a_loss_leaves_no_tracker_behind() -> None:
    members = Members([give_up, stop_in_the_middle])
    members.run()
    assert said(members.said[0]) == ["gave up"]
    assert members.listening == {0: 0}


def stand_still(member: GroupMember) -> None:
    with member.xgboost():
        added_up(member)
        threading.Event().wait()  # for something that no shutdown of a connection brings about


def die_in_the_middle(member: GroupMember) -> None:
    with member.xgboost():
        added_up(member)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_member_that_does_not_leave_the_collective_after_a_loss_is_ended() -> None:  # H107
    members = Members([stand_still, die_in_the_middle])
    members.run()
    assert members.exit_codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert members.said == {0: [], 1: []}


def test_a_stranger_that_says_nothing_does_not_hold_the_tracker() -> None:
    from spark_bridge.primitives.group.xgboost_group import Tracker

    tracker = Tracker("127.0.0.1", 2)
    address = "127.0.0.1", tracker.arguments()["dmlc_tracker_port"]
    before = len(os.listdir("/dev/fd"))
    with socket.create_connection(address), socket.create_connection(address):
        while len(os.listdir("/dev/fd")) < before + 3:
            time.sleep(0.01)  # until it has accepted one
        tracker.free()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_xgboost_is_refused_with_tls() -> None:
    members = Members([survive], tls=True)
    members.run()
    (refused,) = said(members.said[0])
    assert refused.startswith("LocalProtocolError: xgboost() would send the data of this group over connections that")
    assert members.listening == {0: 0}
