# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a file source: reads a range of a file as Arrow batches, and knows its position after each.

A split is ``[path, start, end]``, a range of bytes. What begins in the range belongs to it: a line of JSON, or a row
group of Parquet. A CSV file, and a file that is compressed as a whole, is one split. A position is the offset of the
next line in the (uncompressed) file; in Parquet it is ``[row group, rows]``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from gzip import BadGzipFile
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spark_bridge.common.extras import require
from spark_bridge.common.urls import filesystem_of
from spark_bridge.subtask.source import SplitReader

if TYPE_CHECKING:
    import pyarrow

FORMATS = ("json", "csv", "parquet")
_NO_END = 1 << 62
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy")


@dataclass(frozen=True)
class FileFormat:
    """How files are read. ``storage_options`` are the arguments for the filesystem, such as credentials."""

    name: str
    schema: bytes | None
    """The schema of all batches, in Arrow's own format. None only while it is being found out."""
    batch_rows: int
    block_bytes: int
    delimiter: str
    storage_options: dict[str, Any] = field(repr=False)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Name the file in what readers raise about its contents."""
    try:
        yield
    except (ValueError, KeyError, NotImplementedError, EOFError, BadGzipFile) as error:
        text = error.args[0] if error.args else error  # a KeyError would show its text in quotes
        raise ValueError(
            f"cannot read {path}: {text}. Correct or remove the file, or pass format= and schema= as the files are"
        ) from error


def is_compressed(path: str) -> bool:
    """Whether the file is compressed as a whole, so that it can only be read from its beginning."""
    return path.endswith(_COMPRESSED)


def open_file(path: str, storage_options: dict[str, Any]) -> BinaryIO:
    """Open a file on any filesystem, and decompress it if its name says that it is compressed."""
    filesystem, place, secrets = filesystem_of(path, storage_options)
    compression = None if path.endswith(".parquet") else "infer"
    return cast("BinaryIO", secrets.guarding(filesystem).open(place, "rb", compression=compression))


class FileReader(SplitReader):
    """Reads the splits of a ``FileSource``: yields ``pyarrow.RecordBatch`` objects, all with one schema."""

    def __init__(self, file_format: FileFormat, rate_limit_per_s: float | None = None) -> None:
        self._format = file_format
        self._read = _READERS[file_format.name]
        self.rate_limit_per_s = rate_limit_per_s

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
        path, start, end = split
        if is_compressed(path):
            end = _NO_END  # the sizes that the driver sees are those of the compressed file
        with _named(path), closing(open_file(path, self._format.storage_options)) as file:
            yield from self._read(file, self._format, start, end, position)

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def backlog(self, split: Any, position: Any) -> int:
        return bytes_left(self._format.name, split, position)


def bytes_left(format_name: str, split: Any, position: Any) -> int:
    """The bytes of a split that are left; in Parquet, those of the range until its last row was read."""
    _, start, end = split
    return int(end - start if position is None or format_name == "parquet" else max(0, end - position))


def read_schema(path: str, file_format: FileFormat) -> pyarrow.Schema:
    """Find out the schema of a file from its head: from a first block of lines, or a Parquet file's own schema."""
    require("pyarrow", "dataframe")
    import pyarrow.parquet

    with _named(path), closing(open_file(path, file_format.storage_options)) as file:
        if file_format.name == "parquet":
            return pyarrow.parquet.read_schema(file).remove_metadata()
        for _, batch in _READERS[file_format.name](file, file_format, 0, _NO_END, None):
            fields = [
                pyarrow.field(one.name, pyarrow.string() if pyarrow.types.is_null(one.type) else one.type)
                for one in batch.schema
            ]
            return pyarrow.schema(fields)
    raise ValueError(f"{path} has no rows, so its columns are not known: pass schema=")


# --- blocks of lines -----------------------------------------------------------------------------------------------


