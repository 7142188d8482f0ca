# SPDX-License-Identifier: Apache-2.0

"""An ``await`` that is forgotten or that cannot work is refused or logged, with the line (H122)."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from actors.waiting_at import waiting_at
from protocol.wire.keys import KeyRing
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.driver.loop import refuse_await
from spark_bridge.driver.runtime import AsyncOperatorHandle, SidecarRuntime, must_be_awaited

NEVER_AWAITED = "sidecar method never awaited"


class Runtime:
    def __init__(self) -> None:
        self.called: list[str] = []
        self.go_on = asyncio.Event()

    @must_be_awaited
    async def coordinate(self, name: str) -> str:
        """Coordinate it."""
        self.called.append(name)
        return name.upper()

    @must_be_awaited
    async def wait(self) -> None:
        await self.go_on.wait()


async def test_it_is_awaited_as_any_coroutine_is() -> None:
    runtime = Runtime()
    with capture_logs() as logs:
        assert await runtime.coordinate("plainly") == "PLAINLY"
        assert list(await asyncio.gather(runtime.coordinate("a"), runtime.coordinate("b"))) == ["A", "B"]
        assert await asyncio.create_task(runtime.coordinate("task")) == "TASK"  # noqa: TID251 - what users may write
        assert await asyncio.wait_for(runtime.coordinate("in time"), 60.0) == "IN TIME"  # noqa: TID251
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.coordinate, "group")
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            await once_more(runtime.coordinate("twice"))
        runtime.coordinate("closed").close()
        gc.collect()
    assert runtime.called == ["plainly", "a", "b", "task", "in time", "group", "twice"]
    assert logs == []


async def test_another_thread_may_ask_the_loop_to_run_it() -> None:
    loop = asyncio.get_running_loop()

    def in_a_thread() -> str:
        return asyncio.run_coroutine_threadsafe(runtime.coordinate("thread"), loop).result()

    runtime = Runtime()
    assert await anyio.to_thread.run_sync(in_a_thread) == "THREAD"


async def once_more(call: Any) -> None:
    await call
    await call


def test_a_coroutine_may_be_run_by_asyncio() -> None:
    assert asyncio.run(coordinate_alone()) == "ALONE"


async def coordinate_alone() -> str:
    return await Runtime().coordinate("alone")


async def test_a_task_is_cancelled_while_it_waits_and_before_it_begins() -> None:
    runtime = Runtime()
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.wait)
            tasks.start_soon(runtime.coordinate, "later")
            tasks.cancel_scope.cancel()
        gc.collect()
    assert logs == []


async def test_what_is_asked_of_a_call_that_was_not_awaited_names_the_await_and_the_line() -> None:
    runtime = Runtime()
    call: Any = runtime.coordinate("op")
    with capture_logs() as logs, pytest.raises(AttributeError) as raised:
        call.subtask(print)
    del call
    gc.collect()
    line = inspect.getsourcelines(test_what_is_asked_of_a_call_that_was_not_awaited_names_the_await_and_the_line)[1] + 2
    assert str(raised.value) == (
        "coordinate() was called without await, so its result with 'subtask' is not here yet: write "
        f"`await sidecar.coordinate(...)` at {__file__}:{line} in "
        "test_what_is_asked_of_a_call_that_was_not_awaited_names_the_await_and_the_line"
    )
    assert logs == []  # it was told


@pytest.mark.parametrize("use", [bool, len, list, lambda call: call[0], lambda call: 1 in call])
async def test_a_use_of_a_call_that_was_not_awaited_names_the_await(use: Callable[[Any], object]) -> None:
    call: Any = Runtime().coordinate("op")
    with capture_logs() as logs, pytest.raises(TypeError, match=r"without await, .* write `await sidecar\.coordinate"):
        use(call)
    del call
    gc.collect()
    assert logs == []  # it was told


async def test_a_call_that_nobody_uses_is_logged() -> None:
    runtime = Runtime()
    with capture_logs() as logs:
        runtime.coordinate("op")  # type: ignore[unused-coroutine]
        gc.collect()
    (line,) = logs
    assert line["event"] == NEVER_AWAITED
    assert line["method"] == "coordinate"
    assert "test_awaited.py" in line["at"]
    assert line["hint"] == "nothing was done: write `await sidecar.coordinate(...)`"
    assert runtime.called == []


async def test_tools_that_look_at_it_are_refused_as_usual_and_see_where_it_waits() -> None:
    runtime = Runtime()
    call: Any = runtime.coordinate("op")
    assert not hasattr(call, "_repr_html_")
    assert not hasattr(call, "cr_code")
    assert await call == "OP"
    assert inspect.signature(Runtime.coordinate) == inspect.signature(Runtime.coordinate.__wrapped__)  # type: ignore[attr-defined]
    waiting = runtime.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: waiting)
        await anyio.wait_all_tasks_blocked()
        assert "Runtime.wait" in waiting_at(waiting)
        runtime.go_on.set()


@pytest.mark.parametrize(
    "method", ["coordinate", "release", "rescale", "checkpoint", "savepoint", "request", "status", "explain", "run"]
)
def test_every_method_of_the_runtime_that_users_await_says_so(method: str) -> None:
    assert inspect.iscoroutinefunction(inspect.unwrap(getattr(SidecarRuntime, method)))
    assert getattr(SidecarRuntime, method).__code__.co_filename.endswith("runtime.py")


async def test_a_run_of_a_handle_that_is_not_awaited_names_the_handle() -> None:
    endpoint = TaskEndpoint("host", 1, KeyRing(bytes(32)).task_key("op"), "op", 2)
    handle = AsyncOperatorHandle(endpoint, dict, lambda: None)
    with pytest.raises(
        AttributeError, match=r"^run\(\) was called without await.*write `await handle\.run\(\.\.\.\)` at"
    ):
        handle.run(sorted).sort()  # type: ignore[attr-defined]


# --- an await of what blocks --------------------------------------------------------------------------------------


blocks: Any = refuse_await


async def plainly() -> None:
    await blocks("or not at all")


async def with_a_name() -> None:
    await blocks(otherwise="or not at all")


async def unpacked() -> None:
    await blocks(*["or not at all"])


async def over_lines() -> None:
    found = [await blocks("or not at all") for _ in range(1)]
    assert not found


async def in_a_generator() -> None:
    async def generator() -> AsyncIterator[None]:
        yield await blocks("or not at all")

    async for _ in generator():
        pass


@pytest.mark.parametrize("use", [plainly, with_a_name, unpacked, over_lines, in_a_generator])
async def test_an_await_of_a_call_that_blocks_is_refused_with_its_line(use: Callable[[], Any]) -> None:
    with pytest.raises(TypeError) as raised:
        await use()
    line = next(
        number
        for number, text in enumerate(inspect.getsource(use).splitlines(), use.__code__.co_firstlineno)
        if "await blocks" in text
    )
    assert str(raised.value).startswith("this call blocks and returns its result, which cannot be awaited: ")
    assert f"write it without `await` at {__file__}:{line} in {use.__qualname__}" in str(raised.value)


async def test_a_call_that_blocks_is_not_refused_if_something_else_is_awaited() -> None:
    async def waits(_given: object) -> None:
        await asyncio.sleep(0)

    otherwise = "or not at all"
    blocks(otherwise)
    await waits(blocks(otherwise))
    await asyncio.to_thread(blocks, otherwise)
    await anyio.to_thread.run_sync(partial(blocks, otherwise))
    await asyncio.get_running_loop().run_in_executor(None, blocks, otherwise)
