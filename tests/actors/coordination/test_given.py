# SPDX-License-Identifier: Apache-2.0

"""A coordinator is given as an instance that resets itself, or as a class or factory that is called again (H68)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from actors.coordination import OperatorCoordinator, RecreateOnReset, ResetNotSupported
from actors.coordination.host.given import built_anew_or_kept
from protocol.attempts import GlobalFailureRaised
from tests.actors.coordination.operator_world import RecordingCoordinator, World, running_operator, running_tasks


class Forgetless(OperatorCoordinator):
    """Does not define a reset, and remembers the attempts that it met."""

    def __init__(self) -> None:
        self.met: list[int] = []

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        self.met.append(gateway.attempt.attempt)


async def next_run(world: World) -> None:
    world.end_run()
    world.reset("a new run")
    await world.settle()


async def test_an_instance_that_cannot_forget_fails_its_second_run_and_not_its_first() -> None:  # H68
    async with running_tasks(1, Forgetless()) as (world, _):
        assert not world.failures
        for _ in range(2):
            await next_run(world)
            failure = world.failures.pop()
            assert isinstance(failure, ResetNotSupported)
            assert "coordinate('words', Forgetless, ...)" in str(failure)
            assert "override reset_to_checkpoint in Forgetless" in str(failure)
            assert world.reports.pop() == GlobalFailureRaised("words", str(failure))
        assert not world.failures


async def test_an_instance_that_forgets_serves_each_run() -> None:  # H68
    async with running_tasks(1) as (world, _):
        await next_run(world)
        await world.running(0)
        assert not world.failures


async def test_a_class_is_built_for_each_run_and_the_one_before_is_closed() -> None:  # H68
    built: list[Forgetless] = []

    class Noting(Forgetless):
        def __init__(self) -> None:
            super().__init__()
            self.closed = False
            built.append(self)

        async def close(self) -> None:
            self.closed = True

    async with running_operator(built_anew_or_kept(Noting)) as world:
        for _ in range(3):
            await world.running(0)
            await next_run(world)
        assert not world.failures
        assert [len(each.met) for each in built] == [1, 1, 1, 0]
    assert all(getattr(each, "closed") for each in built)  # noqa: B009


async def test_a_factory_that_returns_its_last_coordinator_again_fails_the_run() -> None:  # H68
    same = RecordingCoordinator()
    async with running_tasks(1, built_anew_or_kept(lambda: same)) as (world, _):
        await next_run(world)
        (failure,) = world.failures
        assert "returned the same coordinator again" in str(failure)


def test_an_instance_is_taken_as_it_is_and_nothing_is_built_before_the_start() -> None:
    calls: list[int] = []

    def factory() -> OperatorCoordinator:
        calls.append(1)
        return RecordingCoordinator()

    instance = RecordingCoordinator()
    assert built_anew_or_kept(instance) is instance
    assert isinstance(built_anew_or_kept(factory), RecreateOnReset)
    assert isinstance(built_anew_or_kept(partial(RecordingCoordinator)), RecreateOnReset)
    assert not calls


async def async_factory() -> OperatorCoordinator:
    return RecordingCoordinator()


def needs_an_argument(limit: int) -> OperatorCoordinator:
    return RecordingCoordinator()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (object(), "pass an instance, a class, or a factory"),
        (dict, "is not an OperatorCoordinator"),
        (async_factory, "must not be async"),
        (needs_an_argument, r"without arguments .*limit.*lambda"),
    ],
)
def test_what_is_not_a_coordinator_is_refused_with_the_way_out(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        built_anew_or_kept(given)


@pytest.mark.parametrize("factory", [lambda: "words", lambda: async_factory()])  # noqa: PLW0108
async def test_a_factory_that_returns_something_else_fails_the_start(factory: Any) -> None:
    with pytest.raises(TypeError, match="which is not an OperatorCoordinator"):
        async with running_operator(built_anew_or_kept(factory)):
            pass


async def test_a_factory_that_returns_how_to_build_one_is_told_to_pass_that() -> None:
    given = built_anew_or_kept(lambda: RecreateOnReset(RecordingCoordinator))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="pass the RecreateOnReset itself in place of the factory"):
        async with running_operator(given):
            pass
