# SPDX-License-Identifier: Apache-2.0

"""A user's value may answer nonsense, or raise, whatever it is asked: it fails its call or its job, and nothing else.

Each way that a value takes into Headgate, with each kind of value. Afterwards the operator runs its next job as if
nothing had been.
"""

# H165, N-rules of a user's own code: ``==``, ``bool``, ``str``, ``repr``, ``hash``, ``len`` and ``__class__``

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, cast

import pytest

from actors.logs import failures
from headgate import (
    Group,
    OperatorCoordinator,
    SharedValue,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    SubtaskOperator,
    WorkQueue,
)
from headgate.testing import World, running_operator
from protocol.describing import describe


class Boom(Exception):
    """What a hostile value raises."""


def raising(error: BaseException) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        raise type(error)("asked")

    return method


ASKED = ("__eq__", "__bool__", "__str__", "__repr__", "__hash__", "__len__", "__iter__", "__format__", "__getattr__")


def hostile_class(methods: tuple[str, ...], base: type = object, error: BaseException | None = None) -> type:
    body: dict[str, Any] = dict.fromkeys(methods, raising(error or Boom("asked")))
    if "__class__" in body:
        body["__class__"] = property(body["__class__"])
    return type("Hostile", (base,), body)


class Nameless(type):
    """The metaclass of a class that does not say its name."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise Boom("the name of a class was asked")
        return super().__getattribute__(name)

    def __instancecheck__(cls, instance: Any) -> bool:
        raise Boom("an instance was asked for")

    def __repr__(cls) -> str:
        raise Boom("the text of a class was asked")


KINDS: dict[str, type] = {
    **{method: hostile_class((method,)) for method in (*ASKED, "__class__")},
    "all": hostile_class((*ASKED, "__class__")),
    "all, with an exit": hostile_class((*ASKED, "__class__"), error=SystemExit("asked")),
    "metaclass": Nameless("Hostile", (), {}),
    "a str": hostile_class(tuple(one for one in ASKED if one != "__getattr__"), str),
    "an int": hostile_class(tuple(one for one in ASKED if one not in ("__getattr__", "__len__")), int),
    "a list": hostile_class(tuple(one for one in ASKED if one != "__getattr__"), list),
    "a dict": hostile_class(tuple(one for one in ASKED if one != "__getattr__"), dict),
}
ERRORS: dict[str, type[BaseException]] = {
    **{method: hostile_class((method,), Exception) for method in ("__eq__", "__str__", "__repr__", "__hash__")},
    "__class__": hostile_class(("__class__",), Exception),
    "all": hostile_class((*ASKED, "__class__"), Exception),
    "metaclass": cast("type[BaseException]", Nameless("Hostile", (Exception,), {})),
}


class Reader(SplitReader):
    def read_split(self, split: Any) -> Iterator[Any]:
        yield split


class Scripted(SubtaskOperator):
    """Does one thing with the hostile value when it is told to, and otherwise passes records on."""

    def __init__(self, act: Callable[[SubtaskContext], Any] | None) -> None:
        self.act = act

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Any:
        act, self.act = self.act, None
        if act is not None:
            return act(self.context)
        return records


class Serving(OperatorCoordinator):
    """Does one thing with the hostile value in the method that is named."""

    def __init__(self, method: str = "", act: Callable[[Any], Any] | None = None) -> None:
        self.method, self.act = method, act
        self.context: Any = None

    async def start(self, context: Any) -> None:
        self.context = context

    async def _do(self, method: str, subject: Any = None, otherwise: Any = None) -> Any:
        if method != self.method or self.act is None:
            return otherwise
        act, self.act = self.act, None
        done = act(subject)
        return await done if issubclass(type(done), Awaitable) else done

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await self._do("ready", gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        await self._do("event", event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return await self._do("request", request, "answer")

    async def handle_client_request(self, request: Any) -> Any:
        return await self._do("client", request, "alive")

    async def checkpoint_coordinator(self, checkpoint_id: int) -> Any:
        return await self._do("snapshot", None, b"")

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        pass


def raise_of(error: type[BaseException]) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise error()

    return act


def raise_with(value: Any) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        error = ValueError(value)
        error.__notes__ = [value]
        raise error

    return act


IN_TASK: dict[str, Callable[[Any], Callable[[SubtaskContext], Any]]] = {
    "event": lambda value: lambda context: context.send_event(value),
    "event in a list": lambda value: lambda context: context.send_event([value, {"a": value}]),
    "event as a key": lambda value: lambda context: context.send_event({1: value}),
    "request": lambda value: lambda context: context.request(value),
    "name of a counter": lambda value: lambda context: context.count(value, 1),
    "count": lambda value: lambda context: context.count("n", value),
    "observation": lambda value: lambda context: context.observe("n", value),
    "outputs": lambda value: lambda context: iter([value, value]),
    "result of process": lambda value: lambda context: value,
    "exception args": raise_with,
}
IN_COORDINATOR: dict[str, Callable[[Any], tuple[str, Callable[[Any], Any]]]] = {
    "event down": lambda value: ("ready", lambda gateway: gateway.send_event(value)),
    "event down, not awaited": lambda value: ("ready", lambda gateway: gateway.send_event_nowait(value) and None),
    "answer": lambda value: ("request", lambda _: value),
    "exception args in a request": lambda value: ("request", raise_with(value)),
    "exception args": lambda value: ("ready", raise_with(value)),
    "state": lambda value: ("snapshot", lambda _: value),
    "answer to the driver": lambda value: ("client", lambda _: value),
    "exception args for the driver": lambda value: ("client", raise_with(value)),
}


def check_not_boom(error: BaseException) -> None:
    """What a value raised when it was asked must not be what a user gets."""
    assert type(error) is not Boom, error


def told_plainly(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Replace an error that pytest could not print."""

    @wraps(test)
    async def run(**given: Any) -> None:
        try:
            await test(**given)
        except BaseException as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-6:])
            text = f"{describe(error)}\n{where}"
        else:
            return
        raise AssertionError(text)

    return run


