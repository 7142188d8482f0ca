# SPDX-License-Identifier: Apache-2.0

"""CSV: pyarrow reads a file from its beginning, because no offset inside of it is safely the end of a record.

A position is ``[offset, rows, read]``: so many rows of those after ``offset`` were given out, and about so many bytes
were read. ``offset`` is 0, or where a position of an earlier release, an int, stood behind a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

from protocol.describing import show
from spark_bridge.common.extras import require
from spark_bridge.sources.files.format import FileFormat
from spark_bridge.sources.files.numbers import changes_as_double, decimal_for

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES_MAX = 1 << 30
"""A record that is longer is an error. Until then, blocks grow with the longest record."""
HEADER_BYTES_MAX = 1 << 16
OURS = ("block_size", "column_types", "include_columns", "include_missing_columns", "use_threads")
"""What the reader sets itself."""
DEFAULTS = {"newlines_in_values": True, "null_values": [""]}
"""Only nothing is NULL: words such as NA or nan stay what they are."""
LEADING_ZERO = r"^[+-]?0[0-9]"
MANY_DIGITS = r"(?:[0-9]\.?){16}"


def check_csv_options(options: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what pyarrow does not take, or what the reader sets itself."""
    require("pyarrow", "dataframe")
    if "delimiter" in options:
        raise ValueError("delimiter has a separate argument: pass delimiter=, and leave it out of csv_options")
    known = {name for names in _names().values() for name in names} - {"delimiter"}
    if wrong := sorted(set(options) - known):
        raise ValueError(
            f"csv_options has no {', '.join(map(repr, wrong))}: pass options of pyarrow.csv, which are "
            f"{', '.join(sorted(known))}"
        )
    try:
        _made(options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"csv_options is not as pyarrow.csv takes it: {error}. It was {show(options)}") from error


def _names() -> dict[Any, list[str]]:
    """The options of each class."""
    from pyarrow import csv as arrow_csv

    return {
        kind: [
            name
            for name in dir(kind)
            if not name.startswith("_") and name not in OURS and not callable(getattr(kind, name))
        ]
        for kind in (arrow_csv.ReadOptions, arrow_csv.ParseOptions, arrow_csv.ConvertOptions)
    }


def _made(options: dict[str, Any]) -> list[Any]:
    """An instance of each class, with the options that belong to it."""
    return [
        kind(**{name: value for name, value in {**DEFAULTS, **options}.items() if name in names})
        for kind, names in _names().items()
    ]


def csv_schema(file: BinaryIO, file_format: FileFormat) -> pyarrow.Schema | None:
    """The columns of the first block, with types that hold what is in it; None if it has no rows."""
    import pyarrow

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
    types = {
        name: _type_of(_nulled(texts.column(name), file_format), batch.schema.field(name).type) for name in numbers
    }
    return pyarrow.schema([(one.name, _named_type(types.get(one.name, one.type))) for one in batch.schema])


def _named_type(found: Any) -> Any:
    import pyarrow

    return pyarrow.string() if pyarrow.types.is_null(found) else found


def _nulled(texts: Any, file_format: FileFormat) -> Any:
    """Numbers as texts, without blanks around them, and NULL for what means NULL. pyarrow does so in other columns."""
    import pyarrow
    from pyarrow import compute

    nulls = {**DEFAULTS, **file_format.csv_options}["null_values"]
    texts = compute.utf8_trim_whitespace(texts)
    is_null = compute.is_in(texts, value_set=pyarrow.array(nulls, pyarrow.string()))
    return compute.if_else(is_null, pyarrow.scalar(None, pyarrow.string()), texts)


def _type_of(texts: Any, found: Any) -> Any:
    """The type for the numbers in ``texts``: ``found``, if it changes none of them."""
    import pyarrow

    texts = texts.drop_null()
    if pyarrow.compute.any(pyarrow.compute.match_substring_regex(texts, LEADING_ZERO)).as_py():
        return pyarrow.string()
    if pyarrow.types.is_integer(found) or not _changed(texts):
        return found
    numbers = [Decimal(text) for text in texts.to_pylist()]
    return decimal_for(numbers) or pyarrow.string()


