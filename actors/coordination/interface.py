"""What users of coordination implement and hold: the coordinator, its context, its gateways.

``OperatorCoordinator`` is called one method at a time, in order, each awaited before the next (H5). Per subtask the
order is always ready, failed, reset (of the subtask or of the whole coordinator), ready again (H10).

An application that starts from a checkpoint calls ``reset_to_checkpoint`` before ``start`` (H6, H52), and else nothing
comes before ``start``. At the end of a run that went well, in streaming mode, the order is ``run_ended``,
``checkpoint_coordinator``, ``notify_checkpoint_complete``: the final checkpoint, with the last state of every subtask,
which commits the last output.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from actors.clock import Clock
from actors.coordination.confirmation import Confirmation
from actors.coordination.store import CoordinatorStore
from protocol.attempts import FailureReason
from protocol.facts import StageLook
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode

T = TypeVar("T")


class SubtaskGateway(Protocol):
    """The way to one execution attempt, for ever (H20). It is never pointed at a later attempt.

    Use it on the event loop only; other threads come in by ``CoordinatorContext.call_soon_threadsafe``. Events of
    one gateway arrive in the order in which they were sent, each once (H22). Inside ``subtask_failed`` and later,
    it is dead: what is sent fails at once (H14, H26).
    """

    @property
    def attempt(self) -> ExecutionAttempt: ...

    @property
    def events_pending(self) -> int:
        """Events handed over and neither confirmed nor failed: what the bound of H27 counts."""
        ...

    @property
    def bytes_pending(self) -> int:
        """The bytes of their payloads."""
        ...

    async def send_event(self, event: Any, *, loss_tolerant: bool = False) -> Confirmation:
        """Hand an event over, waiting for room where the bound of H27 is reached, and return its confirmation.

        The event is encoded at once; later mutation changes nothing (H21). Awaiting the *confirmation* waits until
        the event is in the operator's mailbox (H23), or raises ``AttemptOver``. With ``loss_tolerant`` a missing
        confirmation fails no attempt, and no checkpoint waits for it (H28): after ``confirm_timeout_s`` awaiting it
        raises ``ConfirmationTimeout``, though the event may still arrive.

        A call that is never awaited sends nothing; it is logged as a warning that says where.

        Raises ``EventEncodeError`` for what msgpack cannot carry, ``LocalProtocolError`` from another thread; nothing
        because of the attempt's state.
        Cancelling this call while it waits for room sends nothing.
        """
        ...

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False) -> Confirmation:
        """As ``send_event``, but raises ``GatewayFull`` where that would wait."""
        ...


class CoordinatorContext(Protocol):
    """A coordinator's door to the world. Loop only, but for the methods that say otherwise."""

    @property
    def operator_id(self) -> str: ...

    @property
    def parallelism(self) -> int: ...

    @property
    def mode(self) -> RestoreMode: ...

    @property
    def clock(self) -> Clock:
        """The clock that ``call_later`` goes by, in seconds; virtual in tests."""
        ...

    @property
    def store(self) -> CoordinatorStore:
        """The map that all coordinators of the application share (R100); it is in no checkpoint."""
        ...

    @property
    def log(self) -> Any:
        """A structlog logger with ``operator_id`` bound."""
        ...

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        """The ids of aborted checkpoints that a restart may still restore; they are not yet discarded.

        While it is not empty, destroy nothing that one of them may refer to. It outlives resets, and a coordinator that
        is built anew for each reset finds it complete in ``start``. It holds neither the checkpoint that the
        application was started from nor savepoints.
        """
        ...

    def events_taken(self, subtask: int) -> int:
        """How many events and requests of the subtask's history this coordinator has taken (H32).

        Inside ``handle_event_from_operator`` and ``handle_request`` it is the position of the one that is handled,
        counted from 1. After a restore the count goes on from what the checkpoint covers, so the event that is sent
        again has the position that it had. 0 where nothing came; with several attempts alive, that of the one that
        spoke or became ready last. With another parallelism positions start again (H52).
        """
        ...

    async def look_at_run(self) -> StageLook:
        """Which partitions Spark computes in the run that is under way, and what it has kept of earlier runs.

        Inside ``subtask_ready`` or later; one round trip to Spark. Raises where Spark does not answer in time.
        """
        ...

    def fail_job(self, cause: BaseException | str) -> None:
        """Fail the run that is under way, with its Spark job (H8). Latches: later calls do nothing until the reset."""
        ...

    def call_async(
        self,
        function: Callable[..., T],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        """Run blocking work on a worker thread; ``handler(result, error)`` comes in the coordinator's own order (H9).

        A handler that raises is a global failure. After close the result is dropped.
        """
        ...

    def run_in_background(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        """Run an async function beside the coordinator's calls; ``handler(result, error)`` comes in their order.

        It must not touch what the coordinator's methods touch. A handler that raises is a global failure. What still
        runs at the end is cancelled, before ``close``.
        """
        ...

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        """Call ``handler`` after ``delay_s`` seconds, in the coordinator's own order; dropped at close."""
        ...

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        """From any thread: call ``handler`` in the coordinator's own order; dropped after close."""
        ...


class OperatorCoordinator:
    """Base of every coordinator; override what you need. All methods run on the event loop: never block in them (H9).

    An exception out of any method but ``start`` and ``close`` is a global failure with that cause (H7).
    """

    async def start(self, context: CoordinatorContext) -> None:
        """First call, once; only an initial restore comes earlier. An exception fails ``coordinate()`` (H6).

        So does one out of the initial restore; then ``start`` is not called, but ``close`` is.
        """

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        """An event of a ready attempt; in the order in which that attempt sent it, each once (H30).

        The default drops it; the first one is logged as a warning, and all are counted (``events_unhandled``).
        ``subtask`` is the one that sent it first: an event out of a restored checkpoint of another parallelism may
        come through another subtask's attempt, whose number ``attempt`` is (H52).
        """

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        """A request of a ready attempt; what this returns is its answer, what it raises too (H33).

        An exception is logged with its traceback. The task gets ``RequestFailed`` with its type and text, and the end
        of the traceback as the cause. The default tells the task that this coordinator answers no requests, and fails
        nobody else.

        A request out of a restored checkpoint comes here too: nobody waits for its answer any more, so that is dropped.
        ``subtask`` is the one that sent it first, as with events.
        """
        raise TypeError(f"{type(self).__name__} cannot handle requests: override handle_request")

    async def handle_client_request(self, request: Any) -> Any:
        """A request from the driver's own code; what this returns is its answer, what it raises too (R97).

        It is neither before nor after any event or checkpoint, and what it raises fails nobody but the asker.
        """
        raise TypeError(f"{type(self).__name__} cannot handle client event: override handle_client_request")

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        """An attempt is registered, restored and alive (H11); its events come after this call.

        Its operator handles everything that is sent to ``gateway`` in here before it sees its first record. It waits
        for this method to return, so do not wait for an event of the same attempt in here. An exception fails the job,
        and the operator does not begin.
        """

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        """An attempt is over without success, told at once; ``reason.kind`` tells killed from failed (H12).

        Its gateway refuses events already (H14); those without a confirmation fail at the same moment or right after
        (H26).
        """

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """No attempt of the subtask is left; the next one restores ``checkpoint_id``, -1 for nothing (H13, H18)."""

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        """Return your state. The moment of the return is the cut: sent before is before the checkpoint (H40, H46)."""
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint is durable, on both sides. Never called for a savepoint (H49)."""

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up; what it covers is covered by the next one.

        Destroy nothing that was prepared for it: its write may have begun, and then a restart may still restore it, for
        example after the driver dies. ``notify_checkpoint_discarded`` follows when that has become impossible.
        """

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        """No restart can restore this checkpoint any more: clean up what was prepared for it alone.

        Once for each aborted one, always after its ``notify_checkpoint_aborted``: right after it if the checkpoint was
        never written, else when the storage has discarded it durably or a later checkpoint has completed (then after
        the ``notify_checkpoint_complete`` of that one). Resets and other runs may come in between. It never comes if
        the application ends before; then the next one restores the checkpoint or does not. An aborted savepoint
        counts as never written, because a restart restores one only if somebody names its file.
        """

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Global failover or a new run: forget everything, restore ``state``; ``(-1, None)`` is the beginning (H15).

        Also the first call of all, before ``start``, where the application starts from a checkpoint (H52).
        """

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        """The run is over with all its gateways; the next one, if any, starts with a reset (H55, H57).

        Its final checkpoint, where there is one, comes after this.
        """

    async def close(self) -> None:
        """Last call, once, whatever happened; an exception is logged (H6)."""
