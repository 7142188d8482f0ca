# SPDX-License-Identifier: Apache-2.0

"""What a source or sink says if the package of its extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = [
    ("psycopg", "postgres", "from headgate.sources import PostgresSource"),
    ("psycopg", "postgres", "from headgate.sinks import PostgresSink; PostgresSink('', 't', ['id']).target"),
    ("psycopg", "postgres", "from headgate.sinks import PostgresSink; PostgresSink('', 't', ['id']).writer(None)"),
    ("psycopg", "postgres", "from headgate.sinks import PostgresSink; PostgresSink('', 't', ['id']).committer(None)"),
    (
        "redis",
        "redis",
        "from headgate.sources import RedisStreamsSource; RedisStreamsSource('redis://h', ['s'], schema).splits()",
    ),
    (
        "redis",
        "redis",
        "from headgate.sinks import RedisStreamsSink; RedisStreamsSink('redis://h', 's', ['id']).writer(None)",
    ),
    (
        "redis",
        "redis",
        "from headgate.sinks import RedisStreamsSink; RedisStreamsSink('redis://h', 's', ['id']).committer(None)",
    ),
    ("confluent_kafka", "kafka", "from headgate.sources import KafkaSource; KafkaSource('h', ['t']).splits()"),
    ("pyarrow", "dataframe", "from headgate.sources import FileSource; FileSource(sys.executable, 'csv').operator"),
    ("deltalake", "delta", "from headgate.sinks import DeltaSink; DeltaSink('/x', schema).committer(None)"),
    ("pyarrow", "delta", "from headgate.sinks import DeltaSink; DeltaSink('/x', schema).writer(None)"),
    (
        "pyiceberg",
        "iceberg",
        "from headgate.sinks import IcebergSink; IcebergSink({}, 'a.b', '/x', schema).committer(None)",
    ),
    ("pyarrow", "iceberg", "from headgate.sinks import IcebergSink; IcebergSink({}, 'a.b', '/x', schema).writer(None)"),
]

PROGRAM = """
import sys

sys.meta_path[:] = [type("Finder", (), dict(
    find_spec=staticmethod(lambda name, path=None, target=None, finder=finder: None
        if name.partition(".")[0] == {package!r} else finder.find_spec(name, path, target)),
)) for finder in sys.meta_path]
schema = type("Schema", (), dict(names=[], types=[]))()
try:
    exec({code!r})
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(("package", "extra", "code"), CASES)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package: str, extra: str, code: str) -> None:
    program = PROGRAM.format(package=package, code=code)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith(f"the package {package} is not installed for this Python, {sys.executable}: "), ended
    assert f"pip install 'headgate[{extra}]'" in ended.stdout
