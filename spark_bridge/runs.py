"""Which operators have a run now, and the Spark jobs of these runs."""

from __future__ import annotations

from protocol.attempts import EndRun, LedgerEffect, StartRun
from protocol.facts import ApplicationEnded, EngineFact, JobEnded, JobStarted

__all__ = ["RunningJobs"]


class RunningJobs:
    """Kept up by the bridge, and read by whoever must end the jobs when the bridge is gone. Loop only."""

    def __init__(self) -> None:
        self._stages_of_job: dict[int, frozenset[int]] = {}
        self._run_of_operator: dict[str, int] = {}
        self._doomed: set[int] = set()
        self.failed_count = 0
        """How many runs have ended without success so far."""

    def hear(self, fact: EngineFact) -> None:
        """A fact of Spark's, in the order of the bus."""
        match fact:
            case JobStarted(job_id=job_id, stage_ids=stage_ids):
                self._stages_of_job[job_id] = frozenset(stage_ids)
            case JobEnded(job_id=job_id):
                self._stages_of_job.pop(job_id, None)
            case ApplicationEnded():
                self._stages_of_job.clear()

    def note(self, effect: LedgerEffect) -> None:
        """What the ledger has decided."""
        match effect:
            case StartRun(operator_id, run_id):
                self._run_of_operator[operator_id] = run_id
            case EndRun(operator_id=operator_id, succeeded=succeeded):
                self._run_of_operator.pop(operator_id, None)
                self.failed_count += not succeeded

    def doom(self, run_id: int) -> bool:
        """A run that was found and cannot go on has failed; False when that is known already."""
        news = run_id not in self._doomed
        self._doomed.add(run_id)
        self.failed_count += news
        return news

    @property
    def operator_ids(self) -> list[str]:
        """The operators that have a run."""
        return sorted(self._run_of_operator)

    @property
    def job_ids(self) -> list[int]:
        """The jobs of their runs, as far as their start was told."""
        runs = set(self._run_of_operator.values())
        return sorted(job_id for job_id, stages in self._stages_of_job.items() if stages & runs)
