# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a sidecar that runs in a separate process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from actors.coordination.host.traces import current_traceparent
from actors.logs import get_logger
from protocol.arguments import ACTION, WAIT, checked
from protocol.errors import EventEncodeError, NoRestart
from protocol.restart import DEFAULT_RESTART, RestartStrategy
from protocol.wire.codec import encode_argument
from protocol.wire.keys import IDENTITY_BYTES, NO_IDENTITY, Key, KeyRing, Purpose
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.relay.jvm_relay import close_listener, open_listener
from spark_bridge.common.addresses import ADDRESS, parse_address
from spark_bridge.common.certificates import TlsCertificate, certificate_digest
from spark_bridge.common.control import CONTROL_LIMITS
from spark_bridge.common.endpoint import StateStorage, TaskEndpoint
from spark_bridge.common.errors import ServerLost, SidecarError, SidecarNotRunning
from spark_bridge.driver.actions import ActionIds, ActionMarks, names_of
from spark_bridge.driver.environment import SPARK, check_worker_python, driver_context, is_remote
from spark_bridge.driver.handle import OperatorHandle, StaysOnDriver
from spark_bridge.driver.interrupts import holding_interrupts, interrupts_held_back
from spark_bridge.driver.loop import refuse_await
from spark_bridge.driver.restarts import run_blocking
from spark_bridge.driver.runtime import complain_of_output
from spark_bridge.driver.shipping import ship_packages
from spark_bridge.observability.diagnosis import WAITING_S, explain
from spark_bridge.observability.html import WITHIN_S, sidecar_html
from spark_bridge.observability.status import SidecarStatus
from spark_bridge.primitives.elsewhere import task_parts_of
from spark_bridge.standalone.control_client import ControlAddress, SidecarUnreachable, ask
from spark_bridge.standalone.driver_end import ANSWER_TIMEOUT_S, DriverEnd, SidecarElsewhere
from spark_bridge.standalone.secret_file import read_secret
from spark_bridge.standalone.status_bytes import unpack_status
from spark_bridge.storage import StorageFenced
from spark_bridge.subtask.errors import BudgetExhausted

__all__ = ["AttachedSidecar"]

T = TypeVar("T")
log = get_logger("headgate.attached")

PART_FACTORIES = ("shared", "permits", "budget", "work_queue", "group", "cache", "budget")
IN_THE_FACTORY = ("coordinate", "release", "source", "for_each_batch")
"""What ``Sidecar`` has and this class has not: the first make parts, the others coordinate operators."""


