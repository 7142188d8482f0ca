# SPDX-License-Identifier: Apache-2.0

"""Peers that cause a line of the log with each message fill no disk (H62)."""

from __future__ import annotations

import json

from structlog.testing import capture_logs

from protocol.wire.messages import AnswerMessage, Confirm, Opened, RequestMessage
from spark_bridge.server.server import ServerConfig
from tests.fuzz.driver_half import VICTIM, running_driver_half
from tests.fuzz.played_tasks import KEYS, PlayedTasks

MESSAGES = 1000


async def test_a_task_that_repeats_itself_costs_few_lines_and_is_counted() -> None:  # H62
    with capture_logs() as lines:
        async with running_driver_half(KEYS, ServerConfig()) as half, PlayedTasks(half) as tasks:
            task = await tasks.start(VICTIM, 1)
            await task.line.say(*[Opened(1, seq) for seq in range(2, 2 + MESSAGES)])
            await task.until_taken(1 + MESSAGES)
    refused = [line for line in lines if line["event"] == "message refused"]
    suppressed = [line for line in lines if line["event"] == "similar lines suppressed"]
    assert 20 <= len(refused) < 100
    assert len(refused) + sum(line["count"] for line in suppressed) == MESSAGES
    assert {(line["line"], line["subtask"]) for line in suppressed} == {("message refused", 0)}


async def test_requests_that_fail_cost_few_lines_and_each_gets_its_answer() -> None:  # H62
    with capture_logs() as lines:
        async with running_driver_half(KEYS, ServerConfig()) as half, PlayedTasks(half) as tasks:
            task = await tasks.start(VICTIM, 1)
            for number in range(100):  # one after the other: the window is smaller
                await task.line.say(RequestMessage(1, 2 + number, number, b"\xc1"))
                answer = await task.until(AnswerMessage)
                assert isinstance(answer, AnswerMessage)
                assert "not msgpack" in answer.error
                await task.line.say(Confirm(1, answer.seq))
    failed = [line for line in lines if line["event"] == "request failed"]
    suppressed = [line for line in lines if line["event"] == "similar lines suppressed"]
    assert 20 <= len(failed) < 100
    assert len(failed) + sum(line["count"] for line in suppressed) == 100
    assert len(json.dumps(lines, default=str)) < 200_000
