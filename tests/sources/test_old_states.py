# SPDX-License-Identifier: Apache-2.0

"""States that an earlier release wrote, each as one event, are still read (H164).

The files were written by that release, and never change. A new form of a state gets new files.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator, HybridSplitEnumerator
from actors.coordination.sources.source import SplitEnumerator, SplitEnumeratorContext
from headgate import SplitReader, StaticSplitEnumerator
from protocol.kept_bytes import KeptBytes
from protocol.source_events import SplitAt, decode_split
from protocol.wire.state import run_steps
from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.group.task import GroupCheckpoint
from spark_bridge.primitives.work_queue.driver import _Enumerator as WorkQueueEnumerator
from spark_bridge.primitives.work_queue.task import WorkQueuePart
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.sources.postgres.driver import PostgresEnumerator, PostgresSource
from spark_bridge.sources.postgres.ranges import unpack_ranges
from spark_bridge.streams.driver import _State
from spark_bridge.subtask.context import SubtaskContext

pytestmark = pytest.mark.anyio

STATES = Path(__file__).parent / "old_states"
SPLITS: list[Any] = [
    "plain",
    ("a tuple", 1),
    {"a": [1, 2.5, None]},
    dt.datetime(2026, 11, 26, 12, tzinfo=dt.UTC),
    SplitAt(["file", 0, 10], 4),
    [np.arange(3), "array first"],
    b"bytes",
    Decimal("1.50"),
]


def golden(name: str) -> bytes:
    return (STATES / f"{name}.bin").read_bytes()


class Taking(SplitEnumeratorContext):
    """One reader, which takes whatever there is."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.is_over = False
        self.coordinator: Any = SimpleNamespace(
            call_later=lambda *_: None, handles_restored=False, mode=None, input_begins_again=True
        )

    @property
    def parallelism(self) -> int:
        return 1

    def registered_readers(self) -> list[int]:
        return [0]

    def attempts(self, subtask: int) -> list[int]:
        return [0]

    async def assign_splits(self, subtask: int, splits: Any) -> None:
        self.found += splits

    async def signal_no_more_splits(self, subtask: int) -> None:
        self.is_over = True

    async def send_event(self, subtask: int, event: Any) -> None:
        self.found.append(event)


async def handed_out(enumerator: SplitEnumerator) -> list[Any]:
    """Everything that one reader gets of it."""
    context = Taking()
    await enumerator.start(context)
    seen = -1
    while seen < len(context.found) and not context.is_over:
        seen = len(context.found)
        await enumerator.handle_split_request(0)
    return context.found


async def test_a_static_enumerator_hands_out_what_an_old_state_has() -> None:  # H164
    assert repr(await handed_out(StaticSplitEnumerator((), golden("static_enumerator")))) == repr(SPLITS)


async def test_a_discovering_enumerator_knows_what_an_old_state_has() -> None:  # H164
    looks = iter([["a", "b", "new", SplitAt("c", 1), "d"]])
    found = await handed_out(
        DiscoveringSplitEnumerator(lambda: next(looks), golden("discovering_enumerator"), every_s=1.0)
    )
    assert found == [SplitAt("e", 3), "b", SplitAt("c", 7), "d", "new"]


async def test_a_hybrid_enumerator_continues_from_an_old_state() -> None:  # H164
    sources: list[Any] = [
        lambda state, previous: StaticSplitEnumerator((), state),
        lambda state, previous: DiscoveringSplitEnumerator(tuple, state),
    ]
    found = await handed_out(HybridSplitEnumerator(sources, golden("hybrid_enumerator")))
    assert found == [[0, "past"], SplitAt([1, "e"], 3), [1, "b"], SplitAt([1, "c"], 7), [1, "d"]]


class Reader(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Any:
        yield 1, split


def test_a_reader_continues_with_the_splits_of_an_old_state() -> None:  # H164
    reader, context = Reader(), SimpleNamespace()
    reader.open(context, golden("split_reader"))  # type: ignore[arg-type]
    assert repr(list(reader.splits)) == repr([SplitAt("open", 5), *SPLITS])
    merged = Reader()
    merged.open(context, Reader().merge_states({0: golden("split_reader"), 1: b""}))  # type: ignore[arg-type]
    assert repr(merged.splits) == repr(reader.splits)


def test_a_hybrid_reader_continues_with_the_splits_of_an_old_state() -> None:  # H164
    reader = HybridReader([Reader, Reader])
    reader.open(SubtaskContext.__new__(SubtaskContext), golden("hybrid_reader"))
    assert list(reader.splits) == [[0, "x"], SplitAt([1, "y"], 9)]
    assert [list(one.splits) for one in reader._readers] == [[], ["inner"]]


async def test_a_stream_continues_with_an_old_plan() -> None:  # H164
    state: _State = run_steps(_State.unpack_in_steps(golden("stream_plan")))
    assert (state.stream, state.dropped, state.last) == ("abcd", 3, 5)
    assert [list(map(decode_split, batch)) for batch in state.batches] == [["s1", SplitAt(["a", 9], 4)], [("t", 1)]]
    assert list(map(decode_split, state.open)) == [SplitAt("a", 9), SplitAt("b", None)]
    assert await handed_out(DiscoveringSplitEnumerator(tuple, state.enumerator)) == [
        SplitAt("e", 3),
        "b",
        SplitAt("c", 7),
        "d",
    ]


async def test_a_postgres_enumerator_continues_with_the_ranges_of_an_old_state() -> None:  # H164
    source = PostgresSource("", "t", "id", changes="x")
    enumerator = PostgresEnumerator(source, golden("postgres_enumerator"))
    *ranges, [changes, packed] = await handed_out(enumerator)
    assert ranges == [["range", "10", "20"], SplitAt(["range", "20", None], "7:9:8")]
    assert changes == "changes"
    assert unpack_ranges(packed) == (["10", None], ["5:6:", "0:0:"]), (
        "what a reader leaves that asks for more, nobody reads"
    )


async def test_a_work_queue_continues_with_the_items_of_an_old_state() -> None:  # H164
    queue = WorkQueueEnumerator((), golden("work_queue"), 16, KeptBytes(0, "the items", "none"))
    assert (queue.known, queue.finished) == (4, 0), "one is being worked on"
    part = WorkQueuePart("q", 2, keyed=False)
    part.open(SimpleNamespace(now=None, input_begins_again=True), golden("work_queue_task"))  # type: ignore[arg-type]
    assert repr(list(part._hand)) == repr([(1, 0, ("work", 1)), (2, 3, [np.float32(1.5), "x"])])


async def test_a_group_continues_with_the_checkpoint_of_an_old_state() -> None:  # H164
    group = Group("training").coordinator("operator")
    await group.reset_to_checkpoint(1, golden("group"))
    assert group.checkpoint == GroupCheckpoint(12, b"model")  # type: ignore[attr-defined]
