# SPDX-License-Identifier: Apache-2.0

"""Lines of JSON. A position is the offset of the next line in the (uncompressed) file."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from typing import Any, BinaryIO

import pyarrow
import pyarrow.json
from pyarrow import types

from protocol.describing import show
from spark_bridge.common.arrow_types import with_leaves
from spark_bridge.sources.files.format import NO_END, FileFormat, leaves_of
from spark_bridge.sources.files.numbers import changes, decimal_for, has_limits, has_many_digits, perhaps_changed

HEAD_BLOCKS = 64
"""So many blocks are read to find out the type of what is NULL, an empty list or an empty object in the first ones."""
UNKNOWN = re.compile(r"\bnull\b|struct<>")


def _blocks(file: BinaryIO, start: int, end: int, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in [start, end), in blocks, each with the offset after it.

    ``start`` is the beginning of a line.
    """
    at = start
    file.seek(at)
    parts: list[bytes] = []
    while at < end:
        read = file.read(block_bytes)
        cut = read.rfind(b"\n") + 1 if read else 0
        if not cut:
            parts.append(read)
            if read:
                continue
        block = b"".join((*parts, memoryview(read)[:cut]))  # one copy
        if not block:
            return
        parts = [read[cut:]]
        if at + len(block) > end and (stop := block.find(b"\n", max(0, end - 1 - at))) >= 0:
            block = block[: stop + 1]  # after the line that has the last byte of the range
        at += len(block)
        yield at, block
        if not read:
            return


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


def _parsed(block: bytes, schema: pyarrow.Schema | None, *, finds_out: bool = True) -> pyarrow.Table:
    """``finds_out``: with fields that are not in ``schema``."""
    import pyarrow.json

    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parse = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if finds_out else "ignore"
    )
    return pyarrow.json.read_json(pyarrow.BufferReader(block), read_options=read, parse_options=parse)


def read_json(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.Table]]:
    """Yield the rows of the lines that begin in the range, in blocks, each with the position after it."""
    schema = file_format.schema
    texts = pyarrow.schema([one.with_type(with_leaves(one.type, _as_text)) for one in schema])
    narrowest = _narrowest_float(schema)
    first = _first_line(file, start) if position is None else position
    for after, block in _blocks(file, first, end, file_format.block_bytes):
        if block.isspace():
            continue
        table = _parsed(block, texts, finds_out=file_format.inferred)
        _check_floats(block, table, schema, narrowest)
        for place, one in enumerate(schema):
            if one.type != texts.field(place).type:
                try:
                    table = table.set_column(place, one, table.column(place).cast(one.type))
                except ValueError as error:
                    raise ValueError(f"column {one.name!r}: {error}") from error
        yield after, table


def _as_text(found: Any) -> Any:
    """The type in which pyarrow reads it: it takes a time without a zone for one in UTC, and a number for a date."""
    if types.is_binary(found) or types.is_large_binary(found) or types.is_fixed_size_binary(found):
        raise ValueError(f"JSON has no bytes, and the schema has {found}: pass schema= with a string, and decode it")
    return pyarrow.string() if types.is_timestamp(found) or types.is_date(found) else found


def _unknown_as_text(found: Any) -> Any:
    return pyarrow.string() if types.is_null(found) else _as_text(found)


def json_schema(file: BinaryIO, file_format: FileFormat) -> pyarrow.Schema | None:
    """The columns of the first blocks, with types that hold what is in them; None if there are no rows.

    A text is a text, also if it looks like a time. What is never more than NULL becomes a text.
    """
    schema = None
    read = []
    for _, block in islice(_blocks(file, 0, NO_END, file_format.block_bytes), HEAD_BLOCKS):
        if block.isspace():
            continue
        read.append(block)
        found = _parsed(block, None).schema
        found = pyarrow.schema([one.with_type(with_leaves(one.type, _as_text)) for one in found])
        schema = found if schema is None else pyarrow.unify_schemas([schema, found], promote_options="permissive")
        if not UNKNOWN.search(str([one.type for one in schema])):
            break
    if schema is None:
        return None
    exact = {one.name: one.type for one in schema} | _exact_types(b"".join(read), schema)
    return pyarrow.schema([(one.name, with_leaves(exact[one.name], _unknown_as_text)) for one in schema])


