# SPDX-License-Identifier: Apache-2.0

"""The systems that sources and sinks work with, as the reference shows them."""

from __future__ import annotations

from typing import NamedTuple

POSTGRES_LEAST = 14
REDIS_LEAST = 5
"""An older server is refused when a source or sink connects."""


class System(NamedTuple):
    """A row of the table. ``tested``: what the tests run with."""

    connectors: str
    system: str
    tested: str
    package: str


_POSTGRES = (f"PostgreSQL {POSTGRES_LEAST} or later", "PostgreSQL 15", "psycopg 3.2 or later")
_REDIS = (f"Redis {REDIS_LEAST} or later, one server or a cluster", "Redis 7.0", "redis 5 or later")

SOURCES = (
    System("`FileSource`", "JSON lines, CSV and Parquet, local or of fsspec", "pyarrow 26.0", "pyarrow 18 or later"),
    System(
        "`KafkaSource`",
        "brokers that librdkafka knows",
        "the brokers in librdkafka 2.16",
        "confluent-kafka 2.11 or later",
    ),
    System("`PostgresSource`", *_POSTGRES),
    System("`RedisStreamsSource`", *_REDIS),
)
SINKS = (
    System("`PostgresSink`", *_POSTGRES),
    System("`DeltaSink`", "writer versions 1 to 5, and 7", "deltalake 1.6", "deltalake 1.1 or later"),
    System("`IcebergSink`", "format versions 1 and 2", "pyiceberg 0.12, SQL catalog", "pyiceberg 0.10 or later"),
    System("`RedisStreamsSink`", *_REDIS),
    System(
        "`FileSink`",
        "local directories, and filesystems of fsspec",
        "a local disk, and emulators of object stores",
        "fsspec",
    ),
)
