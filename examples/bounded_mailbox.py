# SPDX-License-Identifier: Apache-2.0

"""A bounded mailbox without Spark: producers that are faster than the writer wait for space, and nothing is lost.

Three producers send lines to one ``Writer``, which needs 10 ms for each. Its mailbox holds four. ``--on-full`` shows
what else can happen to a line for which there is no space.

The writer stops itself after 0.2 s without a line. The tests at the end run in virtual time, with
``python -m pytest --asyncio-mode auto bounded_mailbox.py``. It needs ``headgate`` alone, and the tests pytest-asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.actors import (
    Actor,
    ActorContext,
    ActorRef,
    ActorSystem,
    MailboxConfig,
    MailboxFull,
    OnFull,
)
from headgate.actors.testing import deterministic_system

WRITE_S = 0.01
IDLE_S = 0.2
PRODUCERS = 3


@dataclass(frozen=True)
class Line:
    producer: int
    number: int


@dataclass(frozen=True)
class Idle:
    """No line has come for 0.2 s."""


class Writer(Actor[Line | Idle]):
    """Writes one line at a time, slowly, and ends when no more come."""

    def __init__(self, written: list[Line], ended: asyncio.Event) -> None:
        self.written = written
        self.ended = ended

    async def started(self, context: ActorContext[Line | Idle]) -> None:
        context.timers.start("idle", Idle(), delay_s=IDLE_S)

    async def receive(self, context: ActorContext[Line | Idle], message: Line | Idle) -> None:
        match message:
            case Line():
                await context.clock.sleep(WRITE_S)
                self.written.append(message)
                context.timers.start("idle", Idle(), delay_s=IDLE_S)
            case Idle():
                context.stop()

    async def stopped(self, context: ActorContext[Line | Idle], cause: BaseException | None) -> None:
        self.ended.set()


async def produce(writer: ActorRef[Line | Idle], producer: int, lines: int) -> None:
    for number in range(lines):
        try:
            await writer.send(Line(producer, number))
        except MailboxFull:
            await asyncio.sleep(0)  # this line is lost; let the others run


async def run(lines: int, mailbox: MailboxConfig) -> None:
    written: list[Line] = []
    ended = asyncio.Event()
    async with ActorSystem("printing") as system, asyncio.TaskGroup() as tasks:
        writer = system.spawn(lambda: Writer(written, ended), name="writer", mailbox=mailbox)
        for producer in range(PRODUCERS):
            tasks.create_task(produce(writer, producer, lines), name=f"producer {producer}")
        await asyncio.sleep(WRITE_S / 2)
        print("5 ms after the start:")
        print(system.dump_waits())
        await ended.wait()
        figures = writer.statistics()
        print(f"{PRODUCERS * lines} lines sent, {len(written)} written")
        print(f"{figures.dropped} dropped, {figures.refused} refused, at most {figures.high_water} in the mailbox")
        for reason, count in system.dead_letters.counts.items():
            print(f"{count} dead letters: {reason.value}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Three fast producers, one slow writer, one bounded mailbox.")
    parser.add_argument("--lines", type=int, default=20, help="lines of each producer (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=4, help="lines that may wait (default: %(default)s)")
    policies = [policy.value for policy in OnFull]
    parser.add_argument(
        "--on-full", choices=policies, default="wait", help="if the mailbox is full (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("headgate").setLevel(logging.ERROR)
    asyncio.run(run(options.lines, MailboxConfig(options.capacity, OnFull(options.on_full))))
    return 0


# --- tests: seconds pass without waiting, and every run takes the same course ---------------------------------------


async def test_senders_wait_for_space_and_lose_nothing() -> None:
    written: list[Line] = []
    ended = asyncio.Event()
    async with deterministic_system() as kit, asyncio.TaskGroup() as tasks:
        writer = kit.system.spawn(lambda: Writer(written, ended), name="writer", mailbox=MailboxConfig(4))
        for producer in range(3):
            tasks.create_task(produce(writer, producer, lines=20))

        await kit.run_until_idle()
        assert (writer.statistics().queued, writer.statistics().waiting_senders) == (4, 3)

        await kit.advance(10 * WRITE_S)
        assert len(written) == 10

        await kit.advance(60.0)
        assert len(written) == 60
        assert writer.statistics().high_water == 4
        assert ended.is_set()


async def test_lines_of_one_producer_keep_their_order() -> None:
    written: list[Line] = []
    async with deterministic_system(seed=7) as kit, asyncio.TaskGroup() as tasks:
        writer = kit.system.spawn(lambda: Writer(written, asyncio.Event()), mailbox=MailboxConfig(1))
        for producer in range(3):
            tasks.create_task(produce(writer, producer, lines=5))
        await kit.advance(15 * WRITE_S)
    for producer in range(3):
        assert [line.number for line in written if line.producer == producer] == [0, 1, 2, 3, 4]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
