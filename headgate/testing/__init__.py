# SPDX-License-Identifier: Apache-2.0

"""Test coordinators and operators without Spark, in virtual time.

``running_operator`` runs your coordinator with Headgate's own protocol. The test plays Spark: it launches tasks, kills
them and retries them, and it moves the clock::

    async with running_operator(RateLimiter(per_second=1), parallelism=2) as world:
        first, second = await world.launch_all()
        answer = first.request("permit")
        await world.advance(1.0)
        assert answer.value is True

To test plain actors, use ``headgate.actors.testing``, on which this kit is built.

A task is either a ``Task``, for which the test speaks, or an ``OperatorTask``, which runs your ``SubtaskOperator``.

``sink_cases`` is the conformance suite for a ``TwoPhaseSink``, and ``source_cases`` that for a ``Source``; a
``SinkTarget`` or ``SourceTarget`` tells it how to make what is tested, and how to read or fill the system behind it.

``check_bookkeeping`` plays random histories of failures, checkpoints and restores to your coordinator and its tasks,
which a ``Bookkeeping`` describes.

Nothing here needs Spark, Java or pytest, and ``import headgate`` does not load it.
"""

import spark_bridge.common  # noqa: F401  # first: refuses a foreign package in the place of ours
from headgate.testing._answer import Answer
from headgate.testing._bookkeeping import Bookkeeping, KeptOutputs, check_bookkeeping
from headgate.testing._cases import Case
from headgate.testing._operator_task import OperatorTask
from headgate.testing._recording import RecordingCoordinator
from headgate.testing._sink_cases import sink_cases
from headgate.testing._sink_world import SinkTarget
from headgate.testing._source_cases import SourceTarget, source_cases
from headgate.testing._task import PartEvent, Task
from headgate.testing._world import World, running_operator

__all__ = [
    "Answer",
    "Bookkeeping",
    "Case",
    "KeptOutputs",
    "OperatorTask",
    "PartEvent",
    "RecordingCoordinator",
    "SinkTarget",
    "SourceTarget",
    "Task",
    "World",
    "check_bookkeeping",
    "running_operator",
    "sink_cases",
    "source_cases",
]
