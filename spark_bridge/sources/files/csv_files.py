# SPDX-License-Identifier: Apache-2.0

"""CSV: pyarrow reads a file from its beginning, because no offset inside of it is safely the end of a record.

A position is ``[offset, rows, read]``: so many rows of those after ``offset`` were given out, and about so many bytes
were read. ``offset`` is 0, or where a position of an earlier release, an int, stood behind a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from threading import Lock
from typing import Any, BinaryIO

import pyarrow
from pyarrow import ArrowInvalid, compute, csv, types

from protocol.describing import show
from spark_bridge.sources.files.format import FileFormat
from spark_bridge.sources.files.numbers import changes, decimal_for, perhaps_changed

BLOCK_BYTES_MAX = 1 << 30
"""A record that is longer is an error. Until then, blocks grow with the longest record."""
HEADER_BYTES_MAX = 1 << 16
KINDS = (csv.ReadOptions, csv.ParseOptions, csv.ConvertOptions)
OURS = ("block_size", "column_types", "include_columns", "include_missing_columns", "use_threads")
"""What the reader sets itself."""
DEFAULTS = {
    "newlines_in_values": True,
    "null_values": [""],
    "strings_can_be_null": True,
    "quoted_strings_can_be_null": False,
}
"""Only nothing is NULL: words such as NA or nan stay what they are, and so does the empty text ``""``."""
NO_NUMBER = r"^(?:[+]|[+-]?0[0-9xX])"
"""Of texts that pyarrow takes for numbers: postal codes, telephone numbers, hexadecimal digits."""


def check_csv_options(options: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what pyarrow does not take, or what the reader sets itself."""
    if "delimiter" in options:
        raise ValueError("delimiter has a separate argument: pass delimiter=, and leave it out of csv_options")
    known = {name for kind in KINDS for name in dir(kind) if name[0] != "_" and not callable(getattr(kind, name))}
    known -= {*OURS, "delimiter"}
    if wrong := sorted(set(options) - known):
        raise ValueError(
            f"csv_options has no {', '.join(map(repr, wrong))}: pass options of pyarrow.csv, which are "
            f"{', '.join(sorted(known))}"
        )
    try:
        _made(options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"csv_options is not as pyarrow.csv takes it: {error}. It was {show(options)}") from error


def _made(options: dict[str, Any]) -> list[Any]:
    """An instance of each class, with the options that belong to it."""
    return [
        kind(**{name: value for name, value in {**DEFAULTS, **options}.items() if hasattr(kind, name)})
        for kind in KINDS
    ]


def csv_schema(file: BinaryIO, file_format: FileFormat) -> pyarrow.Schema | None:
    """The columns of the first block, with types that hold what is in it; None if it has no rows."""
    first = next(_batches(file, file_format, {}), None)
    if first is None:
        return None
    batch = first[1]
    names = batch.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"it has more than one column of the name {', '.join(twice)}: pass names in csv_options, such as "
            "{'column_names': [...], 'skip_rows': 1}"
        )
    numbers = [one.name for one in batch.schema if _is_number(one.type)]
    _, texts = next(_batches(file, file_format, dict.fromkeys(numbers, pyarrow.string())))
    exact = {
        name: _type_of(_nulled(texts.column(name), file_format), batch.schema.field(name).type) for name in numbers
    }
    columns = zip(names, batch, strict=True)
    return pyarrow.schema([(name, exact.get(name) or _named_type(name, column)) for name, column in columns])


def _named_type(name: str, values: Any) -> Any:
    """The type of a column that has no numbers. Nanoseconds, which end in 2262, are found only where they are used."""
    found = values.type
    if types.is_null(found):
        return pyarrow.string()
    if types.is_binary(found):  # pyarrow takes it for bytes
        raise ValueError(
            f"column {name!r} has text that is not UTF-8: pass its encoding, such as csv_options={{'encoding': "
            "'latin-1'}, or schema= with binary columns"
        )
    if types.is_timestamp(found) and found.unit == "ns":
        micros = pyarrow.timestamp("us", found.tz)
        return micros if values.equals(values.cast(micros, safe=False).cast(found)) else found
    return found


def _nulled(texts: Any, file_format: FileFormat) -> Any:
    """Numbers as texts, without blanks around them, and NULL for what means NULL. pyarrow does so in other columns."""
    nulls = {**DEFAULTS, **file_format.csv_options}["null_values"]
    texts = compute.utf8_trim_whitespace(texts)
    is_null = compute.is_in(texts, value_set=pyarrow.array(nulls, pyarrow.string()))
    return compute.if_else(is_null, pyarrow.scalar(None, pyarrow.string()), texts)


def _type_of(texts: Any, found: Any) -> Any:
    """The type for the numbers in ``texts``: ``found``, if it changes none of them."""
    texts = texts.drop_null()
    if compute.any(compute.match_substring_regex(texts, NO_NUMBER)).as_py():
        return pyarrow.string()
    if types.is_integer(found) or not _changed(texts, found):
        return found
    numbers = [Decimal(text) for text in texts.to_pylist()]
    return decimal_for(numbers) or pyarrow.string()


def _changed(texts: Any, wanted: Any) -> list[str]:
    """The numbers that a floating-point type would change."""
    long = texts.filter(compute.match_substring_regex(texts, perhaps_changed(wanted))).to_pylist()
    return [text for text in long if changes(Decimal(text), wanted)]


def _is_number(found: Any) -> bool:
    return bool(types.is_integer(found) or types.is_floating(found))


