# SPDX-License-Identifier: Apache-2.0

"""The messages between the parts of an explored world, beyond the machines' own vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from protocol.wire.messages import DownMessage, UpMessage

OPERATOR = "words"


class Subtask(int):
    """A number that identifies a subtask; exchanged with another one if subtasks are (``symmetry``)."""


class Task(int):
    """A task attempt id."""


class Slot(int):
    """The place of an attempt in a state: the starts of a subtask are adjacent."""


PERMIT = 1000
"""The ids of requests for permits begin here."""


class Violation(AssertionError):
    """The contract is broken. ``rule``: its number, say ``H23``."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def demand(holds: bool, rule: str, text: str) -> None:
    if not holds:
        raise Violation(rule, text)


class To(IntEnum):
    """The receiver of an output. ``GATEWAYS + slot`` and above: the mailbox of that attempt's gateway."""

    TRACKER = 0
    COORDINATOR = 1
    BRIDGE = 2
    DOWN = 3  # from a gateway, on the connection that it holds
    UP = 4  # from a subtask, on its connection
    APART = 5  # a barrier, sent separately to the gateway's attempt
    HANG_UP = 6  # the gateway closes its connection, after what it has written
    RESUMED = 7  # the gateway has taken the newest connection of its attempt
    ENGINE = 8  # kill this task, by its slot
    OUTPUT = 9  # the coordinator destroys what it prepared for a checkpoint
    GATEWAYS = 16


Output = tuple[int, Any]
"""The receiver and the message. The outputs of one step are in order."""


@dataclass(frozen=True)
class Started:
    """Spark starts the task, which registers immediately. ``input``: the one that its run has."""

    input: int = 0


@dataclass(frozen=True)
class CameDown:
    """A message came down. ``events_before``: of a barrier, the events and answers before its cut; else 0."""

    message: DownMessage
    events_before: int = 0


@dataclass(frozen=True)
class CameUp:
    message: UpMessage


@dataclass(frozen=True)
class CameApart:
    """A barrier that travels separately; it belongs after item ``item_before``."""

    checkpoint_id: int
    item_before: int
    events_before: int


@dataclass(frozen=True)
class Attached:
    """A connection of the attempt reaches its gateway. ``received_seq``: None for the one that it registered on.

    ``over``: the gateway is closed already for lookups.
    """

    received_seq: int | None
    over: bool = False


@dataclass(frozen=True)
class LossNoticed:
    """This end has seen that its connection is broken. A subtask reconnects immediately."""


@dataclass(frozen=True)
class Send:
    """The user's code sends its next event; a coordinator sends to the attempt in ``slot``."""

    slot: int = -1


@dataclass(frozen=True)
class Abandon:
    """The operator waits no more for the answer to its request."""


@dataclass(frozen=True)
class AskPermit:
    """The operator asks a part outside of checkpoints for a permit, and waits."""


@dataclass(frozen=True)
class TakeRecord:
    """The async stage of the operator takes its next record, and begins a call for it if the limit allows."""


@dataclass(frozen=True)
class EndCall:
    """One of the open calls of the async stage has its result: the one at this place, in the order of their begin."""

    place: int


@dataclass(frozen=True)
class LeaveResult:
    """The next result leaves the async stage: its event is sent."""


@dataclass(frozen=True)
class CancellationCame:
    """The gateway of ``slot`` tells the coordinator that nobody waits for the answer to this request."""

    slot: int
    request_id: int


@dataclass(frozen=True)
class Settle:
    """The coordinator settles the reply that it has deferred for the attempt in ``slot``."""

    slot: int


@dataclass(frozen=True)
class MeetBarrier:
    """The operator reaches the barrier in its mailbox. ``sends``: one event from inside its snapshot."""

    declines: bool = False
    sends: bool = False


@dataclass(frozen=True)
class BeginUrgent:
    """The thread for urgent events begins the next one."""


@dataclass(frozen=True)
class EndUrgent:
    """The handler of an urgent event returns."""


@dataclass(frozen=True)
class Died:
    """The task's process is gone, without a message."""


