# SPDX-License-Identifier: Apache-2.0

"""An operator that writes every record of its partition as one line, exactly once."""

from __future__ import annotations

from typing import Any

from protocol.arguments import AT_LEAST_1, checked
from protocol.describing import a_type
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

__all__ = ["FileSinkOperator"]


class FileSinkOperator(TwoPhaseSinkOperator):
    """Writes each record as one line of a file. Needs a ``FileSinkCoordinator`` with the same ``url`` and ``name``.

    ``url`` is an absolute path or a URL. ``prefix``, ``suffix``, ``roll_bytes`` and ``options`` are those
    of ``SinkWriter``. The operator must be in streaming mode. It yields no outputs.

    Override ``encode`` for records that are not lines. A retried attempt continues from the position in the restored
    checkpoint. By default, the position is the number of records written, and that many are skipped. This is correct
    as long as Spark computes the same records in the same order again. For another kind of position, override
    ``snapshot_position`` and ``restore_position`` together, and ``process`` if it does not read Spark's records.
    """

    @checked(roll_bytes=AT_LEAST_1)
    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        prefix: str = "part",
        suffix: str = "",
        roll_bytes: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(FileSink(url, name=name, prefix=prefix, suffix=suffix, roll_bytes=roll_bytes, options=options))

    def encode(self, record: Any) -> bytes | str:
        """Return the row for a record: text, to which a line feed is added, or bytes, which are written unchanged."""
        if isinstance(record, str):
            return record
        if isinstance(record, bytes) and b"\n" not in record:
            return record + b"\n"
        raise TypeError(
            f"{a_type(record)} is not a line of text: pass on str or bytes, or override encode(self, record) in a "
            f"subclass of {type(self).__name__}"
        )
