# SPDX-License-Identifier: Apache-2.0

"""Random worlds around the real ``FileRetention`` and ``UploadedFiles``, in which drivers and attempts die at any step
(H190, H191, H193).

A world has two subtasks, each with a few files that change. Everything that takes time is done in single steps, in an
order that a seed decides: uploads, writes, sweeps, restores. Writes may be reported as failed and appear later.
Attempts and drivers die; what they had begun may go on for a while. After each step, every checkpoint that a restart
could restore must have all its files with the right contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from protocol import file_retention as r
from protocol.file_retention import FileOrigin, FileRetention, UploadedFiles

SUBTASKS = 2
Part = dict[int, tuple[str, int]]
"""What one subtask's state has: by path, the name of the file, and its content."""
Record = dict[int, Part]
"""A checkpoint: the part of each subtask."""
Act = Callable[[], None]


class Broken(AssertionError):
    """A rule does not hold."""


def names_of(record: Record) -> frozenset[str]:
    return frozenset(name for part in record.values() for name, _ in part.values())


@dataclass
class Snapshot:
    """The files of a state at a cut, and which of them are named so far. ``target``: of a savepoint."""

    files: dict[int, int]
    target: str = ""
    named: Part = field(default_factory=dict)


class Attempt:
    """A task: its files, its uploads, and what the driver tells it."""

    def __init__(self, world: World, driver: Driver, subtask: int, base: Part | None, *, elsewhere: bool) -> None:
        self.world, self.driver, self.subtask = world, driver, subtask
        self.task = world.count()
        self.nonce = f"{world.random.randrange(2**16):x}"
        self.alive = True
        self.told: deque[tuple[str, int]] = deque()
        self.local: dict[int, int] = {} if base else {path: world.count() for path in range(2)}
        self.to_restore = list((base or {}).items())
        self.ready = base is None
        self.elsewhere = elsewhere
        self.before: list[tuple[int, int]] = []  # files that it has had
        self.uploaded = UploadedFiles()
        self.snapshots: dict[int, Snapshot] = {}
        self.writing: dict[tuple[int, int], str] = {}  # by checkpoint and path
        self.hanging: list[tuple[tuple[int, int], str, int]] = []  # requests of uploads that were stopped
        self.uploads = 0

    def acts(self) -> Iterator[Act]:
        if self.alive and not self.ready:
            yield self.restore
            return
        if self.alive:
            if r.LAST_STATE not in self.snapshots and self.world.random.random() < 0.4:
                yield self.change
            if self.told:
                yield self.take
            elif not self.snapshots and self.world.random.random() < self.world.ends:
                yield self.finish
        if self.hanging and self.world.random.random() < 0.2:
            yield self.answer_late
        for checkpoint_id in self.snapshots:  # what a dead task has begun may still arrive
            yield lambda checkpoint_id=checkpoint_id: self.upload(checkpoint_id)  # type: ignore[misc]

    def restore(self) -> None:
        if self.to_restore:
            path, (name, content) = self.to_restore.pop()
            found = self.world.files.get(name)
            if found != content:
                raise Broken(f"H190: a restore finds {found} in {name}, not {content}")
            self.local[path] = content
            self.uploaded.restored([((path, content), name)], elsewhere=self.elsewhere)
        self.ready = not self.to_restore

    def change(self) -> None:
        """Write one file again under its path, or another one, as an embedded store does."""
        random, paths = self.world.random, sorted(self.local)
        self.before += self.local.items()
        if random.random() < 0.4:  # a file comes back that the store had dropped
            path, content = random.choice(self.before[-12:])
            self.local[path] = content
        else:
            path = random.choice([*paths, paths[-1] + 1])
            self.local[path] = self.world.count()
        if len(self.local) > 3:
            del self.local[paths[0]]

    def finish(self) -> None:
        """Begin to store the last state. What comes meanwhile is taken first, and then it is stored once more."""
        self.snapshots[r.LAST_STATE] = Snapshot(dict(self.local))

    def take(self) -> None:
        what, checkpoint_id = self.told.popleft()
        if self.snapshots.pop(r.LAST_STATE, None) is not None:  # another try has other names
            self.writing = {(n, path): name for (n, path), name in self.writing.items() if n != r.LAST_STATE}
        if what == "barrier":
            self.snapshots[checkpoint_id] = Snapshot(dict(self.local), self.driver.targets.get(checkpoint_id, ""))
            return
        snapshot = self.snapshots.pop(checkpoint_id, None)
        if what == "complete":
            self.uploaded.completed(checkpoint_id)
            return
        self.uploaded.aborted(checkpoint_id)
        if snapshot is not None and not snapshot.target:
            for path, content in snapshot.files.items():
                if (name := self.writing.get((checkpoint_id, path))) and path not in snapshot.named:
                    self.hanging.append(((path, content), name, checkpoint_id))

    def answer_late(self) -> None:
        """The request of an upload that was stopped ends at last. What it has written may be unknown to the driver."""
        identity, name, checkpoint_id = self.hanging.pop()
        self.world.files[name] = identity[1]
        self.uploaded.stored(identity, name, checkpoint_id)

    def upload(self, checkpoint_id: int) -> None:
        """Do one step of an upload: find a file, begin to write one, complete it, or report the whole."""
        snapshot = self.snapshots[checkpoint_id]
        path = next((path for path in snapshot.files if path not in snapshot.named), None)
        if path is None:
            del self.snapshots[checkpoint_id]
            self.uploaded.manifest_stored(checkpoint_id, [name for name, _ in snapshot.named.values()])
            if self.alive and checkpoint_id == r.LAST_STATE:
                self.driver.finished(self, snapshot.named)
            elif self.alive:
                self.driver.stored(self, checkpoint_id, snapshot.named)
            return
        identity = path, snapshot.files[path]
        known = self.uploaded.find(identity, snapshot.target)
        name = self.writing.get((checkpoint_id, path))
        if known is not None:
            snapshot.named[path] = known, identity[1]
        elif name is None:
            origin = FileOrigin(checkpoint_id, self.driver.epoch)
            name = r.file_name(origin, self.driver.token, self.subtask, self.task, self.nonce, self.uploads)
            self.writing[checkpoint_id, path] = f"{snapshot.target}{name}"
            self.uploads += 1
        else:
            self.world.files[name] = identity[1]
            self.uploaded.stored(identity, name, checkpoint_id, snapshot.target)
            snapshot.named[path] = name, identity[1]


