# SPDX-License-Identifier: Apache-2.0

"""A scripted sidecar: real TCP, real handshake, real frames; each test decides what it answers and when.

The peer runs on the test's own thread, the task on another, so every test reads as a dialogue. Each wait has a
deadline and fails the test when it passes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from protocol.wire.codec import DEFAULT_LIMITS, encode_event
from protocol.wire.fragments import FragmentDecoder, encode_whole
from protocol.wire.handshake import ServerHandshake
from protocol.wire.keys import KeyRing, Purpose
from protocol.wire.messages import (
    AnswerMessage,
    BarrierMessage,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    EventMessage,
    Finished,
    Message,
    Opened,
    OperatorPart,
    Register,
    Registered,
    RequestMessage,
    Resume,
    Resumed,
)
from spark_bridge.subtask import SubtaskOperator, TaskEndpoint, TaskIdentity, run_subtask

KEYS = KeyRing(b"s" * 32)
PATIENCE_S = 120.0
TASK_ID = 71
TOKEN = b"the token of this attempt"

AnOperator = SubtaskOperator | Callable[[], SubtaskOperator]
MessageT = TypeVar("MessageT", bound=Message)


def barrier(seq: int, checkpoint_id: int, events_before: int) -> BarrierMessage:
    return BarrierMessage(TASK_ID, seq, checkpoint_id, events_before)


class PeerConnection:
    """One authenticated connection, as the sidecar sees it."""

    def __init__(self, sock: socket.socket, trailing: bytes) -> None:
        self.sock = sock
        self._decoder = FragmentDecoder(DEFAULT_LIMITS)
        self._messages = self._decoder.messages(trailing)

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(encode_whole(message, DEFAULT_LIMITS) for message in messages))

    def receive(self) -> Message:
        while not self._messages:
            data = self.sock.recv(65536)
            assert data, "the task closed its connection"
            self._messages += self._decoder.messages(data)
        return self._messages.pop(0)

    def expect(self, kind: type[MessageT]) -> MessageT:
        message = self.receive()
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def next_item(self, kind: type[MessageT]) -> MessageT:
        """Return the next message that is not a confirmation."""
        while isinstance(message := self.receive(), Confirm):
            pass
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def confirmed(self, seq: int) -> None:
        """Read up to the confirmation of ``seq``; only confirmations may come before it."""
        while (confirm := self.expect(Confirm)).seq < seq:
            pass
        assert confirm.seq == seq

    def expect_end(self) -> None:
        """Wait until the task closes its side; confirmations may still come."""
        while True:
            if self._messages:
                assert isinstance(self.receive(), Confirm)
                continue
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                return
            if not data:
                return
            self._messages += self._decoder.messages(data)

    def event(self, seq: int, value: Any) -> EventMessage:
        return EventMessage(TASK_ID, seq, encode_event(value))

    def send_events(self, seq: int, *values: Any) -> None:
        """Send events with the numbers from ``seq`` on, and wait until they are in the mailbox."""
        self.send(*(self.event(number, value) for number, value in enumerate(values, seq)))
        self.confirmed(seq + len(values) - 1)

    def close_for(self, seq: int, checkpoint_id: int) -> None:
        """Begin a checkpoint: close the task's valve."""
        self.send(CloseForCheckpoint(TASK_ID, seq, checkpoint_id))
        assert self.next_item(ClosedForCheckpoint).checkpoint_id == checkpoint_id

    def answer(self, seq: int, request: RequestMessage, value: Any) -> None:
        """Answer a request, and wait until the answer is in the mailbox."""
        self.send(AnswerMessage(TASK_ID, seq, request.request_id, "", encode_event(value)))
        self.confirmed(seq)

    def finish(self) -> Finished:
        """Receive the task's completion message and confirm it; confirmations may come before it."""
        finished = self.next_item(Finished)
        self.send(Confirm(finished.task_attempt_id, finished.seq))
        return finished

    def close(self) -> None:
        self.sock.close()


