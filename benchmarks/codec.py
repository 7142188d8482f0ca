# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.codec``: what encoding and decoding an event costs beside msgpack alone.

Both are measured in turns, in the same process, as the processor time of a batch of calls; the best of many batches
counts. ``msgpack`` is ``packb`` and ``unpackb`` with their defaults, which have none of the limits of an event.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np

from protocol.wire import event_classes
from protocol.wire.codec import decode_event, encode_event

ROUNDS = 60
BATCH_S = 0.002


@event_classes.event
@dataclass
class Split:
    """A user's class of four fields."""

    path: str
    start: int
    size: int
    weight: float


@event_classes.event
@dataclass
class Within:
    split: Split
    number: int


SPLIT = Split("a/b", 1, 2, 3.0)


def plain_events() -> Iterator[tuple[str, Any]]:
    """Events that plain msgpack can carry, by what they consist of."""
    yield "list of 4", ["split", 12345, 1.5, "." * 20]
    yield "dict of 4", {"kind": "split", "number": 12345, "weight": 1.5, "text": "." * 20}
    yield "list of 600", [number * 7 if number % 3 else f"name{number}" for number in range(600)]
    yield "dict of 600", {f"key{number}": number for number in range(600)}
    yield "600 floats in a dict", {"weights": [number * 0.1 for number in range(600)]}
    yield (
        "100 dicts of 6",
        [
            {"id": number * 1000, "name": f"n{number}", "x": number * 1.5, "y": None, "ok": True, "z": number}
            for number in range(100)
        ],
    )
    yield "200 lists of 3", [[f"k{number}", number, 1.5] for number in range(200)]
    yield "60,000 values", [[f"k{number}", number, 1.5] for number in range(20_000)]


def other_events() -> Iterator[tuple[str, Any, Any]]:
    """Events with other types, each beside the nearest one that plain msgpack can carry."""
    now = datetime.now(UTC)
    yield "a datetime in a dict", {"at": now}, {"at": now.isoformat()}
    yield "tuple of 4", ("split", 12345, 1.5, "." * 20), ["split", 12345, 1.5, "." * 20]
    fields = list(astuple(SPLIT))
    yield "dataclass of 4", SPLIT, fields
    yield "20 of them", [SPLIT] * 20, [fields] * 20
    yield "a dataclass in one", Within(SPLIT, 7), [fields, 7]
    yield "a NumPy number", np.int64(5), 5
    yield "a Decimal", Decimal("1.50"), "1.50"
    rows = [[f"k{number}", number, 1.5] for number in range(200)]
    yield "200 tuples of 3", [tuple(row) for row in rows], rows


def best_of(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one call of each."""
    count = 1
    while _batch(first, count) < BATCH_S:
        count *= 2
    gc.collect()
    rounds = [(_batch(first, count), _batch(second, count)) for _ in range(ROUNDS)]
    return min(round[0] for round in rounds) / count, min(round[1] for round in rounds) / count


def _batch(function: Callable[[], object], count: int) -> float:
    calls = range(count)
    began = time.thread_time()
    for _ in calls:
        function()
    return time.thread_time() - began


def measure(event: Any, plain: Any) -> tuple[float, float, float, float]:
    """Seconds to encode with msgpack and with us, and to decode."""
    packed, ours = msgpack.packb(plain), encode_event(event)
    encoding = best_of(lambda: msgpack.packb(plain), lambda: encode_event(event))
    decoding = best_of(lambda: msgpack.unpackb(packed), lambda: decode_event(ours))
    return *encoding, *decoding


def main() -> int:
    cases = [(name, event, event) for name, event in plain_events()]
    print(f"{'event':<24}{'msgpack':>10}{'encode':>10}{'ratio':>7}{'msgpack':>12}{'decode':>10}{'ratio':>7}   (us)")
    for name, event, plain in (*cases, *other_events()):
        pack, encode, unpack, decode = (seconds * 1e6 for seconds in measure(event, plain))
        row = f"{name:<24}{pack:>10.2f}{encode:>10.2f}{encode / pack:>7.2f}"
        print(f"{row}{unpack:>12.2f}{decode:>10.2f}{decode / unpack:>7.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
