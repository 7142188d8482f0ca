"""What the bridge is told."""

from __future__ import annotations

from dataclasses import dataclass

from actors import ActorRef, Reply
from actors.coordination.connection import AttemptConnection
from actors.coordination.messages import TrackerMessage
from protocol.attempts import LedgerInput
from protocol.wire.messages import Register
from spark_bridge.bridge.relay import RelayedFact
from spark_bridge.bridge.spark_commands import CommandMessage
from spark_bridge.bridge.takeover import InheritedRuns

__all__ = [
    "AddOperator",
    "AwaitRunsOver",
    "BridgeMessage",
    "FailRuns",
    "InheritRuns",
    "RegistrationAbandoned",
    "RegistrationReceived",
    "RemoveOperator",
    "UnknownAttemptResumed",
]


@dataclass(frozen=True, slots=True)
class AddOperator:
    """An operator to be coordinated; answered when the ledger knows it, failed when the name is taken."""

    operator_id: str
    parallelism: int
    tracker_ref: ActorRef[TrackerMessage]
    reply_to: Reply[None]
    allow_fewer: bool = False


@dataclass(frozen=True, slots=True)
class RemoveOperator:
    """An operator to be forgotten, with its run; answered when that is done."""

    operator_id: str
    reply_to: Reply[None]


@dataclass(frozen=True, slots=True)
class AwaitRunsOver:
    """Answered once no operator has a run, or none of ``operator_ids`` has one, now or later."""

    reply_to: Reply[None]
    operator_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class FailRuns:
    """Every run that is under way is to fail, with its Spark job, for this cause; or those of ``operator_ids``."""

    cause: str
    operator_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class InheritRuns:
    """These runs were under way when this sidecar took over; it comes before any registration."""

    runs: InheritedRuns


@dataclass(frozen=True, slots=True)
class UnknownAttemptResumed:
    """An attempt of a sidecar that is dead wants to go on."""

    task_attempt_id: int


@dataclass(frozen=True, slots=True)
class RegistrationReceived:
    """A task wants to be accepted on this connection."""

    connection: AttemptConnection
    message: Register


@dataclass(frozen=True, slots=True)
class RegistrationAbandoned:
    """The connection of a registration closed before any gateway served it."""

    connection_id: int


BridgeMessage = (
    AddOperator
    | RemoveOperator
    | AwaitRunsOver
    | FailRuns
    | InheritRuns
    | UnknownAttemptResumed
    | RegistrationReceived
    | RegistrationAbandoned
    | RelayedFact
    | LedgerInput
    | CommandMessage
)
