# SPDX-License-Identifier: Apache-2.0

"""The sink's half in a task: writes rows into part files that readers do not see until they are published."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from protocol.arguments import AT_LEAST_1, ID, SHOWN_CHARS_MAX, checked
from protocol.describing import a_type, describe, show
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sinks.files.directory import PartFile, SinkDirectory
from spark_bridge.sinks.files.sealed import SealedFile, check_affixes
from spark_bridge.sinks.rows import LONE_SURROGATE
from spark_bridge.sinks.two_phase.errors import SinkBroken
from spark_bridge.sinks.two_phase.parts import Committable, prepared_events
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["FileWriter", "SinkWriter"]

_log = logging.getLogger(__name__)


class SinkWriter:
    """Writes the rows of one execution attempt into part files. Not thread-safe: for the task's own thread.

    Call ``write`` for each row, ``send_sealed(context, checkpoint_id)`` inside ``snapshot_state``, and ``abandon``
    inside ``close``. An operator that overrides ``final_state`` calls ``send_sealed(context)`` there; the default one
    calls ``snapshot_state`` with the id -1, which has the same effect. The rows are in the order of the file names,
    and within each file in the order of the writes.

    ``url`` and ``name`` must be the same as those of the ``SinkCommitter``; the name is usually the operator's id.
    ``subtask`` and ``attempt`` are those of the context, and ``after`` is its ``checkpoint_id``, which is the
    checkpoint that this attempt restored. File names begin with ``prefix`` and end with ``suffix``. A part ends when it
    has ``roll_bytes`` or more; without, each checkpoint has one part of each subtask that wrote anything. ``options``
    are the arguments for the filesystem.

    After an error or ``abandon``, ``write`` and ``seal`` raise ``SinkBroken``.

    Raises:
        SinkMisused: a relative path, or a prefix or suffix that would hide the files.
        ValueError: ``roll_bytes`` is below 1.
    """

    @checked(after=ID, roll_bytes=AT_LEAST_1)
    def __init__(
        self,
        url: str,
        *,
        name: str,
        subtask: int,
        attempt: int,
        after: int = VIRTUAL_EMPTY_CHECKPOINT,
        prefix: str = "part",
        suffix: str = "",
        roll_bytes: int | None = None,
        options: dict[str, Any] | None = None,
        context: SinkWriterContext | None = None,
    ) -> None:
        check_affixes(prefix, suffix)
        self.name = name
        self._directory = SinkDirectory(url, name, options)
        self._names = context or SinkWriterContext(name, subtask, attempt, after)
        self._prefix, self._suffix = prefix, suffix
        self._roll_bytes = roll_bytes
        self._open: tuple[str, PartFile] | None = None
        self._rows = self._bytes = 0  # of the open part
        self._ended: list[tuple[str, int, int]] = []  # parts that are whole and not yet sealed
        self._failure: BaseException | None = None

    @classmethod
    @checked(roll_bytes=AT_LEAST_1)
    def for_subtask(
        cls,
        context: SubtaskContext,
        url: str,
        *,
        name: str | None = None,
        prefix: str = "part",
        suffix: str = "",
        roll_bytes: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> SinkWriter:
        """Make a writer for the attempt of ``context``. The other arguments are those of the class. For ``open``."""
        return cls(
            url,
            name=name or context.operator_id,
            subtask=context.subtask,
            attempt=context.attempt,
            after=context.checkpoint_id,
            prefix=prefix,
            suffix=suffix,
            roll_bytes=roll_bytes,
            options=options,
        )

    def write(self, row: bytes | str) -> None:
        """Write bytes unchanged, or text as one line, to which a line feed is added.

        Raises:
            ValueError: the text contains a line feed, so it would be read as two rows, or a lone surrogate.
            TypeError: the row is neither text nor bytes.
            SinkBroken: an earlier write failed.
            OSError: this write failed. The contents of the part are unknown, and it will never be published.
        """
        if isinstance(row, str):
            if "\n" in row:
                raise ValueError("a row of text must not contain a line feed: escape it, or write bytes")
            try:
                row = f"{row}\n".encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the row {show(row, SHOWN_CHARS_MAX)} cannot be written: {LONE_SURROGATE}") from error
        elif not isinstance(row, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"{a_type(row)} is not a line of a file: yield text or bytes from the stage before the sink, "
                "such as the JSON of each row"
            )
        self._check()
        try:
            if self._open is None:
                self._begin()
            assert self._open is not None
            self._open[1].write(row)
            self._rows += 1
            self._bytes += len(row)
            if self._roll_bytes is not None and self._bytes >= self._roll_bytes:
                self._end()
        except BaseException as error:
            self._failure = error
            raise

    @checked(checkpoint_id=ID)
    def seal(self, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT) -> list[SealedFile]:
        """End the open part and return all parts since the last seal, in order, made durable; often there are none.

        ``checkpoint_id`` is -1 at the end of the operator, when no snapshot is being taken.
        """
        self._check()
        try:
            self._end()
            if self._ended:
                self._directory.sync_staging()
        except BaseException as error:
            self._failure = error
            raise
        sealed = [SealedFile(name, rows, size, checkpoint_id) for name, rows, size in self._ended]
        self._ended.clear()
        self._names.prepared_for(checkpoint_id)
        return sealed

    @checked(checkpoint_id=ID)
    def send_sealed(self, context: SubtaskContext, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT) -> list[SealedFile]:
        """Call ``seal``, and send the list of parts to the coordinator's committer as an event.

        Inside ``snapshot_state``, the event is held, becomes part of that snapshot, and leaves after it. So a snapshot
        and the list of its files are never separated.
        """
        sealed = self.seal(checkpoint_id)
        listed = (file.committable for file in sealed)
        for event in prepared_events(self.name, self._directory.address, self._names.proof, checkpoint_id, listed):
            context.send_event(event)
        return sealed

    def abandon(self) -> None:
        """Delete the parts that were never sealed, as far as possible; the committer deletes the rest. Never raises.

        The writer cannot be used afterwards.
        """
        names = [name for name, _, _ in self._ended]
        self._ended.clear()
        if self._open is not None:
            name, file = self._open
            self._open = None
            names.append(name)
            self._quietly(name, file.close)
        for name in names:
            self._quietly(name, self._directory.delete, name)
        if self._failure is None:
            self._failure = SinkBroken("the writer was abandoned")

    def _begin(self) -> None:
        name = self._names.next_name(self._prefix, self._suffix)
        self._open = name, self._directory.create(name)
        self._rows = self._bytes = 0

    def _end(self) -> None:
        if self._open is None:
            return
        name, file = self._open
        self._directory.finish(file)
        self._open = None
        self._ended.append((name, self._rows, self._bytes))

    def _check(self) -> None:
        if self._failure is not None:
            raise SinkBroken(
                f"this writer cannot continue after {describe(self._failure)}: let the task fail"
            ) from self._failure

    def _quietly(self, part: str, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            _log.warning("part %s was not cleaned up: %r", part, error)


class FileWriter(TwoPhaseWriter[Any]):
    """The writer of a ``FileSink``: a ``SinkWriter`` whose operator sends the list."""

    def __init__(
        self, context: SinkWriterContext, url: str, options: dict[str, Any] | None, settings: dict[str, Any]
    ) -> None:
        self._writer = SinkWriter(
            url,
            name=context.sink,
            subtask=context.subtask,
            attempt=context.attempt,
            options=options,
            context=context,
            **settings,
        )

    def write(self, record: bytes | str) -> None:
        self._writer.write(record)

    def prepare(self) -> list[Committable]:
        return [file.committable for file in self._writer.seal()]

    def close(self) -> None:
        self._writer.abandon()
