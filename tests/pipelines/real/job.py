# SPDX-License-Identifier: Apache-2.0

"""The pipeline of one run, as each of its processes reads it from a file."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from headgate import CheckpointConfig, SidecarConfig, chain
from spark_bridge.primitives.chain import Chain
from tests.pipelines.pairs import Pair
from tests.pipelines.real.gates import GatedSink, Gates

__all__ = ["OPERATOR", "TASKS", "Job"]

TASKS = 2
OPERATOR = "soak"


@dataclass(frozen=True)
class Job:
    """One run's pipeline. ``config`` is that of the sidecar; ``control`` its address if it has a separate process."""

    pair: Pair
    gates: Gates
    config: SidecarConfig
    holds_events: bool
    secret_file: str
    control: str | None

    @property
    def stages(self) -> Chain:
        pair = self.pair
        return chain(source=pair.source(), transform=pair.transform, sink=GatedSink(pair.sink(), self.gates))

    @property
    def checkpoint(self) -> CheckpointConfig:
        return CheckpointConfig(interval_s=0.3, timeout_s=10.0, tolerated_failures=1000, hold_events=self.holds_events)

    def write(self, file: Path) -> None:
        file.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(file: str) -> Job:
        job = pickle.loads(Path(file).read_bytes())
        assert isinstance(job, Job)
        return job
