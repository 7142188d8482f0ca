# SPDX-License-Identifier: Apache-2.0

"""A driver's requests to a sidecar in another process; see ``spark_bridge.common.control``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.coordination import CheckpointFailed
from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.common.addresses import written
from spark_bridge.common.control import ControlEndpoint, ControlUnreachable, exchange
from spark_bridge.common.errors import CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning
from spark_bridge.storage import StorageFenced

__all__ = ["ControlAddress", "SidecarUnreachable", "ask"]

# These errors of the other side are raised with their own class. Any other becomes a SidecarError that names its class.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointFailed, CoordinatorStartError, NotSettled, SidecarError, SidecarNotRunning, StorageFenced)
}


class SidecarUnreachable(SidecarError):
    """The sidecar's process cannot be reached, or ended before it had answered.

    Check that the process runs, and its address, and attach again.
    """


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The address at which a sidecar answers drivers, and what both must know (H61).

    ``certificate_sha256`` is the digest of the sidecar's certificate; empty if the connection is not encrypted (H77).
    """

    host: str
    port: int
    keys: KeyRing = field(repr=False)
    certificate_sha256: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return written(self.host, self.port)


def ask(
    address: ControlAddress,
    driver: bytes,
    method: str,
    argument: Any = None,
    *,
    timeout_s: float,
    connect_timeout_s: float,
) -> Any:
    """Send a request of this driver to the sidecar and return its answer. Blocks; for any thread.

    Connecting is tried for ``connect_timeout_s`` seconds, because the sidecar may be about to start. The answer may
    take ``timeout_s`` seconds. Raises ``SidecarUnreachable``, and what the sidecar raised.
    """
    endpoint = ControlEndpoint(
        address.host,
        address.port,
        address.keys.key(Purpose.CONTROL, driver),
        address.certificate_sha256,
        "start it with `headgate sidecar MODULE:FACTORY`, or check host and port",
        "give both ends the same --secret-file, use tls at both ends or at neither, and check the port",
    )
    try:
        answer = exchange(endpoint, method, argument, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
    except ControlUnreachable as error:
        raise SidecarUnreachable(str(error)) from error
    match answer:
        case [True, result]:
            return result
        case [False, str(kind), str(text)] if kind in _KINDS:
            raise _KINDS[kind](text)
        case [False, str(kind), str(text)]:
            raise SidecarError(f"{kind}: {text}")
        case _:
            raise SidecarUnreachable(
                f"the sidecar at {address} sent an invalid answer: {answer!r}; use the same release on both sides"
            )
