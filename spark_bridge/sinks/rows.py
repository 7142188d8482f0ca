# SPDX-License-Identifier: Apache-2.0

"""The rows in a record, whatever it is, and what becomes of each value before it is written.

All sinks take rows in the same forms. What differs is the ``Take`` of each column, which a sink makes for the types of
its target: it returns a value as the target is given it, or raises ``ValueError`` if the value would not arrive as it
was. Those in lists, maps and structs are found here, and errors are given column and row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from typing import Any

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import a_type, show
from spark_bridge.sinks.two_phase.errors import SinkMisused

Take = Callable[[Any, bool], Any]
"""Called with a value other than NULL, and whether it comes from a Spark ``Row``."""

LONE_SURROGATE = (
    "it has a lone surrogate, which UTF-8 cannot encode: replace it, as text.encode('utf-8', 'replace').decode() does, "
    "or write bytes"
)


def check_columns(columns: Sequence[str]) -> None:
    """Raise ``SinkMisused`` if there are none, or two of one name."""
    if not columns or len(set(columns)) < len(columns):
        raise SinkMisused(f"columns must be a list of names, each once and at least one, not {list(columns)}")


def refuse_unknown(names: Iterable[str], columns: Sequence[str]) -> None:
    """Raise ``ValueError`` if there is a column that the sink would not write."""
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise ValueError(
            f"the sink has no columns {unknown}, only {list(columns)}: leave them out, or name them in the sink"
        )


class Columns:
    """The columns of a sink in their order. A column without a ``Take`` is written as it is.

    ``never_null`` has the columns that may not be NULL, each with the reason, except in rows that have ``but_for``, a
    column and its value. ``kept`` has the type whose values the ``Take`` of a column returns as they are.
    """

    def __init__(
        self,
        names: Sequence[str],
        takes: Mapping[str, Take | None],
        never_null: Mapping[str, str] | None = None,
        but_for: tuple[str, Any] | None = None,
        kept: Mapping[str, type | None] | None = None,
    ) -> None:
        self._names = names
        self._but_for = None if but_for is None else (names.index(but_for[0]), but_for[1])
        self._takes = [(place, take) for place, name in enumerate(names) if (take := takes.get(name)) is not None]
        self._kept = {place: {one, type(None)} for place, name in enumerate(names) if (one := (kept or {}).get(name))}
        self._never_null = [(place, why) for place, name in enumerate(names) if (why := (never_null or {}).get(name))]

    def rows(self, record: Any) -> list[tuple[Any, ...]]:
        """Return the rows of ``record``, with the values as they are written.

        ``record`` is a mapping or a Spark ``Row``, with a value for each column; a tuple or list, in the order of the
        columns; or an Arrow batch or table. Missing names are NULL.

        Raises:
            TypeError: it is something else.
            ValueError: it has a column that is not one of the sink, or another number of values; or a value would not
                arrive as it is. The text names its column and its row.
        """
        given = self._values(record)
        for place, why in self._never_null:
            at = next(
                (at for at, one in enumerate(given[place]) if one is None and not self._may_be_null(given, at)), None
            )
            if at is not None:
                raise ValueError(
                    f"column {self._names[place]!r} is {why} and NULL in the row {_row(given, at)}: give it a value, "
                    "or leave the row out"
                )
        taken = list(given)
        for place, take in self._takes:
            # Most columns have values of one type. Each call that this saves takes 0.3 µs: see `rows_to_postgres`.
            if place not in self._kept or not self._kept[place].issuperset(map(type, given[place])):
                taken[place] = self._taken(given, place, take, _is_row(record))
        return list(zip(*taken, strict=True))

    def _may_be_null(self, given: Sequence[Sequence[Any]], at: int) -> bool:
        return self._but_for is not None and given[self._but_for[0]][at] == self._but_for[1]

    def name_value(self, rows: Iterable[Sequence[Any]], write: Callable[[str, Any], Any], error: Exception) -> None:
        """Raise ``ValueError`` with column and row of the first value at which ``write`` fails, if there is one."""
        for row in rows:
            for name, value in zip(self._names, row, strict=True):
                try:
                    if value is not None:
                        write(name, value)
                except Exception as why:
                    raise _refused(name, show(tuple(row), SHOWN_CHARS_MAX), why) from error

    def _values(self, record: Any) -> list[Sequence[Any]]:
        """The values of each column."""
        names = self._names
        if hasattr(record, "to_pylist") and hasattr(record, "schema"):
            refuse_unknown(record.schema.names, names)
            missing = [None] * record.num_rows
            known = set(record.schema.names)
            return [record.column(name).to_pylist() if name in known else missing for name in names]
        if _is_row(record):
            record = record.asDict()
        if isinstance(record, Mapping):
            refuse_unknown(record, names)
            return [(record.get(name),) for name in names]
        if not isinstance(record, (tuple, list)):
            raise TypeError(
                f"{a_type(record)} is not a row: pass a dict, a Row, a tuple or an Arrow batch, or override encode of "
                "the operator"
            )
        if len(record) != len(names):
            raise ValueError(
                f"the row has {len(record)} values, and the sink {len(names)} columns: {tuple(names)}; write a value "
                "for each, None for NULL"
            )
        return [(value,) for value in record]

    def _taken(self, given: Sequence[Sequence[Any]], place: int, take: Take, of_spark: bool) -> list[Any]:
        taken: list[Any] = []
        try:
            for value in given[place]:
                taken.append(_inside(take, value, of_spark))
        except ValueError as error:
            raise _refused(self._names[place], _row(given, len(taken)), error) from error
        return taken


class _NotKept(ValueError):
    """``path`` is the place of a value in its column."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


