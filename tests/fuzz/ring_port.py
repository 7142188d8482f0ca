# SPDX-License-Identifier: Apache-2.0

"""Target: the port at which a member of a group awaits the one before it, while strangers come.

Both members of a ring are real and in this process. A new kind of attack is an ``async def`` that takes an
``Intruder``, whose address is that of the port, and is added to ``RING_ATTACKS``. The target checks that the honest
members find each other and exchange their data, and what memory that took.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from random import Random

from protocol.wire.keys import KeyRing
from spark_bridge.primitives.group.ring import NONCE_BYTES, PROOF_BYTES, Ring, listen
from tests.fuzz.attackers import Attack, Intruder
from tests.fuzz.line import Line
from tests.fuzz.siege import run
from tests.fuzz.target import Target

RING_S = 60.0
"""How long the members wait for each other. Strangers cost them far less."""
KEPT_BYTES_MAX = 4 * 2**20
DATA = bytes(range(256)) * 100


async def noise_at_ring(intruder: Intruder) -> None:
    """Send noise, or nothing, and leave."""
    line = await Line.open(intruder.address)
    await line.send(intruder.random.randbytes(intruder.random.choice((0, 1, 20, 10_000))))
    if intruder.random.random() < 0.5:
        line.reset()
    else:
        line.half_close()
        await line.until_closed()
    await line.close()


async def wrong_proof_at_ring(intruder: Intruder) -> None:
    """Pose as the member before, without the key of the generation."""
    line = await Line.open(intruder.address)
    await line.send(intruder.random.randbytes(NONCE_BYTES) + bytes(4))
    await line.read()
    await line.send(intruder.random.randbytes(PROOF_BYTES))
    line.half_close()
    await line.until_closed()
    await line.close()


RING_ATTACKS: tuple[Attack, ...] = (noise_at_ring, wrong_proof_at_ring)


async def _one(attack: Attack, intruder: Intruder) -> None:
    await attack(intruder)


async def besiege_ring(random: Random, attacks: int) -> None:
    """Let strangers come first, and both members after them."""
    key = random.randbytes(32)
    rings = [Ring(rank, 2, key, RING_S) for rank in range(2)]
    listeners = [listen("127.0.0.1") for _ in rings]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    into = [bytearray(len(DATA)) for _ in rings]

    def take_part(rank: int) -> None:
        rings[rank].connect(listeners[rank], addresses)
        rings[rank].exchange(memoryview(DATA), memoryview(into[rank]))

    tracemalloc.start()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(attacks):
                intruder = Intruder(Random(random.random()), random.choice(addresses), KeyRing(bytes(32)))
                group.create_task(_one(random.choice(RING_ATTACKS), intruder))
            for rank in range(len(rings)):
                group.create_task(asyncio.to_thread(take_part, rank))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        for ring, listener in zip(rings, listeners, strict=True):
            ring.close()
            listener.close()
    assert into == [DATA, DATA], "the members have not exchanged their data"
    assert peak <= KEPT_BYTES_MAX, f"{attacks} strangers took {peak} bytes"


TARGETS = (
    Target(
        "ring",
        "strangers at the port of a group's member",
        lambda random: run(lambda: besiege_ring(random, 8)),
        slow=True,
    ),
)
