# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a file source: reads a range of a file as Arrow batches, and knows its position after each.

A split is ``[path, start, end]``, a range of bytes. What begins in the range belongs to it: a line of JSON, or a row
group of Parquet. A CSV file, and a file that is compressed as a whole, is one split. What a position is depends on the
format, and stands in its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from gzip import BadGzipFile
from importlib import import_module
from typing import Any, BinaryIO, cast

import pyarrow

from spark_bridge.common.arrow_types import conform
from spark_bridge.common.urls import filesystem_of
from spark_bridge.sources.files.format import NO_END, FileFormat
from spark_bridge.subtask.source import SplitReader

FORMATS = ("json", "csv", "parquet")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy")


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


def _functions_of(name: str) -> tuple[Callable[..., Any], Callable[..., Iterator[tuple[Any, Any]]]]:
    """What finds the columns of a file, and what reads it.

    What the other formats need of pyarrow takes a new worker a fifth of a second: the first job of `json_as_format`.
    """
    module = import_module(f"spark_bridge.sources.files.{name}_files")
    return getattr(module, f"{name}_schema"), getattr(module, f"read_{name}")


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
        _, self._read = _functions_of(file_format.name)
        self.rate_limit_per_s = rate_limit_per_s

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
        path, start, end = split
        if is_compressed(path):
            end = NO_END  # the sizes that the driver sees are those of the compressed file
        file_format, schema = self._format, self._format.schema
        with _named(path), closing(open_file(path, file_format.storage_options)) as file:
            texts = file_format.values_of_folders(path)
            file_format.check_known(pyarrow.schema([(name, pyarrow.string()) for name in texts]))
            in_folders = [(one, _value(texts[one.name], one)) for one in schema if one.name in texts]
            for one, _ in in_folders:
                schema = schema.remove(schema.get_field_index(one.name))
            in_file = replace(file_format, schema=schema)
            for after, table in self._read(file, in_file, start, end, position):
                file_format.check_known(table.schema)
                whole = _with_values(table, in_folders)
                yield after, conform(whole, file_format.schema, utc_is_named=not file_format.inferred)

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def backlog(self, split: Any, position: Any) -> int:
        return bytes_left(self._format.name, split, position)


def _value(text: str | None, field: pyarrow.Field) -> Any:
    """What the name of a folder says, in the type of the column."""
    try:
        return pyarrow.scalar(text, pyarrow.string()).cast(field.type)
    except ValueError as error:
        raise ValueError(f"column {field.name!r} is {text!r} in the name of a folder: {error}") from error


def _with_values(table: Any, in_folders: list[tuple[pyarrow.Field, Any]]) -> Any:
    """The table with the columns that folders name. A file may have them, too, and then says the same."""
    for field, value in in_folders:
        column, place = pyarrow.repeat(value, table.num_rows), table.schema.get_field_index(field.name)
        if place < 0:
            table = table.append_column(field, column)
        elif table.column(place).to_pylist() != column.to_pylist():
            raise ValueError(
                f"column {field.name!r} is {value} in the name of a folder, and something else in the file: pass "
                "schema= with this column, and the folder counts, or read the files of each folder separately"
            )
    return table


def bytes_left(format_name: str, split: Any, position: Any) -> int:
    """The bytes of a split that are left; in Parquet, those of the range until its last row was read."""
    _, start, end = split
    if position is None or format_name == "parquet":
        return int(end - start)
    return int(max(0, end - (position[-1] if format_name == "csv" and isinstance(position, list) else position)))


def read_schema(path: str, file_format: FileFormat) -> pyarrow.Schema:
    """Find out the schema of a file from its head: from the first blocks of lines, or a Parquet file's own schema.

    Raises ``ValueError`` if it has no rows, or nothing holds the numbers in it.
    """
    with _named(path), closing(open_file(path, file_format.storage_options)) as file:
        schema = _functions_of(file_format.name)[0](file, file_format)
    if schema is None:
        raise ValueError(f"{path} has no rows, so its columns are not known: pass schema=")
    for name in file_format.values_of_folders(path):
        if name not in schema.names:
            schema = schema.append(pyarrow.field(name, pyarrow.string()))
    return schema
