# SPDX-License-Identifier: Apache-2.0

"""The Redis sink's half on the driver.

One script moves the staged entries of all parts of a call to the stream, and notes them in the ledger. Redis runs a
script as one step: readers see nothing of it or all, and a commit that is repeated finds the ledger changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis

from spark_bridge.sinks.redis.task import RedisStream, connect
from spark_bridge.sinks.two_phase.errors import SinkDataLost, SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows

DURABLE = (("appendonly", "yes"), ("appendfsync", "always"))
"""With these settings, the server keeps what it has confirmed."""

# KEYS: the stream, the ledger, the set of parts, and the staging streams.
# ARGV: how many entries the stream keeps, or "", and for each part its writer, number, count of rows and name.
# Nothing is changed before all parts have been found.
_COMMIT = """
redis.call('XLEN', KEYS[1])
local new = {}
for i = 4, #KEYS do
  local at = 2 + (i - 4) * 4
  local done = tonumber(redis.call('HGET', KEYS[2], ARGV[at]) or '-1')
  if tonumber(ARGV[at + 1]) > done then
    if redis.call('XLEN', KEYS[i]) ~= tonumber(ARGV[at + 2]) then return ARGV[at + 3] end
    new[#new + 1] = i
  end
end
for _, i in ipairs(new) do
  local at = 2 + (i - 4) * 4
  for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    if ARGV[1] == '' then
      redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
    else
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(entry[2]))
    end
  end
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
end
for i = 4, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('SREM', KEYS[3], ARGV[2 + (i - 4) * 4 + 3])
end
return ''
"""


class RedisCommitter(TwoPhaseCommitter):
    """Commits all parts of one call with one script."""

    transient_errors = (
        *(redis.ConnectionError, redis.TimeoutError, OSError),
        *(redis.exceptions.RedisClusterException, redis.exceptions.ClusterDownError),
    )

    def __init__(self, context: SinkCommitterContext, stream: RedisStream) -> None:
        self._context = context
        self._sink = context.sink
        self._stream = stream
        self._client: redis.Redis | None = None

    def open(self) -> None:
        """Connect. Raises ``SinkMisused`` if the key is not a stream."""
        kind: Any = self._connected.type(self._stream.stream)
        if kind not in (b"none", b"stream"):
            raise SinkMisused(f"the key {self._stream.stream!r} is a {kind.decode()}: name a stream, or a new key")
        try:
            settings = self._connected.config_get("append*")
        except redis.ResponseError:
            return  # a managed server does not tell
        for name, durable in DURABLE:
            if settings.get(name, durable) != durable:
                self._context.log.warning("Redis may lose what it has confirmed", setting=f"{name} {settings[name]}")
                break

    def commit(self, committables: Sequence[Committable]) -> None:
        keys = [self._stream.stream, self._stream.commits(self._sink), self._stream.parts(self._sink)]
        keys += [self._stream.staged(self._sink, part.name) for part in committables]
        arguments: list[str | int] = [self._stream.entries_max or ""]
        for part in committables:
            arguments += [part.writer, part.number, part.payload, part.name]
        lost: Any = self._connected.eval(_COMMIT, len(keys), *keys, *arguments)
        if lost:
            raise SinkDataLost(
                f"{lost.decode()} of sink {self._sink!r} never reached the stream {self._stream.stream!r}, and is no "
                "longer staged, so its entries are lost. If a savepoint or an older checkpoint was restored after the "
                "application that took it had failed or continued, which destroys what it did not commit, restore the "
                "newest checkpoint. If the server lost what it had confirmed, set appendonly yes and appendfsync "
                "always, and start again without this checkpoint"
            )

    def check_payload(self, payload: Any) -> None:
        check_rows(payload)

    def abort(self, names: Sequence[str]) -> None:
        self._stream.destroy(self._connected, self._sink, names)

    def prepared(self) -> Iterable[str]:
        names: Any = self._connected.smembers(self._stream.parts(self._sink))
        return sorted(name.decode() for name in names)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _connected(self) -> redis.Redis:
        if self._client is None:
            self._client = connect(self._stream.url)
        return self._client
