# SPDX-License-Identifier: Apache-2.0

"""The messages between a subtask and its gateway.

There are two kinds. *Items* belong to one of the two ordered streams of an attempt. Each carries ``seq``, counted from
1 in its direction. Its sender keeps it until the peer confirms it (``Confirm``, cumulative), and sends it again after a
reconnect; the number identifies duplicates (H22, H24, H30). *Plain* messages open, resume and end a connection.

An item of a checkpoint carries ``confirmed``: what a ``Confirm`` beside it would say (0: nothing new). So these items,
which are most of what a quiet subtask exchanges, need no separate confirmations.

Every message names its attempt by Spark's task attempt id (H1, H3); ``Register`` introduces it. A payload is the bytes
of one msgpack value: the event, encoded at the sender (H21). ``part`` says whose it is: the index in the operator's
table of parts (``protocol.parts``), 0 for the user's own (H150).

The order of fields is the wire format (a msgpack array, the tag first): append, never reorder.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, cast, get_args

from protocol.values import value
from protocol.wire.state_handles import StateHandle


class SubtaskState(NamedTuple):
    """The state of one operator instance in a checkpoint: the subtask that took it, its bytes, and the files that it
    stored beside them, if any (H190).

    A subtask usually restores its own state. With another parallelism it may restore several, or none (H52).
    ``groups``: not None if this is a piece of a state, made by a change of the parallelism: the first one of the key
    groups in the files that count here, and the one after the last. The bytes are then only those that belong to the
    files; the rest of the state is one without files.
    """

    subtask: int
    state: bytes
    files: StateHandle | None = None
    groups: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that is in the files counts."""
        return self.groups is None or self.files is None or self.groups == (self.files.key_groups or ())[:2]


class HeldEvent(NamedTuple):
    """An event to the coordinator that a snapshot holds, with the subtask that first sent it (H31, H52).

    ``is_request``: it asked for an answer; after a restore nothing waits for it any more (H73).
    """

    sender: int
    payload: bytes
    is_request: bool = False
    part: int = 0


PARTS_MAX = 128
"""How many parts an operator may have. The index of one takes one byte in each event."""


class OperatorPart(NamedTuple):
    """A part of an operator. ``outside``: its messages are outside of checkpoints (H152)."""

    name: str
    outside: bool = False


Positions = tuple[int, ...]
"""How many events and requests of each part have been sent in the history of a subtask; see ``protocol.parts``."""


# --- both directions ----------------------------------------------------------------------------------------------


@value
class Confirm:
    """The receiver's items up to and including ``seq`` have arrived.

    From a subtask: they are in the operator's mailbox (H23). From a gateway: the coordinator has taken them.
    """

    task_attempt_id: int
    seq: int


@value
class EventMessage:
    """Item, either way: one operator event."""

    task_attempt_id: int
    seq: int
    payload: bytes
    part: int = 0


# --- subtask to coordinator ---------------------------------------------------------------------------------------


class RestoreMode(IntEnum):
    """Who owns the operator's output, which decides what a retried subtask restores.

    ``"batch"`` and ``"streaming"`` are accepted wherever a mode is.
    """

    BATCH = 0  # Spark owns the output: a retry starts without state
    STREAMING = 1  # checkpoints commit the output: a retry restores the last completed checkpoint

    @classmethod
    def named(cls, mode: RestoreMode | str) -> RestoreMode:
        """Return the mode itself, or the one with this lower-case name. Raises ``ValueError`` for anything else."""
        for one in cls:
            if mode == one.name.lower() or mode is one:
                return one
        raise ValueError(f"mode must be 'batch' or 'streaming', not {mode!r}")


@value
class Register:
    """Plain, first: this task runs a subtask. ``run_id`` is the stage id; ``attempt_number`` is Spark's.

    ``action``: the id of the ``run`` call that started the job; empty if there is none.
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
    """Plain, first on a new connection of an accepted attempt: which items the subtask has received.

    ``token`` is the one that the attempt was given in ``Registered``; without it, nobody takes the attempt over (H74).
    """

    task_attempt_id: int
    operator_id: str
    received_seq: int
    token: bytes = b""


@value
class Opened:
    """Item: the operator has restored its state and is open (H11).

    ``awaits_start``: it begins with its records only after ``StartProcessing`` (H66).
    """

    task_attempt_id: int
    seq: int
    awaits_start: bool = False


@value
class RequestMessage:
    """Item: an event that asks for an answer (H33). ``request_id`` is the subtask's own count."""

    task_attempt_id: int
    seq: int
    request_id: int
    payload: bytes
    part: int = 0


