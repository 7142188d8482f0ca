# SPDX-License-Identifier: Apache-2.0

"""Small operators for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spark_bridge.subtask import SubtaskContext, SubtaskOperator
from spark_bridge.subtask.channel import SubtaskChannel


def channel_of(operator: Recorder) -> SubtaskChannel:
    """The real channel of a task that runs this operator."""
    channel = operator.context._channel
    assert isinstance(channel, SubtaskChannel)
    return channel


class Recorder(SubtaskOperator):
    """Yields each record, and every call that it receives, in order.

    It does not wait for the coordinator's ``subtask_ready``: the peer of these tests numbers its items by hand.
    """

    counts_records = False  # it skips none
    waits_for_subtask_ready = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.calls.append(("open", state))

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.calls.append(record)
            yield record

    def handle_event(self, event: Any) -> None:
        self.calls.append(("event", event))

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        self.calls.append(("snapshot", checkpoint_id))
        return f"state at {checkpoint_id}".encode()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.calls.append(("complete", checkpoint_id))

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.calls.append(("aborted", checkpoint_id))

    def close(self) -> None:
        self.calls.append("close")


class EventSource(Recorder):
    """Ignores its records; yields each event until the event is ``"end"``."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[Any] = []

    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        self.arrived.append(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while True:
            while not self.arrived:
                self.context.wait_for_event()
            event = self.arrived.pop(0)
            if event == "end":
                return
            yield event


class Calling(Recorder):
    """Runs a function of the test instead of ``process``; yields its result."""

    def __init__(self, body: Callable[[SubtaskContext], Any]) -> None:
        super().__init__()
        self._body = body

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield self._body(self.context)