@dataclass(frozen=True)
class Forged:
    """A hostile task registers as subtask 0, under a task id that Spark has never given out (H75)."""

    task: int
    number: int


@dataclass(frozen=True)
class Looked:
    """Spark answers a look while a forged registration waits. ``running``: the slots of the tasks that run."""

    running: tuple[int, ...]


@dataclass(frozen=True)
class RunBegins:
    """The user runs the next job, with this input."""

    input: int


@dataclass(frozen=True)
class JobEnds:
    """Spark ends the job of the current run."""

    succeeded: bool


@dataclass(frozen=True)
class RunStarts:
    """The tracker's mailbox: a run begins. ``input``: the checker's own; the tracker knows only the ``action``."""

    action: str
    input: int


@dataclass(frozen=True)
class InputIs:
    """The checker's own: what the coordinator does from now on belongs to this input."""

    input: int


@dataclass(frozen=True)
class RunIsOver:
    """The coordinator's mailbox: ``run_ended``."""


@dataclass(frozen=True)
class ResetAll:
    """The coordinator's mailbox: ``reset_to_checkpoint``, for another run."""

    checkpoint_id: int
    begins_again: bool


@dataclass(frozen=True)
class KillRequested:
    """Spark was asked to kill the task, and will do so eventually."""


@dataclass(frozen=True)
class Killed:
    """Spark has killed the task."""


@dataclass(frozen=True)
class Finish:
    """The operator ends well."""


@dataclass(frozen=True)
class Leave:
    """The task's completion message is accepted: the process ends, and Spark counts it as a success."""


@dataclass(frozen=True)
class OutOfTime:
    """The machine's next deadline has come."""


@dataclass(frozen=True)
class EndUpload:
    """The files of the snapshot for this checkpoint are stored, or cannot be."""

    checkpoint_id: int
    stored: bool = True


@dataclass(frozen=True)
class FileStored:
    """The tracker's mailbox: a file is in the storage."""

    name: str


@dataclass(frozen=True)
class Sweep:
    """The driver lists the files, and deletes those that nothing needs."""


@dataclass(frozen=True)
class Trigger:
    savepoint: bool = False


@dataclass(frozen=True)
class WriteEnds:
    checkpoint_id: int
    stored: bool = True


@dataclass(frozen=True)
class Snapshot:
    """The coordinator's mailbox: take a snapshot, and cut. ``target``: the folder for the files of a savepoint."""

    checkpoint_id: int
    target: str = ""


@dataclass(frozen=True)
class EventCame:
    """The coordinator's mailbox: an event or a request of the attempt in ``slot``. A restored request has no id."""

    slot: int
    seq: int
    payload: bytes
    sender: int | None = None
    request_id: int | None = None
    is_request: bool = False
    after_snapshot: int = -1
    part: int = 0


@dataclass(frozen=True)
class CheckpointEnded:
    """The coordinator's mailbox: a checkpoint completed or was aborted; a restart may find an aborted one (H64)."""

    checkpoint_id: int
    completed: bool
    in_doubt: bool = False


@dataclass(frozen=True)
class Discarded:
    """The coordinator's mailbox: no restart restores the aborted checkpoint."""

    checkpoint_id: int


@dataclass(frozen=True)
class DiscardEnds:
    """The storage has discarded the checkpoint permanently."""

    checkpoint_id: int


@dataclass(frozen=True)
class Destroyed:
    """The data prepared at the cut of a checkpoint is gone; ``referring``: the checkpoints that need it."""

    cut: int
    referring: tuple[int, ...]


@dataclass(frozen=True)
class SavepointEnded:
    """The checker's own: the coordinator is not notified of it (H49)."""

    checkpoint_id: int


@dataclass(frozen=True)
class Suspected:
    """The coordinator's mailbox: the attempt in ``slot`` may be dead, or it lives after all (H87)."""

    slot: int
    suspected: bool


@dataclass(frozen=True)
class AttemptFinished:
    """The coordinator's mailbox: the success of the attempt in ``slot``."""

    slot: int