@value
class RequestCancelled:
    """Item: nobody waits any more for the answer to request ``request_id``, which has left. It still gets one.

    A kind of item by itself, which passes the valve and the window: it says nothing to the user's code (H85).
    """

    task_attempt_id: int
    seq: int
    request_id: int


@value
class ClosedForCheckpoint:
    """Item: nothing sent after this belongs before checkpoint ``checkpoint_id`` (H40)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    confirmed: int = 0


@value
class CheckpointAcknowledged:
    """Item: the subtask's snapshot: the operator's state, and the events that its valve held, in order (H31).

    ``events_sent``: how many events and requests of this subtask's history have left, by part, including those before
    the restore, without the held ones. The coordinator's cut must cover exactly these (H32). ``state_follows``: the
    task stores a part of the state itself, and ``StateStored`` or ``StateFailed`` follows (H192).
    """

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    state: bytes
    held: tuple[HeldEvent, ...]
    events_sent: Positions
    confirmed: int = 0
    state_follows: bool = False


@value
class StateStored:
    """Item: the files of an acknowledged snapshot are stored, and ``handle`` names them (H190)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    handle: StateHandle
    confirmed: int = 0


@value
class StateFailed:
    """Item: the files of an acknowledged snapshot could not be stored.

    ``CheckpointDeclined`` cannot say this: the valve has opened at the snapshot, and does not close again (H192).
    """

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    reason: str
    confirmed: int = 0


@value
class CheckpointDeclined:
    """Item: the subtask cannot take part in ``checkpoint_id``."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    reason: str
    confirmed: int = 0


@value
class Finished:
    """Item, last: the operator has ended. ``failure`` is empty if it succeeded; ``state`` is its final state.

    ``events_sent``: as in ``CheckpointAcknowledged``. ``files``: those of the final state, which are stored (H190).
    """

    task_attempt_id: int
    seq: int
    failure: str
    state: bytes
    events_sent: Positions
    files: StateHandle | None = None


@value
class Heartbeat:
    """Plain: the task's process lives. Sent if nothing else was for ``Registered.heartbeat_interval_s`` (H94)."""

    task_attempt_id: int


@value
class RestoredEventMessage:
    """Item: an event that the restored snapshot held, with the subtask that first sent it (H31, H52)."""

    task_attempt_id: int
    seq: int
    sender: int
    payload: bytes
    part: int = 0


@value
class RestoredRequestMessage:
    """Item: a request that the restored snapshot held, with the subtask that first sent it. It gets no answer (H73)."""

    task_attempt_id: int
    seq: int
    sender: int
    payload: bytes
    part: int = 0


# --- coordinator to subtask ---------------------------------------------------------------------------------------


@value
class Registered:
    """Plain: the task is accepted, with what it restores. ``states`` is empty for the virtual empty checkpoint.

    Only this attempt and the sidecar know ``token``, which ``Resume`` shows (H74). ``heartbeat_interval_s``: how often
    the task gives a sign of life; 0 if it need not (H94). ``hold_events``: whether checkpoints hold events back (H79).
    ``input_begins_again``: whether the records before the restored checkpoint come again (H174). ``positions_refused``:
    why an operator that counts Spark's records must not begin; empty if it may. ``parts``: the operator's, in the order
    of their indices. ``files_from``: the savepoint that has the files of ``states``; empty if they are where this
    application stores its own.
    """

    task_attempt_id: int
    attempt: int
    checkpoint_id: int
    states: tuple[SubtaskState, ...]
    held: tuple[HeldEvent, ...]
    reconnect_timeout_s: float
    window_events: int  # how many events and requests the subtask may have unconfirmed
    window_bytes: int
    events_sent: Positions  # where the counts of sent events continue (H32)
    token: bytes = b""
    heartbeat_interval_s: float = 0.0
    hold_events: bool = True
    input_begins_again: bool = False
    positions_refused: str = ""
    parts: tuple[OperatorPart, ...] = (OperatorPart(""),)
    files_from: str = ""


@value
class Resumed:
    """Plain: the answer to ``Resume``: which items the coordinator has taken."""

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
    SECOND_OPERATOR = 9  # H174


@value
class Refused:
    """Plain, last: the task is refused. The connection closes after it."""

    task_attempt_id: int
    code: int
    message: str


