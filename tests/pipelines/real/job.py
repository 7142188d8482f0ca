# SPDX-License-Identifier: Apache-2.0

"""The pipeline of one run, as each of its processes reads it from a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate import CheckpointConfig, SidecarConfig, chain
from spark_bridge.primitives.chain import Chain
from tests.pipelines.pairs import Pair
from tests.pipelines.real.gates import GatedSink, Gates
from tests.pipelines.real.paid import BURST, TASKS, PaidCalls, PaidParts, batches_of, rows_of

__all__ = ["OPERATOR", "TASKS", "Job"]

OPERATOR = "soak"
PERMITS, BUDGET, CACHE = "service", "calls", "questions"


@dataclass(frozen=True)
class Job:
    """One run's pipeline. ``config`` is that of the sidecar; ``control`` its address if it has a separate process."""

    pair: Pair
    gates: Gates
    config: SidecarConfig
    holds_events: bool
    secret_file: str
    control: str | None
    paid: PaidCalls | None = None

    def parts(self, part: Callable[..., Any]) -> PaidParts | None:
        """What the paid stage uses: ``part(kind, name, **settings)`` makes each, or finds it in another process."""
        paid = self.paid
        if paid is None:
            return None
        return PaidParts(
            part("permits", PERMITS, per_s=paid.per_s, burst=BURST),
            part("budget", BUDGET, total=paid.total_now) if paid.total else None,
            part("cache", CACHE) if paid.cached else None,
        )

    def stages(self, parts: PaidParts | None) -> Chain:
        pair, sink = self.pair, GatedSink(self.pair.sink(), self.gates)
        if self.paid is None or parts is None:
            return chain(source=pair.source(), transform=pair.transform, sink=sink)
        return chain(
            source=pair.source(),
            rows=rows_of,
            paid=self.paid.stage(parts),
            batches=batches_of,
            transform=pair.transform,
            sink=sink,
        )

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
