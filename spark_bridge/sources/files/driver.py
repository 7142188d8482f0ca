# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a file source: finds the files, and divides them into splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from actors.coordination import SplitEnumerator
from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator
from protocol.arguments import AT_LEAST_1, POSITIVE, SCHEMA, Rule, checked
from spark_bridge.common.urls import check_absolute, filesystem_of
from spark_bridge.sources.files.task import FORMATS, FileFormat, FileReader, bytes_left, is_compressed, read_schema
from spark_bridge.sources.source import Source
from spark_bridge.subtask.source import SplitReader

if TYPE_CHECKING:
    import pyarrow

ONE_CHARACTER = Rule("one character of ASCII", lambda value: len(value) == 1 and value.isascii() and value != "\0")
FORGET_AFTER_S = 7 * 86_400.0
"""A week: a directory that is not mounted, or a listing that fails in part, looks as if its files were gone."""
_FORMAT_OF = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}


class FileSource(Source):
    """Reads files as Arrow batches: JSON lines, CSV with a header, or Parquet, from any filesystem.

    Each task reads one part of a file after the other, whichever is next. A restored task continues inside the file.
    Its readers yield ``pyarrow.RecordBatch`` objects with one schema. It needs pyarrow (``pip install
    'headgate[dataframe]'``), and the package of a remote filesystem, in the driver and the executors.

    A file must be complete when it appears, and not change afterwards: write it elsewhere and move it, or write it
    under a name that begins with a dot or an underscore, which is ignored. The same holds for folders with such names.

    Args:
        url: a file, a directory, which is read with all that is below it, or a pattern such as ``"/data/*.csv"``: an
            absolute path, or a URL that fsspec knows.
        format: ``"json"``, ``"csv"`` or ``"parquet"``; by default what the files' names say. Names that end with
            ``.gz`` and the like are decompressed.
        schema: the columns that are read, as a ``pyarrow.Schema``. By default that of the first file, for JSON and CSV
            that of its first block, which is then read on the driver.
        discover_every_s: look for new files so often, in seconds. Then the source never ends. By default it reads the
            files that exist when the run begins and, in streaming mode, in later runs those that have come since.
        forget_after_s: with ``discover_every_s``, the source remembers what it has found with 15 bytes for each split.
            It forgets a file that was in no listing for so many seconds while the job ran, at most twice as many, so
            that its memory is bounded by what exists. A file that returns later is read again. None: never forget.
        split_bytes: the size of a split. A CSV file, and one that is compressed as a whole, is never divided.
        batch_rows: how many rows a batch of a Parquet file has at most.
        block_bytes: how much of a file of lines becomes one batch, about.
        delimiter: what separates the columns of a CSV file.
        rate_limit_per_s: how many rows all tasks together read in a second; None for no limit.
        options: the arguments for the filesystem, such as credentials.

    Raises:
        ValueError: a relative path, an unknown format, or a size that is not positive.
    """

    @checked(
        schema=SCHEMA,
        split_bytes=AT_LEAST_1,
        batch_rows=AT_LEAST_1,
        block_bytes=AT_LEAST_1,
        delimiter=ONE_CHARACTER,
        rate_limit_per_s=POSITIVE,
    )
    def __init__(
        self,
        url: str,
        format: Literal["json", "csv", "parquet"] | None = None,
        *,
        schema: pyarrow.Schema | None = None,
        discover_every_s: float | None = None,
        forget_after_s: float | None = FORGET_AFTER_S,
        split_bytes: int = 64 * 2**20,
        batch_rows: int = 10_000,
        block_bytes: int = 2**20,
        delimiter: str = ",",
        rate_limit_per_s: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_absolute(url)
        self._url = url
        self._format = format
        self._schema = schema
        self._discover_every_s = discover_every_s
        self._forget_after_s = forget_after_s
        self._split_bytes = split_bytes
        self._rate_limit_per_s = rate_limit_per_s
        self._settings = FileFormat("", None, batch_rows, block_bytes, delimiter, dict(options or {}))

    def __repr__(self) -> str:
        return f"FileSource({self._url!r})"

    def _opened(self) -> tuple[Any, str, bool]:
        """The filesystem, the path in it, and whether that is a pattern."""
        filesystem, root, secrets = filesystem_of(self._url, self._settings.storage_options)
        return secrets.guarding(filesystem), root, any(mark in root for mark in "*?[")

    def files(self) -> list[tuple[str, int]]:
        """Return the files that exist now, each with its size in bytes, sorted by their names. Blocks."""
        filesystem, root, pattern = self._opened()
        filesystem.invalidate_cache()
        found = filesystem.glob(root, detail=True) if pattern else filesystem.find(root, detail=True)
        above = os.path.dirname(root) if pattern else root
        return sorted(
            (str(filesystem.unstrip_protocol(path)), int(info["size"]))
            for path, info in found.items()
            if info["type"] == "file" and not _is_hidden(path.removeprefix(above)) and info["size"]
        )

    def splits(self) -> Iterator[list[Any]]:
        """Yield the splits of the files that exist now, ``[path, start, end]``. Blocks.

        Raises ``FileNotFoundError`` if there is nothing at the URL, and no files are expected later.
        """
        files = self.files()
        if not files and self._discover_every_s is None:
            filesystem, root, pattern = self._opened()
            if not pattern and not filesystem.exists(root):
                raise FileNotFoundError(
                    f"there is nothing at {self._url}: correct the path, or pass discover_every_s= if files come later"
                )
        for path, size in files:
            whole = self.file_format == "csv" or is_compressed(path)
            step = size if whole else self._split_bytes
            for start in range(0, size, step):
                yield [path, start, min(start + step, size)]

    @cached_property
    def file_format(self) -> str:
        """The name of the format. Looks at the files' names if none was given; raises ``ValueError`` if they vary."""
        if self._format is not None:
            return self._format
        files = self.files()
        found = {_FORMAT_OF.get(_suffix(path)) for path, _ in files or [(self._url, 0)]}
        if found == {None} and not files:
            raise ValueError(
                f"there are no files in {self._url}, so their format is not known: correct the path, or pass format=, "
                f"one of {', '.join(FORMATS)}, if files come later"
            )
        if len(found) != 1 or None in found:
            raise ValueError(
                f"the names in {self._url} do not show a single format: pass format=, one of {', '.join(FORMATS)}"
            )
        (name,) = found
        return str(name)

    @cached_property
    def schema(self) -> pyarrow.Schema:
        """The columns, as a ``pyarrow.Schema``. Reads the head of the first file if none was given, and blocks.

        Raises ``ValueError`` if there is no file yet, or it has no rows.
        """
        if self._schema is not None:
            return self._schema
        files = self.files()
        if not files:
            raise ValueError(
                f"there are no files in {self._url} yet, so their columns are not known: correct the path, or pass "
                "schema= if files come later"
            )
        return read_schema(files[0][0], replace(self._settings, name=self.file_format))

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> DiscoveringSplitEnumerator:
        return DiscoveringSplitEnumerator(
            self.splits,
            state,
            every_s=self._discover_every_s,
            key=lambda split: f"{split[0]}#{split[1]}",
            backlog=self._bytes_left,
            forget_after_s=self._forget_after_s,
        )

    def _bytes_left(self, split: Any, position: Any) -> int:
        name = "" if position is None else self.file_format  # which may not be known before there is a file
        return bytes_left(name, split, position)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        settings = replace(self._settings, name=self.file_format)
        settings = replace(settings, schema=self.schema.serialize().to_pybytes())
        return partial(FileReader, settings, self._rate_limit_per_s)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _suffix(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] if is_compressed(path) else suffix
