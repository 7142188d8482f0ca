# SPDX-License-Identifier: Apache-2.0

"""Mistakes in user classes are found in a class and in an instance of it; correct classes have none."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from actors.coordination import OperatorCoordinator, SourceCoordinator
from protocol.overrides import errors_in_overrides, names_never_called
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from spark_bridge.subtask import SplitReader, SubtaskOperator


class SynchronousRequest(OperatorCoordinator):
    def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


class YieldsEvents(OperatorCoordinator):
    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> Any:
        yield event


class NoMethod(OperatorCoordinator):
    close = None  # type: ignore[assignment]


class AsyncProcess(SubtaskOperator):
    async def process(self, records: Iterator[Any]) -> Any:
        yield 1


class AsyncOpen(SubtaskOperator):
    async def open(self, context: Any, state: bytes | None) -> None:  # type: ignore[override]
        pass


class YieldingHandler(SubtaskOperator):
    def handle_event(self, event: Any) -> Any:
        yield event


class AsyncReader(SplitReader):
    async def read_split(self, split: Any) -> Any:  # type: ignore[override]
        return [split]


class LacksState(SubtaskOperator):
    def open(self, context: Any) -> None:  # type: ignore[override]
        pass


class TakesContext(SubtaskOperator):
    def process(self, context: Any, records: Iterator[Any]) -> Any:  # type: ignore[override]
        yield from records


class ForgetsSelf(SubtaskOperator):
    @staticmethod
    def handle_event(operator: Any, event: Any) -> None:  # type: ignore[override]
        pass


class LacksAttempt(OperatorCoordinator):
    async def handle_request(self, subtask: int, request: Any) -> Any:  # type: ignore[override]
        return request


@pytest.mark.parametrize(
    ("mistaken", "text"),
    [
        (
            SynchronousRequest,
            "handle_request() is a plain function, but it is awaited: write `async def handle_request`",
        ),
        (YieldsEvents, "handle_event_from_operator() has a `yield`, so it cannot be awaited"),
        (NoMethod, "close() is NoneType, not a method"),
        (AsyncProcess, "process() is an async generator, but it is called without `await`: write `def process`"),
        (AsyncOpen, "open() is `async def`, but it is called without `await`: write `def open`"),
        (YieldingHandler, "handle_event() has a `yield`, so calling it runs nothing: remove the `yield`"),
        (LacksState, "open() is called with other arguments than it takes: write `def open(self, context, state)`"),
        (TakesContext, "process() is called with other arguments than it takes: write `def process(self, records)`"),
        (ForgetsSelf, "handle_event() is called with other arguments than it takes: write `def handle_event(event)`"),
        (
            LacksAttempt,
            "handle_request() is called with other arguments than it takes: write `async def handle_request",
        ),
        (AsyncReader, "read_split() is `async def`, but it is called without `await`: write `def read_split`"),
    ],
)
def test_a_method_of_the_wrong_kind_is_named_with_what_to_write(mistaken: type, text: str) -> None:  # H59
    for subject in (mistaken, mistaken()):
        (error,) = errors_in_overrides(subject)
        assert error.startswith(f"{mistaken.__qualname__}.{text}")


def test_a_function_that_an_instance_carries_is_checked_too() -> None:  # H59
    coordinator = OperatorCoordinator()
    coordinator.handle_request = lambda subtask, attempt, request: request  # type: ignore[method-assign]
    assert "handle_request() is a plain function" in errors_in_overrides(coordinator)[0]


def traced(call: Callable[..., Awaitable[Any]]) -> Any:
    @functools.wraps(call)
    def wrapper(*args: Any) -> Any:
        return call(*args)

    return wrapper


def with_a_connection(call: Callable[..., Awaitable[Any]]) -> Any:
    @functools.wraps(call)
    def wrapper(self: Any) -> Any:
        return call(self, "connection")

    return wrapper


class AllIsWell(OperatorCoordinator):
    @traced
    async def start(self, context: Any) -> None:
        self.subtasks_ready_now()

    def handle_request(self, subtask: int, attempt: int, request: Any) -> Awaitable[Any]:  # type: ignore[override]
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        return request

    async def subtask_ready(self, *all_of_it: Any) -> None: ...

    async def subtask_reset(self, subtask: int, checkpoint_id: int, more: str = "") -> None: ...

    @with_a_connection
    async def close(self, connection: Any) -> None:
        """The decorator passes the second argument."""

    @staticmethod
    async def notify_checkpoint_complete(checkpoint_id: int) -> None: ...

    async def subtasks_ready(self, first: int, second: int) -> None:
        """Resembles an existing method."""

    async def handle_client_requests(self) -> None:
        """Takes other arguments."""

    async def run_ends(self, run_id: int, succeeded: bool, reason: str) -> None:
        """Is called here."""
        await self.run_ends(run_id, succeeded, reason)

    def subtasks_ready_now(self) -> int:
        return 0


class WellSource(SourceCoordinator):
    def attempt(self, subtask: int) -> list[int]:
        """Has the name of a source coordinator's own method, which no class may override."""
        return []


