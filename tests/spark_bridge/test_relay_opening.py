# SPDX-License-Identifier: Apache-2.0

"""The relay that replaces one lost during use. For how one is chosen, see test_relay.py of spark."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from benchmarks.no_spark import QuietRelay
from protocol.facts import FactsDropped, StageLook, StatusReported, TaskPlace
from protocol.wire.handshake import PROTOCOL_VERSION
from spark_bridge.bridge import relay
from spark_bridge.bridge.relay import (
    OnLost,
    Relay,
    RelayedFact,
    RelayError,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
)
from spark_bridge.bridge.relay.opening import _WithFallback


class StandIn(QuietRelay):
    """Its commands wait until it is lost; one that ``obeys`` performs them immediately."""

    def __init__(self, kind: str, *, obeys: bool = False, refuses: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.statistics = RelayStatistics(records=3, dropped=2, reconnects=5)
        self.story: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._obeys = obeys
        self._refuses = refuses

    async def start(self) -> None:
        await self.may_start.wait()
        if self._refuses:
            raise RelayRefused("not here")
        self.story.append("start")

    async def close(self) -> None:
        self.story.append("close")

    async def _carry_out(self, command: str) -> None:
        if not self._obeys:
            await asyncio.shield(self.lost)
        self.story.append(command)

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        await self._carry_out(f"kill {task_attempt_id}")

    async def cancel_job(self, job_id: int, reason: str) -> None:
        await self._carry_out(f"cancel {job_id}")

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        await self._carry_out(f"watch {task_attempt_id}")

    async def look_at_stage(self, stage_id: int) -> StageLook:
        await self._carry_out(f"look {stage_id}")
        return StageLook()

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        await self._carry_out(f"query {min(task_attempt_ids)}")
        return StatusReported()


class Two:
    """A first and a second relay, and the notices of their owner."""

    def __init__(self, *, first_refuses: bool = False, second_refuses: bool = False) -> None:
        self.first = StandIn("first", refuses=first_refuses)
        self.second = StandIn("second", obeys=True, refuses=second_refuses)
        self.facts: list[RelayedFact] = []
        self.lost: list[RelayError] = []
        self._first_is_lost: OnLost
        self.relay = _WithFallback(self._make_first, self.second, self.facts.append, self.lost.append)

    def _make_first(self, on_lost: OnLost) -> StandIn:
        self._first_is_lost = on_lost
        return self.first

    def lose_the_first(self) -> None:
        """Fail in the order of the real one: first the pending commands, then the notice to its owner."""
        error = RelayStopped("it did not come back")
        self.first.lost.set_exception(error)
        self._first_is_lost(error)


COMMANDS: dict[str, Callable[[Relay], Coroutine[Any, Any, object]]] = {
    "kill": lambda relay: relay.kill_task(7, "unresponsive"),
    "cancel": lambda relay: relay.cancel_job(7, "replaced"),
    "watch": lambda relay: relay.watch(3, 7),
    "look": lambda relay: relay.look_at_stage(7),
    "query": lambda relay: relay.query_status(frozenset([7]), frozenset()),
}


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command_to_a_lost_relay_is_sent_to_the_other(command: str) -> None:
    # H19: neither a command nor the query that it needs now is lost with it.
    two = Two()
    await two.relay.start()
    asking = asyncio.get_running_loop().create_task(COMMANDS[command](two.relay))
    await asyncio.sleep(0)
    with structlog.testing.capture_logs() as lines:
        two.lose_the_first()
        await two.relay.kill_task(8, "asked while there is none")
        await asking

    assert sorted(two.second.story) == sorted([f"{command} 7", "kill 8", "start"])
    assert two.relay.kind == "second"
    assert [relayed.fact for relayed in two.facts] == [FactsDropped(1)]
    assert two.relay.statistics == RelayStatistics(records=6, dropped=5, reconnects=10)
    assert two.lost == []
    assert [line["event"] for line in lines] == ["relay replaced by py4j"]
    await two.relay.close()
    assert (two.first.story[-1], two.second.story[-1]) == ("close", "close")


async def test_a_relay_that_refuses_to_start_is_replaced_before_anything_is_asked() -> None:
    two = Two(first_refuses=True)
    await two.relay.start()
    await two.relay.kill_task(7, "unresponsive")
    assert (two.first.story, two.second.story) == ([], ["start", "kill 7"])
    assert (two.relay.kind, two.facts, two.lost) == ("second", [], [])
    await two.relay.close()
    assert two.second.story[-1] == "close"


async def test_without_another_relay_the_owner_is_notified_and_commands_fail() -> None:
    two = Two(second_refuses=True)
    await two.relay.start()
    two.lose_the_first()
    with pytest.raises(RelayStopped, match="it did not come back"):
        await two.relay.kill_task(7, "unresponsive")
    assert [str(error) for error in two.lost] == ["it did not come back"]
    assert two.facts == []


async def test_closing_during_the_change_leaves_neither_relay_behind() -> None:  # H57
    two = Two()
    await two.relay.start()
    two.second.may_start.clear()
    two.lose_the_first()
    closing = asyncio.get_running_loop().create_task(two.relay.close())
    await asyncio.sleep(0)
    two.second.may_start.set()
    await closing
    assert (two.first.story[-1], two.second.story[-1]) == ("close", "close")


def test_the_java_end_speaks_the_version_of_the_protocol() -> None:
    """Without it the relay falls back to Py4J, which works, and is slower."""
    source = (Path(relay.__file__).parent / "TaskEventRelay.java").read_text(encoding="utf-8")
    assert f"int VERSION = {PROTOCOL_VERSION};" in source