class Driver:
    """One application, around the real machine. ``work``: effects of the machine that are not carried out yet."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.epoch = world, epoch
        self.token = f"{epoch:x}"
        self.retention = FileRetention(epoch)
        self.work: deque[Act] = deque()
        self.attempts: dict[int, Attempt] = {}
        self.pending: dict[int, Record] = {}
        self.writing: dict[int, Record] = {}
        self.in_doubt: dict[int, Record] = {}
        self.targets: dict[int, str] = {}
        self.final: Record = {}  # of the attempts that have finished in this run
        self.base, self.base_elsewhere = self._choose()
        valid = {n: record for n, record in world.records.items() if n not in world.void and not self.base_elsewhere}
        self.completed = max(valid, default=0)
        self.complete_records = dict(valid)
        self.whole = {self.completed}  # an earlier one may be of a write that was given up, and came late
        self.running = False
        self.tell(r.RestoreChosen({n: names_of(record) for n, record in valid.items()}))

    def _choose(self) -> tuple[Record, bool]:
        world = self.world
        if world.saves and world.random.random() < 0.2:
            return world.random.choice(world.saves), True
        return world.records.get(max((n for n in world.records if n not in world.void), default=0), {}), False

    @property
    def fenced(self) -> bool:
        return self.world.drivers[-1] is not self

    def acts(self) -> Iterator[Act]:
        random = self.world.random
        if self.work:
            yield self.do_next
        if self.fenced or not self.running:
            return
        running = [attempt for attempt in self.attempts.values() if attempt.subtask not in self.final]
        ready = all(attempt.alive and attempt.ready for attempt in running)
        under_way = len(self.pending) + len(self.writing)
        if ready and under_way < 2 and random.random() >= 0.9 * self.world.ends:
            yield self.trigger
        if not running and random.random() < 0.3:
            yield self.start_run
        for checkpoint_id in self.pending:
            if random.random() < 0.02:
                yield lambda checkpoint_id=checkpoint_id: self.abort(checkpoint_id)  # type: ignore[misc]
        for checkpoint_id in self.writing:
            yield lambda checkpoint_id=checkpoint_id: self.written(checkpoint_id)  # type: ignore[misc]
        for checkpoint_id in self.in_doubt:
            if random.random() < 0.1:
                yield lambda checkpoint_id=checkpoint_id: self.discard(checkpoint_id)  # type: ignore[misc]

    def do_next(self) -> None:
        self.work.popleft()()

    # --- the machine ---

    def tell(self, input: r.RetentionInput) -> None:
        for effect in self.retention.handle(input):
            match effect:
                case r.RefuseStore():
                    raise Broken(f"H190: {effect}, and every task keeps the rules")
                case r.AllowStore(checkpoint_id):
                    self._write(checkpoint_id)
                case _:
                    self.work.append(lambda effect=effect: self.carry_out(effect))  # type: ignore[misc]
        self.retention.check_invariants()

    def carry_out(self, effect: r.RetentionEffect) -> None:
        world = self.world
        match effect:
            case r.RecordRestore():
                if not self.fenced:
                    world.void |= set(range(self.completed + 1, world.counted + 1))
                    if self.base_elsewhere:
                        world.void |= set(range(world.counted + 1))
                    self.start()
                    self.tell(r.RestoreRecorded())
            case r.ListFiles():
                self.tell(r.FilesListed(tuple(world.files)))
            case r.ConfirmClaim():
                self.tell(r.ClaimConfirmed(not self.fenced))
            case r.DeleteFiles(names):
                self.work.extendleft([lambda: self.tell(r.FilesDeleted())])
                self.work.extendleft([lambda name=name: world.delete(name) for name in names])  # type: ignore[misc]

    # --- checkpoints ---

    def start(self) -> None:
        self.running = True
        for subtask in range(SUBTASKS):
            self.launch(subtask)

    def start_run(self) -> None:
        """Begin another run after all have finished; what no checkpoint has of their last states is lost."""
        for checkpoint_id in (*self.pending, *self.writing):
            self.abort(checkpoint_id)
        self.final = {}
        self.world.runs += 1
        self.start()

    def launch(self, subtask: int) -> None:
        record, elsewhere = self.complete_records.get(self.completed, {}), False
        if not record:
            record, elsewhere = self.base, self.base_elsewhere
        attempt = Attempt(self.world, self, subtask, record.get(subtask), elsewhere=elsewhere)
        self.attempts[subtask] = attempt
        self.world.attempts.append(attempt)

    def trigger(self) -> None:
        checkpoint_id = self.world.count()
        self.pending[checkpoint_id] = {}
        if self.world.random.random() < 0.1 and not self.final:
            self.targets[checkpoint_id] = f"savepoint-{checkpoint_id}/"
        self.tell(r.CheckpointBegan(checkpoint_id))
        self._tell_all("barrier", checkpoint_id)
        for subtask, part in self.final.items():
            self.stored(self.attempts[subtask], checkpoint_id, part)

    def _tell_all(self, what: str, checkpoint_id: int) -> None:
        for attempt in self.attempts.values():
            attempt.told.append((what, checkpoint_id))

    def finished(self, attempt: Attempt, part: Part) -> None:
        if self.attempts[attempt.subtask] is not attempt:
            return
        attempt.alive = False
        self.final[attempt.subtask] = part
        self.tell(r.AttemptOver(attempt.task))
        for checkpoint_id, record in [*self.pending.items()]:
            if attempt.subtask not in record and checkpoint_id in self.targets:
                self.abort(checkpoint_id)  # or its files would have to be copied
            elif attempt.subtask not in record:
                self.stored(attempt, checkpoint_id, part)

    def stored(self, attempt: Attempt, checkpoint_id: int, part: Part) -> None:
        if checkpoint_id not in self.pending or self.attempts[attempt.subtask] is not attempt:
            return
        record = self.pending[checkpoint_id]
        record[attempt.subtask] = part
        if len(record) < SUBTASKS:
            return
        if checkpoint_id in self.targets:
            self.world.save(record, self.targets[checkpoint_id])
            del self.pending[checkpoint_id]
            self.tell(r.CheckpointGivenUp(checkpoint_id))
            self._tell_all("aborted", checkpoint_id)  # as far as the files are concerned
        else:
            self.tell(r.FilesNamed(checkpoint_id, names_of(record)))

    def _write(self, checkpoint_id: int) -> None:
        self.writing[checkpoint_id] = self.pending.pop(checkpoint_id)
        if not self.fenced:
            self.world.hanging[checkpoint_id] = self.writing[checkpoint_id]  # may appear at any time from here on

    def written(self, checkpoint_id: int) -> None:
        """The storage answers: the checkpoint is durable, or failed as far as is known."""
        if self.world.random.random() < 0.3:
            self.abort(checkpoint_id)
            return
        self.world.appear(checkpoint_id)
        for lower in [n for n in (*self.pending, *self.writing) if n < checkpoint_id and n not in self.targets]:
            self.abort(lower)
        self.in_doubt = {n: record for n, record in self.in_doubt.items() if n > checkpoint_id}
        self.complete_records[checkpoint_id] = self.writing.pop(checkpoint_id)
        self.completed = checkpoint_id
        self.whole.add(checkpoint_id)
        self.world.completions += 1
        self.tell(r.CheckpointDurable(checkpoint_id))
        self._tell_all("complete", checkpoint_id)
        self.work.append(lambda: self.remove_records(checkpoint_id))

    def remove_records(self, checkpoint_id: int) -> None:
        """Keep two checkpoints, as the storage does."""
        if self.fenced:
            return
        surplus = tuple(sorted(n for n in self.complete_records if n <= checkpoint_id)[:-2])
        for n in surplus:
            self.world.records.pop(n, None)
            del self.complete_records[n]
        self.tell(r.RecordsRemoved(surplus))

    def abort(self, checkpoint_id: int) -> None:
        self.pending.pop(checkpoint_id, None)
        record = self.writing.pop(checkpoint_id, None)
        if record is not None:
            self.in_doubt[checkpoint_id] = record
        self.tell(r.CheckpointGivenUp(checkpoint_id, in_doubt=record is not None))
        self._tell_all("aborted", checkpoint_id)

    def discard(self, checkpoint_id: int) -> None:
        del self.in_doubt[checkpoint_id]
        self.world.void.add(checkpoint_id)
        self.world.records.pop(checkpoint_id, None)
        self.tell(r.DoubtEnded(checkpoint_id))

    def lose(self, subtask: int) -> None:
        """A task dies: everything that it has a part in is given up, and the next one restores."""
        if subtask in self.final:
            return
        self.attempts[subtask].alive = False
        self.tell(r.AttemptOver(self.attempts[subtask].task))
        for checkpoint_id in (*self.pending, *self.writing):
            self.abort(checkpoint_id)
        self.launch(subtask)


class World:
    """The storage, which outlives every driver, and all that may happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.counted = self.completions = self.deletions = self.restarts = self.runs = self.last_deletions = 0
        self.ends = self.random.choice([0.0, 0.1, 0.8])  # how likely an attempt is about to finish
        self.files: dict[str, int] = {}
        self.records: dict[int, Record] = {}
        self.void: set[int] = set()
        self.hanging: dict[int, Record] = {}
        self.saves: list[Record] = []
        self.attempts: list[Attempt] = []
        self.drivers: list[Driver] = []
        self.drivers.append(Driver(self, 1))

    def count(self) -> int:
        self.counted += 1
        return self.counted

    def appear(self, checkpoint_id: int) -> None:
        record = self.hanging.pop(checkpoint_id, None)
        if record is not None:
            self.records[checkpoint_id] = record

    def delete(self, name: str) -> None:
        gone = self.files.pop(name, None) is not None
        self.deletions += gone
        self.last_deletions += gone and name.startswith(f"{r.LAST_STATE}-{self.drivers[-1].epoch}-")

    def save(self, record: Record, target: str) -> None:
        if not all(name.startswith(target) for name in names_of(record)):
            raise Broken(f"H193: {target} needs {sorted(names_of(record))}")
        self.saves = [*self.saves, record][-2:]

    def step(self) -> None:
        driver, chance = self.drivers[-1], self.random.random()
        acts = [act for one in self.drivers[-3:] for act in one.acts()] * 2
        acts += [act for attempt in self.attempts[-6:] for act in attempt.acts()]
        danger = 0.1 if self.ends > 0.5 else 1.0  # where attempts finish, they live longer
        if chance < 0.02 * danger and driver.running:
            driver.lose(self.random.randrange(SUBTASKS))
        elif chance < 0.028 * danger:
            for attempt in driver.attempts.values():
                attempt.alive = False
            self.restarts += 1
            self.drivers.append(Driver(self, len(self.drivers) + 1))
        elif chance > 0.98 and self.hanging:
            self.appear(self.random.choice(sorted(self.hanging)))
        elif acts:
            self.random.choice(acts)()
        self.check()

    def check(self) -> None:
        """Every checkpoint that a restart could restore has its files, and so has every savepoint."""
        driver = self.drivers[-1]
        restorable = {n: record for n, record in self.records.items() if n not in self.void}
        newest = max(restorable, default=0)
        must = {n: record for n, record in restorable.items() if n == newest or n in driver.whole}
        doubtful = {n: record for n, record in driver.in_doubt.items() if n in self.hanging}
        for n, record in {**must, **doubtful}.items():
            self._check_whole(record, f"H190: checkpoint {n}")
        for record in self.saves:
            self._check_whole(record, "H193: a savepoint")

    def _check_whole(self, record: Record, what: str) -> None:
        for part in record.values():
            for name, content in part.values():
                if self.files.get(name) != content:
                    raise Broken(f"{what} needs {name} with {content}, and there is {self.files.get(name)}")


def run(seed: int, steps: int) -> World:
    world = World(seed)
    for step in range(steps):
        try:
            world.step()
        except Broken as broken:
            broken.add_note(f"seed {seed}, step {step}")
            raise
    return world


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_no_file_is_deleted_that_anything_can_need(first: int) -> None:  # H190, H191, H193
    worlds = [run(seed, 900) for seed in range(first, first + 20)]
    counted = "completions", "deletions", "restarts", "runs", "last_deletions"
    figures = {name: sum(getattr(world, name) for world in worlds) for name in counted}
    print(figures)
    assert min(figures[name] for name in counted[:3]) > 50
    assert min(figures.values()) > 10
    assert all(len(world.files) < 300 for world in worlds), "what nothing needs is never deleted"