def read_csv(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    """Yield the rows from ``position`` on, in batches, each with the position after it."""
    offset, done = (0, 0) if position is None else (position, 0) if isinstance(position, int) else position[:2]
    wanted = {one.name: one.type for one in file_format.schema}
    checked = [name for name, found in wanted.items() if _is_checked(found, file_format.inferred)]
    for read, batch in _batches(file, file_format, wanted | dict.fromkeys(checked, pyarrow.string()), offset, done):
        done += batch.num_rows
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in checked:
            texts = _nulled(columns[name], file_format)
            columns[name] = _numbers(name, texts, wanted[name], inferred=file_format.inferred)
        yield [offset, done, read], pyarrow.record_batch(columns)


def _is_checked(wanted: Any, inferred: bool) -> bool:
    """Whether a column is read as text, because pyarrow would change numbers in it."""
    return _is_number(wanted) if inferred else types.is_float32(wanted) or types.is_float64(wanted)


def _numbers(column: str, texts: Any, wanted: Any, *, inferred: bool) -> Any:
    """The texts as numbers. Raises ``ValueError`` for one that would not be what it was."""
    wrong = texts.filter(compute.match_substring_regex(texts, NO_NUMBER)).to_pylist() if inferred else []
    try:
        numbers = None if wrong else texts.cast(wanted)
    except ArrowInvalid as error:
        raise ValueError(
            f"column {column!r}: {error}. Pass schema= with another type for it, such as a string"
        ) from error
    if types.is_floating(wanted):
        wrong += _changed(texts, wanted)
    if wrong:
        source = ", found out from the head of the first file," if inferred else ""
        raise ValueError(
            f"column {column!r} has {wrong[0]!r}, which the type {wanted}{source} would change: pass schema= with a "
            "string or a decimal for it"
        )
    return numbers


@dataclass(eq=False)
class _View:
    """The file from ``at`` on, for one reader.

    pyarrow reads ahead on a separate thread, also after its reader was closed, and must not move the next one's place.
    """

    _file: BinaryIO
    at: int
    end: bytes = b""  # the last bytes that were read
    closed: bool = False
    _lock: Lock = field(default_factory=Lock)
    mode = "rb"

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            if self.closed:
                return b""
            self._file.seek(self.at)
            data = self._file.read(size)
            self.at += len(data)
            self.end = (self.end + data[-8:])[-8:]
            return data

    def close(self) -> None:
        with self._lock:
            self.closed = True


def _header(file: BinaryIO, file_format: FileFormat, block_size: int) -> list[str]:
    read, parse, _ = _made(file_format.csv_options)
    read.block_size = block_size
    with closing(_View(file, 0)) as view, csv.open_csv(view, read, parse) as batches:
        return list(batches.schema.names)


def _check_end(view: _View, batch: pyarrow.RecordBatch, names: list[str], quote: Any) -> None:
    """Raise ``ValueError`` if the last value of the file has lines of the file in it, and no quote after it.

    pyarrow takes the end of a file for the end of a quoted value. In another column, too few columns are an error.
    """
    if not quote or names[-1] not in batch.schema.names:
        return
    last = batch.column(names[-1])[-1].as_py()
    is_open = isinstance(last, str) and "\n" in last and not view.end.rstrip(b"\r\n\0").endswith(quote.encode())
    if is_open:
        raise ValueError(f"column {names[-1]!r} of its last record begins with a quote that is never closed")


def _batches(
    file: BinaryIO, file_format: FileFormat, types: dict[str, Any], offset: int = 0, done: int = 0
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Yield what is in the file after ``offset``, but for its first ``done`` rows, each batch with how far was read.

    pyarrow fails if a record is longer than a block. Then blocks are twice as long, and the file is read again from
    ``offset``: once for each doubling, so ten times for a record of 1 GiB.
    """
    read, parse, convert = _made(file_format.csv_options)
    read.block_size, read.use_threads = file_format.block_bytes, False
    convert.column_types = types
    if not file_format.inferred:
        convert.include_columns = list(types)
    names: list[str] = []
    given = done
    while True:
        held = None  # the newest batch, until there is another one: the last one is looked at again
        try:
            names = names or _header(file, file_format, read.block_size)
            if offset:
                read.column_names, read.skip_rows = names, 0
            if len(names) == 1 and "ignore_empty_lines" not in file_format.csv_options:
                parse.ignore_empty_lines = False  # such a line is a row with NULL
            with closing(_View(file, offset)) as view, csv.open_csv(view, read, parse, convert) as batches:
                skipped = given
                for batch in batches:
                    new = batch.slice(min(skipped, batch.num_rows))
                    skipped -= batch.num_rows - new.num_rows
                    if new.num_rows and held is not None:
                        given += held[1].num_rows
                        yield held
                    held = (view.at, new) if new.num_rows else held
                if held is not None:
                    _check_end(view, held[1], names, parse.quote_char)
                    yield held
            return
        except ArrowInvalid as error:
            if place := re.match(r"In CSV column #(\d+): ", str(error)):
                raise ValueError(f"column {names[int(place[1])]!r}: {error}") from error
            short = "Empty CSV file" in str(error)  # of a block that has no whole first line, too
            if short and read.block_size >= HEADER_BYTES_MAX:
                return
            if not (short or "straddl" in str(error)) or read.block_size >= BLOCK_BYTES_MAX:
                raise
            read.block_size = min(BLOCK_BYTES_MAX, read.block_size * 2)
