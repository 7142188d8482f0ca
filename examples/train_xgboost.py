# SPDX-License-Identifier: Apache-2.0

"""Distributed training with XGBoost: each task is a worker with a part of the data.

One worker is killed in the middle of a round, or stands still with ``--freeze``. The others leave XGBoost's collective
and go on from the last saved round together with its retry. The model has the same bits as that of a training in which
nothing happened. It needs ``headgate[pyspark,xgboost]``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xgboost
from pyspark.sql import SparkSession

from headgate import GatewayLimits, Group, GroupMember, Sidecar
from headgate.errors import PeerLost

WORKERS = 4
ROUNDS = 20
ROUNDS_PER_SAVE = 5
FEATURES = 20
ROWS = 500
SETTINGS = {"objective": "reg:squarederror", "max_depth": 4, "nthread": 1}  # a task has one core


class Misfortune(xgboost.callback.TrainingCallback):
    """Kills or stops the process of worker 2 in round 12, once."""

    def __init__(self, marker: Path, number: int) -> None:
        self.marker = marker
        self.number = number

    def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: object) -> bool:
        if model.num_boosted_rounds() == 12 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), self.number)
        return False


def train(member: GroupMember, misfortune: Misfortune | None) -> bytes:
    """Train from the last round that all workers have saved, and return the model."""
    random = np.random.default_rng(member.rank)
    rows = random.normal(size=(ROWS, FEATURES))
    callbacks = [misfortune] if misfortune is not None and member.rank == 2 else []
    done, model = (0, b"") if member.checkpoint is None else (member.checkpoint.step, member.checkpoint.blob)
    if done < ROUNDS:  # else the others have finished
        with member.xgboost():
            data = xgboost.DMatrix(rows, rows @ np.linspace(-1.0, 1.0, FEATURES) ** 3, nthread=1)
            while done < ROUNDS:
                before = xgboost.Booster(SETTINGS, model_file=bytearray(model)) if model else None
                booster = xgboost.train(SETTINGS, data, ROUNDS_PER_SAVE, xgb_model=before, callbacks=callbacks)
                done, model = done + ROUNDS_PER_SAVE, bytes(booster.save_raw())
                member.save(done, model)
    return model


def run(sidecar: Sidecar, name: str, misfortune: Misfortune | None) -> tuple[list[bytes], int]:
    """Train, and return the model of each worker and the number of generations that it took."""
    group: Group = sidecar.group("workers", WORKERS)
    job = sidecar.coordinate(
        name,
        parallelism=WORKERS,
        uses=[group],
        gateway=GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=1.0),
    )

    def work(_: Iterator[int]) -> Iterator[bytes]:
        while True:
            try:
                with group as member:
                    model = train(member, misfortune)
            except PeerLost:
                continue  # the next generation
            yield model
            return

    return job.run(work), group.generation


parser = ArgumentParser(description=__doc__)
parser.add_argument("--freeze", action="store_true", help="stop a worker with SIGSTOP instead of killing it")
options = parser.parse_args()
marker = Path(tempfile.mkdtemp()) / "lost"
misfortune = Misfortune(marker, signal.SIGSTOP if options.freeze else signal.SIGKILL)
spark = SparkSession.builder.master(f"local[{WORKERS},4]").config("spark.log.level", "OFF").getOrCreate()
with Sidecar(spark) as sidecar:
    undisturbed, _ = run(sidecar, "undisturbed", None)
    disturbed, generations = run(sidecar, "disturbed", misfortune)
spark.stop()
same = set(undisturbed) == set(disturbed) and len(set(disturbed)) == 1
print(f"{ROUNDS} rounds, {generations} generations; a worker was lost: {marker.exists()}; the same model: {same}")