@value
class AttemptEnded:
    """Plain, last: the attempt is over for the coordinator. The task must stop sending and end (spark-facts 16)."""

    task_attempt_id: int
    reason: str


@value
class AnswerMessage:
    """Item: the answer to request ``request_id``; ``error`` is empty unless the request failed.

    With an error, ``payload`` is the coordinator's traceback as UTF-8 text, or empty.
    """

    task_attempt_id: int
    seq: int
    request_id: int
    error: str
    payload: bytes


@value
class CloseForCheckpoint:
    """Item: close the valve for ``checkpoint_id`` immediately and report it (H40)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    confirmed: int = 0


@value
class SavepointTarget:
    """Item, before the barrier: ``checkpoint_id`` is a savepoint, and its files belong into the folder ``target``.

    A savepoint needs no file outside of itself (H193). A message by itself, because a barrier may travel apart.
    """

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    target: str


@value
class BarrierMessage:
    """Item: the checkpoint barrier. ``events_before`` is the seq of the last item before the cut (H23)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    events_before: int
    confirmed: int = 0


@value
class CheckpointCompleted:
    """Item: ``checkpoint_id`` is complete and durable."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    confirmed: int = 0


@value
class CheckpointAborted:
    """Item: ``checkpoint_id`` was aborted: open the valve for it."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    confirmed: int = 0


@value
class SavepointTaken:
    """Item: ``checkpoint_id`` was a savepoint, and is over: open the valve for it, commit nothing (H49)."""

    task_attempt_id: int
    seq: int
    checkpoint_id: int
    confirmed: int = 0


@value
class CoordinatorAwaited:
    """A note outside the stream: a coordinator's method has not returned for ``awaited_s`` seconds (H70).

    ``call`` names the method, ``place`` says where it waits; both are empty after it has returned. Only texts of
    timeouts use it, so it may get lost, no machine handles it, and it is not confirmed.
    """

    task_attempt_id: int
    call: str
    awaited_s: float
    place: str


def describe_wait(call: str, awaited_s: float, place: str) -> str:
    """What the coordinator is doing, for the text of a timeout on either side of the wire."""
    return f"the coordinator has been in {call} for {awaited_s:.0f} s, waiting at {place}"


@value
class UrgentEventMessage:
    """Item: an operator event for ``handle_urgent``, which does not wait for the task's thread (H90).

    A kind of message by itself, so that ordinary events do not grow.
    """

    task_attempt_id: int
    seq: int
    payload: bytes
    part: int = 0


@value
class StartProcessing:
    """Item: ``subtask_ready`` has returned, and what it sent precedes this: begin with the records (H66).

    Sent once, to an operator that waits for it.
    """

    task_attempt_id: int
    seq: int


UpItem = (
    EventMessage
    | RestoredEventMessage
    | RestoredRequestMessage
    | Opened
    | RequestMessage
    | RequestCancelled
    | ClosedForCheckpoint
    | CheckpointAcknowledged
    | StateStored
    | StateFailed
    | CheckpointDeclined
    | Finished
)
DownItem = (
    EventMessage
    | UrgentEventMessage
    | AnswerMessage
    | CloseForCheckpoint
    | SavepointTarget
    | BarrierMessage
    | CheckpointCompleted
    | CheckpointAborted
    | SavepointTaken
    | StartProcessing
)
OfCheckpoint = (
    ClosedForCheckpoint
    | CheckpointAcknowledged
    | StateStored
    | StateFailed
    | CheckpointDeclined
    | CloseForCheckpoint
    | BarrierMessage
    | CheckpointCompleted
    | CheckpointAborted
    | SavepointTaken
)
"""The items that carry ``confirmed``."""
OF_CHECKPOINT: frozenset[type] = frozenset(get_args(OfCheckpoint))
UpMessage = Register | Resume | Confirm | Heartbeat | UpItem
DownMessage = Registered | Resumed | Refused | AttemptEnded | Confirm | DownItem
Downward = DownMessage | CoordinatorAwaited
"""The messages that a subtask may receive. Its machine handles all except the note."""
Message = UpMessage | Downward


def confirmed_by(message: Message) -> int:
    """How many items this message confirms, counted from the first one; 0 if it confirms none."""
    kind = type(message)
    if kind is Confirm:
        return cast(Confirm, message).seq
    return cast(OfCheckpoint, message).confirmed if kind in OF_CHECKPOINT else 0