def _exact_types(block: bytes, schema: pyarrow.Schema) -> dict[str, Any]:
    """The types, other than double, of the columns whose numbers a double would change."""
    narrowest = _narrowest_float(schema)
    if narrowest is None:
        return {}
    changed = {column: path for path, column, _, _ in _changed(block, schema, perhaps_changed(narrowest))}
    exact = {}
    for column, path in changed.items():
        numbers = [row[column] for row in _rows(block) if row.get(column) is not None]
        found = decimal_for(numbers) if path == column else None
        if found is None:
            raise ValueError(
                f"column {path!r} has numbers that a double would change, and its type is not found out: pass schema= "
                "with a decimal for it"
            )
        exact[column] = found
    return exact


def _narrowest_float(schema: pyarrow.Schema) -> Any:
    """The narrowest of the types in the schema that may change a number; None if there are none."""
    found = []

    def note(leaf: Any) -> Any:
        if types.is_floating(leaf):
            found.append(leaf)
        return leaf

    for one in schema:
        with_leaves(one.type, note)
    return min(found, key=lambda leaf: leaf.bit_width, default=None)


def _check_floats(block: bytes, table: Any, schema: pyarrow.Schema, narrowest: Any) -> None:
    """Raise ``ValueError`` for a number that is not what it was, because its column is a floating-point type."""
    if narrowest is None or not (has_many_digits(block, narrowest) or _has_limits(table)):
        return
    pattern = perhaps_changed(narrowest)
    if not _matches(block, pattern):
        return
    for path, _, number, wanted in _changed(block, schema, pattern):
        raise ValueError(
            f"column {path!r} has {number}, which its type {wanted} would change: pass schema= with a decimal for it"
        )


def _has_limits(table: Any) -> bool:
    return any(has_limits(leaf) for one in table.columns for leaf in leaves_of(one) if types.is_floating(leaf.type))


def _matches(block: bytes, pattern: str) -> bool:
    """Whether something in the block matches. In pyarrow, because Python takes longer to search than to parse."""
    from pyarrow import compute  # not at the top, as in `numbers`

    # pyarrow.scalar would copy the block, and import pandas: Spark's worker collects garbage after each task, which
    # takes longer with pandas in it.
    ends = pyarrow.py_buffer(struct.pack("=qq", 0, len(block)))
    one = pyarrow.Array.from_buffers(pyarrow.large_binary(), 1, [None, ends, pyarrow.py_buffer(block)])
    return bool(compute.match_substring_regex(one, pattern)[0].as_py())


def _rows(block: bytes) -> Iterator[dict[str, Any]]:
    for line in block.splitlines():
        if line.strip():
            row = json.loads(line, parse_float=Decimal, parse_int=Decimal)
            yield row if isinstance(row, dict) else {}


def _changed(block: bytes, schema: pyarrow.Schema, pattern: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the numbers that their types would change: where each is, in which column, the number, and its type."""
    from pyarrow import compute

    lines = pyarrow.array(block.splitlines(), pyarrow.binary())
    for row in _rows(b"\n".join(lines.filter(compute.match_substring_regex(lines, pattern)).to_pylist())):
        for one in schema:
            for path, number, wanted in _doubles(row.get(one.name), one.type, one.name):
                if changes(number, wanted):
                    yield path, one.name, show(str(number)), wanted


def _doubles(value: Any, found: Any, path: str) -> Iterator[tuple[str, Decimal, Any]]:
    """Yield the numbers in a value that become doubles or floats, each with where it is and its type."""
    if types.is_floating(found) and isinstance(value, Decimal):
        yield path, value, found
    elif types.is_list(found) and isinstance(value, list):
        for one in value:
            yield from _doubles(one, found.value_type, f"{path}[]")
    elif types.is_struct(found) and isinstance(value, dict):
        for one in found:
            yield from _doubles(value.get(one.name), one.type, f"{path}.{one.name}")
