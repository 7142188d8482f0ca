# SPDX-License-Identifier: Apache-2.0

"""What the readers of all formats know of the files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

NO_END = 1 << 62


@dataclass(frozen=True)
class FileFormat:
    """How files are read. ``storage_options`` are the arguments for the filesystem, such as credentials.

    ``inferred``: the schema was found out from the head of a file, so what comes later may need other types.
    ``csv_options``: for the classes of ``pyarrow.csv``, by their names there.
    """

    name: str
    schema: bytes | None
    """The schema of all batches, in Arrow's own format. None only while it is being found out."""
    inferred: bool
    batch_rows: int
    block_bytes: int
    csv_options: dict[str, Any]
    storage_options: dict[str, Any] = field(repr=False)

    @cached_property
    def arrow_schema(self) -> pyarrow.Schema:
        import pyarrow

        return pyarrow.ipc.read_schema(pyarrow.BufferReader(self.schema))
