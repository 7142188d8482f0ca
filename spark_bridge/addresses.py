# SPDX-License-Identifier: Apache-2.0

"""Hosts and ports as text: ``host:port``, and ``[::1]:port`` for an IPv6 address."""

from __future__ import annotations

__all__ = ["parse_address", "written"]


def written(host: str, port: int) -> str:
    """The address as one text; an IPv6 address is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port of ``"host:port"`` or ``"[ipv6]:port"``. Raises ``ValueError`` for anything else."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets: its last group would be taken for the port
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise ValueError(
            f"invalid address {text!r}: expected HOST:PORT, for example 127.0.0.1:7650, or [::1]:7650 for IPv6"
        )
    return host, int(port)
