# SPDX-License-Identifier: Apache-2.0

"""The driver's half of every sink: what is prepared is committed when the checkpoint that covers it completes.

Whenever the driver dies, its successor finishes the work: what the restored state lists is committed again, the
subtasks list again what they held, and committing a part twice has no effect. See ``ledger`` for the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import anyio

from actors.coordination import CoordinatorContext, OperatorCoordinator
from actors.threads import USER
from protocol.arguments import check_settings, checked
from protocol.attempts import FailureReason
from protocol.describing import describe, show, text_of
from protocol.errors import RemoteProtocolError
from protocol.kept_bytes import KeptBytes
from protocol.wire.messages import RestoreMode
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkMisused
from spark_bridge.sinks.two_phase.ledger import SinkLedger, WholeCheckpoints
from spark_bridge.sinks.two_phase.parts import Committable, parse_prepared
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, TwoPhaseSink

LISTED_BYTES_MAX = 2**30
"""How much is kept of the parts that wait for their checkpoint: about a million."""
PART_BYTES = 600
"""What one of them takes beside its name and its payload."""
PAYLOAD_TIMES = 16
"""So many times the length of a payload as JSON it has at most in memory."""

T = TypeVar("T")


class SinkCommits:
    """Commits what the tasks of a sink have prepared, as a part of any ``OperatorCoordinator``.

    Call each method in the coordinator's method of that name, and await those that are coroutines. They are for the
    coordinator's loop only. The committer's work runs in a worker thread and is awaited, so the order of the
    coordinator's calls is kept and the loop is never blocked. Let exceptions leave the coordinator's method: they fail
    the job, and the restore that follows commits again.

    ``retry_delays_s`` are the seconds to wait before each further try after a transient error. ``run_blocking(function,
    *args)`` calls the committer instead of a worker thread; for tests.
    """

    def __init__(
        self,
        sink: TwoPhaseSink[Any],
        *,
        retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0),
        run_blocking: Callable[..., Any] | None = None,
    ) -> None:
        self._of = sink
        self._run_blocking = run_blocking
        check_settings(sink, TwoPhaseSink)
        self._retry_delays_s = tuple(retry_delays_s)
        self._restored: tuple[int, bytes | None] | None = None
        self._context: CoordinatorContext | None = None
        self._sink: str
        self._target: str
        self._committer: TwoPhaseCommitter
        self._committer_made = False
        self._ledger: SinkLedger
        self._gather = WholeCheckpoints()
        self._account = KeptBytes(
            LISTED_BYTES_MAX,
            f"what the tasks of sink {sink.name or show(sink, 80)} have prepared, and no checkpoint has committed,",
            "take checkpoints more often, or prepare fewer and larger parts",
        )
        self._to_destroy: set[str] = set()  # when no checkpoint is in doubt

    @property
    def pending(self) -> int:
        """The number of prepared parts that wait for their checkpoint."""
        return self._ledger.pending + len(self._gather.held) if self._context is not None else 0

    async def start(self, context: CoordinatorContext) -> None:
        """Open the committer, commit what a restored state lists, and destroy what dead drivers left.

        Another one of the same sidecar may replace this one later, as ``RecreateOnReset`` does.

        Raises:
            SinkMisused: batch mode, in which no checkpoint owns the output.
            SinkDataLost, SinkCommitFailed: as for ``complete``.
            Exception: whatever the committer's ``open`` raises.
        """
        if context.mode is not RestoreMode.STREAMING:
            raise SinkMisused(
                f"operator {context.operator_id!r} is in batch mode, in which Spark owns the output and a retry writes "
                'every row again: coordinate it with mode="streaming" to commit with checkpoints'
            )
        self._sink = self._of.name or context.operator_id
        its = SinkCommitterContext(self._sink, context.operator_id, context.log)
        # In a thread, because a ready-made sink imports its client, which takes seconds. `run_blocking` plays faults,
        # and those of a committer begin with its `open`.
        if self._run_blocking is None:
            self._target, self._committer = await USER.run(self._made, its)
        else:
            self._target, self._committer = self._made(its)
        self._ledger = SinkLedger(self._sink, self._target)
        self._committer_made = True
        check_settings(self._committer, TwoPhaseCommitter)
        await self._run(self._committer.open)
        self._context = context
        if self._restored is not None:
            await self.restore(*self._restored)
        # Only before this application's first attempt: a part that begins now looks like one of a dead driver.
        if context.store.put_if_absent(f"headgate/sink/{self._target}/{self._sink}", True) is None:
            await self._sweep(self._ledger.parts_of_earlier_applications)

    def _made(self, its: SinkCommitterContext) -> tuple[str, TwoPhaseCommitter]:
        return self._of.target, self._of.committer(its)

    async def prepared(self, subtask: int, attempt: int, event: Any) -> bool:
        """Handle ``event`` and return True if it is a list of this sink. For ``handle_event_from_operator``.

        Raises:
            SinkMisused: the subtask writes to another target, or lists a part that it did not prepare.
            SinkDataLost, SinkCommitFailed: as for ``complete``.
        """
        prepared = parse_prepared(self._sink, self._target, event)
        if prepared is None:
            return False
        listed = list(self._gather.covering(subtask, prepared) if self._of.atomic else prepared.committables)
        for name, size in self._sizes(subtask, listed).items():
            self._account.charge(name, size)
        due = self._ledger.listed(subtask, attempt, listed)
        if self._of.atomic:
            self._gather.add(due, self._ledger.completed_id)
            self._gather.listed(subtask, prepared)
            await self._commit_whole()
        else:
            await self._commit(due)
        return True

    def _sizes(self, subtask: int, listed: Sequence[Committable]) -> dict[str, int]:
        """How much those keep that are not known. A task may list what no writer prepares, without an end (H157)."""
        sizes: dict[str, int] = {}
        for part in listed:
            try:
                self._committer.check_payload(part.payload)
                size = len(part.name) + PAYLOAD_TIMES * len(json.dumps(part.payload)) + PART_BYTES
            except (ValueError, TypeError) as error:
                raise RemoteProtocolError(f"{part.name}, listed by subtask {subtask}: {describe(error)}") from error
            if not self._account.keeps(part.name):
                sizes[part.name] = size
        return sizes

    def _settle(self) -> None:
        """What is neither in the ledger nor waits for its checkpoint is not kept any more."""
        kept = {part.name for part in self._gather.held}
        for name in self._account.owners():
            if name not in self._ledger.names and name not in kept:
                self._account.release(name)

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        self._ledger.subtask_failed(subtask, attempt)
        self._gather.subtask_failed(subtask)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """Destroy what the subtask's attempts wrote after ``checkpoint_id``; the next attempt writes it again.

        While an aborted checkpoint may still be restored, this method and all others postpone that.
        """
        dead = self._ledger.subtask_reset(subtask, checkpoint_id)
        self._settle()
        await self._destroy(dead)
        await self._sweep(lambda names: self._ledger.parts_of_failed_attempts(names, subtask=subtask))

    def snapshot(self, checkpoint_id: int) -> bytes:
        """Return the state for ``checkpoint_id``, as a part of the coordinator's state. Commits nothing."""
        expected: list[int] = []
        if self._of.atomic:
            assert self._context is not None, "start comes first"
            expected = self._gather.cut(checkpoint_id, self._context.gateways.ready)
        return self._ledger.snapshot(checkpoint_id, self._gather.held, expected)

    async def complete(self, checkpoint_id: int) -> None:
        """Commit what ``checkpoint_id`` covers.

        Raises:
            SinkCommitFailed: the target failed at every try.
            SinkDataLost: a part that was never committed is gone.
            Exception: whatever else the committer raises.
        """
        due = self._ledger.completed(checkpoint_id)
        if self._of.atomic:
            for part in due:
                self._ledger.committed(part.name)  # the gathering keeps it from now on
            self._gather.completed(checkpoint_id, due)
            await self._commit_whole()
        else:
            await self._commit(due)
            await self._run(self._committer.committed, checkpoint_id)
        self._settle()
        if self._ledger.nothing_held:
            await self._sweep(self._ledger.parts_before_the_end)
        await self._destroy(())

    async def discarded(self, checkpoint_id: int) -> None:
        """Destroy what was kept because ``checkpoint_id`` might have been restored.

        For ``notify_checkpoint_discarded``. Without this call, the next completed checkpoint does it.
        """
        await self._destroy(())

    async def restore(self, checkpoint_id: int, state: bytes | None) -> None:
        """Return to ``checkpoint_id``, with the state that ``snapshot`` returned for it. May come before ``start``.

        Raises:
            SinkMisused, ValueError: it is not the state of this sink.
            SinkDataLost, SinkCommitFailed: as for ``complete``.
        """
        if self._context is None:
            self._restored = (checkpoint_id, state)
            return
        due, dead, expected = self._ledger.restore(checkpoint_id, state)
        self._account.clear()
        if self._of.atomic:
            self._gather.restore(checkpoint_id, due, expected)
            for part in due:
                self._account.keep(part.name, PART_BYTES)
            await self._commit_whole()
        else:
            await self._commit(due)
        await self._destroy(dead)
        await self._sweep(self._ledger.parts_of_failed_attempts)

    def run_ended(self, succeeded: bool) -> None:
        """The run has ended. After a successful run, the next completed checkpoint destroys all that is uncommitted."""
        if self._context is not None:
            self._ledger.run_ended(succeeded)
            self._gather.run_ended(succeeded)

    async def close(self) -> None:
        """Close the committer, also one that could not be opened. What a checkpoint may still cover is kept."""
        if self._committer_made:
            await self._run(self._committer.close)

    async def _commit_whole(self) -> None:
        checkpoints, parts = self._gather.take()
        await self._commit(parts)
        for checkpoint_id in checkpoints:
            if checkpoint_id >= 0:
                await self._run(self._committer.committed, checkpoint_id)

    async def _commit(self, due: Sequence[Committable]) -> None:
        if not due:
            return
        for delay_s in (*self._retry_delays_s, None):
            try:
                await self._run(self._committer.commit, due)
                break
            except self._committer.transient_errors as error:
                if delay_s is None:
                    raise SinkCommitFailed(
                        f"{len(due)} prepared parts of sink {self._sink!r} could not be committed to {self._target}, "
                        f"after {len(self._retry_delays_s) + 1} tries: {text_of(error)}. They are still prepared, "
                        "and the next restore tries again"
                    ) from error
                self._log.warning("sink commit failed, retry scheduled", error=describe(error), delay_s=delay_s)
                await anyio.sleep(delay_s)
        for committable in due:
            self._ledger.committed(committable.name)
            self._account.release(committable.name)
            self._to_destroy.discard(committable.name)

    async def _sweep(self, choose: Callable[[Iterable[str]], list[str]]) -> None:
        """Destroy the prepared parts in the target that ``choose`` selects. Failures are only logged."""
        try:
            names = list(await self._run(self._committer.prepared))
        except Exception as error:
            self._log.warning("listing of prepared parts failed", error=describe(error))
            return
        await self._destroy(choose(names))

    async def _destroy(self, names: Sequence[str]) -> None:
        """Destroy these and all postponed parts, or postpone while a restart may restore a checkpoint in doubt."""
        assert self._context is not None, "start comes first"
        self._to_destroy.update(names)
        if not self._to_destroy:
            return
        in_doubt = [id_ for id_ in self._context.checkpoints_in_doubt if id_ > self._ledger.completed_id]
        if in_doubt:
            self._log.info("destruction postponed", parts=len(self._to_destroy), checkpoints_in_doubt=sorted(in_doubt))
            return
        names, self._to_destroy = sorted(self._to_destroy), set()
        try:
            await self._run(self._committer.abort, names)
        except Exception as error:
            self._log.warning("destruction of prepared parts failed", parts=len(names), error=describe(error))

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        if self._run_blocking is None:
            return await USER.run(function, *args)
        return cast(T, self._run_blocking(function, *args))

    @property
    def _log(self) -> Any:
        assert self._context is not None, "start comes first"
        return self._context.log


