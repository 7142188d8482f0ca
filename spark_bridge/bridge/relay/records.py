# SPDX-License-Identifier: Apache-2.0

"""Decodes the relay's records into the facts of ``protocol.facts``.

A relay record is a flat run of big-endian fields: ``u8`` kind, ``i64`` callback time (epoch microseconds
in the driver's JVM), then the fields of its kind, in the order of the reader below that is named after
it. A text is a ``u16`` length and UTF-8. `TaskEventRelay.java` writes exactly this format; change the two
files together. A record that does not match to its last byte is refused, so they cannot diverge unnoticed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from protocol.facts import (
    ApplicationEnded,
    EngineFact,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageLook,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.values import value
from spark_bridge.bridge.runs import ActiveStage

# In the order of the codes that the relay writes.
OUTCOMES = (
    TaskOutcome.SUCCESS,
    TaskOutcome.FAILED,
    TaskOutcome.KILLED,
    TaskOutcome.RESUBMITTED,
    TaskOutcome.EXECUTOR_LOST,
    TaskOutcome.FETCH_FAILED,
    TaskOutcome.COMMIT_DENIED,
)
TASK_STATES = (TaskState.RUNNING, TaskState.SUCCEEDED, TaskState.ENDED, TaskState.UNKNOWN)

T = TypeVar("T")

TEXT_MAX_CHARS = 2000
_TEXT_HEAD_CHARS = 500
_GAP = " ... "


class RecordDecodeError(ValueError):
    """A relay record does not match its kind. Nothing of it was used."""


@value
class RelayedFact:
    """A fact and the time of the listener's callback that it comes from.

    ``callback_us`` is epoch time in microseconds, read in the driver's JVM (``relay="jvm"``) or as the
    callback enters Python (``relay="py4j"``). It is for latency figures only. Facts are ordered by their
    delivery.
    """

    fact: EngineFact
    callback_us: int


@value
class CommandAnswered:
    """The relay has carried out a command, or could not because of ``problem``."""

    request_id: int
    problem: str | None
    status: StatusReported | None = None
    stages: tuple[ActiveStage, ...] | None = None
    look: StageLook | None = None


def shorten(text: str) -> str:
    """Cut to ``TEXT_MAX_CHARS`` characters, keeping the beginning and the more important end of a traceback."""
    if len(text) <= TEXT_MAX_CHARS:
        return text
    return text[:_TEXT_HEAD_CHARS] + _GAP + text[len(text) - (TEXT_MAX_CHARS - _TEXT_HEAD_CHARS - len(_GAP)) :]


_HEAD = struct.Struct(">Bq")
_TASK = struct.Struct(">qiiiiB")


class _Fields:
    """Reads the fields of one record from its front, never past its end."""

    __slots__ = ("_offset", "_record")

    def __init__(self, record: bytes) -> None:
        self._record = record
        self._offset = 0

    def take(self, layout: str) -> tuple[int, ...]:
        return self.take_as(struct.Struct(">" + layout))

    def take_as(self, shape: struct.Struct) -> tuple[int, ...]:
        """As ``take``, without the work to make the layout: for the records of each task."""
        values: tuple[int, ...] = shape.unpack_from(self._record, self._offset)
        self._offset += shape.size
        return values

    def one(self, layout: str) -> int:
        (value,) = self.take(layout)
        return value

    def flag(self) -> bool:
        return _flag(self.one("B"))

    def text(self) -> str:
        record, start = self._record, self._offset + 2
        end = start + int.from_bytes(record[start - 2 : start], "big")
        if end > len(record) or start > len(record):
            raise RecordDecodeError(f"a text of {end - start} bytes runs past the end")
        self._offset = end
        return record[start:end].decode("utf-8")

    def count(self, item_bytes: int) -> int:
        """The length of a list, checked against the bytes that are left before any memory is allocated."""
        count = self.one("I")
        if count * item_bytes > len(self._record) - self._offset:
            raise RecordDecodeError(f"a list of {count} items runs past the end")
        return count

    def finish(self) -> None:
        if self._offset != len(self._record):
            raise RecordDecodeError(f"{len(self._record) - self._offset} bytes after the last field")


def _job_started(fields: _Fields) -> JobStarted:
    job_id = fields.one("i")
    count = fields.count(4)
    return JobStarted(job_id, fields.take(f"{count}i"), fields.text())


def _job_ended(fields: _Fields) -> JobEnded:
    return JobEnded(fields.one("i"), fields.flag(), fields.text())


def _stage_submitted(fields: _Fields) -> StageSubmitted:
    stage_id, stage_attempt, task_count = fields.take("iii")
    return StageSubmitted(stage_id, stage_attempt, task_count, fields.flag(), fields.one("i"))


def _stage_completed(fields: _Fields) -> StageCompleted:
    stage_id, stage_attempt = fields.take("ii")
    failed, failure = fields.flag(), fields.text()
    return StageCompleted(stage_id, stage_attempt, failure if failed else None)


def _task_started(fields: _Fields) -> TaskStarted:
    task_attempt_id, stage_id, stage_attempt, partition, attempt_number, speculative = fields.take_as(_TASK)
    return TaskStarted(
        task_attempt_id,
        stage_id,
        stage_attempt,
        partition,
        attempt_number,
        _flag(speculative),
        fields.text(),
        fields.text(),
    )


def _task_ended(fields: _Fields) -> TaskEnded:
    task_attempt_id, stage_id, stage_attempt, partition, attempt_number, code = fields.take_as(_TASK)
    outcome = _at(OUTCOMES, code, "task outcome")
    return TaskEnded(task_attempt_id, stage_id, stage_attempt, partition, attempt_number, outcome, fields.text())


def _executor_lost(fields: _Fields) -> ExecutorLost:
    return ExecutorLost(fields.text(), fields.text())


def _facts_dropped(fields: _Fields) -> FactsDropped:
    return FactsDropped(fields.one("q"))


def _application_ended(_fields: _Fields) -> ApplicationEnded:
    return ApplicationEnded()


def _answered(fields: _Fields) -> CommandAnswered:
    request_id, done, problem = fields.one("q"), fields.flag(), fields.text()
    return CommandAnswered(request_id, None if done else problem)


def _status_reported(fields: _Fields) -> CommandAnswered:
    request_id = fields.one("q")
    jobs = {fields.one("i"): fields.flag() for _ in range(fields.count(5))}
    tasks: dict[int, TaskState] = {}
    places: dict[int, TaskPlace] = {}
    for _ in range(fields.count(9)):
        task_attempt_id = fields.one("q")
        tasks[task_attempt_id] = state = _at(TASK_STATES, fields.one("B"), "task state")
        if state is not TaskState.UNKNOWN:
            places[task_attempt_id] = TaskPlace(*fields.take("ii"))
    return CommandAnswered(request_id, None, StatusReported(jobs, tasks, places))


def _active_stages(fields: _Fields) -> CommandAnswered:
    request_id = fields.one("q")
    stages = tuple(ActiveStage(*fields.take("iii")) for _ in range(fields.count(12)))
    return CommandAnswered(request_id, None, stages=stages)


def _stage_look(fields: _Fields) -> CommandAnswered:
    request_id, partition_count = fields.one("q"), fields.one("i")
    partitions, outputs, kept = (frozenset(fields.take(f"{fields.count(4)}i")) for _ in range(3))
    return CommandAnswered(request_id, None, look=StageLook(partitions, partition_count, outputs, kept))


def _flag(code: int) -> bool:
    if code > 1:
        raise RecordDecodeError(f"invalid flag: {code}")
    return code == 1


def _at(names: tuple[T, ...], code: int, what: str) -> T:
    if code >= len(names):
        raise RecordDecodeError(f"unknown {what}: {code}")
    return names[code]


_READERS: dict[int, Callable[[_Fields], EngineFact | CommandAnswered]] = {
    1: _job_started,
    2: _job_ended,
    3: _stage_submitted,
    4: _stage_completed,
    5: _task_started,
    6: _task_ended,
    7: _executor_lost,
    8: _facts_dropped,
    9: _application_ended,
    10: _answered,
    11: _status_reported,
    12: _active_stages,
    13: _stage_look,
}


def decode_record(record: bytes) -> RelayedFact | CommandAnswered:
    """Decode one relay record.

    Raises:
        RecordDecodeError: the kind is unknown, a field is missing, out of range or not UTF-8, or bytes are
            left over.
    """
    fields = _Fields(record)
    try:
        kind, callback_us = fields.take_as(_HEAD)
        reader = _READERS.get(kind)
        if reader is None:
            raise RecordDecodeError("unknown kind")
        decoded = reader(fields)
        fields.finish()
    except (struct.error, ValueError) as problem:
        raise RecordDecodeError(
            f"relay record of kind {record[0] if record else None} and {len(record)} bytes: {problem}"
        ) from problem
    if isinstance(decoded, CommandAnswered):
        return decoded
    return RelayedFact(decoded, callback_us)