class AttachedSidecar(StaysOnDriver):
    """Attaches this driver to a sidecar in another process: ``with AttachedSidecar(spark, "host:port", ...) as s:``.

    Its operators are those of the sidecar's factory, and so are the ready-made parts that these use.
    ``operator(name).subtask(...)`` makes the function for ``mapPartitions`` and similar functions, and
    ``operator(name).part(...)`` gives that function a part. If the sidecar dies, tasks and driver look for it and
    continue when it has been restarted. Thread-safe; every method blocks the calling thread.

    ``spark`` is a SparkSession, classic or of Spark Connect, or a SparkContext, and ``address`` is ``"host:port"`` of
    the sidecar. With Spark Connect, the sidecar runs where the server and its executors reach it, and only this client
    connects to ``address``; ``relay_installed`` says that the server's operator has installed the relay, and that its
    file of secrets has that of the sidecar.

    ``secret_file`` is the file that was given to the sidecar, or a copy. ``tls`` is that of the sidecar's
    ``SidecarConfig``. ``connect_timeout_s`` is how long each request waits for a sidecar that cannot be reached, in
    seconds.

    Raises ``ValueError`` for an invalid address, ``SidecarError`` if the secret cannot be read, ``TypeError`` for an
    object that is not a session, and ``RelayError`` for a stopped context. Entering raises ``SidecarUnreachable``,
    ``RelayError``, ``ConnectRefused`` as for ``Sidecar``, and ``SidecarError`` if the workers' Python cannot run a
    task. ``run`` raises ``ServerLost`` if the Spark Connect server, or the session there, is gone. Leaving
    raises ``OutputNotCommitted`` as ``Sidecar`` does; the coordinators stay in the sidecar's process, which ends them
    when the application ends. Outside the block, every method raises ``SidecarNotRunning``.
    """

    @checked(spark=SPARK, address=ADDRESS)
    def __init__(
        self,
        spark: Any,
        address: str,
        *,
        secret_file: str | os.PathLike[str],
        tls: bool | TlsCertificate = False,
        connect_timeout_s: float = 60.0,
        relay_installed: bool = False,
    ) -> None:
        context = None if is_remote(spark) else driver_context(spark)
        self._spark = spark if context is None else context
        host, port = parse_address(address)
        secret = read_secret(secret_file)
        self._end: DriverEnd
        if context is not None:
            self._end = _DriverHere(context)
        else:
            from spark_bridge.connect.driver import AttachedSession

            self._end = AttachedSession(spark, secret if relay_installed else None)
        self._keys = KeyRing(secret)
        self._address = ControlAddress(host, port, self._keys, certificate_digest(tls, self._keys))
        self._connect_timeout_s = connect_timeout_s
        self._attached = False
        self._driver = NO_IDENTITY  # names one `with` block to the sidecar
        self._operators: dict[str, OperatorHandle] = {}

    def __enter__(self) -> AttachedSidecar:
        if self._attached:
            raise SidecarError("this driver is already attached: exit its `with` block first")
        self._end.check()
        self._driver = secrets.token_bytes(IDENTITY_BYTES)
        try:
            self._attached = True  # as far as is known: the answer may get lost
            place = self._ask("attach", self._end.lease_s)
            key = self._keys.key(Purpose.RELAY, self._driver)
            self._end.open(
                {"at": self._address.host, **place},
                key,
                self._address.certificate_sha256,
                SidecarElsewhere(self._ask, self._end.lease_s),
            )
            for operator_id, endpoint in self._ask("operators").items():
                self._operators[operator_id] = self._handle(endpoint)
            self._end.equip([handle.endpoint for handle in self._operators.values()])
            return self
        except BaseException:
            self._detach()
            raise

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises ``OutputNotCommitted`` unless another exception is being raised."""
        try:
            if why := self._uncommitted(exception):
                complain_of_output(why, exception)
        finally:
            try:
                self._detach()
            except KeyboardInterrupt:
                self._detach()
                raise

    def _uncommitted(self, exception: BaseException | None) -> str:
        if all(handle.endpoint.mode is RestoreMode.BATCH for handle in self._operators.values()):
            return ""
        if self._end.lost is not None:
            return ""  # that error says more
        if exception is not None and not isinstance(exception, Exception):
            return ""  # do not delay a Ctrl-C
        try:
            why: str = self._ask("uncommitted", connect_timeout_s=None if exception is None else 0.0)
        except SidecarError as error:  # the sidecar is gone: a job that needed it has failed
            log.warning("driver detached, output commit unknown", error=str(error))
            return ""
        return why

    def _detach(self) -> None:
        """Detach if that has not been done. It may be repeated."""
        if not self._attached:
            return
        self._end.close()
        with suppress(SidecarError):  # it is gone, or gives up on this driver by itself
            self._ask("detach", connect_timeout_s=0.0)
        self._operators.clear()
        self._attached = False

    # --- for the driver's code ------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # a type checker knows that there are no such methods

        def __getattr__(self, name: str) -> Any:
            """Say where the methods of ``Sidecar`` are that this class does not have."""
            if name in PART_FACTORIES:
                raise AttributeError(
                    f"AttachedSidecar has no {name}(): the coordinator of a part is in the sidecar's process. Make the "
                    f"part there, in the factory, with sidecar.{name}(NAME, ...), give it to an operator with "
                    "uses=[part], and get it here with sidecar.operator(OPERATOR).part(NAME)"
                )
            if name in IN_THE_FACTORY:
                raise AttributeError(
                    f"AttachedSidecar has no {name}(): its operators are those that the factory coordinates in the "
                    "sidecar's process. Get one with sidecar.operator(OPERATOR), or use Sidecar, which runs in this "
                    "process"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def operator_ids(self) -> list[str]:
        """The names of the operators that the sidecar coordinates, sorted."""
        self._require_attached()
        return sorted(self._operators)

    @checked()
    def operator(self, operator_id: str) -> OperatorHandle:
        """The handle of an operator. Raises ``SidecarError`` for one that the sidecar does not coordinate."""
        self._require_attached()
        handle = self._operators.get(operator_id)
        if handle is None:
            known = ", ".join(map(repr, sorted(self._operators))) or "none"
            raise SidecarError(f"operator {operator_id!r} is not coordinated by this sidecar; there is {known}")
        return handle

    @checked()
    def checkpoint(self, operator_id: str | None = None, *, timeout_s: float = 60.0) -> int:
        """See ``Sidecar.checkpoint``. Raises ``SidecarUnreachable`` if it is not known whether it completed."""
        self._require_attached()
        checkpoint_id: int = self._ask("checkpoint", [operator_id, timeout_s], timeout_s=timeout_s + ANSWER_TIMEOUT_S)
        return checkpoint_id

    @checked()
    def savepoint(self, operator_id: str | None = None, *, directory: str, timeout_s: float = 60.0) -> str:
        """See ``Sidecar.savepoint``. The sidecar's process writes into ``directory``, a path or URL there."""
        self._require_attached()
        argument = [operator_id, directory, timeout_s]
        file: str = self._ask("savepoint", argument, timeout_s=timeout_s + ANSWER_TIMEOUT_S)
        return file

    @checked()
    def request(self, operator_id: str, payload: Any, *, part: str | None = None, timeout_s: float = 30.0) -> Any:
        """See ``Sidecar.request``. Payload and result must be plain values, as in events, of at most 4 MiB each.

        Raises ``EventEncodeError`` for a payload that is larger, or that is not a plain value.
        """
        self._require_attached()
        try:
            encode_argument("payload", payload, CONTROL_LIMITS)
        except EventEncodeError as error:
            raise EventEncodeError(
                f"the payload of a request to operator {operator_id!r} cannot be sent to the sidecar's process: {error}"
            ) from None
        argument = [operator_id, payload, timeout_s, part, current_traceparent()]
        return self._ask("request", argument, timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def status(self) -> SidecarStatus:
        """See ``Sidecar.status``. Attempts above 20,000, or that do not fit, are in ``attempts_left_out``."""
        self._require_attached()
        return unpack_status(self._ask("status"))

    @checked(waiting_s=WAIT)
    def explain(self, *, waiting_s: float = WAITING_S) -> tuple[str, ...]:
        """See ``Sidecar.explain``."""
        return explain(self.status(), waiting_s=waiting_s)

    def _repr_html_(self) -> str:
        """What a notebook shows: the status and the diagnosis, or why there is none within a second."""

        def read() -> tuple[SidecarStatus, tuple[str, ...]]:
            self._require_attached()
            status = unpack_status(self._ask("status", connect_timeout_s=0.0, timeout_s=WITHIN_S))
            return status, explain(status)

        return sidecar_html(read)

    @checked(action=ACTION)
    def run(
        self,
        action: Callable[[], T],
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        operators: Collection[OperatorHandle | str] | None = None,
        input_id: str | None = None,
    ) -> T:
        """See ``Sidecar.run``. A job that failed while the sidecar was restarted, or because of that, is also rerun."""
        operator_ids = names_of(operators)
        for operator_id in sorted(operator_ids or ()):
            self.operator(operator_id)
        self._require_attached()
        runs, end = _RunsElsewhere(self._ask, operator_ids, input_id), self._end

        def stop(action_id: str, cause: str) -> None:
            if end.lost is None:
                self._ask("stop", [action_id, cause], connect_timeout_s=0.0)

        def noticing_restarts() -> T:
            try:
                return action()
            except Exception as error:
                if end.lost is not None:
                    raise _NotAgain from error
                runs.count_restart_as_failure()
                raise

        try:
            return run_blocking(runs, restart, noticing_restarts, end.marked, stop)
        except _NotAgain as passed_on:
            assert end.lost is not None
            raise end.lost from passed_on.__cause__

    def _require_attached(self) -> None:
        if not self._attached:
            raise SidecarNotRunning("this driver is not attached: enter `with AttachedSidecar(...) as sidecar:`")
        refuse_await("or call it on another thread, with `await asyncio.to_thread(...)`")

    def _handle(self, description: dict[str, Any]) -> OperatorHandle:
        mode = RestoreMode(description["mode"])
        name = description["operator_id"]
        stages = tuple(description["stages"])
        states = description["state_storage"]
        endpoint = TaskEndpoint(
            **{
                key: value
                for key, value in description.items()
                if key not in ("mode", "stages", "parts", "state_storage")
            },
            mode=mode,
            state_storage=states and StateStorage(options=None, **states),
            key=self._keys.task_key(name),
            certificate_sha256=self._address.certificate_sha256,
        )
        statistics, failure = partial(self._ask, "statistics", name), partial(self._failure_of, name)
        parts = task_parts_of(description["parts"])
        return OperatorHandle(
            endpoint, statistics, failure, task_parts=parts, stages=stages, run=self.run, spark=self._spark
        )

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
        with holding_interrupts() as interrupts, interrupts.let_through():  # which ends the request there, too
            return ask(self._address, self._driver, method, argument, timeout_s=timeout_s, connect_timeout_s=patience_s)


class _DriverHere:
    """A driver in this process. ``context`` is a SparkContext."""

    lease_s: float | None = None
    lost: ServerLost | None = None

    def __init__(self, context: Any) -> None:
        self._context = context
        self._listener: Any = None

    def check(self) -> None:
        check_worker_python(self._context)

    def open(self, place: Mapping[str, Any], key: Key, certificate_sha256: bytes, sidecar: SidecarElsewhere) -> None:
        ship_packages(self._context)
        at, port = place["at"], place["relay_port"]
        with interrupts_held_back():  # otherwise the listener might never be told to end
            self._listener = open_listener(self._context, at, port, key, certificate_sha256, patient=True)
        self._listener.attach()

    def equip(self, endpoints: list[TaskEndpoint]) -> None:
        """Spark itself sees to it that executors reach the driver."""

    def close(self) -> None:
        if self._listener is not None:
            close_listener(self._listener)
            self._listener = None

    def marked(self, action_id: str) -> AbstractContextManager[None]:
        return ActionMarks(self._context).marked(action_id)


class _NotAgain(BaseException):
    """The driver is lost, so the action is not called again: no handler for exceptions is to take this for one."""


class _RunsElsewhere:
    """The runs of one call of ``run``, asked of the sidecar's process, which may be restarted in the meantime.

    The count of failures continues over restarts. All methods block.
    """

    def __init__(
        self, ask: Callable[..., Any], operator_ids: frozenset[str] | None, input_id: str | None = None
    ) -> None:
        self._ask = ask
        self._ids = ActionIds(input_id)
        self._operator_ids = None if operator_ids is None else sorted(operator_ids)
        self._action_id = ""
        self._instance = ""
        self._earlier = 0  # failures that earlier processes have counted
        self._latest = 0  # failures that this one has counted

    def begin(self) -> str:
        self.end()
        self._action_id = self._ids.next()
        self._instance = self._ask_again("begin", self._action)
        self._earlier = self._latest = 0
        return self._action_id

    def end(self) -> None:
        if self._action_id:
            with suppress(SidecarError):  # a sidecar that is gone or was restarted does not know the action
                try:
                    self._ask("end", self._action_id, connect_timeout_s=0.0)
                except KeyboardInterrupt:
                    self._ask("end", self._action_id, connect_timeout_s=0.0)
                    raise
            self._action_id = ""

    @property
    def _action(self) -> list[Any]:
        return [self._action_id, self._operator_ids]

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        answer = self._ask_again("failures", self._action)
        if answer["instance"] != self._instance:
            self._instance, self._earlier = answer["instance"], self._earlier + self._latest
        self._latest = answer["count"]
        cause, final = answer["cause"], answer["final"]
        make = SidecarError if not final else BudgetExhausted if final == BudgetExhausted.__name__ else NoRestart
        return self._earlier + self._latest, None if cause is None else make(cause)

    @property
    def rescaled(self) -> int | None:
        return None  # that is refused there

    @property
    def fenced(self) -> Exception | None:
        fenced = self._ask_again("failures", self._action)["fenced"]
        if fenced is None:
            return None
        by_storage, text = fenced
        return StorageFenced(text) if by_storage else SidecarError(text)

    @property
    def ran(self) -> bool:
        return bool(self._ask_again("failures", self._action)["ran"])

    def count_restart_as_failure(self) -> None:
        """The action has failed. If the sidecar was restarted in the meantime, count that as a failure."""
        before = self._instance
        _ = self.failures
        self._earlier += before != self._instance

    async def settle(self) -> str:
        uncommitted: str = self._ask_again("settle", self._action)
        return uncommitted

    def _ask_again(self, method: str, argument: Any) -> Any:
        """Ask, and once more if the answer was cut off: these requests may be repeated."""
        try:
            return self._ask(method, argument)
        except SidecarUnreachable:
            return self._ask(method, argument)
