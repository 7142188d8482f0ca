# SPDX-License-Identifier: Apache-2.0

"""The parts of an operator in one task: its own operator, the counters, ready-made parts, and the stages of a chain.

To Spark and to checkpoints all of them are one operator (H80). The table ``OperatorParts`` has each part by its name;
the user's own has the empty one. Each part has its own context and state. A call that concerns all parts reaches those
with names in the order in which they were given, then the user's own. A snapshot begins with the user's own, which may
decline the checkpoint, and ``close`` has the reverse order, because it may use the others until it is closed.

A chain is an order in which parts feed each other: each stage pulls from the one before it, so at any moment one stage
runs: the stages after it wait for a record, and those before it wait after an output, or have ended. A snapshot is a
cut through all of them. It has to find each stage where its state says all: a stage that waits for a record has
processed the earlier ones, but a stage that waits after an output may be in the middle of a record, unless it sets
``snapshot_anywhere``. So a snapshot can be taken

    where                                             if these set ``snapshot_anywhere``
    stage k takes a record of Spark (k = 0)           -
    stage k takes a record of stage k - 1             stages 0 to k - 1
    stage k calls ``wait_for_event`` and the like     stages 0 to k - 1
    stage k waits in ``send_event`` or ``request``    stages 0 to k
    the last stage n has yielded an output            stages 0 to n

Elsewhere, a barrier waits in the mailbox until the next of these moments; in the third and the fourth row, where the
stage itself may wait for what comes after the barrier, the checkpoint is declined. An operator without
stages is stage 0 of this table, alone.

User code that holds a reference to a part, such as a ``WorkQueue``, finds its task's part with ``current_part``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from weakref import WeakSet

from protocol.arguments import AT_LEAST_1, POSITIVE, check_settings
from protocol.describing import a_type, name_of, show, type_name
from protocol.errors import LocalProtocolError
from protocol.file_retention import LAST_STATE
from protocol.overrides import NeverCalled, errors_in_overrides, mentions, names_never_called
from protocol.parts import FILES_OF, join_states, states_by_part
from protocol.subtask.types import (
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxItem,
    MailboxStart,
)
from protocol.wire.codec import decode_event
from protocol.wire.messages import Registered, SubtaskState
from protocol.wire.traces import TRACED_FIRST, TRACED_START, split_traceparent
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.context import Calls, Counters, SubtaskContext, index_of, to_one_that_asks
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator, TimedOut
from spark_bridge.subtask.mailbox import MailboxCall
from spark_bridge.subtask.operator import SubtaskOperator, close_quietly, iterated
from spark_bridge.subtask.source import SplitReader
from spark_bridge.subtask.task_channel import TaskChannel
from spark_bridge.subtask.traces import inside_span

if TYPE_CHECKING:
    from spark_bridge.storage.state_files.snapshot import Snapshot
    from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles

__all__ = [
    "COUNTERS",
    "ON_DRIVER",
    "OperatorParts",
    "PartInTask",
    "TaskAccess",
    "TaskPart",
    "check_operator",
    "current_part",
    "overrides_handle_event",
    "parts_here",
    "runs_in_task",
]

COUNTERS = "headgate.counters"
"""The name of the part that every operator has."""


class TakenState(NamedTuple):
    """The state of all parts: its bytes, and the files of one of them, frozen."""

    data: bytes
    files: Snapshot | None = None


class TaskAccess(Protocol):
    """What a ready-made part knows of its task, beyond what its context tells any operator."""

    @property
    def endpoint(self) -> TaskEndpoint:
        """The sidecar's address and the operator's settings."""

    each_failure_counts: bool
    """Whether a coroutine that fails fails the task, whatever its stage was told: something else is lost with it."""

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` called on the task's own thread: see ``SubtaskChannel``."""

    def timed_out(self, failure: str) -> TimedOut:
        """The error of a wait that took too long, with what the coordinator is waiting for, if known."""


