# SPDX-License-Identifier: Apache-2.0

"""Looks for a secret in what a Spark Connect server shows and writes, in the notations that Spark uses for bytes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator

from tests.spark.connect.server import ConnectServer, page

PART_BYTES = 6  # this many bytes of a secret in a row do not appear by accident


def notations(secret: bytes) -> dict[str, str]:
    """Every part of the secret in each notation, with a name for each."""
    found = {}
    for at in range(len(secret) - PART_BYTES + 1):
        part = secret[at : at + PART_BYTES]
        found[part.decode("latin-1")] = "raw"
        found[part.hex()] = "hexadecimal"
        found[base64.b64encode(part).decode()] = "base64"
        found[str(list(part))[1:-1]] = "numbers"
        found[str([byte - 256 if byte > 127 else byte for byte in part])[1:-1]] = "Java's numbers"
    return found


def readings(text: str) -> Iterator[str]:
    """The text, and what it means if it is an excerpt of a protocol buffer or of JSON."""
    yield text
    yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
    yield re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    yield re.sub(r"\\\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def found_in(texts: dict[str, str], secrets: list[bytes]) -> list[str]:
    """Where a part of a secret is, and in which notation."""
    return [
        f"{how} in {name}"
        for name, text in texts.items()
        for reading in readings(text)
        for secret in secrets
        for part, how in notations(secret).items()
        if part in reading
    ]


def texts_of(server: ConnectServer) -> dict[str, str]:
    """What the server's UI, its REST interface, its event log and its log say, by their names."""
    assert server.events is not None
    [application] = json.loads(page(f"{server.ui}/api/v1/applications"))
    rest = f"{server.ui}/api/v1/applications/{application['id']}"
    found = {f"log of {path.name}": path.read_text("latin-1") for path in server.events.rglob("*") if path.is_file()}
    found["log"] = server.log
    for name in ("sql?details=true&planDescription=true&length=1000", "jobs", "stages?details=true", "environment"):
        found[f"REST: {name}"] = page(f"{rest}/{name}")
    for name in ("SQL/", "connect/", "environment/", "jobs/"):
        found[f"UI: {name}"] = page(f"{server.ui}/{name}")
    for execution in json.loads(found["REST: sql?details=true&planDescription=true&length=1000"]):
        found[f"UI: execution {execution['id']}"] = page(f"{server.ui}/SQL/execution/?id={execution['id']}")
    for session in set(re.findall(r"connect/session/\?id=([0-9a-f-]{36})", found["UI: connect/"])):
        found[f"UI: session {session}"] = page(f"{server.ui}/connect/session/?id={session}&userId=")
    return found
