"""The driver's half of a sidecar that runs in a process of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import structlog

from protocol.restart import DEFAULT_RESTART, RestartStrategy
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.relay.janino import close_listener, open_listener
from spark_bridge.driver.actions import names_of
from spark_bridge.driver.environment import check_worker_python, driver_context
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.restarts import run_blocking
from spark_bridge.driver.runtime import complain_of_output
from spark_bridge.driver.shipping import ship_packages
from spark_bridge.errors import SidecarError, SidecarNotRunning
from spark_bridge.standalone.control_client import ControlAddress, SidecarUnreachable, ask
from spark_bridge.standalone.secret_file import read_secret
from spark_bridge.storage import StorageFenced
from spark_bridge.subtask.endpoint import TaskEndpoint

__all__ = ["AttachedSidecar"]

T = TypeVar("T")
log = structlog.get_logger("headgate.attached")

ANSWER_TIMEOUT_S = 150.0
"""For what is answered at once, or as soon as the sidecar's operators are started."""


class AttachedSidecar:
    """Gives this driver to a sidecar that runs elsewhere: ``with AttachedSidecar(spark, "host:port", ...) as sidecar``.

    Its operators are those of the sidecar's factory; ``operator(name).subtask(...)`` is what ``mapPartitions`` and its
    kin take. A sidecar that dies is looked for by tasks and driver, and goes on when it is started again. Thread-safe.

    ``secret_file``: as given to the sidecar. ``connect_timeout_s``: how long each question waits for a sidecar that is
    not there, in seconds. Raises as ``driver_context`` does for ``spark``, and ``ValueError`` for an address that is
    none.
    """

    def __init__(
        self, spark: Any, address: str, *, secret_file: str | os.PathLike[str], connect_timeout_s: float = 60.0
    ) -> None:
        self._context = driver_context(spark)
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ValueError(f"invalid sidecar address {address!r}: expected HOST:PORT, for example 127.0.0.1:7650")
        self._address = ControlAddress(host, int(port), read_secret(secret_file))
        self._connect_timeout_s = connect_timeout_s
        self._listener: Any = None
        self._operators: dict[str, OperatorHandle] = {}

    def __enter__(self) -> AttachedSidecar:
        """Raises ``SidecarUnreachable``, ``SidecarError`` for workers that cannot run a subtask, ``RelayError``."""
        if self._listener is not None:
            raise SidecarError("this driver is attached already: leave it first")
        check_worker_python(self._context)
        place = self._ask("attach")
        ship_packages(self._context)
        address = self._address
        self._listener = open_listener(self._context, address.host, place["relay_port"], address.secret, patient=True)
        try:
            self._listener.attach()
            for operator_id, endpoint in self._ask("operators").items():
                self._operators[operator_id] = self._handle(endpoint)
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises ``OutputNotCommitted`` where no other exception is on its way."""
        try:
            if why := self._uncommitted(exception):
                complain_of_output(why, exception)
        finally:
            self._detach()

    def _uncommitted(self, exception: BaseException | None) -> str:
        if all(handle.endpoint.mode is RestoreMode.BATCH for handle in self._operators.values()):
            return ""
        if exception is not None and not isinstance(exception, Exception):
            return ""  # a Ctrl-C is not held up
        try:
            why: str = self._ask("uncommitted", connect_timeout_s=None if exception is None else 0.0)
        except SidecarError as error:  # it died, or was never there: a job that needed it has failed
            log.warning("detached, whether the last output is committed is not known", error=str(error))
            return ""
        return why

    def _detach(self) -> None:
        listener, self._listener = self._listener, None
        self._operators.clear()
        if listener is not None:
            close_listener(listener)

    # --- what a driver does with it -------------------------------------------------------------------------------

    @property
    def operator_ids(self) -> list[str]:
        """The operators that the sidecar coordinates."""
        self._require_attached()
        return sorted(self._operators)

    def operator(self, operator_id: str) -> OperatorHandle:
        """Raises ``SidecarError`` for one that the sidecar does not coordinate."""
        self._require_attached()
        handle = self._operators.get(operator_id)
        if handle is None:
            known = ", ".join(map(repr, sorted(self._operators))) or "none"
            raise SidecarError(f"operator {operator_id!r} is not coordinated by this sidecar; there is {known}")
        return handle

    def checkpoint(self, operator_id: str | None = None, *, timeout_s: float = 60.0) -> int:
        """See ``Sidecar.checkpoint``. Raises ``SidecarUnreachable`` when it is not known whether it completed."""
        self._require_attached()
        checkpoint_id: int = self._ask("checkpoint", [operator_id, timeout_s], timeout_s=timeout_s + ANSWER_TIMEOUT_S)
        return checkpoint_id

    def savepoint(self, operator_id: str | None = None, *, directory: str, timeout_s: float = 60.0) -> int:
        """See ``Sidecar.savepoint``; the directory is the sidecar's."""
        self._require_attached()
        argument = [operator_id, directory, timeout_s]
        checkpoint_id: int = self._ask("savepoint", argument, timeout_s=timeout_s + ANSWER_TIMEOUT_S)
        return checkpoint_id

    def request(self, operator_id: str, payload: Any, *, timeout_s: float = 30.0) -> Any:
        """See ``Sidecar.request``. ``payload`` and answer are plain values, as in events."""
        self._require_attached()
        return self._ask("request", [operator_id, payload, timeout_s], timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def run(
        self,
        action: Callable[[], T],
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        operators: Collection[OperatorHandle | str] | None = None,
    ) -> T:
        """See ``Sidecar.run``. A job that failed while its sidecar died, or because it did, is run again too."""
        operator_ids = names_of(operators)
        for operator_id in sorted(operator_ids or ()):
            self.operator(operator_id)
        self._require_attached()
        runs = _RunsElsewhere(self._ask, operator_ids)

        def blaming_a_restart() -> T:
            try:
                return action()
            except Exception:
                runs.blame_a_restart()
                raise

        return run_blocking(runs, restart, blaming_a_restart, self._context)

    def _require_attached(self) -> None:
        if self._listener is None:
            raise SidecarNotRunning("this driver is not attached: enter `with AttachedSidecar(...) as sidecar:`")

    def _handle(self, told: dict[str, Any]) -> OperatorHandle:
        endpoint = TaskEndpoint(
            told["host"],
            told["port"],
            self._address.secret,
            told["operator_id"],
            told["parallelism"],
            RestoreMode(told["mode"]),
            connect_timeout_s=told["connect_timeout_s"],
            register_timeout_s=told["register_timeout_s"],
            ready_timeout_s=told["ready_timeout_s"],
        )
        name = endpoint.operator_id
        return OperatorHandle(endpoint, partial(self._ask, "statistics", name), partial(self._failure_of, name))

    def _failure_of(self, operator_id: str) -> BaseException | None:
        text = self._ask("failure", operator_id)
        return None if text is None else SidecarError(text)

    def _ask(
        self,
        method: str,
        argument: Any = None,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        connect_timeout_s: float | None = None,
    ) -> Any:
        patience_s = self._connect_timeout_s if connect_timeout_s is None else connect_timeout_s
        return ask(self._address, method, argument, timeout_s=timeout_s, connect_timeout_s=patience_s)


class _RunsElsewhere:
    """What the restarter of one call of ``run`` asks of the sidecar, over as many lives of it as there are.

    The count of failures goes on where the life before ended.
    """

    def __init__(self, ask: Callable[..., Any], operator_ids: frozenset[str] | None) -> None:
        self._ask = ask
        self._operator_ids = None if operator_ids is None else sorted(operator_ids)
        self._action_id = ""
        self._instance = ""
        self._earlier = 0  # failures of the lives before
        self._latest = 0  # of this one

    def begin(self) -> str:
        """The action is about to be called, for the first time or again; returns the id of this call."""
        self.end()
        self._action_id = secrets.token_hex(8)
        self._instance = self._ask_again("begin", self._action)
        self._earlier = self._latest = 0
        return self._action_id

    def end(self) -> None:
        """Nothing more is asked about it. Idempotent."""
        if self._action_id:
            with suppress(SidecarError):  # a sidecar that is away, or was started again, knows nothing of it
                self._ask("end", self._action_id, connect_timeout_s=0.0)
            self._action_id = ""

    @property
    def _action(self) -> list[Any]:
        return [self._action_id, self._operator_ids]

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        told = self._ask_again("failures", self._action)
        if told["instance"] != self._instance:
            self._instance, self._earlier = told["instance"], self._earlier + self._latest
        self._latest = told["count"]
        cause = told["cause"]
        return self._earlier + self._latest, None if cause is None else SidecarError(cause)

    @property
    def fenced(self) -> Exception | None:
        text = self._ask_again("failures", self._action)["fenced"]
        return None if text is None else StorageFenced(text)

    def blame_a_restart(self) -> None:
        """An action has failed: if the sidecar is another one than before, that is reason enough."""
        before = self._instance
        _ = self.failures
        self._earlier += before != self._instance

    async def settle(self) -> str:
        uncommitted: str = self._ask_again("settle", self._action)
        return uncommitted

    def _ask_again(self, method: str, argument: Any) -> Any:
        """These questions may be asked twice, so one whose answer was cut off is asked once more."""
        try:
            return self._ask(method, argument)
        except SidecarUnreachable:
            return self._ask(method, argument)
