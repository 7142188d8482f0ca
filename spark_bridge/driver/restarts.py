# SPDX-License-Identifier: Apache-2.0

"""Runs the user's Spark action, and again after a failure that a restart may fix (H15).

Spark restarts tasks and stages, but not a job that has failed. The coordinators are reset to the last
completed checkpoint before the first task of the next run is ready (H55). So a restart only has to call the action
again, after the delay that the restart strategy sets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import dropwhile, takewhile
from typing import Protocol, TypeVar

import anyio

from actors.coordination import CheckpointFailed
from actors.logs import get_logger
from protocol.describing import a_type, is_a, text_of, type_name
from protocol.errors import NoRestart, RunRefused
from protocol.restart import NO_RESTART, RestartBackoff, RestartStrategy
from spark_bridge.bridge.runs import why_worker_died
from spark_bridge.common.errors import OperatorBroken, RestartsExhausted, SidecarError, SidecarNotRunning
from spark_bridge.driver.interrupts import holding_interrupts

__all__ = ["OnLoop", "Restarter", "Runs", "run_blocking", "run_with_restarts"]

ALIKE_FOR_HINT = 2
_NUMBERS = re.compile(r"\d+")

R = TypeVar("R")
T = TypeVar("T")
log = get_logger("headgate.restarts")


class Runs(Protocol):
    """One action, called again and again, as the sidecar knows its runs. Loop only."""

    def begin(self) -> str:
        """The action is about to be called, for the first time or again; returns the id of this call."""

    def end(self) -> None:
        """Nothing more is asked about the action. Idempotent."""

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        """How often a run or a coordinator has failed so far, and the coordinator's cause of the last time, if any."""

    @property
    def rescaled(self) -> int | None:
        """How many of its runs were ended to continue at another parallelism; None if the action was not ended."""

    @property
    def fenced(self) -> Exception | None:
        """The error if this application may not continue at all, else None."""

    @property
    def ran(self) -> bool:
        """Whether a task of a coordinated operator has run since the last ``begin``."""

    async def settle(self) -> str:
        """Return when all runs are over and every final checkpoint has ended.

        The result says why some output is not committed; it is empty if all of it is.
        """


class OnLoop(Protocol):
    """Carries out one step on the loop of ``Runs`` and returns its result."""

    async def __call__(self, step: Callable[[], Awaitable[R]], /) -> R: ...


async def _right_here(step: Callable[[], Awaitable[R]], /) -> R:
    return await step()


