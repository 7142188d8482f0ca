# SPDX-License-Identifier: Apache-2.0

"""The rows in a record, whatever it is: one row, or an Arrow batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from functools import partial
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


class WithZone:
    """Which times in a value are instants, because the column that they go to has a zone.

    ``everything``: all of them. Otherwise those in ``fields`` of a struct, by name, or in the ``pair`` that is the key
    and the value of a map. A list has the form of its elements.
    """

    def __init__(
        self,
        everything: bool = False,
        fields: Mapping[str, WithZone] | None = None,
        pair: tuple[WithZone, WithZone] | None = None,
    ) -> None:
        self.everything = everything
        self.fields = fields
        self.pair = pair

    def __bool__(self) -> bool:
        return self.everything or any((self.fields or {}).values()) or any(self.pair or ())


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


def instants_of_row(
    row: Sequence[Any], columns: Sequence[str], with_zone: Mapping[str, WithZone], *, of_spark: bool
) -> Sequence[Any]:
    """Return the values of ``row`` with instants in the columns of ``with_zone``.

    ``of_spark``: it is from a ``Row``, to which Spark gives its timestamps without a zone, in the local zone of the
    worker, so they are taken in it. Raises ``ValueError`` for any other time without a zone.
    """
    return [
        value if value is None or column not in with_zone else _instants(value, with_zone[column], of_spark, column)
        for column, value in zip(columns, row, strict=True)
    ]


def _instants(value: Any, with_zone: WithZone, of_spark: bool, column: str) -> Any:
    if not with_zone or value is None:
        return value
    if isinstance(value, (date, time)):
        return _instant(value, of_spark, column) if with_zone.everything else value
    inside = partial(_instants, of_spark=of_spark or hasattr(value, "asDict"), column=column)
    if isinstance(value, Mapping):
        return _instants_of_mapping(value, with_zone, inside)
    return _instants_of_sequence(value, with_zone, inside) if isinstance(value, (list, tuple)) else value


def _instants_of_mapping(value: Mapping[Any, Any], with_zone: WithZone, inside: Callable[..., Any]) -> dict[Any, Any]:
    if with_zone.fields is not None:
        return {name: inside(one, with_zone.fields.get(name, WithZone())) for name, one in value.items()}
    key, item = with_zone.pair or (with_zone, with_zone)
    return {inside(one, key): inside(other, item) for one, other in value.items()}


def _instants_of_sequence(value: Sequence[Any], with_zone: WithZone, inside: Callable[..., Any]) -> Sequence[Any]:
    names = getattr(value, "__fields__", None)
    if with_zone.fields is not None and isinstance(value, tuple):
        forms = [with_zone.fields.get(name, WithZone()) for name in names] if names else with_zone.fields.values()
        found = [inside(one, form) for one, form in zip(value, forms, strict=False)]
        found += value[len(found) :]
    elif with_zone.pair is not None:  # pyarrow takes a list of pairs for a map
        found = [tuple(map(inside, pair, with_zone.pair)) for pair in value]
    else:
        found = [inside(one, with_zone) for one in value]
    if names:
        return type(value)(*names)(*found)  # type: ignore[operator, no-any-return]  # a Row again
    return tuple(found) if isinstance(value, tuple) else found


def _instant(value: date | time, of_spark: bool, column: str) -> Any:
    if isinstance(value, (datetime, time)) and value.tzinfo is not None:
        return value
    if not (of_spark and isinstance(value, datetime)):
        raise ValueError(
            f"column {column!r} has a zone, and the value {show(value)} has none, so its moment is unknown: "
            "give it its zone, as value.replace(tzinfo=timezone.utc) does for a datetime, or pass Spark's Row itself, "
            "whose timestamps are in the local zone of the worker"
        )
    try:
        return value.astimezone(UTC)
    except (OverflowError, OSError, ValueError) as error:
        raise ValueError(
            f"column {column!r} has the time {show(value)}, which Python cannot take from the local zone to UTC: "
            "run the workers with TZ=UTC, or leave the row out"
        ) from error


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
