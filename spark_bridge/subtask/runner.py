"""One task from its first word to its last: what Spark gets is an ordinary iterator of outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from protocol.errors import AttemptOver
from protocol.wire.messages import SubtaskState
from spark_bridge.subtask.context import SubtaskContext, checked_state
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.valve_io import ValveIo

__all__ = ["run_subtask"]

_log = logging.getLogger(__name__)

FAILURE_CHARS_MAX = 2000


def run_subtask(
    make_operator: Callable[[], SubtaskOperator],
    endpoint: TaskEndpoint,
    identity: TaskIdentity,
    records: Iterable[Any],
) -> Generator[Any, None, None]:
    """Register this task, run its operator over ``records``, and yield what it yields.

    Nothing happens before the first ``next()``. Whichever way the generator ends (to its end, by an
    exception, or abandoned by ``take(1)``), the operator is closed and thread and socket are gone. An
    exception of the operator is told to the coordinator as text and passes to Spark unchanged. The iterator
    ends only when the coordinator has taken every event that was sent, so that a success of Spark's loses
    nothing.

    Raises:
        CannotReachSidecar, RegistrationFailed, RegistrationRefused, HandshakeFailed, VersionMismatch: no
        start.
        AttemptOver: the attempt was given up by the driver, or had no connection for too long.
        TimedOut: the coordinator's ``subtask_ready`` did not return within ``ready_timeout_s``, or it did not take
        everything within ``finish_timeout_s``.
    """
    io = ValveIo(endpoint, identity)
    run = _Run(io, endpoint)
    try:
        context = run.open(make_operator, identity)
        outputs = run.outputs(context, iter(records))
        for output in outputs:
            yield output
            context.between_outputs()
        run.finish(context)
    except GeneratorExit:
        run.abandon()
        raise
    except BaseException as error:
        run.fail(error)
        raise
    finally:
        io.close()


def restored_state(operator: SubtaskOperator, states: Sequence[SubtaskState]) -> bytes | None:
    """What ``open`` restores: nothing, the one state as it is, or what the operator makes of several (H52)."""
    if not states:
        return None
    if len(states) == 1:
        return states[0].state
    return checked_state(operator, "merge_states", operator.merge_states(dict(sorted(states))))


class _Run:
    """The ends of a run, each exactly once."""

    def __init__(self, io: ValveIo, endpoint: TaskEndpoint) -> None:
        self._io = io
        self._endpoint = endpoint
        self._operator: SubtaskOperator | None = None
        self._outputs: Iterator[Any] | None = None
        self._context: SubtaskContext | None = None
        self._registered = False
        self._goodbye_said = False

    def open(self, make_operator: Callable[[], SubtaskOperator], identity: TaskIdentity) -> SubtaskContext:
        registered = self._io.open()
        self._registered = True
        self._operator = operator = make_operator()
        context = SubtaskContext(self._io, operator, self._endpoint, identity, registered)
        context.open_operator(restored_state(operator, registered.states))
        self._context = context
        context.wait_until_ready()
        return context

    def outputs(self, context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        assert self._operator is not None
        produced = self._operator.process(context.records(records))
        self._outputs = iter(()) if produced is None else iter(produced)
        return self._outputs

    def finish(self, context: SubtaskContext) -> None:
        """The outputs have ended well: say so, close the operator, and leave when everything was taken."""
        deadline = time.monotonic() + self._endpoint.finish_timeout_s
        self._say_it_ended_well(context, deadline)
        operator, self._operator = self._operator, None
        if operator is not None:
            operator.close()
        self._io.wait_until_heard(deadline)

    def abandon(self) -> None:
        """Nobody wants more outputs. For Spark this is a success (``take(1)``), so the goodbye says no
        failure.

        If the task fails after all, further down the same iterator, Spark's own fact says so, and a success
        that is revoked is a failure like any other (H17). Nothing may be raised here.
        """
        self._close_outputs_quietly()
        deadline = time.monotonic() + self._endpoint.failure_timeout_s
        may_speak = self._context is not None and self._io.over is None and self._io.on_task_thread
        try:
            if may_speak and self._context is not None:
                self._say_it_ended_well(self._context, deadline)
        except AttemptOver:
            may_speak = False  # Spark has killed it, or its job has ended
        except Exception as error:
            may_speak = False
            _log.warning("task %s was abandoned, and its goodbye failed: %r", self._io.key[0], error)
        self._close_operator_quietly()
        if may_speak:
            self._wait_until_heard_quietly(deadline)

    def fail(self, error: BaseException) -> None:
        """``error`` is on its way to Spark. Nothing may be raised in its place."""
        self._close_outputs_quietly()
        self._close_operator_quietly()
        if isinstance(error, AttemptOver):
            # The driver has Spark kill this attempt. An exception that came first would count as one of the failures
            # that Spark bears (spark.task.maxFailures); once it knows of the kill, none does.
            time.sleep(self._endpoint.kill_wait_s)
        if not self._registered or self._goodbye_said or self._io.over is not None:
            return
        text = f"{type(error).__name__}: {error}"
        try:
            self._io.finish_badly(text[:FAILURE_CHARS_MAX])
        except AttemptOver:
            pass  # it is over for the driver already
        except Exception as failure:
            _log.warning("the goodbye of task %s could not be said: %s", self._io.key[0], failure)
        else:
            self._wait_until_heard_quietly(time.monotonic() + self._endpoint.failure_timeout_s)

    def _say_it_ended_well(self, context: SubtaskContext, deadline: float) -> None:
        operator = self._operator
        assert operator is not None
        while not self._goodbye_said:
            context.handle_pending()
            state = checked_state(operator, "final_state", operator.final_state())
            self._goodbye_said = self._io.try_finish_well(state, deadline)

    def _wait_until_heard_quietly(self, deadline: float) -> None:
        try:
            self._io.wait_until_heard(deadline)
        except AttemptOver:
            pass  # the driver answers a failure by ending the attempt
        except Exception as error:
            _log.warning("the goodbye of task %s was not heard: %s", self._io.key[0], error)

    def _close_outputs_quietly(self) -> None:
        outputs, self._outputs = self._outputs, None
        close = getattr(outputs, "close", None)
        try:
            if close is not None:
                close()
        except Exception:
            _log.exception("an operator's process() failed while it was closed")

    def _close_operator_quietly(self) -> None:
        operator, self._operator = self._operator, None
        if operator is None:
            return
        try:
            operator.close()
        except Exception:
            _log.exception("%s.close() failed", type(operator).__name__)
