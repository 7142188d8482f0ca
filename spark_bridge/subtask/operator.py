# SPDX-License-Identifier: Apache-2.0

"""The interface of an operator, which users implement. One instance runs in one Spark task."""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic

from protocol.describing import name_of, show, type_name
from protocol.event_types import Received, Sent
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.subtask.items import Items

if TYPE_CHECKING:
    from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles
    from spark_bridge.subtask.context import SubtaskContext

__all__ = [
    "PAUSE",
    "FunctionOperator",
    "SubtaskOperator",
    "close_quietly",
    "function_operator",
    "iterated",
    "operator_factory",
]

_log = logging.getLogger(__name__)

_CONTEXT_NAMES = {"context", "ctx", "subtask_context"}

PAUSE: Any = object()
"""What a stage yields while it has nothing, to one that gives out results meanwhile."""


class SubtaskOperator(Generic[Received, Sent]):
    """One subtask of a coordinated operator. All methods run on the task's own thread, one call at a time, except
    ``handle_urgent``, which runs on a separate thread while the others do.

    The framework calls ``open``; then ``handle_event`` for each event that the coordinator sends inside
    ``subtask_ready``; then ``process``, with the other methods called between its records; then ``final_state`` if
    ``process`` succeeded; then ``close`` in any case. So ``process`` never begins before the coordinator's initial
    values have been handled. Set up what ``handle_event`` needs in ``__init__`` or ``open``. An exception in any method
    except ``close`` fails the task: the coordinator receives its text, Spark the exception itself.

    Events, snapshots and notifications are handled in order of arrival, when ``process`` takes its next record and
    inside ``context.wait_for_event()`` and ``context.handle_pending()``. After ``process`` yields an output, events are
    handled too, but a checkpoint waits for one of the other moments: only there has each record been processed either
    completely or not at all.

    Attributes:
        snapshot_anywhere: set it to True if the operator's fields are consistent whenever it yields or calls its
            context, as in a source that never takes records. Then checkpoints are also taken between outputs, and while
            ``send_event`` or ``request`` waits. Otherwise, a checkpoint that arrives during such a wait is declined,
            because the operator and the checkpoint would wait for each other.
        waits_for_subtask_ready: set it to False if the operator needs no initial values. Then ``process`` begins
            without waiting for the coordinator, which saves one round trip, and events that ``subtask_ready`` sends
            arrive at any time.
        goes_on_after_restore: set it to True if the outputs of ``process`` continue after the restored checkpoint, as
            those of a source do that keeps its positions, and those of an operator that skips the records that its
            state counts. Otherwise they begin with the first record again, because Spark computes the records again.
            The later stages of a ``chain`` see it in ``context.input_begins_again``.
        counts_records: set it to False if the state does not depend on which of Spark's records were processed, for
            example because the operator reads none, or if it skips none because of its state. Otherwise a run that has
            the same input again fails if Spark divides it into another number of partitions, and a run with other input
            fails if nothing looks at ``context.input_begins_again``. By default, an operator with a state counts
            records.
    """

    snapshot_anywhere: bool = False
    goes_on_after_restore: bool = False
    waits_for_subtask_ready: bool = True
    has_results: Callable[[], bool] | None = None  # of a stage that is given ``PAUSE``: whether it would yield some
    items_from: Items | None = None  # what it yields, if that has to hear what becomes of it

    @property
    def counts_records(self) -> bool:
        """See above."""
        own = type(self)
        return (own.snapshot_state, own.final_state) != (SubtaskOperator.snapshot_state, SubtaskOperator.final_state)

    def open(self, context: SubtaskContext[Sent], state: bytes | None) -> None:
        """Prepare, and restore ``state``, which is None if there is nothing to restore. Keep ``context`` for later.

        ``state`` is a ``RestoredFiles`` if ``snapshot_state`` has returned ``StateFiles``: such an operator writes
        ``state: bytes | RestoredFiles | None``. Its files are verified, and are in ``context.state_folder``.

        The coordinator learns of this task only after ``open`` has returned. So ``context.request``,
        ``wait_for_event`` and ``handle_pending`` raise ``LocalProtocolError`` in here; ``context.send_event`` works.
        """

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        """Return one state that ``open`` can restore, made of all ``states``.

        Called once, before ``open``, if a checkpoint of another parallelism gives this subtask the states of several.
        The keys of ``states`` are the subtasks that took them, in ascending order. The default merges
        empty states into an empty one, and raises ``TypeError`` for others.
        """
        if not any(states.values()):
            return b""
        raise TypeError(
            f"this checkpoint has the states of subtasks {', '.join(map(str, states))} for one subtask. Define "
            f"{type(self).__name__}.merge_states(self, states), or restore with the parallelism that it was taken with"
        )

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        """Make one state in files of several, in the folder of the first one, and return its ``data`` for ``open``.

        Called once, before ``open``, if a checkpoint of another parallelism gives this subtask folders of several
        subtasks, or one with more keys than its own. Of each piece, the keys in its ``key_groups`` belong here: delete
        all others from ``pieces[0].folder``, and copy into it those of the other pieces. The first piece has the most
        bytes that belong here, and its folder becomes ``context.state_folder``; the other folders are deleted when this
        returns. The ``key_groups`` of two pieces have no group in common. They are None for a state that was returned
        without them: then all of it belongs here. The default raises ``TypeError``.
        """
        raise TypeError(
            "this checkpoint gives this subtask states in files of another parallelism. Define "
            f"{type(self).__name__}.merge_files(self, pieces), or restore with the parallelism that it was taken with"
        )

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        """Process ``records`` and yield the outputs; often a generator. None means that there are no outputs.

        In batch mode Spark owns the outputs, and a retry yields all of them again. In streaming mode a checkpoint does
        not hold them: a retry continues after it, so Spark gets no outputs of the records before it. What has to be
        complete goes to a sink, in the same operator or ``chain``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define process(self, records)")

    def handle_event(self, event: Received) -> None:
        """Handle one event of the coordinator. Each arrives once, in the order in which the coordinator sent them.

        The default drops it. The driver counts dropped events, and logs one warning when a run ends or a checkpoint
        completes. If the coordinator sent the event inside a span of OpenTelemetry, that span is the current one
        here, and in ``handle_urgent``, provided that the task has imported ``opentelemetry.trace``.
        """

    def handle_urgent(self, event: Received) -> None:
        """Handle one urgent event, on a separate thread, while the task's own thread computes or blocks in C.

        The coordinator sends it with ``gateway.send_event(event, urgent=True)``. Override this to stop or steer a task
        that is away: set a flag, close a socket, abort a collective. Keep it short. Calls come one at a time, in the
        order in which the events were sent, each once. An urgent event may overtake ordinary events that wait; no event
        that is sent later begins to be handled before it. It has been handled before ``process`` begins if
        ``subtask_ready`` sent it, before a snapshot if it was sent before the checkpoint, and before ``final_state``.

        The other methods may run at the same time, so use a lock where that matters. ``context.send_event`` may be
        called in here; ``request``, ``wait_for_event`` and ``handle_pending`` raise ``LocalProtocolError``. An
        exception fails the task: ``context.cancelled`` becomes True, no further urgent event is handled, and the task's
        own thread raises the exception when it next takes a record or uses its context. No call begins after the
        attempt is over or in ``close``.

        An operator that does not override this gets urgent events in ``handle_event``, as ordinary ones in their place.
        """
        self.handle_event(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes | StateFiles:
        """Return the state that a later ``open`` needs: bytes, or a folder of any size as ``StateFiles``.

        An exception fails the task and the checkpoint. ``StateFiles`` are frozen when this returns, and stored by
        another thread while ``process`` goes on. If that fails, only the checkpoint does. Uploads of one task are done
        one after the other. In a chain, one stage may return ``StateFiles``.

        Raise ``CheckpointDeclinedByOperator`` to decline only the checkpoint. An event sent in here is part of this
        snapshot: it reaches the coordinator after the snapshot, and again after a restore of this checkpoint.
        """
        return b""

    def final_state(self) -> bytes | StateFiles:
        """Return the state of this subtask for all later checkpoints, after ``process`` has ended.

        The default calls ``snapshot_state(-1)``. If events arrive before the task has reported its end, they are
        handled, and this is called again. The task ends when ``StateFiles`` are stored, and fails if they cannot be.
        """
        return self.snapshot_state(VIRTUAL_EMPTY_CHECKPOINT)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """``checkpoint_id`` is complete and durable: commit what was prepared for it."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """``checkpoint_id`` was aborted. A restart may still restore it, for example after the driver dies.

        So do not roll back what was prepared for it. The coordinator learns when that is safe, in
        ``notify_checkpoint_discarded``: let it clean up, or let it send an event that tells the tasks.
        """

    def close(self) -> None:
        """Release resources. Called once for each operator that was created.

        Whatever it raises is only logged, an exit too: the outputs are complete then, or another error has failed the
        task already. So it cannot undo a success. What must not fail unnoticed belongs into ``final_state``.
        """


def iterated(operator: SubtaskOperator, outputs: object) -> Iterator[Any]:
    """Return the outputs of ``process`` one by one. Raise ``TypeError`` for anything but None and an iterable."""
    if outputs is None:
        return iter(())
    if isinstance(outputs, str | bytes | Mapping) or not hasattr(outputs, "__iter__"):  # of a dict, only the keys came
        raise TypeError(
            f"{type_name(operator)}.process must return an iterable of outputs, or None, not {show(outputs)}: "
            "yield each output, or return a list of them"
        )
    iterator: Iterator[Any] = iter(outputs)
    return iterator


def close_quietly(operator: SubtaskOperator) -> None:
    """Call a user's ``close``, which fails nothing: what it raises is logged, and everything else is closed too.

    The outputs are complete then, or another error is on its way to Spark, which says more. An exit is treated alike:
    a process that ended in ``close`` would lose a result that is complete.
    """
    try:
        operator.close()
    except BaseException:
        _log.exception("%s.close() raised", type_name(operator))


class FunctionOperator(SubtaskOperator):
    """Calls ``function(records, *args)``, or ``function(context, records, *args)``, as its ``process``. No state."""

    def __init__(
        self,
        function: Callable[..., Any],
        with_context: bool,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._function = function
        self._with_context = with_context
        self._args = args
        self._kwargs = kwargs or {}
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        given = (self._context, records) if self._with_context else (records,)
        outputs: Iterable[Any] | None = self._function(*given, *self._args, **self._kwargs)
        return outputs


def _missing_arguments(made_by: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many arguments ``made_by`` lacks to be a function of records: 1, or 2 if it also takes the context.

    0 means that it can be called with the given arguments alone, so it is a class or a function that makes operators.
    Raises ``TypeError`` if it is none of these, or takes the context in the wrong place, as far as its names tell.
    """
    made = made_by.func if isinstance(made_by, partial) else made_by
    try:
        signature = inspect.signature(made_by)
    except (ValueError, TypeError):
        return 0
    name = name_of(made) if inspect.isroutine(made) or isinstance(made, type) else type_name(made)
    why = ""
    for missing in (0,) if isinstance(made, type) else (0, 1, 2):
        try:
            signature.bind(*[None] * missing, *args, **kwargs)
        except TypeError as error:
            why = str(error) if not why.startswith("missing") or str(error).startswith("missing") else why
            continue
        _check_places(name, made, list(signature.parameters.values()), missing)
        return missing
    takes = "" if isinstance(made, type) else "A function for tasks takes (records) or (context, records). "
    raise TypeError(
        f"{name}({', '.join(signature.parameters)}) cannot be called in a task: {why}. {takes}Pass what it needs "
        f"besides, and nothing else, along with it: subtask({name}, ...) or functools.partial({name}, ...)"
    )


