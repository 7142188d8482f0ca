# SPDX-License-Identifier: Apache-2.0

"""The task's half of a shared value, and what user code sees of it there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from spark_bridge.primitives.shared_value.encoding import COMPLETE, decode_value, digest_of
from spark_bridge.subtask.chain import TaskPart, current_part

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["SharedValueInTask", "SharedValuePart"]

T = TypeVar("T")

LOOK_AGAIN_S = 0.02
"""Seconds; a handler of an urgent event takes about as long at most."""

_in_process: dict[str, tuple[bytes, bytes]] = {}
"""The last large value of each name in this process: digest and bytes. A later task here need not fetch it again."""


class SharedValuePart(TaskPart):
    """The newest value that has come. Urgent events change it while the task computes, so it is never polled for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._current: tuple[int, Any] = (0, None)  # replaced as a whole, so that a reader sees both or neither
        self._seen = 0
        self._all_came = False  # the chunks of a large value
        self._offered: dict[int, bytes] = {}
        self._chunks: dict[int, list[bytes]] = {}
        self._lock = threading.Lock()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    @property
    def version(self) -> int:
        return self._current[0]

    def get(self) -> Any:
        return self._current[1]

    def changed(self) -> bool:
        version = self._current[0]
        changed, self._seen = version != self._seen, version
        return changed

    def before_records(self) -> None:
        """A large value, which this process had to ask for, may still be on its way.

        ``COMPLETE`` wakes this thread behind the last chunk. The thread for urgent events may not have finished with
        that chunk yet; then no other event follows.
        """
        while not self.version:
            self._context.wait_for_event(LOOK_AGAIN_S if self._all_came else None)

    def handle_event(self, event: Any) -> None:
        with self._lock:
            self._handle(event)

    def handle_urgent(self, event: Any) -> None:
        self.handle_event(event)

    def _handle(self, event: Any) -> None:
        if event == COMPLETE:
            self._all_came = True
            return
        kind, version, wants_answer, *rest = event
        if version <= self.version:
            self._answer(wants_answer)  # a later one has come first
            return
        match kind, rest:
            case "value", [payload]:
                self._apply(version, decode_value(payload), wants_answer)
            case "change", [base, payload]:
                if base != self.version:
                    self._context.send_event(["want", version, wants_answer])
                    return
                changed, removed = decode_value(payload)
                kept = {
                    key: value for key, value in cast("Mapping[Any, Any]", self.get()).items() if key not in removed
                }
                self._apply(version, {**kept, **changed}, wants_answer)
            case "offer", [digest]:
                known = _in_process.get(self._name)
                if known is not None and known[0] == digest:
                    self._apply(version, decode_value(known[1]), wants_answer)
                else:
                    self._offered[version] = digest
                    self._context.send_event(["want", version, wants_answer])
            case "chunk", [number, count, chunk]:
                self._add_chunk(version, wants_answer, number, count, chunk)
            case _:
                raise ValueError(f"not an event of a shared value: {event!r:.80}")

    def _add_chunk(self, version: int, wants_answer: bool, number: int, count: int, chunk: bytes) -> None:
        chunks = self._chunks.setdefault(version, [])
        if number != len(chunks):
            raise ValueError(f"chunk {number} of shared value {self._name!r} came in place of chunk {len(chunks)}")
        chunks.append(chunk)
        if len(chunks) == count:
            payload = b"".join(chunks)
            digest = digest_of(payload)
            _in_process[self._name] = digest, payload
            self._apply(version, decode_value(payload), wants_answer)

    def _apply(self, version: int, value: Any, wants_answer: bool) -> None:
        self._current = version, value
        for waiting in (self._offered, self._chunks):
            for earlier in [known for known in waiting if known <= version]:
                del waiting[earlier]
        self._answer(wants_answer)

    def _answer(self, wants_answer: bool) -> None:
        if wants_answer:
            self._context.send_event(["applied", self.version])


class SharedValueInTask(Generic[T]):
    """A ``SharedValue`` in a task."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<SharedValue {self._name!r}>"

    def _part(self) -> SharedValuePart:
        part: SharedValuePart = current_part("shared value", self._name)
        return part

    @property
    def version(self) -> int:
        """How often the value was set: 1 for the initial one."""
        return self._part().version

    def get(self) -> T:
        """Return the newest value. It costs a look-up, so call it for each record. Do not change what it returns."""
        return cast("T", self._part().get())

    def changed(self) -> bool:
        """Whether the value is another one than when this task last called ``changed``. True at the first call."""
        return self._part().changed()
