# SPDX-License-Identifier: Apache-2.0

"""A task that reads splits, as a subtask of a source does."""

from __future__ import annotations

from collections import deque
from typing import Any

from protocol.source_events import NoMoreSplits, SplitsAdded, parse_source_event, split_request_event
from protocol.subtask.types import MailboxBarrier, MailboxEvent
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import Registered
from tests.actors.coordination.executor import Task


class ReaderTask(Task):
    """A task that reads one split per ``step``, asks for more when it has none, and finishes when none are left.

    Its state is the list of splits that it has read and of those that it still has to read.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.done: list[Any] = []
        self.pending: deque[Any] = deque()
        self.batches: list[list[Any]] = []  # in the order of arrival
        self.no_more = 0
        self.finished = False
        self._asked = False

    def restore(self, registered: Registered) -> None:
        for _, state, *_ in registered.states:
            done, pending = decode_event(state)
            self.done, self.pending = done, deque(pending)

    def work(self) -> None:
        while self.mailbox and not self.finished:
            match self.mailbox.popleft():
                case MailboxEvent(payload):
                    self._take_event(decode_event(payload))
                case MailboxBarrier(checkpoint_id):
                    self.acknowledge(checkpoint_id, self._state())
        self.mailbox.clear()

    def request_split(self) -> None:
        self._asked = True
        self.send(split_request_event())

    def step(self) -> None:
        """Take the next step, if the task is open and not over."""
        if self.registered is None or self.ended or self.finished:
            return
        if self.pending:
            self.done.append(self.pending.popleft())
        elif self.no_more:
            if self.machine.may_finish:
                self.finished = True
                self.finish(state=self._state())
        elif not self._asked:
            self.request_split()

    @property
    def is_over(self) -> bool:
        """Whether Spark may now call it a success."""
        return self.finished and self.machine.all_confirmed

    def _take_event(self, event: Any) -> None:
        match parse_source_event(event):
            case SplitsAdded(splits):
                self._asked = False
                self.batches.append(list(splits))
                self.pending.extend(splits)
            case NoMoreSplits():
                self._asked = False
                self.no_more += 1
            case _:
                self.handled.append(event)

    def _state(self) -> bytes:
        return encode_event([self.done, list(self.pending)])
