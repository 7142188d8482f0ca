# SPDX-License-Identifier: Apache-2.0

"""The calls of a tunnel: what a Spark Connect session can say to the server's JVM, and hear from it. They block.

``TunnelFunction.java`` is the other end. Up, small packets are values of a setting that the server reads, and large
ones are rows of a local relation, in a plan that is only analysed. Down, one call lasts, and its responses bring the
packets. This uses the client's stub, which has no public name. ``PublicCalls`` does the same with what PySpark's users
have, and takes 20 ms longer.
"""

from __future__ import annotations

import base64
import secrets
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any

from actors.logs import get_logger
from protocol.describing import type_name
from spark_bridge.common.errors import ConnectRefused

__all__ = ["SMALL_BYTES_MAX", "PublicCalls", "StubCalls", "TunnelCalls", "TunnelClosed", "calls_of"]

log = get_logger("headgate.connect")

NAME_BYTES = 16
KEY_BYTES = 16
_OPEN, _PUSH, _POLL, _UP, _CLOSE = range(5)
_NUMBER = Struct(">q")
_SETTING = "spark.headgate.tunnel."
SMALL_BYTES_MAX = 48 * 1024
"""A larger packet goes up in a plan: a setting is a text, in base 64, which Spark searches for passwords."""
_CALL_TIMEOUT_S = 20.0
_OVER = ("this tunnel is closed", "the tunnel is closed", "INVALID_HANDLE", "NO_ACTIVE_SESSION", "closed channel")
"""What an error says if no later call can succeed."""
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "OPERATION_CANCELED")
_SCHEMA = '{"type":"struct","fields":[{"name":"c","type":"binary","nullable":true,"metadata":{}}]}'


class TunnelClosed(Exception):
    """The server has closed the tunnel, or has ended, or the session there has. The text says which."""


class TunnelCalls(ABC):
    """The calls of one tunnel. ``function`` is the name under which the session has the tunnel's function.

    ``up`` is called on several threads, ``down`` on one. Both raise ``TunnelClosed``, or another error for a call that
    may succeed the next time.
    """

    def __init__(self, session: Any, function: str) -> None:
        self._session = session
        self._function = function
        self._name = secrets.token_bytes(NAME_BYTES)
        self._key = b""
        self.stopped = False

    def open(self, lease_s: float, doors: int) -> tuple[str, list[int]]:
        """Have the server listen; returns the host and the ports that tasks connect to. Raises ``ConnectRefused``."""
        argument = bytes([_OPEN]) + self._name + _NUMBER.pack(int(lease_s * 1000)) + bytes([doors])
        words = self._execute(argument).decode().split(" ")
        if len(words) != doors + 2:
            raise ConnectRefused(_why_not_opened(words))
        host, *ports, key = words
        self._key = bytes.fromhex(key)
        return host, [int(port) for port in ports]

    @abstractmethod
    def up(self, packet: bytes) -> None:
        """Bring a packet to the server."""

    @abstractmethod
    def down(self, pause_s: float, acknowledged: int, take: Callable[[bytes], None]) -> None:
        """Take the packets of the server, beginning with the one after ``acknowledged``, until that breaks off.

        There is one at least in each ``pause_s``.
        """

    def interrupt(self) -> None:
        """Have ``down`` return. Any thread."""
        return

    def close(self) -> None:
        """Have the server close the tunnel, if it can be reached."""
        self.stopped = True
        with suppress(Exception):
            self._execute(bytes([_CLOSE]) + self._name)
        self.interrupt()
        with suppress(Exception):
            self._session.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {self._function}")

    @abstractmethod
    def _execute(self, argument: bytes) -> bytes:
        """The result of the function on the server's driver."""

    def _poll(self, pause_s: float, acknowledged: int) -> bytes:
        pause = _NUMBER.pack(int(pause_s * 1000))
        return self._execute(bytes([_POLL]) + self._name + pause + _NUMBER.pack(acknowledged))


class PublicCalls(TunnelCalls):
    """With public functions of PySpark only."""

    def up(self, packet: bytes) -> None:
        """See ``TunnelCalls``."""
        with _closed_if_over():
            self._frame(bytes([_UP]) + self._key + packet).inputFiles()

    def down(self, pause_s: float, acknowledged: int, take: Callable[[bytes], None]) -> None:
        """See ``TunnelCalls``. One packet only."""
        with _closed_if_over():
            packet = self._poll(pause_s, acknowledged)
        if packet:
            take(packet)

    def _execute(self, argument: bytes) -> bytes:
        return bytes(self._frame(argument).collect()[0][0])

    def _frame(self, argument: bytes) -> Any:
        return self._session.createDataFrame([(argument,)], "c binary").selectExpr(f"{self._function}(c)")


