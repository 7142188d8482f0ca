# SPDX-License-Identifier: Apache-2.0

"""The storage's file system, which outlives every driver, and the failures of each operation on it.

An operation can succeed, or fail before or after it took effect. Its answer can take long. Its error can also come
first and its effect later, perhaps after its driver is dead. Deletions may be refused for a while, and the whole file
system may be out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

from tests.simulation.threads import Operation, SimulatedThread, this_thread

PROTOCOL = "simulated"
READS = ("list", "info", "read")
LONGEST_TROUBLE_S = 12.0
"""Longer than a checkpoint may take, so that some operations outlive theirs."""


@dataclass
class Late:
    """An operation whose caller received an error. It takes effect at ``due`` or later, or never."""

    operation: Operation
    due: float


class Disk:
    """``budget``: how much may still go wrong; ``unkind``: how likely an operation fails while there is some.

    ``dies`` is set if the driver is to die at this very step. ``troubled_at``: when an operation last had trouble.
    ``renames``: whether a move is one step; otherwise it
    is a copy and a deletion, as in an object store.
    """

    def __init__(self, random: Random, now: Callable[[], float], tell: Callable[[str, str], None]) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = set()
        self.late: list[Late] = []
        self.dies = False
        self.unreachable_until = 0.0
        self.refuses_deletions_until = 0.0
        self.troubled_at = -inf
        self._random = random
        self._now = now
        self._tell = tell
        self.budget = random.choice([0, 0, 3, 8, 16])
        self.unkind = random.choice([0.01, 0.04, 0.12])
        self.renames = random.choice([True, False])
        self.troubles = self._draw_troubles()

    def _draw_troubles(self) -> list[Callable[[SimulatedThread], None]]:
        """Choose the troubles: half of the worlds meet every kind, the others few."""
        kinds = list(self._kinds())
        if self._random.random() < 0.5:
            return kinds
        return [kinds.pop(self._random.randrange(len(kinds))) for _ in range(self._random.randint(1, 3))]

    def _kinds(self) -> Sequence[Callable[[SimulatedThread], None]]:
        return (
            self._fail_before,
            self._fail_after,
            self._answer_late,
            self._take_effect_late,
            self._take_effect_late,
            self._become_unreachable,
            self._become_unreachable_after,
            self._refuse_deletions,
            self._lose_driver_before,
            self._lose_driver_after,
        )

    def next_relief(self) -> float | None:
        """Return when the next trouble ends or the next late effect is due; None if there is nothing to wait for."""
        times = [self.unreachable_until, self.refuses_deletions_until, *(late.due for late in self.late)]
        return min((time for time in times if time > self._now()), default=None)

    # --- a thread's next operation --------------------------------------------------------------------------------

    def serve(self, thread: SimulatedThread) -> None:
        """Answer the operation that the thread waits for, with success or failure."""
        operation = thread.operation
        assert operation is not None
        if operation.until is not None:
            thread.answer(None)
        elif thread.decided is not None:
            thread.answer(*thread.decided)
        elif self.unreachable_until > self._now():
            self.troubled_at = self._now()
            thread.answer(None, OSError("the file system is out of reach"))
        elif operation.kind == "delete" and self.refuses_deletions_until > self._now():
            self.troubled_at = self._now()
            thread.answer(None, PermissionError("deletions are refused"))
        elif self.budget > 0 and self._random.random() < self.unkind:
            self.budget -= 1
            self._random.choice(self.troubles)(thread)
        else:
            self._carry_out(thread)

    def _carry_out(self, thread: SimulatedThread) -> None:
        thread.answer(*self._result(thread))

    def _result(self, thread: SimulatedThread) -> tuple[Any, BaseException | None]:
        assert thread.operation is not None
        try:
            return thread.operation.effect(), None
        except OSError as error:  # the file does not exist
            return None, error

    def _happen(self, what: str, thread: SimulatedThread) -> None:
        assert thread.operation is not None
        self.troubled_at = self._now()
        self._tell(what, f"{thread.operation.kind} {thread.operation.path}")

    def _fail_before(self, thread: SimulatedThread) -> None:
        self._happen("storage: fails", thread)
        thread.answer(None, OSError("no space left"))

    def _fail_after(self, thread: SimulatedThread) -> None:
        self._happen("storage: fails after its effect", thread)
        self._result(thread)
        thread.answer(None, TimeoutError("no answer"))

    def _answer_late(self, thread: SimulatedThread) -> None:
        self._happen("storage: hangs", thread)
        thread.hangs_until = self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)
        if self._random.random() < 0.5:
            thread.decided = self._result(thread)

    def _take_effect_late(self, thread: SimulatedThread) -> None:
        assert thread.operation is not None
        if thread.operation.kind in READS:
            self._fail_before(thread)
            return
        self._happen("storage: fails before its effect", thread)
        self.late.append(Late(thread.operation, self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)))
        thread.answer(None, TimeoutError("no answer"))

    def _become_unreachable(self, thread: SimulatedThread) -> None:
        self._happen("storage: out of reach", thread)
        self.unreachable_until = self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)
        thread.answer(None, OSError("the file system is out of reach"))

    def _become_unreachable_after(self, thread: SimulatedThread) -> None:
        self._happen("storage: out of reach after an effect", thread)
        result = self._result(thread)
        self.unreachable_until = self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)
        thread.answer(*(result if self._random.random() < 0.5 else (None, OSError("the file system is out of reach"))))

    def _refuse_deletions(self, thread: SimulatedThread) -> None:
        self._happen("storage: refuses deletions", thread)
        self.refuses_deletions_until = self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)
        self.serve(thread)

    def _lose_driver_before(self, thread: SimulatedThread) -> None:
        self._happen("storage: the driver dies before an operation", thread)
        self.dies = True

    def _lose_driver_after(self, thread: SimulatedThread) -> None:
        self._happen("storage: the driver dies after an operation", thread)
        self._carry_out(thread)
        self.dies = True

    # --- late effects ---------------------------------------------------------------------------------------------

    def land_one(self) -> None:
        """Let one due late operation take effect, or lose it."""
        due = [late for late in self.late if late.due <= self._now()]
        late = self._random.choice(due)
        self.late.remove(late)
        if self._random.random() < 0.9:
            self._tell("storage: a late effect", f"{late.operation.kind} {late.operation.path}")
            with suppress(OSError):  # there is nothing left to do it to
                late.operation.effect()

    def can_land(self) -> bool:
        return any(late.due <= self._now() for late in self.late)

    def abandon(self, thread: SimulatedThread) -> None:
        """Abandon a dead process's thread. Its last operation takes effect now, later or never."""
        operation = thread.operation
        changes = operation is not None and operation.until is None and operation.kind not in READS
        if operation is not None and changes and thread.decided is None:
            chance = self._random.random()
            if chance < 0.25:
                self.late.append(Late(operation, self._now()))
            elif chance < 0.5:
                self.late.append(Late(operation, self._now() + self._random.uniform(0.0, LONGEST_TROUBLE_S)))
        thread.kill()


class SimulatedFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A disk for fsspec. Each method is one operation of a simulated thread, or of the world itself."""

    protocol: ClassVar = PROTOCOL
    cachable: ClassVar = False

    def __init__(self, disk: Disk, **options: Any) -> None:
        super().__init__(**options)
        self.disk = disk

    def _do(self, kind: str, path: str, effect: Callable[[], Any]) -> Any:
        thread = this_thread()
        return effect() if thread is None else thread.ask(Operation(kind, path, effect))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._do("make folder", path, partial(self.disk.folders.add, self._strip_protocol(path)))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        self._do("write" if value else "create", path, partial(self.disk.files.__setitem__, path, bytes(value)))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.disk.renames:
            self._do("rename", source, partial(self._rename, source, target))
        else:
            # The store reads the source when it is asked: a deletion meanwhile does not stop a late copy.
            self._do("copy", source, partial(self.disk.files.__setitem__, target, self._read(source)))
            self._do("delete", source, partial(self._delete, source))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self._do("delete", path, partial(self._delete, path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        found: bytes = self._do("read", path, partial(self._read, path))
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        size: int = self._do("info", path, lambda: len(self._read(path)))
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found: list[dict[str, Any]] = self._do("list", path, partial(self._list, path))
        return found if detail else [entry["name"] for entry in found]

    # --- effects ---

    def _read(self, path: str) -> bytes:
        try:
            return self.disk.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _rename(self, source: str, target: str) -> None:
        self.disk.files[target] = self._read(source)
        del self.disk.files[source]

    def _delete(self, path: str) -> None:
        self._read(path)
        del self.disk.files[path]

    def _list(self, path: str) -> list[dict[str, Any]]:
        below = f"{path}/"
        files = [
            {"name": name, "size": len(content), "type": "file"}
            for name, content in sorted(self.disk.files.items())
            if name.startswith(below) and "/" not in name[len(below) :]
        ]
        folders = {f for f in self.disk.folders if f.startswith(below) and "/" not in f[len(below) :]}
        folders |= {
            below + name[len(below) :].partition("/")[0]
            for name in self.disk.files
            if name.startswith(below) and "/" in name[len(below) :]
        }
        found = [{"name": name, "size": 0, "type": "directory"} for name in sorted(folders)] + files
        if not found and path not in self.disk.folders:
            raise FileNotFoundError(path)
        return found


fsspec.register_implementation(PROTOCOL, SimulatedFileSystem, clobber=True)
