# SPDX-License-Identifier: Apache-2.0

"""The settings of a sidecar: what most programs set, and groups of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal

from actors.coordination.engine.operator_config import METHOD_REPORT_S
from protocol.arguments import ANY, AT_LEAST_1, PORT, check_fields, checked_names, moved
from protocol.attempts import LedgerConfig
from protocol.gateway.types import GatewayLimits
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from spark_bridge.bridge.relay import RelayKind
from spark_bridge.common.addresses import HOST
from spark_bridge.common.certificates import TlsCertificate
from spark_bridge.common.secret_texts import check_no_password
from spark_bridge.observability.status_server import check_status_access

__all__ = ["Addresses", "SidecarConfig", "SidecarLimits", "StorageDetails", "Watching", "Way"]

Way = Literal["auto", "direct", "tunnel"]

PASSWORD_PLACE = "give it in storage_details=StorageDetails(options=...)"


@checked_names
@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """How tasks, and the JVM of a Spark Connect server, reach a sidecar. Times are in seconds.

    Raises ``TypeError`` or ``ValueError`` for a value that is not an address, a port or a number of seconds.

    Attributes:
        advertised_host: the host that tasks connect to, if a router or a container boundary lies in between. None takes
            ``spark.driver.host``, or loopback for a ``local`` master.
        advertised_port: the port that tasks connect to. None: the one that the sidecar listens on.
        relay_port: with Spark Connect, the port that the server's JVM connects to. Port 0 chooses a free one. This
            field and the next two have no effect in the driver itself.
        relay_lease_s: with Spark Connect, a client that has been silent for so long counts as dead, and the server
            removes what it had opened there. If the server cannot be reached for as long, its jobs count as lost.
        relay_secret_file: for a Spark Connect server whose operator has installed the relay: a file with the secret
            that he has given to this client, which no other user may read. Without it, the relay travels with the
            session.
        way: with Spark Connect, how the server and its executors reach this process. ``"direct"``: they connect to the
            addresses above. ``"tunnel"``: they connect to ports that the relay opens on the server's host, from where
            their bytes travel in the session's own calls, so nothing has to be able to connect to this process.
            ``"auto"`` tries the direct way, and takes the tunnel if the server or an executor cannot connect. With
            ``relay_secret_file`` it is the direct way.
    """

    advertised_host: str | None = None
    advertised_port: int | None = None
    relay_port: int = 0
    relay_lease_s: float = 30.0
    relay_secret_file: str | PathLike[str] | None = None
    way: Way = "auto"

    def __post_init__(self) -> None:
        check_fields(self, advertised_host=HOST, advertised_port=PORT, relay_port=PORT)


@checked_names
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageDetails:
    """What a sidecar keeps in its storage, and how it reaches it.

    Raises ``TypeError`` or ``ValueError`` for a wrong value, and for a URL with a password in it.

    Attributes:
        options: the arguments for the filesystem of ``storage``, such as credentials. Errors and logs never show them.
        task_options: the same for tasks that store states in files. They travel in Spark's closures, so give tasks
            credentials that may read and write, and not delete. By default, tasks have what their machine has.
        retained_checkpoints: how many checkpoints are kept for each operator. The last completed one always is.
        allow_older_checkpoint: a damaged checkpoint is never restored. That is an error, unless this lets the one
            before it be restored instead.
        savepoint_roots: savepoints are written only into these directories, or below them. None allows every directory
            for a sidecar in the driver's own process, where the program itself asks for them, and only ``storage`` for
            one in a separate process.
    """

    options: Mapping[str, Any] | None = field(default=None, repr=False)
    task_options: Mapping[str, Any] | None = field(default=None, repr=False)
    retained_checkpoints: int = 3
    allow_older_checkpoint: bool = False
    savepoint_roots: Sequence[str | PathLike[str]] | None = None

    def __post_init__(self) -> None:
        check_fields(self, retained_checkpoints=AT_LEAST_1)
        for root in self.savepoint_roots or ():
            check_no_password(str(root), "savepoint_roots", PASSWORD_PLACE)


@checked_names
@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What a sidecar shows and reports. Times are in seconds.

    Raises ``TypeError`` or ``ValueError`` for a wrong value, and for a status that others could see without a token.

    Attributes:
        status_port: shows the status over HTTP to people and machines on this port. Port 0 chooses a free one, None
            shows nothing. The traffic is not encrypted.
        status_host: the address of that port. On a loopback address, everyone on this machine may look.
        status_token: any other address needs this token of at least 16 characters. Everyone then has to send it: as the
            header ``Authorization: Bearer TOKEN``, or once in a browser as ``/?token=TOKEN``.
        spark_ui_tab: Spark's own UI has a tab that shows the sidecar while it runs. Who may look is what Spark's
            settings say. If there is no such UI, as in a separate process, ``status_port`` shows the same page.
        spark_metrics: the same figures are gauges in Spark's own metrics, from 10 s after the start on. This needs the
            driver in this process, and ``relay="jvm"``.
        opentelemetry: spans for runs, attempts, checkpoints with their phases, restores and restarts go to the
            application's tracer provider, and the figures to its meter provider. This needs
            ``pip install 'headgate[opentelemetry]'`` where the sidecar runs. Your own spans, in coordinators and tasks,
            belong to one trace without this setting.
        trace: a file for the timeline of the whole life of the sidecar, as ``Sidecar.trace`` writes it.
        method_report_s: a coordinator's method that has not returned after this time is logged with the place where it
            waits, and again each time the waiting time has doubled. Tasks that time out in the meantime report the
            same.
        slow_handler_limit_s: a method that keeps the event loop from turning for so long is logged.
        stalled_report_s: what has waited for so long is logged, with what it waits for. ``Sidecar.explain`` returns the
            same at any time.
    """

    status_port: int | None = None
    status_host: str = "127.0.0.1"
    status_token: str | None = field(default=None, repr=False)
    spark_ui_tab: bool = True
    spark_metrics: bool = True
    opentelemetry: bool = False
    trace: str | PathLike[str] | None = None
    method_report_s: float = METHOD_REPORT_S
    slow_handler_limit_s: float = 0.1
    stalled_report_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self, status_host=HOST, status_port=PORT, status_token=ANY)
        check_status_access(self.status_host, self.status_port, self.status_token)


