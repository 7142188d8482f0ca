# SPDX-License-Identifier: Apache-2.0

"""The rendezvous of a group: who is a member, in which generation, and what becomes of each of its calls.

Tasks that work together, as in data-parallel training, form a *group*. Attempts *join*. When enough have joined, the
machine forms a *generation*: a fixed list of members, in the order of their subtasks, which is the order of their
ranks. Members make *calls* (barrier, all_gather, broadcast, save) in *rounds*. A round is answered when every member of
the generation has made its call, with the values of all in the order of the ranks.

A generation *breaks* as soon as it cannot complete another round: a member is lost, its connection is lost, it has
waited too long for the others, it has left with an error, or it has left and another one calls. From that moment no
call of the generation succeeds. Each open call is refused, each member that is still inside is told, and calls that
come later are refused too. A broken generation never recovers. Its members join again, and form the next one together
with the retry of the lost attempt.

When is the next one formed? Never while a member of the current one is inside, whether it is broken or not: a survivor
that still computes will come. Then as soon as ``max_size`` have joined; or, if ``min_size`` have, after some time. As
long as members of the previous one that left without an error have not come back, that time is ``start_wait_s``: all of
them leave to let others in, and a generation without one of them would be followed by another one. Subtasks that have
finished for good cannot come any more, so they lower both bounds, but never below ``min_size``. If fewer subtasks than
that are left, each is admitted *alone*: it gets the last checkpoint and may not call. So a task that is lost after the
last step finds the result of that step and ends.

Copies: of several attempts of a subtask that wait, the first to join is taken. The others wait on.

Members let others in by leaving and joining again. They are told how many of those that wait could be admitted beside
them, not how many wait: nobody is admitted in a group that is full, and no copy of a member's subtask. So each
generation that they form for it is larger than the one before.

An attempt waits for at most ``join_timeout_s``. One that has not said so, because its message is held back, is
forgotten then. An input costs a constant time, except one that forms, completes or breaks a generation: that costs a
constant time for each member.

An error in foreign code may be a consequence of a loss that nobody knows yet. A member asks whose error it was. If the
generation breaks within ``error_grace_s``, it was the loss; otherwise it was the member's own.

What a member passes with ``Joined`` and ``Called`` is opaque here. Values of an earlier generation never reach a later
one: each call names its generation, which is compared first, before anything else.

``handle`` and its effects: a call's answer, or its refusal, comes once for each ``Called`` and ``ErrorMet``. A
``KeepCheckpoint`` comes before the answers of the round that it belongs to, and the refusals of a broken generation
before its ``TellBroken``.

| input | a member inside the current generation | an attempt that waits | any other |
|---|---|---|---|
| ``Joined`` | illegal | illegal | waits |
| ``Left`` | leaves | waits no more | ignored |
| ``Called`` | its call, or refused if broken | refused | refused |
| ``GaveUp`` | the generation breaks | ignored | ignored |
| ``ErrorMet`` | waits, or answered if broken | answered: lost | answered: lost |
| ``Lost`` | the generation breaks | waits no more | a success is revoked, or ignored |
| ``Suspected`` | the generation breaks | ignored | ignored |
| ``Finished`` | leaves | waits no more | cannot come any more |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any

from protocol.errors import LocalProtocolError
from protocol.machine import TimePassed
from protocol.values import value

SAVE = "save"


@value
class GroupConfig:
    """``parallelism``: how many subtasks there are. Times in seconds."""

    parallelism: int
    min_size: int
    max_size: int
    join_wait_s: float = 0.1
    start_wait_s: float = 10.0
    error_grace_s: float = 5.0
    join_timeout_s: float = inf


@value
class Member:
    """One attempt. ``attempt`` is its number as the coordinator sees it, which never comes again."""

    subtask: int
    attempt: int


# --- inputs ---------------------------------------------------------------------------------------------------------


@value
class Joined:
    """An attempt waits for the next generation. ``details`` are passed on to the members of that."""

    member: Member
    details: Any = None


@value
class Left:
    """A member has left its generation; ``error`` says why, if it did so with its own error.

    Generation 0: it has given up waiting for one. It may have become a member meanwhile.
    """

    member: Member
    generation: int
    error: str = ""


@value
class Called:
    """A member makes its call of a round. ``kind`` is the same for all members. Rounds count from 0."""

    member: Member
    generation: int
    round: int
    kind: str
    value: Any = None


@value
class GaveUp:
    """A member waits for its call no longer, although it is still inside."""

    member: Member
    generation: int


@value
class ErrorMet:
    """A member has met an error in foreign code, and asks whether it is a consequence of a loss."""

    member: Member
    generation: int


@value
class Lost:
    """An attempt is over without success, or its success was revoked."""

    member: Member
    reason: str


@value
class Suspected:
    """The connection of an attempt is lost."""

    member: Member


@value
class Finished:
    """An attempt has succeeded."""

    member: Member


GroupInput = Joined | Left | Called | GaveUp | ErrorMet | Lost | Suspected | Finished | TimePassed


# --- effects --------------------------------------------------------------------------------------------------------


@value
class Admit:
    """Begin a generation: tell each member its rank, which is its place in ``members``, and the ``details`` of all."""

    generation: int
    members: tuple[Member, ...]
    details: tuple[Any, ...]


@value
class AdmitAlone:
    """Tell a member whose peers have finished: it gets the last checkpoint and may not call."""

    generation: int
    member: Member
    rank: int
    world_size: int
    details: Any = None


@value
class KeepCheckpoint:
    """Every member has saved this step: it is the last checkpoint from now on."""

    member: Member  # of rank 0, whose blob it is
    step: int


@value
class Answer:
    """Answer each member's call with the values of all, in the order of the ranks."""

    members: tuple[Member, ...]
    values: tuple[Any, ...]
    waiting: int  # how many others that wait could be admitted beside them


