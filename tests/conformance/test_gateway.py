# SPDX-License-Identifier: Apache-2.0

"""S1 to S7: one gateway to one running attempt. Marking is ``CloseRequested``, closing is ``CutReached``."""

from __future__ import annotations

from tests.conformance.harness import Line, Received


def test_events_pass_through_an_open_gateway() -> None:
    """S1 (R25; H22, H23)."""
    line = Line(11)
    event = line.send("hello")
    assert line.received == [("hello", 11)]
    assert line.confirmed == [event]


def test_a_gateway_does_not_close_for_a_checkpoint_that_it_does_not_know() -> None:
    """S3 (R53; H44). The refusal is silent: a cut that comes too late fails nothing."""
    line = Line()
    assert not line.close(123)
    event = line.send("hello")
    assert line.confirmed == [event]


def test_a_gateway_does_not_close_for_another_checkpoint_than_the_known_one() -> None:
    """S2, S4 (R42, R44, R53; H40, H44)."""
    line = Line()
    line.mark(100)
    assert not line.close(123)
    assert line.close(100), "and the known one is untouched by that"


def test_waiting_events_leave_when_their_own_gateway_opens() -> None:
    """S5, S6 (R44, R48; H41, H44). A checkpoint ends by its id; "open all" does not exist."""
    received: Received = []
    three, zero = Line(3, received), Line(0, received)
    for line in (three, zero):
        line.mark(17)
        line.close(17)
    first, second = three.send("e1"), zero.send("e2")
    assert received == []
    assert [(line.confirmed, line.failed) for line in (three, zero)] == [([], {})] * 2
    three.abort(17)
    assert received == [("e1", 3)]
    zero.abort(17)
    assert received == [("e1", 3), ("e2", 0)]
    assert (three.confirmed, zero.confirmed) == ([first], [second])


def test_a_waiting_event_that_cannot_be_delivered_after_the_opening_is_failed() -> None:
    """S7 (R27, R32; H26). Delivery fails only with its attempt; a single send cannot fail."""
    line = Line(confirms=False)
    line.mark(17)
    line.close(17)
    event = line.send("hello")
    line.abort(17)
    assert line.received == [("hello", 0)]
    line.end("the worker is gone")
    assert "the worker is gone" in line.failed[event]
