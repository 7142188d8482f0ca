# SPDX-License-Identifier: Apache-2.0

"""A filesystem that fails on request, and helpers to read what the sink wrote."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import fsspec
import structlog
from fsspec.implementations.memory import MemoryFileSystem

from actors.coordination import CoordinatorContext
from actors.coordination.host.alone import HostAlone
from actors.coordination.store import CoordinatorStore
from protocol.wire.messages import RestoreMode
from spark_bridge.sinks.files.journal import is_journal
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from spark_bridge.subtask import SubtaskContext

_roots = itertools.count()


class BreakingFileSystem(MemoryFileSystem):  # type: ignore[misc] # fsspec ships no types
    """Files in memory; ``on_operation(what, path)`` is called before and after each change, and may raise."""

    protocol: ClassVar = "breaking"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    on_operation: ClassVar[Callable[[str, str], None] | None] = None

    def _told(self, what: str, path: str) -> None:
        if self.on_operation is not None:
            type(self).on_operation(what, path)  # type: ignore[misc]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **kwargs)
        self._told("before create", path)
        file = super()._open(path, mode, **kwargs)
        self._told("after create", path)
        return file

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._told("before copy", path1)
        super().cp_file(path1, path2, **kwargs)
        self._told("after copy", path1)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._told("before remove", path)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)
        self._told("after remove", path)

    def rm_file(self, path: str) -> None:
        self._told("before delete", path)
        super().rm_file(path)
        self._told("after delete", path)


fsspec.register_implementation("breaking", BreakingFileSystem, clobber=True)


def new_url() -> str:
    """Empty the breaking filesystem and return the URL of a directory on it."""
    BreakingFileSystem.store.clear()
    BreakingFileSystem.pseudo_dirs[:] = [""]
    return f"breaking://out{next(_roots)}"


@contextmanager
def on_operation(hook: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``hook`` before and after each change of the breaking filesystem."""
    BreakingFileSystem.on_operation = hook
    try:
        yield
    finally:
        BreakingFileSystem.on_operation = None


def failing(error: BaseException, at: str = "") -> AbstractContextManager[None]:
    """Raise ``error`` at each such change of the breaking filesystem (any, if empty)."""

    def fail(what: str, path: str) -> None:
        if at in ("", what):
            raise error

    return on_operation(fail)


def files_under(url: str) -> dict[str, bytes]:
    """All files under ``url``, the staging directory included: relative path → content."""
    filesystem, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): filesystem.cat_file(path) for path in sorted(filesystem.find(root))}


def visible(url: str) -> dict[str, bytes]:
    """The files that a reader sees which ignores names with a leading dot, as Spark, Hive and ``glob`` do."""
    return {
        path: content for path, content in files_under(url).items() if not any(p[0] in "._" for p in path.split("/"))
    }


def staged(url: str) -> list[str]:
    """The paths that such a reader does not see; the journal is not one of them."""
    return [path for path in files_under(url) if path not in visible(url) and not is_journal(path.rpartition("/")[2])]


def take_visible(url: str) -> dict[str, bytes]:
    """Return what a reader sees, and delete it, as a reader may do."""
    files = visible(url)
    filesystem, root = fsspec.core.url_to_fs(url)
    for path in files:
        filesystem.rm_file(f"{root}/{path}")
    return files


def rows_of(files: dict[str, bytes]) -> list[str]:
    """The rows of these files, in the order of the files' names. Fails if a row is incomplete."""
    content = b"".join(content for _, content in sorted(files.items()))
    assert not content or content.endswith(b"\n"), content
    return content.decode().splitlines()


def a_host(mode: RestoreMode = RestoreMode.STREAMING, operator_id: str = "out") -> HostAlone:
    """Where a coordinator has its context, on the event loop."""
    return HostAlone(operator_id, CoordinatorStore(), structlog.get_logger(), 2, mode)


def a_driver(mode: RestoreMode = RestoreMode.STREAMING, operator_id: str = "out") -> CoordinatorContext:
    """A context for ``start``, on the event loop."""
    return a_host(mode, operator_id).context


@dataclass
class TaskContext:
    """The part of a ``SubtaskContext`` that the sink uses; keeps what is sent."""

    operator_id: str = "out"
    subtask: int = 0
    attempt: int = 0
    checkpoint_id: int = -1
    parallelism: int = 2
    input_begins_again: bool = True
    sent: list[Any] = field(default_factory=list)

    def send_event(self, event: Any) -> None:
        self.sent.append(event)


def as_context(context: TaskContext) -> SubtaskContext:
    return cast(SubtaskContext, context)


class SinkTask:
    """One attempt of a file sink's task."""

    def __init__(self, sink: FileSink, **fields: Any) -> None:
        self.context = TaskContext(**fields)
        self.operator = TwoPhaseSinkOperator(sink)
        self.operator.open(as_context(self.context), None)
        self.write = self.operator.write

    def seal(self, row: bytes | str, checkpoint_id: int = -1) -> Any:
        """Write a row and take a snapshot; return the list that the coordinator gets."""
        self.write(row)
        self.operator.snapshot_state(checkpoint_id)
        return self.context.sent.pop()
