# SPDX-License-Identifier: Apache-2.0

"""Many actors are cheap, and none of them is left at the end."""

from __future__ import annotations

import asyncio

from actors import Actor, ActorContext, ActorRef
from tests.actors.actors_under_test import running_system


class Link(Actor[int]):
    """Forwards a number, incremented each time."""

    def __init__(self, following: ActorRef[int] | None, done: asyncio.Future[int]) -> None:
        self.following, self.done = following, done

    async def receive(self, context: ActorContext[int], message: int) -> None:
        if self.following is None:
            self.done.set_result(message)
        else:
            self.following.tell(message + 1)


async def test_ten_thousand_actors_pass_a_message_on_with_one_task_each() -> None:
    tasks_before = len(asyncio.all_tasks())
    async with running_system(shutdown_timeout_s=60.0) as system:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ref: ActorRef[int] | None = None
        for _ in range(10_000):
            ref = system.spawn(lambda ref=ref: Link(ref, done))  # type: ignore[misc]
        assert ref is not None
        ref.tell(1)
        assert await done == 10_000
        assert system.actor_count == 10_000
        assert len(asyncio.all_tasks()) == tasks_before + 1 + 10_000  # the system has one, too
