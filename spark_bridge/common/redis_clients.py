# SPDX-License-Identifier: Apache-2.0

"""Clients of Redis, for the source and the sink: of one server, or of all primaries of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis
from redis.cluster import RedisCluster
from redis.retry import Retry

from spark_bridge.common.secret_texts import Secrets, check_login


def client_of(url: str, retry: Callable[[], Retry]) -> redis.Redis:
    """Return a client of the server, or of the cluster if the server belongs to one.

    A server of a cluster has a part of the keys only. The client finds the others, and who has taken over from whom.
    """
    check_login(url, "url")
    with Secrets("url", url).kept():
        client: Any = redis.Redis.from_url(url, retry=retry(), client_name="headgate")
        try:
            in_cluster = _is_in_cluster(client)
        except BaseException:
            client.close()
            raise
        if not in_cluster:
            return cast("redis.Redis", client)
        client.close()
        client = RedisCluster.from_url(url, retry=retry(), client_name="headgate")
    return cast("redis.Redis", client)


def _is_in_cluster(client: Any) -> bool:
    try:
        said = client.execute_command("HELLO")  # every login may ask this
    except redis.ResponseError:  # before Redis 6
        said = client.info("server")
        return bool(said.get("redis_mode") == "cluster")
    values = [*said.items()] if isinstance(said, dict) else [*zip(said[::2], said[1::2], strict=False)]
    return any(name in (b"mode", "mode") and mode in (b"cluster", "cluster") for name, mode in values)
