"""Every message on the wire between a subtask and its gateway.

There are two kinds. *Items* ride in one of the two ordered streams of an attempt: each carries ``seq``, counted
from 1 in its direction, is kept by its sender until the peer has confirmed it (``Confirm``, cumulative), is sent
again after a reconnect, and is recognised by its number when it comes twice (H22, H24, H30). *Plain* messages open,
resume and end a connection.

Every message carries its attempt, by Spark's task attempt id (H1, H3); ``Register`` is the one that introduces it.
Payloads are bytes that hold one msgpack value: the user's event, encoded where it was sent (H21).

The order of fields is the wire format (a msgpack array, the tag first): append, never reorder.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from protocol.values import value


class SubtaskState(NamedTuple):
    """The state of one operator instance in a checkpoint: the subtask that took it, and its bytes.

    A subtask usually restores its own one; with another parallelism it may restore several, or none (H52).
    """

    subtask: int
    state: bytes


class HeldEvent(NamedTuple):
    """An upward event that lies in a snapshot: the subtask that sent it first, and the event (H31, H52).

    ``is_request``: it wanted an answer, for which nobody waits after a restore (H73).
    """

    sender: int
    payload: bytes
    is_request: bool = False


# --- what both ends say -------------------------------------------------------------------------------------------


@value
class Confirm:
    """Every item of your stream up to and including ``seq`` has arrived.

    From a subtask it means: in the operator's mailbox (H23). From a gateway: the coordinator has taken it.
    """

    task_attempt_id: int
    seq: int


@value
class EventMessage:
    """Item, either way: one operator event."""

    task_attempt_id: int
    seq: int
    payload: bytes


# --- subtask to coordinator ---------------------------------------------------------------------------------------


class RestoreMode(IntEnum):
    """Who owns the operator's output (H55, architecture: batch and streaming)."""

    BATCH = 0  # Spark owns it: a retry restarts from the virtual empty checkpoint
    STREAMING = 1  # it is committed with checkpoints: a retry restores the last completed one

    @classmethod
    def named(cls, mode: RestoreMode | str) -> RestoreMode:
        """The mode itself, or the one of this name, in lower case. Raises ``ValueError`` for anything else."""
        for one in cls:
            if mode == one.name.lower() or mode is one:
                return one
        raise ValueError(f"mode must be 'batch' or 'streaming', not {mode!r}")


@value
class Register:
    """Plain, first: this task runs a subtask. ``run_id`` is the stage id; ``attempt_number`` Spark's own.

    ``action``: the id of the ``run`` call whose job this is; empty where the job belongs to none.
    """

    task_attempt_id: int
    operator_id: str
    subtask: int
    run_id: int
    attempt_number: int
    mode: int
    parallelism: int
    location: str  # host and process, for logs
    python_version: str
    action: str = ""


@value
class Resume:
    """Plain, first on a new connection of an attempt that was accepted before: what I have received from you."""

    task_attempt_id: int
    operator_id: str
    received_seq: int


@value
class Opened:
    """Item: the operator has restored its state and is open (H11).

    ``awaits_start``: it begins with its records behind ``StartProcessing`` only (H66).
    """

    task_attempt_id: int
    seq: int
    awaits_start: bool = False


@value
class RequestMessage:
    """Item: an event that wants an answer (H33). ``request_id`` is the subtask's own count."""

    task_attempt_id: int
    seq: int
    request_id: int
    payload: bytes


@value
class ClosedForCheckpoint:
    """Item: nothing sent after this belongs before checkpoint ``checkpoint_id`` (H40)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int


@value
class CheckpointAcknowledged:
    """Item: my snapshot for ``checkpoint_id``: the operator's state, and what my valve held, in order (H31).

    ``events_sent``: how many events and requests of this subtask's history have left, those of before the restore
    included and the held ones not. The coordinator's cut must cover exactly these (H32).
    """

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    state: bytes
    held: tuple[HeldEvent, ...]
    events_sent: int


@value
class CheckpointDeclined:
    """Item: I cannot take part in ``checkpoint_id``."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    reason: str


@value
class Finished:
    """Item, last: the operator has ended. ``failure`` is empty when it ended well; ``state`` is its final state.

    ``events_sent``: as in ``CheckpointAcknowledged``.
    """

    task_attempt_id: int
    seq: int
    failure: str
    state: bytes
    events_sent: int


