# SPDX-License-Identifier: Apache-2.0

"""The rows of Spark's batches as records, and results as batches of the same kind: of pandas or of Arrow."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
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

    def together(self, results: Generator[Any, None, None], gathered: list[Any]) -> Iterator[Any]:
        """Yield the results, which are dicts, in batches. ``gathered`` has those of the next batch meanwhile."""
        with closing(results):
            while True:
                for row in islice(results, BATCH_ROWS):
                    if not isinstance(row, dict):
                        raise TypeError(f"with rows=True a result is a dict of columns, not {show(row)}")
                    gathered.append(row)
                if not gathered:
                    return
                rows = gathered[:]
                gathered.clear()
                yield self._batch(rows)

    def _batch(self, rows: list[Any]) -> Any:
        kind: Any = self._kind
        if kind is None:  # restored results leave before the first batch comes
            from importlib import import_module

            is_arrow = self._schema is not None
            kind = import_module("pyarrow").RecordBatch if is_arrow else import_module("pandas").DataFrame
        return kind.from_pylist(rows, schema=self._schema) if hasattr(kind, "from_pylist") else kind(rows)
