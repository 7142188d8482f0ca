# SPDX-License-Identifier: Apache-2.0

"""Several operators in one task: the parts of a chain (H80).

To the protocol a chain is one operator. The ``OperatorChain`` is that operator. Its *main* operator is the user's, and
processes the records; the other parts have names, and their events travel as ``PartEvent``. Each has its own
context and state. A call that concerns the whole operator reaches the parts in a fixed order: those with names in the
order in which they were given, then the main one. ``snapshot_state`` and ``close`` have the reverse order: the main
operator may decline a checkpoint, and it may use the parts until it is closed.

If the operator is a chain of stages, the main operator is a ``Flow``, and the stages are named parts after the others.

User code that holds a reference to a part, such as a ``WorkQueue``, finds its task's part with ``current_part``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from protocol.errors import LocalProtocolError
from protocol.parts import join_states, split_states
from protocol.wire.extension_types import PartEvent
from spark_bridge.subtask.closing import close_quietly
from spark_bridge.subtask.context import Counters, SubtaskContext, checked_state, handles_urgent
from spark_bridge.subtask.flow import Flow
from spark_bridge.subtask.operator import SubtaskOperator, iterated

__all__ = ["COUNTERS", "ON_DRIVER", "OperatorChain", "PartInTask", "TaskPart", "current_part", "runs_in_task"]

COUNTERS = "headgate.counters"
"""The name of the part that every operator has."""


class TaskPart(SubtaskOperator):
    """The task's half of a ready-made part. It processes no records."""

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        return records

    def before_records(self) -> None:
        """Called once, before the main operator's ``process``. It may wait for events."""


