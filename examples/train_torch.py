# SPDX-License-Identifier: Apache-2.0

"""Data-parallel training with torch: ``DistributedDataParallel`` with gloo, each task a process of its group.

One worker is killed in the middle of a step, or stands still with ``--freeze``. The others leave gloo's collective and
go on from the last saved step together with its retry. The model has the same bits as that of a training in which
nothing happened. It needs ``headgate[pyspark,torch]``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headgate import GatewayLimits, Group, GroupMember, Sidecar
from headgate.errors import PeerLost

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # it prints the stacks of connections that were lost
try:
    import torch
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    sys.exit("This example needs torch: pip install torch")

WORKERS = 4
STEPS = 20
STEPS_PER_SAVE = 5
FEATURES = 50
ROWS = 200


def part_of_the_data(rank: int) -> tuple[Any, Any]:
    """The rows of one worker, and what the model should say about them."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(rank))
    return rows, (rows @ torch.linspace(-1.0, 1.0, FEATURES)).tanh().unsqueeze(1)


def suffer(step: int, rank: int, misfortune: tuple[Path, int] | None) -> None:
    """Kill or stop the process of worker 2 in step 12, once."""
    if misfortune is not None and (step, rank) == (12, 2) and not misfortune[0].exists():
        misfortune[0].touch()
        os.kill(os.getpid(), misfortune[1])


def train(member: GroupMember, misfortune: tuple[Path, int] | None) -> bytes:
    """Train from the last step that all workers have saved, and return the model."""
    torch.set_num_threads(1)  # a task has one core
    torch.manual_seed(0)  # the model begins with the same bits in all workers
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters())
    rows, wanted = part_of_the_data(member.rank)
    step = 0
    if member.checkpoint is not None:
        step = member.checkpoint.step
        for part, state in zip((model, optimizer), torch.load(io.BytesIO(member.checkpoint.blob)), strict=True):
            part.load_state_dict(state)
    if step < STEPS:  # else the others have finished
        with member.torch():
            while step < STEPS:
                # Its first step adds up in another order than the later ones: so there is a new one after each save.
                parallel = DistributedDataParallel(model)
                for _ in range(STEPS_PER_SAVE):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(parallel(rows), wanted)
                    suffer(step, member.rank, misfortune)
                    loss.backward()  # adds up the gradients of all workers
                    optimizer.step()
                    step += 1
                blob = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict()], blob)
                member.save(step, blob.getvalue())
    return bytes(torch.nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.uint8).tolist())


def run(sidecar: Sidecar, name: str, misfortune: tuple[Path, int] | None) -> tuple[list[bytes], int]:
    """Train, and return the model of each worker and the number of generations that it took."""
    group: Group = sidecar.group("workers", WORKERS)
    limits = GatewayLimits(heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0)
    job = sidecar.coordinate(name, parallelism=WORKERS, uses=[group], gateway=limits)

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
misfortune = (marker, signal.SIGSTOP if options.freeze else signal.SIGKILL)
spark = SparkSession.builder.master(f"local[{WORKERS},4]").config("spark.log.level", "OFF").getOrCreate()
with Sidecar(spark) as sidecar:
    undisturbed, _ = run(sidecar, "undisturbed", None)
    disturbed, generations = run(sidecar, "disturbed", misfortune)
spark.stop()
same = set(undisturbed) == set(disturbed) and len(set(disturbed)) == 1
print(f"{STEPS} steps, {generations} generations; a worker was lost: {marker.exists()}; the same model: {same}")
