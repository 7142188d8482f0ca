# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect session, as the sidecar of its client uses it. Everything here blocks, for remote calls.

Of PySpark, this uses what its users use, and the endpoint of the client, which has no public name.
"""

from __future__ import annotations

import copy
import hashlib
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from actors.logs import get_logger
from protocol.describing import type_name
from spark_bridge.bridge.relay_jar import FUNCTION_CLASS, TUNNEL_CLASS, jar_bytes
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect.tunnel_calls import TunnelCalls, calls_of
from spark_bridge.driver.environment import check_release, pyspark_version, why_no_subtask
from spark_bridge.driver.shipping import packages_are_files, write_archive
from spark_bridge.task_entry import ACTION_TAG, LOOK_SCHEMA, ExecutorLook

__all__ = ["BESIDE", "HEARD_WITHIN_S", "HERE", "LOOK_PAUSE_S", "Listener", "RemoteSession", "Unreachable"]

log = get_logger("headgate.connect")

LOOK_PAUSE_S = 1.0
_LOOK_TIMEOUT_S = 2.0
HEARD_WITHIN_S = LOOK_PAUSE_S + _LOOK_TIMEOUT_S
"""A server whose port refuses connections is known to have ended after this time, at most."""
_EXECUTOR_TIMEOUT_S = 60.0
_IN_A_PIPELINE = "SESSION_MUTATION_IN_DECLARATIVE_PIPELINE"
"""PySpark's own condition: while a pipeline is being defined, the client registers no functions, whatever the server
allows."""


@dataclass(frozen=True, slots=True)
class Listener:
    """What the server and its executors connect to, as error texts name it: where it is, and how that is changed."""

    name: str
    reachable: str
    with_relay: str
    without_relay: str


HERE = Listener(
    "this process",
    "set SidecarConfig(port=..., addresses=Addresses(advertised_host=..., relay_port=...)) to an address that the "
    "server and its executors reach, or run this program on a machine that they reach",
    "set SidecarConfig(addresses=Addresses(relay_secret_file=FILE))",
    "leave Addresses.relay_secret_file out",
)
BESIDE = Listener(
    "the sidecar",
    "start it with a --host and with ports that the server and its executors reach",
    "give the sidecar FILE as its --secret-file, and pass relay_installed=True",
    "leave relay_installed out",
)


class Unreachable(ConnectRefused):
    """The server, or an executor, has tried to connect to the listener, and cannot.

    Give an address that it reaches, or leave out ``way="direct"``.
    """


class RemoteSession:
    """``session`` is a Spark Connect session, and ``listener`` is to be reached from its server. Any thread."""

    def __init__(self, session: Any, listener: Listener = HERE) -> None:
        self.listener = listener
        self._session = session
        self._client = session.client
        self._given_up = False
        self._refused: ConnectRefused | None = None
        self._thread = threading.local()
        self._retry_policies: list[Any] | None = None

    @property
    def session_id(self) -> str:
        """The id by which the server knows the session; it is in the tags of the session's jobs."""
        session_id: str = self._session.session_id
        return session_id

    # --- what the server is ---------------------------------------------------------------------------------------

    def check_version(self) -> None:
        """Raises ``ConnectRefused`` if the server is too old, or the client is."""
        check_release("the Spark Connect server runs", str(self._session.version), "the server", ConnectRefused)
        check_release("this Python has", pyspark_version(), "PySpark", ConnectRefused)

    def own_address(self) -> str:
        """The address of this machine that the server most probably reaches: the one that leads to the server."""
        host = str(self._client.host)
        if _is_loopback(host):
            return "127.0.0.1"
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConnectRefused(
                f"the address of this machine that the Spark Connect server {host!r} can reach is not known ({error}): "
                "set SidecarConfig(host=..., addresses=Addresses(advertised_host=...))"
            ) from error

    def cores(self) -> int | None:
        """What the server's default parallelism says; None if it is not known."""
        with suppress(ValueError):
            return int(self.setting("spark.default.parallelism") or "")
        return None

    def setting(self, name: str) -> str | None:
        """A setting of the server, as its sessions show it; None if it is not set, or cannot be read."""
        with suppress(Exception):
            value = self._session.conf.get(name, None)
            return None if value is None else str(value)
        return None

    def encrypts_files(self) -> bool:
        """Whether the server's Spark encrypts what it writes to local directories. True if it does not say."""
        with suppress(Exception):
            return str(self._session.conf.get("spark.io.encryption.enabled", "false")).lower() == "true"
        return True

    def why_unreachable(self) -> str | None:
        """Why the server has ended: nothing listens on its port. None if it may continue. Takes at most two seconds."""
        endpoint = re.fullmatch(r"\[?(.+?)\]?:(\d+)", str(getattr(self._client._builder, "endpoint", "")))
        if endpoint is not None:
            try:
                socket.create_connection((endpoint[1], int(endpoint[2])), _LOOK_TIMEOUT_S).close()
            except ConnectionRefusedError:
                return f"nothing listens at {endpoint[0]} any more"
            except OSError:
                pass  # a network that is cut says nothing about the server
        return None

    def why_closed(self) -> str | None:
        """Why the session has ended, as the server says; None if it continues, or the server does not answer."""
        self._thread.asks_once = True
        try:
            self._session.conf.get("spark.app.id", None)
        except Exception as error:
            text = _first_line(error)
            if any(sign in text for sign in ("INVALID_HANDLE", "NO_ACTIVE_SESSION", "closed channel")):
                return text
        finally:
            self._thread.asks_once = False
        return None

    # --- PySpark's retries: without this, an action would wait ten minutes for a server that has ended ---------------

    def watch_retries(self) -> None:
        """From now on, PySpark's retries in this session end when ``stop_retries`` is called."""
        self._given_up = False
        self._retry_policies = list(self._client.get_retry_policies())
        self._client.set_retry_policies([self._until_stopped(policy) for policy in self._retry_policies])

    def stop_retries(self) -> None:
        """Have calls that are being retried fail with what they last met. Any thread."""
        self._given_up = True

    def unwatch_retries(self) -> None:
        """Give the session its policies back, unless retries were stopped: Python would wait for them at its end.

        Idempotent.
        """
        policies, self._retry_policies = self._retry_policies, None
        if policies is not None and not self._given_up:
            self._client.set_retry_policies(policies)

    def _until_stopped(self, policy: Any) -> Any:
        watched = copy.copy(policy)

        def can_retry(error: BaseException) -> bool:
            asks_once = getattr(self._thread, "asks_once", False)
            return not self._given_up and not asks_once and bool(policy.can_retry(error))

        watched.can_retry = can_retry
        return watched

    # --- what it is given -----------------------------------------------------------------------------------------

    def ship_packages(self, *, needed: bool = True) -> None:
        """Add the executor's half as an artifact of the session. Does nothing if that is installed as an archive.

        Without ``needed``, a server that forbids artifacts may have it installed, which ``check_executors`` finds out.
        """
        if not packages_are_files():
            return
        with tempfile.TemporaryDirectory(prefix="headgate-") as folder:
            try:
                self._add(write_archive(Path(folder)), pyfile=True)
            except ConnectRefused as error:
                if needed:
                    raise
                self._refused = error
                log.warning("packages not added, artifact refused", error=str(error))

    def ship_relay(self) -> None:
        """Add the relay as an artifact of the session."""
        jar = jar_bytes()
        with tempfile.TemporaryDirectory(prefix="headgate-") as folder:
            path = Path(folder, f"headgate-relay-{hashlib.sha256(jar).hexdigest()[:16]}.jar")
            path.write_bytes(jar)
            self._add(path)

    def _add(self, path: Path, **kind: bool) -> None:
        try:
            self._session.addArtifacts(str(path), **kind)
        except Exception as error:
            raise ConnectRefused(
                f"the Spark Connect server refused the artifact {path.name} ({_first_line(error)}): let the server's "
                "administrator allow artifacts"
            ) from error

    def check_executors(self, host: str, port: int) -> None:
        """Run one small task, which looks whether an executor can run subtasks and reach the sidecar.

        Raises ``ConnectRefused`` if it cannot. It does not wait for a cluster that has no free slot.
        """
        look = self._session.range(0, 1, 1, 1).mapInArrow(ExecutorLook(host, port), LOOK_SCHEMA)
        try:
            rows = self._collect_tagged(f"headgate.look.{secrets.token_hex(6)}", look)
        except Exception as error:
            why = why_no_subtask(str(error), of_server=True)
            if self._refused is not None and "No module named" in why:
                why = f"{self._refused}, or `pip install headgate` for the Python of its executors"
            raise ConnectRefused(why) from error
        if rows is None:
            log.warning("executors not checked, no task ran in time", timeout_s=_EXECUTOR_TIMEOUT_S)
            return
        [row] = rows
        if row.problem:
            raise Unreachable(
                f"an executor of the server cannot reach {self.listener.name} at {host}:{port} ({row.problem}): "
                f"{self.listener.reachable}"
            )

    def run_tagged(self, tag: str) -> None:
        """Run a job of one small task, whose listeners are shown the tag. Raises ``ConnectRefused``.

        It does not wait for a cluster that has no free slot.
        """
        try:
            self._collect_tagged(tag, self._session.range(0, 1, 1, 1))
        except Exception as error:
            raise ConnectRefused(
                f"the Spark Connect server could not run a small job, which opens the relay: {_first_line(error)}. "
                "Find out in its log why spark.range(1).collect() fails in this session"
            ) from error

    def _collect_tagged(self, tag: str, frame: Any) -> list[Any] | None:
        """The rows; None if they did not come in time."""
        impatient = threading.Timer(_EXECUTOR_TIMEOUT_S, self._session.interruptTag, (tag,))
        impatient.daemon = True
        self._session.addTag(tag)
        impatient.start()
        try:
            rows: list[Any] = frame.collect()
        except Exception as error:
            if "OPERATION_CANCELED" in str(error):
                return None
            raise
        finally:
            impatient.cancel()
            self._session.removeTag(tag)
        return rows

    @contextmanager
    def relay_function(self) -> Iterator[_RelayFunction]:
        """Within the block, the session has the relay's function, under a random name."""
        name = self._register(FUNCTION_CLASS, "string")
        try:
            yield _RelayFunction(self._session, name)
        finally:
            with suppress(Exception):  # it goes with the session
                self._session.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {name}")

    def tunnel_calls(self) -> TunnelCalls:
        """The calls of a new tunnel, whose function the session has from now on."""
        return calls_of(self._session, self._register(TUNNEL_CLASS, "binary"))

    def _register(self, java_class: str, result: str) -> str:
        """Register a Java function under a random name, and return that."""
        name = f"headgate_{secrets.token_hex(6)}"
        try:
            self._session.udf.registerJavaFunction(name, java_class, result)
        except Exception as error:
            if _IN_A_PIPELINE in str(error):
                raise ConnectRefused(
                    "Spark does not let the definitions of a declarative pipeline register the Java function that "
                    f"opens the relay ({_first_line(error)}): run `headgate connect-server FOLDER --new-client FILE`, "
                    "give the options that it prints to the server, or to `spark-pipelines run` if that starts the "
                    f"server, and {self.listener.with_relay}"
                ) from error
            raise ConnectRefused(
                f"the Spark Connect server refused the Java function of the relay ({_first_line(error)}): let the "
                "server's administrator allow Java functions"
            ) from error
        return name

    # --- the jobs of an action ------------------------------------------------------------------------------------

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        """Within the block, the jobs of this thread belong to the action."""
        tag = ACTION_TAG + action_id
        self._session.addTag(tag)
        try:
            yield
        finally:
            self._session.removeTag(tag)


