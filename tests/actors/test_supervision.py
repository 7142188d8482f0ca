# SPDX-License-Identifier: Apache-2.0

"""The supervision decision as a table, and how actors act on it."""

# ruff: noqa: PT012 - the exit of the whole `async with` raises

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import (
    Actor,
    ActorContext,
    ActorRef,
    ActorStopped,
    ChildFailed,
    DeadLetterReason,
    Decision,
    Directive,
    HandlerCancelled,
    Supervision,
    Terminated,
)
from actors.supervision import Failure, decide
from actors.testing import DeterministicKit, TestProbe, VirtualClock, deterministic_system, settle
from tests.actors.actors_under_test import (
    Add,
    Counter,
    CounterMessage,
    Diary,
    Explode,
    ExplodeAfter,
    GetTotal,
    collect_dead_letters,
    running_system,
)


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("several", errors)


RESTART = Supervision(Directive.RESTART, max_restarts=2, within_s=10.0, backoff_s=1.0, backoff_max_s=3.0)
UNLIMITED = Supervision(Directive.RESTART, max_restarts=None, backoff_s=1.0, backoff_max_s=3.0)
RULES = Supervision(
    Directive.STOP, rules=((KeyError, Directive.RESUME), (LookupError, Directive.RESTART)), max_restarts=1
)


@pytest.mark.parametrize(
    ("policy", "history", "failure", "now", "expected"),
    [
        pytest.param(Supervision(), (), Failure(KeyError()), 0.0, Decision(Directive.ESCALATE), id="default"),
        pytest.param(RULES, (), Failure(OSError()), 0.0, Decision(Directive.STOP), id="no rule fits"),
        pytest.param(RULES, (), Failure(KeyError()), 0.0, Decision(Directive.RESUME), id="first rule"),
        pytest.param(
            RULES, (), Failure(group(KeyError(), group(KeyError()))), 0.0, Decision(Directive.RESUME), id="in a group"
        ),
        pytest.param(
            RULES, (), Failure(group(KeyError(), IndexError())), 0.0, Decision(Directive.RESTART), id="the strictest"
        ),
        pytest.param(
            RULES, (), Failure(group(KeyError(), OSError())), 0.0, Decision(Directive.STOP), id="one without a rule"
        ),
        pytest.param(
            Supervision(rules=((Exception, Directive.STOP), (ExceptionGroup, Directive.RESUME))),
            (),
            Failure(group(KeyError())),
            0.0,
            Decision(Directive.RESUME),
            id="a rule for groups",
        ),
        pytest.param(RULES, (), Failure(IndexError()), 0.0, Decision(Directive.RESTART), id="subclass"),
        pytest.param(
            RULES, (), Failure(KeyError(), while_starting=True), 0.0, Decision(Directive.RESTART), id="no resume yet"
        ),
        pytest.param(
            RULES,
            (0.0,),
            Failure(KeyError(), while_starting=True),
            1.0,
            Decision(Directive.ESCALATE, exhausted=True),
            id="a resume that became a restart counts",
        ),
        pytest.param(RESTART, (), Failure(OSError()), 5.0, Decision(Directive.RESTART, 1.0), id="first"),
        pytest.param(RESTART, (5.0,), Failure(OSError()), 6.0, Decision(Directive.RESTART, 2.0), id="second"),
        pytest.param(
            RESTART,
            (5.0, 6.0),
            Failure(OSError()),
            7.0,
            Decision(Directive.ESCALATE, exhausted=True),
            id="too many",
        ),
        pytest.param(
            RESTART, (5.0, 6.0), Failure(OSError()), 15.0, Decision(Directive.RESTART, 2.0), id="window slides"
        ),
        pytest.param(
            UNLIMITED, tuple(range(50)), Failure(OSError()), 50.0, Decision(Directive.RESTART, 3.0), id="ceiling"
        ),
    ],
)
def test_decision_for_each_policy_and_history(
    policy: Supervision, history: tuple[float, ...], failure: Failure, now: float, expected: Decision
) -> None:
    assert decide(policy, history, failure, now) == expected


