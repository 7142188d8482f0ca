# SPDX-License-Identifier: Apache-2.0

"""A program that reads the changes of a table, and prints how many there were and the most memory that it had."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headgate.sources import PostgresSource


class _Silent:
    def send_event(self, event: Any) -> None:
        """Nobody is told."""


def main(conninfo: str, table: str, slot: str) -> None:
    source: Any = PostgresSource(conninfo, table, "id", changes=slot, bounded=True)
    reader = source.operator()
    reader.context = _Silent()
    count = sum(item[1].num_rows for item in reader.read_from(["changes", []], None) if item is not None)
    reader.close()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(count, int(status["VmHWM"].split()[0]) * 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
