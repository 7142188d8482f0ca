# SPDX-License-Identifier: Apache-2.0

"""What the sidecar of the soak test coordinates in a separate process. It is only given names, so the job is
in a file, which the environment names."""

from __future__ import annotations

import os

from headgate import SidecarRuntime
from tests.pipelines.real.job import OPERATOR, PERMITS, TASKS, Job
from tests.pipelines.real.paid import BURST, PER_S

JOB_FILE = "HEADGATE_SOAK_JOB"
job = Job.read(os.environ[JOB_FILE])
config = job.config


async def coordinate(sidecar: SidecarRuntime) -> None:
    permits = sidecar.permits(PERMITS, per_s=PER_S, burst=BURST)
    await sidecar.coordinate(
        OPERATOR,
        job.stages(permits),
        parallelism=TASKS,
        uses=[permits],
        mode="streaming",
        checkpoint=job.checkpoint,
    )
