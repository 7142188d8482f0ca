# SPDX-License-Identifier: Apache-2.0

"""What the readers of all formats know of the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow
from pyarrow import types

NO_END = 1 << 62
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class FileFormat:
    """How files are read. ``storage_options`` are the arguments for the filesystem, such as credentials.

    ``inferred``: the schema was found out from the head of a file, so what comes later may need other types.
    ``csv_options``: for the classes of ``pyarrow.csv``, by their names there.
    """

    name: str
    schema: pyarrow.Schema
    """That of all batches. None only while it is being found out."""
    inferred: bool
    batch_rows: int
    block_bytes: int
    csv_options: dict[str, Any]
    storage_options: dict[str, Any] = field(repr=False)
    root: str = ""
    """The folder that the URL names. Names of folders below it, such as ``day=2026-01-01``, are values."""

    def values_of_folders(self, path: str) -> dict[str, str | None]:
        """The values that the names of a file's folders have, as Hive, Spark and others write partitions."""
        folders = path.removeprefix(self.root).split("/")[:-1]
        pairs = [folder.partition("=")[::2] for folder in folders if "=" in folder]
        values = {unquote(name): None if value == NULL_FOLDER else unquote(value) for name, value in pairs}
        if len(values) < len(pairs):
            raise ValueError("two of the folders that it is in have values for one column: rename one of them")
        return values

    def check_known(self, found: pyarrow.Schema) -> None:
        """Raise ``ValueError`` for a column or a field that a found-out schema does not have: it would be lost."""
        new = list(not_in(found, self.schema)) if self.inferred else []
        if new:
            raise ValueError(
                f"it has {', '.join(map(repr, new))}, which the head of the first file does not have: pass schema= "
                "with all columns that are to be read"
            )


def not_in(found: Any, known: Any, above: str = "") -> Iterator[str]:
    """Yield where ``found``, a schema or a struct, has a field that ``known`` lacks, if it is more than NULL."""
    for one in found:
        place = known.get_field_index(one.name)
        if place >= 0:
            yield from _not_inside(one.type, known.field(place).type, above + one.name)
        elif not types.is_null(one.type):
            yield above + one.name


def _not_inside(found: Any, known: Any, path: str) -> Iterator[str]:
    if types.is_struct(found) and types.is_struct(known):
        yield from not_in(found, known, f"{path}.")
    elif found.num_fields == known.num_fields:
        for place in range(found.num_fields):
            yield from _not_inside(found.field(place).type, known.field(place).type, path)


def leaves_of(values: Any) -> Iterator[Any]:
    """Yield the values of a column that contain no others, in arrays."""
    if hasattr(values, "chunks"):
        for chunk in values.chunks:
            yield from leaves_of(chunk)
    elif types.is_struct(values.type):
        for child in values.flatten():
            yield from leaves_of(child)
    elif types.is_map(values.type):
        yield from leaves_of(values.keys)
        yield from leaves_of(values.items)
    elif types.is_list(values.type) or types.is_large_list(values.type):
        yield from leaves_of(values.flatten())
    else:
        yield values
