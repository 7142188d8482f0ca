# SPDX-License-Identifier: Apache-2.0

"""The compiled relays, ``relay.jar`` in this package. ``make relay`` builds it from the Java sources.

The driver's JVM loads ``TaskEventRelay`` from it. A Spark Connect server gets the whole jar.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

__all__ = [
    "DRIVER_CLASS",
    "FUNCTION_CLASS",
    "LISTENER_CLASS",
    "SOURCES",
    "TUNNEL_CLASS",
    "jar",
    "jar_bytes",
    "sources_digest",
]

DRIVER_CLASS = "headgate.relay.TaskEventRelay"
"""The class of the driver's relay."""

FUNCTION_CLASS = "headgate.relay.SessionFunction"
"""The class of the function that a client registers."""

TUNNEL_CLASS = "headgate.relay.TunnelFunction"
"""The class of the function by which a client uses its tunnel."""

LISTENER_CLASS = "headgate.relay.InstalledRelays"
"""The class of the listener that a server's operator installs."""

SOURCES = (
    ("spark_bridge.bridge.relay", "TaskEventRelay.java"),
    ("spark_bridge.connect", "SessionRelay.java"),
    ("spark_bridge.connect", "SessionFunction.java"),
    ("spark_bridge.connect", "InstalledRelays.java"),
    ("spark_bridge.connect", "TunnelEnd.java"),
    ("spark_bridge.connect", "Tunnel.java"),
    ("spark_bridge.connect", "TunnelFunction.java"),
)


def jar() -> Traversable:
    """The jar."""
    return resources.files(__package__).joinpath("relay.jar")


def jar_bytes() -> bytes:
    """What is in the jar."""
    return jar().read_bytes()


def sources_digest() -> str:
    """The SHA-256 of the Java sources, in hexadecimal digits. The jar's manifest has that of the sources in it."""
    digest = hashlib.sha256()
    for package, name in SOURCES:
        source = resources.files(package).joinpath(name).read_bytes()
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()
