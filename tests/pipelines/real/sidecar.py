# SPDX-License-Identifier: Apache-2.0

"""What the sidecar of the soak test coordinates in a separate process. It is only given names, so the job is
in a file, which the environment names."""

from __future__ import annotations

import os

from headgate import SidecarRuntime
from tests.pipelines.real.job import OPERATOR, TASKS, Job

JOB_FILE = "HEADGATE_SOAK_JOB"
job = Job.read(os.environ[JOB_FILE])
config = job.config


async def coordinate(sidecar: SidecarRuntime) -> None:
    parts = job.parts(lambda kind, name, **settings: getattr(sidecar, kind)(name, **settings))
    await sidecar.coordinate(
        OPERATOR,
        job.stages(parts),
        parallelism=TASKS,
        uses=parts.used() if parts is not None else [],
        mode="streaming",
        checkpoint=job.checkpoint,
    )
