# SPDX-License-Identifier: Apache-2.0

"""A group whose members are real processes on this machine, without Spark and without a sidecar.

Each process runs the task's half of a group. The test's process is the driver: it feeds ``GroupMachine`` and sends its
answers through pipes. A member that dies is lost; one that was stopped is lost when the test says so, as signs of life
would.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from headgate import GroupMember
from headgate.errors import PeerLost, RequestFailed
from protocol.group import (
    Admit,
    AdmitAlone,
    Answer,
    BlameMember,
    Called,
    ErrorMet,
    Finished,
    GaveUp,
    GroupConfig,
    GroupInput,
    GroupMachine,
    Joined,
    Left,
    Lost,
    Member,
    RefuseCall,
    RejectCall,
    TellBroken,
)
from protocol.machine import TimePassed
from protocol.wire.keys import Key
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.primitives.group.messages import (
    Admitted,
    Broken,
    Call,
    GiveUp,
    Join,
    Leave,
    Question,
    Values,
    Yours,
    parse_event,
    parse_request,
)
from spark_bridge.primitives.group.task import GroupPart
from tests.primitives.stand_ins import open_alone

__all__ = ["Members", "listening", "said"]

Body = Callable[[GroupMember], Any]


class _Context:
    """As much of a ``SubtaskContext`` as a group needs."""

    def __init__(self, line: Connection, tls: bool) -> None:
        self.endpoint = TaskEndpoint(
            "127.0.0.1", 9, Key(bytes(16), bytes(32)), "op", 1, certificate_sha256=b"x" * 32 * tls
        )
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self._line = line

    def request(self, event: Any, timeout_s: float) -> Any:
        self._line.send(("request", event))
        failed, answer = self.answers.get(timeout=timeout_s)
        if failed:
            raise RequestFailed(failed)
        return answer

    def send_event(self, event: Any) -> None:
        self._line.send(("event", event))

    def now(self) -> float:
        return time.monotonic()


def _run(line: Connection, body: Body, tls: bool) -> None:
    """A process: enter generations until ``body`` goes through, and say what came of each."""
    context: Any = _Context(line, tls)
    part = GroupPart("train", 60.0)
    open_alone(part, context)

    def read() -> None:
        while True:
            kind, value = line.recv()
            part.handle_urgent(value) if kind == "urgent" else context.answers.put(value)

    threading.Thread(target=read, daemon=True).start()
    goes_on = True
    while goes_on:
        member = part.enter()
        error: Exception | None = None
        try:
            result = body(member)
            goes_on = False
        except PeerLost as lost:
            error, result = lost, f"PeerLost from {type(lost.__cause__).__name__}: {lost.reason}"
        except Exception as own:
            error, result, goes_on = own, f"{type(own).__name__}: {own}", False
        part.leave(error)
        line.send(("said", (member.generation, result)))
    part.close()
    line.send(("closed", listening()))


def listening() -> int:
    """How many listening sockets this process has, after those of threads that are about to end are gone."""
    until = time.monotonic() + 5.0
    while (count := _listening_now()) and time.monotonic() < until:
        time.sleep(0.01)
    return count


def _listening_now() -> int:
    own = {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)}
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(line[3] == "0A" and f"socket:[{line[9]}]" in own for line in lines)


def _is_open(descriptor: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False
    return True


class Members:
    """The processes, and their driver. ``said``: what each has said, by subtask: (generation, result)."""

    def __init__(self, bodies: list[Body], *, error_grace_s: float = 5.0, tls: bool = False) -> None:
        size = len(bodies)
        config = GroupConfig(size, 1, size, join_wait_s=60.0, start_wait_s=60.0, error_grace_s=error_grace_s)
        self.said: dict[int, list[Any]] = {subtask: [] for subtask in range(size)}
        self.listening: dict[int, int] = {}
        self.exit_codes: dict[int, int | None] = {}
        self._machine = GroupMachine(config)
        self._lines: dict[Any, int] = {}
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for subtask, body in enumerate(bodies):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, body, tls), daemon=True)
            process.start()
            theirs.close()
            self._lines[ours] = subtask
            self._processes.append(process)

    def run(self) -> None:
        """Until all have ended. A process that stops itself is lost."""
        while self._lines:
            deadline = self._machine.next_deadline()
            until = 0.05 if deadline is None else min(0.05, max(0.0, deadline - time.monotonic()))
            for line in wait(list(self._lines), until):
                self._take(line)
            self._tell(TimePassed())
            for subtask, process in enumerate(self._processes):
                if process.pid is not None and _is_stopped(process.pid) and subtask in self._lines.values():
                    self._lose(subtask)
                    self._lines = {line: one for line, one in self._lines.items() if one != subtask}
        self.end()

    def end(self) -> None:
        for subtask, process in enumerate(self._processes):
            if process.pid is not None and _is_stopped(process.pid):
                os.kill(process.pid, signal.SIGKILL)
            process.join(30)
            self.exit_codes[subtask] = process.exitcode
            if process.is_alive():
                process.kill()

    def _take(self, line: Any) -> None:
        subtask = self._lines[line]
        try:
            kind, value = line.recv()
        except (EOFError, ConnectionError):
            del self._lines[line]
            self._lose(subtask)
            return
        member = Member(subtask, 0)
        match kind, value:
            case "said", said:
                self.said[subtask].append(said)
            case "closed", count:
                self.listening[subtask] = count
            case "event", event:
                match parse_event(event):
                    case Leave(generation, error):
                        self._tell(Left(member, generation, error))
                    case GiveUp(generation):
                        self._tell(GaveUp(member, generation))
                    case other:
                        raise AssertionError(f"no member sends {other} here")
            case _:
                match parse_request(value):
                    case Join() as join:
                        self._tell(Joined(member, join))
                    case Call(generation, round_, call, argument):
                        self._tell(Called(member, generation, round_, call, argument))
                    case Question(generation):
                        self._tell(ErrorMet(member, generation))

    def _lose(self, subtask: int) -> None:
        self._tell(Lost(Member(subtask, 0), "gone"))
        self._tell(Finished(Member(subtask, -1)))  # the next generation does not wait for its retry

    def _tell(self, input: GroupInput) -> None:
        for effect in self._machine.handle(input, time.monotonic()):
            match effect:
                case Admit(generation, members, details):
                    for rank, member in enumerate(members):
                        first: Any = details[0]
                        admitted = Admitted(generation, rank, len(members), first.host, first.port, bytes(32), -1, 0)
                        self._send(member, "answer", ("", admitted.as_event()))
                case Answer(members, values, waiting):
                    answer = Values(tuple(one for one in values if isinstance(one, bytes)), waiting)
                    for member in members:
                        self._send(member, "answer", ("", answer.as_event()))
                case RefuseCall(member, generation, reason):
                    self._send(member, "answer", ("", Broken(generation, reason).as_event()))
                case RejectCall(member, reason):
                    self._send(member, "answer", (reason, None))
                case BlameMember(member):
                    self._send(member, "answer", ("", Yours().as_event()))
                case TellBroken(generation, members, reason):
                    for member in members:
                        self._send(member, "urgent", Broken(generation, reason).as_event())
                case AdmitAlone():
                    raise AssertionError("nobody has finished for good here")

    def _send(self, member: Member, kind: str, value: Any) -> None:
        for line, subtask in self._lines.items():
            if subtask == member.subtask:
                with suppress(ConnectionError):
                    line.send((kind, value))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def said(results: list[Any]) -> list[Any]:
    """The results alone."""
    return [result for _, result in results]
