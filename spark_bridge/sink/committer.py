# SPDX-License-Identifier: Apache-2.0

"""The sink's half on the driver: sealed files become visible when the checkpoint that covers them completes.

Whenever the driver dies, its successor finishes the work: the files in the restored state are published again, the
subtasks list again what they held, and publishing a file twice has no effect. See ``ledger`` for the rules.
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
    """Commits the files of a sink, as a part of any ``OperatorCoordinator``.

    Call each method in the coordinator's method of that name, and await those that are coroutines. They are for the
    coordinator's loop only. Work on files runs in a worker thread and is awaited, so the order of the coordinator's
    calls is kept and the loop is never blocked. Let exceptions leave the coordinator's method: they fail the job, and
    the restore that follows publishes again.

    ``url`` and ``options`` must be the same as those of the writers, and so must ``name``, whose default is the
    operator's id. Only one application at a time may use a name in a directory, because the next one deletes what this
    one has not published. Readers may rename, move or delete published files.

    ``retry_delays_s`` are the seconds to wait before each further try if the filesystem fails.
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
        self._to_delete: set[str] = set()  # when no checkpoint is in doubt
        self.files_published = 0
        """The number of files that were made visible."""
        self.rows_published = 0
        """The number of rows in these files."""

    @property
    def files_pending(self) -> int:
        """The number of sealed files that wait for their checkpoint."""
        return self._ledger.files_pending if self._context is not None else 0

    async def start(self, context: CoordinatorContext) -> None:
        """Create the directories, publish what a restored state lists, and delete what dead drivers left.

        Another committer of the same sidecar may replace this one later, as ``RecreateOnReset`` does.

        Raises:
            SinkMisused: batch mode, in which no checkpoint owns the output, or a relative path.
            SinkFileLost, SinkPublishError, OSError: the directory cannot be used.
        """
        if context.mode is not RestoreMode.STREAMING:
            raise SinkMisused(
                f"operator {context.operator_id!r} is in batch mode, in which Spark owns the output and a retry writes "
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
        # Only before this application's first attempt: a part that begins now looks like one of a dead driver.
        if context.store.put_if_absent(f"headgate/sink/{self._directory.address}/{self._sink}", True) is None:
            await self._sweep(self._ledger.parts_of_earlier_applications)

    async def sealed(self, subtask: int, attempt: int, event: Any) -> bool:
        """Handle ``event`` and return True if it is a file list of this sink. For ``handle_event_from_operator``.

        Raises:
            SinkMisused: the subtask writes into another directory, or lists a file that it did not write.
            SinkFileLost, SinkPublishError: a file that had to be published now could not be published.
        """
        files = parse_sealed_event(self._sink, self._directory.address, event)
        if files is None:
            return False
        await self._publish(self._ledger.listed(subtask, attempt, files))
        return True

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        """The attempt has ended."""
        self._ledger.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """Delete what the subtask's attempts wrote after ``checkpoint_id``; the next attempt writes it again.

        While an aborted checkpoint may still be restored, this method and all others postpone deletions.
        """
        await self._delete(self._ledger.subtask_reset(subtask, checkpoint_id))
        await self._sweep(lambda names: self._ledger.parts_of_failed_attempts(names, subtask=subtask))

    def snapshot(self, checkpoint_id: int) -> bytes:
        """Return the state for ``checkpoint_id``, as a part of the coordinator's state. Publishes nothing."""
        return self._ledger.snapshot(checkpoint_id)

    async def complete(self, checkpoint_id: int) -> None:
        """Publish the files that ``checkpoint_id`` covers.

        Raises:
            SinkPublishError: the filesystem failed at every try.
            SinkFileLost: a sealed file that was never published is gone. In this case, nothing was published.
        """
        await self._publish(self._ledger.completed(checkpoint_id))
        if self._ledger.nothing_held:
            await self._sweep(self._ledger.parts_before_the_end)
        await self._delete(())

    async def discarded(self, checkpoint_id: int) -> None:
        """Delete what was kept because ``checkpoint_id`` might have been restored.

        For ``notify_checkpoint_discarded``. Without this call, the next completed checkpoint deletes it.
        """
        await self._delete(())

    async def restore(self, checkpoint_id: int, state: bytes | None) -> None:
        """Return to ``checkpoint_id``, with the state that ``snapshot`` returned for it. May come before ``start``.

        Raises:
            SinkMisused, ValueError: it is not the state of this sink.
            SinkFileLost, SinkPublishError: as for ``complete``.
        """
        if self._context is None:
            self._restored = (checkpoint_id, state)
            return
        due, dead = self._ledger.restore(checkpoint_id, state)
        await self._publish(due)
        await self._delete(dead)
        await self._sweep(self._ledger.parts_of_failed_attempts)

    def run_ended(self, succeeded: bool) -> None:
        """The run has ended. After a successful run, the next completed checkpoint deletes everything unpublished."""
        if self._context is not None:
            self._ledger.run_ended(succeeded)

    async def close(self) -> None:
        """Delete the staging directory if it is empty. Files that a checkpoint may still cover are kept."""
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
                f"{lost} of sink {self._sink!r} were sealed and never published, but are gone from "
                f"{self._directory.address}, so their rows are lost. If a savepoint or an older checkpoint was "
                "restored after the application that took it had failed or continued, which deletes what it did not "
                "commit, restore the newest checkpoint. If somebody deleted files in the sink's hidden folder, put "
                "them back, or start again without this checkpoint"
            )

    def _publish_all(self, left: list[SealedFile], known: set[str], tried: set[str], lost: list[str]) -> None:
        """Publish the files in ``left`` in order, and remove them from it. In a worker thread that is awaited.

        ``known`` were published before, so a reader may have taken them. ``tried`` are files of which a move seems to
        have failed. Any other absent file goes to ``lost``; then nothing is published or written to the journal.
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
            elif outcome is Published.GONE and not before:  # it existed a moment ago
                lost.append(file.name)
            elif outcome is Published.GONE:
                self._log.info("published file already removed by reader", file=file.name)
            self._ledger.published(file.name)
            self._to_delete.discard(file.name)
            left.pop(0)
        self._directory.sync_published()

    def _load_journal(self) -> list[str]:
        for _ in range(_LOOKS_MAX - 1):
            with suppress(FileNotFoundError):  # a fenced application that is still running may replace its journal
                return self._journal.load(self._directory.staged())
        return self._journal.load(self._directory.staged())

    async def _sweep(self, choose: Callable[[Iterable[str]], list[str]]) -> None:
        """Delete the files in the staging directory that ``choose`` selects. Failures are only logged."""
        try:
            names = await run_sync(self._directory.staged)
        except OSError as error:
            self._log.warning("staging directory listing failed", error=repr(error))
            return
        await self._delete(choose(names))

    async def _delete(self, names: Sequence[str]) -> None:
        """Delete these and all postponed files, or postpone them while a restart may restore a checkpoint in doubt."""
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
