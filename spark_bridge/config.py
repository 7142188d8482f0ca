"""How a sidecar is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

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
