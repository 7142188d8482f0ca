# SPDX-License-Identifier: Apache-2.0

"""The death of a member in the middle of a training: how soon the others are free, and how soon they train again.

Three trainings run four members each. One member kills its own process, or stops it, while the others wait for it in a
collective. For each training the subject is a ``Group``, and the baseline is what Spark or the library has for it:

``all_gather``: ``GroupMember.all_gather``; beside it a barrier stage with ``BarrierTaskContext.allGather``.
``torch``: ``GroupMember.torch`` and an ``all_reduce`` of gloo; beside it the same in ``TorchDistributor``.
``xgboost``: ``GroupMember.xgboost`` and ``xgboost.train``; beside it ``SparkXGBClassifier``.

The subject has two times, in milliseconds from the loss: until ``PeerLost`` in each of the others, and until each has
made the next step of the training, with the retry of the lost member or without it. The baselines make no next step:
their time is that until the action has failed, and after ``PATIENCE_S`` a hanging one is given up. ``details`` says
how each ended. A training whose packages are not installed is left out, with a line that says so.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress
from benchmarks.spark_session import spark_session
from protocol.gateway.types import GatewayLimits
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.primitives.group.task import GroupMember
from spark_bridge.subtask.errors import PeerLost

MEMBERS = 4
PATIENCE_S = 60.0
"""A baseline that has not ended so long after the loss counts as hanging."""
QUICK_PATIENCE_S = 2.0
LOST_RANK = 1
LOST_STEP = 2
STEPS = 1_000_000
"""More than any training here makes: a training ends by its loss, or right after it."""

Step = Callable[[int], None]
"""What a training calls after each step, with the number of steps."""


class Loss(NamedTuple):
    """How a member is lost, and whether the others wait for its retry."""

    number: int
    elastic: bool


LOSSES = {
    "killed": Loss(signal.SIGKILL, False),
    "killed, elastic": Loss(signal.SIGKILL, True),
    "stopped": Loss(signal.SIGSTOP, False),
}


@dataclass(frozen=True, slots=True)
class Training:
    """One training, in a group and without.

    Attributes:
        needs: the packages without which it is left out.
        inside: the block of the library in a member.
        train: makes steps until the callback raises.
        rival: what the baseline is called.
        run_rival: runs the baseline's action, in which one member is lost.
    """

    needs: tuple[str, ...]
    inside: Callable[[GroupMember], AbstractContextManager[None]]
    train: Callable[[GroupMember, Step], None]
    rival: str
    run_rival: Callable[[SparkSession, Path, int], object]


class _Enough(Exception):
    """Ends a training after its step."""


def lose_once(marker: Path, number: int, rank: int, step: int) -> None:
    """Kill or stop this process, if it is the one that is to be lost and has not been yet."""
    if (rank, step) == (LOST_RANK, LOST_STEP) and not marker.exists():
        time.sleep(0.3)  # the others wait in the next step
        written = marker.with_suffix(".new")
        written.write_text(f"{time.time()} {os.getpid()}")
        written.rename(marker)
        os.kill(os.getpid(), number)


def _read(marker: Path) -> tuple[float, int]:
    at_s, process = marker.read_text().split()
    return float(at_s), int(process)


def _since_ms(marker: Path) -> float:
    return (time.time() - _read(marker)[0]) * 1e3


# --- the trainings ----------------------------------------------------------------------------------------------------


def _gather(member: GroupMember, step: Step) -> None:
    for number in range(1, STEPS):
        member.all_gather(number)
        step(number)


def _gather_in_barrier_stage(spark: SparkSession, marker: Path, number: int) -> object:
    def work(records: Iterable[int]) -> Iterable[int]:
        context = BarrierTaskContext.get()
        for step in range(1, STEPS):
            context.allGather(str(step))
            lose_once(marker, number, context.partitionId(), step)
        yield 0

    return spark.sparkContext.parallelize(range(MEMBERS), MEMBERS).barrier().mapPartitions(work).collect()


def _reduce_in_gloo(member: GroupMember, step: Step) -> None:
    _gloo_steps(step)


def _gloo_steps(step: Step) -> None:
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    array = torch.zeros(1000)
    for number in range(1, STEPS):
        torch.distributed.all_reduce(array)
        step(number)


def _torch_distributor(spark: SparkSession, marker: Path, number: int) -> object:
    def work() -> None:
        torch: Any = import_module("torch")
        torch.distributed.init_process_group("gloo")
        _gloo_steps(lambda step: lose_once(marker, number, torch.distributed.get_rank(), step))

    module: Any = import_module("pyspark.ml.torch.distributor")
    return module.TorchDistributor(num_processes=MEMBERS, local_mode=False, use_gpu=False).run(work)


def _callback(step: Callable[[Any, int], None]) -> Any:
    """A callback of XGBoost, whose class can only be made where XGBoost is installed."""
    xgboost: Any = import_module("xgboost")

    class EachRound(xgboost.callback.TrainingCallback):  # type: ignore[misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: object) -> bool:
            step(xgboost, epoch + 1)
            return False

    return EachRound()


def _boost(member: GroupMember, step: Step) -> None:
    numpy, xgboost = import_module("numpy"), import_module("xgboost")
    rows = numpy.random.default_rng(member.rank).normal(size=(200, 5))
    data = xgboost.DMatrix(rows, rows.sum(axis=1) > 0, nthread=1)
    settings = {"objective": "binary:logistic", "max_depth": 2, "nthread": 1}
    xgboost.train(settings, data, STEPS, callbacks=[_callback(lambda _, number: step(number))])


def _spark_xgboost(spark: SparkSession, marker: Path, number: int) -> object:
    numpy, vectors = import_module("numpy"), import_module("pyspark.ml.linalg").Vectors
    rows = numpy.random.default_rng(0).normal(size=(200 * MEMBERS, 5))
    frame = spark.createDataFrame([(vectors.dense(row), float(row.sum() > 0)) for row in rows], ["features", "label"])
    lose = _callback(lambda library, step: lose_once(marker, number, library.collective.get_rank(), step))
    module: Any = import_module("xgboost.spark")
    classifier = module.SparkXGBClassifier(
        num_workers=MEMBERS, n_estimators=STEPS, max_depth=2, callbacks=[lose], verbosity=0
    )
    return classifier.fit(frame)


TRAININGS = {
    "all_gather": Training(
        (), lambda _: nullcontext(), _gather, "allGather in a barrier stage", _gather_in_barrier_stage
    ),
    "torch": Training(
        ("torch",), lambda member: member.torch(), _reduce_in_gloo, "TorchDistributor", _torch_distributor
    ),
    "xgboost": Training(
        ("xgboost", "sklearn"), lambda member: member.xgboost(), _boost, "SparkXGBClassifier", _spark_xgboost
    ),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def _lose_member(spark: SparkSession, training: Training, marker: Path, loss: Loss) -> tuple[list[float], list[float]]:
    """Lose a member of a group; return when each of the others has raised ``PeerLost``, and has made the next step."""
    inside, train = training.inside, training.train
    heartbeats = GatewayLimits(heartbeat_interval_s=0.25) if loss.number == signal.SIGSTOP else None
    with Sidecar(spark) as sidecar:
        group = sidecar.group("members", MEMBERS, min_size=MEMBERS - loss.elastic, start_wait_s=60.0)
        job = sidecar.coordinate(marker.name, parallelism=MEMBERS, uses=[group], gateway=heartbeats)

        def first(member: GroupMember) -> Step:
            return lambda step: lose_once(marker, loss.number, member.rank, step)

        def work(records: Iterator[int]) -> Iterator[tuple[float, float]]:
            lost_ms: list[float] = []
            next_ms: list[float] = []

            def next_step(member: GroupMember) -> Step:
                def made(_: int) -> None:
                    next_ms.append(_since_ms(marker))
                    member.barrier()  # a member that leaves before the others have made the step would be their loss
                    raise _Enough

                return made

            if loss.elastic and marker.exists():
                return  # the retry, without which the others have gone on
            while not next_ms:
                try:
                    with group as member, inside(member):
                        train(member, next_step(member) if marker.exists() else first(member))
                except _Enough:
                    pass
                except PeerLost:
                    if not next_ms:
                        lost_ms.append(_since_ms(marker))
            if lost_ms:  # not the retry of the lost member
                yield lost_ms[0], next_ms[0]

        found = list(spark.sparkContext.parallelize(range(MEMBERS), MEMBERS).mapPartitions(job.subtask(work)).collect())
        return [lost_ms for lost_ms, _ in found], [next_ms for _, next_ms in found]


def _until_over(action: Callable[[], object], marker: Path, patience_s: float) -> tuple[float, str]:
    """Run a baseline's action; return the milliseconds from the loss until its end, and how it ended."""
    ended: list[tuple[float, str]] = []

    def run() -> None:
        outcome = "finished"
        try:
            action()
        except (PySparkException, Py4JError, RuntimeError):
            outcome = "failed"
        ended.append((time.time(), outcome))

    thread = threading.Thread(target=run, name="baseline", daemon=True)
    thread.start()
    while thread.is_alive() and not marker.exists():
        thread.join(0.05)
    if not marker.exists():
        raise RuntimeError(f"the baseline {ended[0][1]} before a member was lost")
    lost_at_s, process = _read(marker)
    thread.join(max(0.0, lost_at_s + patience_s - time.time()))
    if thread.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # the rest of the job ends with it
        thread.join()
        return patience_s * 1e3, "still hanging"
    return (ended[0][0] - lost_at_s) * 1e3, ended[0][1]


