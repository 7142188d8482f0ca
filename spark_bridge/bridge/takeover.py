# SPDX-License-Identifier: Apache-2.0

"""The runs that a sidecar finds when it takes over a driver with running jobs, because their earlier sidecar has died.

The new coordinators start from the last completed checkpoint, so every attempt that talked to the dead sidecar must
start from there too. It is killed through Spark, which starts the next attempt and does not count that as a failure.
Spark does not run a task again that has already succeeded. Then the job cannot continue, and fails as a whole (H15).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ActiveStage", "InheritedRuns"]


@dataclass(frozen=True, slots=True)
class ActiveStage:
    """A stage of a running job, and how many of its tasks have succeeded so far."""

    job_id: int
    stage_id: int
    succeeded: int


class InheritedRuns:
    """Which inherited runs may continue. Without ``resume`` none may, because the user prefers failed jobs."""

    def __init__(self, stages: Iterable[ActiveStage] = (), *, resume: bool = True) -> None:
        self._stages: dict[int, list[ActiveStage]] = {}
        self._resume = resume
        for stage in stages:
            self._stages.setdefault(stage.stage_id, []).append(stage)

    def job_stages(self) -> dict[int, tuple[int, ...]]:
        """The running jobs and their stages."""
        jobs: dict[int, list[int]] = {}
        for stages in self._stages.values():
            for stage in stages:
                jobs.setdefault(stage.job_id, []).append(stage.stage_id)
        return {job_id: tuple(sorted(stages)) for job_id, stages in jobs.items()}

    def why_not_resumable(self, run_id: int) -> tuple[str, tuple[int, ...]]:
        """Why this run cannot continue, and the jobs to cancel; empty if it can, or began after the takeover."""
        stages = self._stages.get(run_id, [])
        succeeded = max((stage.succeeded for stage in stages), default=0)
        if not stages or (self._resume and not succeeded):
            return "", ()
        why = (
            f"{succeeded} of its tasks had already succeeded, and Spark does not run them again"
            if self._resume
            else "the sidecar was started with --takeover fail"
        )
        text = (
            f"the sidecar of this job died and was started again, and the job cannot continue: {why}; run the job again"
        )
        return text, tuple(stage.job_id for stage in stages)
