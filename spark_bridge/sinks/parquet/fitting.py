# SPDX-License-Identifier: Apache-2.0

"""Whether a file with some columns can be a part of a table with others: both in Arrow's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow
from pyarrow import types

IsReadAs = Callable[[pyarrow.DataType, pyarrow.DataType], bool]


def differences(
    ours: pyarrow.Schema, theirs: pyarrow.Schema, is_read_as: IsReadAs, *, may_lack: bool = False
) -> list[str]:
    """Return what keeps rows with the columns ``ours`` out of a table with ``theirs``, for an error; empty if nothing.

    The order of the columns is not compared. ``is_read_as(ours, theirs)`` says whether a table may have another simple
    type for the same values. ``may_lack``: a column that may be NULL may be missing in ``ours``.
    """
    return list(_differences(ours, theirs, is_read_as, "", may_lack))


def _differences(
    ours: Iterable[pyarrow.Field], theirs: Iterable[pyarrow.Field], is_read_as: IsReadAs, where: str, may_lack: bool
) -> Iterator[str]:
    our, their = {one.name: one for one in ours}, {one.name: one for one in theirs}
    for name in our.keys() - their.keys():
        yield f"the table has no {where}{name}"
    for name, field in their.items():
        if name in our:
            yield from _of_field(our[name], field, is_read_as, where + name, may_lack)
        elif not may_lack or not field.nullable:
            yield f"the sink has no {where}{name}"


def _of_field(
    ours: pyarrow.Field, theirs: pyarrow.Field, is_read_as: IsReadAs, where: str, may_lack: bool
) -> Iterator[str]:
    if ours.nullable and not theirs.nullable:
        yield f"{where} may not be NULL in the table: declare it with nullable=False, and rows with NULL are refused"
    our, their = ours.type, theirs.type
    if types.is_struct(our) and types.is_struct(their):
        yield from _differences(our, their, is_read_as, f"{where}.", may_lack)
    elif types.is_map(our) and types.is_map(their):
        yield from _of_field(our.key_field, their.key_field, is_read_as, f"{where} (key)", may_lack)
        yield from _of_field(our.item_field, their.item_field, is_read_as, f"{where} (value)", may_lack)
    elif _is_list(our) and _is_list(their):
        yield from _of_field(our.value_field, their.value_field, is_read_as, f"{where}[]", may_lack)
    elif _plain(our) != _plain(their) and not is_read_as(our, their):
        yield f"{where} is {_plain(their)} in the table, and {_plain(our)} in the sink"


def _is_list(given: pyarrow.DataType) -> bool:
    return bool(types.is_list(given) or types.is_large_list(given))


def _plain(given: pyarrow.DataType) -> pyarrow.DataType:
    return {pyarrow.large_string(): pyarrow.string(), pyarrow.large_binary(): pyarrow.binary()}.get(given, given)