async def is_alive(world: World, act: Callable[..., Any] | None = None) -> None:
    """The next job of the operator is as any other."""
    await world.cancel_job("the test begins another job")
    tasks = [await world.launch_operator(subtask, lambda: Scripted(None), [1, 2]) for subtask in range(2)]
    await world.settle()
    await world.advance(1.0)
    assert [task.outputs for task in tasks] == [[1, 2], [1, 2]], (tasks[0].error, world.failures)
    assert await world.request("are you there?") == "alive"


async def drive(world: World, operator: Callable[[], SubtaskOperator]) -> Any:
    task = await world.launch_operator(0, operator, [1, 2])
    await world.launch_operator(1, lambda: Scripted(None), [1, 2])
    await world.settle()
    return task


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", IN_TASK)
@told_plainly
async def test_a_hostile_value_in_a_task_fails_that_task_at_most(way: str, kind: str) -> None:
    value = KINDS[kind]()
    async with running_operator(Serving, parallelism=2) as world:
        task = await drive(world, lambda: Scripted(IN_TASK[way](value)))
        assert task.outcome in ("failed", "success")
        await is_alive(world)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", IN_COORDINATOR)
@told_plainly
async def test_a_hostile_value_in_a_coordinator_fails_its_job_at_most(way: str, kind: str) -> None:
    value = KINDS[kind]()
    acts = [IN_COORDINATOR[way](value)]

    def made() -> Serving:
        return Serving(*acts.pop()) if acts else Serving()

    async with running_operator(made, parallelism=2) as world:
        ask = (lambda context: context.request("?")) if "answer" in way or "request" in way else None
        await drive(world, lambda: Scripted(ask))
        if way == "state":
            world.begin_checkpoint()
            await world.settle()
        if "driver" in way:
            try:
                await world.request("?")
            except BaseException as error:
                check_not_boom(error)
        await is_alive(world)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["task", "ready", "request", "client", "snapshot"])
@told_plainly
async def test_a_hostile_exception_fails_what_it_was_raised_in(where: str, kind: str) -> None:
    acts = [raise_of(ERRORS[kind])]
    lines_lost = failures.count

    def made() -> Serving:
        return Serving(where, acts.pop()) if acts and where != "task" else Serving()

    async with running_operator(made, parallelism=2) as world:
        act = acts[0] if where == "task" else (lambda context: context.request("?")) if where == "request" else None
        await drive(world, lambda: Scripted(act))
        if where == "snapshot":
            world.begin_checkpoint()
            await world.settle()
        if where == "client":
            with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever it is, it belongs to the one who asked
                await world.request("?")
        await is_alive(world)
    assert failures.count == lines_lost, "it is in the log"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_value_of_a_part_is_refused_or_kept(kind: str) -> None:
    value = KINDS[kind]()
    for make in (
        lambda: StaticSplitEnumerator([value]),
        lambda: SharedValue("v", value),
        lambda: WorkQueue("q", [value]),
        lambda: WorkQueue("q", [1], key=lambda item: value),
        lambda: Group(value),
        lambda: SourceCoordinator(value),
    ):
        try:
            make()
        except Exception as error:
            check_not_boom(error)


@pytest.mark.parametrize("kind", KINDS)
@told_plainly
async def test_a_hostile_split_fails_its_job_at_most(kind: str) -> None:
    splits = [[1, KINDS[kind]()]]

    def enumerated(state: bytes | None) -> StaticSplitEnumerator:
        return StaticSplitEnumerator(splits.pop() if splits else [1, 2], state)

    try:
        async with running_operator(SourceCoordinator(enumerated), parallelism=1) as world:
            await world.launch_operator(0, Reader, [])
            await world.cancel_job()
            task = await world.launch_operator(0, Reader, [])
            await world.settle()
            assert sorted(task.outputs) == [1, 2], task.error
    except Exception as error:  # of `coordinate`
        check_not_boom(error)