@value
class RestoredEventMessage:
    """Item: an event that the restored snapshot held, with the subtask that sent it first (H31, H52)."""

    task_attempt_id: int
    seq: int
    sender: int
    payload: bytes


@value
class RestoredRequestMessage:
    """Item: a request that the restored snapshot held, with the subtask that sent it first. It gets no answer (H73)."""

    task_attempt_id: int
    seq: int
    sender: int
    payload: bytes


# --- coordinator to subtask ---------------------------------------------------------------------------------------


@value
class Registered:
    """Plain: you are attempt ``attempt``; restore this. ``states`` is empty for the virtual empty checkpoint."""

    task_attempt_id: int
    attempt: int
    checkpoint_id: int
    states: tuple[SubtaskState, ...]
    held: tuple[HeldEvent, ...]
    reconnect_timeout_s: float
    window_events: int  # how many items you may have unconfirmed
    window_bytes: int
    events_sent: int  # where the count of upward events goes on (H32)


@value
class Resumed:
    """Plain: the answer to ``Resume``: what I have received from you."""

    task_attempt_id: int
    received_seq: int


class RefusalCode(IntEnum):
    """Why a task was refused. The message states the cause and the fix."""

    UNKNOWN_OPERATOR = 1
    SUBTASK_OUT_OF_RANGE = 2
    CONCURRENT_RUN = 3  # H55
    ATTEMPT_OVER = 4
    COORDINATOR_FAILED = 5
    SHUTTING_DOWN = 6
    DUPLICATE_REGISTRATION = 7
    TOO_FEW_PARTITIONS = 8


@value
class Refused:
    """Plain, last: no. The connection closes after it."""

    task_attempt_id: int
    code: int
    message: str


@value
class AttemptEnded:
    """Plain, last: this attempt is over for the coordinator; be mute and stop (spark-facts 16)."""

    task_attempt_id: int
    reason: str


@value
class AnswerMessage:
    """Item: the answer to request ``request_id``; ``error`` is empty when it is one.

    With an error, ``payload`` is the coordinator's traceback as UTF-8 text, or empty.
    """

    task_attempt_id: int
    seq: int
    request_id: int
    error: str
    payload: bytes


@value
class CloseForCheckpoint:
    """Item: close your valve for ``checkpoint_id`` at once and say so (H40)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int


@value
class BarrierMessage:
    """Item: the checkpoint barrier. ``events_before`` is the seq of the last item before the cut (H23)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    events_before: int


@value
class CheckpointCompleted:
    """Item: ``checkpoint_id`` is complete and durable."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int


@value
class CheckpointAborted:
    """Item: ``checkpoint_id`` was given up; open what is closed for it."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int


@value
class SavepointTaken:
    """Item: ``checkpoint_id`` was a savepoint, and is over: open what is closed for it, commit nothing (H49)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int


@value
class CoordinatorAwaited:
    """A note beside the stream: a method of your coordinator has not returned for ``awaited_s`` seconds (H70).

    ``call`` names the method, ``place`` says where it waits; both are empty when it has returned. The text of a timeout
    is all that it is for: it may get lost, no machine handles it, and nothing is confirmed.
    """

    task_attempt_id: int
    call: str
    awaited_s: float
    place: str


def describe_wait(call: str, awaited_s: float, place: str) -> str:
    """Say what the coordinator is doing, in the text of a timeout on either side of the wire."""
    return f"the coordinator has been in {call} for {awaited_s:.0f} s, waiting at {place}"


@value
class StartProcessing:
    """Item: ``subtask_ready`` has returned, and all that it sent lies before this: begin with the records (H66).

    Sent once, to an operator that awaits it.
    """

    task_attempt_id: int
    seq: int


UpItem = (
    EventMessage
    | RestoredEventMessage
    | RestoredRequestMessage
    | Opened
    | RequestMessage
    | ClosedForCheckpoint
    | CheckpointAcknowledged
    | CheckpointDeclined
    | Finished
)
DownItem = (
    EventMessage
    | AnswerMessage
    | CloseForCheckpoint
    | BarrierMessage
    | CheckpointCompleted
    | CheckpointAborted
    | SavepointTaken
    | StartProcessing
)
UpMessage = Register | Resume | Confirm | UpItem
DownMessage = Registered | Resumed | Refused | AttemptEnded | Confirm | DownItem
Downward = DownMessage | CoordinatorAwaited
"""What may come down a connection. The machine of a subtask takes all but the note."""
Message = UpMessage | Downward
