# SPDX-License-Identifier: Apache-2.0

"""The rendezvous of a group: generations, rounds, losses, and whose error it was (H102 to H107)."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from math import inf
from types import FrameType
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.group import (
    SAVE,
    Admit,
    AdmitAlone,
    Answer,
    BlameMember,
    Called,
    ErrorMet,
    Finished,
    GaveUp,
    GroupConfig,
    GroupEffect,
    GroupInput,
    GroupMachine,
    Joined,
    KeepCheckpoint,
    Left,
    Lost,
    Member,
    RefuseCall,
    RejectCall,
    Suspected,
    TellBroken,
)
from protocol.machine import TimePassed

A, B, C = Member(0, 0), Member(1, 0), Member(2, 0)
B1 = Member(1, 1)


class Group:
    """A machine with a clock, whose invariants are checked after each step."""

    def __init__(self, parallelism: int, min_size: int, max_size: int, **times: float) -> None:
        self.machine = GroupMachine(GroupConfig(parallelism, min_size, max_size, **times))
        self.now = 0.0

    def tell(self, *inputs: GroupInput) -> list[GroupEffect]:
        effects: list[GroupEffect] = []
        for one in inputs:
            effects += self.machine.handle(one, self.now)
            self.machine.check_invariants()
        return effects

    def pass_time(self) -> list[GroupEffect]:
        deadline = self.machine.next_deadline()
        assert deadline is not None, "nothing is due"
        self.now = deadline
        return self.tell(TimePassed())


def a_group_of(*members: Member, **times: float) -> Group:
    group = Group(len(members), len(members), len(members), **times)
    effects = group.tell(*map(Joined, members))
    assert [type(effect) for effect in effects] == [Admit]
    return group


def test_a_generation_forms_when_all_have_joined_and_ranks_follow_the_subtasks() -> None:  # H102
    group = Group(3, 3, 3)
    assert group.tell(Joined(C, "c"), Joined(A, "a")) == []
    assert group.tell(Joined(B, "b")) == [Admit(1, (A, B, C), ("a", "b", "c"))]


def test_of_several_attempts_of_a_subtask_the_first_to_join_is_a_member() -> None:  # H102
    group = Group(2, 2, 2)
    assert group.tell(Joined(B1), Joined(B)) == []
    assert group.tell(Joined(A)) == [Admit(1, (A, B1), (None, None))]
    assert group.tell(Lost(B1, "killed"), Left(A, 1), Joined(A))[-1] == Admit(2, (A, B), (None, None))


def test_a_round_is_answered_when_all_have_called() -> None:  # H103
    group = a_group_of(A, B)
    assert group.tell(Called(B, 1, 0, "all_gather()", "b")) == []
    assert group.tell(Called(A, 1, 0, "all_gather()", "a")) == [Answer((A, B), ("a", "b"), 0)]


SAME_CALLS = ": all members must make the same calls in the same order"


def test_calls_of_different_kinds_fail_in_all_members() -> None:  # H103
    group = a_group_of(A, B)
    effects = group.tell(Called(B, 1, 0, "barrier()"), Called(A, 1, 0, "all_gather()", "a"))
    text = "rank 0 calls all_gather(), subtask 1 (attempt 0) calls barrier()" + SAME_CALLS
    assert effects == [RejectCall(A, text), RejectCall(B, text)]


def test_a_step_that_not_all_save_is_not_a_checkpoint() -> None:  # H105
    group = a_group_of(A, B)
    effects = group.tell(Called(A, 1, 0, SAVE, 7), Called(B, 1, 0, SAVE, 8))
    text = "rank 0 calls save(7), subtask 1 (attempt 0) calls save(8)" + SAME_CALLS
    assert effects == [RejectCall(A, text), RejectCall(B, text)]


def test_a_checkpoint_is_kept_before_the_answers() -> None:  # H105
    group = a_group_of(A, B)
    assert group.tell(Called(A, 1, 0, SAVE, 7), Called(B, 1, 0, SAVE, 7)) == [
        KeepCheckpoint(A, 7),
        Answer((A, B), (7, 7), 0),
    ]


def test_a_loss_refuses_open_calls_tells_all_survivors_and_refuses_later_calls() -> None:  # H104
    group = a_group_of(A, B, C)
    effects = group.tell(Called(A, 1, 0, "barrier()"), Lost(B, "killed"))
    reason = "subtask 1 (attempt 0) is lost: killed"
    assert effects == [RefuseCall(A, 1, reason), TellBroken(1, (A, C), reason)]
    assert group.tell(Called(C, 1, 0, "barrier()")) == [RefuseCall(C, 1, reason)]


def test_a_lost_connection_breaks_the_generation_before_the_loss_is_known() -> None:  # H104
    group = a_group_of(A, B)
    effects = group.tell(Called(A, 1, 0, "barrier()"), Suspected(B))
    reason = "subtask 1 (attempt 0) has lost its connection"
    assert effects == [RefuseCall(A, 1, reason), TellBroken(1, (A, B), reason)]
    assert group.tell(Lost(B, "killed")) == []


def test_the_next_generation_waits_for_each_survivor_and_for_the_retry() -> None:  # H102
    group = a_group_of(A, B, C)
    group.tell(Lost(B, "killed"))
    assert group.tell(Joined(B1), Left(A, 1), Joined(A)) == []
    assert group.tell(Left(C, 1), Joined(C)) == [Admit(2, (A, B1, C), (None, None, None))]


def test_a_call_of_an_earlier_generation_never_mixes_with_the_current_one() -> None:  # H103
    group = a_group_of(A, B)
    group.tell(Called(A, 1, 0, "all_gather()", "old"), Lost(B, "killed"), Left(A, 1), Joined(A), Joined(B1))
    assert group.tell(Called(A, 1, 0, "all_gather()", "old")) == [RefuseCall(A, 1, "its generation is over")]
    assert group.tell(Called(A, 2, 0, "all_gather()", "new"), Called(B1, 2, 0, "all_gather()", "b")) == [
        Answer((A, B1), ("new", "b"), 0)
    ]


def test_a_member_that_leaves_with_an_error_breaks_the_generation() -> None:  # H104
    group = a_group_of(A, B)
    effects = group.tell(Called(A, 1, 0, "barrier()"), Left(B, 1, "ValueError: no"))
    reason = "subtask 1 (attempt 0) left with an error: ValueError: no"
    assert effects == [RefuseCall(A, 1, reason), TellBroken(1, (A,), reason)]


@pytest.mark.parametrize("leaves_first", [True, False])
def test_nobody_waits_for_a_member_that_has_left(leaves_first: bool) -> None:  # H104
    group = a_group_of(A, B)
    inputs: list[GroupInput] = [Called(A, 1, 0, "barrier()"), Left(B, 1)]
    effects = group.tell(*(reversed(inputs) if leaves_first else inputs))
    assert RefuseCall(A, 1, "subtask 1 (attempt 0) has left the group") in effects


def test_members_that_leave_one_after_another_break_nothing() -> None:  # H104
    group = a_group_of(A, B)
    assert group.tell(Left(A, 1), Left(B, 1)) == []


def test_one_that_is_left_over_when_the_others_have_finished_is_admitted_alone_and_cannot_call() -> None:  # H106
    group = a_group_of(A, B)
    assert group.tell(Left(A, 1), Left(B, 1), Finished(A), Lost(B, "killed"), Joined(B1)) == [AdmitAlone(2, B1, 1, 2)]
    (effect,) = group.tell(Called(B1, 2, 0, "barrier()"))
    assert isinstance(effect, RejectCall)
    assert "have finished" in effect.reason


def test_a_revoked_success_counts_as_lost() -> None:  # H106
    group = a_group_of(A, B)
    group.tell(Left(A, 1), Left(B, 1), Finished(A), Lost(B, "killed"), Lost(A, "output lost"), Joined(B1))
    assert group.tell(Joined(Member(0, 1))) == [Admit(2, (Member(0, 1), B1), (None, None))]


def test_an_error_is_the_members_own_if_nobody_is_lost_meanwhile() -> None:  # H107
    group = a_group_of(A, B, error_grace_s=5.0)
    assert group.tell(ErrorMet(A, 1)) == []
    assert group.pass_time() == [BlameMember(A)]
    assert group.now == 5.0


@pytest.mark.parametrize("loss_first", [True, False])
def test_an_error_is_a_consequence_if_somebody_is_lost(loss_first: bool) -> None:  # H107
    group = a_group_of(A, B)
    inputs: list[GroupInput] = [ErrorMet(A, 1), Lost(B, "killed")]
    effects = group.tell(*(reversed(inputs) if loss_first else inputs))
    assert RefuseCall(A, 1, "subtask 1 (attempt 0) is lost: killed") in effects
    assert not any(isinstance(effect, BlameMember) for effect in effects)
    assert group.machine.next_deadline() is None


def test_an_error_that_is_met_after_another_member_has_left_is_a_consequence_of_that() -> None:  # H107
    group = a_group_of(A, B, C)
    reason = "another member has left the group"
    assert group.tell(Left(B, 1), ErrorMet(A, 1)) == [RefuseCall(A, 1, reason), TellBroken(1, (A, C), reason)]
    assert group.tell(ErrorMet(C, 1)) == [RefuseCall(C, 1, reason)]
    assert group.machine.next_deadline() is None


def test_an_elastic_group_goes_on_without_the_lost_member_after_a_short_wait() -> None:  # H109
    group = Group(3, 2, 3, join_wait_s=0.1, start_wait_s=10.0)
    group.tell(Joined(A), Joined(B), Joined(C), Lost(B, "killed"))
    assert group.tell(Left(A, 1), Joined(A), Left(C, 1), Joined(C)) == []
    assert group.pass_time() == [Admit(2, (A, C), (None, None))]
    assert group.now == 0.1


def test_an_elastic_group_takes_the_retry_if_it_comes_in_time() -> None:  # H109
    group = Group(3, 2, 3)
    group.tell(Joined(A), Joined(B), Joined(C), Lost(B, "killed"), Left(A, 1), Joined(A), Left(C, 1), Joined(C))
    assert group.tell(Joined(B1)) == [Admit(2, (A, B1, C), (None, None, None))]


def test_the_first_generation_of_an_elastic_group_waits_longer() -> None:  # H109
    group = Group(3, 2, 3, join_wait_s=0.1, start_wait_s=10.0)
    assert group.tell(Joined(A), Joined(C)) == []
    assert group.pass_time() == [Admit(1, (A, C), (None, None))]
    assert group.now == 10.0


def test_members_learn_how_many_wait_and_let_them_in() -> None:  # H109
    group = Group(2, 1, 2, start_wait_s=1.0)
    group.tell(Joined(A))
    group.pass_time()
    assert group.tell(Joined(B), Called(A, 1, 0, "barrier()")) == [Answer((A,), (None,), 1)]
    assert group.tell(Left(A, 1), Joined(A)) == [Admit(2, (A, B), (None, None))]


def test_more_tasks_than_members_take_turns() -> None:  # H102
    group = Group(4, 2, 2)
    d = Member(3, 0)
    assert group.tell(Joined(C), Joined(A), Joined(d), Joined(B)) == [Admit(1, (A, C), (None, None))]
    assert group.tell(Left(A, 1), Left(C, 1))[-1] == Admit(2, (B, d), (None, None))


def test_a_number_is_never_given_twice() -> None:  # H102
    first = a_group_of(A, B)
    again = GroupMachine(first.machine.config, first.machine.generation)
    again.handle(Joined(A), 0.0)
    assert again.handle(Joined(B1), 0.0) == [Admit(2, (A, B1), (None, None))]


def test_joining_twice_and_calling_twice_are_refused_and_change_nothing() -> None:
    group = a_group_of(A, B)
    group.tell(Called(A, 1, 0, "barrier()"))
    for wrong in (Joined(A), Called(A, 1, 0, "barrier()"), Called(B, 1, 1, "barrier()")):
        with pytest.raises(LocalProtocolError):
            group.tell(wrong)
    assert group.tell(Called(B, 1, 0, "barrier()")) == [Answer((A, B), (None, None), 0)]


def test_one_that_gives_up_waiting_joins_no_generation() -> None:  # H102
    group = Group(2, 2, 2)
    assert group.tell(Joined(A), Left(A, 0)) == [RefuseCall(A, 0, "it has left the group")]
    assert group.tell(Joined(B)) == []
    assert group.tell(Joined(A)) == [Admit(1, (A, B), (None, None))]
    assert group.tell(Left(A, 0, "TimedOut"))[0] == TellBroken(
        1, (B,), "subtask 0 (attempt 0) left with an error: TimedOut"
    )


def test_a_spare_task_is_not_one_that_members_could_let_in() -> None:  # H109
    group = Group(4, 2, 3)
    d = Member(3, 0)
    group.tell(Joined(A), Joined(B), Joined(C), Joined(d))
    calls = [Called(member, 1, 0, "barrier()") for member in (A, B, C)]
    assert group.tell(*calls) == [Answer((A, B, C), (None, None, None), 0)]
    assert group.tell(Lost(C, "killed"), Left(A, 1), Left(B, 1), Joined(B), Joined(A))[-1] == Admit(
        2, (A, B, d), (None, None, None)
    )


def test_neither_is_a_copy_of_a_members_task_nor_one_whose_subtask_has_finished() -> None:  # H109
    group = Group(4, 1, 4, start_wait_s=1.0)
    group.tell(Joined(A), Joined(B))
    group.pass_time()
    finished = Member(3, 0)
    group.tell(Joined(B1), Joined(Member(3, 1)), Finished(finished))
    assert group.tell(Called(A, 1, 0, "x"), Called(B, 1, 0, "x")) == [Answer((A, B), (None, None), 0)]
    group.tell(Joined(C))
    assert group.tell(Called(A, 1, 1, "x"), Called(B, 1, 1, "x")) == [Answer((A, B), (None, None), 1)]
    group.tell(Lost(finished, "its output is lost"))
    assert group.tell(Called(A, 1, 2, "x"), Called(B, 1, 2, "x")) == [Answer((A, B), (None, None), 2)]


def test_members_that_leave_to_let_others_in_are_waited_for() -> None:  # H109
    group = Group(4, 1, 4, join_wait_s=0.1, start_wait_s=10.0)
    group.tell(Joined(A), Joined(B))
    assert group.pass_time() == [Admit(1, (A, B), (None, None))]
    group.tell(Joined(C), Left(A, 1), Left(B, 1), Joined(A))
    group.now += 5.0  # B reads its data again
    assert group.tell(TimePassed()) == []
    assert group.tell(Joined(B)) == [Admit(2, (A, B, C), (None, None, None))]


@pytest.mark.parametrize("how", [Finished(B), Lost(B, "killed")])
def test_one_that_does_not_come_back_is_waited_for_until_it_is_over(how: GroupInput) -> None:  # H109
    group = Group(4, 1, 4, join_wait_s=0.1, start_wait_s=10.0)
    group.tell(Joined(A), Joined(B))
    group.pass_time()
    group.tell(Joined(C), Left(A, 1), Left(B, 1), Joined(A))
    assert group.machine.next_deadline() == 20.0
    group.now += 5.0
    assert group.tell(how) == [Admit(2, (A, C), (None, None))]


def test_one_that_has_left_for_good_and_goes_on_delays_the_others_for_a_time() -> None:  # H109
    group = Group(4, 1, 4, join_wait_s=0.1, start_wait_s=10.0)
    group.tell(Joined(A), Joined(B))
    group.pass_time()
    group.tell(Joined(C), Left(A, 1), Left(B, 1), Joined(A))
    assert group.pass_time() == [Admit(2, (A, C), (None, None))]
    assert group.now == 20.0


def test_a_member_that_gives_up_waiting_breaks_the_generation_and_stays_inside() -> None:  # H104 H176
    group = a_group_of(A, B, C)
    effects = group.tell(Called(A, 1, 0, "barrier()"), Called(B, 1, 0, "barrier()"), GaveUp(A, 1))
    reason = "subtask 0 (attempt 0) has given up waiting for the others"
    assert effects == [RefuseCall(A, 1, reason), RefuseCall(B, 1, reason), TellBroken(1, (A, B, C), reason)]
    assert group.tell(Called(C, 1, 0, "barrier()"), GaveUp(B, 1)) == [RefuseCall(C, 1, reason)]
    assert group.tell(Left(B, 1), Joined(B), Left(C, 1), Joined(C), GaveUp(C, 1)) == [], "the first is still inside"
    assert group.tell(Left(A, 1), Joined(A))[0] == Admit(2, (A, B, C), (None, None, None))


def test_one_whose_wait_is_over_joins_no_generation_even_if_it_could_not_say_so() -> None:  # H102 H176
    group = Group(2, 2, 2, join_timeout_s=5.0)
    group.tell(Joined(A))
    group.now = 5.0
    assert group.tell(TimePassed()) == [], "it still waits"
    group.now = 5.1
    assert group.tell(Joined(B)) == [RefuseCall(A, 0, "it has waited too long for the others")]
    assert group.tell(Left(A, 0)) == []
    assert group.tell(Joined(A)) == [Admit(1, (A, B), (None, None))]


def test_one_that_joins_again_after_its_wait_is_admitted_though_nobody_has_looked() -> None:  # H102 H176
    group = Group(2, 2, 2, join_timeout_s=5.0)
    group.tell(Joined(A))
    group.now = 6.0
    assert group.tell(Joined(A)) == [RefuseCall(A, 0, "it has waited too long for the others")]
    assert group.tell(Joined(B)) == [Admit(1, (A, B), (None, None))]


# --- how much an input costs ------------------------------------------------------------------------------------------


class CountedMember(Member):
    """A member that counts how often it is looked up."""

    hashed = 0

    def __hash__(self) -> int:
        CountedMember.hashed += 1
        return hash((self.subtask, self.attempt))

    def __eq__(self, other: object) -> bool:
        CountedMember.hashed += 1
        return isinstance(other, Member) and (self.subtask, self.attempt) == (other.subtask, other.attempt)


def steps_of(members: int, spares: int) -> int:
    """How many instructions of the machine, and look-ups of members, the life of a group takes.

    All join, call, break, join again, ask about an error, give up, and finish; some are spare.
    """
    config = GroupConfig(members + spares, 1, members, join_timeout_s=600.0)
    machine = GroupMachine(config)
    everybody = [CountedMember(subtask, 0) for subtask in range(members + spares)]
    instructions = 0

    def within(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal instructions
        instructions += event == "opcode"
        return within

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("group.py"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    def tell(input: GroupInput, now: float) -> Sequence[GroupEffect]:
        effects = machine.handle(input, now)
        machine.next_deadline()
        return effects

    CountedMember.hashed = 0
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for member in everybody:
            tell(Joined(member), 0.0)
        for member in everybody[:members]:
            tell(Called(member, 1, 0, "barrier()"), 1.0)
        for member in everybody[: members - 1]:
            tell(ErrorMet(member, 1), 2.0)
        tell(Lost(everybody[0], "killed"), 3.0)
        for member in everybody[1:members]:
            tell(Left(member, 1), 4.0)
        for member in everybody[1:members]:
            tell(Joined(member), 5.0)
        tell(TimePassed(), 100.0)
        for member in everybody:
            tell(Finished(member), 200.0)
    finally:
        sys.settrace(before)
    return instructions + CountedMember.hashed


@pytest.mark.parametrize(("members", "spares"), [(100, 0), (100, 100), (2, 198)])
def test_ten_times_as_many_tasks_cost_about_ten_times_as_much(members: int, spares: int) -> None:  # H109
    large = members * 10 if members > 2 else 2
    assert steps_of(large, spares * 10) < 12 * steps_of(members, spares)


# --- generations without losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_without_losses_the_number_of_generations_is_bounded(seed: int) -> None:
    """H109: the documented loop of an elastic group, with spare tasks, tasks that come one by one, and some that leave.

    A task that sees others waiting leaves and comes back after a moment. Each that comes is let in at most once.
    """
    chance = random.Random(seed)
    parallelism = chance.randrange(2, 9)
    min_size = chance.randrange(1, parallelism + 1)
    max_size = chance.randrange(min_size, parallelism + 1)
    group = Group(parallelism, min_size, max_size, start_wait_s=10.0)
    known = set[Member]()
    comes = [(chance.choice([0.0, 1.0, 30.0]) * chance.random(), Member(n, 0)) for n in range(parallelism)]
    comes += [(30.0 * chance.random(), Member(n, 1)) for n in range(parallelism) if chance.random() < 0.3]
    came, generation, inside, quiet = 0, 0, dict[Member, int](), 0
    while comes or (inside and quiet < 20) or group.machine.next_deadline() is not None:
        comes.sort(key=lambda one: one[0])
        deadline = group.machine.next_deadline()
        due = min([at for at in (deadline, comes[0][0] if comes else None) if at is not None], default=inf)
        effects: list[GroupEffect] = []
        if inside and group.now + 0.1 < due:
            group.now += 0.1
            quiet += due == inf
            for member, round_ in list(inside.items()):
                effects += group.tell(Called(member, generation, round_, "barrier()"))
                inside[member] = round_ + 1
        elif due == deadline:
            effects = group.pass_time()
        else:
            group.now, member = comes.pop(0)
            came += member not in known
            known.add(member)
            effects = group.tell(Joined(member))
        for effect in effects:
            if isinstance(effect, Admit):
                generation, inside = effect.generation, dict.fromkeys(effect.members, 0)
            elif isinstance(effect, Answer) and effect.waiting:
                inside = {}
                for member in effect.members:
                    effects += group.tell(Left(member, generation))  # the next one may form now: see the loop
                    comes.append((group.now + chance.choice([0.0, 0.05, 2.0]), member))
    assert 1 <= generation <= came, f"seed {seed}: {generation} generations of {came} that came"
    assert len(inside) == max_size, f"seed {seed}: somebody is not let in"


# --- every order in a small scope -------------------------------------------------------------------------------------

STEPS = 2


class Attempt:
    """A task that trains: it saves each step until the last one, leaves, and succeeds.

    It joins again after a loss, and to let others in.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.phase = "outside"  # joining, inside, calling, left, over
        self.generation = 0
        self.round = 0
        self.step = 0
        self.told = False
        self.others_wait = False

    def key(self) -> Any:
        return (self.member, self.phase, self.generation, self.round, self.step, self.told, self.others_wait)