def member_death(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from the loss of a member until the others are free, and train again, compared with Spark's ways."""
    patience_s = QUICK_PATIENCE_S if quick else PATIENCE_S
    figures = []
    for name, training in TRAININGS.items():
        missing = [package for package in training.needs if find_spec(package) is None]
        if missing or (quick and training.needs):
            progress(f"{name} left out: " + (f"not installed: {', '.join(missing)}" if missing else "a quick run"))
            continue
        with tempfile.TemporaryDirectory() as folder, spark_session(f"local[{MEMBERS},4]") as spark:
            markers = (Path(folder) / f"{name}-{number}" for number in count())
            for case, loss in LOSSES.items():
                if quick and loss.elastic:
                    continue
                rounds = 1 if quick else 2 if loss.number == signal.SIGSTOP else 3
                figures += _of_case(spark, name, case, loss, rounds, patience_s, markers, progress)
    return figures


def _of_case(
    spark: SparkSession,
    name: str,
    case: str,
    loss: Loss,
    rounds: int,
    patience_s: float,
    markers: Iterator[Path],
    progress: Progress,
) -> list[Figure]:
    """Both take turns. A baseline that hangs takes a minute, so it has no warm-up, and neither has the subject."""
    training = TRAININGS[name]
    lost, went_on, rival, outcomes = [], [], [], Counter[str]()
    for done in range(1, rounds + 1):
        marker = next(markers)
        took_ms, outcome = _until_over(
            lambda marker=marker: training.run_rival(spark, marker, loss.number),  # type: ignore[misc]
            marker,
            patience_s,
        )
        rival.append([took_ms])
        outcomes[outcome] += 1
        lost_ms, next_ms = _lose_member(spark, training, next(markers), loss)
        lost.append(lost_ms)
        went_on.append(next_ms)
        progress(f"{name}, {case}, round {done}/{rounds}: {training.rival} {outcome} after {took_ms / 1e3:.1f} s")
    of_all = {"members": MEMBERS, "patience_s": patience_s, "baseline": f"{training.rival}: until its action is over"}
    return [
        Figure(
            "member_death",
            "ms",
            samples,
            rival,
            {"case": {"training": name, "member": case, "until": until}, **of_all},
            {"baseline_ended": dict(outcomes)},
        )
        for until, samples in (("PeerLost", lost), ("the next step", went_on))
    ]
