# SPDX-License-Identifier: Apache-2.0

"""An error in the actors of one operator, which no user's code has raised, ends that operator and no other."""

# H165

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from operator import attrgetter
from typing import Any, cast

import anyio
import pytest

from actors import ActorError, Reply
from actors.coordination.engine.barrier_tracker import BarrierTrackerActor
from actors.coordination.engine.coordinator import CoordinatorActor
from actors.coordination.engine.gateway import GatewayActor
from actors.coordination.engine.messages import RequestCheckpoint
from headgate.testing import RecordingCoordinator
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.errors import HeadgateError
from protocol.gateway.machine import GatewayMachine
from protocol.restart import DEFAULT_RESTART
from protocol.wire.messages import RefusalCode
from spark_bridge.common.errors import OperatorBroken
from spark_bridge.driver.operators import Operators
from spark_bridge.driver.restarts import Restarter
from tests.actors.coordination.operator_world import Answer
from tests.conformance.application import OPERATOR, Application, SparkTask, application

OTHER = "others"

PLACES: dict[str, tuple[type, str]] = {
    "the tracker's machine": (BarrierTracker, "handle"),
    "the tracker's deadlines": (BarrierTracker, "next_deadline"),
    "the tracker": (BarrierTrackerActor, "handle"),
    "the coordinator": (CoordinatorActor, "receive"),
    "a gateway's start": (GatewayActor, "started"),
    "a gateway's machine": (GatewayMachine, "handle"),
    "a gateway": (GatewayActor, "handle"),
}


class Bug(Exception):
    """Stands for an error inside Headgate."""