class TwoPhaseSinkCoordinator(OperatorCoordinator):
    """Commits what the tasks of a sink have prepared, when the checkpoint that covers it is complete.

    For ``TwoPhaseSinkOperator`` with the same sink, and for subclasses of it. A coordinator with further tasks extends
    this class: call ``super()`` in each method, and handle your own events in ``handle_other_event``. It is for
    streaming mode: in batch mode, ``start`` raises, and so ``coordinate`` raises ``CoordinatorStartError``.

    ``retry_delays_s`` are the seconds to wait before each further try if a commit fails with one of the committer's
    ``transient_errors``.
    """

    @checked()
    def __init__(self, sink: TwoPhaseSink[Any], *, retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0)) -> None:
        self.commits = SinkCommits(sink, retry_delays_s=retry_delays_s)

    async def start(self, context: CoordinatorContext) -> None:
        await self.commits.start(context)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if not await self.commits.prepared(subtask, attempt, event):
            await self.handle_other_event(subtask, attempt, event)

    async def handle_other_event(self, subtask: int, attempt: int, event: Any) -> None:
        """Handle an event that is not a list of this sink. The default raises, which fails the job."""
        raise SinkMisused(
            f"subtask {subtask} sent {show(event)}, which is not a list of this sink: give both halves the same name, "
            "or handle the event in a subclass"
        )

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.commits.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await self.commits.subtask_reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return self.commits.snapshot(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await self.commits.complete(checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await self.commits.discarded(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await self.commits.restore(checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.commits.run_ended(succeeded)

    async def close(self) -> None:
        await self.commits.close()
