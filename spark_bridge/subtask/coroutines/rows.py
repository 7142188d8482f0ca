# SPDX-License-Identifier: Apache-2.0

"""The rows of Spark's batches as records, and results as batches of the same kind: of pandas or of Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from protocol.describing import show

__all__ = ["Rows"]

BATCH_ROWS = 1_000
"""How many results leave in one batch. All but the last have as many."""


class Rows:
    """The batches of one task. ``schema``: that of the results, for batches of Arrow; one of pyarrow."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._kind: type[Any] | None = None

    def of(self, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict."""
        for batch in batches:
            self._kind = type(batch)
            if hasattr(batch, "to_pylist"):
                if self._schema is None:
                    raise TypeError("results of mapInArrow need a schema: concurrently(..., rows=True, schema=...)")
                yield from batch.to_pylist()
            elif hasattr(batch, "to_dict"):
                yield from batch.to_dict("records")
            else:
                raise TypeError(
                    f"rows=True is for the batches of mapInArrow and mapInPandas, not for {show(batch)}: leave it out"
                )

    def together(self, results: Iterator[Any]) -> Iterator[Any]:
        """Yield the results, which are dicts, in batches."""
        while rows := list(islice(results, BATCH_ROWS)):
            for row in rows:
                if not isinstance(row, dict):
                    raise TypeError(f"with rows=True a result is a dict of columns, not {show(row)}")
            assert self._kind is not None, "a result without a batch"
            if hasattr(self._kind, "from_pylist"):
                yield self._kind.from_pylist(rows, schema=self._schema)
            else:
                yield self._kind(rows)
