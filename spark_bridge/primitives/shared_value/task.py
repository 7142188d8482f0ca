# SPDX-License-Identifier: Apache-2.0

"""The task's half of a shared value, and what user code sees of it there."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from protocol.describing import show
from protocol.errors import SAME_RELEASE, AttemptOver, LocalProtocolError
from spark_bridge.primitives.shared_value.encoding import COMPLETE, apply_change, decode_value, digest_of
from spark_bridge.primitives.shared_value.files import Fetch, ValueFiles
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

T = TypeVar("T")

LOOK_AGAIN_S = 0.02
"""Seconds; a handler of an urgent event takes about as long at most."""

STALLED_S = 5.0
"""If the process that fetches a value for the others makes no progress for so long, each fetches it itself."""

_in_process: dict[str, tuple[bytes, bytes]] = {}
"""The last large value of each name in this process: digest and bytes. A later task here need not fetch it again.

Only where there are no files, which keep it for all processes of the executor.
"""
KEPT_VALUES = 8
"""Of so many names. A process may live as long as the application, which may use many."""


class SharedValuePart(TaskPart):
    """The newest value that has come. Urgent events change it while the task computes, so it is never polled for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._current: tuple[int, Any] = (0, None)  # replaced as a whole, so that a reader sees both or neither
        self._seen = 0
        self._owed = 0  # the version whose application the driver waits for, by whatever way the value comes
        self._chunks: dict[int, list[bytes]] = {}
        self._fetches: dict[int, Fetch] = {}  # by version: this process fetches it for the others
        self._files: ValueFiles | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context
        self._files = ValueFiles.of_executor() if self.task.endpoint.local_files else None

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._end_fetches(max(self._fetches, default=0))

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
        """A large value, which this process had to ask for or another one fetches, may still be on its way.

        ``COMPLETE`` wakes this thread after the last chunk. The thread for urgent events may not have finished with
        that chunk yet, and nothing tells of a value that has come from a file; so this looks again.
        """
        while not self.version:
            self._context.wait_for_event(LOOK_AGAIN_S)

    def handle_event(self, event: Any) -> None:
        with self._lock:
            self._handle(event)

    def handle_urgent(self, event: Any) -> None:
        self.handle_event(event)

    def _handle(self, event: Any) -> None:
        if event == COMPLETE:
            return
        kind, version, wants_answer, *rest = event
        if version <= self.version:
            self._answer(wants_answer)  # a later one has come first
            return
        if wants_answer:
            self._owed = version
        match kind, rest:
            case "value", [payload]:
                self._apply(version, decode_value(payload), wants_answer)
            case "change", [base, payload]:
                if base != self.version:
                    self._context.send_event(["want", version, wants_answer])
                    return
                self._apply(version, apply_change(self.get(), payload), wants_answer)
            case "offer", [digest]:
                self._take_offer(version, digest, wants_answer)
            case "chunk", [number, count, chunk]:
                self._add_chunk(version, wants_answer, number, count, chunk)
            case _:
                raise ValueError(f"not an event of a shared value: {show(event, 80)}; {SAME_RELEASE}")

    def _take_offer(self, version: int, digest: bytes, wants_answer: bool) -> None:
        known = _in_process.get(self._name)
        if known is not None and known[0] == digest:
            self._apply(version, decode_value(known[1]), wants_answer)
        elif self._files is None:
            self._context.send_event(["want", version, wants_answer])
        else:  # another process may be fetching it, which no event tells, and no other event should wait for it
            threading.Thread(
                target=self._read_or_fetch,
                args=(self._files, version, digest, wants_answer),
                name="headgate-shared-value",
                daemon=True,
            ).start()

    def _read_or_fetch(self, files: ValueFiles, version: int, digest: bytes, wants_answer: bool) -> None:
        """Take the value from a file of this executor, as soon as there is one, or fetch it for all. On a thread."""
        seen, moved_at = 0, time.monotonic()
        while not self._closed.is_set() and self.version < version:
            payload = files.read(digest)
            if payload is not None:
                value = decode_value(payload)
                with self._lock, _task_is_over():
                    if self.version < version:
                        self._apply(version, value, wants_answer)
                return
            fetch = files.begin(digest)
            progress = files.progress(digest)
            if progress != seen:
                seen, moved_at = progress, time.monotonic()
            if fetch is not None or time.monotonic() - moved_at > STALLED_S:
                self._ask(version, wants_answer, fetch)
                return
            self._closed.wait(LOOK_AGAIN_S)

    def _ask(self, version: int, wants_answer: bool, fetch: Fetch | None) -> None:
        with self._lock:
            if self._closed.is_set() or self.version >= version:
                if fetch is not None:
                    fetch.abandon()
                return
            if fetch is not None:
                self._fetches[version] = fetch
        while not self._closed.is_set():
            with _task_is_over(), suppress(TimedOut):
                self._context.send_event(["want", version, wants_answer])
                return

    def _add_chunk(self, version: int, wants_answer: bool, number: int, count: int, chunk: bytes) -> None:
        chunks = self._chunks.setdefault(version, [])
        if number != len(chunks):
            raise ValueError(f"chunk {number} of shared value {self._name!r} arrived instead of chunk {len(chunks)}")
        chunks.append(chunk)
        for fetch in self._fetches.values():
            fetch.moved()
        if len(chunks) == count:
            payload = b"".join(chunks)
            self._keep(version, payload)
            self._apply(version, decode_value(payload), wants_answer)

    def _keep(self, version: int, payload: bytes) -> None:
        """For later tasks of this process, and for the other processes of this executor."""
        digest = digest_of(payload)
        fetch = self._fetches.pop(version, None)
        if fetch is None and self._files is not None:
            fetch = self._files.begin(digest)  # it has come though this process had not asked for this version
        if fetch is None or not fetch.finish(payload):
            _keep(self._name, digest, payload)

    def _apply(self, version: int, value: Any, wants_answer: bool) -> None:
        self._current = version, value
        for earlier in [known for known in self._chunks if known <= version]:
            del self._chunks[earlier]
        self._end_fetches(version)
        self._answer(wants_answer or 0 < self._owed <= version)

    def _end_fetches(self, version: int) -> None:
        for earlier in [known for known in self._fetches if known <= version]:
            self._fetches.pop(earlier).abandon()

    def _answer(self, wants_answer: bool) -> None:
        if wants_answer:
            if self._owed <= self.version:
                self._owed = 0
            self._context.send_event(["applied", self.version])


