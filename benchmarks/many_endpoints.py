# SPDX-License-Identifier: Apache-2.0

"""The executor's half of many subtasks in one process, without a thread for each.

Each subtask is the real one: registration with its handshake, ``SubtaskChannel`` with its lock, ``SubtaskMachine``,
mailbox, wire and codec. Only the two threads of a task are missing. One selector serves all subtasks of this process,
reads what has come and empties the mailbox immediately, as a task that only waits would. The same selector serves
bare connections for the raw baseline.

Run by ``benchmarks.crowd``, which writes lines of JSON to the standard input, the first of them with the key, and
reads lines of JSON from the standard output. The process ends with its input.
"""

from __future__ import annotations

import heapq
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any

import msgpack

from benchmarks.cores import whole_process_on
from protocol.errors import GatewayFull, RemoteProtocolError
from protocol.subtask.types import (
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    PutInMailbox,
    SendToCoordinator,
    SubtaskEffect,
)
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.keys import Key, identity_of
from protocol.wire.messages import (
    CheckpointAcknowledged,
    ClosedForCheckpoint,
    Confirm,
    Downward,
    Registered,
    RestoreMode,
)
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.connection import Connection, register

LENGTH = Struct(">I")
STATE = b"s" * 100
"""The state of each subtask in a snapshot."""
TAKE, ECHO, UP = 0, 1, 2
"""The first entry of an event: to be received, to be echoed, or sent up with its time of sending."""
CONNECT_S = 60.0
FLOOD_TOGETHER = 16
"""This many events of a flood leave from a subtask before the next one sends."""


class TooFewFiles(OSError):
    """The process may not open as many sockets as are needed."""


def allow_files(needed: int) -> None:
    """Raise this process's own limit to ``needed`` open files. Raises ``TooFewFiles``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return
    if hard < needed:
        raise TooFewFiles(
            f"{needed} open files are needed, and this process may have {hard} (`ulimit -Hn`): raise the hard limit, "
            "or measure fewer subtasks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def resident_bytes() -> int:
    """The memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Subtask(SubtaskChannel):
    """One attempt whose socket is watched from outside.

    ``moments``, while it is a list, gets ``(what, subtask, monotonic ns)`` of each step of a checkpoint.
    """

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity) -> None:
        super().__init__(endpoint, identity)
        self.subtask = identity.subtask
        self.watched = selectors.EVENT_READ
        self.moments: list[tuple[str, int, int]] | None = None
        self.has_closed = False
        """Set when this subtask closes its valve for a checkpoint, or snapshots without having done so."""
        self._acknowledged = False

    def connect(self) -> Registered:
        """Connect and register, without starting a thread."""
        registered = self.begin()
        self.operator_opened(awaits_start=False)
        return registered

    def begin(self) -> Registered:
        """Connect and register. The operator is not yet open."""
        connection, registered, rest = register(self.endpoint, self._identity, self.waker)
        with self._changed:
            self._begin(connection, registered, rest)
        return registered

    def _carry_out(self, effects: Sequence[SubtaskEffect]) -> None:
        super()._carry_out(effects)
        for effect in effects:
            what = _step(effect)
            self.has_closed |= what in ("closed", "acknowledged")
            if self.moments is not None:
                self._acknowledged |= what == "acknowledged"
                if what:
                    self.moments.append((what, self.subtask, time.monotonic_ns()))

    def _take(self, messages: Sequence[Downward]) -> None:
        super()._take(messages)
        if self.moments is not None and self._acknowledged and self._machine.all_confirmed:
            self._acknowledged = False
            if any(isinstance(message, Confirm) for message in messages):
                self.moments.append(("reopened", self.subtask, time.monotonic_ns()))


def _step(effect: SubtaskEffect) -> str:
    """The checkpoint step of this effect, if any."""
    match effect:
        case SendToCoordinator(ClosedForCheckpoint()):
            return "closed"
        case PutInMailbox(MailboxBarrier()):
            return "barrier"
        case SendToCoordinator(CheckpointAcknowledged()):
            return "acknowledged"
        case PutInMailbox(MailboxCompleted()):
            return "completed"
    return ""


