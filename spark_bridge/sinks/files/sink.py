# SPDX-License-Identifier: Apache-2.0

"""Files as a two-phase sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.arguments import AT_LEAST_1, checked
from spark_bridge.common.urls import check_absolute
from spark_bridge.sinks.files.sealed import check_affixes
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseSink

if TYPE_CHECKING:
    from spark_bridge.sinks.files.driver import FileCommitter
    from spark_bridge.sinks.files.writer import FileWriter

__all__ = ["FileSink"]


class FileSink(TwoPhaseSink[Any]):
    """Rows as lines, or any bytes, in files that appear when their checkpoint is complete.

    ``url``, ``name``, ``prefix``, ``suffix``, ``roll_bytes`` and ``options`` are those of ``SinkWriter``.
    """

    @checked(roll_bytes=AT_LEAST_1)
    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        prefix: str = "part",
        suffix: str = "",
        roll_bytes: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_absolute(url, error=SinkMisused)
        check_affixes(prefix, suffix)
        self.url = url
        self.name = name
        self.options = options
        self.settings = {"prefix": prefix, "suffix": suffix, "roll_bytes": roll_bytes}

    @property
    def target(self) -> str:
        from spark_bridge.sinks.files.directory import SinkDirectory

        return SinkDirectory(self.url, self.name or "target", self.options).address

    def writer(self, context: SinkWriterContext) -> FileWriter:
        from spark_bridge.sinks.files.writer import FileWriter

        return FileWriter(context, self.url, self.options, self.settings)

    def committer(self, context: SinkCommitterContext) -> FileCommitter:
        from spark_bridge.sinks.files.driver import FileCommitter

        return FileCommitter(self.url, context, self.options)
