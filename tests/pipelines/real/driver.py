# SPDX-License-Identifier: Apache-2.0

"""A driver of the soak test, which may be killed at any time.

``python -m tests.pipelines.real.driver FILE``: the file has the ``Job``. Status 0 means that everything is committed.
"""

from __future__ import annotations

import os
import sys

from headgate import AttachedSidecar, FixedDelay, Sidecar
from tests.pipelines.real.job import OPERATOR, TASKS, Job
from tests.spark.conftest import start_spark

MASTER = "local-cluster[2,1,1024]"
RESTART = FixedDelay(restarts_max=100, delay_s=0.2)


def run(job: Job) -> None:
    spark = start_spark(
        MASTER,
        spark_task_maxFailures="20",
        spark_executorEnv_PYTHONPATH=os.getcwd(),
        spark_executor_memory="512m",
        spark_deploy_maxExecutorRetries="-1",
    )
    tasks = spark.sparkContext.parallelize(range(TASKS), TASKS)

    if job.control is not None:
        with AttachedSidecar(spark, job.control, secret_file=job.secret_file) as attached:
            operator = attached.operator(OPERATOR)
            task = operator.subtask(job.stages(job.parts(lambda kind, name, **settings: operator.part(name))))
            attached.run(lambda: tasks.foreachPartition(task), restart=RESTART, input_id="soak")
    else:
        with Sidecar(spark, job.config) as sidecar:
            parts = job.parts(lambda kind, name, **settings: getattr(sidecar, kind)(name, **settings))
            handle = sidecar.coordinate(
                OPERATOR,
                job.stages(parts),
                parallelism=TASKS,
                uses=parts.used() if parts is not None else [],
                mode="streaming",
                checkpoint=job.checkpoint,
            )
            sidecar.run(lambda: tasks.foreachPartition(handle.subtask()), restart=RESTART, input_id="soak")
    spark.stop()


if __name__ == "__main__":
    run(Job.read(sys.argv[1]))
