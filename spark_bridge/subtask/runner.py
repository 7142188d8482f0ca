# SPDX-License-Identifier: Apache-2.0

"""Runs one task from its registration to its end. Spark gets an ordinary iterator of outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from protocol.describing import describe, is_a, is_encodable, readable, traceback_of
from protocol.errors import AttemptOver, InputRefused
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.io_loop import serve
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import OperatorParts
from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["run_subtask", "run_subtask_with"]

_log = logging.getLogger(__name__)

FAILURE_CHARS_MAX = 2000


def run_subtask(
    make_operator: Callable[[], SubtaskOperator] | None,
    endpoint: TaskEndpoint,
    identity: TaskIdentity,
    records: Iterable[Any],
    parts: Mapping[str, Callable[[], SubtaskOperator]] | None = None,
    stages: Sequence[str] = (),
) -> Generator[Any, None, None]:
    """Register this task, run its operator over ``records``, and yield what it yields.

    ``parts`` makes the named parts of the operator. ``stages`` are those of a chain, which has no other operator:
    ``make_operator`` is None then.

    Nothing happens before the first ``next()``. However the generator ends (completely, by an exception, or abandoned
    by ``take(1)``), the operator is closed, and the thread and the socket are gone. The coordinator receives the text
    of an operator's exception; Spark gets the exception unchanged, unless its text is not valid Unicode: then one with
    the escaped text. The iterator ends only after the coordinator has taken every event that was sent, so a task that
    succeeds loses nothing.

    Raises:
        CannotReachSidecar, RegistrationFailed, RegistrationRefused, HandshakeFailed, VersionMismatch: the task could
            not start.
        AttemptOver: the driver ended the attempt, or it had no connection for too long.
        TimedOut: the coordinator's ``subtask_ready`` did not return within ``ready_timeout_s``, or the coordinator did
            not take everything within ``finish_timeout_s``.
    """
    return run_subtask_with(
        lambda: SubtaskChannel(endpoint, identity),
        lambda: OperatorParts(make_operator, parts or {}, stages),
        endpoint,
        identity,
        lambda _: records,
    )


def run_subtask_with(
    make_channel: Callable[[], TaskChannel],
    make_parts: Callable[[], OperatorParts],
    endpoint: TaskEndpoint,
    identity: TaskIdentity,
    open_records: Callable[[OperatorParts], Iterable[Any]],
) -> Generator[Any, None, None]:
    """As ``run_subtask``, over the caller's own channel: the one of ``headgate.testing`` needs no connection."""
    channel = make_channel()
    run = _Run(channel, endpoint)
    try:
        parts = run.open(make_parts, identity)
        for output in run.outputs(parts, iter(open_records(parts))):
            yield output
            parts.between_outputs()
        run.finish(parts)
    except GeneratorExit:
        run.abandon()
        raise
    except BaseException as error:
        run.fail(error)
        if (escaped := _escaped(error)) is not None:
            raise escaped from None
        raise
    finally:
        channel.close()


def _escaped(error: BaseException) -> Exception | None:
    """An exception to raise instead, if Spark's worker could not write the traceback: it would hang."""
    text = traceback_of(error, chars_max=inf)
    if text is None:
        return RuntimeError(f"raised an exception that Python cannot show: {describe(error)}")
    if not is_encodable(text):
        return RuntimeError(f"raised with a text that is not valid Unicode, and is escaped here:\n{readable(text)}")
    return None


