# SPDX-License-Identifier: Apache-2.0

"""Notes in Spark's event log: failures, resets, checkpoints and runs, for ``headgate history``.

Only with ``spark.eventLog.enabled``. What the journal tells is collected for a second and then posted on Spark's
listener bus as one event, from a worker thread. While nothing happens, this does nothing. If the first event cannot
be posted, none is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors import Actor, ActorContext, ActorRef
from actors.coordination.engine.operator_config import Observed
from actors.threads import DRIVER
from protocol.attempts import RunEnded, RunStarted, SubtaskFailed
from protocol.barrier_tracker import OperatorResetToCheckpoint, SubtaskResetToCheckpoint
from protocol.describing import as_json, line
from protocol.values import value
from spark_bridge.bridge.jvm_classes import cause_of, has_stopped, java_source, new_compiled_object, problems
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.journal import Journal, end_of

CLASS_NAME = "headgate.observability.SparkNotes"
FLUSH_AFTER_S = 1.0
NOTES_MAX = 100
"""How many notes one event holds; more within ``FLUSH_AFTER_S`` are counted and left out."""
TEXT_MAX = 500


@value
class Note:
    """One note, ready for JSON."""

    fields: dict[str, Any]


@value
class Flush:
    """It is time to post the collected notes."""


def note_of(operator_id: str, observed: Observed, at: float, journal: Journal) -> dict[str, Any] | None:
    """The note about what was observed, at this time in seconds since the epoch; None if it needs no note."""
    about = _about(observed)
    if about is None:
        return None
    note = {"at": round(at, 3), "operator": operator_id, **about}
    if end_of(observed) is not None:
        ended = journal.of(operator_id).checkpoints
        if ended and ended[-1].checkpoint_id == about["checkpoint"]:
            record = ended[-1]
            note["savepoint"] = record.savepoint
            note["duration_s"] = round(record.duration_s, 6)
            note["phases_s"] = {phase: round(seconds, 6) for phase, seconds in record.phases_s.items()}
    return note


def _about(observed: Observed) -> dict[str, Any] | None:
    match observed:
        case RunStarted(run_id=run_id):
            return {"what": "run started", "stage": run_id}
        case RunEnded(run_id=run_id, succeeded=succeeded, reason=reason):
            return {"what": "run succeeded" if succeeded else "run failed", "stage": run_id, "why": _short(reason)}
        case SubtaskFailed(attempt, reason):
            return {
                "what": "attempt failed",
                "subtask": attempt.subtask,
                "attempt": attempt.attempt,
                "task": attempt.task_attempt_id,
                "kind": reason.kind.name.lower(),
                "why": _short(reason.text),
            }
        case SubtaskResetToCheckpoint(subtask, checkpoint_id):
            return {"what": "subtask reset", "subtask": subtask, "checkpoint": checkpoint_id}
        case OperatorResetToCheckpoint(checkpoint_id=checkpoint_id):
            return {"what": "operator reset", "checkpoint": checkpoint_id}
    if (ended := end_of(observed)) is None:
        return None
    checkpoint_id, outcome, why = ended
    note = {"what": f"checkpoint {outcome}", "checkpoint": checkpoint_id}
    return note if outcome == "completed" else {**note, "why": _short(why)}


def _short(text: str) -> str:
    return line(text, TEXT_MAX)


class EventLog:
    """The object in the JVM. Both methods block; one thread at a time. ``context``: a classic SparkContext."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._java: Any = None

    @staticmethod
    def is_on(context: Any) -> bool:
        """Whether the application writes an event log."""
        return bool(context.getConf().get("spark.eventLog.enabled", "false").lower() == "true")

    def post(self, notes: list[dict[str, Any]]) -> None:
        """Raises one of ``problems()`` if the JVM cannot do it."""
        if self._java is None:
            java = new_compiled_object(self.context, CLASS_NAME, _source)
            java.open(self.context._jsc.sc())
            self._java = java
        self._java.post(as_json(notes).decode())


class EventLogActor(Actor[Note | Flush]):
    """Collects notes and posts them; when it stops, the rest too."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._notes: list[dict[str, Any]] = []
        self._left_out = 0
        self._failed = self._posted = False

    async def receive(self, context: ActorContext[Note | Flush], message: Note | Flush) -> None:
        match message:
            case Note(fields) if not self._failed:
                if len(self._notes) < NOTES_MAX:
                    self._notes.append(fields)
                else:
                    self._left_out += 1
                if not context.timers.is_active("flush"):
                    context.timers.start("flush", Flush(), delay_s=FLUSH_AFTER_S)
            case Flush():
                await self._flush(context)

    async def stopped(self, context: ActorContext[Note | Flush], cause: BaseException | None) -> None:
        await self._flush(context)

    async def _flush(self, context: ActorContext[Note | Flush]) -> None:
        notes, self._notes = self._notes, []
        if self._left_out:
            notes.append({"at": notes[-1]["at"], "operator": "", "what": "notes left out", "count": self._left_out})
            self._left_out = 0
        if not notes or self._failed:
            return
        try:
            await DRIVER.run(self._event_log.post, notes)
        except problems() as problem:
            stopped = await DRIVER.run(has_stopped, self._event_log.context)  # and the event log with it
            if self._posted and not stopped:
                raise
            self._failed = True
            if stopped:
                return
            cause = await DRIVER.run(cause_of, problem)
            raise SidecarError(f"Spark cannot take notes for its event log: {cause}") from None
        else:
            self._posted = True


def subscribe(journal: Journal, actor_ref: ActorRef[Note | Flush]) -> Callable[[], None]:
    """Send the actor a note of everything that needs one. Returns what ends that."""

    def observe(operator_id: str, observed: Observed, now: float) -> None:
        note = note_of(operator_id, observed, journal.epoch + now, journal)
        if note is not None:
            actor_ref.tell(Note(note))

    return journal.subscribe("event-log", observe)


def _source() -> str:
    return java_source(__package__, "SparkNotes")
