# SPDX-License-Identifier: Apache-2.0

"""Data-parallel training with NumPy: each task has a part of the data, and all of them add up their gradients.

One worker is killed in the middle. The others go on from the last step together with its retry, and the model has the
same bits as that of a training in which nothing happened. It needs ``headgate[pyspark,dataframe]``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from headgate import Group, GroupMember, Sidecar
from headgate.errors import PeerLost

WORKERS = 4
STEPS = 30
FEATURES = 20_000
ROWS = 40


def part_of_the_data(rank: int) -> tuple[Any, Any]:
    """The rows of one worker, and what the model should say about them."""
    random = np.random.default_rng(rank)
    rows = random.normal(size=(ROWS, FEATURES))
    return rows, rows @ np.linspace(-1.0, 1.0, FEATURES)


def die_once(step: int, rank: int, marker: Path | None) -> None:
    """Kill the process of worker 2 in step 17, if this is the training that is disturbed."""
    if marker is not None and (step, rank) == (17, 2) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(member: GroupMember, marker: Path | None) -> bytes:
    """Train from the last step that all workers have saved, and return the model."""
    rows, wanted = part_of_the_data(member.rank)
    step, model = 0, np.zeros(FEATURES)
    if member.checkpoint is not None:
        step, model = member.checkpoint.step, np.frombuffer(member.checkpoint.blob)
    while step < STEPS:
        die_once(step, member.rank, marker)
        gradient = rows.T @ (rows @ model - wanted)
        model = model - 2e-6 * member.all_reduce(gradient)
        step += 1
        member.save(step, model.tobytes())
    return model.tobytes()


def run(sidecar: Sidecar, name: str, marker: Path | None) -> tuple[list[bytes], int]:
    """Train, and return the model of each worker and the number of generations that it took."""
    group: Group = sidecar.group("workers", WORKERS)
    job = sidecar.coordinate(name, parallelism=WORKERS, uses=[group])

    def work(_: Iterator[int]) -> Iterator[bytes]:
        while True:
            try:
                with group as member:
                    model = train(member, marker)
            except PeerLost:
                continue  # the next generation
            yield model
            return

    return job.run(work), group.generation


marker = Path(tempfile.mkdtemp()) / "killed"
spark = SparkSession.builder.master(f"local[{WORKERS},4]").config("spark.log.level", "OFF").getOrCreate()
with Sidecar(spark) as sidecar:
    undisturbed, _ = run(sidecar, "undisturbed", None)
    disturbed, generations = run(sidecar, "disturbed", marker)
spark.stop()
same = set(undisturbed) == set(disturbed) and len(set(disturbed)) == 1
print(f"{STEPS} steps, {generations} generations; a worker was killed: {marker.exists()}; the same model: {same}")
