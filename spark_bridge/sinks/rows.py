# SPDX-License-Identifier: Apache-2.0

"""The rows in a record, whatever it is: one row, or an Arrow batch of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import a_type, show
from spark_bridge.sinks.two_phase.errors import SinkMisused

LONE_SURROGATE = (
    "it has a lone surrogate, which UTF-8 cannot encode: replace it, as text.encode('utf-8', 'replace').decode() does, "
    "or write bytes"
)


def check_columns(columns: Sequence[str]) -> None:
    """Raise ``SinkMisused`` if there are none, or two of one name."""
    if not columns or len(set(columns)) < len(columns):
        raise SinkMisused(f"columns must be a list of names, each once and at least one, not {list(columns)}")


def rows_of(record: Any, columns: Sequence[str]) -> Iterable[Sequence[Any]]:
    """Return the rows of ``record`` as values in the order of ``columns``.

    ``record`` is a mapping or a Spark ``Row``, with a value for each column; a tuple or list, in the order of the
    columns; or an Arrow batch or table. Missing names are NULL.

    Raises:
        TypeError: it is something else.
        ValueError: it has a column that is not in ``columns``, or another number of values.
    """
    if hasattr(record, "to_pylist") and hasattr(record, "schema"):
        refuse_unknown(record.schema.names, columns)
        by_name = {name: record.column(name).to_pylist() for name in record.schema.names}
        missing = [None] * record.num_rows
        return list(zip(*(by_name.get(column, missing) for column in columns), strict=True))
    if hasattr(record, "asDict"):
        record = record.asDict()
    if isinstance(record, Mapping):
        refuse_unknown(record, columns)
        return [[record.get(column) for column in columns]]
    if isinstance(record, (tuple, list)):
        if len(record) != len(columns):
            raise ValueError(
                f"the row has {len(record)} values, and the sink {len(columns)} columns: {columns}; write a "
                "value for each, None for NULL"
            )
        return [record]
    raise TypeError(
        f"{a_type(record)} is not a row: pass a dict, a Row, a tuple or an Arrow batch, or override encode of "
        "the operator"
    )


def refuse_unknown(names: Iterable[str], columns: Sequence[str]) -> None:
    """Raise ``ValueError`` if there is a column that the sink would not write."""
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise ValueError(
            f"the sink has no columns {unknown}, only {list(columns)}: leave them out, or name them in the sink"
        )


@contextmanager
def naming_lone_surrogates(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> Iterator[None]:
    """Raise ``ValueError`` that names row and column in place of ``UnicodeEncodeError``, which names neither."""
    try:
        yield
    except UnicodeEncodeError as error:
        for row in rows:
            for column, value in zip(columns, row, strict=True):
                if _has_lone_surrogate(value):
                    text = f"column {column!r} of the row {show(row, SHOWN_CHARS_MAX)} cannot be written"
                    raise ValueError(f"{text}: {LONE_SURROGATE}") from error
        raise


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= one <= "\udfff" for one in value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, (*value, *value.values())))
    return isinstance(value, list | tuple) and any(map(_has_lone_surrogate, value))