class Training:
    """All tasks of a group with the machine. Each task does one thing at a time; kills come at any moment."""

    def __init__(self, config: GroupConfig, kills: int, suspicions: int) -> None:
        self.machine = GroupMachine(config)
        self.attempts = [Attempt(Member(subtask, 0)) for subtask in range(config.parallelism)]
        self.kills = kills
        self.suspicions = suspicions
        self.checkpoint = 0
        self.broken: set[int] = set()
        self.succeeded: set[int] = set()
        self.now = 0.0

    def key(self) -> Any:
        machine, current = self.machine, self.machine._current
        generation = None
        if current is not None:
            generation = (current.number, tuple(current.members), frozenset(current.inside), bool(current.broken))
            generation += (current.round, frozenset(current.calls))  # type: ignore[assignment]
        due = machine.next_deadline() is not None
        return (
            (tuple(one.key() for one in self.attempts), self.kills, self.suspicions, self.checkpoint, generation, due),
            (tuple(machine._waiting), tuple(machine._candidates.values()), frozenset(machine._expected)),
            (frozenset(machine._finished), frozenset(machine._alone), self.machine.generation),
        )

    def moves(self) -> Iterator[tuple[str, int]]:
        for index, one in enumerate(self.attempts):
            if one.phase in ("outside", "inside", "left"):
                yield "step", index
            if self.kills and one.phase != "over":
                yield "kill", index
            if self.suspicions and one.phase != "over":
                yield "suspect", index
        if self.machine.next_deadline() is not None:
            yield "time", 0

    def move(self, what: str, index: int) -> None:
        one = self.attempts[index]
        if what == "time":
            self.now = self.machine.next_deadline() or self.now
            self._tell(TimePassed())
        elif what == "kill":
            self.kills -= 1
            self.attempts[index] = Attempt(Member(one.member.subtask, one.member.attempt + 1))
            self._tell(Lost(one.member, "killed"))
        elif what == "suspect":
            self.suspicions -= 1
            self._tell(Suspected(one.member))
        else:
            self._step(one)

    def _step(self, one: Attempt) -> None:
        if one.phase == "outside":
            one.phase = "joining"
            self._tell(Joined(one.member))
        elif one.phase == "left":
            one.phase = "over"
            self.succeeded.add(one.member.subtask)
            self._tell(Finished(one.member))
        elif one.told or (one.others_wait and one.step < STEPS):
            one.phase = "outside"
            self._tell(Left(one.member, one.generation))
        elif one.step == STEPS:
            one.phase = "left"
            self._tell(Left(one.member, one.generation))
        else:
            one.phase = "calling"
            self._tell(Called(one.member, one.generation, one.round, SAVE, one.step + 1))

    def _tell(self, input: GroupInput) -> None:
        effects = self.machine.handle(input, self.now)
        self.machine.check_invariants()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: GroupEffect) -> None:
        by_member = {one.member: one for one in self.attempts}
        match effect:
            case Admit(generation, members):
                assert [member.subtask for member in members] == sorted({member.subtask for member in members})
                inside = [one for one in self.attempts if one.phase in ("inside", "calling") and one.step < STEPS]
                assert not inside, "nobody is left behind in an earlier generation"
                for member in members:
                    self._admit(by_member[member], generation)
            case AdmitAlone(generation, member):
                assert self.checkpoint == STEPS, "the others have finished, so the last step is saved"
                self._admit(by_member[member], generation)
            case KeepCheckpoint(_, step):
                assert step == self.checkpoint + 1, "no step is left out, and none is taken back"
                self.checkpoint = step
            case Answer(members, _, waiting):
                calling = [by_member[member] for member in members]
                assert {(one.phase, one.round, one.step + 1) for one in calling} == {
                    ("calling", calling[0].round, self.checkpoint)
                }
                assert {one.generation for one in calling} == {calling[0].generation}
                assert calling[0].generation not in self.broken, "no call of a broken generation succeeds"
                for one in calling:
                    one.phase, one.round, one.step = "inside", one.round + 1, one.step + 1
                    one.others_wait = waiting > 0
                free = self.machine.config.max_size - len(members)
                others = {one.member.subtask for one in self.attempts if one.phase == "joining"}
                assert waiting <= min(free, len(others)), "only those that can be admitted count"
            case RefuseCall(member, generation):
                one = by_member[member]
                assert (one.phase, one.generation) == ("calling", generation)
                one.phase, one.told = "inside", True
            case TellBroken(generation, members):
                self.broken.add(generation)
                for member in members:
                    if by_member[member].generation == generation:
                        by_member[member].told = True
            case _:
                raise AssertionError(f"unexpected: {effect}")

    def _admit(self, one: Attempt, generation: int) -> None:
        assert one.phase == "joining"
        one.others_wait = False
        one.phase, one.generation, one.round, one.told, one.step = "inside", generation, 0, False, self.checkpoint


