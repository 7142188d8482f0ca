"""What a sidecar finds when it takes over a driver whose jobs are under way: an earlier sidecar of theirs has died.

Its coordinators start from the last completed checkpoint, so every attempt that talked with the dead one has to start
from there too: it is killed through Spark, which starts the next one and does not count that as a failure. What has
succeeded meanwhile Spark will not run again. Then the job cannot be carried on, and fails as a whole (H15).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ActiveStage", "InheritedRuns"]


@dataclass(frozen=True, slots=True)
class ActiveStage:
    """A stage of a job that is under way, and how many of its tasks have succeeded so far."""

    job_id: int
    stage_id: int
    succeeded: int


class InheritedRuns:
    """Which runs may go on. ``resume``: whether any may, for the user may prefer a job that fails at once."""

    def __init__(self, stages: Iterable[ActiveStage] = (), *, resume: bool = True) -> None:
        self._stages: dict[int, list[ActiveStage]] = {}
        self._resume = resume
        for stage in stages:
            self._stages.setdefault(stage.stage_id, []).append(stage)

    def job_stages(self) -> dict[int, tuple[int, ...]]:
        """The jobs that were found, and their stages."""
        jobs: dict[int, list[int]] = {}
        for stages in self._stages.values():
            for stage in stages:
                jobs.setdefault(stage.job_id, []).append(stage.stage_id)
        return {job_id: tuple(sorted(stages)) for job_id, stages in jobs.items()}

    def why_not_resumable(self, run_id: int) -> tuple[str, tuple[int, ...]]:
        """Why this run cannot go on, and the jobs to cancel; empty for one that can, or began after the takeover."""
        stages = self._stages.get(run_id, [])
        succeeded = max((stage.succeeded for stage in stages), default=0)
        if not stages or (self._resume and not succeeded):
            return "", ()
        why = (
            f"{succeeded} of its tasks had succeeded already, and Spark will not run them again"
            if self._resume
            else "the sidecar was started with --takeover fail"
        )
        text = f"the sidecar of this job died and was started again; the job cannot go on: {why}; run it again"
        return text, tuple(stage.job_id for stage in stages)