class OperatorChain(SubtaskOperator):
    """The operator of a task that has named parts; see the module."""

    def __init__(self, main: SubtaskOperator, parts: Mapping[str, Callable[[], SubtaskOperator]]) -> None:
        self.main = main
        self.parts: dict[str, SubtaskOperator] = {}
        self.stages: tuple[str, ...] = ()
        try:
            for name, make in parts.items():
                self.parts[name] = make()
            if isinstance(main, Flow):
                self.stages = main.names
                main.connect(self.parts)
        except BaseException:
            self.close()  # those that were made
            raise
        self._parts_are_found = len(self.parts) > 1  # by user code; all have counters, which the context finds
        self.waits_for_subtask_ready = main.waits_for_subtask_ready or any(
            part.waits_for_subtask_ready for part in self.parts.values()
        )
        handlers = {name: handles_urgent(part) for name, part in (("", main), *self.parts.items())}
        self.handles_urgent = any(handlers.values())
        self.parts_without_urgent = frozenset(name for name, handles in handlers.items() if not handles)

    @property
    def snapshot_anywhere(self) -> bool:  # type: ignore[override]  # the main operator says it
        """See ``SubtaskOperator``: that of the main operator."""
        return self.main.snapshot_anywhere

    @property
    def counts_records(self) -> bool:
        """See ``SubtaskOperator``: the main operator's, unless a part gives it its records, as a work queue does."""
        given = any(isinstance(part, TaskPart) and part.goes_on_after_restore for part in self.parts.values())
        return self.main.counts_records and (isinstance(self.main, Flow) or not given)

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        main, states = (None, {}) if state is None else split_states(state, self.parts)
        _live.append(self)
        context.counters = cast("Counters | None", self.parts.get(COUNTERS))
        held = context.restored_requests
        context.restored_requests = tuple(one for one in held if type(one) is not PartEvent)
        with self._current():
            begins_again = context.input_begins_again
            for name, part in self.parts.items():
                of_part = tuple(one.event for one in held if type(one) is PartEvent and one.name == name)
                its = begins_again if name in self.stages else context.input_begins_again
                part_context = PartContext(context, name, of_part, its)
                part.open(cast("SubtaskContext", part_context), states.get(name))
                begins_again = begins_again and not (name in self.stages and part.goes_on_after_restore)
            self.main.open(context, main)

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        mains: dict[int, bytes] = {}
        by_part: dict[str, dict[int, bytes]] = {}
        for subtask, state in states.items():
            mains[subtask], parts = split_states(state, self.parts)
            for name, one in parts.items():
                by_part.setdefault(name, {})[subtask] = one
        merged = {name: _merged(self.parts[name], one) for name, one in by_part.items()}
        return join_states(_merged(self.main, mains), merged, self.stages)

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        if self._parts_are_found:
            return self._process(records)
        return iterated(self.main, self.main.process(records))  # the error names the user's class, not this one

    def _process(self, records: Iterator[Any]) -> Iterator[Any]:
        with self._current():
            for part in self.parts.values():
                if isinstance(part, TaskPart):
                    part.before_records()
            outputs = self.main.process(records)
        iterator = iterated(self.main, outputs)
        try:
            while True:
                previous, _local.chain = getattr(_local, "chain", None), self  # as `_current` does, for each output
                try:
                    output = next(iterator)
                except StopIteration:
                    return
                finally:
                    _local.chain = previous
                yield output
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                with self._current():
                    close()

    def handle_event(self, event: Any) -> None:
        if type(event) is PartEvent:
            part = self._part(event.name)
            with self._current():
                part.handle_event(event.event)
        elif self._parts_are_found:
            with self._current():
                self.main.handle_event(event)
        else:
            self.main.handle_event(event)

    def handle_urgent(self, event: Any) -> None:
        operator, event = (self._part(event.name), event.event) if type(event) is PartEvent else (self.main, event)
        with self._current():
            operator.handle_urgent(event)

    def _part(self, name: str) -> SubtaskOperator:
        part = self.parts.get(name)
        if part is None:
            raise LocalProtocolError(
                f"the coordinator sent something to the part {name!r}, which this task does not have: if it is a "
                "stage, pass the same chain to coordinate() and to subtask()"
            )
        return part

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        with self._current():
            main = self.main.snapshot_state(checkpoint_id)
            return self._joined(main, lambda part: part.snapshot_state(checkpoint_id))

    def final_state(self) -> bytes:
        with self._current():
            main = self.main.final_state()
            return self._joined(main, lambda part: part.final_state())

    def _joined(self, main: bytes, state_of: Callable[[SubtaskOperator], bytes]) -> bytes:
        checked_state(self.main, "snapshot_state", main)
        states = {name: state_of(part) for name, part in self.parts.items()}
        for name in self.stages:
            checked_state(self.parts[name], "snapshot_state", states[name])
        return join_states(main, states, self.stages)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        with self._current():
            for operator in (*self.parts.values(), self.main):
                operator.notify_checkpoint_complete(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        with self._current():
            for operator in (*self.parts.values(), self.main):
                operator.notify_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        """Close all of them, the main operator first. What one of them raises is logged."""
        with self._current():
            for operator in (self.main, *reversed(self.parts.values())):
                close_quietly(operator)
        if self in _live:
            _live.remove(self)

    @contextmanager
    def _current(self) -> Iterator[None]:
        previous = getattr(_local, "chain", None)
        _local.chain = self
        try:
            yield
        finally:
            _local.chain = previous


def _merged(operator: SubtaskOperator, states: dict[int, bytes]) -> bytes:
    return next(iter(states.values())) if len(states) == 1 else operator.merge_states(states)


# --- the part of the task that runs here ---------------------------------------------------------------------------

_local = threading.local()
_live: list[OperatorChain] = []  # more than one only if several tasks share a process, as in tests


def runs_in_task() -> bool:
    """Whether the caller is the function of a task of an operator with parts."""
    return getattr(_local, "chain", None) is not None


def current_part(kind: str, name: str) -> Any:
    """Return the task's half of the part ``name``. ``kind`` says in the error what it is.

    Works on the task's own thread, and on threads that the task has started if no other task runs in the process.

    Raises:
        LocalProtocolError: no task of an operator that uses it runs here.
    """
    chain = getattr(_local, "chain", None)
    if chain is None and len(_live) == 1:
        chain = _live[0]
    if chain is None:
        raise LocalProtocolError(
            f"the {kind} {name!r} is used where no task of a coordinated operator runs: use it in a function that you "
            "pass to the operator's handle, as in rdd.mapPartitions(handle.subtask(function))"
        )
    part = chain.parts.get(name)
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
    _name: str

    def __getattr__(self, name: str) -> Any:
        if name not in type(self)._on_driver:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{name} of the {self._kind} {self._name!r} is for the driver, and this is a task: ask a coordinator of "
            "yours with context.request(), or tell it with an event"
        )


ON_DRIVER = frozenset({"coordinator", "name", "task_part"})
"""Names that no part has in tasks."""


class PartContext:
    """A named part's ``SubtaskContext``: what it sends reaches the coordinator of the part of the same name."""

    def __init__(
        self, context: SubtaskContext, name: str, restored_requests: tuple[Any, ...], input_begins_again: bool
    ) -> None:
        self._context = context
        self._name = name
        self.restored_requests = restored_requests
        self.input_begins_again = input_begins_again

    def send_event(self, event: Any) -> None:
        self._context.send_event(PartEvent(self._name, event))

    def send_event_nowait(self, event: Any) -> None:
        self._context.send_event_nowait(PartEvent(self._name, event))

    def request(self, payload: Any, timeout_s: float = 30.0) -> Any:
        return self._context.request(PartEvent(self._name, payload), timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