class Peer:
    """A listening sidecar."""

    def __init__(self, keys: KeyRing = KEYS) -> None:
        self._keys = keys
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[PeerConnection] = []
        self._parts: tuple[OperatorPart, ...] = (OperatorPart(""),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def endpoint(self, **changes: Any) -> TaskEndpoint:
        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "key": KEYS.task_key("words"),
            "operator_id": "words",
            "parallelism": 4,
            "connect_timeout_s": PATIENCE_S,
            "register_timeout_s": PATIENCE_S,
            "send_timeout_s": PATIENCE_S,
            "finish_timeout_s": PATIENCE_S,
            "kill_wait_s": 0.0,  # kills are not needed here
        }
        return TaskEndpoint(**(fields | changes))

    def stop_listening(self) -> None:
        self._listener.close()

    def change_keys(self, keys: KeyRing) -> None:
        """Become another sidecar from now on."""
        self._keys = keys

    def accept_raw(self) -> socket.socket:
        sock, _ = self._listener.accept()
        sock.settimeout(PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def accept(self) -> PeerConnection:
        """Accept one connection and authenticate it. Raises the error of a failed handshake."""
        sock = self.accept_raw()
        try:
            handshake = ServerHandshake(partial(self._keys.key, Purpose.TASKS), os.urandom(32))
            while not handshake.done:
                data = sock.recv(65536)
                assert data, "the task closed the connection in the handshake"
                reply = handshake.receive(data)
                if reply:
                    sock.sendall(reply)
        except BaseException:
            sock.close()
            raise
        connection = PeerConnection(sock, handshake.trailing_data)
        self._connections.append(connection)
        return connection

    def register(self, **changes: Any) -> PeerConnection:
        """Accept, and answer the task's registration."""
        connection = self.accept()
        changes = {"parts": self._parts} | changes
        connection.send(registered(connection.expect(Register).task_attempt_id, **changes))
        return connection

    def take_task(self, **changes: Any) -> PeerConnection:
        """Accept, register, and receive the message that the operator is open."""
        connection = self.register(**changes)
        opened = connection.expect(Opened)
        connection.send(Confirm(opened.task_attempt_id, opened.seq))
        return connection

    def start(
        self,
        operator: AnOperator,
        records: Iterable[Any] = (),
        *,
        limit: int | None = None,
        parts: Mapping[str, Callable[[], SubtaskOperator]] | None = None,
        **changes: Any,
    ) -> RunningTask:
        """Start a task whose endpoint has these changes; nothing is accepted yet."""
        make_operator = operator if callable(operator) else lambda: operator
        self._parts = tuple(OperatorPart(name) for name in ("", *(parts or ())))
        return RunningTask(make_operator, self.endpoint(**changes), records, limit=limit, parts=parts)

    def run(
        self,
        operator: AnOperator,
        records: Iterable[Any] = (),
        *,
        limit: int | None = None,
        answer: dict[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[RunningTask, PeerConnection]:
        """Start a task and take it; ``answer`` holds changes of the answer to its registration."""
        return self.start(operator, records, limit=limit, **changes), self.take_task(**answer or {})

    def finish(self, task: RunningTask) -> list[Any]:
        """Let the task end well on the newest connection, and return its outputs."""
        self._connections[-1].finish()
        return task.outputs()

    def resume(self, received_seq: int) -> tuple[PeerConnection, Resume]:
        """Accept a connection that resumes; report that ``received_seq`` items had arrived here."""
        connection = self.accept()
        resume = connection.expect(Resume)
        connection.send(Resumed(resume.task_attempt_id, received_seq))
        return connection, resume


def registered(task_attempt_id: int = TASK_ID, **changes: Any) -> Registered:
    fields: dict[str, Any] = {
        "task_attempt_id": task_attempt_id,
        "attempt": 0,
        "checkpoint_id": -1,
        "states": (),
        "held": (),
        "reconnect_timeout_s": PATIENCE_S,
        "window_events": 1000,
        "window_bytes": 2**20,
        "events_sent": (),
        "token": TOKEN,
    }
    return Registered(**(fields | changes))


class RunningTask:
    """A task on a separate thread, with its outputs and its end; join it by ``outputs()`` or ``error()``."""

    def __init__(
        self,
        make_operator: Callable[[], SubtaskOperator],
        endpoint: TaskEndpoint,
        records: Iterable[Any] = (),
        *,
        task_attempt_id: int = TASK_ID,
        limit: int | None = None,
        parts: Mapping[str, Callable[[], SubtaskOperator]] | None = None,
        body: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        """``body`` replaces the task by any other function that runs on the thread and yields outputs."""
        self._end: queue.Queue[tuple[list[Any], BaseException | None]] = queue.Queue()
        identity = TaskIdentity(task_attempt_id=task_attempt_id, subtask=2, run_id=5, attempt_number=1)

        def run() -> None:
            outputs: list[Any] = []
            try:
                iterator = body() if body else run_subtask(make_operator, endpoint, identity, records, parts)
                for output in iterator:
                    outputs.append(output)
                    if len(outputs) == limit:
                        break
                iterator.close()  # type: ignore[attr-defined]
            except BaseException as error:
                self._end.put((outputs, error))
            else:
                self._end.put((outputs, None))

        self._thread = threading.Thread(target=run, name=f"task-{task_attempt_id}", daemon=True)
        self._thread.start()

    def outputs(self) -> list[Any]:
        outputs, error = self._join()
        if error is not None:
            raise error
        return outputs

    def error(self) -> BaseException:
        outputs, error = self._join()
        assert error is not None, f"the task ended well with {outputs}"
        return error

    def _join(self) -> tuple[list[Any], BaseException | None]:
        end = self._end.get(timeout=PATIENCE_S)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return end