class Endpoints:
    """All subtasks of this process, on one thread."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._endpoint = TaskEndpoint(
            task["host"],
            task["port"],
            Key(identity_of(task["operator_id"]), bytes.fromhex(task["key"])),
            task["operator_id"],
            task["parallelism"],
            RestoreMode(task["mode"]),
            certificate_sha256=bytes.fromhex(task.get("pin", "")),
            register_timeout_s=CONNECT_S,
        )
        self._selector = selectors.DefaultSelector()
        self._subtasks: dict[int, Subtask] = {}
        self._raw: list[socket.socket] = []
        self._bare: list[Connection] = []
        self._commands = bytearray()
        self._due: list[tuple[float, int]] = []
        self._at_close: set[int] = set()
        self._told = 0
        self._flood = b""
        self._flood_left: dict[int, int] = {}
        self._over = False

    def run(self) -> None:
        """Run until the standard input ends."""
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._take_commands)
        try:
            while not self._over:
                wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
                if self._flood_left and self._send_flood():
                    wait_s = 0.0
                for key, events in self._selector.select(wait_s):
                    key.data(events)
                while self._due and self._due[0][0] <= time.monotonic():
                    self._send_up(heapq.heappop(self._due)[1])
        finally:
            for subtask in self._subtasks.values():
                subtask.close()
            for sock in self._raw:
                sock.close()
            self._drop()
            self._selector.close()

    # --- commands -------------------------------------------------------------------------------------------------

    def _take_commands(self, events: int) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 20)
        self._over = not data
        self._commands += data
        *lines, self._commands = self._commands.split(b"\n")
        for line in lines:
            self.act(json.loads(line))

    def act(self, command: dict[str, Any]) -> None:
        """Carry out one line of the standard input."""
        COMMANDS[command["do"]](self, command)

    def _open(self, command: dict[str, Any]) -> None:
        for task_attempt_id, number in command["tasks"]:
            subtask = Subtask(self._endpoint, TaskIdentity(task_attempt_id, number, self._task["stage_id"], 0))
            subtask.connect()
            self.adopt(subtask)
        say(opened=len(command["tasks"]))

    def _raw_open(self, command: dict[str, Any]) -> None:
        for _ in range(command["count"]):
            sock = socket.create_connection((self._task["host"], self._task["raw_port"]))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._raw.append(sock)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._answer_raw, sock, bytearray()))
        say(opened=command["count"])

    def _connect(self, command: dict[str, Any]) -> None:
        """Open connections that have proved the key and send nothing more."""
        for _ in range(command["count"]):
            deadline = time.monotonic() + CONNECT_S
            self._bare.append(Connection.open(self._endpoint, deadline))
        say(opened=command["count"])

    def _disconnect(self, command: dict[str, Any]) -> None:
        self._drop()
        say(opened=0)

    def _drop(self) -> None:
        for connection in self._bare:
            connection.close()
        self._bare.clear()

    def _record(self, command: dict[str, Any]) -> None:
        """Record the steps of the next checkpoint; they are reported after its end."""
        for subtask in self._subtasks.values():
            subtask.moments = []

    def _send(self, command: dict[str, Any]) -> None:
        """Send an event up from each of these subtasks, at the given number of seconds from now."""
        now = time.monotonic()
        for delay_s, subtask in command["at"]:
            heapq.heappush(self._due, (now + delay_s, subtask))

    def _send_at_close(self, command: dict[str, Any]) -> None:
        """Send an event up from each of these subtasks as soon as its valve closes for the next checkpoint."""
        self._at_close = set(command["subtasks"])
        for subtask in self._subtasks.values():
            subtask.has_closed = False
        say(armed=True)

    def _begin_flood(self, command: dict[str, Any]) -> None:
        """Send events of this size from all subtasks, as fast as the windows allow.

        Each sends ``events``, or without end until ``end_flood``.
        """
        self._flood = encode_event([UP, bytes(command["size_bytes"])])
        self._flood_left = dict.fromkeys(self._subtasks, command.get("events", sys.maxsize))

    def _end_flood(self, command: dict[str, Any]) -> None:
        self._flood_left.clear()
        say(flooded=True)

    def _raw_flood(self, command: dict[str, Any]) -> None:
        """Send this many frames of this size over each bare connection, in a write for each."""
        body = msgpack.packb([UP, bytes(command["size_bytes"])])
        frame = LENGTH.pack(len(body)) + body
        for sent in range(0, command["events"], FLOOD_TOGETHER):
            for sock in self._raw:
                for _ in range(min(FLOOD_TOGETHER, command["events"] - sent)):
                    sock.sendall(frame)

    def _memory(self, command: dict[str, Any]) -> None:
        say(resident=resident_bytes())

    # --- subtasks -------------------------------------------------------------------------------------------------

    def adopt(self, subtask: Subtask) -> None:
        """Serve this connected subtask from now on."""
        self._subtasks[subtask.subtask] = subtask
        assert subtask.connection is not None
        sock = subtask.connection.sock
        self._selector.register(sock, subtask.watched, partial(self._serve, subtask, sock))

    def _serve(self, subtask: Subtask, sock: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                subtask.write()
            subtask.read()
        except (OSError, RemoteProtocolError):
            subtask.end("the connection broke")
        if subtask.over is not None:
            self._selector.unregister(sock)
            subtask.close()
            self.ended(subtask)
            return
        self._send_if_closed(subtask)
        self.empty_mailbox(subtask)
        self._send_if_closed(subtask)
        if subtask.interests != subtask.watched:
            subtask.watched = subtask.interests
            self._selector.modify(sock, subtask.watched, partial(self._serve, subtask, sock))

    def _send_if_closed(self, subtask: Subtask) -> None:
        if subtask.has_closed and subtask.subtask in self._at_close:
            self._at_close.remove(subtask.subtask)
            self._send_up(subtask.subtask)

    def empty_mailbox(self, subtask: Subtask) -> None:
        """Handle everything that has come to this subtask."""
        while (item := subtask.take()) is not None:
            if isinstance(item, MailboxEvent):
                event = decode_event(item.payload)
                if event[0] == ECHO:
                    subtask.submit_event(encode_event(event))
            elif isinstance(item, MailboxBarrier):
                if subtask.wants_snapshot(item.checkpoint_id):
                    subtask.snapshot_taken(item.checkpoint_id, STATE)
            elif isinstance(item, MailboxCompleted):
                self._completed()

    def ended(self, subtask: Subtask) -> None:
        """This subtask is over, and its socket is closed."""

    def _completed(self) -> None:
        self._told += 1
        if self._told < len(self._subtasks):
            return
        at, self._told = time.monotonic_ns(), 0
        moments: list[tuple[str, int, int]] = []
        for subtask in self._subtasks.values():
            moments += subtask.moments or []
            subtask.moments = None
        say(completed_ns=at, moments=moments)

    def _send_flood(self) -> bool:
        """Whether any window still has capacity."""
        open_window = False
        for number, left in list(self._flood_left.items()):
            subtask, sent = self._subtasks[number], 0
            try:
                while sent < min(FLOOD_TOGETHER, left):
                    subtask.submit_event_nowait(self._flood)
                    sent += 1
                open_window = True
            except GatewayFull:
                pass
            self._flood_left[number] = left - sent
            if sent == left:
                del self._flood_left[number]
        return open_window

    def _send_up(self, number: int) -> None:
        self._subtasks[number].submit_event(encode_event([UP, time.monotonic_ns()]))

    # --- the baseline ---------------------------------------------------------------------------------------------

    def _answer_raw(self, sock: socket.socket, buffer: bytearray, events: int) -> None:
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            return
        buffer += data
        answers = []
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := LENGTH.unpack_from(buffer)[0]):
            frame = msgpack.unpackb(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            body = msgpack.packb(frame)
            answers.append(LENGTH.pack(len(body)) + body)
        sock.sendall(b"".join(answers))


COMMANDS: dict[str, Callable[[Endpoints, dict[str, Any]], None]] = {
    "open": Endpoints._open,
    "raw_open": Endpoints._raw_open,
    "connect": Endpoints._connect,
    "disconnect": Endpoints._disconnect,
    "record": Endpoints._record,
    "send": Endpoints._send,
    "send_at_close": Endpoints._send_at_close,
    "flood": Endpoints._begin_flood,
    "end_flood": Endpoints._end_flood,
    "raw_flood": Endpoints._raw_flood,
    "memory": Endpoints._memory,
}


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main(endpoints: type[Endpoints] = Endpoints) -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as commands:
        task = json.loads(commands.readline())
    allow_files(task["files"])
    whole_process_on(task.get("core"))
    os.nice(task.get("niceness", 0))
    endpoints(task).run()


if __name__ == "__main__":
    main()