class StubCalls(PublicCalls):
    """With the stub of PySpark's client. Raises ``AttributeError`` for a client that has none."""

    def __init__(self, session: Any, function: str) -> None:
        import pyspark.sql.connect.proto as messages

        super().__init__(session, function)
        self._messages = messages
        self._client = session.client
        self._stub = self._client._stub
        self._metadata = self._client._builder.metadata
        self._user = self._client._user_id or ""
        self._lock = threading.Lock()
        self._push: Any = None
        self._polls = False

    def up(self, packet: bytes) -> None:
        """See ``TunnelCalls``."""
        with _closed_if_over():
            if len(packet) > SMALL_BYTES_MAX:
                request = self._of_session(self._messages.AnalyzePlanRequest())
                request.input_files.plan.CopyFrom(self._plan(bytes([_UP]) + self._key + packet))
                self._stub.AnalyzePlan(request, metadata=self._meta(), timeout=_CALL_TIMEOUT_S)
                return
            setting = self._of_session(self._messages.ConfigRequest())
            pair = setting.operation.get_with_default.pairs.add()
            pair.key, pair.value = _SETTING + self._key.hex(), base64.b64encode(packet).decode()
            self._stub.Config(setting, metadata=self._meta(), timeout=_CALL_TIMEOUT_S)

    def down(self, pause_s: float, acknowledged: int, take: Callable[[bytes], None]) -> None:
        """See ``TunnelCalls``. If the server's release has no such calls, packets are asked for one at a time."""
        if self._polls:
            super().down(pause_s, acknowledged, take)
            return
        came = False
        try:
            with _closed_if_over():
                for packet in self._responses(pause_s, acknowledged):
                    came = True
                    take(packet)
        except TunnelClosed:
            raise
        except Exception as error:
            if came or self.stopped or any(sign in _text(error) for sign in _PASSING):
                raise
            log.warning("tunnel without responses, packets are polled", error=_text(error))
            self._polls = True

    def interrupt(self) -> None:
        """See ``TunnelCalls``."""
        with self._lock:
            if self._push is not None:
                self._push.cancel()

    def _responses(self, pause_s: float, acknowledged: int) -> Iterator[bytes]:
        operation = str(uuid.uuid4())
        argument = bytes([_PUSH]) + self._name + _NUMBER.pack(int(pause_s * 1000)) + _NUMBER.pack(acknowledged)
        # Not reattachable: Spark ends such responses every two minutes, without a word.
        push = self._stub.ExecutePlan(self._execution(argument + operation.encode(), operation), metadata=self._meta())
        with self._lock:
            if self.stopped:
                push.cancel()
            self._push = push
        for response in push:
            if response.HasField("extension"):
                yield response.extension.value

    def _execute(self, argument: bytes) -> bytes:
        import pyarrow

        execution = self._execution(argument, str(uuid.uuid4()))
        result = b""
        for response in self._stub.ExecutePlan(execution, metadata=self._meta(), timeout=2 * _CALL_TIMEOUT_S):
            if response.HasField("arrow_batch"):
                with pyarrow.ipc.open_stream(response.arrow_batch.data) as batches:
                    for batch in batches:
                        result = batch.column(0)[0].as_py()
        return result

    def _meta(self) -> Any:
        return self._metadata()

    def _of_session(self, request: Any) -> Any:
        request.session_id, request.client_type = self._session.session_id, "headgate"
        request.user_context.user_id = self._user
        return request

    def _execution(self, argument: bytes, operation: str) -> Any:
        request = self._of_session(self._messages.ExecutePlanRequest(operation_id=operation))
        request.plan.CopyFrom(self._plan(argument))
        return request

    def _plan(self, argument: bytes) -> Any:
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        batch = pyarrow.record_batch({"c": pyarrow.array([argument], pyarrow.binary())})
        with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        plan = self._messages.Plan()
        relation = plan.root.project.input.local_relation
        relation.data, relation.schema = sink.getvalue().to_pybytes(), _SCHEMA
        function = plan.root.project.expressions.add().unresolved_function
        function.function_name = self._function
        function.arguments.add().unresolved_attribute.unparsed_identifier = "c"
        return plan


def calls_of(session: Any, function: str) -> TunnelCalls:
    """The quickest calls that this release of PySpark has."""
    try:
        return StubCalls(session, function)
    except AttributeError as error:
        log.warning("tunnel with public calls only", error=str(error))
        return PublicCalls(session, function)


@contextmanager
def _closed_if_over() -> Iterator[None]:
    """Raise ``TunnelClosed`` in place of an error that says that no later call can succeed."""
    try:
        yield
    except Exception as error:
        text = _text(error)
        if any(sign in text for sign in _OVER):
            raise TunnelClosed(text) from error
        raise


def _text(error: BaseException) -> str:
    """What an error of gRPC or of PySpark says, in one line."""
    details = getattr(error, "details", None)
    code = getattr(error, "code", None)
    text = f"{code()}: {details()}" if callable(details) and callable(code) else str(error)
    return " ".join(text.split())[:500] or type_name(error)


def _why_not_opened(words: list[str]) -> str:
    if words == ["elsewhere"]:
        return (
            "the server evaluated the tunnel's function in a task, not on its driver: remove ConvertToLocalRelation "
            "from spark.sql.optimizer.excludedRules"
        )
    if words == ["sessionless"]:
        return (
            "spark.job.tags is set in this session: then Spark does not say whose its jobs are; unset it with "
            "session.conf.unset('spark.job.tags')"
        )
    if words == ["full"]:
        return "this session has too many tunnels: leave sidecars that are not needed, or make a new session"
    return f"unexpected answer of the tunnel on the server: {' '.join(words)[:200]!r}. Restart the session"
