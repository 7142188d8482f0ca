# SPDX-License-Identifier: Apache-2.0

"""Names of part files, and the events that list them."""

from __future__ import annotations

import pytest

from protocol.wire.codec import decode_event, encode_event
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable, PartName, parse_prepared, prepared_events, token_of

PART = PartName(subtask=3, after=14, attempt=2, token="9f31c2d07a5be8464ab0c6d2e1f83957", number=0, suffix=".jsonl")
PLACE = "file:///out"
PROOF = "a secret"


def a_part(number: int = 0) -> Committable:
    return Committable(str(PartName(0, -1, 0, token_of(PROOF), number)), payload=[2, 8], checkpoint_id=1)


def listed(event: object) -> tuple[Committable, ...]:
    prepared = parse_prepared("out", PLACE, event)
    assert prepared is not None
    return prepared.committables


def test_a_name_contains_what_the_clean_up_needs() -> None:
    assert str(PART) == "part-s00003-e0000000015-a00002-9f31c2d07a5be8464ab0c6d2e1f83957-000000.jsonl"
    assert PartName.parse(str(PART)) == PART


@pytest.mark.parametrize(
    "part",
    [
        PartName(0, -1, 0, "0" * 32, 0),
        PartName(123456, 99999999999, 123456, "f" * 32, 1234567, "a-s00001-e1-b", ".csv.gz"),
    ],
)
def test_a_name_can_be_parsed_whatever_its_numbers(part: PartName) -> None:
    assert PartName.parse(str(part)) == part


@pytest.mark.parametrize("name", ["", "part", "_SUCCESS", f"x/{PART}", f"{PART}/x", f"../{PART}", str(PART)[1:5]])
def test_other_names_are_not_parts(name: str) -> None:
    assert PartName.parse(name) is None


def test_the_files_of_a_subtask_sort_in_the_order_of_their_rows() -> None:
    """By epoch, then by attempt, then by number."""
    parts = [
        PartName(0, -1, 0, "f" * 32, 0),
        PartName(0, -1, 0, "f" * 32, 1),
        PartName(0, 9, 0, "f" * 32, 2),
        PartName(0, 9, 1, "0" * 32, 0),
        PartName(0, 10, 1, "0" * 32, 1),
        PartName(1, -1, 0, "0" * 32, 0),
    ]
    assert sorted(map(str, parts)) == [str(part) for part in parts]


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), (".x", ""), ("_x", ""), ("a/b", ""), ("a", "x"), ("a", "./")])
def test_affixes_that_would_hide_the_files_are_refused(prefix: str, suffix: str) -> None:
    with pytest.raises(ValueError, match=r"prefix|suffix"):
        FileSink("/out", prefix=prefix, suffix=suffix)


def test_a_list_survives_the_codec_unchanged() -> None:
    files = [a_part(0), a_part(1)]
    (event,) = prepared_events("out", PLACE, PROOF, 1, files)
    assert listed(decode_event(encode_event(event))) == tuple(files)


def test_no_sealed_file_makes_no_event_and_many_make_several() -> None:
    """Each must fit the size limit of an event (H62)."""
    assert list(prepared_events("out", PLACE, PROOF, 1, [])) == []
    files = [a_part(number) for number in range(2500)]
    events = list(prepared_events("out", PLACE, PROOF, 1, files))
    assert len(events) == 3
    assert [file for event in events for file in listed(event)] == files
    assert all(encode_event(event) for event in events)


@pytest.mark.parametrize("event", [None, 1, [], ["other"], {"a": 1}, ["headgate/prepared"]])
def test_an_event_of_the_user_is_not_a_list(event: object) -> None:
    assert parse_prepared("out", PLACE, event) is None


def test_the_list_of_another_sink_is_ignored() -> None:
    (event,) = prepared_events("other", PLACE, PROOF, 1, [a_part()])
    assert parse_prepared("out", PLACE, event) is None


def test_two_halves_with_different_directories_are_refused() -> None:
    (event,) = prepared_events("out", "file:///elsewhere", PROOF, 1, [a_part()])
    with pytest.raises(SinkMisused, match=r"file:///elsewhere.*file:///out.*same target"):
        parse_prepared("out", PLACE, event)


@pytest.mark.parametrize("entry", [None, [], ["x", 1], [str(PART), 1, 1], ["../" + str(PART), 1], [1, 1]])
def test_a_malformed_list_is_an_error(entry: object) -> None:
    with pytest.raises(ValueError, match=r"not a prepared part: .*: list what prepare"):
        parse_prepared("out", PLACE, ["headgate/prepared", "out", PLACE, PROOF, 1, True, [entry]])


def test_a_list_names_only_files_of_the_writer_that_has_its_proof() -> None:  # H83
    """The names of all parts are visible, so a name proves nothing."""
    stolen = Committable(str(PART), checkpoint_id=1)
    for proof in (PROOF, PART.token, ""):
        (event,) = prepared_events("out", PLACE, proof, 1, [stolen])
        with pytest.raises(SinkMisused, match=f"lists {PART}, which another writer wrote"):
            parse_prepared("out", PLACE, event)
    (event,) = prepared_events("out", PLACE, PROOF, 1, [a_part(), stolen])
    with pytest.raises(SinkMisused, match="another writer wrote"):
        parse_prepared("out", PLACE, event)


def test_a_list_without_a_proof_is_not_a_list() -> None:  # H83
    (event,) = prepared_events("out", PLACE, PROOF, 1, [a_part()])
    assert parse_prepared("out", PLACE, [*event[:3], *event[4:]]) is None
