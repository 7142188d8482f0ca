# SPDX-License-Identifier: Apache-2.0

"""A relay record becomes facts or an error, nothing in between."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.facts import (
    ApplicationEnded,
    EngineFact,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from spark_bridge.bridge.relay.records import (
    OUTCOMES,
    TEXT_MAX_CHARS,
    CommandAnswered,
    RecordDecodeError,
    RelayedFact,
    decode_record,
    shorten,
)


def text(said: str) -> bytes:
    encoded = said.encode()
    return struct.pack(">H", len(encoded)) + encoded


def record(kind: int, *fields: bytes) -> bytes:
    return struct.pack(">Bq", kind, 1_700_000_000_000_001) + b"".join(fields)


RECORDS: dict[bytes, EngineFact] = {
    record(1, struct.pack(">iIii", 7, 2, 11, 12), text("")): JobStarted(7, (11, 12)),
    record(1, struct.pack(">iIi", 7, 1, 11), text("a1")): JobStarted(7, (11,), action="a1"),
    record(2, struct.pack(">i?", 7, False), text("it failed")): JobEnded(7, False, "it failed"),
    record(3, struct.pack(">iii?i", 11, 1, 8, True, 9)): StageSubmitted(11, 1, 8, barrier=True, partitions=9),
    record(4, struct.pack(">ii?", 11, 1, False), text("")): StageCompleted(11, 1, None),
    record(4, struct.pack(">ii?", 11, 1, True), text("lost")): StageCompleted(11, 1, "lost"),
    record(5, struct.pack(">qiiii?", 2**40, 11, 1, 5, 2, True), text("3"), text("hôte")): TaskStarted(
        2**40, 11, 1, 5, 2, speculative=True, executor_id="3", host="hôte"
    ),
    record(6, struct.pack(">qiiiiB", 9, 11, 1, 5, 2, 2), text("unresponsive")): TaskEnded(
        9, 11, 1, 5, 2, TaskOutcome.KILLED, "unresponsive"
    ),
    record(7, text("3"), text("gone")): ExecutorLost("3", "gone"),
    record(8, struct.pack(">q", 41)): FactsDropped(41),
    record(9): ApplicationEnded(),
}


@pytest.mark.parametrize(("raw", "fact"), RECORDS.items())
def test_each_kind_of_record_becomes_its_fact(raw: bytes, fact: EngineFact) -> None:
    assert decode_record(raw) == RelayedFact(fact, 1_700_000_000_000_001)


@pytest.mark.parametrize("raw", RECORDS)
def test_a_record_that_is_cut_or_too_long_is_refused(raw: bytes) -> None:
    for size_bytes in range(len(raw)):
        with pytest.raises(RecordDecodeError):
            decode_record(raw[:size_bytes])
    with pytest.raises(RecordDecodeError, match="after the last field"):
        decode_record(raw + b"\x00")


def test_answers_are_distinguished_from_facts() -> None:
    assert decode_record(record(10, struct.pack(">q?", 5, True), text(""))) == CommandAnswered(5, None)
    assert decode_record(record(10, struct.pack(">q?", 5, False), text("no"))) == CommandAnswered(5, "no")
    raw = record(11, struct.pack(">qIi?IqBiiqB", 6, 1, 7, True, 2, 9, 2, 4, 5, 10, 3))
    states = {9: TaskState.ENDED, 10: TaskState.UNKNOWN}
    assert decode_record(raw) == CommandAnswered(6, None, StatusReported({7: True}, states, {9: TaskPlace(4, 5)}))


def test_every_outcome_has_a_code() -> None:
    assert sorted(outcome.value for outcome in OUTCOMES) == sorted(outcome.value for outcome in TaskOutcome)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (record(99), "unknown kind"),
        (record(6, struct.pack(">qiiiiB", 9, 11, 1, 5, 2, 7), text("")), "task outcome: 7"),
        (record(2, struct.pack(">iB", 7, 2), text("")), "invalid flag: 2"),
        (record(7, b"\x00\x01\xff", text("")), "codec can't decode"),
        (record(1, struct.pack(">iI", 7, 2**32 - 1)), "runs past the end"),  # H62: before memory is allocated
    ],
)
def test_an_invalid_record_is_refused_with_its_reason(raw: bytes, problem: str) -> None:
    with pytest.raises(RecordDecodeError, match=problem):
        decode_record(raw)


@given(st.binary(max_size=200) | st.builds(lambda k, b: bytes([k]) + b, st.integers(0, 12), st.binary()))
def test_any_bytes_give_a_fact_or_a_decode_error(raw: bytes) -> None:
    with contextlib.suppress(RecordDecodeError):
        decode_record(raw)


@given(st.text(max_size=3 * TEXT_MAX_CHARS))
def test_a_shortened_text_keeps_its_beginning_and_its_end(said: str) -> None:
    shown = shorten(said)
    assert len(shown) <= TEXT_MAX_CHARS
    if len(said) <= TEXT_MAX_CHARS:
        assert shown == said
    else:
        assert len(shown) == TEXT_MAX_CHARS
        assert shown[:500] == said[:500]
        assert shown[-1000:] == said[-1000:]
