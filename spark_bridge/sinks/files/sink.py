# SPDX-License-Identifier: Apache-2.0

"""Files as a two-phase sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.arguments import AT_LEAST_1, checked, given
from spark_bridge.common.urls import check_absolute
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseSink

if TYPE_CHECKING:
    from spark_bridge.sinks.files.driver import FileCommitter
    from spark_bridge.sinks.files.task import FileWriter


class FileSink(TwoPhaseSink[Any]):
    """Rows as lines, or any bytes, in files that appear when their checkpoint is complete.

    A record is text, which becomes one line, or bytes, which are written unchanged. Each subtask's records are in the
    order of the file names, and within each file in the order in which they were written.

    Exactly once on a filesystem that shows a file as a whole or not at all when it is moved: a local directory, HDFS,
    SFTP, SMB, S3, GCS and Azure. Any other filesystem that moves files by copying them is refused. On an object store,
    readers must leave published files in place for as long as a driver may take to come back.

    ``url`` is an absolute path or a URL that fsspec knows, and ``options`` are the arguments for its filesystem, such
    as credentials. ``name`` distinguishes the sinks of one directory; its default is the operator's id. Only one
    application at a time may use a name in a directory, because the next one deletes what this one has not published.
    Readers may rename, move or delete published files.

    File names begin with ``prefix`` and end with ``suffix``. A file ends when it has ``roll_bytes`` or more; without,
    each checkpoint has one file of each subtask that wrote anything.

    A file that is gone before it was published raises ``SinkFileLost`` on the driver, which fails the job.

    Raises:
        SinkMisused: a relative path, or a prefix or suffix that would hide the files.
        ValueError: ``roll_bytes`` is below 1.
    """

    takes_rows = False

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
        if "/" in prefix or prefix[0] in "._":
            raise SinkMisused(
                f"prefix must be a str without slashes that begins with neither a dot nor an underscore, not "
                f"{given('prefix', prefix)}"
            )
        if "/" in suffix or (suffix and suffix[0] != "."):
            shown = given("suffix", suffix)
            raise SinkMisused(f"suffix must be empty, or begin with a dot and have no slashes, not {shown}")
        self.url = url
        self.name = name
        self.options = options
        self.settings: dict[str, Any] = {"prefix": prefix, "suffix": suffix, "roll_bytes": roll_bytes}

    @property
    def target(self) -> str:
        from spark_bridge.sinks.files.directory import SinkDirectory

        return SinkDirectory(self.url, self.name or "target", self.options).address

    def writer(self, context: SinkWriterContext) -> FileWriter:
        from spark_bridge.sinks.files.directory import SinkDirectory
        from spark_bridge.sinks.files.task import FileWriter

        return FileWriter(context, SinkDirectory(self.url, context.sink, self.options), **self.settings)

    def committer(self, context: SinkCommitterContext) -> FileCommitter:
        from spark_bridge.sinks.files.driver import FileCommitter

        return FileCommitter(self.url, context, self.options)