class _RelayFunction:
    """The function of ``SessionFunction.java``. Its arguments and results are public."""

    def __init__(self, session: Any, name: str) -> None:
        self._session = session
        self._name = name

    def call(self, *words: object) -> list[str]:
        """Have the server's driver carry out a call; returns the words of its result.

        A local relation, so that Spark evaluates the function on the driver while it optimises the plan.
        """
        query = f"SELECT {self._name}(call) FROM VALUES (?) AS calls(call)"
        text = " ".join(map(str, words))
        try:
            answer = str(self._session.sql(query, args=[text]).collect()[0][0]).split(" ")
        except Exception as error:
            raise ConnectRefused(
                f"the relay could not be opened on the server: {_first_line(error)}. The server's log has "
                "the whole error; restart the session if another release of Headgate has left its jar there"
            ) from error
        if answer == ["elsewhere"]:
            raise ConnectRefused(
                "the server evaluated the relay's function in a task, not on its driver: remove ConvertToLocalRelation "
                "from spark.sql.optimizer.excludedRules"
            )
        if answer == ["sessionless"]:
            raise ConnectRefused(
                "spark.job.tags is set in this session: then Spark does not say whose its jobs are; unset it with "
                "session.conf.unset('spark.job.tags')"
            )
        return answer


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "local") or host.startswith("local[")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type_name(error)])[0]
