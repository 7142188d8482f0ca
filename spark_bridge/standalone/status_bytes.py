# SPDX-License-Identifier: Apache-2.0

"""A status on its way from a sidecar's process to somebody who looks: compressed JSON of bounded size.

A status that would be too large is cut: attempts are left out from the end, and counted in
``OperatorStatus.attempts_left_out``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace

from protocol.describing import as_json, readable
from spark_bridge.common.control import CONTROL_LIMITS
from spark_bridge.observability.status import AttemptStatus, SidecarStatus

__all__ = ["ATTEMPTS_MAX", "cut", "pack_status", "unpack_status"]

ATTEMPTS_MAX = 20_000
"""More attempts than this, of all operators together, are not sent."""
PLAIN_BYTES_MAX = 64 * 2**20
PACKED_BYTES_MAX = CONTROL_LIMITS.event_bytes_max - 1024


def pack_status(status: SidecarStatus, bytes_max: int = PACKED_BYTES_MAX) -> bytes:
    """Return the status as at most ``bytes_max`` bytes. It takes a while: call it in a worker thread."""
    attempts_max = ATTEMPTS_MAX
    while True:
        packed = _pack(cut(status, attempts_max))
        if (packed is not None and len(packed) <= bytes_max) or not attempts_max:
            return packed or b""
        attempts_max //= 2


def cut(status: SidecarStatus, attempts_max: int) -> SidecarStatus:
    """Leave out attempts until at most ``attempts_max`` are left: each operator keeps an equal share, or all."""
    left, operators = attempts_max, {}
    by_size = sorted(status.operators.items(), key=lambda item: len(item[1].attempts))
    for waiting, (name, operator) in zip(range(len(by_size), 0, -1), by_size, strict=True):
        kept = operator.attempts[: left // waiting]
        left -= len(kept)
        left_out = operator.attempts_left_out + len(operator.attempts) - len(kept)
        operators[name] = replace(operator, attempts=kept, attempts_left_out=left_out)
    return replace(status, operators={name: operators[name] for name in status.operators})


def unpack_status(packed: bytes) -> SidecarStatus:
    """The inverse of ``pack_status``. Raises ``ValueError`` for anything else."""
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(packed, PLAIN_BYTES_MAX)
    except zlib.error as error:
        raise ValueError(f"not a status: {error}") from error
    if not decompressor.eof:
        raise ValueError(f"not a status, or one of more than {PLAIN_BYTES_MAX} bytes")
    try:
        told = json.loads(plain)
        for name, rows in told["attempts"].items():
            attempts = [dict(zip(AttemptStatus._fields, row, strict=True)) for row in rows]
            told["status"]["operators"][name]["attempts"] = attempts
        return SidecarStatus.from_dict(told["status"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a status of this release: {error!r}") from error


def _pack(status: SidecarStatus) -> bytes | None:
    """None if it is too large before it is compressed."""
    compressor, parts, size = zlib.compressobj(3), [], 0
    for text in _json_in_parts(status):
        size += len(text)
        if size > PLAIN_BYTES_MAX:
            return None
        parts.append(compressor.compress(text.encode()))
    return b"".join([*parts, compressor.flush()])


def _json_in_parts(status: SidecarStatus) -> Iterator[str]:
    """Many small pieces: encoding a large one would keep the event loop's thread from running."""
    without = {name: replace(one, attempts=()) for name, one in status.operators.items()}
    yield '{"status": ' + _json(replace(status, operators=without).to_dict())
    yield ', "attempts": {'
    for number, (name, operator) in enumerate(status.operators.items()):
        yield f"{', ' if number else ''}{_json(readable(name))}: ["
        for index, attempt in enumerate(operator.attempts):
            yield (", " if index else "") + _json(attempt)
        yield "]"
    yield "}}"


def _json(value: object) -> str:
    return as_json(value).decode()
