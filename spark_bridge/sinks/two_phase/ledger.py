# SPDX-License-Identifier: Apache-2.0

"""Which prepared parts may be committed, and which are dead: the driver's records of a sink (pure).

Theory of operation (H140)
--------------------------
A part is **covered** by checkpoint N if restoring N does not produce its rows again. It is committed when a
checkpoint that covers it is complete. If it was committed earlier, a restore of an older checkpoint would write its
rows twice. If it was not committed then, they would be lost. There are three ways to be covered:

* *Listed before the cut of N*: the list is in the ledger at the cut, so it is in the coordinator's state for N, and the
  subtask's snapshot for N was taken after it. This holds for parts that were prepared at the end of an operator, and
  for those of an aborted checkpoint, whose rows would be lost otherwise.
* *Prepared for M, and M or a later one has completed*: the list was held at the cut and is part of the subtask's
  snapshot (H31). It leaves when the subtask has acknowledged, so it has usually arrived when M completes. If it arrives
  later, the part is committed immediately.
* *Sent by an attempt that did not write it*: the attempt sends the list again because it restored a completed
  checkpoint that held it. The part is committed immediately, and may have been committed before. Such a part was begun
  before that checkpoint. A list that names any other part of another attempt, or one of another subtask, is refused.
  (``parts`` says why the writer of a list wrote the parts in it.)

A restored state lists the parts before its cut, so all of them are committed again. For a committed part that has no
effect, and it repairs a crash in the middle.

A part that an attempt prepared and that no checkpoint covers dies with the attempt, because its successor writes those
rows again. The reset to R decides: a part with the id of a later checkpoint, or begun after R, is destroyed. Any other
listed part is removed from the ledger but not destroyed, because a snapshot may still hold it. A copy that fails next
to another attempt is not followed by a reset. No checkpoint runs while there are two attempts, so its parts are marked
at the next cut, and removed when the checkpoint of that cut completes. A checkpoint with a cut before the failure still
covers them.

The driver may die too, and leave parts that no list names. Their names decide: a part that was begun after the restored
checkpoint is dead. One that was begun before it may be held by a snapshot, and its list may still arrive. When a run
has succeeded and a later checkpoint has completed, nothing is held anywhere, and all parts that are left are destroyed.
A savepoint is never completed (H49). It can be restored with the same target only if the application that took it
neither failed nor continued after it.

A dead part is not always destroyed immediately. An aborted checkpoint may be in doubt (H64), and while it is, the next
application may restore it and need the parts that are dead here. The committer waits until the doubt is over. The
ledger need not know about that, because a part that was removed from it stays removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable, PartName, PreparedList, committables_from


@dataclass(slots=True)
class _Pending:
    """A listed part that waits for the checkpoint ``covered_by``, which is None until the next cut.

    ``dead`` says that its attempt has failed. ``void_from`` is the first cut after that, which no longer covers it.
    """

    committable: Committable
    part: PartName
    covered_by: int | None
    dead: bool = False
    void_from: int | None = None


class SinkLedger:
    """The parts of a sink that are not committed yet; see the module. Call the methods in the coordinator's order.

    Commit the parts that ``listed``, ``completed`` and ``restore`` return, and report each with ``committed``.
    """

    def __init__(self, name: str, target: str) -> None:
        self._name = name
        self._target = target
        self._pending: dict[str, _Pending] = {}
        self._failed: dict[int, int] = {}  # subtask → its highest attempt that has failed
        self._restored = self._completed = VIRTUAL_EMPTY_CHECKPOINT
        self._ended_well = False
        self._final_cut: int | None = None

    @property
    def pending(self) -> int:
        """The number of parts that are listed and not yet committed."""
        return len(self._pending)

    @property
    def names(self) -> Set[str]:
        return self._pending.keys()

    @property
    def completed_id(self) -> int:
        """The last checkpoint that has completed or was restored."""
        return self._completed

    @property
    def nothing_held(self) -> bool:
        """Whether a run has succeeded and a later checkpoint is complete."""
        return self._final_cut is not None and self._completed >= self._final_cut

    def listed(self, subtask: int, attempt: int, committables: Sequence[Committable]) -> list[Committable]:
        """``attempt`` has sent this list; returns the parts to commit immediately.

        ``subtask`` is the one that first sent it, which may have been the sender's predecessor before a change of the
        parallelism. Raises ``SinkMisused``, and changes nothing, if one of the parts cannot belong to this list.
        """
        parts = [(committable, committable.part) for committable in committables]
        for committable, part in parts:
            if part.subtask != subtask or (part.attempt != attempt and part.after >= self._completed):
                raise SinkMisused(
                    f"attempt {attempt} of subtask {subtask} lists {committable.name}, which another attempt wrote "
                    f"after checkpoint {self._completed}: a task can only list the parts that it wrote itself, and "
                    "those in the state that it restored"
                )
        due = []
        for committable, part in parts:
            again = part.attempt != attempt or part.after < self._restored
            if again or (not committable.prepared_at_end and committable.checkpoint_id <= self._completed):
                due.append(committable)
            elif committable.name not in self._pending:
                self._pending[committable.name] = _Pending(
                    committable, part, None if committable.prepared_at_end else committable.checkpoint_id
                )
        return due

    def committed(self, name: str) -> None:
        self._pending.pop(name, None)

    def snapshot(self, checkpoint_id: int, held: Sequence[Committable] = (), expected: Sequence[int] = ()) -> bytes:
        """The cut of ``checkpoint_id``; returns the state for it.

        ``held`` are parts of complete checkpoints that are not committed yet, and ``expected`` the subtasks that will
        send a list for this one; see ``WholeCheckpoints``.
        """
        if self._ended_well and self._final_cut is None:
            self._final_cut = checkpoint_id
        covered = [list(part) for part in held]
        for entry in self._pending.values():
            if entry.dead:
                if entry.void_from is None:
                    entry.void_from = checkpoint_id
                continue
            if entry.covered_by is None:
                entry.covered_by = checkpoint_id
            covered.append(list(entry.committable))
        content = {"sink": self._name, "target": self._target, "prepared": covered, "expected": list(expected)}
        return json.dumps(content).encode()

    def completed(self, checkpoint_id: int) -> list[Committable]:
        """``checkpoint_id`` is durable; returns the parts to commit, in the order in which they were listed."""
        self._completed = max(self._completed, checkpoint_id)
        due = []
        for name, entry in list(self._pending.items()):
            if entry.void_from is not None and entry.void_from <= checkpoint_id:
                del self._pending[name]
            elif entry.covered_by is not None and entry.covered_by <= checkpoint_id:
                due.append(entry.committable)
        return due

    def subtask_failed(self, subtask: int, attempt: int) -> None:
        """The attempt has ended. The reset or the next cut decides about its parts."""
        self._failed[subtask] = max(attempt, self._failed.get(subtask, attempt))
        self._run_goes_on()
        for entry in self._pending.values():
            if entry.part.subtask == subtask and entry.part.attempt == attempt:
                entry.dead = True

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> list[str]:
        """No attempt is left, and the next one restores ``checkpoint_id``. Returns the listed parts to destroy."""
        return self._remove_pending(checkpoint_id, {subtask})

    def restore(self, checkpoint_id: int, state: bytes | None) -> tuple[list[Committable], list[str], list[int]]:
        """Return to ``checkpoint_id``; returns the parts to commit, the listed parts to destroy, and ``expected``.

        Raises:
            SinkMisused: the state belongs to another sink or another target.
            ValueError: it is not the state of a sink.
        """
        committables, expected = self._content_of(state) if state else ((), [])
        dead = self._remove_pending(checkpoint_id, None)
        self._restored = self._completed = checkpoint_id
        self._run_goes_on()
        return list(committables), dead, expected

    def run_ended(self, succeeded: bool) -> None:
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
            if entry.part.after >= checkpoint_id or entry.committable.checkpoint_id > checkpoint_id:
                delete.append(name)
        return delete

    def _run_goes_on(self) -> None:
        self._ended_well, self._final_cut = False, None

    def _content_of(self, state: bytes) -> tuple[tuple[Committable, ...], list[int]]:
        content: Any = json.loads(state)
        match content:
            case {"sink": name, "target": target, "prepared": list(entries), "expected": list(expected)}:
                if (name, target) != (self._name, self._target):
                    raise SinkMisused(
                        f"the checkpoint belongs to sink {name!r} in {target}, not to {self._name!r} in "
                        f"{self._target}: restore it with the same name and target, such as the same URL"
                    )
                return committables_from(entries), expected
            case _:
                raise ValueError("the checkpoint holds no state of a sink: restore one that this operator has taken")


@dataclass(slots=True)
class _Group:
    """What is committed with one complete checkpoint. ``missing``: the subtasks whose lists have not arrived."""

    missing: set[int] = field(default_factory=set)
    parts: dict[str, Committable] = field(default_factory=dict)


class WholeCheckpoints:
    """Holds what may be committed until its checkpoint is whole, so that readers never see half a checkpoint.

    The list of what a subtask has prepared for a checkpoint arrives after the subtask's snapshot, and so perhaps
    after the checkpoint's completion, or only when another application has restored it. A sink that commits
    atomically must not commit one subtask's part and, a moment later, another's. So it waits for the lists of all
    subtasks that took part: those that were live at the cut and had not ended. A subtask sends one list for each
    snapshot, empty or not, and one when it ends.

    What is held here is covered by a complete checkpoint: it will be committed, whatever becomes of its subtask. So
    a reset of the subtask does not remove it, and the state of a later checkpoint includes it (H141).

    Call the methods in the coordinator's order.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by complete checkpoint
        self._cuts: dict[int, set[int]] = {}  # by checkpoint that is not complete: whose lists are missing
        self._ended: set[int] = set()
        self._run_succeeded = False

    @property
    def held(self) -> list[Committable]:
        """What is to be committed and waits, in order."""
        return [part for _, group in sorted(self._groups.items()) for part in group.parts.values()]

    def cut(self, checkpoint_id: int, live: Iterable[int]) -> list[int]:
        """The cut of ``checkpoint_id``; returns the subtasks that will send a list for it."""
        self._cuts[checkpoint_id] = set(live) - self._ended
        return sorted(self._cuts[checkpoint_id])

    def covering(self, subtask: int, prepared: PreparedList) -> Iterable[Committable]:
        """What is in the list, with the checkpoint that covers it.

        At the end of an operator, a list names no checkpoint. If it arrives after a cut and the subtask has not sent
        its list for that checkpoint, it was held, so the subtask's snapshot includes it.
        """
        missing = [id_ for id_, group in self._groups.items() if subtask in group.missing]
        missing += [id_ for id_, subtasks in self._cuts.items() if subtask in subtasks]
        if prepared.checkpoint_id >= 0 or not missing:
            return prepared.committables
        return [part._replace(checkpoint_id=min(missing)) for part in prepared.committables]

    def listed(self, subtask: int, prepared: PreparedList) -> None:
        """The subtask has sent this list. Its parts, if they may be committed, are given to ``add``."""
        if not prepared.last:
            return
        ended = prepared.checkpoint_id < 0
        if ended:
            self._ended.add(subtask)
        for checkpoint_id, group in self._groups.items():
            if ended or checkpoint_id <= prepared.checkpoint_id:
                group.missing.discard(subtask)
        for checkpoint_id, missing in self._cuts.items():
            if ended or checkpoint_id <= prepared.checkpoint_id:
                missing.discard(subtask)

    def add(self, parts: Iterable[Committable], completed_id: int) -> None:
        """These may be committed; the last complete checkpoint is ``completed_id``."""
        for part in parts:
            checkpoint_id = min((id_ for id_ in self._groups if id_ >= part.checkpoint_id), default=completed_id)
            self._groups.setdefault(checkpoint_id, _Group()).parts.setdefault(part.name, part)

    def completed(self, checkpoint_id: int, parts: Iterable[Committable]) -> None:
        """``checkpoint_id`` is durable, and with it these may be committed."""
        group = self._groups.setdefault(checkpoint_id, _Group())
        group.missing |= self._cuts.pop(checkpoint_id, set())
        group.parts |= {part.name: part for part in parts}
        self._cuts = {id_: missing for id_, missing in self._cuts.items() if id_ > checkpoint_id}

    def take(self) -> tuple[list[int], list[Committable]]:
        """Remove and return the checkpoints that are whole, and what to commit with them, in order."""
        checkpoints: list[int] = []
        parts: list[Committable] = []
        for checkpoint_id, group in sorted(self._groups.items()):
            if group.missing and not self._run_succeeded:
                break
            checkpoints.append(checkpoint_id)
            parts += group.parts.values()
        for checkpoint_id in checkpoints:
            del self._groups[checkpoint_id]
        return checkpoints, parts

    def subtask_failed(self, subtask: int) -> None:
        """An attempt has ended; if it had sent its last list, another one comes."""
        self._ended.discard(subtask)
        self._run_succeeded = False

    def restore(self, checkpoint_id: int, parts: Iterable[Committable], missing: Iterable[int]) -> None:
        """Return to ``checkpoint_id``: these are in its state, and these subtasks send again what they held."""
        self._groups = {checkpoint_id: _Group(set(missing), {part.name: part for part in parts})}
        self._cuts.clear()
        self._ended.clear()
        self._run_succeeded = False

    def run_ended(self, succeeded: bool) -> None:
        """The run has ended. After a successful run no list is on its way."""
        self._run_succeeded = succeeded
