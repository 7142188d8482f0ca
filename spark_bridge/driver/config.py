"""How a sidecar is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from actors.coordination.operator_config import METHOD_REPORT_S, check_method_report
from protocol.attempts import LedgerConfig
from protocol.gateway.types import GatewayLimits
from spark_bridge.bridge.relay import RelayKind


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """All times in seconds.

    ``bind_host`` and ``port`` are where the sidecar listens for tasks; ``advertised_host`` and ``advertised_port`` are
    what tasks are told, where a router or a container stands between (H63). Left as None, the host comes from Spark:
    loopback for a ``local`` master, else ``spark.driver.bindAddress`` and ``spark.driver.host``. Port 0 takes a free
    one.

    ``storage`` is where checkpoints live: a directory, or any filesystem by URL (``s3://bucket/jobs/words``), with the
    filesystem's own ``storage_options``; None keeps them in this process, which serves its retries but no new
    application (H52). ``retained_checkpoints`` are kept for each operator, the last completed one always (H51). A
    damaged checkpoint is never restored; ``allow_older_checkpoint`` takes the one before it instead of an error (H50).

    ``settle_timeout_s``: how long ``Sidecar.run`` and the end of the sidecar wait for the end of a run to be known and
    for its final checkpoint.

    ``ledger``: how Spark's lost facts are made up for, and how often attempts of one subtask may be killed
    (``LedgerConfig.attempts_max``; None takes ``spark.task.maxFailures``, or F of ``local[N,F]``, and 4 in a process of
    its own).

    ``gateway`` bounds and times every operator's gateways unless ``coordinate`` is given its own. ``start_timeout_s``
    is how long a coordinator's ``start`` may take. ``connect_timeout_s``, ``register_timeout_s`` and
    ``ready_timeout_s`` are for the tasks: until a connection stands, until the driver has taken the task, and until
    the coordinator's ``subtask_ready`` has returned.

    ``method_report_s``: a coordinator's method that has not returned for so long is reported in the log, with where it
    waits, and again each time that this time has doubled; tasks that run into a timeout meanwhile say the same.

    Leaving the ``with`` block takes at most the sum of: 1 s for the last run to be known as over, or 5 s more for one
    that still runs and is failed; ``settle_timeout_s`` for the final checkpoint, but only ``shutdown_timeout_s`` once a
    coordinator's method does not return; ``shutdown_timeout_s`` for operators to stop, during which such a method is
    cancelled and named in the log, and 2 s more for code that ignores that, which is abandoned; ``shutdown_timeout_s``
    for the relay. A Ctrl-C meanwhile cancels what is waited for. If a coordinator blocks the event loop itself, leaving
    gives up after ``shutdown_timeout_s`` and 5 s: it raises ``SidecarError`` that names the code.
    """

    bind_host: str | None = None
    port: int = 0
    advertised_host: str | None = None
    advertised_port: int | None = None
    relay: RelayKind = "jvm"
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    authenticate_timeout_s: float = 10.0
    connect_timeout_s: float = 10.0
    register_timeout_s: float = 60.0
    ready_timeout_s: float = 120.0
    start_timeout_s: float = 60.0
    shutdown_timeout_s: float = 10.0
    method_report_s: float = METHOD_REPORT_S
    slow_handler_limit_s: float = 0.1
    settle_timeout_s: float = 120.0
    storage: str | PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retained_checkpoints: int = 3
    allow_older_checkpoint: bool = False

    def __post_init__(self) -> None:
        check_method_report(self.method_report_s)
