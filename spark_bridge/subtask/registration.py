# SPDX-License-Identifier: Apache-2.0

"""Connects a new task to the sidecar and registers it."""

from __future__ import annotations

import errno
import os
import platform
import socket
import time

from protocol.describing import type_name
from protocol.errors import AttemptOver, RemoteProtocolError
from protocol.wire.messages import AttemptEnded, Downward, Refused, Register, Registered
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.connection import Connection, ConnectionBroken
from spark_bridge.subtask.errors import CannotReachSidecar, RegistrationFailed, RegistrationRefused
from spark_bridge.subtask.waker import Waker

__all__ = ["register"]

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
REFUSED_TIMEOUT_S = 2.0
"""How long to retry a refused connection. Short, because the driver is up before its tasks are."""


def register(
    endpoint: TaskEndpoint, identity: TaskIdentity, waker: Waker
) -> tuple[Connection, Registered, list[Downward]]:
    """Connect, authenticate and register. Return the connection, the answer, and the messages that came with it.

    Raises:
        CannotReachSidecar: no connection within ``connect_timeout_s``.
        RegistrationRefused: the sidecar refused the task; the message says why.
        RegistrationFailed: no answer within ``register_timeout_s``, or the connection broke meanwhile.
        HandshakeFailed, VersionMismatch: without a second try, which could not help.
        AttemptOver: Spark or the driver ended this attempt meanwhile.
    """
    connection = _reach(endpoint, waker)
    try:
        answer, *rest = _introduce(connection, endpoint, identity)
        match answer:
            case Registered():
                return connection, answer, rest
            case Refused(code=code, message=message):
                raise RegistrationRefused(code, message)
            case AttemptEnded(reason=reason):
                raise AttemptOver(f"task {identity.task_attempt_id} was ended before it began: {reason}")
            case other:
                raise RemoteProtocolError(f"the sidecar answered a registration with {type_name(other)}")
    except BaseException:
        connection.close()
        raise


def _reach(endpoint: TaskEndpoint, waker: Waker) -> Connection:
    began = time.monotonic()
    deadline = began + endpoint.connect_timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return Connection.open(endpoint, deadline, waker)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):  # an answer, not silence: nothing listens there
                deadline = min(deadline, began + REFUSED_TIMEOUT_S)
            if time.monotonic() + pause_s >= deadline:
                raise CannotReachSidecar(
                    f"cannot reach the sidecar at {endpoint.host}:{endpoint.port} from {socket.gethostname()} "
                    f"within {deadline - began:g} s: {error}. Check that the sidecar is still running (its `with` "
                    "block has not ended), and that its log does not say `event loop blocked`. If executors reach the "
                    "driver by another name or port, set advertised_host and advertised_port. If there is a firewall "
                    "between them, set a fixed port and open it"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _introduce(connection: Connection, endpoint: TaskEndpoint, identity: TaskIdentity) -> list[Downward]:
    message = Register(
        task_attempt_id=identity.task_attempt_id,
        operator_id=endpoint.operator_id,
        subtask=identity.subtask,
        run_id=identity.run_id,
        attempt_number=identity.attempt_number,
        mode=int(endpoint.mode),
        parallelism=endpoint.parallelism,
        location=f"{socket.gethostname()}/{os.getpid()}",
        python_version=platform.python_version(),
        action=identity.action,
    )
    who = f"task {identity.task_attempt_id} (subtask {identity.subtask} of {endpoint.operator_id!r})"
    try:
        return connection.exchange(message, time.monotonic() + endpoint.register_timeout_s)
    except ConnectionBroken as error:
        if error.errno == errno.ETIMEDOUT:
            raise RegistrationFailed(
                f"{who} reached the sidecar, which did not accept it within {endpoint.register_timeout_s:g} s. The "
                "sidecar holds a task back while an older attempt of the same subtask is alive, or while the "
                "coordinator is being reset. The driver's log says which; raise register_timeout_s to wait longer"
            ) from error
        raise RegistrationFailed(
            f"{who}: the connection broke before the sidecar accepted it: {error}. Look into the log of the "
            "driver for this task"
        ) from error
    except OSError as error:
        raise RegistrationFailed(
            f"{who}: the connection broke before the sidecar accepted it: {error}. Look into the log of the "
            "driver for this task"
        ) from error