def _is_row(value: Any) -> bool:
    return hasattr(value, "__fields__")  # a Row without names has none, and is a tuple


def _row(columns: Sequence[Sequence[Any]], place: int) -> str:
    return show(tuple(values[place] for values in columns), SHOWN_CHARS_MAX)


def _refused(name: str, row: str, why: Exception) -> ValueError:
    path = why.path if isinstance(why, _NotKept) else name
    text = LONE_SURROGATE if isinstance(why, UnicodeEncodeError) else why
    return ValueError(f"column {path!r} of the row {row} cannot be written: {text}")


def naming(path: str, declared: object, take: Take) -> Take:
    """The same for a column, or for a part of one, that is ``declared`` so: its errors say it, and the value."""

    def taken(value: Any, of_spark: bool) -> Any:
        try:
            return take(value, of_spark)
        except ValueError as error:
            shown = show(value, SHOWN_CHARS_MAX)
            raise _NotKept(path, f"it is {declared}, and cannot have {shown} unchanged: {error}") from None

    return taken


def instant(value: date | time, of_spark: bool) -> Any:
    """The moment of a time that goes to a column with a zone.

    Spark gives the timestamps in its rows without a zone, in the local zone of the worker, so they are taken in it.
    Raises ``ValueError`` for any other time without a zone.
    """
    if isinstance(value, (datetime, time)) and value.tzinfo is not None:
        return value
    if not (of_spark and isinstance(value, datetime)):
        raise ValueError(
            "it has no zone, so its moment is unknown: give it its zone, as value.replace(tzinfo=timezone.utc) does "
            "for a datetime, or pass Spark's Row itself, whose timestamps are in the local zone of the worker"
        )
    try:
        return value.astimezone(UTC)
    except (OverflowError, OSError, ValueError) as error:
        raise ValueError(
            "Python cannot take it from the local zone to UTC: run the workers with TZ=UTC, or leave the row out"
        ) from error


# --- values in values ----------------------------------------------------------------------------------------------


def take_list(take: Take, inner: tuple[type, ...] = ()) -> Take:
    """For the elements of a list. Those of the types ``inner`` are lists of elements again."""

    def take_all(value: Any, of_spark: bool) -> Any:
        return [None if one is None else (take_all if isinstance(one, inner) else take)(one, of_spark) for one in value]

    return take_all


def _inside(take: Take | None, value: Any, of_spark: bool) -> Any:
    return value if take is None or value is None else take(value, of_spark)


def take_map(take_key: Take | None, take_value: Take | None) -> Take:
    """For a mapping, or a list of pairs. Returns pairs."""

    def take_all(value: Any, of_spark: bool) -> Any:
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(_inside(take_key, one, of_spark), _inside(take_value, other, of_spark)) for one, other in pairs]

    return take_all


def take_struct(path: str, declared: object, takes: Mapping[str, Take | None]) -> Take:
    """For a Row or a mapping with these fields, or a tuple or list in their order. Returns a dict of all."""
    names = list(takes)

    def by_name(value: Any, of_spark: bool) -> Mapping[str, Any]:
        if _is_row(value):
            value = value.asDict()
        elif isinstance(value, (tuple, list)) and len(value) == len(names):
            value = dict(zip(names, value, strict=True))
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise ValueError(f"this is not a dict or a Row with these fields, {names}: leave others out")
        return value

    fields_of = naming(path, declared, by_name)

    def take_all(value: Any, of_spark: bool) -> Any:
        fields, of_spark = fields_of(value, of_spark), of_spark or _is_row(value)
        return {name: _inside(take, fields.get(name), of_spark) for name, take in takes.items()}

    return take_all


def json_form(value: Any, key: Callable[[Any], str], other: Callable[[Any], Any]) -> Any:
    """The value in the types of JSON. Spark's rows are objects.

    ``key`` returns the name for a key, and ``other`` the form of a value that JSON lacks. Both raise ``ValueError`` if
    there is none.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if _is_row(value):
        value = value.asDict()
    if isinstance(value, Mapping):
        found = {key(name): json_form(one, key, other) for name, one in value.items()}
        if len(found) < len(value):
            raise ValueError("two of its keys are one name in a JSON object: make different texts of them")
        return found
    if isinstance(value, (list, tuple)):
        return [json_form(one, key, other) for one in value]
    return other(value)
