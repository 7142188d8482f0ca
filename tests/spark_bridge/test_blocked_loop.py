# SPDX-License-Identifier: Apache-2.0

"""A blocked event loop is reported while it is blocked, with the line (H122)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pyspark
import pytest
import uvloop
from structlog.testing import capture_logs

import actors
from spark_bridge.driver import loop
from spark_bridge.driver.loop import BlockedLoopWatch, SidecarLoop
from spark_bridge.observability.meters import LoopLag

LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop, SidecarLoop])


def block_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


def events(logs: Any, event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


@LOOPS
def test_the_line_that_blocks_the_loop_is_named_while_it_does(loop_factory: Callable[[], Any]) -> None:
    async def main() -> None:
        lag = LoopLag()
        lag.start()
        watch = BlockedLoopWatch(lag)
        block_until(lambda: len(events(logs, "event loop blocked")) == 2)
        while not events(logs, "event loop unblocked"):  # noqa: ASYNC110 - another thread writes it
            await anyio.sleep(0.01)
        watch.close()
        watch.close()
        lag.close()

    with capture_logs() as logs, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    first, second = events(logs, "event loop blocked")
    assert (first["blocked_s"], second["blocked_s"]) == (1.0, 2.0)
    assert "test_blocked_loop.py" in first["at"]
    assert "in block_until" in first["at"]
    stack = first["stack"].split(" < ")
    assert any("block_until" in place for place in stack)
    assert stack[-1].endswith("main")
    own = loop_factory is SidecarLoop
    assert ("call_async" in first["hint"]) is own
    assert ("`await sidecar.run(action)`" in first["hint"]) is not own
    assert events(logs, "event loop unblocked")[0]["blocked_s"] >= 2.0


@LOOPS
@pytest.mark.parametrize("busy", [False, True])
def test_a_loop_without_code_of_the_user_is_not_reported(
    loop_factory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    # It looks as if it did not turn, as on a machine that is too busy to let it, or it works for Headgate.
    looked: list[list[str]] = []
    looked_twice = threading.Event()
    frames_on_loop = loop._frames_on_loop

    def looking(frame: Any) -> Any:
        frames = frames_on_loop(frame)
        looked.append([frame.f_code.co_name for frame in frames])
        if len(looked) == 2:
            looked_twice.set()
        return frames

    async def main() -> None:
        watch = BlockedLoopWatch(LoopLag())
        if busy:
            asyncio.get_running_loop().call_soon(looked_twice.wait)  # of the standard library
        while not looked_twice.is_set():  # noqa: ASYNC110 - another thread looks
            await anyio.sleep(0.2)
        watch.close()

    monkeypatch.setattr(loop, "_frames_on_loop", looking)
    monkeypatch.setattr(loop, "LOOK_S", 0.02)
    with capture_logs() as logs, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    assert ("wait" in looked[0]) is busy
    assert logs == []


def test_what_is_blamed_is_the_code_of_users_and_of_libraries_that_block() -> None:
    blamed = [pyspark.__file__, __file__, "/app/job.py", "<stdin>"]
    assert list(filter(loop._is_others, blamed)) == blamed
    ours = [anyio.__file__, actors.__file__, threading.__file__, "<frozen importlib._bootstrap>"]
    assert list(filter(loop._is_others, ours)) == []
