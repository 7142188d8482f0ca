# SPDX-License-Identifier: Apache-2.0

"""Hosts and ports as text: ``host:port``, and ``[::1]:port`` for an IPv6 address."""

from __future__ import annotations

from ipaddress import IPv6Address

from protocol.arguments import Rule

__all__ = ["ADDRESS", "HOST", "parse_address", "written"]

HOST_CHARS_MAX = 255


def _is_host(value: str) -> bool:
    if ":" in value:
        try:
            IPv6Address(value)
        except ValueError:
            return False
        return True
    return 0 < len(value) <= HOST_CHARS_MAX and all(one.isalnum() or one in "-._" for one in value)


HOST = Rule("the name or the address of a host, without a port, such as 127.0.0.1 or ::1", _is_host)


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
    if not (
        colon and _is_host(host) and len(port) <= 5 and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535
    ):
        raise ValueError(f"invalid address {text!r}: expected {ADDRESS.expected}")
    return host, int(port)


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


ADDRESS = Rule("HOST:PORT, for example 127.0.0.1:7650, or [::1]:7650 for IPv6", _is_address)
