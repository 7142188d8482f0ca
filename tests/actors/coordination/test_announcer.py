# SPDX-License-Identifier: Apache-2.0

"""Many gateways are told the same in several turns, and each in the order of what it is told (H41, H79)."""

from __future__ import annotations

from typing import Any

from actors.coordination.host.gateway import Announcer, GatewayLine


class Ref:
    """Stands in for a gateway's actor: what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell_direct(self, message: Any) -> None:
        self.told.append(message)


def lines(count: int) -> tuple[list[GatewayLine[Any]], list[Ref]]:
    made, refs = [], []
    for _ in range(count):
        line: GatewayLine[Any] = GatewayLine()
        ref: Any = Ref()
        line.ref = ref
        made.append(line)
        refs.append(ref)
    return made, refs


def test_no_turn_tells_more_than_its_share_and_all_are_told_in_the_end() -> None:
    turns: list[int] = []
    announcer: Announcer[Any] = Announcer(16, lambda: turns.append(1))
    made, refs = lines(50)
    announcer.announce(made, "cut")
    told = [sum(bool(ref.told) for ref in refs)]
    while turns:
        turns.pop()
        announcer.go_on()
        told.append(sum(bool(ref.told) for ref in refs))
    assert told == [16, 32, 48, 50]
    assert all(ref.told == ["cut"] for ref in refs)


def test_what_is_told_later_comes_behind_what_was_put_off() -> None:
    announcer: Announcer[Any] = Announcer(1, lambda: None)
    made, refs = lines(3)
    announcer.announce(made, "cut")
    made[2].tell_direct("event")
    assert [ref.told for ref in refs] == [["cut"], [], ["cut", "event"]]
    announcer.announce(made, "over")  # after the first one, for those that have not had it
    assert [ref.told for ref in refs] == [["cut"], [], ["cut", "event"]]
    for _ in range(3):
        announcer.go_on()
    assert [ref.told for ref in refs] == [["cut", "over"], ["cut", "over"], ["cut", "event", "over"]]


def test_a_few_gateways_are_told_immediately() -> None:
    turns: list[int] = []
    announcer: Announcer[Any] = Announcer(16, lambda: turns.append(1))
    made, refs = lines(16)
    announcer.announce(made, "cut")
    assert all(ref.told == ["cut"] for ref in refs)
    assert not turns


def test_a_gateway_that_is_closed_is_told_nothing_more() -> None:
    announcer: Announcer[Any] = Announcer(1, lambda: None)
    made, refs = lines(2)
    announcer.announce(made, "cut")
    made[1].end()
    announcer.go_on()
    assert refs[1].told == []