def _blocks(
    file: BinaryIO, start: int, end: int, block_bytes: int, last_break: Callable[[bytes], int]
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in [start, end), in blocks, each with the offset after it.

    ``start`` is the beginning of a line. ``last_break`` returns the offset after the last complete line of a block, or
    0 if it has none.
    """
    at = start
    file.seek(at)
    rest = b""
    while at < end:
        read = file.read(block_bytes)
        block = rest + read
        if not block:
            return
        cut = last_break(block) if read else len(block)
        if at + cut > end and (stop := block.find(b"\n", max(0, end - 1 - at))) >= 0:
            cut = stop + 1  # after the line that has the last byte of the range
        if cut:
            yield at + cut, block[:cut]
        at += cut
        rest = block[cut:]


def _first_line(file: BinaryIO, start: int) -> int:
    """The offset of the first line that begins at ``start`` or later."""
    if start == 0:
        return 0
    file.seek(start - 1)
    at = start - 1
    while data := file.read(1 << 16):
        if (found := data.find(b"\n")) >= 0:
            return at + found + 1
        at += len(data)
    return at


def _read_json(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    require("pyarrow", "dataframe")
    import pyarrow.json

    schema = _schema(file_format)
    parse = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    first = _first_line(file, start) if position is None else position
    for after, block in _blocks(file, first, end, file_format.block_bytes, lambda data: data.rfind(b"\n") + 1):
        if block.isspace():
            continue
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        table = pyarrow.json.read_json(pyarrow.BufferReader(block), read_options=read, parse_options=parse)
        yield after, _one_batch(table, schema)


def _read_csv(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    require("pyarrow", "dataframe")
    import pyarrow.csv

    schema = _schema(file_format)
    convert = pyarrow.csv.ConvertOptions(
        column_types=None if schema is None else {one.name: one.type for one in schema},
        include_columns=None if schema is None else schema.names,
    )
    parse = pyarrow.csv.ParseOptions(delimiter=file_format.delimiter, newlines_in_values=True)
    first, names = _csv_header(file, file_format)
    for after, block in _blocks(file, position or first, _NO_END, file_format.block_bytes, _last_record):
        if block.isspace():
            continue
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names)
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(block), read_options=read, parse_options=parse, convert_options=convert
        )
        yield after, _one_batch(table, schema)


def _csv_header(file: BinaryIO, file_format: FileFormat) -> tuple[int, list[str]]:
    """The offset after the header, and the names of the columns."""
    for after, block in _blocks(file, 0, _NO_END, file_format.block_bytes, _first_record):
        (names,) = csv.reader([block.decode("utf-8-sig")], delimiter=file_format.delimiter)
        return after, names
    return 0, []


def _first_record(block: bytes) -> int:
    """The offset after the first line feed that is not inside quotes; 0 if there is none."""
    at = 0
    for number, piece in enumerate(block.split(b'"')):  # those with an even number are outside of quotes
        if number % 2 == 0 and (found := piece.find(b"\n")) >= 0:
            return at + found + 1
        at += len(piece) + 1
    return 0


def _last_record(block: bytes) -> int:
    """The offset after the last line feed that is not inside quotes; 0 if there is none."""
    at = len(block)
    pieces = block.split(b'"')
    for number in range(len(pieces) - 1, -1, -1):
        at -= len(pieces[number])
        if number % 2 == 0 and (found := pieces[number].rfind(b"\n")) >= 0:
            return at + found + 1
        at -= 1
    return 0


# --- Parquet -------------------------------------------------------------------------------------------------------


def _read_parquet(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    require("pyarrow", "dataframe")
    import pyarrow.parquet

    schema = _schema(file_format)
    parquet = pyarrow.parquet.ParquetFile(file)
    first, done = (0, 0) if position is None else position
    for group in range(first, parquet.num_row_groups):
        if not start <= _group_offset(parquet.metadata.row_group(group)) < end:
            continue
        rows = 0
        skipped = done if group == first else 0
        columns = None if schema is None else schema.names
        for batch in parquet.iter_batches(file_format.batch_rows, row_groups=[group], columns=columns):
            rows += batch.num_rows
            if rows <= skipped:
                continue
            left = batch.slice(max(0, batch.num_rows - (rows - skipped)))
            yield [group, rows], _one_batch(pyarrow.Table.from_batches([left]), schema)


def _group_offset(group: Any) -> int:
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    return int(column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset))


# --- Arrow ---------------------------------------------------------------------------------------------------------


def _schema(file_format: FileFormat) -> pyarrow.Schema | None:
    if file_format.schema is None:
        return None
    import pyarrow

    return pyarrow.ipc.read_schema(pyarrow.BufferReader(file_format.schema))


def _one_batch(table: pyarrow.Table, schema: pyarrow.Schema | None) -> pyarrow.RecordBatch:
    """The table as one batch, with exactly this schema."""
    if schema is not None and table.schema != schema:
        missing = [name for name in schema.names if name not in table.schema.names]
        if missing:
            raise ValueError(
                f"it has no columns {missing}, only {table.schema.names}: correct the schema, or read such "
                "files separately"
            )
        table = table.select(schema.names).cast(schema)
    (batch,) = table.combine_chunks().to_batches()
    return batch


_READERS: dict[str, Callable[[BinaryIO, FileFormat, int, int, Any], Iterator[tuple[Any, Any]]]] = {
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
}
