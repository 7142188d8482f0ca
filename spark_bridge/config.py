"""How a sidecar is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from protocol.attempts import LedgerConfig
from protocol.gateway_types import GatewayLimits
from spark_bridge.relay import RelayKind


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

    ``gateway`` bounds and times every operator's gateways unless ``coordinate`` is given its own. ``start_timeout_s``
    is how long a coordinator's ``start`` may take; ``connect_timeout_s`` and ``register_timeout_s`` are for the tasks.
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
    start_timeout_s: float = 60.0
    shutdown_timeout_s: float = 10.0
    slow_handler_limit_s: float = 0.1
    settle_timeout_s: float = 120.0
    storage: str | PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retained_checkpoints: int = 3
    allow_older_checkpoint: bool = False
