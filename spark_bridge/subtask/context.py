"""What an operator can do: talk to its coordinator, wait for it, and see which attempt it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from protocol.errors import GatewayFull, LocalProtocolError
from protocol.subtask.types import (
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxItem,
    MailboxStart,
)
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import Registered
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.valve_core import ValveStatistics
from spark_bridge.subtask.valve_io import ValveIo

__all__ = ["SubtaskContext"]


class SubtaskContext:
    """One attempt, as its operator sees it. Made by the framework, given to ``SubtaskOperator.open``.

    Methods that wait do so on the task's own thread. All of them raise ``AttemptOver`` once the attempt is
    over (killed, superseded, or without a connection for too long): let it pass, Spark ends the task.
    """

    def __init__(
        self,
        io: ValveIo,
        operator: SubtaskOperator,
        endpoint: TaskEndpoint,
        identity: TaskIdentity,
        registered: Registered,
    ) -> None:
        self._io = io
        self._operator = operator
        self._task_thread = threading.get_ident()
        self._inside: str | None = None
        self._awaits_start = False
        self._ready_timeout_s = endpoint.ready_timeout_s
        io.at_barrier = self._at_barrier
        self.operator_id = endpoint.operator_id
        self.parallelism = endpoint.parallelism
        self.subtask = identity.subtask
        self.task_attempt_id = identity.task_attempt_id
        self.attempt = registered.attempt
        self.checkpoint_id = registered.checkpoint_id
        """The checkpoint that ``state`` in ``open`` comes from; -1 is the virtual empty one (H4)."""
        self.restored_requests: tuple[Any, ...] = tuple(
            decode_event(held.payload) for held in registered.held if held.is_request
        )
        """The requests that were under way in the restored checkpoint, in the order in which they were asked.

        The coordinator gets them again, before anything new, and their answers are dropped. An operator whose state
        says that it was about to ask finds out here that it need not ask a second time."""

    @property
    def cancelled(self) -> bool:
        """Whether the attempt is over. An operator that computes for long may look, and return."""
        return self._io.over is not None

    @property
    def statistics(self) -> ValveStatistics:
        """What went over the wire so far."""
        return self._io.statistics

    def send_event(self, event: Any) -> None:
        """Send ``event``, any value that msgpack can carry; tuples arrive as lists.

        It is encoded at once. Events arrive in the order in which they were sent, each once (H30). During a
        checkpoint they wait in the valve and are part of the snapshot (H31); one that ``snapshot_state`` itself
        sends is part of that very snapshot, and waits for no room. Returns when the event is in the outgoing
        stream, not when it has arrived; a task ends well only when all have. The coordinator gets what ``open``
        sends after its ``subtask_ready``.

        Raises:
            EventEncodeError: ``event`` is no such value, or too large.
            TimedOut: the window stayed full for ``send_timeout_s`` (H27); the event was not sent.
            LocalProtocolError: the window is full inside ``open``, where no room can come; the event was not sent.
        """
        if self._runs_inside("open"):
            self._send_inside_open(encode_event(event))
        else:
            self._io.submit_event(encode_event(event), in_snapshot=self._runs_inside("snapshot_state"))

    def request(self, payload: Any, timeout_s: float = 30.0) -> Any:
        """Send ``payload`` and return the coordinator's answer (H33).

        No event is handled meanwhile, and a checkpoint that comes meanwhile is declined, unless the operator
        says ``snapshot_anywhere``.

        Raises:
            RequestFailed: the coordinator answered with an error.
            TimedOut: no answer within ``timeout_s``; one that comes later is dropped.
            LocalProtocolError: inside ``snapshot_state`` or ``open``, which must return before the coordinator hears
                the request.
        """
        if self._runs_inside("snapshot_state"):
            raise LocalProtocolError("request() cannot be answered inside snapshot_state(): send an event instead")
        self._refuse_to_wait_inside_open("request", "Ask in process()")
        return decode_event(self._io.ask(encode_event(payload), timeout_s))

    def barrier_arrived(self, checkpoint_id: int, events_before: int = 0) -> None:
        """Tell that the barrier of ``checkpoint_id`` came with the data, where it travels apart from the events.

        The snapshot is taken as soon as this task looks at its mailbox (at its next record, in
        ``wait_for_event`` or ``handle_pending``) and has every event up to ``events_before``, the number that
        left with the barrier; an operator whose data must not go on before that waits for it. Without the number,
        all that the checkpoint waits for is here already (H42); only loss-tolerant events may come too late for
        the snapshot. A barrier that comes twice, or of a checkpoint that is over or unknown, has no effect (H44).
        May be called by any thread of the task.
        """
        self._io.barrier_arrived(checkpoint_id, events_before)

    def wait_for_event(self, timeout_s: float | None = None) -> int:
        """Wait until at least one mailbox item came, and handle all that are there.

        Returns how many that were: 0 if none came within ``timeout_s``; without it, waits as long as the attempt
        lives. An item may be a checkpoint or a notification, and an event may have been handled before this call (one
        that ``subtask_ready`` sends is handled before ``process`` begins). So wait in a loop that checks for what you
        need: ``while not self.rules: context.wait_for_event()``.
        Raises ``LocalProtocolError`` inside ``open`` and inside a handler, and on another thread.
        """
        self._enter("wait_for_event")
        if not self._io.wait_for_item(timeout_s):
            return 0
        return self._handle_items(events_only=False)

    def handle_pending(self) -> int:
        """Handle what is in the mailbox now, without waiting; return how many items that were.

        Raises ``LocalProtocolError`` inside ``open`` and inside a handler, and on another thread.
        """
        self._enter("handle_pending")
        self._io.poll()
        return self._handle_items(events_only=False)

    # --- used by the runner ---

    def open_operator(self, state: bytes | None) -> None:
        """Let the operator restore ``state``, and tell the coordinator that it is open (H11)."""
        self._inside = "open"
        try:
            self._operator.open(self, state)
        finally:
            self._inside = None
        self._awaits_start = self._operator.waits_for_subtask_ready
        self._io.operator_opened(awaits_start=self._awaits_start)

    def wait_until_ready(self) -> None:
        """Handle what the coordinator sends inside ``subtask_ready``, until that has returned (H66).

        Raises:
            TimedOut: it has not within ``ready_timeout_s``.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        while self._awaits_start:
            if not self._io.wait_for_item(max(0.0, deadline - time.monotonic())):
                raise self._io.timed_out(
                    f"the coordinator's subtask_ready() for subtask {self.subtask} of {self.operator_id!r} has not "
                    f"returned within {self._ready_timeout_s:g} s after open(); raise ready_timeout_s, or set "
                    "waits_for_subtask_ready = False on an operator that needs no initial values"
                )
            if (item := self._io.take()) is not None:
                self._handle(item)

    def records(self, records: Iterator[Any]) -> Iterator[Any]:
        """``records``, with the mailbox looked at before each of them."""
        io = self._io
        while True:
            io.poll()
            if io.mailbox or io.over is not None:
                self._handle_items(events_only=False)
            try:
                record = next(records)
            except StopIteration:
                return
            yield record

    def between_outputs(self) -> None:
        """An output was yielded: handle events, and snapshots if the operator allows them here."""
        self._io.poll()
        if self._io.mailbox or self._io.over is not None:
            self._handle_items(events_only=not self._operator.snapshot_anywhere)

    def _runs_inside(self, method: str) -> bool:
        """Whether the caller is this method of the operator: other threads of the task go on meanwhile."""
        return self._inside == method and threading.get_ident() == self._task_thread

    def _refuse_to_wait_inside_open(self, what: str, instead: str) -> None:
        """The coordinator takes nothing from this task, and sends it nothing, before ``open`` has returned (H11)."""
        if self._runs_inside("open"):
            raise LocalProtocolError(
                f"{what}() cannot be used inside open(): the coordinator hears of this task only after open() has "
                f"returned. {instead}, or let the coordinator send initial values in subtask_ready(): handle_event() "
                "gets them before process() begins"
            )

    def _send_inside_open(self, payload: bytes) -> None:
        try:
            self._io.submit_at_once(payload)
        except GatewayFull as full:
            raise LocalProtocolError(
                f"send_event() found no room inside open(), and the coordinator makes room only after open() has "
                f"returned. Send the rest in process(), or raise the gateway's upward bounds: {full}"
            ) from full

    def _at_barrier(self) -> None:
        """A barrier came while ``send_event`` or ``request`` waits.

        One item only: what the caller waits for may have come meanwhile, ahead of the next barrier, and has to be in
        the snapshot of that one.
        """
        if self._operator.snapshot_anywhere and self._inside is None:
            if (item := self._io.take()) is not None:
                self._handle(item)
        else:
            self._io.decline_barriers()

    def _enter(self, what: str) -> None:
        if threading.get_ident() != self._task_thread:
            raise LocalProtocolError(f"{what}() belongs to the task's own thread")
        self._refuse_to_wait_inside_open(what, "Wait in process()")
        if self._inside is not None:
            raise LocalProtocolError(f"{what}() cannot be called inside {self._inside}(): return from it first")

    def _handle_items(self, *, events_only: bool) -> int:
        count = 0
        while (item := self._io.take(events_only=events_only)) is not None:
            self._handle(item)
            count += 1
        return count

    def _handle(self, item: MailboxItem) -> None:
        operator = self._operator
        try:
            match item:
                case MailboxEvent(payload=payload):
                    self._inside = "handle_event"
                    operator.handle_event(decode_event(payload))
                case MailboxBarrier(checkpoint_id=checkpoint_id):
                    self._inside = "snapshot_state"
                    self._snapshot(checkpoint_id)
                case MailboxCompleted(checkpoint_id=checkpoint_id):
                    self._inside = "notify_checkpoint_complete"
                    operator.notify_checkpoint_complete(checkpoint_id)
                case MailboxAborted(checkpoint_id=checkpoint_id):
                    self._inside = "notify_checkpoint_aborted"
                    operator.notify_checkpoint_aborted(checkpoint_id)
                case MailboxStart():
                    self._awaits_start = False
        finally:
            self._inside = None

    def _snapshot(self, checkpoint_id: int) -> None:
        if not self._io.wants_snapshot(checkpoint_id):
            return  # it ended while its barrier lay in the mailbox
        try:
            state = self._operator.snapshot_state(checkpoint_id)
        except CheckpointDeclinedByOperator as declined:
            self._io.snapshot_refused(checkpoint_id, str(declined))
            return
        self._io.snapshot_taken(checkpoint_id, checked_state(self._operator, "snapshot_state", state))


def checked_state(operator: SubtaskOperator, method: str, state: object) -> bytes:
    """``state`` if it is bytes; ``None`` is an error that says so, ``b""`` is fine (H46)."""
    if not isinstance(state, bytes):
        raise TypeError(f"{type(operator).__name__}.{method} must return bytes, not {type(state).__name__}")
    return state
