# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.walks``: how many modules, and calls of functions, each of five walks passes.

Somebody who wants to understand a walk has to read these modules. The sidecar is a real one, and so is the task, on
its thread; between them is loopback TCP. Only Spark is simulated: this module reports what happens to tasks, and says
which of them a thread is. Everything is in this process, so one profiler sees both ends.

Modules are those of the product that are in more than half of the repetitions; calls are the median number of calls,
or resumptions of a generator, in these modules. So what happens to run meanwhile, such as a timer, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import structlog

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.no_spark import PretendedDriver
from protocol.barrier_tracker import CheckpointConfig
from protocol.errors import AttemptOver
from protocol.facts import JobStarted, StageSubmitted, TaskEnded, TaskOutcome, TaskStarted
from protocol.wire.messages import RestoreMode
from spark_bridge import task_entry
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.subtask import SubtaskContext, SubtaskOperator, TaskIdentity

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protocol", "actors", "spark_bridge")
OPERATOR, JOB, STAGE = "walks", 1, 1
KEEP, ECHO = "keep", "echo"
"""What the operator does with an event."""
ATTEMPTS = 9
EVENTS = 20
"""How many events of each kind, and checkpoints, every attempt has."""
TIMEOUT_S = 60.0


class Profiler:
    """Collects which files' functions are called, on all threads that begin after it was set."""

    def __init__(self) -> None:
        self.walks: dict[str, list[Counter[str]]] = {}
        self._seen: list[str] | None = None
        self._only: int | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        seen = self._seen
        if seen is not None and event == "call" and self._only in (None, threading.get_ident()):
            seen.append(frame.f_code.co_filename)

    @contextmanager
    def walk(self, name: str, *, here_only: bool = False) -> Iterator[None]:
        """What is called in the block is one repetition of this walk. ``here_only``: on this thread alone."""
        self._only = threading.get_ident() if here_only else None
        seen: list[str] = []
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None
        modules = Counter(map(_module, seen))
        del modules[""]
        self.walks.setdefault(name, []).append(modules)

    def result(self) -> dict[str, dict[str, Any]]:
        """For each walk, its ``modules`` and the number of ``calls``."""
        result = {}
        for name, repetitions in self.walks.items():
            often = Counter(module for modules in repetitions for module in modules)
            modules = sorted(module for module, times in often.items() if 2 * times > len(repetitions))
            calls = median(sum(calls[module] for module in modules) for calls in repetitions)
            result[name] = {"modules": modules, "calls": round(calls)}
        return result


def _module(file: str) -> str:
    """The module of the product that this file is; empty for others."""
    with suppress(ValueError):
        parts = Path(file).relative_to(ROOT).with_suffix("").parts
        if parts[0] in FOLDERS:
            return ".".join(parts)
    return ""


class Coordinator(OperatorCoordinator):
    def __init__(self) -> None:
        self.ready: asyncio.Queue[SubtaskGateway] = asyncio.Queue()
        self.came = asyncio.Event()

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.ready.put_nowait(gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.came.set()

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.came.set()

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.came.set()


class Operator(SubtaskOperator):
    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def process(self, records: Iterator[Any]) -> None:
        for _ in records:
            self._tell()
        while True:
            self._context.wait_for_event(TIMEOUT_S)

    def handle_event(self, event: Any) -> None:
        if event == ECHO:
            self._context.send_event(event)
        else:
            self._tell()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"state"

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._tell()


class Task:
    """One attempt on its thread; ``told`` is set when it has got as far as a walk goes."""

    def __init__(self, handle: OperatorHandle, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.told = asyncio.Event()
        self.attempt = TaskIdentity(number + 1, 0, STAGE, number)
        self._function = handle.subtask(partial(Operator, partial(loop.call_soon_threadsafe, self.told.set)))

    async def run(self) -> None:
        """Run until the attempt is over. The thread is new, so that it has the profiler."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                with suppress(AttemptOver):
                    _attempt.identity = self.attempt
                    list(self._function(iter(["record"])))
            finally:
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=run, name="task").start()
        await over.wait()


_attempt = threading.local()


async def _walk_all(profiler: Profiler, attempts: int) -> None:
    spark, coordinator = PretendedDriver(), Coordinator()
    async with SidecarRuntime(spark, SidecarConfig()) as runtime:
        handle = await runtime.coordinate(
            OPERATOR, coordinator, parallelism=1, mode=RestoreMode.STREAMING, checkpoint=CheckpointConfig()
        )
        spark.say(JobStarted(JOB, (STAGE,)))
        spark.say(StageSubmitted(STAGE, 0, 1))
        for number in range(attempts):
            task = Task(handle, number)
            async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
                spark.say(TaskStarted(number + 1, STAGE, 0, 0, number, False, "1", "host"))
                with profiler.walk("registration"):
                    tasks.create_task(task.run())
                    await task.told.wait()
                gateway = await coordinator.ready.get()
                for _ in range(EVENTS):
                    await _walk_with(profiler, runtime, coordinator, gateway, task)
                coordinator.came.clear()
                with profiler.walk("failure", here_only=True):  # the task ends meanwhile
                    spark.say(TaskEnded(number + 1, STAGE, 0, 0, number, TaskOutcome.FAILED, "as planned"))
                    await coordinator.came.wait()


async def _walk_with(
    profiler: Profiler, runtime: SidecarRuntime, coordinator: Coordinator, gateway: SubtaskGateway, task: Task
) -> None:
    """The walks that a running attempt can repeat."""
    task.told.clear()
    with profiler.walk("confirmation"):
        await (await gateway.send_event(KEEP))
        await task.told.wait()
    coordinator.came.clear()
    with profiler.walk("echo"):
        await gateway.send_event(ECHO)
        await coordinator.came.wait()
    await (await gateway.send_event(KEEP))  # what is left of the echo, its confirmations, is over now
    task.told.clear()
    coordinator.came.clear()
    with profiler.walk("checkpoint"):
        await runtime.checkpoint(OPERATOR, timeout_s=TIMEOUT_S)
        await coordinator.came.wait()
        await task.told.wait()


def measure(attempts: int = ATTEMPTS) -> dict[str, dict[str, Any]]:
    """Take all walks, in so many attempts of the task one after the other."""
    profiler, current_task = Profiler(), task_entry.current_task
    task_entry.current_task = lambda: _attempt.identity
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        asyncio.run(_walk_all(profiler, attempts), debug=False)
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
        task_entry.current_task = current_task
    return profiler.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.walks", description=__doc__.splitlines()[0])
    parser.add_argument("--modules", action="store_true", help="name the modules of each walk, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    result = measure()
    for name, walk in result.items():
        print(f"{name:<14}{len(walk['modules']):4} modules {walk['calls']:6} calls")
        if options.modules:
            print("".join(f"    {module}\n" for module in walk["modules"]), end="")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