class TaskPart(SubtaskOperator):
    """The task's half of a ready-made part. It processes no records.

    ``task`` is set before ``open``.
    """

    task: TaskAccess

    def before_records(self) -> None:
        """Called once, before the first operator's ``process``. It may wait for events."""


class _ByName(dict[str, SubtaskOperator]):
    def __missing__(self, name: str) -> SubtaskOperator:
        raise LocalProtocolError(
            f"the coordinator sent something to the part {name!r}, which this task does not have: if it is a "
            "stage, pass the same chain to coordinate() and to subtask()"
        )


class OperatorParts:
    """The parts of one operator in one task; see the module. It is used on the task's own thread.

    ``operators``: by name, in the order of calls. ``calls``: those in progress, once they are open.
    """

    def __init__(
        self,
        make_own: Callable[[], SubtaskOperator] | None,
        parts: Mapping[str, Callable[[], SubtaskOperator]],
        stages: Sequence[str] = (),
    ) -> None:
        """Make all parts. If one cannot be made, those that were are closed.

        ``make_own`` makes the user's own operator; None if the operator is a chain of ``stages``, which are ``parts``.
        """
        self.operators = _ByName()
        self.stages = tuple(stages)
        try:
            for name, make in parts.items():
                self._make(name, make)
            if make_own is not None:
                self._make("", make_own)
        except BaseException:
            self.close()
            raise
        self._feeding = [self.operators[name] for name in self.stages or ("",)]
        self._found = len(parts) > 1  # by user code; all operators have counters, which the context finds
        self._ended: set[int] = set()  # stages whose outputs are complete
        self._running = 0  # the stage that runs
        self._must_ask: dict[str, SubtaskContext] = {}  # those with a state that counts records of another input
        self._awaits_start = False
        self._channel: TaskChannel
        self.calls: Calls

    def _make(self, name: str, make: Callable[[], object]) -> None:
        made, made_by = make(), make.func if isinstance(make, partial) else make
        if not isinstance(made, SubtaskOperator):
            what, whose = (f"the factory of stage {name!r}", "stage") if name else (name_of(made_by), "subtask")
            raise TypeError(
                f"{what} returned {a_type(made)}; a {whose} needs a SubtaskOperator, or a function whose first "
                "required argument takes the records"
            )
        self.operators[name] = made
        if not isinstance(made_by, type) and (not name or name in self.stages):  # only here is it known what it makes
            check_operator(made)

    @property
    def counts_records(self) -> bool:
        """Whether an operator does that has the records before a restored checkpoint again.

        Not the user's own if a part gives it its records, as a work queue does.
        """
        if not self.stages and any(
            isinstance(part, TaskPart) and part.goes_on_after_restore for part in self.operators.values()
        ):
            return False
        for operator in self._feeding:
            if operator.counts_records or operator.goes_on_after_restore:
                return operator.counts_records
        return False

    # --- the beginning --------------------------------------------------------------------------------------------

    def open(
        self, channel: TaskChannel, endpoint: TaskEndpoint, identity: TaskIdentity, registered: Registered
    ) -> None:
        """Restore each part, which gets its context, and tell the coordinator that the operator is open."""
        self._channel = channel
        calls = self.calls = Calls(channel, endpoint, identity, self._handle)
        channel.at_barrier = self._at_barrier
        calls.can_cut = lambda: self._consistent(self._running)
        counters: object = self.operators.get(COUNTERS)
        calls.counters = counters if isinstance(counters, Counters) else None
        asked: dict[str, list[Any]] = {}
        for held in registered.held:
            if held.is_request:
                event = decode_event(split_traceparent(held.payload)[1])
                asked.setdefault(channel.table.names[held.part], []).append(event)
        states = self._restored(registered)
        _open.add(self)
        continued = False  # for the next stage: an earlier one continues after the checkpoint
        calls.inside = "open"  # H11
        try:
            with self.here():
                for name, operator in self.operators.items():
                    if isinstance(operator, TaskPart):
                        operator.task = calls
                    again = registered.input_begins_again and not (continued and name in self.stages)
                    context = SubtaskContext(calls, registered, name, tuple(asked.get(name, ())), again)
                    if name in self.stages:
                        k = self.stages.index(name)
                        context._fed_has_results = next((one.has_results for one in self._feeding[k + 1 :]), None)
                        context._items = self._feeding[k - 1].items_from if k else None
                    state: Any = states.get(name)  # only an operator that gives StateFiles gets RestoredFiles
                    try:
                        operator.open(context, state)
                    except Exception as error:
                        if state:
                            _note_state(error, operator, registered.checkpoint_id)
                        raise
                    of_another = bool(state) and not (registered.input_begins_again or continued)
                    if of_another and self._might_skip(name, operator):
                        self._must_ask[name] = context
                    continued = continued or (name in self.stages and operator.goes_on_after_restore)
        finally:
            calls.inside = None
        without_urgent = frozenset(
            index_of(channel, name) for name, one in self.operators.items() if not _handles_urgent(one)
        )
        self._awaits_start = any(one.waits_for_subtask_ready for one in self.operators.values())
        channel.operator_opened(
            awaits_start=self._awaits_start,
            handle_urgent=None if len(without_urgent) == len(self.operators) else self._handle_urgent,
            parts_without_urgent=without_urgent,
        )

    def _might_skip(self, name: str, operator: SubtaskOperator) -> bool:
        """Whether an operator that restores the state of another input may skip records of this one (H174).

        Not if its class has code that asks for the input, even if that runs later, or not for this state.
        """
        counts = operator.counts_records if name in self.stages else not name and self.counts_records
        restores = getattr(operator.open, "__func__", None) is not SubtaskOperator.open
        return counts and restores and not mentions(type(operator), "input_begins_again")

    def _restored(self, registered: Registered) -> dict[str, bytes | RestoredFiles]:
        """What each part restores: its only state, or what its ``merge_states`` makes of several (H52)."""
        by_part, pieces = states_by_part(registered.states, self.operators)
        if self.stages and (any(by_part.pop("", {}).values()) or "" in pieces):
            raise LocalProtocolError(
                "the checkpoint has a state of this subtask that belongs to no stage, so it is not that of a chain: "
                'restore it with the operator that took it, or start without the checkpoint (restore="none")'
            )
        restored: dict[str, bytes | RestoredFiles] = {}
        for name, several in pieces.items():
            if any(by_part.pop(name, {}).values()):
                raise LocalProtocolError(
                    "this checkpoint has a state in files and one of bytes for one subtask, which cannot be merged: "
                    "restore with the parallelism that it was taken with, or start without the checkpoint "
                    '(restore="none")'
                )
            restored[name] = self._restored_files(name, several, registered.files_from)
        for name, states in by_part.items():
            operator = self.operators[name]
            if len(states) == 1:
                (one,) = states.values()
            else:
                one = _checked_bytes(operator, "merge_states", operator.merge_states(states))
            if one or not name or name in self.stages:  # a checkpoint keeps no empty state of a ready-made part
                restored[name] = one
        return restored

    def _restored_files(self, name: str, pieces: list[SubtaskState], files_from: str) -> RestoredFiles:
        """Restore the files of a part, before ``open``, into its folder."""
        operator, channel = self.operators[name], self._channel

        def stopped() -> bool:
            channel.check()
            return False

        files, part = channel.files(), index_of(channel, name)
        if len(pieces) == 1 and pieces[0].is_whole:
            return files.restore(part, pieces[0], files_from, stopped)
        if getattr(operator.merge_files, "__func__", None) is SubtaskOperator.merge_files:
            operator.merge_files(())  # which says that it is not defined, before anything is downloaded
        folders = files.restore_pieces(part, pieces, files_from, stopped)
        with self.here():
            data = _checked_bytes(operator, "merge_files", operator.merge_files(folders))
        return files.merged(folders[0], data)

    def wait_until_ready(self) -> None:
        """Handle what the coordinator sends inside ``subtask_ready``, until that method has returned.

        Raises:
            TimedOut: it did not return within ``ready_timeout_s``.
        """
        # H66
        channel, endpoint, subtask = self._channel, self.calls.endpoint, self.calls.identity.subtask
        deadline = channel.now() + endpoint.ready_timeout_s
        while self._awaits_start:
            if not channel.wait_for_item(max(0.0, deadline - channel.now())):
                raise channel.timed_out(
                    f"the coordinator's subtask_ready() for subtask {subtask} of {endpoint.operator_id!r} has not "
                    f"returned within {endpoint.ready_timeout_s:g} s after open(): it waits, or the coordinator "
                    "is busy with earlier calls. Make these quicker, raise ready_timeout_s, or set "
                    "waits_for_subtask_ready = False on an operator that needs no initial values"
                )
            if (item := channel.take()) is not None:
                self._handle(item)

    # --- records and outputs --------------------------------------------------------------------------------------

    def outputs(self, records: Iterator[Any]) -> Iterator[Any]:
        """Yield what the operator makes of ``records``, handling the mailbox before each record that it takes."""
        records = self._between(records)
        # Nobody looks for the counters. An operator without other parts spares a generator and two switches for each
        # output: ``task_output`` against ``task_output_with_a_part`` in ``make instructions``.
        return self._outputs_found(records) if self._found else self._fed(records)

    def between_outputs(self) -> None:
        """After an output: handle events, and snapshots if one can be taken here."""
        channel = self._channel
        channel.poll()
        if channel.mailbox or channel.over is not None or channel.failure is not None:
            self.calls.handle_items(events_only=True)  # wherever an operator is, and mostly all that there is
            if channel.mailbox and self.snapshot_anywhere:
                self.calls.handle_items()

    def _between(self, records: Iterator[Any]) -> Iterator[Any]:
        channel = self._channel
        while True:
            channel.poll()
            if channel.mailbox or channel.over is not None or channel.failure is not None:
                self.calls.handle_items()
            try:
                record = next(records)
            except StopIteration:
                return
            yield record

    def _outputs_found(self, records: Iterator[Any]) -> Iterator[Any]:
        """Let user code find its parts while it makes an output, and not while Spark has the thread.

        Another operator may be next to this one in Spark's pipeline, and run on the same thread between two outputs.
        """
        with self.here():
            for part in self.operators.values():
                if isinstance(part, TaskPart):
                    part.before_records()
            outputs = self._fed(records)
        try:
            while True:
                previous, _local.parts = _local.parts, self  # as ``here`` does, without its generator
                try:
                    output = next(outputs)
                except StopIteration:
                    return
                finally:
                    _local.parts = previous
                yield output
        finally:
            with self.here():
                _close(outputs)

    def _fed(self, records: Iterator[Any]) -> Iterator[Any]:
        if not self.stages:  # one operator, which feeds nobody, has no generator around it that each output passes
            (own,) = self._feeding
            return iterated(own, own.process(self._to("", records)))
        for index in range(len(self.stages)):
            records = self._outputs_of(index, records)
        return records

    def _to(self, name: str, records: Iterator[Any]) -> Iterator[Any]:
        context = self._must_ask.get(name)
        return records if context is None else to_one_that_asks(context, self.operators[name], records)

    def _outputs_of(self, index: int, records: Iterator[Any]) -> Iterator[Any]:
        stage, after = self._feeding[index], min(index + 1, len(self._feeding) - 1)
        outputs: Iterator[Any] | None = None
        try:
            self._running = index
            produced: Iterable[Any] | None = stage.process(self._to(self.stages[index], records))
            outputs = iterated(stage, produced)
            while True:
                try:
                    output = next(outputs)
                except StopIteration:
                    break
                self._running = after
                yield output
                self._running = index
                if index < after:  # the runner does the same after the last stage
                    self.between_outputs()
            self._ended.add(index)
        except Exception as error:
            _note(error, self.stages[index])
            raise
        finally:
            self._running = after
            _close(outputs)
            if index:  # the first stage has Spark's records, which Spark closes
                _close(records)

    # --- snapshots ------------------------------------------------------------------------------------------------

    @property
    def snapshot_anywhere(self) -> bool:
        """Whether a snapshot can be taken now, if the stage that runs is waiting or has yielded."""
        return self._consistent(self._running + 1)

    @property
    def feeds_coroutines(self) -> bool:
        """Whether what the stage that runs yields comes to an async stage, through others or not."""
        return any(stage.has_results is not None for stage in self._feeding[self._running + 1 :])

    def _consistent(self, count: int) -> bool:
        """Whether each of the first ``count`` stages can be cut after an output."""
        return all(stage.snapshot_anywhere or k in self._ended for k, stage in enumerate(self._feeding[:count]))

    def snapshot_state(self, checkpoint_id: int) -> TakenState:
        """Return the state of all parts.

        Raises ``CheckpointDeclinedByOperator`` if the parts cannot be cut here, one declines, or the files of one
        cannot be frozen.
        """
        if not self._consistent(self._running):
            raise CheckpointDeclinedByOperator(
                f"stage {self.stages[self._running]!r} waits while a stage before it may be in the middle of a record: "
                "set snapshot_anywhere on that stage if its state is complete after each output"
            )
        data, files = self._joined("snapshot_state", checkpoint_id)
        if files is None:
            return TakenState(data)
        task_files = self._channel.files()  # without a storage, each checkpoint would fail, so the task does
        from spark_bridge.storage.errors import StorageError

        try:
            return TakenState(data, task_files.freeze(files, checkpoint_id))
        except StorageError as error:
            raise CheckpointDeclinedByOperator(str(error)) from error

    def final_state(self) -> TakenState:
        """Return the state of all parts for all later checkpoints. Raises ``StorageError`` if it cannot be frozen."""
        data, files = self._joined("final_state")
        return TakenState(data, None if files is None else self._channel.files().freeze(files, LAST_STATE))

    def _joined(self, method: str, *checkpoint_id: int) -> tuple[bytes, StateFiles | None]:
        """The state of all parts as bytes, and the files of one of them."""
        own = {name: operator for name, operator in self.operators.items() if not name}
        states: dict[str, bytes] = {}
        files: StateFiles | None = None
        with self.here():
            for name, operator in (own | self.operators).items():  # the user's own first: it may decline
                state = getattr(operator, method)(*checkpoint_id)
                if not isinstance(state, bytes):
                    in_files = _checked_files(operator, method, state)
                    if files is not None:
                        raise TypeError(
                            f"{type_name(operator)}.{method} returned StateFiles, and so did another part of this "
                            "operator: one part of a task can have its state in files, so let the others return bytes"
                        )
                    files, state = in_files, in_files.data
                    if name:
                        states[FILES_OF] = name.encode()
                states[name] = state
        return join_states(states.pop("", b""), states, self.stages), files

    def _at_barrier(self, may_decline: bool) -> bool:
        """A barrier came while ``send_event`` or ``request`` waits. Return False if it stays where it is.

        This handles one item only. What the caller waits for may have arrived meanwhile, before the next barrier, and
        then belongs in that barrier's snapshot.
        """
        if self.snapshot_anywhere and self.calls.inside is None:
            if (item := self._channel.take()) is not None:
                self._handle(item)
            return True
        if may_decline:
            self._channel.decline_barriers()
        return may_decline

    # --- what arrives ---------------------------------------------------------------------------------------------

    def _handle(self, item: MailboxItem | MailboxCall) -> None:
        calls = self.calls
        try:
            match item:
                case MailboxEvent(payload=payload, part=part):
                    calls.inside = "handle_event"
                    operator = self.operators[self._channel.table.names[part]]
                    if payload and payload[0] == TRACED_FIRST and payload.startswith(TRACED_START):
                        payload, handle = inside_span(payload, operator.handle_event)
                        with self.here():
                            handle(decode_event(payload))
                    elif self._found:
                        event = decode_event(payload)
                        with self.here():
                            operator.handle_event(event)
                    else:  # nobody looks for a part: ``task_event`` in ``make instructions``
                        operator.handle_event(decode_event(payload))
                case MailboxBarrier(checkpoint_id=checkpoint_id):
                    calls.inside = "snapshot_state"
                    self._snapshot(checkpoint_id)
                case MailboxCompleted(checkpoint_id=checkpoint_id):
                    self._channel.checkpoint_ended(checkpoint_id, completed=True)
                    self._tell("notify_checkpoint_complete", checkpoint_id)
                case MailboxAborted(checkpoint_id=checkpoint_id):
                    self._channel.checkpoint_ended(checkpoint_id, completed=False)
                    self._tell("notify_checkpoint_aborted", checkpoint_id)
                case MailboxStart():
                    self._awaits_start = False
                case MailboxCall(call=call):
                    calls.inside = "handle_event"
                    call()
        finally:
            calls.inside = None

    def _handle_urgent(self, payload: bytes, part: int) -> None:
        """On the thread for urgent events."""
        with self.here():
            payload, handle = inside_span(payload, self.operators[self._channel.table.names[part]].handle_urgent)
            handle(decode_event(payload))

    def _tell(self, method: str, checkpoint_id: int) -> None:
        self.calls.inside = method
        with self.here():
            for operator in self.operators.values():
                getattr(operator, method)(checkpoint_id)

    def _snapshot(self, checkpoint_id: int) -> None:
        if not self._channel.wants_snapshot(checkpoint_id):
            return  # the checkpoint ended while its barrier was in the mailbox
        try:
            state = self.snapshot_state(checkpoint_id)
        except CheckpointDeclinedByOperator as declined:
            self._channel.snapshot_refused(checkpoint_id, str(declined))
            return
        self._channel.snapshot_taken(checkpoint_id, state.data, state.files)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all parts, the last one first. What one of them raises is logged."""
        with self.here():
            for operator in reversed(self.operators.values()):
                close_quietly(operator)
        _open.discard(self)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let user code in this thread find these parts."""
        previous, _local.parts = _local.parts, self
        try:
            yield
        finally:
            _local.parts = previous