@given(
    max_restarts=st.integers(0, 5),
    within_s=st.floats(0.5, 20.0),
    gaps=st.lists(st.floats(0.0, 10.0), max_size=30),
)
def test_no_window_has_more_restarts_than_allowed(max_restarts: int, within_s: float, gaps: list[float]) -> None:
    policy = Supervision(Directive.RESTART, max_restarts=max_restarts, within_s=within_s)
    history: tuple[float, ...] = ()
    restarts: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        decision = decide(policy, history, Failure(OSError()), now)
        history = decision.history
        if decision.directive is Directive.RESTART:
            restarts.append(now)
        assert sum(1 for at in restarts if at > now - within_s) <= max_restarts
        assert len(history) <= max_restarts


def test_history_stays_short_without_a_limit() -> None:
    history: tuple[float, ...] = ()
    for now in range(1000):
        history = decide(
            Supervision(Directive.RESTART, max_restarts=None, within_s=None), history, Failure(OSError()), now
        ).history
    assert len(history) <= 64


@pytest.mark.parametrize(
    "build",
    [
        lambda: Supervision(max_restarts=-1),
        lambda: Supervision(within_s=0.0),
        lambda: Supervision(backoff_s=-1.0),
        lambda: Supervision(backoff_factor=0.5),
        lambda: Supervision(when_exhausted=Directive.RESTART),
    ],
)
def test_invalid_policy_is_refused(build: Callable[[], Supervision]) -> None:
    with pytest.raises(ValueError, match="must"):
        build()


async def test_resume_keeps_the_state_and_skips_the_message() -> None:
    diary = Diary()
    async with running_system() as system:
        letters = collect_dead_letters(system)
        counter = system.spawn(lambda: Counter(diary), supervision=Supervision(Directive.RESUME))
        counter.tell(Add(1))
        counter.tell(Explode(KeyError("boom")))
        counter.tell(Add(2))
        assert await counter.ask(GetTotal, timeout_s=60.0) == 3
        assert diary.lines == ["started"]
    assert [letter.reason for letter in letters] == [DeadLetterReason.HANDLER_FAILED]


async def test_restart_builds_a_new_instance_and_keeps_queued_messages() -> None:
    diary, cause = Diary(), KeyError("boom")
    async with running_system() as system:
        counter = system.spawn(lambda: Counter(diary), supervision=Supervision(Directive.RESTART))
        counter.tell(Add(1))
        counter.tell(Explode(cause))
        counter.tell(Add(2))
        assert await counter.ask(GetTotal, timeout_s=60.0) == 2
        assert counter.statistics().restarts == 1
        assert diary.lines == ["started", "stopped", "started"]
        assert diary.causes == [cause]
    assert diary.causes == [cause, None]


async def test_restart_waits_for_its_back_off() -> None:
    diary = Diary()
    async with deterministic_system() as kit:
        counter = kit.system.spawn(lambda: Counter(diary), supervision=RESTART)
        counter.tell(Explode(KeyError("boom")))
        counter.tell(Add(1))
        await kit.advance(0.9)
        assert diary.lines == ["started", "stopped"]
        assert diary.added == []
        await kit.advance(0.1)
        assert diary.lines == ["started", "stopped", "started"]
        assert diary.added == [1]


async def test_stop_ends_a_back_off() -> None:
    diary = Diary()
    async with running_system(clock=VirtualClock()) as system:
        counter = system.spawn(lambda: Counter(diary), supervision=RESTART)
        counter.tell(Explode(KeyError("boom")))
        await settle()
        assert diary.lines == ["started", "stopped"]
        await system.stop(counter)
        assert diary.lines == ["started", "stopped"]


async def test_too_many_restarts_escalate_with_the_last_cause() -> None:
    with pytest.raises(KeyError, match="2"):
        async with running_system() as system:
            counter = system.spawn(Counter, supervision=Supervision(Directive.RESTART, max_restarts=2))
            for n in range(3):
                counter.tell(Explode(KeyError(n)))
            await asyncio.Event().wait()


