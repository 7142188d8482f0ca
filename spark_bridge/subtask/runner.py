# SPDX-License-Identifier: Apache-2.0

"""Runs one task from its registration to its end: its I/O thread, and its steps on the task's own thread.

Spark gets an ordinary iterator of outputs. Meanwhile the I/O thread reads, writes and reconnects.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final

from protocol.describing import describe, is_a, is_encodable, readable, traceback_of, type_name
from protocol.errors import AttemptOver, HandshakeFailed, InputRefused, RemoteProtocolError, VersionMismatch
from protocol.wire.messages import AttemptEnded, Refused, Resumed
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.connection import Connection, Interrupted
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import OperatorParts
from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["run_subtask", "run_subtask_with"]

_log = logging.getLogger(__name__)

FAILURE_CHARS_MAX = 2000
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
BROKEN_IN_A_ROW_MAX: Final = 8  # connections in a row that break the protocol end the attempt


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
        deadline = self._report_end(parts, self._channel.now() + self._endpoint.finish_timeout_s)
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
                deadline = self._report_end(self._parts, deadline)
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

    def _report_end(self, parts: OperatorParts, deadline: float) -> float:
        """Report the end. Return the deadline of the rest, which is later by the time that uploads took."""
        channel = self._channel
        while not self._end_reported:
            urgent_came = channel.wait_until_urgent_are_handled(deadline)
            parts.calls.handle_pending()
            if urgent_came is not None:
                state, began = parts.final_state(), channel.now()
                if state.files is not None:
                    channel.store_last(state.files)
                handled = False
                while not channel.wait_for_uploads():
                    parts.calls.handle_pending()
                    handled = True
                deadline += channel.now() - began
                if handled:
                    continue  # the state is from before that; what is stored of it is not stored again
                files = None if state.files is None else channel.last_files()
                self._end_reported = channel.try_finish(state.data, deadline, urgent_came, files)
        return deadline

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


# --- the I/O thread ------------------------------------------------------------------------------------------------


def serve(channel: SubtaskChannel) -> None:
    """The body of the I/O thread. It returns when the channel is closed or its attempt is over, and raises nothing."""
    try:
        _Loop(channel).run()
    except Interrupted:
        pass
    except BaseException as error:
        _log.exception("task %s: the I/O thread failed", channel.key[0])
        channel.end(f"the task's connection to the driver failed: {describe(error)}")
    finally:
        channel.loop_ended()


class _Loop:
    def __init__(self, channel: SubtaskChannel) -> None:
        self._channel = channel

    def run(self) -> None:
        while not self._channel.stopping:
            connection = self._channel.connection
            if connection is None:
                self._reconnect()
                continue
            try:
                self._converse(connection)
            except RemoteProtocolError as error:
                # The peer sends again what is missing here, so a new connection repairs a gap or a torn frame.
                self._lost(str(error))
                self._channel.take_breach()  # it is counted here, and would otherwise count twice
                self._count_broken(error)
            except OSError as error:
                self._lost(str(error))
                if (breach := self._channel.take_breach()) is not None:  # the task's thread read it
                    self._count_broken(breach)

    def _count_broken(self, error: RemoteProtocolError) -> None:
        self._channel.breaches_in_a_row += 1
        if self._channel.breaches_in_a_row >= BROKEN_IN_A_ROW_MAX:
            self._channel.end(
                f"{BROKEN_IN_A_ROW_MAX} connections in a row broke the protocol, the last one by: {error}"
            )

    def _lost(self, why: str) -> None:
        _log.info("task %s: connection lost: %s", self._channel.key[0], why)
        self._channel.lose_connection()

    def _converse(self, connection: Connection) -> None:
        """Read and write until the channel stops. Raises if the connection breaks."""
        channel = self._channel
        with selectors.DefaultSelector() as selector:
            selector.register(channel.waker, selectors.EVENT_READ)
            registered = 0
            while not channel.stopping:
                wanted = channel.interests
                if wanted != registered:
                    _set_interests(selector, connection, registered, wanted)
                    registered = wanted
                for key, events in selector.select(channel.pass_time_and_watch()):
                    if key.fileobj is channel.waker:
                        channel.waker.drain()
                        continue
                    if events & selectors.EVENT_WRITE:
                        channel.write()
                    if events & selectors.EVENT_READ:
                        channel.read()

    def _reconnect(self) -> None:
        """Try until a connection is up, with increasing pauses. The machine's deadline ends the attempt (H24)."""
        channel = self._channel
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = channel.pass_time()
            if channel.stopping:
                return
            try:
                self._resume(time.monotonic() + min(10.0, left_s if left_s is not None else 10.0))
                return
            except (HandshakeFailed, VersionMismatch) as error:
                # Another sidecar listens there now, which can never know this task.
                channel.end(f"the connection broke, and another sidecar answers at its address: {error}")
                return
            except RemoteProtocolError as error:
                self._count_broken(error)
            except OSError as error:
                _log.info("task %s: reconnection failed, will retry: %s", channel.key[0], error)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _resume(self, deadline: float) -> None:
        channel = self._channel
        connection = Connection.open(channel.endpoint, deadline, channel.waker)
        attached = False
        try:
            answer, *rest = connection.exchange(channel.resume_message(), deadline)
            match answer:
                case Resumed(received_seq=received_seq):
                    channel.attach_connection(connection, received_seq, rest)
                    attached = True
                case Refused(message=why) | AttemptEnded(reason=why):
                    channel.end(why)
                case other:
                    raise RemoteProtocolError(f"the sidecar answered a resumption with {type_name(other)}")
        finally:
            if not attached and channel.connection is not connection:
                connection.close()

    def _pause(self, pause_s: float) -> None:
        """Wait, unless the attempt is being closed. The task's own wake-ups do not end the wait."""
        channel = self._channel
        left_s = channel.pass_time()
        deadline = time.monotonic() + (pause_s if left_s is None else min(pause_s, left_s))
        with selectors.DefaultSelector() as selector:
            selector.register(channel.waker, selectors.EVENT_READ)
            while not channel.stopping and (rest_s := deadline - time.monotonic()) > 0:
                if selector.select(rest_s):
                    channel.waker.drain()


def _set_interests(selector: selectors.BaseSelector, connection: Connection, registered: int, wanted: int) -> None:
    """Watch the socket for ``wanted``. A selector accepts no empty set of events: then the socket is removed."""
    if not wanted:
        selector.unregister(connection.sock)
    elif registered:
        selector.modify(connection.sock, wanted)
    else:
        selector.register(connection.sock, wanted)
