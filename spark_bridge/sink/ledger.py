"""Which sealed files may become visible, and which are dead: the driver's books of a sink, without any file.

Theory of operation
-------------------
A file is **covered** by checkpoint N if restoring N does not produce its rows again. It becomes visible when a
checkpoint that covers it is complete: not before, or a restore of an older one would double its rows; and surely then,
or they would be lost. Three ways lead there:

* *Taken before the cut of N*: the list stands in the books then, so it is in N's state of the coordinator, and the
  subtask's snapshot for N was taken behind it. This holds for files that were sealed at the end of an operator, and
  for those of an aborted checkpoint, whose rows would be lost otherwise.
* *Sealed for M, and M or a later one completed*: the list was held at the cut and is part of the subtask's snapshot
  (H31). It leaves when the subtask has acknowledged, so it usually stands here when M completes. If it comes later, it
  is published at once.
* *Sent by somebody who did not write it*: an attempt sends it again because it restored a completed checkpoint that
  held it. It is published at once, and may have been published before.

A restored state lists what was taken before its cut, so all of it is published again: that is harmless where it was
done, and mends a crash in the middle.

What an attempt sealed and no checkpoint covers dies with it, since its successor writes those rows again. A reset to
R names the moment: what has the id of a later checkpoint, or was begun behind R, is deleted; what else was listed is
struck off without deleting, because a snapshot may hold it still. A copy that fails beside another attempt is not
followed by a reset; no checkpoint runs while there are two, so its files are struck off at the next cut, and go when
the checkpoint of that cut completes. A checkpoint whose cut lay before the failure still counts.

The driver may also die, and leave files that nobody lists. By their names: whatever was begun behind the restored
checkpoint is dead, whatever was begun before it may be held by a snapshot, and its list may be still to come. When a
run has ended well and a checkpoint of after that has completed, nothing is held anywhere, and all that is left goes.
A savepoint is never completed (H49). It can be restored into the same directory only if the application that took it
neither failed nor went on after it.

What dies is not always deleted at once: an aborted checkpoint may be in doubt (H64), and while it is, the next
application may restore it and need what died here. The committer waits for the end of the doubt; these records need not
know of it, because whatever was struck off stays so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sink.errors import SinkMisused
from spark_bridge.sink.files import PartName, SealedFile, files_from

__all__ = ["SinkLedger"]


@dataclass(slots=True)
class _Pending:
    """A listed file that waits for the checkpoint ``covered_by``; None until the next cut.

    ``dead``: its attempt has failed. ``void_from``: the first cut after that, which no longer covers it.
    """

    file: SealedFile
    part: PartName
    covered_by: int | None
    dead: bool = False
    void_from: int | None = None


class SinkLedger:
    """See the module. Call the methods in the order in which the coordinator is called.

    What ``listed``, ``completed`` and ``restore`` return must be published, each then reported with ``published``.
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
        """Files that are listed and not yet visible."""
        return len(self._pending)

    @property
    def completed_id(self) -> int:
        """The last checkpoint that is complete, or was restored."""
        return self._completed

    @property
    def nothing_held(self) -> bool:
        """Whether a run has ended well and a checkpoint of after that is complete."""
        return self._final_cut is not None and self._completed >= self._final_cut

    def listed(self, attempt: int, files: Iterable[SealedFile]) -> list[SealedFile]:
        """``attempt`` of the operator has sent this list; returns what need not wait."""
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
        """The cut: the state for ``checkpoint_id``."""
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
        """``checkpoint_id`` is durable; returns what must become visible, in the order in which it was listed."""
        self._completed = max(self._completed, checkpoint_id)
        due = []
        for name, entry in list(self._pending.items()):
            if entry.void_from is not None and entry.void_from <= checkpoint_id:
                del self._pending[name]
            elif entry.covered_by is not None and entry.covered_by <= checkpoint_id:
                due.append(entry.file)
        return due

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        """The attempt is over; what becomes of its files is decided by the reset, or by the next cut."""
        self._failed[subtask] = max(attempt, self._failed.get(subtask, attempt))
        self._run_goes_on()
        for entry in self._pending.values():
            if entry.part.subtask == subtask and entry.part.attempt == attempt:
                entry.dead = True

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> list[str]:
        """No attempt is left; the next one restores ``checkpoint_id``. Returns the listed files to delete."""
        return self._remove_pending(checkpoint_id, {subtask})

    def restore(self, checkpoint_id: int, state: bytes | None) -> tuple[list[SealedFile], list[str]]:
        """Begin anew at ``checkpoint_id``; returns what must become visible, and the listed files to delete.

        Raises:
            SinkMisused: the state is of another sink or another directory.
            ValueError: it is no state of a sink.
        """
        files = self._files_of(state) if state else ()
        dead = self._remove_pending(checkpoint_id, None)
        self._restored = self._completed = checkpoint_id
        self._run_goes_on()
        return list(files), dead

    def run_ended(self, succeeded: bool) -> None:
        """The run is over."""
        self._ended_well, self._final_cut = succeeded, None

    # --- dead parts, by their names -----------------------------------------------------------------------

    def parts_of_failed_attempts(self, names: Iterable[str], *, subtask: int | None = None) -> list[str]:
        """Of ``names``, the parts that failed attempts (of ``subtask``, or any) began behind what is restored now."""
        return [
            name
            for name, part in self._unlisted(names)
            if (subtask is None or part.subtask == subtask)
            and part.attempt <= self._failed.get(part.subtask, -1)
            and part.after >= self._completed
        ]

    def parts_of_earlier_applications(self, names: Iterable[str]) -> list[str]:
        """Before any attempt of this application: of ``names``, the parts that no list can name any more."""
        return [name for name, part in self._unlisted(names) if part.after >= self._completed]

    def parts_before_the_end(self, names: Iterable[str]) -> list[str]:
        """When ``nothing_held``: of ``names``, everything older than the final checkpoint."""
        final = self._final_cut
        assert final is not None, "something may be held still"
        return [name for name, part in self._unlisted(names) if part.after < final]

    def _unlisted(self, names: Iterable[str]) -> list[tuple[str, PartName]]:
        parts = [(name, PartName.parse(name)) for name in names if name not in self._pending]
        return [(name, part) for name, part in parts if part is not None]

    def _remove_pending(self, checkpoint_id: int, subtasks: set[int] | None) -> list[str]:
        """Whatever is still pending was not covered by ``checkpoint_id``, or is in its state, or sent again."""
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
                        f"the checkpoint is of sink {name!r} in {directory}, not of {self._name!r} in "
                        f"{self._directory}: restore it with the same name and URL"
                    )
                return files_from(files)
            case _:
                raise ValueError("the checkpoint holds no state of a sink")
