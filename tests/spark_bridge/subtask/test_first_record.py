# SPDX-License-Identifier: Apache-2.0

"""What a coordinator sends inside ``subtask_ready`` is handled before ``process`` begins (H66)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.wire.messages import AttemptEnded, Confirm, Opened, StartProcessing
from spark_bridge.subtask import AttemptOver, SplitReader, SubtaskContext, TimedOut
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import TASK_ID, Peer, PeerConnection


class Initialised(Recorder):
    """Needs its rules before its first record."""

    waits_for_subtask_ready = True

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        self.calls.append("process")
        yield from super().process(records)


def take_waiting_task(peer: Peer) -> PeerConnection:
    connection = peer.register()
    opened = connection.expect(Opened)
    assert opened.awaits_start
    connection.send(Confirm(TASK_ID, opened.seq))
    return connection


@pytest.mark.parametrize("records", [[1, 2], []])
def test_events_of_subtask_ready_are_handled_before_process_begins(peer: Peer, records: list[int]) -> None:  # H66
    operator = Initialised()
    task = peer.start(operator, records)
    connection = take_waiting_task(peer)
    for seq in (1, 2, 3):
        connection.send(connection.event(seq, seq))
        connection.confirmed(seq)  # the task serves its mailbox while it waits (H23)
    connection.send(StartProcessing(TASK_ID, 4))
    assert peer.finish(task) == records
    assert operator.calls[1:5] == [("event", 1), ("event", 2), ("event", 3), "process"]


def test_an_operator_may_go_without_waiting(peer: Peer) -> None:  # H66
    operator = Recorder()
    task = peer.start(operator, [1])
    connection = peer.register()
    assert not connection.expect(Opened).awaits_start
    assert peer.finish(task) == [1]


def test_a_subtask_ready_that_does_not_return_is_named_in_time(peer: Peer) -> None:  # H66, H48
    operator = Initialised()
    task = peer.start(operator, [1], ready_timeout_s=0.05)
    connection = take_waiting_task(peer)
    assert "subtask_ready() for subtask 2 of 'words' has not returned within 0.05 s" in connection.finish().failure
    assert isinstance(task.error(), TimedOut)
    assert "process" not in operator.calls


def test_an_attempt_that_ends_while_it_waits_for_the_coordinator_stops_immediately(peer: Peer) -> None:  # H66, H26
    operator = Initialised()
    task = peer.start(operator, [1], ready_timeout_s=1000)
    take_waiting_task(peer).send(AttemptEnded(TASK_ID, "subtask_ready: ValueError: no rules"))
    with pytest.raises(AttemptOver, match="no rules"):
        task.outputs()
    assert "process" not in operator.calls


def test_a_task_that_waits_for_the_coordinator_outlives_its_connection(peer: Peer) -> None:  # H66, H24
    operator = Initialised()
    task = peer.start(operator, [1])
    connection = take_waiting_task(peer)
    connection.send_events(1, "rule")
    connection.close()
    connection, resume = peer.resume(1)
    assert resume.received_seq == 1
    connection.send(StartProcessing(TASK_ID, 2))
    peer.finish(task)
    assert operator.calls[1:3] == [("event", "rule"), "process"]


def test_more_initial_values_than_the_mailbox_holds_come_through(peer: Peer) -> None:  # H66, H27
    operator = Initialised()
    task = peer.start(operator, [1], mailbox_events_max=2)
    connection = take_waiting_task(peer)
    connection.send(*(connection.event(seq, seq) for seq in range(1, 101)), StartProcessing(TASK_ID, 101))
    peer.finish(task)
    assert operator.calls[1:102] == [*(("event", number) for number in range(1, 101)), "process"]


def test_a_reader_of_splits_has_its_initial_values_before_its_first_split(peer: Peer) -> None:  # H66
    calls: list[Any] = []

    class Reader(SplitReader):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            self.splits.extend(["restored"])
            self._no_more = True

        def handle_source_event(self, event: Any) -> None:
            calls.append(event)

        def read_split(self, split: Any) -> None:
            calls.append(split)

    task = peer.start(Reader)
    connection = take_waiting_task(peer)
    connection.send(connection.event(1, ["rule"]), StartProcessing(TASK_ID, 2))
    peer.finish(task)
    assert calls == [["rule"], "restored"]
