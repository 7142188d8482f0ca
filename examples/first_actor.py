# SPDX-License-Identifier: Apache-2.0

"""A first actor without Spark: messages, an answer, work in a thread, and calls from a thread.

It needs ``headgate`` alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from headgate.actors import Actor, ActorContext, ActorRef, ActorSystem, Reply


@dataclass(frozen=True)
class Add:
    amount: int


@dataclass(frozen=True)
class GetTotal:
    reply: Reply[int]


@dataclass(frozen=True)
class AddDigits:
    """Add the digits of 2 to this power, and answer with the total."""

    power: int
    reply: Reply[int]


@dataclass(frozen=True)
class DigitsAdded:
    """The result of the thread's computation."""

    amount: int
    reply: Reply[int]


Message = Add | GetTotal | AddDigits | DigitsAdded


class Counter(Actor[Message]):
    def __init__(self) -> None:
        self.total = 0

    async def receive(self, context: ActorContext[Message], message: Message) -> None:
        match message:
            case Add(amount):
                self.total += amount
            case GetTotal(reply):
                reply.answer(self.total)
            case AddDigits(power, reply):
                context.run_in_thread(sum_of_digits, power, on_result=lambda amount: DigitsAdded(amount, reply))
            case DigitsAdded(amount, reply):
                self.total += amount
                reply.answer(self.total)


def sum_of_digits(power: int) -> int:
    return sum(map(int, str(2**power)))


def count_from_a_thread(system: ActorSystem, counter: ActorRef[Message]) -> int:
    counter.tell_threadsafe(Add(10))
    return system.run_from_thread(partial(counter.ask, GetTotal, timeout_s=5.0)).result()


async def main() -> None:
    async with ActorSystem("first") as system:
        counter = system.spawn(Counter, name="counter")

        counter.tell(Add(2))
        counter.tell(Add(3))
        total = await counter.ask(GetTotal, timeout_s=5.0)
        print(f"total: {total}")

        total = await counter.ask(partial(AddDigits, 1000), timeout_s=5.0)
        print(f"total, after work in a thread: {total}")

        total = await asyncio.to_thread(count_from_a_thread, system, counter)
        print(f"total, seen from a thread: {total}")


if __name__ == "__main__":
    asyncio.run(main())