class Breaks:
    """Lets the nth call of a method raise in the actors of one operator."""

    def __init__(self, patch: pytest.MonkeyPatch, target: type, method: str, nth: int) -> None:
        self.raised = False
        self.armed = True
        original = getattr(target, method)
        calls = 0

        def broken(one: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if self.armed and _operator_of(one) == OPERATOR:
                calls += 1
                if calls == nth:
                    self.raised = True
                    raise Bug(f"{target.__name__}.{method}")
            return original(one, *args, **kwargs)

        patch.setattr(target, method, broken)


def _operator_of(one: Any) -> str:
    for path in (
        "operator_id",
        "_config.operator_id",
        "attempt.operator_id",
        "_attempt.operator_id",
        "_under_way.operator_id",
    ):
        with suppress(AttributeError):
            return str(attrgetter(path)(one))
    raise AssertionError(f"of which operator is {one!r}?")


async def play(app: Application, coordinator: RecordingCoordinator) -> None:
    """A run of the operator with something of everything, as far as it gets."""
    await app.coordinate(coordinator)
    tasks = await app.running()
    with suppress(AssertionError, AttributeError, HeadgateError):  # those that are not registered any more
        tasks[0].send("up")
        tasks[1].request("question")
        await app.settle()
        await coordinator.gateways[0].send_event("down")
        await app.settle()
    await app.checkpoint()
    with suppress(ActorError, HeadgateError):
        await app.request("from outside")
    await app.kit.advance(1.0)
    await app.settle()


class Talking(RecordingCoordinator):
    """Keeps the gateways of its run."""

    def __init__(self) -> None:
        super().__init__(handle_request=_answer, handle_client_request=_answer)
        self.gateways: dict[int, Any] = {}

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        self.gateways[subtask] = gateway


async def _answer(*args: Any) -> str:
    return "answer"


async def check_others(app: Application, tasks: list[SparkTask], coordinator: RecordingCoordinator, news: str) -> None:
    """The other operator works: events in both directions, a request, and its tasks live."""
    tasks[0].send(news)
    await app.settle()
    assert ("handle_event_from_operator", 0, 0, news) in coordinator.calls
    assert await app.request("still there?", OTHER) == "answer"
    assert all(task.running and not task.ended for task in tasks)


@pytest.mark.parametrize("place", PLACES)
async def test_an_error_of_headgate_in_one_operator_fails_its_job_and_leaves_the_others_alone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each message that the operator's actors handle, one after the other."""
    target, method = PLACES[place]
    for nth in range(1, 200):
        with monkeypatch.context() as patch:
            breaks = Breaks(patch, target, method, nth)
            if not await _breaks_alone(breaks):
                assert nth > 2, "the place was hardly reached"
                return
    raise AssertionError("the scenario never ends")


async def _breaks_alone(breaks: Breaks) -> bool:
    """Run the scenario in which this breaks; False if it was never reached."""
    async with application() as app:
        others = RecordingCoordinator(handle_client_request=_answer)
        await app.coordinate(others, OTHER)
        other_tasks = await app.running(operator_id=OTHER)
        await check_others(app, other_tasks, others, "before")
        started = False
        try:
            await play(app, Talking())
            started = True
        except OperatorBroken as error:
            check_text(error)
        if not breaks.raised:
            return False
        await check_others(app, other_tasks, others, "after")
        breaks.armed = False
        if started:
            await _check_refusals(app)
            await app.release()
        await app.coordinate(Talking())
        assert all(task.registered is not None and not task.ended for task in await app.running())
        await check_others(app, other_tasks, others, "at the end")
        return True


def check_text(error: BaseException) -> None:
    assert f"operator {OPERATOR!r} has ended" in str(error)
    assert "Bug: " in str(error)
    assert "a bug of Headgate, not of your program" in str(error)
    assert "replace=True" in str(error)


async def _check_refusals(app: Application) -> None:
    assert app.cancelled == [2]
    assert not any(task.running for task in app.tasks.values() if task.start.stage_id == 20)
    with pytest.raises(OperatorBroken) as found:
        app.operators.find(OPERATOR)
    check_text(found.value)
    assert isinstance(found.value.__cause__, Bug)
    assert list(app.operators.observed) == [OTHER], "a status asks no actor that is gone"
    settled = await app.kit.drive(app.operators.settle_one(OPERATOR, 10.0))
    check_text(RuntimeError(settled.failed))
    for task in await app.running():
        assert task.refused is not None
        assert task.refused.code is RefusalCode.COORDINATOR_FAILED
        check_text(RuntimeError(task.refused.message))


CALLS: dict[str, Callable[[Operators], Coroutine[Any, Any, Any]]] = {
    "a request": lambda operators: operators.request(OPERATOR, "question", timeout_s=1.0),
    "a checkpoint": lambda operators: operators.checkpoint(OPERATOR, timeout_s=1.0),
    "the end of its runs": lambda operators: operators.settle_one(OPERATOR, 1.0),
    "its release": lambda operators: operators.remove(OPERATOR),
}


def poison(app: Application) -> None:
    app.operators.find(OPERATOR).tracker_ref.tell(RequestCheckpoint(cast("Reply[int]", Answer())))


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_meets_the_end_of_its_operator_says_why_or_does_what_it_has_to(
    call: str, by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # H165: whether it has broken the operator itself, and the one who asks or the bridge may learn of it first
    for seed in range(20):
        async with application(seed=seed) as app:
            await app.coordinate(Talking())
            with monkeypatch.context() as patch:
                breaks = Breaks(patch, BarrierTrackerActor, "handle", 1)
                if not by_itself:
                    poison(app)
                try:
                    done = await app.kit.drive(CALLS[call](app.operators))
                except OperatorBroken as error:
                    check_text(error)
                    _check_cause(error)
                else:
                    assert done is None or "Bug: " in done.failed
            assert breaks.raised
            if call == "its release":
                await app.coordinate(Talking())


def _check_cause(error: BaseException) -> None:
    assert isinstance(error.__cause__, Bug)


@pytest.mark.parametrize("call", ["a request", "a checkpoint"])
async def test_a_call_that_is_open_when_its_operator_breaks_says_why(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # H165
    async def break_and_say_nothing(*_: Any) -> None:
        breaks.armed = True
        poison(app)
        await anyio.sleep_forever()

    for seed in range(20):
        async with application(seed=seed) as app:
            silent = {"handle_client_request": break_and_say_nothing, "checkpoint_coordinator": break_and_say_nothing}
            await app.coordinate(RecordingCoordinator(**silent))
            with monkeypatch.context() as patch:
                breaks = Breaks(patch, BarrierTrackerActor, "handle", 1)
                breaks.armed = False
                with pytest.raises(OperatorBroken) as raised:
                    await app.kit.drive(CALLS[call](app.operators))
            check_text(raised.value)
            _check_cause(raised.value)


class BrokenRuns:
    """The runs of an action whose operator broke."""

    fenced = None
    ran = True
    rescaled = None

    def __init__(self) -> None:
        self.failures: tuple[int, BaseException | None] = (0, None)

    def begin(self) -> str:
        return "action"

    def end(self) -> None:
        """Nothing more is asked."""

    async def settle(self) -> str:
        return ""


async def test_an_action_is_not_called_again_after_its_operator_broke() -> None:
    runs = BrokenRuns()
    restarter = Restarter(runs, DEFAULT_RESTART)
    await restarter.begin()
    error = OperatorBroken.because(OPERATOR, Bug("here"))
    runs.failures = (1, error)
    with pytest.raises(OperatorBroken) as raised:
        await restarter.failed(RuntimeError("Job 7 cancelled"))
    assert raised.value is error
    assert isinstance(raised.value.__cause__, Bug)
