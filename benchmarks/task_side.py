"""The executor's half of a pair: one subtask, and beside it a bare socket loop, in a process of its own.

Run by ``benchmarks.pair``, which writes one line of JSON to its standard input: no secret is in a process list.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from benchmarks.raw_frames import ANSWER, CONFIRM, ECHO, FLOOD, LENGTH
from spark_bridge.subtask.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.runner import run_subtask

STOP = "stop"
RECORD_STEPS = 1_000
"""What a busy operator computes for one record: some tens of microseconds of pure Python."""


class EchoOperator(SubtaskOperator):
    """Answers each event whose first entry says so with the same event. ``busy``: computes all the time meanwhile."""

    def __init__(self, busy: bool) -> None:
        self._busy = busy
        self._stopped = False

    def open(self, context: Any, state: bytes | None) -> None:
        self._context = context

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        if self._busy:
            for _ in records:
                compute(RECORD_STEPS)
        else:
            while not self._stopped:
                self._context.wait_for_event()
        return None

    def handle_event(self, event: Any) -> None:
        if event == STOP:
            self._stopped = True
        elif event[0] == ECHO:
            self._context.send_event(event)
        elif event[0] == FLOOD:
            _, _, payload, count = event
            for place in range(count - 1, -1, -1):
                self._context.send_event([ANSWER, place, payload])

    def records(self) -> Iterator[int]:
        """As many as it takes."""
        number = 0
        while not self._stopped:
            yield number
            number += 1


def compute(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step & 7
    return total


def raw_loop(host: str, port: int) -> None:
    """Length, msgpack, nothing else: one blocking read and one write for each message that comes alone."""
    buffer = bytearray()
    with socket.create_connection((host, port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(65536):
            buffer += data
            answers = []
            while len(buffer) >= 4 and len(buffer) >= 4 + (size := LENGTH.unpack_from(buffer)[0]):
                kind, seq, payload = msgpack.unpackb(buffer[4 : 4 + size])
                del buffer[: 4 + size]
                if kind == FLOOD:
                    flood_back(sock, *payload)
                    continue
                body = msgpack.packb([ANSWER, seq, payload] if kind == ECHO else [CONFIRM, seq, None])
                answers.append(LENGTH.pack(len(body)) + body)
            if answers:
                sock.sendall(b"".join(answers))


def flood_back(sock: socket.socket, count: int, payload: bytes) -> None:
    """One write for each, as ``send_event`` does: nobody knows that another one follows."""
    for place in range(count - 1, -1, -1):
        body = msgpack.packb([ANSWER, place, payload])
        sock.sendall(LENGTH.pack(len(body)) + body)


def main() -> None:
    task = json.loads(sys.stdin.readline())
    raw = threading.Thread(target=raw_loop, args=(task["host"], task["raw_port"]), daemon=True)
    raw.start()
    operator = EchoOperator(task["busy"])
    endpoint = TaskEndpoint(task["host"], task["port"], bytes.fromhex(task["secret"]), task["operator_id"], 1)
    identity = TaskIdentity(task["task_attempt_id"], 0, task["stage_id"], 0)
    for _ in run_subtask(lambda: operator, endpoint, identity, operator.records()):
        pass


if __name__ == "__main__":
    main()