@value
class RefuseCall:
    """Refuse the call, or tell the member that its error was the consequence of a loss: the generation is broken."""

    member: Member
    generation: int
    reason: str


@value
class RejectCall:
    """Fail the call as an error of the program."""

    member: Member
    reason: str


@value
class BlameMember:
    """Tell the member that the error was its own."""

    member: Member


@value
class TellBroken:
    """Tell the members that are still inside, whatever they do, that the generation is broken."""

    generation: int
    members: tuple[Member, ...]
    reason: str


GroupEffect = Admit | AdmitAlone | KeepCheckpoint | Answer | RefuseCall | RejectCall | BlameMember | TellBroken


# --- the machine ----------------------------------------------------------------------------------------------------


class _Generation:
    """The members of one generation, and the round that they are in. ``broken`` is the reason, or empty."""

    __slots__ = ("broken", "calls", "inside", "members", "number", "round", "subtasks")

    def __init__(self, number: int, members: tuple[Member, ...]) -> None:
        self.number = number
        self.members = members
        self.subtasks = frozenset(member.subtask for member in members)
        self.inside = set(members)
        self.broken = ""
        self.round = 0
        self.calls: dict[Member, Called] = {}

    def check_invariants(self) -> None:
        assert self.inside <= set(self.members), "a stranger is inside"
        assert self.calls.keys() <= self.inside, "one that is not inside has an open call"
        assert not (self.broken and self.calls), "a broken generation has open calls"
        assert len(self.calls) < len(self.members), "a complete round is not answered"
        assert len(self.subtasks) == len(self.members), "a subtask is in twice"
        assert not (self.calls and len(self.inside) < len(self.members)), "a round can never complete"