async def run_with_restarts(
    runs: Runs,
    strategy: RestartStrategy,
    call: Callable[[str], Awaitable[T]],
    *,
    on_loop: OnLoop = _right_here,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> T:
    """Await ``call(action_id)``, and again after a failed run, as ``strategy`` says; return its result.

    Raises as ``Sidecar.run``.
    """
    restarter = Restarter(runs, strategy)
    try:
        while True:
            action_id = await on_loop(restarter.begin)
            delay_s: float | None
            try:
                result = await call(action_id)
            except Exception as error:
                delay_s = await on_loop(partial(restarter.failed, error))
            else:
                delay_s = await on_loop(restarter.succeeded)
                if delay_s is None:
                    if is_lazy(result):
                        await on_loop(partial(restarter.returned_lazy, result))
                    return result
            await sleep(delay_s or 0.0)
    finally:
        with suppress(RuntimeError, SidecarNotRunning):  # the sidecar was closed in the meantime
            await on_loop(restarter.end)


def run_blocking(
    runs: Runs,
    strategy: RestartStrategy,
    action: Callable[[], T],
    marked: Callable[[str], AbstractContextManager[None]],
    stop: Callable[[str, str], None],
    *,
    on_loop: OnLoop = _right_here,
) -> T:
    """``run_with_restarts`` on the calling thread, which calls ``action`` and sleeps itself.

    The action is called in ``marked(action_id)``, which makes its jobs known. ``on_loop`` must block instead of
    suspending, so that no event loop is needed here. If the action is interrupted, ``stop(action_id, cause)`` ends its
    jobs, which PySpark would leave running, before the ``KeyboardInterrupt`` is raised.
    """
    with holding_interrupts() as interrupts:

        async def call(action_id: str) -> T:
            with marked(action_id):
                try:
                    with interrupts.let_through():
                        return action()
                except BaseException as error:
                    interrupted = _is_interrupt(error)
                    if interrupted or not is_a(error, Exception):
                        with suppress(SidecarError):  # the sidecar is gone
                            stop(action_id, "the action was interrupted")
                    if interrupted and is_a(error, Exception):
                        raise KeyboardInterrupt from error
                    raise

        async def sleep(delay_s: float) -> None:
            with interrupts.let_through():
                time.sleep(delay_s)  # noqa: ASYNC251 - there is no loop on this thread

        try:
            run_with_restarts(runs, strategy, call, on_loop=on_loop, sleep=sleep).send(None)
        except StopIteration as returned:
            result: T = returned.value
            return result
        raise RuntimeError("a step of the restart loop was suspended, although it should block")


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a Ctrl-C, or came of one: Py4J sometimes turns it into an error of its connection."""
    while error is not None and not is_a(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class Restarter:
    """The decisions of one ``run``. Loop only; it never sleeps or calls the action itself."""

    def __init__(self, runs: Runs, strategy: RestartStrategy) -> None:
        self._runs = runs
        self._strategy = strategy
        self._backoff = RestartBackoff(strategy)
        self._failures_before = 0
        self._last_error: BaseException | None = None
        self._last_text = ""
        self._alike = 0  # failures in a row that differ in numbers only, such as those of tasks

    async def begin(self) -> str:
        """The action is about to be called; returns the id of this call."""
        action_id = self._runs.begin()
        self._failures_before, _ = self._runs.failures
        self._backoff.begun(time.monotonic())
        return action_id

    async def end(self) -> None:
        """The action is not called again."""
        self._runs.end()

    async def succeeded(self) -> float | None:
        """The action has returned. None means that its output is committed.

        Otherwise a coordinator failed after the run, or its last output could not be committed. The result is then the
        seconds until the action is to be called again. Raises ``RestartsExhausted`` if no further restart is allowed.
        """
        uncommitted = await self._runs.settle()
        if uncommitted:
            return self._delay(CheckpointFailed(f"the last output could not be committed: {uncommitted}"))
        if self._has_failed():
            _, cause = self._runs.failures
            return self._delay(cause or SidecarError("a run failed, although the action returned"))
        return 0.0 if self._runs.rescaled else None

    async def returned_lazy(self, result: object) -> None:
        """Raise ``TypeError`` if the action has only described a computation: nothing ran, and nothing ever would."""
        if isinstance(result, Coroutine):
            result.close()
            raise TypeError(
                "action must be a plain function that runs Spark, but it is async, and nothing has awaited it: call "
                "the Spark action in a plain function"
            )
        if not self._runs.ran:
            raise TypeError(
                f"action must be a function that runs Spark, but it returned {a_type(result)}, which is lazy, "
                "and no task of an operator has run: end it with what computes the result, such as .collect(), "
                ".count() or .write.save(...)"
            )

    async def failed(self, error: Exception) -> float:
        """The action has raised ``error``; returns the seconds until it is to be called again.

        It is called immediately, and the strategy does not count it, if its jobs were ended for another parallelism.

        Raises ``error`` itself if no run of a coordinated operator has failed, because a restart would not help then.
        Raises ``RestartsExhausted`` if no further restart is allowed.
        """
        await self._runs.settle()
        if not self._has_failed():
            if self._runs.rescaled is not None and self._runs.fenced is None:
                return 0.0
            raise error
        return self._delay(error)

    def _has_failed(self) -> bool:
        return self._runs.failures[0] > self._failures_before

    def _delay(self, error: BaseException) -> float:
        if self._runs.fenced is not None:
            raise self._runs.fenced from error
        _, cause = self._runs.failures
        if is_a(cause, RunRefused) or is_a(cause, NoRestart):
            raise cause from self._last_error or error  # each further run would fail like this one
        if is_a(cause, OperatorBroken):
            raise cause  # likewise; the cause that is chained says more than Spark's error
        self._last_error = error
        delay_s = self._backoff.failed(time.monotonic())
        restarts = self._backoff.restarts
        text, why = f"{type_name(error)}: {_in_one_line(error)}", why_worker_died(text_of(error))
        self._alike = self._alike + 1 if _NUMBERS.sub("", text) == self._last_text else 1
        self._last_text = _NUMBERS.sub("", text)
        if delay_s is None:
            log.error("action failed, restarts exhausted", restarts=restarts, error=text)
            again = f" again after {restarts} restart{'' if restarts == 1 else 's'}" if restarts else ""
            strategy = "NO_RESTART" if self._strategy == NO_RESTART else self._strategy
            raise RestartsExhausted(
                f"the action failed{again}, and {strategy} allows no {'more' if restarts else 'restart'}; the "
                f"last failure was {text}{f': {why}' if why else ''}{self._like_a_bug()}"
            ) from error
        hint = {"hint": self._like_a_bug().lstrip(". ")} if self._alike == ALIKE_FOR_HINT else {}
        log.warning("action failed, restart scheduled", delay_s=delay_s, restart=restarts, error=text, **hint)
        return delay_s

    def _like_a_bug(self) -> str:
        """What to do about failures that repeat, as those of a bug do. Others may too, so none is given up sooner."""
        if self._alike < ALIKE_FOR_HINT:
            return ""
        return (
            f". It failed {self._alike} times in the same way, and Spark may have tried a task several times each time "
            "(spark.task.maxFailures). If it is a bug, restarts do not help: correct it, and see the next one sooner "
            "with run(..., restart=NO_RESTART)"
        )


LAZY = frozenset({"RDD", "DataFrame", "DataFrameWriter", "DataFrameWriterV2", "GroupedData"})


def is_lazy(result: object) -> bool:
    """Whether this is an RDD or a DataFrame, of this process or of Spark Connect, or what an async function returns.

    Imports nothing of Spark.
    """
    return isinstance(result, Coroutine) or any(
        kind.__name__ in LAZY and kind.__module__.startswith("pyspark.") for kind in type(result).__mro__
    )


PYTHON_TRACEBACK = "Traceback (most recent call last):"
LINES_CHARS_MAX = 1000
"""The whole text is in the exception that is chained."""


def _in_one_line(error: BaseException) -> str:
    """Describe a failure in one line: what the exception that has caused it says, up to an empty or indented line.

    If a task's own code has failed, that is the last exception of the traceback from Python, which PySpark has copied
    into the text. Otherwise, Py4J's own first line names only its call, and the JVM's exception is the second.
    """
    lines = text_of(error).strip().splitlines() or [""]
    begins = next((number for number, line in enumerate(lines) if PYTHON_TRACEBACK in line), len(lines))
    traceback = list(takewhile(lambda line: not line.startswith("\tat "), lines[begins + 1 :]))
    frames = [number for number, line in enumerate(traceback) if line.startswith('  File "')]
    if frames:
        lines = list(dropwhile(lambda line: line.startswith("  "), traceback[frames[-1] :])) or lines
    elif len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        lines = [lines[1].lstrip(": "), *lines[2:]]
    text = " ".join(takewhile(lambda line: line[:1].strip(), lines))
    return text if len(text) <= LINES_CHARS_MAX else f"{text[: LINES_CHARS_MAX - 3]}..."
