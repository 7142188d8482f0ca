# SPDX-License-Identifier: Apache-2.0

"""Accidents inside the simulated Spark that are more than the end of one process."""

from __future__ import annotations

from collections.abc import Collection

from protocol.facts import ExecutorLost, TaskOutcome
from tests.simulation.engine import Engine
from tests.simulation.jobs import EngineTask, Job, Phase


def copy_a_task(engine: Engine, slow: Collection[int] = ()) -> None:
    """Start a second attempt of a running task (speculation), of a ``slow`` partition if there is one.

    Never copy a task of a barrier stage or of a zombie.
    """
    for job in engine.active_jobs():
        if not engine.copies or job.barrier or job.latest.zombie or job.phase is not Phase.RUNNING:
            continue
        running = [task.partition for task in engine.running(job, job.latest)]
        alone = [p for p in running if running.count(p) == 1 and p not in job.latest.successful]
        if alone:
            engine.happen("copy")
            engine.start_task(job, engine.random.choice([p for p in alone if p in slow] or alone), speculative=True)
            return


def fail_fetch(engine: Engine) -> None:
    """Fail a task because it cannot read the output of the stage before; its stage attempt becomes a zombie."""
    job = engine.job
    if job is None or job.phase is not Phase.RUNNING or not job.reads or job.barrier:
        return
    running = engine.running(job, job.latest)
    if not running or (len(running) > 1 and not engine.copies):
        return  # the others would live on, alongside those of the next attempt
    task = engine.random.choice(running)
    engine.happen("fetch failure")
    if len(running) > 1:
        engine.happen("zombie")
    engine.end(task, TaskOutcome.FETCH_FAILED, "fetch failed")
    job.latest.succeed(task.partition)  # this set does not run it again
    engine.fail_stage(job, "fetch failed")


def fail_fetch_downstream(engine: Engine) -> None:
    """Fail the stage that reads the complete output of our stage."""
    job = engine.job
    if job is not None and job.phase is Phase.DOWNSTREAM:
        engine.fail_downstream(job)


def lose_executor(engine: Engine) -> None:
    """End the running tasks of an executor and lose the outputs of its finished tasks (H17, spark-facts 9)."""
    random = engine.random
    executor = engine.executors.pop(random.randrange(len(engine.executors)))
    engine.executors.append(f"executor-{engine.executor_count}")
    engine.executor_count += 1
    engine.happen("executor lost")
    place = random.choice(["after", "before", "between", "late", "never"])
    if place == "before":
        engine.post(ExecutorLost(executor, "gone"))
    victims = [task for task in engine.running() if task.executor_id == executor]
    resubmitted = [task for job in engine.active_jobs() for task in _resubmit_outputs(engine, job, executor)]
    for place_in_order, task in enumerate(victims):
        if place == "between" and place_in_order == len(victims) // 2:
            engine.post(ExecutorLost(executor, "gone"))
        engine.end(task, TaskOutcome.EXECUTOR_LOST, f"{executor} is gone", ghost=random.random() < 0.3)
    if place == "after":
        engine.post(ExecutorLost(executor, "gone"))
    elif place == "late":
        engine.late.append(ExecutorLost(executor, "gone"))
    engine.happen(f"executor's own fact: {place}")
    for task in victims + resubmitted:
        engine.task_failed(task, "its executor is gone", counts=False)


def _resubmit_outputs(engine: Engine, job: Job, executor: str) -> list[EngineTask]:
    """Drop the shuffle outputs on this executor and report which tasks Spark runs again, while their stage runs.

    A task also runs again if its output lies elsewhere but a failed attempt ran on this executor. Outputs of an older
    stage attempt, or of a complete stage, are missed later.
    """
    if not job.shuffles:
        return []
    if job.forget_outputs({tid for tid, task in engine.tasks.items() if task.executor_id == executor}):
        engine.happen("output lost")
    resubmitted: list[EngineTask] = []
    of = job.latest
    for task in [t for t in engine.tasks.values() if t.of is of and t.executor_id == executor]:
        if not of.zombie and task.partition in of.successful and task.outcome is not None and not task.loser:
            of.successful.discard(task.partition)
            job.pending.add(task.partition)
            resubmitted.append(task)
            engine.happen("resubmitted" if task.outcome is TaskOutcome.SUCCESS else "resubmitted, though it failed")
            engine.post(task.end_fact(TaskOutcome.RESUBMITTED, "its output is lost"))
    return resubmitted
