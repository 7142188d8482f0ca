# SPDX-License-Identifier: Apache-2.0

"""The open gateways of one operator: each from the acceptance of an attempt until the attempt is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from actors import ActorContext, ActorRef
from actors.coordination.engine.announcer import Announcer, GatewayLine
from actors.coordination.engine.connection import AttemptConnection
from actors.coordination.engine.gateway import GatewayActor
from actors.coordination.engine.gateway_sight import GatewaySight, GatewayView
from actors.coordination.engine.messages import (
    AttachConnection,
    CoordinatorMessage,
    GatewayMessage,
    SubtaskReadyWithGateway,
    TrackerMessage,
)
from actors.coordination.engine.operator_config import UNBOUNDED, OperatorConfig, OperatorPorts
from actors.coordination.host.gateway import AttemptSends
from actors.coordination.statistics import OperatorStatistics
from protocol.barrier_tracker import RestoreAttempt
from protocol.errors import AttemptOver
from protocol.gateway.machine import GatewayMachine
from protocol.gateway.types import AttemptIsOver
from protocol.ids import ExecutionAttempt
from protocol.parts import PartTable
from protocol.wire.messages import Positions, Registered


@dataclass(frozen=True, slots=True)
class _Gateway:
    ref: ActorRef[GatewayMessage]
    line: GatewayLine[GatewayMessage]
    sends: AttemptSends
    events_sent: Positions  # in the attempt's restored history


_VIEW = attrgetter("view")
_CLOSED: Any = SimpleNamespace(view=None)


class OpenGateways:
    """Children of the tracker's actor, one per attempt. Used on the event loop only."""

    def __init__(
        self,
        context: ActorContext[TrackerMessage],
        config: OperatorConfig,
        ports: OperatorPorts,
        statistics: OperatorStatistics,
        coordinator_ref: ActorRef[CoordinatorMessage],
        announcer: Announcer[GatewayMessage],
        table: PartTable,
    ) -> None:
        self._announcer = announcer
        self._table = table
        self._context = context
        self._config = config
        self._ports = ports
        self._statistics = statistics
        self._coordinator_ref = coordinator_ref
        self._open: dict[int, _Gateway] = {}
        self._sights: dict[int, GatewaySight] = {}

    def open(self, effect: RestoreAttempt, connection: AttemptConnection, positions_refused: str = "") -> None:
        """The attempt is accepted: tell it on its connection what to restore."""
        context, attempt, limits = self._context, effect.attempt, self._config.gateway
        registered = Registered(
            attempt.task_attempt_id,
            attempt.attempt,
            effect.checkpoint_id,
            effect.states,
            effect.held,
            limits.reconnect_timeout_s,
            limits.upward_events_max,
            limits.upward_bytes_max,
            effect.events_sent,
            self._ports.attempt_token(attempt),
            limits.heartbeat_interval_s or 0.0,
            self._config.checkpoint.hold_events,
            effect.input_begins_again,
            positions_refused,
            self._table.parts,
        )
        sight = GatewaySight(
            GatewayMachine(
                attempt,
                limits,
                barriers_apart=self._config.inject_barrier is not None,
                hold_events=self._config.checkpoint.hold_events,
                senders={held.sender for held in effect.held} or (),
                table=self._table,
            )
        )
        line: GatewayLine[GatewayMessage] = GatewayLine()
        bounds = limits.events_max, limits.bytes_max
        sends = AttemptSends(attempt, line.tell_direct, bounds, context.clock.now, self._config.wire_limits)
        line.ref = ref = context.spawn(
            self._actor(sight, registered, sends, line),
            name=f"gateway-{attempt.subtask}-{attempt.attempt}",
            mailbox=UNBOUNDED,
            log_context={
                "subtask": attempt.subtask,
                "attempt": attempt.attempt,
                "task_attempt_id": attempt.task_attempt_id,
            },
        )
        self._open[attempt.task_attempt_id] = _Gateway(ref, line, sends, effect.events_sent)
        self._sights[attempt.task_attempt_id] = sight
        self._statistics.attempts += 1
        ref.tell(AttachConnection(connection, None))
        self._ports.gateway_opened(attempt, ref, connection)

    def readiness(self, attempt: ExecutionAttempt) -> SubtaskReadyWithGateway | None:
        """The message to the coordinator about a ready attempt; None if its gateway is already closed (H11)."""
        gateway = self._open.get(attempt.task_attempt_id)
        if gateway is None:
            return None
        return SubtaskReadyWithGateway(attempt, gateway.sends, gateway.line, gateway.events_sent)

    def tell(self, attempts: Sequence[ExecutionAttempt], message: GatewayMessage) -> None:
        """Announce a message to the gateways of these attempts, as far as they are open."""
        found = [self._open.get(attempt.task_attempt_id) for attempt in attempts]
        self._announcer.announce([gateway.line for gateway in found if gateway is not None], message)

    def tell_all(self, message: GatewayMessage) -> None:
        self._announcer.announce([gateway.line for gateway in self._open.values()], message)

    def reject_sends(self, attempt: ExecutionAttempt, reason: str) -> None:
        """From now on the coordinator's sends to the attempt fail, even before it is told why (H14)."""
        gateway = self._open.get(attempt.task_attempt_id)
        if gateway is not None:
            gateway.sends.end(AttemptOver(f"{attempt} is over: {reason}"))

    def close(self, attempt: ExecutionAttempt, reason: str) -> None:
        """Reject further sends, and fail the events that the gateway had accepted (H26)."""
        self.reject_sends(attempt, reason)
        gateway = self._open.pop(attempt.task_attempt_id, None)
        if gateway is not None:
            del self._sights[attempt.task_attempt_id]
            gateway.line.end()
            gateway.ref.tell(AttemptIsOver(reason))
            self._ports.gateway_closed(attempt)

    def close_all(self, reason: str) -> None:
        for gateway in list(self._open.values()):
            self.close(gateway.sends.attempt, reason)

    def __len__(self) -> int:
        return len(self._open)

    def view(self, task_attempt_ids: Sequence[int]) -> list[GatewayView | None]:
        """The gateways of these attempts at this moment; None for one that is closed."""
        # In C, because somebody may look at 10,000 idle ones ten times a second.
        views: list[GatewayView | None] = list(map(_VIEW, map(self._sights.get, task_attempt_ids, repeat(_CLOSED))))
        if None in views:
            sights = map(self._sights.get, task_attempt_ids)
            views = [None if sight is None else sight.look() for sight in sights]
        return views

    def _actor(
        self, sight: GatewaySight, registered: Registered, sends: AttemptSends, line: GatewayLine[GatewayMessage]
    ) -> Callable[[], GatewayActor]:
        return lambda: GatewayActor(
            sight,
            registered,
            sends=sends,
            coordinator_ref=self._coordinator_ref,
            tracker_ref=self._context.self_ref,
            report=self._ports.report,
            statistics=self._statistics,
            line=line,
            table=self._table,
            inject_barrier=self._config.inject_barrier,
        )


__all__ = ["OpenGateways"]
