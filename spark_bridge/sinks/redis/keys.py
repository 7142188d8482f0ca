# SPDX-License-Identifier: Apache-2.0

"""What both halves of the Redis sink know: the stream, and the keys beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from spark_bridge.common.redis_clients import client_of
from spark_bridge.common.secret_texts import Secrets, check_login
from spark_bridge.sinks.two_phase.errors import SinkMisused


@dataclass(frozen=True)
class RedisStream:
    """The settings of a ``RedisStreamsSink``.

    All keys have one hash tag, so that a cluster keeps them in the slot of the stream.
    """

    url: str = field(repr=False)
    stream: str
    columns: tuple[str, ...]
    entries_max: int | None

    @property
    def target(self) -> str:
        """The stream, without the host, which may change when a replica takes over."""
        return f"redis:{self.stream}"

    def staged(self, sink: str, part: str) -> str:
        """The stream in which a part waits."""
        return f"{self._beside(sink)}:staged:{part}"

    def parts(self, sink: str) -> str:
        """The set of the parts that are staged, or begun."""
        return f"{self._beside(sink)}:parts"

    def commits(self, sink: str) -> str:
        """The ledger: for each writer, the number of its last committed part."""
        return f"{self._beside(sink)}:commits"

    def destroy(self, client: redis.Redis, sink: str, parts: Iterable[str]) -> None:
        """Delete parts that are staged, or begun."""
        with client.pipeline() as commands:
            for part in parts:
                commands.delete(self.staged(sink, part))
                commands.srem(self.parts(sink), part)
            commands.execute()

    def _beside(self, sink: str) -> str:
        tag = re.search(r"\{([^{}]+)\}", self.stream)
        return f"headgate:{{{tag[1] if tag else self.stream}}}:{self.stream}:{sink}"


def connect(url: str) -> redis.Redis:
    """Return a client that repeats nothing by itself. Raises ``SinkMisused`` for an invalid URL."""
    check_login(url, "url", SinkMisused)

    def refused(text: str) -> SinkMisused:
        return SinkMisused(f"not the URL of a Redis server ({text}): pass one such as redis://host:6379/0")

    with Secrets("url", url).kept(ValueError, refused):
        parse_url(url)  # type: ignore[no-untyped-call]
    return client_of(url, lambda: Retry(NoBackoff(), 0))
