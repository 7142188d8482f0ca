"""Runs the user's Spark action, and again after a failure that a restart may fix (H15).

Spark restarts tasks and stages by itself; a job that has failed it does not. The coordinators are reset to the last
completed checkpoint before the first task of the next start is ready (H55), so all that is left to do is to call the
action once more, after a delay that the restart strategy grants.
"""

from __future__ import annotations

import time
from typing import Protocol

import structlog

from actors.coordination import CheckpointFailed, ResetNotSupported
from protocol.restart import RestartBackoff, RestartStrategy
from spark_bridge.errors import RestartsExhausted, SidecarError

__all__ = ["Restarter", "Runs"]

log = structlog.get_logger("headgate.restarts")


class Runs(Protocol):
    """What the restarter asks of the sidecar. Loop only."""

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        """How often a run or a coordinator has failed so far, and the coordinator's cause of the last time, if any."""
        ...

    @property
    def fenced(self) -> Exception | None:
        """Why this application may not go on at all, if it may not."""
        ...

    async def settle(self) -> str:
        """Return when all runs are over and every final checkpoint has ended: why some output is not committed, or
        nothing."""
        ...


class Restarter:
    """One call of ``Sidecar.run``. Loop only; it never sleeps itself, so each kind of sidecar waits in its own way."""

    def __init__(self, runs: Runs, strategy: RestartStrategy) -> None:
        self._runs = runs
        self._strategy = strategy
        self._backoff = RestartBackoff(strategy)
        self._failures_before = 0
        self._last_error: BaseException | None = None

    async def begin(self) -> None:
        """The action is about to be called."""
        self._failures_before, _ = self._runs.failures
        self._backoff.begun(time.monotonic())

    async def succeeded(self) -> float | None:
        """The action has returned. None: its output is committed. Else the seconds until the action is to be called
        again, because a coordinator failed behind it, or its last output could not be committed.

        Raises ``RestartsExhausted`` where no further start is granted.
        """
        uncommitted = await self._runs.settle()
        if uncommitted:
            return self._delay(CheckpointFailed(f"the last output could not be committed: {uncommitted}"))
        if self._has_failed():
            _, cause = self._runs.failures
            return self._delay(cause or SidecarError("a run failed, although the action returned"))
        return None

    async def failed(self, error: Exception) -> float:
        """The action has raised ``error``: the seconds until it is to be called again.

        Raises ``error`` itself where no run of a coordinated operator has failed, for then a restart mends nothing;
        ``RestartsExhausted`` where no further start is granted.
        """
        await self._runs.settle()
        if not self._has_failed():
            raise error
        return self._delay(error)

    def _has_failed(self) -> bool:
        return self._runs.failures[0] > self._failures_before

    def _delay(self, error: BaseException) -> float:
        if self._runs.fenced is not None:
            raise self._runs.fenced from error
        _, cause = self._runs.failures
        if isinstance(cause, ResetNotSupported):
            raise cause from self._last_error or error  # each further run would be refused like this one
        self._last_error = error
        delay_s = self._backoff.failed(time.monotonic())
        restarts = self._backoff.restarts
        text = f"{type(error).__name__}: {_first_line(error)}"
        if delay_s is None:
            log.error("the action failed, and is given up", restarts=restarts, error=text)
            raise RestartsExhausted(
                f"the action failed again after {restarts} restarts, and {self._strategy} allows no more; "
                f"the last failure was {text}"
            ) from error
        log.warning("action failed, restart scheduled", delay_s=delay_s, restart=restarts, error=text)
        return delay_s


def _first_line(error: BaseException) -> str:
    """What failed, in one line. Py4J's own first line names only its call; the JVM's exception is the second."""
    lines = str(error).strip().splitlines() or [""]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        return lines[1].lstrip(": ")
    return lines[0]
