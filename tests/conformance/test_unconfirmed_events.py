# SPDX-License-Identifier: Apache-2.0

"""S25 to S30: the sends that a checkpoint waits for. Flink keeps a set of them; here each gateway counts (H42)."""

from __future__ import annotations

from tests.conformance.harness import Line


def a_cut(line: Line, checkpoint_id: int) -> None:
    line.mark(checkpoint_id)
    assert line.close(checkpoint_id)


def test_an_event_that_is_confirmed_before_the_cut_is_not_waited_for() -> None:
    """S26 (R45; H42)."""
    line = Line(confirms=False)
    line.send("hello")
    line.mark(1)
    line.confirm()
    assert line.close(1)
    assert line.barriers == [1]


def test_an_event_whose_fate_is_known_immediately_is_never_waited_for() -> None:
    """S27 (R45; H26, H28): one is confirmed the moment it leaves, and one needs no confirmation."""
    line = Line()
    event = line.send("hello")
    assert line.confirmed == [event]
    line.confirms = False
    line.send("tick", loss_tolerant=True)
    a_cut(line, 1)
    assert line.barriers == [1]


def test_unconfirmed_events_fail_with_the_cause_of_their_attempts_end() -> None:
    """S28 (R21; H26)."""
    line = Line(confirms=False)
    events = [line.send("on its way"), line.send("too")]
    a_cut(line, 1)
    events.append(line.send("held"))
    line.end("the executor was lost")
    assert list(line.failed) == events
    assert all("the executor was lost" in why for why in line.failed.values())


def test_an_event_after_the_end_of_its_attempt_fails_immediately_with_that_cause() -> None:
    """S29 (R21; H14, H26)."""
    line = Line()
    line.end("the executor was lost")
    event = line.send("too late")
    assert "the executor was lost" in line.failed[event]
    assert line.received == []


def test_the_next_checkpoint_waits_for_what_an_aborted_one_has_waited_for() -> None:
    """S25, S30 (R45, G3; H42 decides). Flink empties its set at each checkpoint, and the next one waits for nothing."""
    line = Line(confirms=False)
    line.send("hello")
    a_cut(line, 1)
    assert line.barriers == []
    line.abort(1)
    a_cut(line, 2)
    assert line.barriers == []
    line.confirm()
    assert line.barriers == [2], "for exactly this one"