class WellReader(SplitReader):
    def read_split(self, split: Any) -> Iterator[Any]:
        yield split

    def finish(self) -> Iterator[Any]:
        yield 0


class Mixin:
    async def closes(self) -> None:
        """A base class of another kind knows its own methods."""


class Mixed(Mixin, OperatorCoordinator):
    start = AsyncMock()


@pytest.mark.parametrize("right", [OperatorCoordinator, AllIsWell, WellSource, Mixed])
def test_nothing_is_found_in_a_right_coordinator(right: type) -> None:  # H59
    assert errors_in_overrides(right) == []
    assert names_never_called(right, OperatorCoordinator) == []


@pytest.mark.parametrize("right", [SubtaskOperator, SplitReader, WellReader, TwoPhaseSinkOperator])
def test_nothing_is_found_in_a_right_operator(right: type) -> None:  # H59
    assert errors_in_overrides(right) == []
    assert names_never_called(right, SubtaskOperator) == []


class Misspelt(OperatorCoordinator):
    async def handle_events_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        pass


class MisspeltAndSynchronous(OperatorCoordinator):
    def subtasks_ready(self, subtask: int, gateway: Any) -> None:
        pass


class OfTheOtherHalf(OperatorCoordinator):
    async def handle_event(self, event: Any) -> None:
        pass


class WithoutProcess(SubtaskOperator):
    def proces(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records


class ShortName(SubtaskOperator):
    def closed(self) -> None:
        pass


@pytest.mark.parametrize(
    ("subject", "interface", "meant", "certain"),
    [
        (Misspelt, OperatorCoordinator, "handle_event_from_operator", True),
        (MisspeltAndSynchronous, OperatorCoordinator, "subtask_ready", False),
        (OfTheOtherHalf, OperatorCoordinator, "handle_event_from_operator", True),
        (WithoutProcess, SubtaskOperator, "process", True),
        (ShortName, SubtaskOperator, "close", False),
    ],
)
def test_a_name_that_is_nearly_right_is_found_and_is_certain_only_where_all_else_fits(
    subject: type, interface: type, meant: str, certain: bool
) -> None:  # H59
    (finding,) = names_never_called(subject, interface, {"handle_event": "handle_event_from_operator"})
    assert (finding.meant, finding.certain) == (meant, certain)
    assert f"is never called: did you mean {meant}()?" in str(finding)


def test_a_class_that_overrides_every_method_has_no_misspelt_one() -> None:  # H59
    methods = {name: lambda self: None for name, one in vars(SplitReader).items() if callable(one) and name[0] != "_"}
    methods |= {name: lambda self: None for name, one in vars(SubtaskOperator).items() if callable(one)}
    complete = type("Complete", (SplitReader,), {**methods, "proces": lambda self: None})
    assert names_never_called(complete, SplitReader) == []
    del methods["process"]
    assert names_never_called(
        type("Misses", (SplitReader,), {**methods, "proces": lambda self, records: None}), SplitReader
    )
