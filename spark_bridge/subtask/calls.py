# SPDX-License-Identifier: Apache-2.0

"""The calls between a task and its operator: which one is in progress, and which others it allows.

The framework calls one method of one part at a time, on the task's own thread. What that method may do through its
context depends on which one it is: nothing waits for the coordinator inside ``open``, of which the coordinator learns
only afterwards, and no item is handled while another one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, SupportsFloat, SupportsIndex, runtime_checkable

from protocol.errors import LocalProtocolError
from protocol.subtask.types import MailboxItem
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.task_channel import TaskChannel

__all__ = ["Calls", "Counters"]


@runtime_checkable
class Counters(Protocol):
    """What ``count`` and ``observe`` add to."""

    def count(self, name: str, by: SupportsIndex | SupportsFloat) -> None: ...

    def observe(self, name: str, value: SupportsIndex | SupportsFloat) -> None: ...


class Calls:
    """One for each attempt, which the contexts of all its parts share.

    ``inside``: the method that is in progress; None for ``process`` and ``final_state``, which may handle items.
    ``handle`` calls the part that an item is for, and sets ``inside`` meanwhile.
    """

    def __init__(
        self,
        channel: TaskChannel,
        endpoint: TaskEndpoint,
        identity: TaskIdentity,
        handle: Callable[[MailboxItem], None],
    ) -> None:
        self.channel = channel
        self.endpoint = endpoint
        self.identity = identity
        self.limits = endpoint.wire_limits
        self.counters: Counters | None = None
        self.inside: str | None = None
        self._handle = handle
        self._task_thread = threading.get_ident()

    # --- for ready-made parts: see ``TaskAccess`` -----------------------------------------------------------------

    def timed_out(self, failure: str) -> TimedOut:
        return self.channel.timed_out(failure)

    # --- the mailbox ----------------------------------------------------------------------------------------------

    def handle_items(self, *, events_only: bool = False) -> int:
        """Handle what is in the mailbox, in order; up to the first other item with ``events_only``. Return how many."""
        count = 0
        while (item := self.channel.take(events_only=events_only)) is not None:
            self._handle(item)
            count += 1
        return count

    def handle_pending(self) -> int:
        """See ``SubtaskContext``."""
        self.check_may_wait("handle_pending")
        self.channel.poll()
        return self.handle_items()

    # --- what is allowed now --------------------------------------------------------------------------------------

    def runs_inside(self, method: str) -> bool:
        """Whether the caller is this method. Other threads of the task may call at the same time."""
        return self.inside == method and threading.get_ident() == self._task_thread

    def check_may_ask(self) -> None:
        """Raise ``LocalProtocolError`` if the answer to a request cannot come before the caller has returned."""
        if self.inside is None and threading.get_ident() == self._task_thread:
            return  # ``process``, the usual case, without a look at the thread for urgent events
        if self.runs_inside("snapshot_state"):
            raise LocalProtocolError(
                "request() cannot be used inside snapshot_state(): the coordinator answers only after it has returned. "
                "Send an event instead, or ask in process()"
            )
        self._refuse_inside_urgent("request")
        self._refuse_inside_open("request", "Ask in process()")

    def check_may_wait(self, what: str) -> None:
        """Raise ``LocalProtocolError`` if the caller must not handle items."""
        if self.inside is None and threading.get_ident() == self._task_thread:
            return
        self._refuse_inside_urgent(what)
        if threading.get_ident() != self._task_thread:
            raise LocalProtocolError(
                f"{what}() was called from another thread: call it on the task's own thread, for example in process()"
            )
        self._refuse_inside_open(what, "Wait in process()")
        raise LocalProtocolError(f"{what}() cannot be called inside {self.inside}(): return from it first")

    def _refuse_inside_open(self, what: str, instead: str) -> None:
        """Before ``open`` has returned, the coordinator takes nothing from this task and sends it nothing (H11)."""
        if self.runs_inside("open"):
            raise LocalProtocolError(
                f"{what}() cannot be used inside open(): the coordinator learns of this task only after open() has "
                f"returned. {instead}, or let the coordinator send initial values in subtask_ready(): handle_event() "
                "gets them before process() begins"
            )

    def _refuse_inside_urgent(self, what: str) -> None:
        """A checkpoint waits for the handler, and holds back what it would wait for."""
        if self.channel.on_urgent_thread:
            raise LocalProtocolError(
                f"{what}() cannot be used inside handle_urgent(), which must not wait for the coordinator: a "
                "checkpoint may hold back the answer until handle_urgent() has returned. Send an event instead, or let "
                "process() do it"
            )
