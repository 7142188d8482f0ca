# SPDX-License-Identifier: Apache-2.0

"""A process that writes values until it is killed: ``python -m tests.spark_bridge.storage.value_writer DIRECTORY``.

It prints ``written NUMBER`` for each entry that its cache may show. The cache forgets
entries, so that files are merged.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import anyio
import anyio.lowlevel

from spark_bridge.storage import CheckpointStorage, StorageSession
from spark_bridge.storage.port import ValueUser

KEPT = 200


def value_of(number: int) -> bytes:
    return b"%d " % number * 500


async def main() -> None:
    shown: dict[bytes, bytes] = {}

    def written(entries: Mapping[bytes, bytes]) -> None:
        shown.update(entries)
        for key in list(shown)[:-KEPT]:
            del shown[key]
        print("\n".join(f"written {key.decode()}" for key in entries), flush=True)

    def failed(error: Exception) -> None:
        raise error

    user = ValueUser(written, failed, shown.get, lambda: sum(map(len, shown.values())))
    async with StorageSession(CheckpointStorage(sys.argv[1])) as session:
        port = session.values("geocode")
        shown.update(await port.open(user))
        number = max(map(int, shown), default=0)
        while True:
            for _ in range(7):
                number += 1
                port.append(b"%d" % number, value_of(number))
            await anyio.lowlevel.checkpoint()


if __name__ == "__main__":
    anyio.run(main)
