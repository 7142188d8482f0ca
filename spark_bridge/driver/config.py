# SPDX-License-Identifier: Apache-2.0

"""The settings of a sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from actors.coordination.operator_config import METHOD_REPORT_S
from protocol.arguments import ANY, AT_LEAST_1, PORT, check_fields
from protocol.attempts import LedgerConfig
from protocol.gateway.types import GatewayLimits
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from spark_bridge.addresses import HOST
from spark_bridge.bridge.relay import RelayKind
from spark_bridge.certificates import TlsCertificate
from spark_bridge.observability.status_server import check_status_access
from spark_bridge.subtask.secret_texts import check_no_password


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """The settings of a sidecar. All times are in seconds.

    **Addresses.** The sidecar listens for tasks on ``bind_host`` and ``port``. Tasks connect to ``advertised_host`` and
    ``advertised_port``, which differ if there is a router or container boundary in between. None takes the host from
    Spark: loopback for a ``local`` master, else ``spark.driver.bindAddress`` and ``spark.driver.host``. Port 0
    chooses a free port.

    **Encryption.** Without ``tls``, both ends of a connection prove who they are, but what they say can be read, and
    altered by anyone who can change packets on the way. ``tls=True`` encrypts every connection with TLS 1.3 and a
    certificate that the sidecar makes by itself; it needs ``pip install 'headgate[tls]'`` where the sidecar runs, and
    nothing on the executors. ``tls=TlsCertificate(...)`` takes your own certificate. Tasks receive their key
    inside Spark's closure: switch ``spark.network.crypto.enabled`` on as well, or it travels in the clear.

    **Storage.** ``storage`` is the place for checkpoints: a directory, or the URL of any filesystem
    (``s3://bucket/jobs/words``) with that filesystem's own ``storage_options``. None keeps them in this process, which
    is enough for its retries but not for a new application. ``retained_checkpoints`` are kept for each operator, and
    always the last completed one. A damaged checkpoint is never restored: that is an error, unless
    ``allow_older_checkpoint`` lets the one before it be restored instead.

    Savepoints are written only into ``savepoint_roots`` and below them. None allows every directory for a sidecar in
    the driver's own process, where the program itself asks for them, and only ``storage`` for one in a separate
    process.

    **Facts from Spark.** ``relay`` is ``"jvm"`` or ``"py4j"``, the slower fallback that needs no Java compilation.
    ``ledger`` says how lost facts are replaced, and how often attempts of one subtask may be killed
    (``LedgerConfig.attempts_max``). Its default is ``spark.task.maxFailures``, or F of ``local[N,F]``, and 4 for a
    sidecar in a separate process.

    **Operators.** ``gateway`` limits every operator's gateways unless ``coordinate`` is given other limits.
    ``start_timeout_s`` is the limit for a coordinator's ``start``. ``settle_timeout_s`` is how long ``Sidecar.run``,
    a micro-batch and the end of the sidecar wait for the end of a run and its final checkpoint. A coordinator's method
    that has not returned after ``method_report_s`` is logged with the place where it waits, and again each time the
    waiting time has doubled. Tasks that time out in the meantime report the same. A method that keeps the event loop
    from turning for ``slow_handler_limit_s`` is logged too. What has waited for ``stalled_report_s`` is logged,
    with what it waits for; ``Sidecar.explain`` returns the same at any time. ``trace`` is a file for the timeline of
    the whole life of the sidecar, as ``Sidecar.trace`` writes it.

    **Tasks.** ``authenticate_timeout_s`` is how long a peer may take to prove that it knows the secret. A task waits
    ``connect_timeout_s`` for a connection, ``register_timeout_s`` until the driver accepts it, and ``ready_timeout_s``
    until the coordinator's ``subtask_ready`` has returned.

    **Sizes.** An event, a request or an answer has at most ``event_bytes_max`` bytes when it is encoded, from 1 MiB to
    1 GiB, by default 64 MiB. Tasks are told this limit. One of more than 256 KiB travels in parts, between which what
    other operators and tasks send continues. It takes its size in memory at each end, and again while it is decoded.

    **Spark Connect.** The server's JVM connects to ``advertised_host`` and ``relay_port``, on which the sidecar of a
    client listens as well; 0 chooses a free one. If the client has been silent for ``relay_lease_s`` seconds, it counts
    as dead, and the server removes what it had opened there; if the server cannot be reached for as long, its jobs
    count as lost. ``relay_secret_file`` is for a server whose operator has installed the relay: a file with the secret
    that he has given to this client, which no other user may read. Without it, the relay travels with the session. In
    the driver itself, none of the three has an effect.

    **Looking at it.** With ``status_port``, the sidecar shows its status over HTTP to people and machines, on
    ``status_host`` and this port (0 chooses a free one). On a loopback address, everyone on this machine may look; any
    other address needs ``status_token``, at least 16 characters, which everyone then has to send: as the header
    ``Authorization: Bearer TOKEN``, or once in a browser as ``/?token=TOKEN``. The traffic is not encrypted.
    ``spark_metrics``: the same figures are gauges in Spark's own metrics, from 10 s after the start on; this needs the
    driver in this process, and ``relay="jvm"``. ``opentelemetry``: spans for runs, attempts, checkpoints with their
    phases, restores and restarts go to the application's tracer provider; this needs
    ``pip install 'headgate[opentelemetry]'`` where the sidecar runs.

    **The garbage collector.** A full run of Python's garbage collector stops the event loop for some 0.1 ms for each
    subtask. With ``freeze_heap``, it ignores what exists when the subtasks of a run are ready, 100 or more, until no
    run is left (``gc.freeze``), and meanwhile full runs are made only when the process holds a quarter more memory,
    and those of the middle generation more often, so that each is short. This concerns the whole process: what becomes
    garbage in a cycle meanwhile may be freed only after that, and objects that the program itself has frozen return to
    the collector, too. None means: only in a sidecar's own process.

    **Spark's own UI.** With ``spark_ui_tab``, it has a tab that shows the sidecar while it runs. Who may look is what
    Spark's settings say. Where there is no such UI, as in a separate process, ``status_port`` shows the same page.

    **Leaving** the ``with`` block takes at most the sum of these times:

    * 1 s until the last run is known to be over, and 5 s more for a run that is still going and is failed;
    * ``settle_timeout_s`` for the final checkpoint, but only ``shutdown_timeout_s`` if a coordinator's method does not
      return;
    * ``shutdown_timeout_s`` for the operators to stop. A method that does not return is then cancelled and named in the
      log. Code that ignores the cancellation is abandoned after another 2 s;
    * ``shutdown_timeout_s`` for the relay.

    Ctrl-C cancels these waits. If a coordinator blocks the event loop itself, leaving gives up after
    ``shutdown_timeout_s`` plus 5 s and raises a ``SidecarError`` that names the blocking code.
    """

    bind_host: str | None = None
    port: int = 0
    advertised_host: str | None = None
    advertised_port: int | None = None
    tls: bool | TlsCertificate = False
    relay: RelayKind = "jvm"
    relay_port: int = 0
    relay_lease_s: float = 30.0
    relay_secret_file: str | PathLike[str] | None = None
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    authenticate_timeout_s: float = 10.0
    connect_timeout_s: float = 10.0
    register_timeout_s: float = 60.0
    ready_timeout_s: float = 120.0
    event_bytes_max: int = DEFAULT_LIMITS.event_bytes_max
    start_timeout_s: float = 60.0
    shutdown_timeout_s: float = 10.0
    method_report_s: float = METHOD_REPORT_S
    slow_handler_limit_s: float = 0.1
    stalled_report_s: float = 30.0
    trace: str | PathLike[str] | None = None
    settle_timeout_s: float = 120.0
    storage: str | PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    retained_checkpoints: int = 3
    allow_older_checkpoint: bool = False
    savepoint_roots: Sequence[str | PathLike[str]] | None = None
    status_port: int | None = None
    status_host: str = "127.0.0.1"
    status_token: str | None = field(default=None, repr=False)
    spark_ui_tab: bool = True
    spark_metrics: bool = True
    opentelemetry: bool = False
    freeze_heap: bool | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            bind_host=HOST,
            advertised_host=HOST,
            status_host=HOST,
            port=PORT,
            advertised_port=PORT,
            relay_port=PORT,
            status_port=PORT,
            event_bytes_max=ANY,
            retained_checkpoints=AT_LEAST_1,
            status_token=ANY,
        )
        for url in (self.storage, *(self.savepoint_roots or ())):
            name = "storage" if url is self.storage else "savepoint_roots"
            check_no_password(str(url), name, "give it in storage_options")
        WireLimits.for_events(self.event_bytes_max)
        check_status_access(self.status_host, self.status_port, self.status_token)
