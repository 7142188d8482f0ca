# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.worst_events``: how long what costs most to decode holds a turn of the loop.

Each event is within the limits of the wire, or exceeds one, and is decoded step by step, as the coordinator's actor
does it. A snapshot is divided into frames and decoded in one step, that of its last read. Printed is the best of
several rounds: the processor time of all steps, and of the longest one, in milliseconds.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from random import Random

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.wire.codec import FrameDecoder, decode_event_in_steps, decode_message, encode_message
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import CheckpointAcknowledged, HeldEvent

ROUNDS = 5
READ_BYTES = 64 * 1024
CONTAINERS, ENTRIES = DEFAULT_LIMITS.event_containers_max, DEFAULT_LIMITS.event_items_max
BYTES, MAP_ENTRIES = DEFAULT_LIMITS.event_bytes_max, DEFAULT_LIMITS.event_map_entries_max


def list_of(count: int, entries: bytes) -> bytes:
    """The list with these encoded entries."""
    return b"\xdd" + count.to_bytes(4, "big") + entries


def colliding_keys(table_size: int, count: int, seed: int = 1) -> list[int]:
    """Keys with which each later entry of a dict of this size is compared with thousands before it.

    CPython looks at slots in an order that follows from the hash, and an integer is its own hash. The first keys fill
    slots that follow each other in that order; the others are chosen so that they come to the start of that row.
    """
    random, mask = Random(seed), table_size - 1
    occupied, keys, slot = bytearray(table_size), list[int](), 0
    for _ in range(count * 5 // 6):
        keys.append(slot)
        occupied[slot] = 1
        slot = (5 * slot + 1) & mask
    while len(keys) < count:
        key = perturb = random.getrandbits(60)
        place = key & mask
        while occupied[place] and perturb:
            perturb >>= 5
            place = (5 * place + perturb + 1) & mask
        if not perturb and occupied[place]:
            keys.append(key)
            occupied[slot] = 1
            slot = (5 * slot + 1) & mask
    return keys


def events() -> Iterator[tuple[str, bytes]]:
    """The events by what they consist of."""
    maps = CONTAINERS - 1
    yield f"{maps:,} empty maps", list_of(maps, b"\x80" * maps)
    yield f"{maps:,} empty lists", list_of(maps, b"\x90" * maps)
    yield f"{maps:,} maps of one entry", list_of(maps, b"\x81\x01\xc0" * maps)
    yield f"{ENTRIES:,} short strings", list_of(ENTRIES, b"\xa2\xc3\xa9" * ENTRIES)
    yield f"{ENTRIES:,} floats", list_of(ENTRIES, b"\xcb\x3f\xf1\x22\x33\x44\x55\x66\x77" * ENTRIES)
    yield "one bytes value of 64 MiB", msgpack.packb(bytes(BYTES - 5))
    table_size = 8192
    keys = colliding_keys(table_size, min(MAP_ENTRIES, table_size * 2 // 3))
    count = ENTRIES // len(keys) - 1
    yield f"{count} maps with colliding keys", list_of(count, msgpack.packb(dict.fromkeys(keys)) * count)
    yield "refused: 4 MiB of empty maps", list_of(15, list_of(ENTRIES, b"\x80" * ENTRIES) * 15)
    nested = b"".join(list_of(ENTRIES, b"\xa2\xc3\xa9" * (ENTRIES - 1)) for _ in range(5)) + b"\xc0"
    yield "refused: lists in lists of strings", nested


def snapshots() -> Iterator[tuple[str, bytes]]:
    """The frames of snapshots, by what they consist of."""
    count = DEFAULT_LIMITS.held_events_max
    for event_bytes in (1, 50, 900):
        held = tuple(HeldEvent(number % 4, bytes(event_bytes)) for number in range(count))
        name = f"{count:,} held events of {event_bytes} bytes"
        yield name, encode_message(CheckpointAcknowledged(7, 1, 1, b"", held, ()))
    yield "a state of 60 MiB", encode_message(CheckpointAcknowledged(7, 1, 1, bytes(60 * 2**20), (), ()))


def steps_of_frame(data: bytes) -> Iterator[None]:
    """Take the frame as a connection does, one step for each read."""
    decoder, view = FrameDecoder(), memoryview(data)
    for start in range(0, len(data), READ_BYTES):
        for body in decoder.feed(bytes(view[start : start + READ_BYTES])):
            decode_message(body)
        yield


def measure(steps: Iterator[None]) -> tuple[float, float, int]:
    """Seconds of all steps and of the longest one, and how many there were."""
    gc.collect()
    lengths = list[float]()
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except (StopIteration, RemoteProtocolError):
            lengths.append(time.thread_time() - began)
            return sum(lengths), max(lengths), len(lengths)
        lengths.append(time.thread_time() - began)


def main() -> int:
    print(f"{'event or snapshot':<36}{'bytes':>10}{'steps':>7}{'all ms':>9}{'longest ms':>12}")
    cases = [(name, data, decode_event_in_steps) for name, data in events()]
    for name, data, decode in (*cases, *((name, data, steps_of_frame) for name, data in snapshots())):
        rounds = [measure(decode(data)) for _ in range(ROUNDS)]
        whole, longest, count = (min(values) for values in zip(*rounds, strict=True))
        print(f"{name:<36}{len(data):>10,}{count:>7}{whole * 1e3:>9.1f}{longest * 1e3:>12.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