class StartsAtThird(Actor[GetTotal]):
    built = 0

    async def started(self, context: ActorContext[GetTotal]) -> None:
        type(self).built += 1
        if type(self).built < 3:
            raise ConnectionError(f"start {type(self).built}")

    async def receive(self, context: ActorContext[GetTotal], message: GetTotal) -> None:
        message.reply_to.answer(type(self).built)


@pytest.mark.parametrize("directive", [Directive.RESTART, Directive.RESUME])
async def test_failure_while_starting_is_supervised_too(directive: Directive) -> None:
    """An instance that has not started handles nothing, so there is none to resume."""
    StartsAtThird.built = 0
    async with running_system() as system:
        starter = system.spawn(StartsAtThird, supervision=Supervision(directive))
        assert await starter.ask(GetTotal, timeout_s=60.0) == 3


async def test_factory_that_raises_fails_the_actor() -> None:
    def factory() -> Counter:
        raise ImportError("no such thing")

    with pytest.raises(ImportError, match="no such thing"):
        async with running_system() as system:
            system.spawn(factory)
            await asyncio.Event().wait()


class Parent(Actor[object]):
    """Spawns counters with a policy and passes its signals on to a probe."""

    def __init__(
        self, probe: ActorRef[object], policy: Supervision, diaries: list[Diary], refs: list[ActorRef[CounterMessage]]
    ) -> None:
        self.probe, self.policy, self.diaries, self.refs = probe, policy, diaries, refs

    async def started(self, context: ActorContext[object]) -> None:
        self.refs.clear()
        for n, diary in enumerate(self.diaries):
            ref = context.spawn(lambda diary=diary: Counter(diary), name=str(n), supervision=self.policy)  # type: ignore[misc]
            context.watch(ref)
            self.refs.append(ref)

    async def receive(self, context: ActorContext[object], message: object) -> None:
        pass

    async def signal(self, context: ActorContext[object], signal: object) -> None:
        if isinstance(signal, ChildFailed | Terminated):
            self.probe.tell(signal)


def a_family(
    kit: DeterministicKit, policy: Supervision, own: Supervision | None = None
) -> tuple[TestProbe[object], list[Diary], list[ActorRef[CounterMessage]], ActorRef[object]]:
    probe: TestProbe[object] = kit.probe("probe")
    diaries = [Diary(), Diary(), Diary()]
    refs: list[ActorRef[CounterMessage]] = []
    parent = kit.system.spawn(
        lambda: Parent(probe.ref, policy, diaries, refs), name="parent", supervision=own or Supervision()
    )
    return probe, diaries, refs, parent


async def test_restart_leaves_siblings_alone() -> None:
    async with deterministic_system() as kit:
        _, diaries, refs, _ = a_family(kit, Supervision(Directive.RESTART))
        await kit.run_until_idle()
        refs[1].tell(Explode(KeyError("boom")))
        await kit.run_until_idle()
        assert [ref.statistics().restarts for ref in refs] == [0, 1, 0]
        assert [len(diary.lines) for diary in diaries] == [1, 3, 1]


async def test_parent_gets_signals_of_a_failure_and_of_the_end() -> None:
    async with deterministic_system() as kit:
        cause = KeyError("boom")
        probe, _, refs, _ = a_family(kit, Supervision(Directive.STOP))
        await kit.run_until_idle()
        refs[2].tell(Explode(cause))
        failed = await probe.expect(ChildFailed)
        assert (failed.ref, failed.cause, failed.decision.directive) == (refs[2], cause, Directive.STOP)
        assert await probe.expect(Terminated) == Terminated(refs[2], cause)