@pytest.mark.parametrize(
    ("parallelism", "min_size", "max_size", "kills", "suspicions"),
    [(2, 2, 2, 2, 0), (2, 1, 2, 1, 1), (3, 3, 3, 1, 0), (3, 2, 3, 1, 0), (3, 2, 2, 1, 0), (3, 1, 2, 0, 0)],
)
def test_every_order_of_steps_and_kills_ends_with_the_last_step_saved_once(
    parallelism: int, min_size: int, max_size: int, kills: int, suspicions: int
) -> None:
    """H102 H103 H104 H105 H106: nothing is left waiting, whatever happens in which order."""
    start = Training(GroupConfig(parallelism, min_size, max_size), kills, suspicions)
    seen, todo = {start.key()}, [start]
    ended = 0
    while todo:
        training = todo.pop()
        moves: Sequence[tuple[str, int]] = list(training.moves())
        if not any(what != "kill" and what != "suspect" for what, _ in moves):
            assert all(one.phase == "over" for one in training.attempts), [one.key() for one in training.attempts]
            assert training.checkpoint == STEPS
            ended += 1
        for what, index in moves:
            after = copy.deepcopy(training)
            after.move(what, index)
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
    assert ended
    assert len(seen) > 100


def test_a_member_that_leaves_while_its_call_is_open_gets_an_answer_and_breaks_the_generation() -> None:  # H104
    """Its task did not wait for the answer: the call timed out."""
    for open_question in (Called(A, 1, 0, "barrier()", None), ErrorMet(A, 1)):
        group = a_group_of(A, B)
        assert group.tell(open_question) == []
        assert group.tell(Left(A, 1))[0] == RefuseCall(A, 1, "it has left the group")
        assert group.tell(Called(B, 1, 0, "barrier()", None))[0] == RefuseCall(
            B, 1, "subtask 0 (attempt 0) has left the group"
        )


def test_whose_error_it_was_is_said_as_soon_as_it_can_be_known() -> None:  # H107
    group = a_group_of(A, B, error_grace_s=5.0)
    assert group.tell(ErrorMet(A, 1)) == []
    group.now = 3.0
    assert group.tell(ErrorMet(B, 1), TimePassed()) == [], "the grace of neither is over"
    assert group.pass_time() == [BlameMember(A)]
    assert group.pass_time() == [BlameMember(B)]
    assert group.tell(ErrorMet(A, 7)) == [RefuseCall(A, 7, "its generation is over")]


def test_one_that_ends_alone_is_blamed_for_its_error() -> None:  # H106 H107
    group = a_group_of(A, B)
    group.tell(Left(A, 1), Finished(A), Lost(B, "gone"))
    (alone,) = group.tell(Joined(B1))
    assert isinstance(alone, AdmitAlone)
    assert group.tell(ErrorMet(B1, alone.generation)) == [BlameMember(B1)]
