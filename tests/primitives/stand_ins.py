# SPDX-License-Identifier: Apache-2.0

"""One half of a part alone, with a stand-in of the test for the other one."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.coordination import Reply
from spark_bridge.subtask.parts import TaskPart

__all__ = ["Recipient", "bound", "open_alone"]


def open_alone(part: TaskPart, task: Any) -> None:
    """Open ``part``. ``task`` is as much of its context, and of its ``TaskAccess``, as the test needs."""
    part.task = task
    part.open(task, None)


class Recipient:
    """The task that a reply goes to. ``over``: it does not wait any more, which the coordinator has yet to hear."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.over = False
        self.open_replies = self

    def hear_loss(self, recipient: Recipient) -> None:
        """The test has ended before the reply was given."""

    def answer(self, value: Any) -> None:
        if not self.answered.done():
            self.answered.set_result(value)

    def fail(self, error: str) -> None:
        self.answered.set_exception(RuntimeError(error))


def bound(reply: Any, recipient: Recipient | None = None) -> asyncio.Future[Any]:
    """Return what comes of a reply that a coordinator's half has returned."""
    assert isinstance(reply, Reply)
    recipient = recipient or Recipient()
    reply._bind(recipient)  # type: ignore[arg-type]
    return recipient.answered