def _check_places(name: str, made: Callable[..., Any], parameters: list[inspect.Parameter], missing: int) -> None:
    """Raise ``TypeError`` if a function would get the context or the records in the place of something else."""
    taken = parameters[:missing]
    places = [one.name in _CONTEXT_NAMES or "SubtaskContext" in str(one.annotation) for one in taken]
    others = "".join(f", {one.name}" for one in parameters[missing:])
    if missing == 1 and places == [True]:
        raise TypeError(f"{name}({taken[0].name}) would get only the records: write {name}({taken[0].name}, records)")
    if places == [False, True]:
        first, second = (one.name for one in taken)
        raise TypeError(
            f"{name}({first}, {second}{others}) would get the context as {first!r}, because a function with two "
            f"arguments gets (context, records): write {name}({second}, {first}{others})"
        )
    if missing == 2 and not places[0] and taken[0].name == "records":
        second = taken[1].name
        raise TypeError(
            f"{name}(records, {second}{others}) would get the context as 'records', because {second!r} is missing: "
            f"pass it along, subtask({name}, ...) or functools.partial({name}, ...); or write {name}(context, records) "
            "for a function that uses the context"
        )
    if not missing and _makes_no_operator(made):
        raise TypeError(
            f"{name}() has no required argument that takes the records, and returns no SubtaskOperator: write "
            f"{name}(records), or {name}(context, records)"
        )


def _makes_no_operator(made: Callable[..., Any]) -> bool:
    """Whether the code of a function yields, or returns only constants, such as None."""
    if isinstance(made, type):
        return False
    called = made if inspect.isroutine(made) else type(made).__call__
    code = getattr(called, "__code__", None)
    if code is None or inspect.isgeneratorfunction(called):
        return code is not None
    returns = [
        one.opcode in dis.hasconst or (before.opcode in dis.hasconst and not one.is_jump_target)
        for before, one in pairwise(dis.get_instructions(code))
        if one.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    return bool(returns) and all(returns)


def function_operator(
    made_by: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], FunctionOperator] | None:
    """Return what makes the operator of a plain function. None for a class, and for a function that makes operators."""
    missing = _missing_arguments(made_by, args, kwargs)
    return partial(FunctionOperator, made_by, missing == 2, args, kwargs) if missing else None


def operator_factory(
    made_by: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Callable[[], SubtaskOperator]:
    """Return what makes the operator, without arguments: ``made_by(*args, **kwargs)``, or a ``FunctionOperator``."""
    return function_operator(made_by, args, kwargs or {}) or partial(made_by, *args, **(kwargs or {}))
