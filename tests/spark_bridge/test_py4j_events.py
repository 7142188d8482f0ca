# SPDX-License-Identifier: Apache-2.0

"""What the Python listener reads of Spark's events, with a stand-in for the Java objects."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.facts import (
    ApplicationEnded,
    EngineFact,
    ExecutorLost,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
    TaskState,
)
from spark_bridge.bridge.relay.py4j_listener import _READERS, _BusListener, _state


class Java:
    """An object whose methods return what it was made of."""

    def __init__(self, kind: str = "", /, **fields: Any) -> None:
        self._kind = kind
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._fields[name]

    def getClass(self) -> Java:
        return Java(getSimpleName=self._kind)

    def iterator(self) -> Items:
        return Items(self._fields["items"])


class Items:
    """An iterator of Java."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self._left = list(items)

    def hasNext(self) -> bool:
        return bool(self._left)

    def next(self) -> Any:
        return self._left.pop(0)


def several(*items: Any) -> Java:
    return Java(items=items)


NONE, RDDS = Java(isDefined=False), [Java(isBarrier=False, numPartitions=6), Java(isBarrier=True, numPartitions=9)]
TASK = Java(
    taskId=1, partitionId=4, index=9, attemptNumber=5, speculative=True, executorId="an executor", host="a host"
)
PLACE: dict[str, Any] = {"stageId": 2, "stageAttemptId": 3, "taskInfo": TASK}
EVENTS: list[tuple[str, Java, EngineFact]] = [
    (
        "onJobStart",
        Java(jobId=1, stageInfos=several(Java(stageId=2), Java(stageId=3)), properties=Java(getProperty="an action")),
        JobStarted(1, (2, 3), "an action"),
    ),
    ("onJobStart", Java(jobId=1, stageInfos=several(), properties=None), JobStarted(1, (), "")),
    ("onJobEnd", Java(jobId=1, jobResult=Java("JobSucceeded$")), JobEnded(1, True, "")),
    (
        "onJobEnd",
        Java(jobId=1, jobResult=Java("JobFailed", exception=Java(getMessage="a reason"))),
        JobEnded(1, False, "a reason"),
    ),
    (
        "onJobEnd",
        Java(jobId=1, jobResult=Java("JobFailed", exception=Java(getMessage=None))),
        JobEnded(1, False, "null"),
    ),
    (
        "onStageSubmitted",
        Java(stageInfo=Java(stageId=1, attemptNumber=2, numTasks=3, rddInfos=several(*RDDS))),
        StageSubmitted(1, 2, 3, True, 6),
    ),
    (
        "onStageCompleted",
        Java(stageInfo=Java(stageId=1, attemptNumber=2, failureReason=NONE)),
        StageCompleted(1, 2, None),
    ),
    (
        "onStageCompleted",
        Java(stageInfo=Java(stageId=1, attemptNumber=2, failureReason=Java(isDefined=True, get="a reason"))),
        StageCompleted(1, 2, "a reason"),
    ),
    ("onTaskStart", Java(**PLACE), TaskStarted(1, 2, 3, 4, 5, True, "an executor", "a host")),
    *(
        (
            "onTaskEnd",
            Java(**PLACE, reason=Java(kind, description="d", reason="r", message="m", toErrorString="e")),
            TaskEnded(1, 2, 3, 4, 5, outcome, message),
        )
        for kind, outcome, message in (
            ("Success$", TaskOutcome.SUCCESS, ""),
            ("ExceptionFailure", TaskOutcome.FAILED, "d"),
            ("TaskKilled", TaskOutcome.KILLED, "r"),
            ("Resubmitted$", TaskOutcome.RESUBMITTED, "e"),
            ("ExecutorLostFailure", TaskOutcome.EXECUTOR_LOST, "e"),
            ("FetchFailed", TaskOutcome.FETCH_FAILED, "m"),
            ("TaskCommitDenied", TaskOutcome.COMMIT_DENIED, "e"),
            ("UnknownReason$", TaskOutcome.FAILED, "e"),
        )
    ),
    ("onExecutorRemoved", Java(executorId="an executor", reason="a reason"), ExecutorLost("an executor", "a reason")),
    ("onApplicationEnd", Java(), ApplicationEnded()),
]


def test_each_event_that_is_read_has_an_example_here() -> None:
    assert {name for name, _, _ in EVENTS} == set(_READERS)


@pytest.mark.parametrize(("name", "event", "fact"), EVENTS)
def test_an_event_is_read_as_this_fact(name: str, event: Java, fact: EngineFact) -> None:
    heard: list[EngineFact] = []
    listener = _BusListener(lambda one, at_us: heard.append(one), pytest.fail)
    getattr(listener, name)(event)
    assert heard == [fact]


def test_what_cannot_be_read_is_told_and_what_nobody_needs_is_passed_over() -> None:
    failed: list[str] = []
    listener = _BusListener(lambda one, at_us: pytest.fail(str(one)), failed.append)
    listener.onTaskStart(Java())
    listener.onSomethingNew(Java())
    assert [text.partition(":")[0] for text in failed] == ["onTaskStart"]
    with pytest.raises(AttributeError):
        _ = listener.toString


@pytest.mark.parametrize(
    ("task", "state"),
    [
        (Java(finished=False), TaskState.RUNNING),
        (Java(finished=True, successful=True), TaskState.SUCCEEDED),
        (Java(finished=True, successful=False), TaskState.ENDED),
    ],
)
def test_the_state_of_a_task_is_read_as_this(task: Java, state: TaskState) -> None:
    assert _state(task) is state