class _Run:
    """The steps of a run. Each of its ends happens at most once."""

    def __init__(self, channel: TaskChannel, endpoint: TaskEndpoint) -> None:
        self._channel = channel
        self._endpoint = endpoint
        self._parts: OperatorParts | None = None  # until they are closed
        self._outputs: Iterator[Any] | None = None
        self._opened = False
        self._registered = False
        self._end_reported = False

    def open(self, make_parts: Callable[[], OperatorParts], identity: TaskIdentity) -> OperatorParts:
        registered = self._channel.open(serve)
        self._registered = True
        self._parts = parts = make_parts()
        if registered.positions_refused and parts.counts_records:  # H174
            raise InputRefused(f"operator {self._endpoint.operator_id!r}: {registered.positions_refused}")
        parts.open(self._channel, self._endpoint, identity, registered)
        self._opened = True
        parts.wait_until_ready()
        return parts

    def outputs(self, parts: OperatorParts, records: Iterator[Any]) -> Iterator[Any]:
        self._outputs = parts.outputs(records)
        return self._outputs

    def finish(self, parts: OperatorParts) -> None:
        """The outputs are complete: report the end, close the operator, and wait until everything was taken."""
        deadline = self._channel.now() + self._endpoint.finish_timeout_s
        self._report_end(parts, deadline)
        self._close_parts()
        self._channel.wait_until_finish_is_confirmed(deadline)

    def abandon(self) -> None:
        """Nothing takes more outputs. Spark counts this as a success (``take(1)``), so the report says the same.

        If the task fails after all, further down the same iterator, Spark reports it, and a revoked success is a
        failure like any other (H17). Nothing may be raised here.
        """
        self._close_outputs_quietly()
        deadline = self._channel.now() + self._endpoint.failure_timeout_s
        may_report = self._opened and self._channel.over is None and self._channel.on_task_thread
        try:
            if may_report and self._parts is not None:
                self._report_end(self._parts, deadline)
        except AttemptOver:
            may_report = False  # Spark killed the task, or its job has ended
        except BaseException as error:
            may_report = False
            _log.warning(
                "task %s: its output was abandoned, and its end could not be reported: %s",
                self._channel.key[0],
                describe(error),
            )
        self._close_parts()
        if may_report:
            self._wait_for_confirmation_quietly(deadline)

    def fail(self, error: BaseException) -> None:
        """``error`` is about to reach Spark. Nothing may be raised in its place."""
        self._channel.stop_urgent(self._endpoint.failure_timeout_s)
        self._close_outputs_quietly()
        self._close_parts()
        if is_a(error, AttemptOver):
            # The driver has Spark kill this attempt. An exception that reached Spark before the kill would count
            # against spark.task.maxFailures; after the kill it does not.
            time.sleep(self._endpoint.kill_wait_s)
        if not self._registered or self._end_reported or self._channel.over is not None:
            return
        text = describe(error)
        try:
            self._channel.finish_with_failure(text[:FAILURE_CHARS_MAX])
        except AttemptOver:
            pass  # the attempt is already over for the driver
        except Exception as failure:
            _log.warning("task %s: its failure could not be reported: %s", self._channel.key[0], describe(failure))
        else:
            self._wait_for_confirmation_quietly(self._channel.now() + self._endpoint.failure_timeout_s)

    def _report_end(self, parts: OperatorParts, deadline: float) -> None:
        while not self._end_reported:
            urgent_came = self._channel.wait_until_urgent_are_handled(deadline)
            parts.calls.handle_pending()
            if urgent_came is not None:
                self._end_reported = self._channel.try_finish(parts.final_state(), deadline, urgent_came)

    def _wait_for_confirmation_quietly(self, deadline: float) -> None:
        try:
            self._channel.wait_until_finish_is_confirmed(deadline)
        except AttemptOver:
            pass  # the driver ends the attempt as soon as it knows of the failure
        except Exception as error:
            _log.warning("task %s: the report of its end was not confirmed: %s", self._channel.key[0], describe(error))

    def _close_outputs_quietly(self) -> None:
        outputs, self._outputs = self._outputs, None
        close = getattr(outputs, "close", None)
        try:
            if close is not None:
                close()
        except BaseException:
            _log.exception("process() raised while its outputs were being closed")

    def _close_parts(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            self._channel.stop_urgent(self._endpoint.failure_timeout_s)  # no handler runs in or after close()
            parts.close()
