# SPDX-License-Identifier: Apache-2.0

"""The sidecar's process: waits for a driver, takes over its running jobs, serves it, and waits for the next one."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import anyio

from actors import ActorError
from actors.coordination.host.traces import inside_span
from actors.exits import contained
from actors.logs import get_logger
from actors.threads import DRIVER
from protocol.describing import describe, is_a, name_of, show, text_of, type_name
from protocol.errors import NoRestart, RunRefused
from protocol.wire.keys import KeyRing
from spark_bridge.bridge.relay import RelayError
from spark_bridge.bridge.relay.awaited import AwaitedRelay
from spark_bridge.bridge.runs import ActiveStage
from spark_bridge.common.certificates import encryption
from spark_bridge.common.errors import OutputNotCommitted, SidecarError, SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.spark_driver import RemoteDriver
from spark_bridge.server.server import ServerConfig
from spark_bridge.standalone.control_server import CONNECTIONS_MAX, serve_control
from spark_bridge.standalone.status_bytes import pack_status
from spark_bridge.storage import StorageFenced

__all__ = ["Factory", "Ports", "SidecarProcess"]

log = get_logger("headgate.process")

Factory = Callable[[SidecarRuntime], Awaitable[None]]
"""Coordinates the operators of one application, with ``await sidecar.coordinate(...)`` for each."""

READY_TIMEOUT_S = 120.0
RESERVED_S = 10.0
"""For so long after it has attached, a driver is waited for whose JVM has not joined yet, if another one comes."""
RENEWAL_S = 5.0
TELL_TIMEOUT_S = 5.0
"""For so long a driver that could not be served may ask why, before another one is served or the process ends."""
TOLD_MAX = 64


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports on which the process listens for drivers' requests, for a driver's JVM, and for tasks.

    Port 0 chooses a free port. A restarted sidecar would then have another one.
    """

    control: int
    relay: int
    tasks: int


