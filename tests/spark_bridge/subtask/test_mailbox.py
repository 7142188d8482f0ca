# SPDX-License-Identifier: Apache-2.0

"""The mailbox alone, and what its limit does to the connection (H27)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.subtask.types import MailboxAborted, MailboxBarrier, MailboxCompleted, MailboxEvent, MailboxItem
from protocol.wire.messages import (
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    EventMessage,
)
from spark_bridge.subtask import SubtaskContext
from spark_bridge.subtask.mailbox import OperatorMailbox
from tests.spark_bridge.subtask.operators import Calling
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, barrier


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:  # H22, H23
    mailbox = OperatorMailbox(10, 100)
    items: list[MailboxItem] = [MailboxEvent(b"a"), MailboxBarrier(1), MailboxBarrier(2), MailboxCompleted(1)]
    for item in items:
        mailbox.put(item)
    taken = [(mailbox.take(events_only=False), mailbox.barriers) for _ in range(5)]
    assert taken == list(zip([*items, None], [2, 1, 0, 0, 0], strict=True))


def test_with_events_only_a_barrier_stops_everything_behind_it() -> None:  # H23
    mailbox = OperatorMailbox(10, 100)
    for item in (MailboxEvent(b"a"), MailboxBarrier(1), MailboxEvent(b"b")):
        mailbox.put(item)
    assert mailbox.take(events_only=True) == MailboxEvent(b"a")
    assert mailbox.take(events_only=True) is None
    assert len(mailbox) == 2


def test_it_is_full_at_either_bound_and_half_empty_below_both_halves() -> None:  # H27
    by_items, by_bytes = OperatorMailbox(2, 1000), OperatorMailbox(1000, 8)
    for mailbox, payload in ((by_items, b""), (by_bytes, b"1234")):
        seen = []
        for _ in range(2):
            mailbox.put(MailboxEvent(payload))
            seen.append((mailbox.full, mailbox.half_empty))
        mailbox.take(events_only=False)
        seen.append((mailbox.full, mailbox.half_empty))
        assert seen == [(False, True), (True, False), (False, True)]


def test_an_abort_takes_its_own_barrier_away() -> None:  # H44
    mailbox = OperatorMailbox(10, 100)
    for item in (MailboxBarrier(1), MailboxBarrier(2), MailboxAborted(1), MailboxAborted(7)):
        mailbox.put(item)
    assert mailbox.barriers == 1
    assert mailbox.take_barriers() == [MailboxBarrier(2)]
    assert mailbox.barriers == 0
    assert [mailbox.take(events_only=False) for _ in range(2)] == [MailboxAborted(1), MailboxAborted(7)]


@pytest.mark.parametrize("bound", [{"mailbox_events_max": 4}, {"mailbox_bytes_max": 8000}], ids=str)
def test_a_full_mailbox_stops_the_reading_until_half_of_it_is_handled(peer: Peer, bound: Any) -> None:  # H27
    go_on = threading.Event()

    def body(context: SubtaskContext) -> int:
        assert go_on.wait(PATIENCE_S)
        handled = 0
        while handled < 2000:
            handled += context.wait_for_event(PATIENCE_S)
        return handled

    task, connection = peer.run(Calling(body), **bound)
    for first in range(1, 2001, 200):  # far more than one read takes, or the mailbox holds
        connection.send(*(connection.event(seq, "x" * 2000) for seq in range(first, first + 200)))
        if first == 1:
            assert connection.expect(Confirm).seq < 200  # now it stops reading
            go_on.set()
    connection.confirmed(2000)
    assert peer.finish(task) == [2000]


def test_what_another_thread_posts_is_called_on_the_tasks_own_which_may_not_post(peer: Peer) -> None:
    def body(context: SubtaskContext) -> str:
        calls, called_on = context._calls, list[int]()
        with pytest.raises(LocalProtocolError, match=r"let concurrently\(\) run it"):
            calls.post(called_on.clear)
        thread = threading.Thread(target=calls.post, args=(lambda: called_on.append(threading.get_ident()),))
        thread.start()
        thread.join()
        assert context.handle_pending() == 1
        return "here" if called_on == [threading.get_ident()] else f"elsewhere: {called_on}"

    task, _ = peer.run(Calling(body))
    assert peer.finish(task) == ["here"]


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_checkpoint_that_meets_a_waiting_sender_is_declined_unless_the_operator_allows_it(
    peer: Peer, anywhere: bool
) -> None:  # H31, H48
    sending = threading.Event()

    def body(context: SubtaskContext) -> None:
        context.wait_for_event()
        sending.set()
        for number in range(3):
            context.send_event(number)

    class Waiting(Calling):
        snapshot_anywhere = anywhere

    task, connection = peer.run(Waiting(body), answer={"window_events": 2})
    connection.send(CloseForCheckpoint(TASK_ID, 1, 6), connection.event(2, "send"))
    connection.next_item(ClosedForCheckpoint)
    connection.confirmed(2)
    assert sending.wait(PATIENCE_S)
    connection.send(barrier(3, 6, 2))
    if anywhere:
        assert len(connection.next_item(CheckpointAcknowledged).held) == 2
    else:
        assert "snapshot_anywhere" in connection.next_item(CheckpointDeclined).reason
        connection.send(CheckpointAborted(TASK_ID, 4, 6))
    for _ in range(3):
        connection.send(Confirm(TASK_ID, connection.next_item(EventMessage).seq))
    peer.finish(task)
