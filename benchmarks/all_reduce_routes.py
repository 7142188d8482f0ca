# SPDX-License-Identifier: Apache-2.0

"""From which size on an all-reduce of a group should travel directly between its members.

``all_reduce_route``: one ``GroupMember.all_reduce`` in rank 0, in microseconds, in the ring of the members. The
baseline is the same call through the driver, in the same tasks, in turn. ``details`` has what the first call in the
ring of a generation takes: its members connect then. ``direct_bytes`` says from which size on the ring is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.harness import Figure, Progress
from benchmarks.spark_session import spark_session
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.primitives.group import arrays
from spark_bridge.primitives.group.task import GroupMember

MEMBERS = (2, 4, 8)
SIZES = (8, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
NEVER = 1 << 40

Taken = dict[tuple[int, bool], list[float]]
"""Microseconds of each call, by the size of the array and whether it travelled in the ring."""


def _timed(member: GroupMember, size: int, in_ring: bool) -> float:
    kept, arrays.direct_bytes = arrays.direct_bytes, lambda world_size: 0 if in_ring else NEVER
    try:
        array = np.ones(size // 8)
        began = time.perf_counter()
        member.all_reduce(array)
        return (time.perf_counter() - began) * 1e6
    finally:
        arrays.direct_bytes = kept


def _calls(member: GroupMember, sizes: tuple[int, ...], times: int) -> tuple[float, Taken]:
    """What the first call in the ring takes, and calls of each size by both routes in turn."""
    _timed(member, 8, in_ring=False)
    first = _timed(member, 8, in_ring=True)
    taken: Taken = {(size, in_ring): [] for size in sizes for in_ring in (False, True)}
    for number in range(times):
        for size in sizes:
            for in_ring in (number % 2 == 0, number % 2 == 1):
                member.barrier()  # all begin at the same time, as after equal steps of a training
                taken[size, in_ring].append(_timed(member, size, in_ring))
    return first, taken


def all_reduce_route(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for an all-reduce in the ring, compared with one through the driver."""
    rounds, times = (1, 2) if quick else (4, 20)
    sizes = SIZES[:2] if quick else SIZES
    figures = []
    for members in MEMBERS[:1] if quick else MEMBERS:
        with spark_session(f"local[{members}]") as spark, Sidecar(spark) as sidecar:
            found: list[tuple[float, Taken]] = []
            for number in range(rounds + 1):  # the first one is the warm-up
                group = sidecar.group("members", members)
                job = sidecar.coordinate(f"reduce-{number}", parallelism=members, uses=[group])

                def work(records: Iterator[int], group: object = group) -> Iterator[tuple[float, Taken]]:
                    with group as member:  # type: ignore[attr-defined]
                        taken = _calls(member, sizes, times)
                        if member.rank == 0:
                            yield taken

                tasks = spark.sparkContext.parallelize(range(members), members)
                found += tasks.mapPartitions(job.subtask(work)).collect()
                sidecar.release(f"reduce-{number}")
                progress(f"{members} members: round {number}/{rounds}")
        figures += _figures(members, sizes, found[1:])
    return figures


def _figures(members: int, sizes: tuple[int, ...], found: list[tuple[float, Taken]]) -> list[Figure]:
    details = {"first_call_in_ring_us": [first for first, _ in found]}
    return [
        Figure(
            "all_reduce_route",
            "µs",
            [taken[size, True] for _, taken in found],
            [taken[size, False] for _, taken in found],
            {"case": {"members": members, "bytes": size}, "baseline": "the same through the driver"},
            details,
        )
        for size in sizes
    ]
