# SPDX-License-Identifier: Apache-2.0

"""The interfaces of users' code: the coordinator, its context, its gateways.

Headgate calls the methods of an ``OperatorCoordinator`` one at a time, in order, and awaits each before the next (H5).
For each subtask the order is always ready, failed, reset (of the subtask or of the whole coordinator), ready again
(H10). An attempt that succeeds is finished instead of failed; if Spark loses its output later, it is failed after all.

If an application starts from a checkpoint, ``reset_to_checkpoint`` comes before ``start`` (H6, H52). Otherwise
``start`` is first. At the end of a successful run in streaming mode the order is ``run_ended``,
``checkpoint_coordinator``, ``notify_checkpoint_complete``: the final checkpoint, with the last state of every subtask,
which commits the last output.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from actors.clock import Clock
from actors.coordination.host.gateway import LiveGateways, SubtaskGateway
from actors.coordination.store import CoordinatorStore
from protocol.attempts import FailureReason
from protocol.event_types import Received, Sent
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode

__all__ = ["CoordinatorContext", "OperatorCoordinator", "SubtaskGateway"]

T = TypeVar("T")


class CoordinatorContext(Protocol):
    """A coordinator's access to Headgate and Spark. ``start`` receives it; keep it.

    Use it on the event loop only, except for ``call_soon_threadsafe``.
    """

    @property
    def operator_id(self) -> str:
        """The name that was given to ``coordinate``."""
        ...

    @property
    def parallelism(self) -> int:
        """The number of subtasks."""
        ...

    @property
    def mode(self) -> RestoreMode:
        """Who owns the operator's output: Spark (batch), or the operator with its checkpoints (streaming)."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that ``call_later`` uses. ``clock.now()`` is in seconds, and virtual in tests."""
        ...

    @property
    def gateways(self) -> LiveGateways:
        """The gateways of all attempts that are ready and not over. Headgate keeps them up to date."""
        # H88
        ...

    @property
    def store(self) -> CoordinatorStore:
        """A map that all coordinators of the application share. It is not part of any checkpoint."""
        # R100
        ...

    @property
    def log(self) -> Any:
        """A structlog logger with ``operator_id`` bound."""
        ...

    @property
    def checkpoints_in_doubt(self) -> frozenset[int]:
        """The ids of aborted checkpoints that a restart may still restore, because they are not yet discarded.

        While it is not empty, do not destroy anything that one of them may refer to. It survives resets: a coordinator
        that is built for each reset finds it complete in ``start``. It contains neither the checkpoint that the
        application started from nor savepoints.
        """
        ...

    @property
    def handles_restored(self) -> bool:
        """Whether the event or request that is being handled was held in the checkpoint that was restored.

        True only inside ``handle_event_from_operator`` and ``handle_request``. Nobody waits for the answer to a
        restored request, so a coordinator that hands something out with its answers should not do so then.
        """
        # H73
        ...

    @property
    def input_begins_again(self) -> bool:
        """Whether the run has the same input as the checkpoint of the last reset, from its first record on.

        If it has another input, or nothing was restored, this is False: positions and lists in the restored state that
        belong to one input say nothing about this run. Before the first run after a restore it is True; if that run
        turns out to have another input, ``reset_to_checkpoint`` comes again before its first ``subtask_ready``.
        """
        # H174
        ...

    def events_taken(self, subtask: int) -> int:
        """Return how many events and requests of the subtask's history this coordinator has taken.

        Inside ``handle_event_from_operator`` and ``handle_request`` this is the position of the current one, counted
        from 1. After a restore the count continues from what the checkpoint covers, so an event that is sent again has
        the same position as before. With another parallelism, positions start again.

        The count is 0 if nothing came. If several attempts are alive, it is the count of the one that sent something or
        became ready last.
        """
        # H32, H52
        ...

    async def look_at_run(self) -> StageLook:
        """Ask Spark which partitions it computes in the current run, and what it has kept of earlier runs.

        Call it inside ``subtask_ready`` or later. It takes one round trip to Spark, and raises if Spark does not answer
        in time.
        """
        ...

    def fail_job(self, cause: BaseException | str) -> None:
        """Fail the current run and its Spark job. Later calls have no effect until the reset."""
        # H8
        ...

    def call_async(
        self,
        function: Callable[..., T],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        """Run a blocking function on a worker thread, and call ``handler(result, error)`` with its outcome.

        The handler is called on the event loop, between other methods of the coordinator. One of its arguments is None.
        If it raises, the job fails. After ``close`` the outcome is dropped.
        """
        # H9
        ...

    def run_in_background(
        self,
        coroutine_function: Callable[..., Awaitable[T]],
        *args: Any,
        handler: Callable[[T | None, Exception | None], Awaitable[None]],
    ) -> None:
        """Run an async function concurrently with the coordinator's methods, and call ``handler(result, error)``.

        The function must not touch what the coordinator's methods touch. The handler may: it is called between other
        methods of the coordinator. If it raises, the job fails. A function that is still running at the end is
        cancelled before ``close``.
        """
        ...

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        """Call ``handler`` after ``delay_s`` seconds, between other methods. Dropped when the coordinator closes."""
        ...

    def call_soon_threadsafe(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call ``handler`` between other methods. May be called from any thread; dropped after ``close``."""
        ...


class OperatorCoordinator(Generic[Received, Sent]):
    """Base class of coordinators. Override the methods that you need.

    A type checker knows the events of an ``OperatorCoordinator[Received, Sent]``: what the tasks send to it, and what
    it sends to them. Without the brackets, both are ``Any``.

    Headgate calls one method at a time, in order, and awaits it before the next. All methods run on the event loop:
    never block in them. An exception from any method except ``start``, ``handle_request``, ``handle_client_request``
    and ``close`` fails the job, with that exception as the cause.
    """

    # H5, H7, H9

    async def start(self, context: CoordinatorContext) -> None:
        """Prepare the coordinator. Called once, before everything except an initial restore.

        An exception makes ``coordinate()`` fail. So does an exception in the initial restore: then ``start`` is not
        called, but ``close`` is.
        """
        # H6

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Received) -> None:
        """Handle an event of a task. An attempt's events come in the order in which it sent them, each once.

        The default drops the event. The log has a warning for the first one, and the statistics count all of them
        (``events_unhandled``).

        Args:
            subtask: the subtask that sent the event first. After a restore with another parallelism, an event from the
                checkpoint may come through another subtask's attempt.
            attempt: the number of the attempt that the event came through.
            event: the value that was sent, with its types.
        """
        # H30, H52

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        """Return the answer to a task's request, or a ``Reply`` that you settle later, or raise.

        No other method runs meanwhile, so do not wait here for another task: return a ``Reply``. An exception is logged
        with its traceback, and the task gets ``RequestFailed`` with its type and text; the job continues. The default
        raises.

        How many requests of an attempt may be open is bounded by ``GatewayLimits.upward_events_max``. A request from a
        restored checkpoint comes here too. Its answer is dropped, because nothing waits for it. If the task asked
        inside a span of OpenTelemetry, that span is the current one here, as in the methods for events and for the
        driver's requests, provided that this process has imported ``opentelemetry.trace``.

        Args:
            subtask: the subtask that sent the request first, as for events.
            attempt: the number of the attempt that the request came through.
            request: the value that was sent, with its types.
        """
        # H33, H73, H84
        raise TypeError(f"{type(self).__name__} cannot handle requests: override handle_request")

    async def handle_client_request(self, request: Any) -> Any:
        """Return the answer to a request of the driver's own code (``sidecar.request``), or a ``Reply``, or raise.

        Its order relative to events and checkpoints is not defined. The caller gets an exception; the job continues.
        """
        # R97
        raise TypeError(f"{type(self).__name__} cannot handle requests of the driver: override handle_client_request")

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway[Sent]) -> None:
        """An attempt of the subtask has registered and restored its state. Its events come after this call.

        The operator handles everything that this method sends to ``gateway`` before it sees its first record. It waits
        for this method to return, so do not wait for an event of the same attempt in here. If this method raises, the
        job fails and the operator does not begin.
        """
        # H11, H66

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        """An attempt may be dead, because its connection is gone. Usually its process was killed.

        With heartbeats, it also comes when the attempt has been silent for half of ``heartbeat_timeout_s``. This is
        only a hint, and early: the news from Spark, with ``subtask_failed``, takes longer. The gateway still takes
        events. If the connection comes back, or the silence ends, ``subtask_responsive`` follows, and nothing is lost.

        It comes at most once until then, after ``subtask_ready``, and never after ``subtask_failed`` or
        ``subtask_finished``. It may not come at all, so do not depend on it. An attempt whose operator has ended well
        is not suspected.

        Args:
            subtask: the index of the subtask.
            attempt: the number of the attempt.
            reason: what makes it suspect, for people.
        """
        # H87

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        """An attempt that was suspected lives: its connection has come back."""
        # H87, H24

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        """An attempt has ended without success. ``reason.kind`` says, for example, whether it failed or was killed.

        Its gateway already refuses events. Events without a confirmation fail at the same moment or right after.
        """
        # H12, H14, H26

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        """Spark counts the attempt as a success. Everything that it sent has come, and its gateway refuses events.

        Once for each success, before ``run_ended``. If there are copies, the first to succeed finishes, and the others
        are reported failed right after it, as superseded. An attempt that does not wait for ``subtask_ready`` may
        finish without it.

        Spark may still lose the attempt's output and compute it again: ``subtask_failed`` and ``subtask_reset`` then
        follow as for any attempt that fails, and later another attempt finishes. So a success is certain when
        ``run_ended`` says that the run succeeded. Which subtasks have finished belongs to the run, not to a checkpoint:
        after ``reset_to_checkpoint`` none has. In streaming mode the final checkpoint comes later, after ``run_ended``.
        """
        # H86, H17

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """No attempt of the subtask is left. The next one restores ``checkpoint_id``; -1 means nothing.

        Roll back what you hold for this subtask, and only for this one, to that checkpoint.
        """
        # H13, H18

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        """Return the coordinator's state for a checkpoint.

        The moment of the return is the cut. Events that were sent before belong to the checkpoint, and events that are
        sent later come after it.
        """
        # H40, H46
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint is complete and durable: commit what was prepared for it. Not called for savepoints."""
        # H49

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up. The next one covers what it would have covered.

        Do not destroy what was prepared for it. If its write had begun, a restart may still restore it, for example
        after the driver dies. ``notify_checkpoint_discarded`` follows when that has become impossible.
        """
        # H44, H64

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        """No restart can restore this aborted checkpoint any more: clean up what was prepared for it alone.

        It comes once for each aborted checkpoint, after ``notify_checkpoint_aborted``: immediately if the checkpoint
        was never written; otherwise when the storage has discarded it durably, or after the
        ``notify_checkpoint_complete`` of a later one. Resets and other runs may come in between.

        It never comes if the application ends first; then the next application either restores the checkpoint or does
        not. An aborted savepoint counts as never written, because it is restored only if the user names its file.
        """
        # H64

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Forget everything and restore ``state``: the job failed, or a new run begins.

        If an application starts from a checkpoint, this is the first call of all, before ``start``.

        Args:
            checkpoint_id: the checkpoint to return to; -1 for the beginning.
            state: what ``checkpoint_coordinator`` returned for it; None for the beginning.
        """
        # H15, H52

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        """The run is over, and so are all its gateways. The next run, if any, starts with a reset.

        In streaming mode, the final checkpoint of a successful run comes after this.

        Args:
            run_id: Spark's id of the stage.
            succeeded: whether the Spark job succeeded.
            reason: why not; empty if it did.
        """
        # H55, H57

    async def close(self) -> None:
        """Release what the coordinator holds. The last call, once, however it ended; an exception is logged."""
        # H6
