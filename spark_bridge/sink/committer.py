"""The sink's half on the driver: sealed files become visible when the checkpoint that covers them completes.

Whatever moment the driver dies at, its successor finishes: what the restored state lists is published again, what the
subtasks held is listed again, and publishing what is published already does nothing. See ``books`` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio.to_thread import run_sync

from actors.coordination import CoordinatorContext
from protocol.wire.messages import RestoreMode
from spark_bridge.sink.directory import Published, SinkDirectory
from spark_bridge.sink.errors import SinkFileLost, SinkMisused, SinkPublishError
from spark_bridge.sink.files import SealedFile, parse_sealed_event
from spark_bridge.sink.journal import PublicationJournal
from spark_bridge.sink.ledger import SinkLedger

__all__ = ["SinkCommitter"]

_LOOKS_MAX = 5


class SinkCommitter:
    """Made to be a part of any ``OperatorCoordinator``: call each method in the coordinator's method of that name.

    Loop only. Work on files is done in a worker thread and awaited, so the coordinator's order holds (H5) and the loop
    is never blocked (H9). An exception is meant to leave the coordinator's method: it becomes a global failure (H7),
    and the restore that follows publishes again.

    ``url`` and ``options`` must be those of the writers; so must ``name``, which is the operator's id unless given. One
    application at a time may use a name in a directory: the next one deletes what this one has not published. A
    published file may be renamed, moved or deleted by whoever reads it.

    ``retry_delays_s``: how long to wait before each further try when the filesystem fails.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0),
    ) -> None:
        self._url = url
        self._name = name
        self._options = options
        self._retry_delays_s = tuple(retry_delays_s)
        self._restored: tuple[int, bytes | None] | None = None
        self._context: CoordinatorContext | None = None
        self._sink: str
        self._directory: SinkDirectory
        self._ledger: SinkLedger
        self._journal: PublicationJournal
        self._to_delete: set[str] = set()  # to be deleted when no checkpoint is in doubt
        self.files_published = 0
        self.rows_published = 0

    @property
    def files_pending(self) -> int:
        """Sealed files that wait for their checkpoint."""
        return self._ledger.files_pending if self._context is not None else 0

    async def start(self, context: CoordinatorContext) -> None:
        """Make the directories, publish what a restored state lists, and delete what dead drivers left.

        Another committer of the same sidecar may start in its place later, as recreate-on-reset does.

        Raises:
            SinkMisused: batch mode, where no checkpoint owns the output; a relative path.
            SinkFileLost, SinkPublishError, OSError: the directory cannot be used.
        """
        if context.mode is not RestoreMode.STREAMING:
            raise SinkMisused(
                f"operator {context.operator_id!r} is in batch mode, where Spark owns the output and a retry writes "
                "every row again: coordinate it with mode=RestoreMode.STREAMING to commit files with checkpoints"
            )
        self._sink = self._name or context.operator_id
        self._directory = SinkDirectory(self._url, self._sink, self._options)
        self._ledger = SinkLedger(self._sink, self._directory.address)
        self._journal = PublicationJournal(self._directory)
        self._context = context
        await run_sync(self._directory.prepare)
        for name in await run_sync(self._load_journal):
            self._log.warning("broken publication journal ignored", file=name)
        if self._restored is not None:
            await self.restore(*self._restored)
        # Only before this application's first attempt: one that begins now looks like one of a dead driver's.
        if context.store.put_if_absent(f"headgate/sink/{self._directory.address}/{self._sink}", True) is None:
            await self._sweep(self._ledger.parts_of_earlier_applications)

    async def sealed(self, subtask: int, attempt: int, event: Any) -> bool:
        """Whether ``event`` was a list of this sink's; then it has been dealt with. For the event handler.

        Raises:
            SinkMisused: the subtask writes into another directory.
            SinkFileLost, SinkPublishError: a file had to be published now, and could not be.
        """
        files = parse_sealed_event(self._sink, self._directory.address, event)
        if files is None:
            return False
        await self._publish(self._ledger.listed(attempt, files))
        return True

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        """The attempt is over."""
        self._ledger.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """Delete what the subtask's attempts wrote behind ``checkpoint_id``: the next one writes it again.

        While an aborted checkpoint may still be restored, that is put off, here and in every other method.
        """
        await self._delete(self._ledger.subtask_reset(subtask, checkpoint_id))
        await self._sweep(lambda names: self._ledger.parts_of_failed_attempts(names, subtask=subtask))

    def snapshot(self, checkpoint_id: int) -> bytes:
        """The state for ``checkpoint_id``, to be part of the coordinator's. Nothing becomes visible."""
        return self._ledger.snapshot(checkpoint_id)

    async def complete(self, checkpoint_id: int) -> None:
        """Make visible what ``checkpoint_id`` covers.

        Raises:
            SinkPublishError: the filesystem went on failing.
            SinkFileLost: a sealed file is gone that was never published. Nothing was published then.
        """
        await self._publish(self._ledger.completed(checkpoint_id))
        if self._ledger.nothing_held:
            await self._sweep(self._ledger.parts_before_the_end)
        await self._delete(())

    async def discarded(self, checkpoint_id: int) -> None:
        """Delete what was kept because ``checkpoint_id`` might have been restored.

        For ``notify_checkpoint_discarded``. A coordinator that does not call it deletes with the next completion.
        """
        await self._delete(())

    async def restore(self, checkpoint_id: int, state: bytes | None) -> None:
        """Begin anew at ``checkpoint_id``, with what ``snapshot`` returned for it. May come before ``start`` (H52).

        Raises:
            SinkMisused, ValueError: it is not the state of this sink.
            SinkFileLost, SinkPublishError: as ``complete``.
        """
        if self._context is None:
            self._restored = (checkpoint_id, state)
            return
        due, dead = self._ledger.restore(checkpoint_id, state)
        await self._publish(due)
        await self._delete(dead)
        await self._sweep(self._ledger.parts_of_failed_attempts)

    def run_ended(self, succeeded: bool) -> None:
        """The run is over. After a good one, the next completed checkpoint leaves nothing behind."""
        if self._context is not None:
            self._ledger.run_ended(succeeded)

    async def close(self) -> None:
        """Take the staging directory away if nothing is in it. What a checkpoint may still cover stays."""
        if self._context is not None:
            await run_sync(self._directory.remove_if_empty)

    async def _publish(self, due: list[SealedFile]) -> None:
        if not due:
            return
        left = list(due)
        known = {file.name for file in due if self._journal.covers(file.part)}  # published before this call
        tried: set[str] = set()
        lost: list[str] = []
        for delay_s in (*self._retry_delays_s, None):
            try:
                await run_sync(self._publish_all, left, known, tried, lost)
                break
            except OSError as error:
                if delay_s is None:
                    raise SinkPublishError(
                        f"{len(left)} of {len(due)} files of sink {self._sink!r} could not be published in "
                        f"{self._directory.address}, after {len(self._retry_delays_s) + 1} tries: {error}"
                    ) from error
                self._log.warning("publishing failed, retry scheduled", error=repr(error), delay_s=delay_s)
                await anyio.sleep(delay_s)
        if lost:
            raise SinkFileLost(
                f"{lost} of sink {self._sink!r} were sealed and never published, and are gone from "
                f"{self._directory.address}: their rows are lost. Either a savepoint or an older checkpoint was "
                "restored after the application that took it had failed or gone on, which deletes what it did not "
                "commit; then restore the newest checkpoint. Or somebody else deleted in the sink's hidden folder; "
                "then put the files back, or start again without this checkpoint"
            )

    def _publish_all(self, left: list[SealedFile], known: set[str], tried: set[str], lost: list[str]) -> None:
        """Publish and take out of ``left``, in order. In a worker thread, while the coordinator awaits it.

        ``known``: published before, so a reader may have taken it. ``tried``: a move of it has failed, as far as is
        known. Whatever else is absent goes to ``lost``; then nothing is published, and the journal does not claim it.
        """
        here = {*self._directory.staged(), *known, *tried}
        absent = [file.name for file in left if file.name not in here]
        lost.extend(name for name in absent if not self._directory.is_published(name))
        if lost:
            return
        self._journal.record(file.part for file in left)
        while left:
            file = left[0]
            before = file.name in known or file.name in tried
            tried.add(file.name)
            outcome = self._directory.publish(file.name)
            if outcome is Published.MOVED:
                self.files_published += 1
                self.rows_published += file.rows
            elif outcome is Published.GONE and not before:  # it was there a moment ago
                lost.append(file.name)
            elif outcome is Published.GONE:
                self._log.info("published file already removed by reader", file=file.name)
            self._ledger.published(file.name)
            self._to_delete.discard(file.name)
            left.pop(0)
        self._directory.sync_published()

    def _load_journal(self) -> list[str]:
        for _ in range(_LOOKS_MAX - 1):
            with suppress(FileNotFoundError):  # a fenced application that still runs may replace its own
                return self._journal.load(self._directory.staged())
        return self._journal.load(self._directory.staged())

    async def _sweep(self, choose: Callable[[Iterable[str]], list[str]]) -> None:
        """Delete of what is in the staging directory what ``choose`` picks. Failures are logged: it is only garbage."""
        try:
            names = await run_sync(self._directory.staged)
        except OSError as error:
            self._log.warning("staging directory listing failed", error=repr(error))
            return
        await self._delete(choose(names))

    async def _delete(self, names: Sequence[str]) -> None:
        """Delete these, and what was put off; but nothing while a restart may restore a checkpoint that needs it."""
        assert self._context is not None, "start comes first"
        self._to_delete.update(names)
        if not self._to_delete:
            return
        in_doubt = [id_ for id_ in self._context.checkpoints_in_doubt if id_ > self._ledger.completed_id]
        if in_doubt:
            self._log.info("deletion postponed", files=len(self._to_delete), checkpoints_in_doubt=sorted(in_doubt))
            return
        names, self._to_delete = sorted(self._to_delete), set()
        await run_sync(self._delete_all, names)

    def _delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._directory.delete(name)
            except OSError as error:
                self._log.warning("part deletion failed", file=name, error=repr(error))

    @property
    def _log(self) -> Any:
        assert self._context is not None, "start comes first"
        return self._context.log
