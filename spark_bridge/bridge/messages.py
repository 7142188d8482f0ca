# SPDX-License-Identifier: Apache-2.0

"""The messages of the bridge actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors import ActorRef, Reply
from actors.coordination.engine.messages import AttemptConnection, TrackerMessage
from protocol.attempts import LedgerInput, QueryStatus
from protocol.attempts.views import AttemptView, KnownAttempts, RunView
from protocol.facts import TaskPlace
from protocol.wire.messages import Register
from spark_bridge.bridge.relay import RelayedFact
from spark_bridge.bridge.runs import InheritedRuns
from spark_bridge.common.errors import OperatorBroken

__all__ = [
    "AddOperator",
    "AwaitRunsOver",
    "BridgeMessage",
    "CancelCommand",
    "CommandFailed",
    "CommandMessage",
    "FailRuns",
    "InheritRuns",
    "KillCommand",
    "RegistrationAbandoned",
    "RegistrationReceived",
    "RemoveOperator",
    "StopActions",
    "UnknownAttemptResumed",
    "ViewAttempts",
    "ViewRun",
    "WatchCommand",
]


@dataclass(frozen=True, slots=True)
class AddOperator:
    """Coordinate an operator. Answered when the ledger knows it; fails if the name is taken.

    ``broken`` is called if the operator's actors end with an error that no user's code has raised.
    """

    operator_id: str
    parallelism: int
    tracker_ref: ActorRef[TrackerMessage]
    reply_to: Reply[None]
    allow_fewer: bool = False
    broken: Callable[[OperatorBroken], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class RemoveOperator:
    """Forget an operator and its run. Answered when that is done."""

    operator_id: str
    reply_to: Reply[None]


@dataclass(frozen=True, slots=True)
class AwaitRunsOver:
    """Answered as soon as no operator has a run and no job of a stopped action is left.

    With ``operator_ids``, only these operators and the jobs of ``action_ids`` count.
    """

    reply_to: Reply[None]
    operator_ids: frozenset[str] | None = None
    action_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FailRuns:
    """Fail every current run, or those of ``operator_ids``, with their Spark jobs, for this cause."""

    cause: str
    operator_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class StopActions:
    """Cancel every Spark job of these actions, including those that start later, for this cause."""

    cause: str
    action_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class InheritRuns:
    """These runs existed when this sidecar took over. Comes before any registration."""

    runs: InheritedRuns


@dataclass(frozen=True, slots=True)
class UnknownAttemptResumed:
    """An attempt that a dead sidecar had accepted wants to continue."""

    task_attempt_id: int


@dataclass(frozen=True, slots=True)
class ViewRun:
    """Answered with the state of an operator's run at that moment; None for an unknown operator."""

    operator_id: str
    reply_to: Reply[RunView | None]


@dataclass(frozen=True, slots=True)
class ViewAttempts:
    """Answered with at most ``count`` attempts of an operator's run, from number ``first`` on.

    ``known`` is what the asker has seen; see ``views.view_attempts``.
    """

    operator_id: str
    first: int
    count: int
    known: KnownAttempts
    reply_to: Reply[list[AttemptView]]


@dataclass(frozen=True, slots=True)
class RegistrationReceived:
    """A task asks to be accepted on this connection."""

    connection: AttemptConnection
    message: Register


@dataclass(frozen=True, slots=True)
class RegistrationAbandoned:
    """The connection of a registration closed before any gateway served it."""

    connection_id: int


@dataclass(frozen=True, slots=True)
class KillCommand:
    """Kill a task attempt. ``failures`` counts how often Spark has not accepted it yet.

    ``place``: what its registration claims to be; Spark kills it only there.
    """

    task_attempt_id: int
    reason: str
    place: TaskPlace | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Cancel a job. ``failures`` counts how often Spark has not accepted it yet."""

    job_id: int
    reason: str
    failures: int = 0


@dataclass(frozen=True, slots=True)
class WatchCommand:
    """Deliver the facts of a stage, and of a task. ``failures`` counts how often the relay has not accepted it yet."""

    stage_id: int
    task_attempt_id: int
    failures: int = 0


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """Spark has not accepted a command, or not answered a query."""

    command: KillCommand | CancelCommand | WatchCommand | QueryStatus
    error: Exception


CommandMessage = KillCommand | CancelCommand | WatchCommand | CommandFailed

BridgeMessage = (
    AddOperator
    | RemoveOperator
    | AwaitRunsOver
    | FailRuns
    | StopActions
    | InheritRuns
    | UnknownAttemptResumed
    | RegistrationReceived
    | RegistrationAbandoned
    | ViewRun
    | ViewAttempts
    | RelayedFact
    | LedgerInput
    | CommandMessage
)