async def test_escalated_failure_restarts_the_parent_and_its_children() -> None:
    async with deterministic_system() as kit:
        _, diaries, refs, parent = a_family(kit, Supervision(), Supervision(Directive.RESTART))
        await kit.run_until_idle()
        old = list(refs)
        refs[0].tell(Explode(KeyError("boom")))
        await kit.run_until_idle()
        assert parent.statistics().restarts == 1
        assert [ref.is_alive for ref in old] == [False] * 3
        assert [ref.is_alive for ref in refs] == [True] * 3
        assert [diary.lines for diary in diaries] == [["started", "stopped", "started"]] * 3


async def test_unhandled_failure_is_raised_by_the_system() -> None:
    cause = KeyError("boom")
    diary = Diary()
    with pytest.raises(KeyError) as raised:
        async with running_system() as system:
            system.spawn(lambda: Counter(diary))
            system.spawn(Counter).tell(Explode(cause))
            await asyncio.Event().wait()  # the body is cancelled
    assert raised.value is cause
    assert diary.lines == ["started", "stopped"]


async def test_first_of_several_failures_is_raised() -> None:
    with pytest.raises(KeyError, match="first"):
        async with running_system() as system:
            first, second = system.spawn(Counter), system.spawn(Counter)
            first.tell(Explode(KeyError("first")))
            second.tell(Explode(KeyError("second")))
            await asyncio.Event().wait()


async def test_earlier_one_of_a_failure_and_a_body_exception_is_raised() -> None:
    with pytest.raises(KeyError):
        async with running_system() as system:
            system.spawn(Counter).tell(Explode(KeyError("actor")))
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("body")
    gate = asyncio.Event()
    with pytest.raises(ValueError, match="body"):
        async with running_system() as system:
            system.spawn(Counter).tell(ExplodeAfter(gate, KeyError("actor")))
            await settle()
            gate.set()
            raise ValueError("body")


async def test_cancellation_that_leaves_a_handler_is_a_failure() -> None:
    class Careless(Actor[object]):
        async def receive(self, context: ActorContext[object], message: object) -> None:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    with pytest.raises(HandlerCancelled) as raised:
        async with running_system() as system:
            system.spawn(Careless, name="careless").tell("go")
            await asyncio.Event().wait()
    assert raised.value.actor == "careless"
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)


async def test_children_that_escalate_together_restart_their_parent_once() -> None:
    async with deterministic_system(seed=3) as kit:
        own = Supervision(Directive.RESTART, backoff_s=1.0)
        _, _, refs, parent = a_family(kit, Supervision(), own)
        await kit.run_until_idle()
        for ref in refs:
            ref.tell(Explode(KeyError("boom")))
        await kit.advance(10.0)
        assert parent.statistics().restarts == 1


async def test_ending_instance_can_start_nothing_for_the_next() -> None:
    refused: list[Exception] = []

    class Hopeful(Counter):
        async def stopped(self, context: ActorContext[CounterMessage], cause: BaseException | None) -> None:
            try:
                context.spawn(Counter)
            except ActorStopped as error:
                refused.append(error)

    async with running_system() as system:
        hopeful = system.spawn(Hopeful, supervision=Supervision(Directive.RESTART))
        hopeful.tell(Explode(KeyError("boom")))
        await hopeful.ask(GetTotal, timeout_s=60.0)
        assert len(refused) == 1
        assert system.actor_count == 1


@pytest.mark.parametrize("seed", range(30))
async def test_restarts_neither_lose_nor_double_messages_in_any_order(seed: int) -> None:
    """Every message is handled once, or is the one that failed, whatever the order of delivery."""
    diary = Diary()
    async with deterministic_system(seed=seed) as kit:
        supervision = Supervision(Directive.RESTART, max_restarts=None, backoff_s=0.5)
        counter = kit.system.spawn(lambda: Counter(diary), supervision=supervision)
        other = kit.system.spawn(Counter)
        for n in range(20):
            counter.tell(Explode(KeyError(n)) if n % 7 == 3 else Add(n))
            other.tell(Add(n))
            if n % 5 == seed % 5:
                await kit.step()
        await kit.advance(60.0)
    assert diary.added == [n for n in range(20) if n % 7 != 3]
