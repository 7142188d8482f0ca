# SPDX-License-Identifier: Apache-2.0

"""The interface of both relays: facts from Spark's listener bus in, a few commands out.

Facts are delivered on the event loop that ``start`` was called on, one call of ``on_fact`` each, in the
order of the listener bus. Facts can be lost (``FactsDropped`` says how many) or late, but never invented.
``on_fact`` must not block. An exception from it is logged, and the next fact is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.errors import HeadgateError
from protocol.facts import StageLook, StatusReported, TaskPlace
from spark_bridge.bridge.relay.records import RelayedFact

OnFact = Callable[[RelayedFact], None]


REJECTED = "The task or the job has probably ended already; otherwise Spark's log on the driver says more"
"""What follows from a refused command."""


class RelayError(HeadgateError):
    """The relay cannot do what was asked. The message says why and, if possible, how to fix it."""


class RelayRefused(RelayError):
    """This kind of relay cannot run in this driver; the other kind may be able to."""


class RelayStopped(RelayError):
    """The relay is closed, or its SparkContext has stopped. Make a new session and a new sidecar."""


class ApplicationLost(RelayStopped):
    """The Spark application is gone, or cannot be observed any more, while this process continues.

    Make a new session and a new sidecar.
    """


OnLost = Callable[[RelayError], None]


@dataclass(slots=True)
class RelayStatistics:
    """Counters since ``start``; ``dropped``: lost by Spark's bus, our buffer or a broken connection."""

    records: int = 0
    dropped: int = 0
    reconnects: int = 0


class Relay(Protocol):
    """A listener on Spark's bus. Use it from one event loop; it is not thread-safe."""

    @property
    def kind(self) -> str:
        """``"jvm"`` or ``"py4j"``."""

    @property
    def statistics(self) -> RelayStatistics:
        """Counted up in place while the relay is open."""

    async def start(self) -> None:
        """Attach to the listener bus. Events that Spark posted before are not seen.

        Raises:
            RelayStopped: the SparkContext has stopped.
            RelayRefused: this kind of relay cannot run here; the cause is chained.
        """

    async def close(self) -> None:
        """Leave the bus and release threads and sockets. Idempotent; safe after the SparkContext has stopped.

        No fact is delivered after it returns; commands raise ``RelayStopped``.
        """

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        """Have Spark kill exactly this attempt (the task's next attempt does not count as a failure).

        Returns when Spark has accepted the request; the end of the attempt is a later fact. An attempt that
        has ended or never existed is not an error. Nor is a task that runs in another stage or partition than
        ``place``: it is left alone, because only a peer's claim has named it.

        Raises:
            RelayStopped: see ``close``; RelayError: no answer in time, or Spark refused.
        """

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """Have Spark cancel this job; otherwise like ``kill_task``."""

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        """Query the schedulers' own tables, which are ahead of the listener bus (H19).

        Jobs come from the DAG scheduler's active jobs, tasks from the task sets that the task scheduler works
        on, each with its stage and partition. A task that runs is always in one of these sets. For a task whose
        set is over, the status store is asked (``relay="jvm"``) or the answer is ``UNKNOWN`` (``relay="py4j"``).
        The answer may overtake facts that are still on their way.

        The start of each active job is delivered as a fact, perhaps again, because the bus may have dropped it.
        """

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Deliver the facts of this stage's tasks from now on, and of this task, in whichever stage it is.

        A relay that holds facts back (``watched_only``) first delivers those of the stage that it has held: the starts
        of tasks that have not succeeded, and how those that failed have ended. They come later than other facts that
        Spark posted after them, but in their own order. Any other relay delivers all facts, and does nothing here.
        To name a stage again is harmless. Raises as ``kill_task`` does.
        """

    async def look_at_stage(self, stage_id: int) -> StageLook:
        """Which partitions Spark computes in this stage, and which output of earlier jobs it has kept.

        Asks the DAG scheduler and the block manager, not the bus. Raises as ``kill_task`` does.
        """


def require_driver(spark: Any) -> Any:
    """The classic ``SparkContext`` behind a session or a context.

    Raises:
        RelayError: a Spark Connect session, from which no driver JVM can be reached.
        RelayStopped: the SparkContext has stopped.
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise RelayError(
            "a Spark Connect session has no driver's JVM, which this needs: use Sidecar(session), which runs in the "
            "client's process, or run in the driver, with a session built by SparkSession.builder.master(...)"
        )
    context = getattr(spark, "sparkContext", spark)
    if getattr(context, "_jsc", None) is None:
        raise RelayStopped("the SparkContext has stopped: build a new session first")
    return context