class GroupMachine:
    """The rendezvous of one group; see the module. ``generation``: the last number that an earlier machine gave."""

    def __init__(self, config: GroupConfig, generation: int = 0) -> None:
        self.config = config
        self.generation = generation
        self._waiting: dict[Member, float] = {}  # in the order of joining: until when
        self._details: dict[int, dict[Member, Any]] = {}  # those that wait, by subtask, the first to join first
        self._candidates: dict[int, Member] = {}  # who of each subtask can be admitted, in the order of joining
        self._finished: dict[int, set[Member]] = {}  # by subtask
        self._expected: set[Member] = set()  # left the previous generation without an error
        self._current: _Generation | None = None
        self._alone: dict[Member, int] = {}
        self._errors: dict[Member, float] = {}  # until when to wait for news of a loss
        self._enough_since: float | None = None  # when ``min_size`` could be admitted
        self._form_at: float | None = None

    @property
    def waiting(self) -> int:
        """How many of those that wait could be admitted beside the members of the current generation."""
        current = self._current
        assert current is not None, "its members ask"
        free = max(0, self.config.max_size - len(current.members))
        return sum(1 for _ in islice((one for one in self._candidates if one not in current.subtasks), free))

    def is_first(self, member: Member, generation: int) -> bool:
        """Whether it has rank 0 in this generation, is inside, and can still make a call."""
        current = self._current
        return (
            current is not None
            and not current.broken
            and (current.number, current.members[0]) == (generation, member)
            and member in current.inside
        )

    def next_deadline(self) -> float | None:
        deadlines = (next(iter(self._errors.values()), None), self._form_at)  # the first error is the first to be over
        return min((one for one in deadlines if one is not None), default=None)

    def handle(self, input: GroupInput, now: float) -> Sequence[GroupEffect]:
        self._refuse_illegal(input, now)
        effects: list[GroupEffect] = []
        self._end_waits(now, effects)
        match input:
            case Joined(member, details):
                self._join(member, details, now)
            case Left():
                self._hear_leave(input, effects)
            case Called():
                self._call(input, effects)
            case GaveUp(member, generation):
                self._give_up(member, generation, effects)
            case ErrorMet(member, generation):
                self._meet_error(member, generation, now, effects)
            case Lost(member, reason):
                self._lose(member, reason, effects)
            case Suspected(member):
                if self._current is not None and member in self._current.inside:
                    self._break(f"{_named(member)} has lost its connection", effects)
            case Finished(member):
                self._lose(member, "", effects)
                self._finished.setdefault(member.subtask, set()).add(member)
                self._choose(member.subtask)
            case TimePassed():
                self._end_grace(now, effects)
        self._form(now, effects)
        return effects

    # --- one input ----------------------------------------------------------------------------------------------------

    def _refuse_illegal(self, input: GroupInput, now: float) -> None:
        """Raise ``LocalProtocolError`` before anything has changed."""
        current = self._current
        match input:
            case Joined(member):
                if self._waiting.get(member, -inf) >= now or (current is not None and member in current.inside):
                    raise LocalProtocolError(f"{_named(member)} joined twice")
            case Called(member, generation, round_) if current is not None and self._is_inside(member, generation):
                if not current.broken and (round_ != current.round or member in current.calls):
                    now_in = f"a group in round {current.round}"
                    raise LocalProtocolError(f"{_named(member)} called in round {round_} of {now_in}, or called twice")

    def _join(self, member: Member, details: Any, now: float) -> None:
        self._alone.pop(member, None)
        self._expected.discard(member)
        self._waiting[member] = now + self.config.join_timeout_s
        self._details.setdefault(member.subtask, {})[member] = details
        self._choose(member.subtask)

    def _end_waits(self, now: float, effects: list[GroupEffect]) -> None:
        """Forget those that have waited for too long. They know it, and have perhaps not been able to say so."""
        while self._waiting:
            member, until = next(iter(self._waiting.items()))
            if until >= now:
                return
            self._wait_no_more(member)
            effects.append(RefuseCall(member, 0, "it has waited too long for the others"))

    def _wait_no_more(self, member: Member) -> Any:
        """Return its details; ``_ABSENT`` if it does not wait."""
        if self._waiting.pop(member, None) is None:
            return _ABSENT
        of_subtask = self._details[member.subtask]
        details = of_subtask.pop(member)
        if not of_subtask:
            del self._details[member.subtask]
        self._choose(member.subtask)
        return details

    def _choose(self, subtask: int) -> None:
        """Who of this subtask can be admitted: the first to join, unless the subtask has finished."""
        first = None if subtask in self._finished else next(iter(self._details.get(subtask, ())), None)
        if first != self._candidates.get(subtask):
            self._candidates.pop(subtask, None)
            if first is not None:
                self._candidates[subtask] = first

    def _hear_leave(self, left: Left, effects: list[GroupEffect]) -> None:
        member, generation = left.member, left.generation
        if self._wait_no_more(member) is not _ABSENT:
            effects.append(RefuseCall(member, generation, "it has left the group"))
        elif self._is_inside(member, generation):
            if not left.error:
                self._expected.add(member)
            self._leave(member, f"{_named(member)} left with an error: {left.error}" if left.error else "", effects)

    def _leave(self, member: Member, reason: str, effects: list[GroupEffect]) -> None:
        generation = self._current
        assert generation is not None
        generation.inside.discard(member)
        open_call = generation.calls.pop(member, None) is not None
        if self._errors.pop(member, None) is not None or open_call:  # the task has not waited for the answer
            effects.append(RefuseCall(member, generation.number, "it has left the group"))
        if not reason and (generation.calls or self._errors):
            reason = f"{_named(member)} has left the group"
        if reason:
            self._break(reason, effects)

    def _lose(self, member: Member, reason: str, effects: list[GroupEffect]) -> None:
        finished = self._finished.get(member.subtask, set())
        finished.discard(member)
        if not finished:
            self._finished.pop(member.subtask, None)
        self._wait_no_more(member)
        self._choose(member.subtask)
        self._alone.pop(member, None)
        self._expected.discard(member)
        generation = self._current
        if generation is not None and member in generation.inside:
            self._errors.pop(member, None)  # nobody waits for these any more
            generation.calls.pop(member, None)
            self._leave(member, f"{_named(member)} is lost: {reason}" if reason else "", effects)

    def _call(self, call: Called, effects: list[GroupEffect]) -> None:
        member, generation = call.member, self._current
        if self._alone.get(member) == call.generation:
            effects.append(RejectCall(member, _ALONE))
        elif generation is None or not self._is_inside(member, call.generation):
            effects.append(RefuseCall(member, call.generation, "its generation is over"))
        elif generation.broken:
            effects.append(RefuseCall(member, generation.number, generation.broken))
        elif len(generation.inside) < len(generation.members):
            gone = next(one for one in generation.members if one not in generation.inside)
            effects.append(RefuseCall(member, generation.number, f"{_named(gone)} has left the group"))
            self._break(f"{_named(gone)} has left the group", effects)
        else:
            generation.calls[member] = call
            if len(generation.calls) == len(generation.members):
                self._complete(generation, effects)

    def _complete(self, generation: _Generation, effects: list[GroupEffect]) -> None:
        calls = [generation.calls[member] for member in generation.members]
        generation.calls = {}
        generation.round += 1
        odd = next((call for call in calls if call.kind != calls[0].kind or _step(call) != _step(calls[0])), None)
        if odd is not None:
            text = f"rank 0 calls {_described(calls[0])}, {_named(odd.member)} calls {_described(odd)}"
            text += ": all members must make the same calls in the same order"
            effects += [RejectCall(member, text) for member in generation.members]
            return
        if calls[0].kind == SAVE:
            effects.append(KeepCheckpoint(generation.members[0], calls[0].value))
        effects.append(Answer(generation.members, tuple(call.value for call in calls), self.waiting))

    def _give_up(self, member: Member, generation: int, effects: list[GroupEffect]) -> None:
        if self._is_inside(member, generation):
            self._break(f"{_named(member)} has given up waiting for the others", effects)

    def _meet_error(self, member: Member, generation: int, now: float, effects: list[GroupEffect]) -> None:
        current = self._current
        if self._alone.get(member) == generation:
            effects.append(BlameMember(member))
        elif current is None or not self._is_inside(member, generation):
            effects.append(RefuseCall(member, generation, "its generation is over"))
        elif current.broken:
            effects.append(RefuseCall(member, generation, current.broken))
        elif len(current.inside) < len(current.members):
            effects.append(RefuseCall(member, generation, "another member has left the group"))
            self._break("another member has left the group", effects)
        else:
            self._errors[member] = now + self.config.error_grace_s

    def _end_grace(self, now: float, effects: list[GroupEffect]) -> None:
        while self._errors:
            member, until = next(iter(self._errors.items()))
            if until > now:
                return
            del self._errors[member]
            effects.append(BlameMember(member))

    # --- generations --------------------------------------------------------------------------------------------------

    def _is_inside(self, member: Member, generation: int) -> bool:
        current = self._current
        return current is not None and generation in (0, current.number) and member in current.inside

    def _break(self, reason: str, effects: list[GroupEffect]) -> None:
        generation = self._current
        assert generation is not None
        if generation.broken:
            return
        generation.broken = reason
        waiting = [one for one in generation.members if one in generation.calls or one in self._errors]
        effects += [RefuseCall(member, generation.number, reason) for member in waiting]
        generation.calls = {}
        self._errors = {}
        inside = tuple(member for member in generation.members if member in generation.inside)
        if inside:
            effects.append(TellBroken(generation.number, inside, reason))

    def _form(self, now: float, effects: list[GroupEffect]) -> None:
        config, candidates = self.config, len(self._candidates)
        left = config.parallelism - len(self._finished)
        self._form_at = None
        if self._current is not None and self._current.inside:
            self._enough_since = None
        elif self._finished and left < config.min_size:
            self._enough_since = None
            self._admit_alone(effects)
        elif candidates < config.min_size:
            self._enough_since = None
        else:
            if self._enough_since is None:
                self._enough_since = now
            due = self._enough_since + self._patience_s()
            if candidates >= min(config.max_size, left) or due <= now:
                self._admit(effects)
            else:
                self._form_at = due

    def _patience_s(self) -> float:
        """How long to wait for more than ``min_size``."""
        config = self.config
        if self._current is None:
            return config.start_wait_s
        return max(config.join_wait_s, config.start_wait_s) if self._expected else config.join_wait_s

    def _admit(self, effects: list[GroupEffect]) -> None:
        self._expected.clear()
        chosen = list(islice(self._candidates.values(), self.config.max_size))  # the first to join
        members = tuple(sorted(chosen, key=lambda member: member.subtask))
        self.generation += 1
        self._current = _Generation(self.generation, members)
        details = tuple(self._wait_no_more(member) for member in members)
        effects.append(Admit(self.generation, members, details))

    def _admit_alone(self, effects: list[GroupEffect]) -> None:
        size = min(self.config.max_size, self.config.parallelism)
        while self._candidates:
            subtask, member = next(iter(self._candidates.items()))
            details = self._wait_no_more(member)
            self.generation += 1
            self._alone[member] = self.generation
            effects.append(AdmitAlone(self.generation, member, min(subtask, size - 1), size, details))

    def check_invariants(self) -> None:
        current = self._current
        inside = set() if current is None else current.inside
        waiting = {member for of_subtask in self._details.values() for member in of_subtask}
        assert waiting == self._waiting.keys(), "one that waits is not in both lists"
        assert list(self._waiting.values()) == sorted(self._waiting.values()), (
            "waits do not end in the order of joining"
        )
        firsts = {subtask: next(iter(of_subtask)) for subtask, of_subtask in self._details.items()}
        assert self._candidates == {one: firsts[one] for one in firsts if one not in self._finished}, "wrong candidates"
        assert all(self._finished.values()), "a subtask counts as finished without an attempt that has"
        assert not self._expected & (inside | waiting), "one that is back is still expected"
        assert not inside & self._waiting.keys(), "a member waits for the next generation"
        assert not self._alone.keys() & (inside | self._waiting.keys()), "one that is admitted alone is elsewhere too"
        assert self._errors.keys() <= inside, "one that is not a member waits for the judgement of an error"
        if current is not None:
            current.check_invariants()
            assert not (current.broken and self._errors), "a broken generation has open questions"


_ABSENT = object()
_ALONE = (
    "the other tasks of the group have finished, so this one cannot call them any more. Save the last step with "
    "save(step, blob) before the group is left: a task that is lost after that finds it in `checkpoint`, and ends "
    "without calls"
)


def _named(member: Member) -> str:
    return f"subtask {member.subtask} (attempt {member.attempt})"


def _step(call: Called) -> Any:
    return call.value if call.kind == SAVE else None


def _described(call: Called) -> str:
    return f"save({call.value})" if call.kind == SAVE else call.kind
