# SPDX-License-Identifier: Apache-2.0

"""What one task looks at, on an executor of the server, before a client's first job."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["SCHEMA", "ExecutorLook"]

SCHEMA = "problem string"
DIAL_TIMEOUT_S = 5.0


class ExecutorLook:
    """The function of one ``mapInArrow``: yields why an executor cannot reach ``host`` and ``port``, or "".

    That it runs at all shows more: the executor has the client's version of Python, and Headgate's packages.
    """

    __name__ = "headgate_look"  # what Spark shows in its plans

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import spark_bridge.subtask.runner  # noqa: F401 - what a subtask needs

        table = next(iter(batches))
        yield type(table).from_pydict({"problem": [self._dial()]})

    def _dial(self) -> str:
        try:
            socket.create_connection(self._address, DIAL_TIMEOUT_S).close()
        except OSError as error:
            return f"{socket.gethostname()}: {error}"
        return ""
