# SPDX-License-Identifier: Apache-2.0

"""The file sink's half in a task: writes rows into part files that readers do not see until they are published."""

from __future__ import annotations

import logging
from typing import Any, BinaryIO

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import a_type, describe, show
from spark_bridge.sinks.files.directory import SinkDirectory
from spark_bridge.sinks.rows import LONE_SURROGATE
from spark_bridge.sinks.two_phase.errors import SinkBroken
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_log = logging.getLogger(__name__)


class FileWriter(TwoPhaseWriter[Any]):
    """Writes the rows of one execution attempt into part files. Not thread-safe: for the task's own thread.

    The rows are in the order of the file names, and within each file in the order of the writes. After an error or
    ``close``, ``write`` and ``prepare`` raise ``SinkBroken``.
    """

    def __init__(
        self,
        context: SinkWriterContext,
        directory: SinkDirectory,
        *,
        prefix: str = "part",
        suffix: str = "",
        roll_bytes: int | None = None,
    ) -> None:
        self._context = context
        self._directory = directory
        self._prefix, self._suffix = prefix, suffix
        self._roll_bytes = roll_bytes
        self._open: tuple[str, BinaryIO] | None = None
        self._rows = self._bytes = 0  # of the open part
        self._ended: list[Committable] = []  # parts that are whole and not yet prepared
        self._failure: BaseException | None = None

    def write(self, record: bytes | str) -> None:
        """Write bytes unchanged, or text as one line, to which a line feed is added.

        Raises:
            ValueError: the text contains a line feed, so it would be read as two rows, or a lone surrogate.
            TypeError: the row is neither text nor bytes.
            SinkBroken: an earlier write failed.
            OSError: this write failed. The contents of the part are unknown, and it will never be published.
        """
        if isinstance(record, str):
            if "\n" in record:
                raise ValueError("a row of text must not contain a line feed: escape it, or write bytes")
            try:
                record = f"{record}\n".encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the row {show(record, SHOWN_CHARS_MAX)} cannot be written: {LONE_SURROGATE}"
                ) from error
        elif not isinstance(record, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"{a_type(record)} is not a line of a file: yield text or bytes from the stage before the sink, such "
                "as the JSON of each row, or override encode(self, record) in a subclass of TwoPhaseSinkOperator"
            )
        self._check()
        try:
            if self._open is None:
                self._begin()
            assert self._open is not None
            self._open[1].write(record)
            self._rows += 1
            self._bytes += len(record)
            if self._roll_bytes is not None and self._bytes >= self._roll_bytes:
                self._end()
        except BaseException as error:
            self._failure = error
            raise

    def prepare(self) -> list[Committable]:
        """End the open part and return all parts since the last call, in order, made durable; often there are none."""
        self._check()
        try:
            self._end()
            if self._ended:
                self._directory.sync_staging()
        except BaseException as error:
            self._failure = error
            raise
        prepared, self._ended = self._ended, []
        return prepared

    def close(self) -> None:
        """Delete the parts that were never prepared, as far as possible; the committer deletes the rest."""
        names = [part.name for part in self._ended]
        self._ended.clear()
        if self._open is not None:
            name, file = self._open
            self._open = None
            names.append(name)
            self._quietly(name, file.close)
        for name in names:
            self._quietly(name, self._directory.delete, name)
        if self._failure is None:
            self._failure = SinkBroken("the writer was closed")

    def _begin(self) -> None:
        name = self._context.next_name(self._prefix, self._suffix)
        self._open = name, self._directory.create(name)
        self._rows = self._bytes = 0

    def _end(self) -> None:
        if self._open is None:
            return
        name, file = self._open
        self._directory.finish(file)
        self._open = None
        self._ended.append(Committable(name, [self._rows, self._bytes]))

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
