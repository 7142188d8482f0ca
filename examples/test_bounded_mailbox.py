# SPDX-License-Identifier: Apache-2.0

"""Tests of ``bounded_mailbox`` in virtual time: seconds pass without waiting, and every run takes the same course.

Run them with ``python -m pytest --asyncio-mode auto examples/test_bounded_mailbox.py``.
"""

from __future__ import annotations

import asyncio

from examples.bounded_mailbox import WRITE_S, Line, Writer, produce
from headgate.actors import MailboxConfig
from headgate.actors.testing import deterministic_system


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