def _task_is_over() -> AbstractContextManager[None]:
    """On a thread beside the task's: once the attempt is over, nobody needs the value, and the task's own says why."""
    return suppress(AttemptOver, LocalProtocolError)


def _keep(name: str, digest: bytes, payload: bytes) -> None:
    _in_process.pop(name, None)
    _in_process[name] = digest, payload  # as the last one
    for oldest in [*_in_process][:-KEPT_VALUES]:
        del _in_process[oldest]


class SharedValueInTask(PartInTask, Generic[T]):
    """A ``SharedValue`` in a task."""

    _kind = "shared value"
    _on_driver = ON_DRIVER | {"attach", "detach"}

    @property
    def version(self) -> int:
        """How often the value was set: 1 for the initial one."""
        version: int = self._part().version
        return version

    def set(self, *_: Any, **__: Any) -> int:
        """On the driver only."""
        raise LocalProtocolError(
            f"the shared value {self._name!r} is set on the driver, and tasks only read it: to tell the driver "
            "something, count with context.count(), or send an event to your own coordinator"
        )

    update = set

    def get(self) -> T:
        """Return the newest value. It costs a look-up, so call it for each record. Do not change what it returns."""
        return cast("T", self._part().get())

    def changed(self) -> bool:
        """Whether the value is another one than when this task last called ``changed``. True at the first call."""
        changed: bool = self._part().changed()
        return changed
