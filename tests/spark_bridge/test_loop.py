# SPDX-License-Identifier: Apache-2.0

"""No code that runs on a sidecar's own loop can end that loop (H65)."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import NoReturn

import pytest

from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.driver.loop import LoopCalls, call_on_loop

EXITS: list[BaseException] = [SystemExit(3), KeyboardInterrupt("by hand")]
exits = pytest.mark.parametrize("error", EXITS, ids=[type(error).__name__ for error in EXITS])


@exits
def test_a_task_that_raises_an_exit_does_not_end_the_loop(error: BaseException) -> None:
    async def leave() -> NoReturn:
        raise error

    async def wait_for_one() -> BaseException | None:
        task = asyncio.get_running_loop().create_task(leave())
        await asyncio.wait([task])
        return task.exception()

    with LoopCalls() as calls:
        assert call_on_loop(calls, wait_for_one) is error
        assert call_on_loop(calls, lambda: asyncio.sleep(0, "alive")) == "alive"


@exits
def test_a_callback_that_raises_an_exit_ends_neither_the_loop_nor_other_callbacks(error: BaseException) -> None:
    called: list[str] = []

    def leave() -> NoReturn:
        raise error

    async def schedule() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(leave)
        loop.call_soon(called.append, "after it")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with LoopCalls() as calls:
        call_on_loop(calls, schedule)
        assert call_on_loop(calls, lambda: asyncio.sleep(0, "alive")) == "alive"
    assert called == ["after it"]


def test_a_future_that_carries_a_generator_exit_does_not_close_who_awaits_it() -> None:
    error = GeneratorExit("by hand")

    async def wait() -> BaseException | None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, error)
        try:
            await future
        except RuntimeError as raised:
            await asyncio.sleep(0)  # it can still wait for something
            return raised.__cause__
        return None

    with LoopCalls() as calls:
        assert call_on_loop(calls, wait) is error


@pytest.mark.parametrize("raised", [None, ValueError("the block's own")], ids=["well", "with an error"])
def test_what_runs_when_the_loop_is_left_is_finished_or_after_an_error_cancelled(raised: Exception | None) -> None:
    began = threading.Event()  # H160

    async def work() -> str:
        began.set()
        for _ in range(100):
            await asyncio.sleep(0)
        if raised is not None:
            await asyncio.sleep(3600)
        return "finished"

    with suppress(ValueError), LoopCalls() as calls:
        outcome, _ = calls.start(work)
        began.wait()
        if raised is not None:
            raise raised
    assert outcome.done()
    assert outcome.cancelled() if raised is not None else outcome.result() == "finished"
    with pytest.raises(SidecarNotRunning):
        call_on_loop(calls, work)


def test_a_call_that_the_loop_is_told_when_it_is_about_to_close_ends(monkeypatch: pytest.MonkeyPatch) -> None:  # H160
    monkeypatch.setattr(LoopCalls, "soon", lambda self, function: None)  # it gets no turn any more
    calls = LoopCalls()
    outcome, _ = calls.start(asyncio.sleep)  # type: ignore[arg-type]
    calls._started.set_exception(RuntimeError("the loop has ended"))
    monkeypatch.setattr("anyio.run", lambda *args, **kwargs: None)
    calls._run()
    assert outcome.cancelled()
    assert calls.start(asyncio.sleep)[0].cancelled()  # type: ignore[arg-type]