@checked_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarLimits:
    """The times and sizes of a sidecar. Times are in seconds. ``GatewayLimits`` has those of one operator.

    Raises ``TypeError`` or ``ValueError`` for a wrong value.

    Attributes:
        event_bytes_max: an event, a request or an answer has at most so many bytes when it is encoded, from 1 MiB to
            1 GiB. Tasks are told this limit. One of more than 256 KiB travels in parts, between which what other
            operators and tasks send continues. It takes its size in memory at each end, and again while it is decoded.
        authenticate_timeout_s: how long a peer may take to prove that it knows the secret.
        connect_timeout_s: how long a task tries to connect.
        register_timeout_s: how long a task waits until the driver accepts it.
        ready_timeout_s: how long a task waits until the coordinator's ``subtask_ready`` has returned.
        start_timeout_s: how long a coordinator's ``start`` may take, its ``reset_to_checkpoint`` included.
        settle_timeout_s: how long ``Sidecar.run``, a micro-batch and the end of the sidecar wait for the end of a run
            and its final checkpoint.
        shutdown_timeout_s: how long leaving the sidecar waits for coordinators, and for the relay.
        freeze_heap: a full run of Python's garbage collector stops the event loop for some 0.1 ms for each subtask.
            With this, the collector ignores what exists when the subtasks of a run are ready, 100 or more, until no run
            is left (``gc.freeze``). Meanwhile full runs are made only when the process holds a quarter more memory, and
            those of the middle generation more often, so that each is short. This concerns the whole process: what
            becomes garbage in a cycle meanwhile may be freed only after that, and objects that the program itself has
            frozen return to the collector, too. None means: only in a sidecar's own process.
    """

    event_bytes_max: int = DEFAULT_LIMITS.event_bytes_max
    authenticate_timeout_s: float = 10.0
    connect_timeout_s: float = 10.0
    register_timeout_s: float = 60.0
    ready_timeout_s: float = 120.0
    start_timeout_s: float = 60.0
    settle_timeout_s: float = 120.0
    shutdown_timeout_s: float = 10.0
    freeze_heap: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, event_bytes_max=ANY)
        WireLimits.for_events(self.event_bytes_max)


