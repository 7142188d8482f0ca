# SPDX-License-Identifier: Apache-2.0

"""Clients of Redis, for the source and the sink: of one server, or of all primaries of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis
from redis.cluster import RedisCluster
from redis.retry import Retry

from spark_bridge.common.secret_texts import Secrets, check_login
from spark_bridge.common.systems import REDIS_LEAST


def client_of(url: str, retry: Callable[[], Retry]) -> redis.Redis:
    """Return a client of the server, or of the cluster if the server belongs to one.

    A server of a cluster has a part of the keys only. The client finds the others, and who has taken over from whom.

    Raises ``ValueError`` for a server that is too old.
    """
    check_login(url, "url")
    with Secrets("url", url).kept():
        client: Any = redis.Redis.from_url(url, retry=retry(), client_name="headgate")
        try:
            version, mode = _version_and_mode(client)
            if int(version.split(".")[0]) < REDIS_LEAST:
                raise ValueError(f"the server is Redis {version}: use one of version {REDIS_LEAST} or later")
        except BaseException:
            client.close()
            raise
        if mode != "cluster":
            return cast("redis.Redis", client)
        client.close()
        client = RedisCluster.from_url(url, retry=retry(), client_name="headgate")
    return cast("redis.Redis", client)


def _version_and_mode(client: Any) -> tuple[str, str]:
    try:
        said = client.execute_command("HELLO")  # every login may ask this
    except redis.ResponseError:  # before Redis 6
        said = client.info("server")
        return said["redis_version"], said["redis_mode"]
    flat = [one for pair in said.items() for one in pair] if isinstance(said, dict) else said
    flat = [one.decode() if isinstance(one, bytes) else one for one in flat]
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    return found["version"], found["mode"]
