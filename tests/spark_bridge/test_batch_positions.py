# SPDX-License-Identifier: Apache-2.0

"""Which micro-batch may run, given the last completed checkpoint: every case, and the errors for refused ones."""

from __future__ import annotations

import pytest

from actors.coordination.engine.inputs import BatchInput, InputPosition, UnnamedInput
from spark_bridge.driver.micro_batches import BatchDecision, decide, why_refused

MINE, OTHER = "0d5c1b9e-0000-4000-8000-000000000001", "0d5c1b9e-0000-4000-8000-000000000002"


def after(batch_id: int, query_id: str = MINE) -> InputPosition:
    return InputPosition(BatchInput(query_id, batch_id), done=True)


def within(batch_id: int, query_id: str = MINE) -> InputPosition:
    return InputPosition(BatchInput(query_id, batch_id), done=False)


def plain_run(last_batch: InputPosition | None, done: bool = True) -> InputPosition:
    """A run outside of the query, which began after a batch."""
    return InputPosition(UnnamedInput("aaaa"), done, ("monday",), last_batch)


@pytest.mark.parametrize(
    ("found", "batch_id", "decision"),
    [
        (plain_run(None), 0, BatchDecision.RUN),
        (plain_run(None), 1, BatchDecision.UNKNOWN),
        (plain_run(after(0)), 0, BatchDecision.SKIP),
        (plain_run(after(5), done=False), 5, BatchDecision.SKIP),
        (plain_run(after(4)), 5, BatchDecision.RUN),
        (plain_run(after(6)), 5, BatchDecision.AHEAD),
        (plain_run(within(5)), 5, BatchDecision.RUN),
        (plain_run(after(4, OTHER)), 5, BatchDecision.OTHER_QUERY),
        (None, 0, BatchDecision.RUN),
        (None, 1, BatchDecision.UNKNOWN),
        (after(4), 5, BatchDecision.RUN),
        (within(5), 5, BatchDecision.RUN),
        (after(5), 5, BatchDecision.SKIP),
        (within(0), 0, BatchDecision.RUN),
        (after(0), 0, BatchDecision.SKIP),
        (within(6), 5, BatchDecision.AHEAD),
        (after(6), 5, BatchDecision.AHEAD),
        (after(9), 0, BatchDecision.AHEAD),
        (within(4), 5, BatchDecision.GAP),
        (after(3), 5, BatchDecision.GAP),
        (within(3), 5, BatchDecision.GAP),
        (after(4, OTHER), 0, BatchDecision.OTHER_QUERY),
        (after(4, OTHER), 5, BatchDecision.OTHER_QUERY),
        (after(5, OTHER), 5, BatchDecision.OTHER_QUERY),
        (within(5, OTHER), 5, BatchDecision.OTHER_QUERY),
    ],
)
def test_every_case(found: InputPosition | None, batch_id: int, decision: BatchDecision) -> None:
    assert decide(found, MINE, batch_id) is decision


def test_in_any_history_of_a_query_only_the_next_batch_runs_and_only_the_last_is_skipped() -> None:
    for found in [place(batch_id) for batch_id in range(5) for place in (after, within)]:
        decisions = [decide(found, MINE, batch_id) for batch_id in range(7)]
        assert decisions.count(BatchDecision.RUN) == 1
        assert decisions.count(BatchDecision.SKIP) == (1 if found.done else 0)
        assert decisions == sorted(
            decisions, key=[BatchDecision.AHEAD, BatchDecision.SKIP, BatchDecision.RUN, BatchDecision.GAP].index
        )


@pytest.mark.parametrize(
    "position", [after(0), within(7), after(10**12, "a-name"), plain_run(after(3)), plain_run(None)]
)
def test_a_position_is_read_from_its_label(position: InputPosition) -> None:
    assert InputPosition.read(str(position)) == position


@pytest.mark.parametrize(
    "label",
    [
        "",
        "batch 07 of q: done",
        "batch -1 of q: done",
        "batch 7 of : done",
        "batch 7 of q: over",
        "batch 7 of q: done ",
    ],
)
def test_an_invalid_label_is_not_a_position(label: str) -> None:
    assert InputPosition.read(label) is None


@pytest.mark.parametrize(
    ("found", "batch_id", "file", "said"),
    [
        (None, 3, None, ["batch 3", "storage", "adopt=True"]),
        (after(1), 3, None, ["after batch 1", "storage is older", "adopt=True"]),
        (within(1), 3, None, ["during batch 1", "adopt=True"]),
        (after(4, OTHER), 0, None, [OTHER, MINE, "checkpointLocation", "restore='none'", "adopt=True"]),
        (
            after(5),
            3,
            "/s/checkpoint-7.hgc",
            ["after batch 5", "restore=CheckpointFile('/s/checkpoint-7.hgc')", "after batch 2"],
        ),
        (after(5), 3, None, ["after batch 5", "no way back", "after batch 2"]),
        (within(5), 0, None, ["during batch 5", "restore='none'"]),
    ],
)
def test_a_refusal_names_both_sides_and_the_fix(
    found: InputPosition | None, batch_id: int, file: str | None, said: list[str]
) -> None:
    decision = decide(found, MINE, batch_id)
    text = why_refused(decision, found, MINE, batch_id, file)
    assert [word for word in (*said, f"batch {batch_id} of query {MINE}") if word not in text] == []
    assert ("adopt" in text) == (decision is not BatchDecision.AHEAD)