class SidecarProcess:
    """Serves one application after the other.

    A driver that has been away for ``lost_after_s`` seconds is given up. ``resume`` says whether runs that an earlier
    sidecar has left behind may continue; otherwise they fail.

    Whatever a driver does, and at whatever moment it ends or freezes, the process then waits for the next one. So it
    does after a driver whose operators cannot be started, which is told the cause.

    Reads the files that ``config.tls`` names, so it may block. Raises ``SidecarError`` if they cannot be used.
    """

    def __init__(
        self,
        factory: Factory,
        config: SidecarConfig,
        keys: KeyRing,
        host: str,
        ports: Ports,
        *,
        resume: bool = True,
        lost_after_s: float = 60.0,
    ) -> None:
        self._factory = factory
        limits = config.limits
        if limits.freeze_heap is None:
            limits = replace(limits, freeze_heap=True)
        self._config = replace(config, limits=limits)
        self._keys = keys
        self._encryption = encryption(config.tls, keys)
        self._host = host
        self._ports = ports
        self._resume = resume
        self._lost_after_s = lost_after_s
        self._instance = secrets.token_hex(8)
        self._relay_address = "", 0
        self._lease_s: float | None = None  # of the driver, if it is not known to end with its JVM
        self._renewed = 0.0
        self._relay: AwaitedRelay | None = None  # which listens
        self._runtime: SidecarRuntime | None = None  # whose operators have started
        self._change = anyio.Event()  # of the two, or of the driver that the relay expects
        self._reserved_until = 0.0
        self._ended = anyio.Event()  # the application that is served now
        self._left_uncommitted = ""  # by the latest application
        self._served_driver: bytes | None = None  # of that application
        self._not_served: dict[bytes, str] = {}  # the latest drivers that could not be served, and why
        self._told = anyio.Event()  # the latest of them

    async def run(self, *, once: bool = False, started: Callable[[int], None] = lambda port: None) -> None:
        """Serve until cancelled, or, with ``once``, until the first application has ended whose operators had started.

        ``started`` is called with the port for drivers' requests. Raises ``ServerStartError`` if the port for drivers'
        requests or for a driver's JVM is in use, and, with ``once``, what the factory or the start of the sidecar
        raises for a driver that is there. Without, only that driver is told.
        """
        async with anyio.create_task_group() as tasks:
            port = await tasks.start(serve_control, self._answer, self._keys, self._control_config())
            started(port)
            while not (await self._serve_application(once=once) and once):
                pass
            tasks.cancel_scope.cancel()

    def _control_config(self) -> ServerConfig:
        return ServerConfig(
            bind_host=self._host,
            port=self._ports.control,
            advertised_host=self._config.addresses.advertised_host,
            tls=self._encryption.context,
            connections_max=CONNECTIONS_MAX,
        )

    async def _serve_application(self, *, once: bool) -> bool:
        """Serve one driver; False if its operators have not started. With ``once``, raise why, unless it was lost."""
        relay = AwaitedRelay(self._keys, lost_after_s=self._lost_after_s, tls=self._encryption.context)
        served = False
        failed: Exception | None = None
        try:
            self._relay_address = await relay.listen(
                self._host, self._ports.relay, self._config.addresses.advertised_host
            )
            self._relay = relay
            self._notify()
            await relay.first_connected()
            self._notify()
            try:
                served = await self._serve(relay, await relay.join())
            except Exception as error:
                served = self._runtime is not None
                if isinstance(error, RelayError) or relay.lost:
                    cause = None if isinstance(error, RelayError) else error
                    log.warning("driver lost, application ended", started=served, error=text_of(error), exc_info=cause)
                else:
                    failed = error
                    log.error("driver not served", started=served, error=describe(error), exc_info=error)
                    self._tell_later(relay.driver, error)
        finally:
            leased, self._lease_s = self._lease_s is not None, None
            self._relay = self._runtime = None
            self._notify()
            self._ended.set()
            self._ended = anyio.Event()
            with anyio.CancelScope(shield=True):
                if leased:
                    await relay.leave()
                await relay.close()
        if failed is not None:
            with anyio.move_on_after(TELL_TIMEOUT_S):  # also a pause, if a running job's JVM comes back immediately
                await self._told.wait()
            if once:
                raise failed
        return served

    def _tell_later(self, driver: bytes | None, error: Exception) -> None:
        """Keep for a driver why it is not served. It asks for its operators, or asks already."""
        assert driver is not None  # its JVM has joined
        self._told = anyio.Event()
        self._not_served.pop(driver, None)
        self._not_served[driver] = (
            f"the sidecar's process cannot serve this driver: {describe(error)}. Correct the factory, or the arguments "
            "and the configuration of the sidecar, start its process again, and attach again. If the cause lies "
            "elsewhere and has passed, just attach again. The sidecar's log has the traceback"
        )
        if len(self._not_served) > TOLD_MAX:
            del self._not_served[next(iter(self._not_served))]

    async def _call_factory(self, runtime: SidecarRuntime) -> None:
        """Coordinate the operators. Raises what the factory raises, as an ordinary exception."""
        name = f"the factory {name_of(self._factory)}"
        try:
            coordinated: Any = self._factory(runtime)
            if not inspect.isawaitable(coordinated):
                raise TypeError(f"{name} returned {show(coordinated)}: define it as `async def factory(sidecar): ...`")
            await coordinated
        except BaseException as error:
            raise contained(name, error)  # noqa: B904 - it is the error itself, or has it as its cause

    async def _serve(self, relay: AwaitedRelay, stages: tuple[ActiveStage, ...]) -> bool:
        """Serve the driver that has joined, until its application ends. Returns True."""
        if stages:
            log.warning("running jobs taken over", stages=len(stages), resume=self._resume)
        driver = RemoteDriver(relay, self._keys, stages, resume=self._resume)
        self._left_uncommitted, self._served_driver = "", relay.driver
        try:
            async with SidecarRuntime(driver, self._config) as runtime:
                await self._call_factory(runtime)
                runtime._take_tasks()
                self._runtime = runtime
                self._not_served.pop(relay.driver or b"", None)
                self._notify()
                log.info("driver attached", operators=sorted(runtime.handles))
                await self._end_of(relay)
                log.info("driver detached")
        except OutputNotCommitted as error:  # it is in the log, and the driver asks for it
            self._left_uncommitted = str(error)
        return True

    def _notify(self) -> None:
        """Wake the requests that wait for a relay or a runtime; they look again."""
        change, self._change = self._change, anyio.Event()
        change.set()

    async def _end_of(self, relay: AwaitedRelay) -> None:
        """Return when the application is over, or its driver has not renewed its lease in time."""
        while not relay.over.is_set():
            lease_s = self._lease_s
            with anyio.move_on_after(RENEWAL_S if lease_s is None else min(RENEWAL_S, lease_s / 6)):
                await relay.over.wait()
            if lease_s is None or relay.over.is_set():
                continue
            if anyio.current_time() - self._renewed > lease_s:
                log.warning("driver silent, application ended", lease_s=lease_s)
                return
            try:
                await relay.ping()  # the relay has a lease, too
            except RelayError as error:
                log.debug("relay not reached", cause=repr(error))

    # --- a driver's requests --------------------------------------------------------------------------------------

    async def _answer(self, driver: bytes, method: str, argument: Any) -> Any:
        if method == "attach":
            return await self._attach(driver, argument)
        if method == "joined":
            return await self._joined(driver, argument)
        if method == "renew":
            return self._renew(driver, argument)
        if method == "detach":
            return self._detach(driver)
        if method == "uncommitted":
            return await self._uncommitted_output(driver)
        if method == "look":
            return await self._look()
        return await self._answer_with(await self._served(driver), method, argument)

    async def _answer_with(self, runtime: SidecarRuntime, method: str, argument: Any) -> Any:
        """Answer a request that concerns the operators of the attached driver."""
        match method, argument:
            case "operators", None:
                return {name: described(handle) for name, handle in runtime.handles.items()}
            case (("begin" | "failures" | "settle"), [str(action_id), operator_ids]):
                return await self._answer_for_action(runtime, method, action_id, operator_ids)
            case "stop", [str(action_id), str(cause)]:
                return await runtime._actions.stop(action_id, cause)
            case "end", str(action_id):
                return runtime._actions.jobs.end_action(action_id)
            case "statistics", str(name):
                return self._handle(runtime, name).statistics()
            case "failure", str(name):
                return _text_of(self._handle(runtime, name).failure)
            case "checkpoint", [name, timeout_s]:
                return await runtime.checkpoint(name, timeout_s=timeout_s)
            case "savepoint", [name, directory, timeout_s]:
                return await runtime.savepoint(name, directory=directory, timeout_s=timeout_s)
            case "request", [str(name), payload, timeout_s, None | str() as part, str(traceparent)]:
                request = inside_span(traceparent, runtime.request)
                return await request(name, payload, part=part, timeout_s=timeout_s)
            case "status", None:
                return await _packed_status(runtime)
        raise SidecarError(f"unknown request {method!r}: use the same release on both sides")

    async def _answer_for_action(
        self, runtime: SidecarRuntime, method: str, action_id: str, operator_ids: list[str] | None
    ) -> Any:
        actions, named = runtime._actions, None if operator_ids is None else frozenset(operator_ids)
        if method == "begin":
            actions.begin(action_id, named)
            return self._instance
        if not actions.jobs.knows(action_id):  # it began under an earlier sidecar, and continues
            actions.begin(action_id, named, found=True)
        return self._failures(runtime, action_id) if method == "failures" else await actions.settle(action_id)

    def _failures(self, runtime: SidecarRuntime, action_id: str) -> dict[str, object]:
        count, cause = runtime._actions.jobs.failures_of(action_id)
        error = runtime._actions.fenced
        fenced = None if error is None else [isinstance(error, StorageFenced), str(error)]
        ran = runtime._actions.jobs.ran(action_id)
        final = type_name(cause) if is_a(cause, NoRestart) or is_a(cause, RunRefused) else ""
        return {
            "instance": self._instance,
            "count": count,
            "cause": _text_of(cause),
            "final": final,  # no restart helps
            "fenced": fenced,
            "ran": ran,
        }

    async def _attach(self, driver: bytes, lease_s: float | None) -> dict[str, object]:
        """Return the address for the driver's JVM, as soon as the previous application has been closed.

        ``lease_s`` is that of a driver whose JVM outlives it: after so long without a renewal, it is dead. A driver
        that is lost or does not answer is not waited for any longer. A second one is refused while the first answers.
        """
        relay = None
        with anyio.move_on_after(READY_TIMEOUT_S):
            relay = await self._free_relay(driver)
        if relay is None:
            raise SidecarError(
                f"the previous driver's application has not been closed within {READY_TIMEOUT_S:g} s: look in the "
                "sidecar's log for the method that does not return, then attach again"
            )
        relay.expect(driver)
        self._reserved_until = anyio.current_time() + RESERVED_S
        self._renew(driver, lease_s)
        host, port = self._relay_address
        return {"instance": self._instance, "host": host, "relay_port": port}

    async def _free_relay(self, driver: bytes) -> AwaitedRelay:
        """Wait for a relay that no other driver uses. Raises ``SidecarError`` if another one does, and answers."""
        while True:
            relay, change = self._relay, self._change
            if relay is not None and relay.joined and not relay.over.is_set():
                if await relay.answers():
                    raise SidecarError(
                        "another driver is attached to this sidecar, which serves one at a time: exit its "
                        "`with AttachedSidecar(...)` block first, or start a second sidecar"
                    )
                if not relay.over.is_set():
                    log.warning("lost driver replaced by another")
                    relay.detach()
            reserved_s = 0.0
            if relay is not None and not relay.joined:
                reserved_s = self._reserved_until - anyio.current_time()
                if relay.driver in (None, driver) or reserved_s <= 0:
                    return relay
            with anyio.move_on_after(reserved_s or None):
                await change.wait()

    async def _joined(self, driver: bytes, within_s: float) -> bool:
        """Whether the driver's JVM has connected to the relay, after waiting for that up to ``within_s`` seconds."""
        relay = self._relay
        if relay is None or relay.driver != driver:
            raise self._refusal(driver)
        with anyio.move_on_after(within_s):
            await relay.first_connected()
        return relay.joined

    def _renew(self, driver: bytes, lease_s: float | None) -> None:
        """The driver lives. The JVM of one that attached to an earlier sidecar may not have come back yet."""
        relay = self._relay
        if relay is None or relay.driver not in (None, driver):
            raise self._refusal(driver)
        self._lease_s, self._renewed = lease_s, anyio.current_time()

    async def _look(self) -> bytes | None:
        """The status for somebody who is not the driver; None while no driver is attached. Changes nothing."""
        return None if self._runtime is None else await _packed_status(self._runtime)

    def _detach(self, driver: bytes) -> None:
        """End the application whose driver leaves, so that the next driver is not taken for it."""
        relay = self._relay
        if relay is None or relay.driver != driver:
            return
        if not relay.joined:
            relay.expect(None)
            self._notify()
        elif self._lease_s is None:
            relay.detach()
        else:
            relay.over.set()  # its JVM goes on, and is told to let go when all else has ended

    async def _uncommitted_output(self, driver: bytes) -> str:
        """Why output of a driver that is leaving or has left is not committed.

        The runtime may end meanwhile, because stopping the context ends the application immediately.
        """
        if self._served_driver != driver:
            raise self._refusal(driver)
        if self._runtime is not None:
            ended = self._ended
            try:
                return await self._runtime._uncommitted_output()
            except (SidecarNotRunning, ActorError):
                await ended.wait()
        if driver in self._not_served:
            raise self._refusal(driver)
        return self._left_uncommitted

    async def _served(self, driver: bytes) -> SidecarRuntime:
        with anyio.move_on_after(READY_TIMEOUT_S):
            while self._runtime is None and driver not in self._not_served:
                await self._change.wait()
        if self._runtime is None and driver not in self._not_served:
            raise SidecarError(
                "no driver is attached to this sidecar, or its operators have not started yet: attach one with "
                "`with AttachedSidecar(...)`, or see the sidecar's log"
            )
        if self._runtime is None or self._served_driver != driver:
            raise self._refusal(driver)
        return self._runtime

    def _refusal(self, driver: bytes) -> SidecarError:
        """Why this driver is not served."""
        if (why := self._not_served.get(driver)) is None:
            return SidecarError(
                "this driver is no longer attached to the sidecar, which serves another one now: enter a new "
                "`with AttachedSidecar(...)` block when that one has left"
            )
        self._told.set()
        return SidecarError(why)

    @staticmethod
    def _handle(runtime: SidecarRuntime, name: str) -> OperatorHandle:
        handle = runtime.handles.get(name)
        if handle is None:
            known = ", ".join(map(repr, sorted(runtime.handles))) or "none"
            raise SidecarError(f"operator {name!r} is not coordinated by this sidecar; there is {known}")
        return handle


async def _packed_status(runtime: SidecarRuntime) -> bytes:
    return await DRIVER.run(pack_status, await runtime.status())


def _text_of(error: BaseException | None) -> str | None:
    return None if error is None else describe(error)


def described(handle: OperatorHandle) -> dict[str, Any]:
    """Everything that a driver needs to make the operator's tasks, except the keys and what may be other secrets.

    So the tasks of an attached driver have the credentials of the storage from where they run.
    """
    endpoint = handle.endpoint
    states = endpoint.state_storage
    return {
        "host": endpoint.host,
        "port": endpoint.port,
        "operator_id": endpoint.operator_id,
        "parallelism": endpoint.parallelism,
        "mode": int(endpoint.mode),
        "connect_timeout_s": endpoint.connect_timeout_s,
        "register_timeout_s": endpoint.register_timeout_s,
        "ready_timeout_s": endpoint.ready_timeout_s,
        "event_bytes_max": endpoint.event_bytes_max,
        "local_files": endpoint.local_files,
        "state_storage": states and {"url": states.url, "epoch": states.epoch, "token": states.token},
        "stages": list(handle.stages),
        "parts": handle.parts,
    }
