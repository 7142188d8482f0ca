# SPDX-License-Identifier: Apache-2.0

"""Hosts and ports as text, for IPv4 and IPv6."""

from __future__ import annotations

import pytest

from spark_bridge.common.addresses import parse_address, written


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:7650", "127.0.0.1", 7650), ("driver.example:1", "driver.example", 1), ("[::1]:65535", "::1", 65_535)],
)
def test_an_address_is_read_as_it_is_written(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert written(host, port) == text


@pytest.mark.parametrize(
    "text", ["", ":1", "host", "host:", "host:0", "host:65536", "host:-1", "host:1x", "::1:7650", "[]:1", "host:\u0661"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, for example 127.0.0.1:7650, or \[::1\]:7650"):
        parse_address(text)
