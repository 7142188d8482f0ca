"""The driver's server and its bridge: connections and facts in, the real ledger's decisions out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.attempts import (
    AcceptAttempt,
    AttemptLedger,
    CancelJobs,
    ConnectionExpired,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
)
from protocol.messages import Refused, Register, Resume
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import demand
from tests.simulation.gateways import Arrived, Attach, GatewayTable, Lost
from tests.simulation.network import Connection
from tests.simulation.shared import Boxes


@dataclass
class Bridge:
    """See the module."""

    boxes: Boxes
    table: GatewayTable
    ledger: AttemptLedger = field(init=False)
    queries: deque[QueryStatus] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.ledger = AttemptLedger(LedgerConfig(heal_after_s=1.0, query_every_s=0.5, audit_every_s=5.0))
        self.ledger.handle(OperatorAdded(OPERATOR, self.boxes.application.parallelism), self.boxes.world.now)

    def read(self, connection: Connection) -> None:
        """The server reads from a connection, or notices its end."""
        table, boxes = self.table, self.boxes
        gateway = table.by_connection.get(connection.connection_id)
        if not connection.up:
            connection.server_knows = True
            if gateway is not None:
                gateway.box.append(Lost(connection.connection_id))
            else:
                boxes.bridge.append(("abandoned", connection.connection_id))
            return
        count = boxes.world.random.randint(1, len(connection.up))
        messages = [connection.up.popleft() for _ in range(count)]
        if gateway is None:
            first, *messages = messages
            if isinstance(first, Register):
                boxes.bridge.append(("register", connection, first))
                demand(not messages, "a task spoke before it was registered")
                return
            assert isinstance(first, Resume)
            gateway = table.open.get(connection.task_attempt_id)
            if gateway is None:
                connection.send_down(Refused(connection.task_attempt_id, 4, "the attempt is over"))
                connection.close_by_server()
                return
            table.by_connection[connection.connection_id] = gateway
            gateway.box.append(Attach(connection, first.received_seq))
        if messages:
            gateway.box.append(Arrived(connection.connection_id, messages))

    def receive(self) -> None:
        message = self.boxes.bridge.popleft()
        registering = self.table.registering
        match message:
            case ("register", connection, register):
                registering[connection.connection_id] = connection
                message = RegistrationArrived(connection.connection_id, register)
            case ("abandoned", connection_id):
                connection = registering.pop(connection_id, None)
                if connection is None:
                    return
                message = ConnectionExpired(OPERATOR, connection.task_attempt_id)
            case _:
                pass
        effects = self.ledger.handle(message, self.boxes.world.now)
        self.ledger.check_invariants()
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: LedgerEffect) -> None:
        boxes, engine = self.boxes, self.boxes.world.engine
        match effect:
            case RefuseRegistration(connection_id, tid, code, text):
                connection = self.table.registering.pop(connection_id, None)
                if connection is not None:
                    connection.send_down(Refused(tid, code, text))
                    connection.close_by_server()
                boxes.world.tell(f"ledger refuses task {tid}: {text}")
            case KillTask(tid, reason):
                boxes.world.tell(f"ledger kills task {tid}: {reason}")
                engine.request_kill(tid, reason)
            case CancelJobs(job_ids, reason):
                boxes.world.tell(f"ledger cancels jobs {job_ids}: {reason}")
                engine.cancel(job_ids, reason)
            case QueryStatus():
                self.queries.append(effect)
            case ReportStale():
                pass
            case AcceptAttempt(connection_id):
                connection = self.table.registering.pop(connection_id)
                boxes.tracker.append((effect, connection))
            case _:
                boxes.tracker.append(effect)

    def answer_query(self) -> None:
        query = self.queries.popleft()
        self.boxes.bridge.append(self.boxes.world.engine.status(query.task_attempt_ids, query.job_ids))