def _close(outputs: object) -> None:
    close = getattr(outputs, "close", None)
    if close is not None:
        close()


def _note(error: Exception, name: str) -> None:
    """Say in a failure which stage it comes from: the first one to pass it on."""
    if not any(note.startswith("in the stage ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in the stage {name!r} of the chain")


def _note_state(error: Exception, operator: SubtaskOperator, checkpoint_id: int) -> None:
    """Say in a failure of ``open`` which state it had."""
    error.add_note(
        f"{type_name(operator)}.open() was given a state of checkpoint {checkpoint_id}: if another class "
        "made it, or an earlier form of this one, let open() read that too, or begin without it, with "
        'coordinate(..., restore="none")'
    )


def _handles_urgent(operator: SubtaskOperator) -> bool:
    """Whether the operator defines ``handle_urgent``. Otherwise its urgent events are ordinary ones."""
    return getattr(operator.handle_urgent, "__func__", None) is not SubtaskOperator.handle_urgent


def _checked_bytes(operator: SubtaskOperator, method: str, state: object) -> bytes:
    """Return ``state`` if it is bytes, even if empty. Raise ``TypeError`` for anything else, such as None (H46)."""
    if not isinstance(state, bytes):
        raise TypeError(
            f"{type_name(operator)}.{method} must return bytes, not {type_name(state)}: "
            'return b"" if there is no state to keep'
        )
    return state


def _checked_files(operator: SubtaskOperator, method: str, state: object) -> StateFiles:
    """Return ``state``, which is not bytes, if it is in files. Raise ``TypeError`` for anything else."""
    from spark_bridge.storage.state_files.values import StateFiles  # few tasks have files

    if not isinstance(state, StateFiles):
        _checked_bytes(operator, method, state)
        raise AssertionError
    return state


# --- the part of the task that runs here ---------------------------------------------------------------------------


class _Local(threading.local):
    parts: OperatorParts | None = None


_local = _Local()
_open: WeakSet[OperatorParts] = WeakSet()
"""Those of the tasks of this process, for other threads of a task; more than one only if several share it, as in tests.

It keeps none of them: what is not closed, because its task has died, goes with the task.
"""


def parts_here() -> OperatorParts | None:
    """The parts of the task whose code runs here."""
    return _local.parts


def runs_in_task() -> bool:
    """Whether the caller is the function of a task of an operator with parts."""
    return _local.parts is not None


def current_part(kind: str, name: str) -> Any:
    """Return the task's half of the part ``name``. ``kind`` says in the error what it is.

    Works on the task's own thread, and on threads that the task has started if no other task runs in the process.

    Raises:
        LocalProtocolError: no task of an operator that uses it runs here.
    """
    parts = _local.parts
    if parts is None and len(found := [*_open]) == 1:
        (parts,) = found
    if parts is None:
        raise LocalProtocolError(
            f"the {kind} {name!r} is used where no task of a coordinated operator runs: use it in a function that you "
            "pass to the operator's handle, as in rdd.mapPartitions(handle.subtask(function))"
        )
    part = parts.operators.get(name)
    if part is None:
        raise LocalProtocolError(
            f"the operator does not use the {kind} {name!r}: pass it to coordinate(..., uses=[...]) as well"
        )
    return part


class PartInTask:
    """What user code sees of a part in a task."""

    _kind: ClassVar[str]
    _on_driver: ClassVar[frozenset[str]]
    """Public names that only the object on the driver has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__.removesuffix('InTask')} {self._name!r}>"

    def _part(self) -> Any:
        """This task's part. Raises ``LocalProtocolError`` outside a function that ``handle.subtask`` runs in tasks."""
        return current_part(self._kind, self._name)

    def __getattr__(self, name: str) -> Any:
        if name not in type(self)._on_driver:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{name} of the {self._kind} {self._name!r} is for the driver, and this is a task: ask a coordinator of "
            "yours with context.request(), or tell it with an event"
        )


