# SPDX-License-Identifier: Apache-2.0

"""Brokers that speak Kafka's protocol, for the tests: librdkafka's mock cluster, in a separate process.

``python -m tests.kafka_brokers`` is that process: three brokers on loopback, which keep their records in memory and
obey orders from standard input.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, cimpl

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["KafkaBrokers"]

BROKERS = 3


class KafkaBrokers:
    """Three empty brokers. What they have is lost when they are killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.kafka_brokers"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.servers: str = self._answer()

    def create_topic(self, topic: str, partitions: int) -> None:
        self._order("create", topic, partitions)

    def delete_topic(self, topic: str) -> None:
        self._order("delete", topic)

    def expire(self, topic: str, partition: int, before: int) -> None:
        """Delete all records below an offset, as the brokers do when their retention time is over."""
        self._order("expire", topic, partition, before)

    def append(self, topic: str, partition: int, values: Iterable[Any], **more: Any) -> None:
        """Write JSON values to a partition, and wait until the brokers have them."""
        failed: list[Any] = []
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 1})
        for value in values:
            producer.produce(
                topic,
                json.dumps(value).encode(),
                partition=partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
                **more,
            )
        left = producer.flush(60)
        assert not left, f"{left} records were not written"
        assert not failed, failed

    def stop_all(self, stopped: bool = True) -> None:
        """Freeze all brokers, or let them go on."""
        self._process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _order(self, *order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._answer() == "0", f"the brokers have refused {order}"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the brokers have ended"
        return answer


class _Cluster:
    """librdkafka's own interface to its mock cluster, which its Python package does not show."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(cimpl.__file__)  # it is linked with librdkafka, or contains it
        reason = ctypes.create_string_buffer(512)
        handle = self._function("rd_kafka_new", ctypes.c_void_p)(0, None, reason, len(reason))
        assert handle, reason.value
        self._cluster = self._function("rd_kafka_mock_cluster_new", ctypes.c_void_p)(ctypes.c_void_p(handle), BROKERS)

    def _function(self, name: str, result: Any = ctypes.c_int) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function

    @property
    def servers(self) -> str:
        name = "rd_kafka_mock_cluster_bootstraps"
        servers: bytes = self._function(name, ctypes.c_char_p)(ctypes.c_void_p(self._cluster))
        return servers.decode()

    def obey(self, order: list[Any]) -> int:
        cluster = ctypes.c_void_p(self._cluster)
        match order:
            case ["create", str(topic), int(partitions)]:
                answer = self._function("rd_kafka_mock_topic_create")(cluster, topic.encode(), partitions, 1)
            case ["delete", str(topic)]:
                answer = self._function("rd_kafka_mock_topic_delete")(cluster, topic.encode())
            case ["expire", str(topic), int(partition), int(before)]:
                answer = self._function("rd_kafka_mock_partition_delete_records")(
                    cluster, topic.encode(), ctypes.c_int32(partition), ctypes.c_int64(before)
                )
            case _:
                raise ValueError(order)
        return int(answer)


def main() -> None:
    cluster = _Cluster()
    print(cluster.servers, flush=True)
    for line in sys.stdin:
        print(cluster.obey(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
