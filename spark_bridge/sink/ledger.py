# SPDX-License-Identifier: Apache-2.0

"""Which sealed files may become visible, and which are dead: the driver's records of a sink (pure).

Theory of operation
-------------------
A file is **covered** by checkpoint N if restoring N does not produce its rows again. It becomes visible when a
checkpoint that covers it is complete. If it became visible earlier, a restore of an older checkpoint would write its
rows twice. If it did not become visible then, they would be lost. There are three ways to be covered:

* *Listed before the cut of N*: the list is in the ledger at the cut, so it is in the coordinator's state for N, and the
  subtask's snapshot for N was taken after it. This holds for files that were sealed at the end of an operator, and
  for those of an aborted checkpoint, whose rows would be lost otherwise.
* *Sealed for M, and M or a later one has completed*: the list was held at the cut and is part of the subtask's snapshot
  (H31). It leaves when the subtask has acknowledged, so it has usually arrived when M completes. If it arrives later,
  the file is published immediately.
* *Sent by an attempt that did not write it*: the attempt sends the list again because it restored a completed
  checkpoint that held it. The file is published immediately, and may have been published before. Such a file was begun
  before that checkpoint. A list that names any other file of another attempt, or one of another subtask, is refused.
  (``files`` says why the writer of a list wrote the files in it.)

A restored state lists the files before its cut, so all of them are published again. For a published file that has no
effect, and it repairs a crash in the middle.

A file that an attempt sealed and that no checkpoint covers dies with the attempt, because its successor writes those
rows again. The reset to R decides: a file with the id of a later checkpoint, or begun after R, is deleted. Any other
listed file is removed from the ledger but not deleted, because a snapshot may still hold it. A copy that fails next to
another attempt is not followed by a reset. No checkpoint runs while there are two attempts, so its files are marked at
the next cut, and removed when the checkpoint of that cut completes. A checkpoint with a cut before the failure still
covers them.

The driver may die too, and leave files that no list names. Their names decide: a file that was begun after the restored
checkpoint is dead. One that was begun before it may be held by a snapshot, and its list may still arrive. When a run
has succeeded and a later checkpoint has completed, nothing is held anywhere, and all files that are left are deleted.
A savepoint is never completed (H49). It can be restored into the same directory only if the application that took it
neither failed nor continued after it.

A dead file is not always deleted immediately. An aborted checkpoint may be in doubt (H64), and while it is, the next
application may restore it and need the files that are dead here. The committer waits until the doubt is over. The
ledger need not know about that, because a file that was removed from it stays removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sink.errors import SinkMisused
from spark_bridge.sink.files import PartName, SealedFile, files_from

__all__ = ["SinkLedger"]


@dataclass(slots=True)
class _Pending:
    """A listed file that waits for the checkpoint ``covered_by``, which is None until the next cut.

    ``dead`` says that its attempt has failed. ``void_from`` is the first cut after that, which no longer covers it.
    """

    file: SealedFile
    part: PartName
    covered_by: int | None
    dead: bool = False
    void_from: int | None = None


class SinkLedger:
    """The files of a sink that are not visible yet; see the module. Call the methods in the coordinator's order.

    Publish the files that ``listed``, ``completed`` and ``restore`` return, and report each with ``published``.
    """

    def __init__(self, name: str, directory: str) -> None:
        self._name = name
        self._directory = directory
        self._pending: dict[str, _Pending] = {}
        self._failed: dict[int, int] = {}  # subtask → its highest attempt that has failed
        self._restored = self._completed = VIRTUAL_EMPTY_CHECKPOINT
        self._ended_well = False
        self._final_cut: int | None = None

    @property
    def files_pending(self) -> int:
        """The number of files that are listed and not yet visible."""
        return len(self._pending)

    @property
    def completed_id(self) -> int:
        """The last checkpoint that has completed or was restored."""
        return self._completed

    @property
    def nothing_held(self) -> bool:
        """Whether a run has succeeded and a later checkpoint is complete."""
        return self._final_cut is not None and self._completed >= self._final_cut

    def listed(self, subtask: int, attempt: int, files: Sequence[SealedFile]) -> list[SealedFile]:
        """``attempt`` has sent this list; returns the files to publish immediately.

        ``subtask`` is the one that first sent it, which may have been the sender's predecessor before a change of the
        parallelism. Raises ``SinkMisused``, and changes nothing, if one of the files cannot belong to this list.
        """
        for file in files:
            part = file.part
            if part.subtask != subtask or (part.attempt != attempt and part.after >= self._completed):
                raise SinkMisused(
                    f"attempt {attempt} of subtask {subtask} lists {file.name}, which another attempt wrote after "
                    f"checkpoint {self._completed}: a task can only list the files of its own SinkWriter, and those in "
                    "the state that it restored"
                )
        due = []
        for file in files:
            part = file.part
            again = part.attempt != attempt or part.after < self._restored
            if again or (not file.sealed_at_end and file.checkpoint_id <= self._completed):
                due.append(file)
            elif file.name not in self._pending:
                self._pending[file.name] = _Pending(file, part, None if file.sealed_at_end else file.checkpoint_id)
        return due

    def published(self, name: str) -> None:
        """The file is visible."""
        self._pending.pop(name, None)

    def snapshot(self, checkpoint_id: int) -> bytes:
        """The cut of ``checkpoint_id``; returns the state for it."""
        if self._ended_well and self._final_cut is None:
            self._final_cut = checkpoint_id
        covered = []
        for entry in self._pending.values():
            if entry.dead:
                if entry.void_from is None:
                    entry.void_from = checkpoint_id
                continue
            if entry.covered_by is None:
                entry.covered_by = checkpoint_id
            covered.append(list(entry.file))
        return json.dumps({"sink": self._name, "directory": self._directory, "files": covered}).encode()

    def completed(self, checkpoint_id: int) -> list[SealedFile]:
        """``checkpoint_id`` is durable; returns the files to publish, in the order in which they were listed."""
        self._completed = max(self._completed, checkpoint_id)
        due = []
        for name, entry in list(self._pending.items()):
            if entry.void_from is not None and entry.void_from <= checkpoint_id:
                del self._pending[name]
            elif entry.covered_by is not None and entry.covered_by <= checkpoint_id:
                due.append(entry.file)
        return due

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        """The attempt has ended. The reset or the next cut decides about its files."""
        self._failed[subtask] = max(attempt, self._failed.get(subtask, attempt))
        self._run_goes_on()
        for entry in self._pending.values():
            if entry.part.subtask == subtask and entry.part.attempt == attempt:
                entry.dead = True

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> list[str]:
        """No attempt is left, and the next one restores ``checkpoint_id``. Returns the listed files to delete."""
        return self._remove_pending(checkpoint_id, {subtask})

    def restore(self, checkpoint_id: int, state: bytes | None) -> tuple[list[SealedFile], list[str]]:
        """Return to ``checkpoint_id``; returns the files to publish and the listed files to delete.

        Raises:
            SinkMisused: the state belongs to another sink or another directory.
            ValueError: it is not the state of a sink.
        """
        files = self._files_of(state) if state else ()
        dead = self._remove_pending(checkpoint_id, None)
        self._restored = self._completed = checkpoint_id
        self._run_goes_on()
        return list(files), dead

    def run_ended(self, succeeded: bool) -> None:
        """The run has ended."""
        self._ended_well, self._final_cut = succeeded, None

    # --- dead parts, by their names -----------------------------------------------------------------------

    def parts_of_failed_attempts(self, names: Iterable[str], *, subtask: int | None = None) -> list[str]:
        """The parts in ``names`` that failed attempts (of ``subtask``, or any) began after the current restore."""
        return [
            name
            for name, part in self._unlisted(names)
            if (subtask is None or part.subtask == subtask)
            and part.attempt <= self._failed.get(part.subtask, -1)
            and part.after >= self._completed
        ]

    def parts_of_earlier_applications(self, names: Iterable[str]) -> list[str]:
        """The parts in ``names`` that no list can name any more. Only before any attempt of this application."""
        return [name for name, part in self._unlisted(names) if part.after >= self._completed]

    def parts_before_the_end(self, names: Iterable[str]) -> list[str]:
        """The parts in ``names`` that are older than the final checkpoint. Only when ``nothing_held``."""
        final = self._final_cut
        assert final is not None, "something may still be held"
        return [name for name, part in self._unlisted(names) if part.after < final]

    def _unlisted(self, names: Iterable[str]) -> list[tuple[str, PartName]]:
        parts = [(name, PartName.parse(name)) for name in names if name not in self._pending]
        return [(name, part) for name, part in parts if part is not None]

    def _remove_pending(self, checkpoint_id: int, subtasks: set[int] | None) -> list[str]:
        """Remove what is still pending: not covered by ``checkpoint_id``, or in its state, or sent again later."""
        delete = []
        for name, entry in list(self._pending.items()):
            if subtasks is not None and entry.part.subtask not in subtasks:
                continue
            del self._pending[name]
            if entry.part.after >= checkpoint_id or entry.file.checkpoint_id > checkpoint_id:
                delete.append(name)
        return delete

    def _run_goes_on(self) -> None:
        self._ended_well, self._final_cut = False, None

    def _files_of(self, state: bytes) -> tuple[SealedFile, ...]:
        content: Any = json.loads(state)
        match content:
            case {"sink": name, "directory": directory, "files": list(files)}:
                if (name, directory) != (self._name, self._directory):
                    raise SinkMisused(
                        f"the checkpoint belongs to sink {name!r} in {directory}, not to {self._name!r} in "
                        f"{self._directory}: restore it with the same name and URL"
                    )
                return files_from(files)
            case _:
                raise ValueError("the checkpoint holds no state of a sink")