ON_DRIVER = frozenset({"coordinator", "figures", "name", "outside_checkpoints", "task_part"})
"""Names that no part has in tasks."""


# --- mistakes in the class of an operator, found before it runs ----------------------------------------------------

_MISTAKEN = {
    "handle_event_from_operator": "handle_event",
    "handle_event_from_coordinator": "handle_event",
    "handle_operator_event": "handle_event",
    "checkpoint_coordinator": "snapshot_state",
    "reset_to_checkpoint": "open",
    "process_record": "process",
    "process_records": "process",
    "process_partition": "process",
}


def overrides_handle_event(operator_class: type) -> bool:
    """Whether the operator handles the coordinator's events, urgent or not. ``TaskPart`` stands for any part."""
    return (
        operator_class is TaskPart
        or getattr(operator_class, "handle_event", None) is not SubtaskOperator.handle_event
        or getattr(operator_class, "handle_urgent", None) is not SubtaskOperator.handle_urgent
    )


def check_operator(operator: object) -> list[NeverCalled]:
    """Check an operator or its class; return the methods whose names may be misspelt.

    Raises ``TypeError`` or ``ValueError`` for a setting of the class with a wrong value, and
    ``TypeError`` if it is not a ``SubtaskOperator``, if a method is ``async def`` or a generator where that
    cannot work, and if a method's name is clearly a misspelling of one that the framework calls.
    """
    subject_class = operator if isinstance(operator, type) else type(operator)
    if not issubclass(subject_class, SubtaskOperator):
        raise TypeError(f"{show(operator)} is not a SubtaskOperator: derive its class from SubtaskOperator")
    check_settings(operator, SubtaskOperator)
    if issubclass(subject_class, SplitReader):
        check_settings(operator, SplitReader, splits_open_max=AT_LEAST_1, rate_limit_per_s=POSITIVE)
    errors, doubtful = errors_in_overrides(operator), []
    interface = next(one for one in subject_class.__mro__ if one.__module__.startswith("spark_bridge."))
    for finding in names_never_called(operator, interface, _MISTAKEN):
        if finding.certain:
            errors.append(str(finding))
        else:
            doubtful.append(finding)
    if errors:
        raise TypeError("; ".join(errors))
    return doubtful