def _changed(texts: Any) -> list[str]:
    """The numbers that a double would change."""
    from pyarrow import compute

    long = texts.filter(compute.match_substring_regex(texts, MANY_DIGITS)).to_pylist()
    return [text for text in long if changes_as_double(Decimal(text))]


def _is_number(found: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(found) or types.is_floating(found))


def read_csv(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    """Yield the rows from ``position`` on, in batches, each with the position after it."""
    require("pyarrow", "dataframe")
    import pyarrow

    schema = file_format.arrow_schema
    offset, done = (0, 0) if position is None else (position, 0) if isinstance(position, int) else position[:2]
    types = {one.name: one.type for one in schema}
    checked = [name for name, found in types.items() if file_format.inferred and _is_number(found)]
    for read, batch in _batches(file, file_format, types | dict.fromkeys(checked, pyarrow.string()), offset, done):
        done += batch.num_rows
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in checked:
            columns[name] = _numbers(name, _nulled(columns[name], file_format), types[name])
        yield [offset, done, read], pyarrow.record_batch(columns)


def _numbers(column: str, texts: Any, wanted: Any) -> Any:
    """The texts as numbers. Raises ``ValueError`` for one that would not be what it was."""
    from pyarrow import compute, types

    wrong = texts.filter(compute.match_substring_regex(texts, LEADING_ZERO)).to_pylist()
    if types.is_floating(wanted):
        wrong += _changed(texts)
    if wrong:
        raise ValueError(
            f"column {column!r} has {wrong[0]!r}, which the type {wanted}, found out from the head of the first file, "
            "would change: pass schema= with a string or a decimal for it"
        )
    return texts.cast(wanted)


class _View:
    """The file from ``at`` on, for one reader.

    pyarrow reads ahead on a separate thread, also after its reader was closed, and must not move the next one's place.
    """

    mode = "rb"

    def __init__(self, file: BinaryIO, at: int) -> None:
        self._file = file
        self._lock = Lock()
        self.at = at
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            if self.closed:
                return b""
            self._file.seek(self.at)
            data = self._file.read(size)
            self.at += len(data)
            return data

    def close(self) -> None:
        with self._lock:
            self.closed = True


def _header(file: BinaryIO, file_format: FileFormat) -> list[str]:
    from pyarrow import csv as arrow_csv

    read, parse, _ = _made(file_format.csv_options)
    with closing(_View(file, 0)) as view, arrow_csv.open_csv(view, read, parse) as batches:
        return list(batches.schema.names)


def _batches(
    file: BinaryIO, file_format: FileFormat, types: dict[str, Any], offset: int = 0, done: int = 0
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Yield what is in the file after ``offset``, but for its first ``done`` rows, each batch with how far was read.

    pyarrow fails if a record is longer than a block. Then blocks are twice as long, and the file is read again from
    ``offset``: once for each doubling, so ten times for a record of 1 GiB.
    """
    from pyarrow import ArrowInvalid
    from pyarrow import csv as arrow_csv

    read, parse, convert = _made(file_format.csv_options)
    if offset:
        read.column_names, read.skip_rows = _header(file, file_format), 0
    read.block_size, read.use_threads = file_format.block_bytes, False
    convert.column_types = types
    if file_format.schema is not None:
        convert.include_columns = list(types)
    given = 0
    while True:
        try:
            with closing(_View(file, offset)) as view, arrow_csv.open_csv(view, read, parse, convert) as batches:
                skipped = max(done, given)
                for batch in batches:
                    new = batch.slice(min(skipped, batch.num_rows))
                    skipped -= batch.num_rows - new.num_rows
                    given = max(given, done) + new.num_rows
                    if new.num_rows:
                        yield view.at, new
            return
        except ArrowInvalid as error:
            short = "Empty CSV file" in str(error)  # of a block that has no whole first line, too
            if short and read.block_size >= HEADER_BYTES_MAX:
                return
            if not (short or "straddl" in str(error)) or read.block_size >= BLOCK_BYTES_MAX:
                raise
            read.block_size = min(BLOCK_BYTES_MAX, read.block_size * 2)
