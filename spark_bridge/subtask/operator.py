"""The interface that users implement: one instance lives in one Spark task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["SubtaskOperator"]


class SubtaskOperator:
    """One subtask of a coordinated operator. Everything here runs on the task's own thread, one call at a
    time.

    The order is: ``open``; then ``handle_event`` for each event that the coordinator sends inside ``subtask_ready``;
    then ``process``, with the other methods called between its records; then ``final_state`` if it ended well; then
    ``close``, whatever happened. So ``process`` never begins without the initial values that the coordinator sends.
    What ``handle_event`` needs is set up in ``__init__`` or ``open``. An operator that needs no initial values may set
    ``waits_for_subtask_ready = False``: then ``process`` begins without waiting for the coordinator, which saves one
    round trip, and what ``subtask_ready`` sends comes at any time. An exception out of any method but
    ``close`` fails the task: the coordinator hears its text, Spark gets the exception itself.

    Events, snapshots and notifications are handled when ``process`` asks for its next record, and inside
    ``context.wait_for_event()`` and ``context.handle_pending()``. After an output was yielded, events are
    handled too, but a checkpoint waits for one of the former moments: only there has every record been taken
    either wholly or not at all. An operator whose fields are right whenever it yields or calls its context (a
    source that never asks for records) sets ``snapshot_anywhere = True``; then a checkpoint is also taken
    between outputs, and while ``send_event`` or ``request`` waits. Without it, a checkpoint that meets an
    operator in such a wait is declined, because the two would wait for each other.
    """

    snapshot_anywhere: bool = False
    waits_for_subtask_ready: bool = True

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        """Prepare, and restore ``state``; it is None when there is nothing to restore. Keep ``context`` for
        later.

        The coordinator hears of this task only after ``open`` has returned. So ``context.request``,
        ``wait_for_event`` and ``handle_pending`` raise ``LocalProtocolError`` in here; ``context.send_event`` works.
        """

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        """Return one state that ``open`` can restore for all of ``states``.

        Called once, before ``open``, where a checkpoint of another parallelism gives this subtask the states of
        several (H52). ``states``: by the subtask that took each, ascending.
        """
        raise TypeError(
            f"this checkpoint has the states of subtasks {', '.join(map(str, states))} for one subtask: define "
            f"{type(self).__name__}.merge_states(self, states), or restore with the parallelism that it was taken with"
        )

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        """Take ``records`` and yield the outputs; ``None`` means that there are none. Often a generator."""
        raise NotImplementedError(f"{type(self).__name__} must define process(self, records)")

    def handle_event(self, event: Any) -> None:
        """Take one event of the coordinator. Each comes once, in the order in which they were sent (H22).

        The default drops it. The driver counts such events, and logs one warning when a run ends or a checkpoint
        completes.
        """

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """Return everything that a later ``open`` needs; an exception fails the task and with it the
        checkpoint.

        An event that is sent in here is part of this snapshot: it reaches the coordinator behind it, or, after a
        restore of this checkpoint, again (H31).
        """
        return b""

    def final_state(self) -> bytes:
        """Return the state that stands for this subtask in all later checkpoints, when ``process`` is over
        (H47).

        By default it is a snapshot, asked for with the id of the virtual empty checkpoint. If events come before the
        goodbye has left, they are handled, and it is asked for again.
        """
        return self.snapshot_state(VIRTUAL_EMPTY_CHECKPOINT)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """``checkpoint_id`` is complete and durable: what was prepared for it may be committed."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """``checkpoint_id`` was given up, here. A restart may still restore it, for example after the driver dies.

        So roll back nothing that was prepared for it. A task is not told when that has become safe; its coordinator
        is, by ``notify_checkpoint_discarded``, and cleans up or sends an event that says so.
        """

    def close(self) -> None:
        """Release what the operator holds. Called once, if the operator was built at all."""
