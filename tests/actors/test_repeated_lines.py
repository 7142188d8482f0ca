# SPDX-License-Identifier: Apache-2.0

"""Lines that a peer can cause are written at a bounded rate, and those that are not written are counted."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from actors.logs import INTERVAL_MAX_S, INTERVAL_S, LINES_MAX, CountedLog, LimitedLog, LineLimit, Suppressed
from actors.virtual_loop import VirtualClock

REFUSED = ("warning", "connection refused")
DROPPED = ("warning", "connection dropped")


def flood(limit: LineLimit, now: float, count: int = 1000) -> int:
    """Return how many lines of the flood are written."""
    return sum(limit.admit(REFUSED, now) for _ in range(count))


def test_the_first_lines_of_each_kind_are_written_and_the_others_counted() -> None:
    limit = LineLimit(lines_max=3)
    assert [limit.admit(REFUSED, 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limit.admit(DROPPED, 0.0)
    assert limit.next_deadline() == INTERVAL_S
    assert limit.take_due(INTERVAL_S - 0.1) == []
    assert limit.take_due(INTERVAL_S) == [Suppressed(REFUSED, 2, INTERVAL_S)]
    assert limit.next_deadline() is None


def test_the_interval_doubles_while_a_flood_lasts_and_is_short_again_after_it() -> None:
    limit, now, lengths = LineLimit(lines_max=1), 0.0, []
    for _ in range(10):
        assert flood(limit, now) == 1
        deadline = limit.next_deadline()
        assert deadline is not None
        lengths.append(deadline - now)
        now = deadline
        (suppressed,) = limit.take_due(now)
        assert suppressed.count == 999
    assert lengths[:4] == [INTERVAL_S, 2 * INTERVAL_S, 4 * INTERVAL_S, 8 * INTERVAL_S]
    assert max(lengths) == lengths[-1] == INTERVAL_MAX_S
    now += INTERVAL_MAX_S
    assert limit.take_due(now) == []
    flood(limit, now)
    assert limit.next_deadline() == now + INTERVAL_S


def test_a_few_lines_in_each_interval_are_all_written() -> None:
    limit = LineLimit(lines_max=3)
    for now in range(0, 1000, 5):
        assert limit.admit(REFUSED, float(now))
    assert limit.next_deadline() is None


def test_a_limit_of_no_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="lines_max must be at least 1"):
        LineLimit(0)


async def test_a_flood_of_lines_costs_few_lines_with_the_whole_count() -> None:
    clock = VirtualClock()
    with capture_logs() as lines:
        log = LimitedLog(structlog.get_logger(), clock)
        for _ in range(3000):  # ten a second
            log.warning("connection refused", why="a stranger")
            await clock.advance(0.1)
        log.info("message refused", why="other kinds are written")
        log.close()
        log.close()
    written = [line for line in lines if line["event"] == "connection refused"]
    counts = [line for line in lines if line["event"] == "similar lines suppressed"]
    assert len(written) + sum(line["count"] for line in counts) == 3000
    assert lines[:LINES_MAX] == written[:LINES_MAX]
    assert len(lines) < 150
    assert {line["line"] for line in counts} == {"connection refused"}
    assert [line["within_s"] for line in counts][:3] == [10, 20, 40]
    assert any(line["event"] == "message refused" for line in lines)


async def test_the_count_comes_when_the_interval_is_over_though_no_line_follows() -> None:
    clock = VirtualClock()
    with capture_logs() as lines:
        log = LimitedLog(structlog.get_logger(), clock, lines_max=1)
        log.warning("connection refused")
        log.warning("connection refused")
        await clock.advance(INTERVAL_S)
    assert lines[1:] == [
        {
            "event": "similar lines suppressed",
            "line": "connection refused",
            "count": 1,
            "within_s": 10,
            "log_level": "warning",
        }
    ]


def test_lines_of_any_thread_are_counted_and_the_count_comes_with_the_next_line() -> None:
    times = iter([0.0, 1.0, 2.0, 30.0])
    with capture_logs() as lines:
        log = CountedLog(structlog.get_logger(), lambda: next(times), lines_max=1)
        for _ in range(3):
            log.error("record refused")
        log.warning("another kind")
    assert [(line["event"], line.get("count")) for line in lines] == [
        ("record refused", None),
        ("similar lines suppressed", 2),
        ("another kind", None),
    ]


def test_a_line_that_is_written_while_another_one_is_does_not_block() -> None:  # an object that is collected meanwhile
    class Nested:
        def error(self, event: str, **keys: object) -> None:
            if event == "outer":
                log.error("inner")
            written.append(event)

    written: list[str] = []
    log = CountedLog(Nested(), lambda: 0.0)
    log.error("outer")
    assert written == ["inner", "outer"]
