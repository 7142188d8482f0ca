# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a file source: finds the files, and divides them into splits."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal

import pyarrow

from actors.coordination import SplitEnumerator
from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator
from actors.logs import get_logger
from protocol.arguments import AT_LEAST_1, POSITIVE, SCHEMA, Rule, checked
from protocol.describing import show
from spark_bridge.common.urls import check_absolute, filesystem_of
from spark_bridge.sources.files.csv_files import check_csv_options
from spark_bridge.sources.files.format import FileFormat
from spark_bridge.sources.files.task import FORMATS, FileReader, bytes_left, is_compressed, read_schema
from spark_bridge.sources.source import Source
from spark_bridge.subtask.source import SplitReader

log = get_logger("headgate.sources")

ONE_CHARACTER = Rule("one character of ASCII", lambda value: len(value) == 1 and value.isascii() and value != "\0")
FORGET_AFTER_S = 7 * 86_400.0
"""A week: a directory that is not mounted, or a listing that fails in part, looks as if its files were gone."""
BESIDE_MAX = 3
"""How many names of other files a warning shows."""
_MARKS = "*?["
_FORMAT_OF = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}


class FileSource(Source):
    """Reads files as Arrow batches: JSON lines, CSV with a header, or Parquet, from any filesystem.

    Each task reads one part of a file after the other, whichever is next. A restored task continues inside the file.
    Its readers yield ``pyarrow.RecordBatch`` objects with one schema. It needs pyarrow (``pip install
    'headgate[dataframe]'``), and the package of a remote filesystem, in the driver and the executors.

    Exactly once, if each file is complete when it appears, and does not change afterwards: each row of it then counts
    once, no matter which process dies.

    So write a file elsewhere and move it, or write it under a name that begins with a dot or an underscore, which is
    ignored. The same holds for folders with such names, but for those of partitions such as ``_day=2026-01-01``, and
    for those that the URL itself names.

    Args:
        url: a file, a directory, which is read with all that is below it, or a pattern such as ``"/data/*.csv"``: an
            absolute path, or a URL that fsspec knows. Links are followed. A name with ``*``, ``?`` or ``[`` in it that
            exists is taken as it is.
        format: ``"json"``, ``"csv"`` or ``"parquet"``; by default what the files' names say. Names that end with
            ``.gz`` and the like are decompressed.
        schema: the columns that are read, as a ``pyarrow.Schema``. By default that of the first file, for JSON and CSV
            that of its first block, which is then read on the driver. Names of folders below the URL, such as
            ``day=2026-01-01``, are columns too, by default of strings. A file with more columns is then refused.
        discover_every_s: look for new files so often, in seconds. Then the source never ends. By default it reads the
            files that exist when the run begins and, in streaming mode, in later runs those that have come since.
        forget_after_s: with ``discover_every_s``, the source remembers what it has found with 15 bytes for each split.
            It forgets a file that was in no listing for so many seconds while the job ran, at most twice as many, so
            that its memory is bounded by what exists. A file that returns later is read again. None: never forget.
        split_bytes: the size of a split; later runs may have another. A CSV file, and one that is compressed as a
            whole, is never divided.
        batch_rows: how many rows a batch of a Parquet file has at most.
        block_bytes: how much of a file of lines becomes one batch, about.
        delimiter: what separates the columns of a CSV file.
        csv_options: how CSV files are written, by the names of the options in ``pyarrow.csv.ReadOptions``,
            ``ParseOptions`` and ``ConvertOptions``: for example ``{"quote_char": "'", "encoding": "latin-1"}``,
            ``{"column_names": ["id", "name"]}`` for files without a header, or ``{"null_values": ["", "NA"]}``. By
            default only nothing between two delimiters is NULL, and ``""`` is an empty text.
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
        csv_options: dict[str, Any] | None = None,
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
        if csv_options:
            check_csv_options(csv_options)
        self._settings = FileFormat(
            "",
            schema,
            schema is None,
            batch_rows,
            block_bytes,
            {"delimiter": delimiter, **(csv_options or {})},
            dict(options or {}),
        )

    def __repr__(self) -> str:
        return f"FileSource({self._url!r})"

    def _opened(self) -> tuple[Any, str, bool]:
        """The filesystem, the path in it, and whether that is a pattern: no file or folder has this name."""
        filesystem, root, secrets = filesystem_of(self._url, self._settings.storage_options)
        guarded = secrets.guarding(filesystem)
        guarded.invalidate_cache()
        return guarded, root, any(mark in root for mark in _MARKS) and not guarded.exists(root)

    def files(self) -> list[tuple[str, int]]:
        """Return the files that exist now, each with its size in bytes, sorted by their names. Blocks.

        Raises ``ValueError`` for the folder of a table that has more files than those that are its contents.
        """
        filesystem, root, pattern = self._opened()
        above, named = _literal(root) if pattern else (root, [])
        is_local = "file" in filesystem.protocol
        found = _local_files(root, pattern) if is_local else _remote_files(filesystem, root, pattern)
        for path in found:
            parts = path.removeprefix(above).split("/")
            kind = "a Delta" if "_delta_log" in parts else "an Iceberg" if path.endswith(".metadata.json") else ""
            if kind and (kind == "a Delta" or "metadata" in parts):
                raise ValueError(
                    f"there is {kind} table in {self._url}: its folder has files with rows that were deleted or "
                    "replaced. Read it with Spark's format for it, or copy its contents to Parquet files first"
                )
        return sorted(
            (str(filesystem.unstrip_protocol(path)), size)
            for path, size in found.items()
            if size and not _is_hidden(path.removeprefix(above), named)
        )

    def _root(self) -> str:
        """The folder below which the names of folders have values, as a URL."""
        filesystem, root, pattern = self._opened()
        return str(filesystem.unstrip_protocol(_literal(root)[0] if pattern else root))

    def _found(self, first: bool = False) -> Iterator[list[Any]]:
        """Yield the files that exist now, each as one split, ``[path, start, end]``. Blocks.

        ``first``: log a warning if there are none, and none are expected later. An empty input may be right.

        Raises ``FileNotFoundError`` if there is nothing at the URL, and no files are expected later.
        """
        files = self.files()
        if not files and self._discover_every_s is None:
            filesystem, root, pattern = self._opened()
            if not pattern and not filesystem.exists(root):
                raise FileNotFoundError(
                    f"there is nothing at {self._url}: correct the path, or pass discover_every_s= if files come later"
                )
            if first:
                beside: list[str] = []
                with suppress(Exception):  # the folder may not be there, or not be listed
                    folder = _literal(root)[0] or "/" if pattern else root
                    names = sorted(str(path).rpartition("/")[2] for path in filesystem.ls(folder, detail=False))
                    beside = [show(name, 80) for name in names[:BESIDE_MAX]]
                log.warning("bounded file source found no files", url=show(self._url), other_names=beside)
        for path, size in files:
            yield [path, 0, size]

    def _divide(self, file: list[Any]) -> Iterator[list[Any]]:
        path, _, size = file
        step = size if self.file_format == "csv" or is_compressed(path) else self._split_bytes
        for start in range(0, size, step):
            yield [path, start, min(start + step, size)]

    def splits(self) -> Iterator[list[Any]]:
        """Yield the splits of the files that exist now, ``[path, start, end]``. Blocks.

        Raises ``FileNotFoundError`` if there is nothing at the URL, and no files are expected later.
        """
        for file in self._found():
            yield from self._divide(file)

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
        return read_schema(files[0][0], replace(self._settings, name=self.file_format, root=self._root()))

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> DiscoveringSplitEnumerator:
        return DiscoveringSplitEnumerator(
            partial(self._found, first=state is None),
            state,
            every_s=self._discover_every_s,
            key=lambda file: f"{file[0]}#0",  # as the first split of each file was known when each split had a key
            divide=self._divide,
            backlog=self._bytes_left,
            forget_after_s=self._forget_after_s,
        )

    def _bytes_left(self, split: Any, position: Any) -> int:
        name = "" if position is None else self.file_format  # which may not be known before there is a file
        return bytes_left(name, split, position)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        settings = replace(self._settings, name=self.file_format, root=self._root(), schema=self.schema)
        return partial(FileReader, settings, self._rate_limit_per_s)


def _local_files(root: str, pattern: bool) -> dict[str, int]:
    """The files below a folder, or of a pattern, with their sizes. Links are followed, unlike in fsspec."""
    roots = glob.iglob(root, recursive=True, include_hidden=True) if pattern else [root]
    return {path: size for place in roots for path, size in _below(place, ())}


def _below(place: str, above: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    if os.path.isfile(place):
        yield place, os.path.getsize(place)
    elif os.path.isdir(place) and (real := os.path.realpath(place)) not in above:  # not a link to a folder above it
        for name in os.listdir(place):
            yield from _below(os.path.join(place, name), (*above, real))


def _remote_files(filesystem: Any, root: str, pattern: bool) -> dict[str, int]:
    found = filesystem.glob(root, detail=True) if pattern else filesystem.find(root, detail=True)
    for path in [path for path, info in found.items() if info["type"] == "directory"]:
        found |= filesystem.find(path, detail=True)
    return {path: int(info["size"]) for path, info in found.items() if info["type"] == "file"}


def _literal(pattern: str) -> tuple[str, list[str]]:
    """The folders before the first that is a pattern, and the later ones that name what is hidden otherwise."""
    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if any(mark in part for mark in _MARKS))
    return "/".join(parts[:first]), [part for part in parts[first:] if _hides(part)]


def _is_hidden(path: str, named: list[str]) -> bool:
    return any(_hides(part) and not any(fnmatchcase(part, one) for one in named) for part in path.split("/"))


def _hides(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)  # as Spark does


def _suffix(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] if is_compressed(path) else suffix