_GROUPS: Mapping[str, type] = {
    "addresses": Addresses,
    "storage_details": StorageDetails,
    "watching": Watching,
    "limits": SidecarLimits,
}


_OF_COORDINATE = {
    name: f"an argument of coordinate(), {name}=..." for name in ("checkpoint", "mode", "parallelism", "restore")
}


def _moved_into_groups() -> dict[str, str]:
    """Where the arguments are now that ``SidecarConfig`` had before it had groups."""
    places = {"bind_host": "host=...", **_OF_COORDINATE}
    for group, kind in _GROUPS.items():
        for one in fields(kind):
            before = "storage_options" if kind is StorageDetails and one.name == "options" else one.name
            places[before] = f"{group}={kind.__name__}({one.name}=...)"
    return places


@moved(**_moved_into_groups())
@checked_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """The settings of a sidecar. What fewer programs set is in four groups, each with its own class.

    Raises ``TypeError`` or ``ValueError`` for a wrong value, and ``TypeError`` for an argument that belongs into one of
    the groups, with its place.

    **Leaving** the ``with`` block takes at most the sum of these times of ``limits``:

    * 1 s until the last run is known to be over, and 5 s more for a run that is still going and is failed;
    * ``settle_timeout_s`` for the final checkpoint, but only ``shutdown_timeout_s`` if a coordinator's method does not
      return;
    * ``shutdown_timeout_s`` for the operators to stop. A method that does not return is then cancelled and named in the
      log. Code that ignores the cancellation is abandoned after another 2 s;
    * ``shutdown_timeout_s`` for the relay.

    Ctrl-C cancels these waits. If a coordinator blocks the event loop itself, leaving gives up after
    ``shutdown_timeout_s`` plus 5 s and raises a ``SidecarError`` that names the blocking code.

    Attributes:
        storage: the place for checkpoints: a directory, or the URL of any filesystem (``s3://bucket/jobs/words``). None
            keeps them in this process, which is enough for its retries but not for a new application.
        host: the address on which the sidecar listens for tasks. None takes it from Spark: loopback for a ``local``
            master, else ``spark.driver.bindAddress``.
        port: the port on which it listens for tasks. Port 0 chooses a free one.
        tls: without it, both ends of a connection prove who they are, but what they say can be read, and altered by
            anyone who can change packets on the way. True encrypts every connection with TLS 1.3 and a certificate that
            the sidecar makes by itself; it needs ``pip install 'headgate[tls]'`` where the sidecar runs, and nothing on
            the executors. ``TlsCertificate(...)`` takes your own certificate. Tasks receive their key inside Spark's
            closure: switch ``spark.network.crypto.enabled`` on as well, or it travels in the clear.
        relay: how Spark's events reach the sidecar: ``"jvm"``, or ``"py4j"``, the slower fallback through PySpark's own
            gateway.
        gateway: limits every operator's gateways, unless ``coordinate`` is given other limits.
        ledger: how lost facts are replaced, and how often attempts of one subtask may be killed. The default of
            ``LedgerConfig.attempts_max`` is ``spark.task.maxFailures``, or F of ``local[N,F]``, and 4 for a sidecar in
            a separate process.
        addresses: how tasks and a Spark Connect server reach the sidecar, if not at ``host`` and ``port``.
        storage_details: what is kept in ``storage``, and how it is reached.
        watching: what the sidecar shows and reports.
        limits: its times and sizes.
    """

    storage: str | PathLike[str] | None = None
    host: str | None = None
    port: int = 0
    tls: bool | TlsCertificate = False
    relay: RelayKind = "jvm"
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    addresses: Addresses = field(default_factory=Addresses)
    storage_details: StorageDetails = field(default_factory=StorageDetails)
    watching: Watching = field(default_factory=Watching)
    limits: SidecarLimits = field(default_factory=SidecarLimits)

    def __post_init__(self) -> None:
        check_fields(self, host=HOST, port=PORT)
        check_no_password(str(self.storage), "storage", PASSWORD_PLACE)
