# SPDX-License-Identifier: Apache-2.0

"""A checkpoint as bytes: it survives a round trip, and no other bytes are accepted as one (H50)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.errors import CheckpointCorrupt, CheckpointTooNew, LocalProtocolError
from protocol.parts import positions
from protocol.wire.checkpoint_format import (
    CHECKPOINT_ID_MAX,
    FORMAT_VERSION,
    HEAD_BYTES,
    PARALLELISM_MAX,
    StoredCheckpoint,
    check_head,
    decode_checkpoint,
    encode_checkpoint,
)
from protocol.wire.messages import HeldEvent, RestoreMode, SubtaskState
from protocol.wire.state_handles import KeyGroupRange, pack_handle
from protocol.wire.traces import join_traceparent
from tests.protocol.test_state_handles import HANDLE, HANDLES

SMALL = StoredCheckpoint(
    "words",
    RestoreMode.STREAMING,
    1_700_000_000_123,
    "0.1.0",
    CompletedCheckpoint(
        7,
        3,
        b"coordinator",
        {
            0: SubtaskSnapshot((SubtaskState(0, b"a"), SubtaskState(4, b"")), (HeldEvent(4, b"\xc0"),), (12,)),
            2: SubtaskSnapshot(),
        },
    ),
)

NATURAL = st.integers(0, 2**63 - 1)
ENVELOPE = b"\x93\xc7\x00\x01"
"""How a held event in formats 1 to 4 begins that names its part."""
BYTES = st.binary(max_size=20) | st.binary(max_size=5).map(lambda data: ENVELOPE + data)
PARTS = st.builds(
    SubtaskSnapshot,
    st.lists(st.builds(SubtaskState, NATURAL, st.binary(max_size=20), st.none() | HANDLES, st.none()), max_size=3).map(
        tuple
    ),
    st.lists(st.builds(HeldEvent, NATURAL, BYTES, st.booleans(), st.integers(0, 2)), max_size=3).map(tuple),
    st.lists(NATURAL, max_size=3).map(positions),
    st.booleans(),
)
STORED = st.builds(
    StoredCheckpoint,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10),
    st.sampled_from(RestoreMode),
    NATURAL,
    st.just("0.1.0"),
    st.builds(
        CompletedCheckpoint,
        st.integers(1, CHECKPOINT_ID_MAX),
        st.integers(10, PARALLELISM_MAX),
        st.binary(max_size=50),
        st.dictionaries(st.integers(0, 9), PARTS, max_size=4),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        parts=st.just(("", "a", "b")),
    ),
)


def sealed(body: bytes, *, version: int = 1, claimed: int | None = None) -> bytes:
    """Return a file with this body and a valid checksum, as a forger or another release would write it."""
    length = len(body) if claimed is None else claimed
    head = b"\x89HGC\r\n\x1a\n" + version.to_bytes(4, "big") + length.to_bytes(8, "big")
    return head + body + sha256(head + body).digest()


def msgpack_values(data: bytes) -> Any:
    """The values in the body of a file, as msgpack reads them."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data[HEAD_BYTES:-32])
    return unpacker


def body_of(*values: Any) -> bytes:
    return b"".join(msgpack.packb(value) for value in values)


HEADER = ("words", 7, 3, 1, 0, "0.1.0", b"")


@given(STORED)
def test_a_checkpoint_comes_back_as_it_was(stored: StoredCheckpoint) -> None:  # H50
    """Formats 1 to 4 name no part, and are written only if all of it is the user's own (H150)."""
    data = encode_checkpoint(stored)
    if data[11] < 5:
        stored = replace(stored, checkpoint=replace(stored.checkpoint, parts=("",)))
    assert decode_checkpoint(data) == stored


@pytest.mark.parametrize("size", [255, 256, 65_535, 65_536, 3 * 2**20])
def test_states_of_every_size_are_what_msgpack_writes_and_come_back(size: int) -> None:  # H50, H164
    """Large ones are copied by themselves, in steps, so the bytes must not change by that."""
    state = SubtaskState(1, bytes(range(256)) * (size // 256 + 1))
    state = SubtaskState(1, state.state[:size])
    stored = with_checkpoint(coordinator_state=state.state, subtask_states={0: SubtaskSnapshot((state,))})
    data = encode_checkpoint(stored)
    assert decode_checkpoint(data) == stored
    values = list(msgpack_values(data))
    assert values[6] == state.state
    assert sealed(body_of(*values)) == data


def test_the_same_checkpoint_gives_the_same_bytes_whatever_order_its_parts_came_in() -> None:
    parts = dict(reversed(SMALL.checkpoint.subtask_states.items()))
    other = replace(SMALL, checkpoint=replace(SMALL.checkpoint, subtask_states=parts))
    assert encode_checkpoint(other) == encode_checkpoint(SMALL)


def test_only_a_label_takes_the_second_format_so_earlier_releases_read_the_rest() -> None:  # H50
    plain, labelled = encode_checkpoint(SMALL), encode_checkpoint(with_checkpoint(label="batch 3", partitions=3))
    assert (plain[11], labelled[11]) == (1, 2)
    assert labelled[20:-32] == plain[20:-32] + msgpack.packb("batch 3")
    assert decode_checkpoint(labelled).checkpoint.label == "batch 3"


HELD_REQUEST = {0: SubtaskSnapshot(held=(HeldEvent(4, b"\xc0"), HeldEvent(5, b"\xc1", is_request=True)))}


@pytest.mark.parametrize("label", ["", "batch 3"])
def test_only_a_held_request_takes_the_third_format_so_earlier_releases_read_the_rest(label: str) -> None:  # H73, H50
    stored = with_checkpoint(subtask_states=HELD_REQUEST, label=label, partitions=3 if label else 0)
    data = encode_checkpoint(stored)
    assert data[11] == 3
    assert decode_checkpoint(data) == stored


@pytest.mark.parametrize(("label", "partitions"), [("", 3), ("batch 3", 2), ("batch 3", 0)])
def test_only_another_number_of_partitions_takes_the_fourth_format(label: str, partitions: int) -> None:  # H174, H50
    stored = with_checkpoint(label=label, partitions=partitions)
    data = encode_checkpoint(stored)
    assert data[11] == 4
    assert decode_checkpoint(data) == stored


@pytest.mark.parametrize("label", ["", "batch 3"])
def test_only_a_state_of_an_earlier_input_takes_the_fourth_format(label: str) -> None:  # H174, H50
    parts = {0: SubtaskSnapshot((SubtaskState(0, b"a"),), earlier_input=True), 1: SubtaskSnapshot()}
    stored = with_checkpoint(subtask_states=parts, label=label)
    data = encode_checkpoint(stored)
    assert data[11] == 4
    assert decode_checkpoint(data) == stored


def test_a_file_has_held_events_without_the_span_in_which_they_were_sent() -> None:  # H179, H50
    traced = join_traceparent(f"00-{1:032x}-{1:016x}-01", b"\xc0")
    with_span, without = (
        encode_checkpoint(with_checkpoint(subtask_states={0: SubtaskSnapshot(held=(HeldEvent(4, payload),))}))
        for payload in (traced, b"\xc0")
    )
    assert with_span == without


def test_a_held_item_of_an_earlier_format_is_an_event() -> None:  # H73: it cannot be distinguished from a request
    for version, label in ((1, ()), (2, ("batch 3",))):
        data = sealed(body_of(*HEADER, 1, 0, 12, 0, 1, 4, b"\xc0", *label), version=version)
        assert decode_checkpoint(data).checkpoint.subtask_states[0].held == (HeldEvent(4, b"\xc0", is_request=False),)


def test_what_an_item_of_the_third_format_is_must_be_told() -> None:  # H50, H73
    body = body_of(*HEADER, 1, 0, 12, 0, 1, 4, b"\xc0", 1, "")
    with pytest.raises(CheckpointCorrupt, match="whether a held event is a request must be a bool, is int"):
        decode_checkpoint(sealed(body, version=3))


def test_every_prefix_is_refused() -> None:  # H50
    data = encode_checkpoint(SMALL)
    for length in range(len(data)):
        with pytest.raises(CheckpointCorrupt):
            decode_checkpoint(data[:length])


def test_every_changed_byte_is_refused() -> None:  # H50
    data = encode_checkpoint(SMALL)
    for position in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            altered = bytearray(data)
            altered[position] ^= change
            with pytest.raises(CheckpointCorrupt):
                decode_checkpoint(bytes(altered))


def test_bytes_after_the_end_are_refused() -> None:  # H50
    data = encode_checkpoint(SMALL)
    for tail in (b"\0", data):
        with pytest.raises(CheckpointCorrupt):
            decode_checkpoint(data + tail)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04" + bytes(100), "is not a Headgate checkpoint"),
        (b"", "truncated: 0 bytes"),
        (encode_checkpoint(SMALL)[:-1], r"truncated or altered: it has \d+ of \d+ bytes"),
        (encode_checkpoint(SMALL)[:-1] + b"?", "checksum does not match"),
        (sealed(b"", claimed=10), "truncated or altered: it has 52 of 62 bytes"),
        (sealed(b"longer", claimed=0), "claims 52 bytes, but has 58"),
    ],
)
def test_the_refusal_says_what_is_wrong(data: bytes, says: str) -> None:  # H50
    with pytest.raises(CheckpointCorrupt, match=says):
        decode_checkpoint(data)


@pytest.mark.parametrize("version", [1, FORMAT_VERSION + 1])
def test_the_head_alone_shows_another_length_or_another_kind(version: int) -> None:  # H50, H81
    head = sealed(bytes(100), version=version)[:HEAD_BYTES]
    size = 100 + HEAD_BYTES + 32
    check_head(head, size)
    for wrong, says in ((size - 1, "truncated or altered"), (size + 1, "claims"), (2**40, "exceeds the limit")):
        with pytest.raises(CheckpointCorrupt, match=says):
            check_head(head, wrong)
    with pytest.raises(CheckpointCorrupt, match="is not a Headgate checkpoint"):
        check_head(bytes(HEAD_BYTES), size)


def test_a_later_format_is_told_apart_from_damage() -> None:  # H50
    with pytest.raises(CheckpointTooNew, match=r"format 8, and this release reads 7: .*later one"):
        decode_checkpoint(sealed(b"whatever it will be", version=FORMAT_VERSION + 1))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (body_of(*HEADER), "does not have this format"),  # the count of parts is missing
        (body_of(*HEADER, 0, 0), "bytes after its end"),
        (body_of("", *HEADER[1:], 0), "operator id must not be empty"),
        (body_of("words", 0, *HEADER[2:], 0), "checkpoint id must be from 1"),
        (body_of("words", True, *HEADER[2:], 0), "must be an integer, is bool"),
        (body_of("words", 7, 0, *HEADER[3:], 0), "parallelism must be from 1"),
        (
            body_of("words", CHECKPOINT_ID_MAX + 1, *HEADER[2:], 0),
            f"checkpoint id must be from 1 to {CHECKPOINT_ID_MAX}",
        ),
        (body_of("words", 7, 2**63 - 1, *HEADER[3:], 0), f"parallelism must be from 1 to {PARALLELISM_MAX}"),
        (body_of("words", 7, 3, 2, *HEADER[4:], 0), "2 is not a valid RestoreMode"),
        (body_of(*HEADER[:6], "text", 0), "must be bytes, is str"),
        (body_of(*HEADER, 1, 3, 0, 0, 0), "a subtask must be from 0 to 2"),
        (body_of(*HEADER, 2, 1, 0, 0, 0, 1, 0, 0, 0), "is out of order"),
        (body_of(*HEADER, 2**40), "a count must be from 0 to"),
        (body_of(["words"]), "does not have this format"),
        (body_of({"words": 1}), "does not have this format"),
        (b"\xc1", "does not have this format"),
        (b"\xd4\x05x", "does not have this format"),
        (b"\xa1\xff", "does not have this format"),
    ],
)
def test_a_forged_body_is_refused_although_its_checksum_fits(body: bytes, says: str) -> None:  # H50
    with pytest.raises(CheckpointCorrupt, match=says):
        decode_checkpoint(sealed(body))


@pytest.mark.parametrize(
    ("tail", "says"),
    [((), "does not have this format"), (("",), "must not be empty"), (("a", "b"), "bytes after its end")],
)
def test_the_second_format_has_exactly_one_label(tail: tuple[str, ...], says: str) -> None:  # H50
    with pytest.raises(CheckpointCorrupt, match=says):
        decode_checkpoint(sealed(body_of(*HEADER, 0, *tail), version=2))


@pytest.mark.parametrize("claim", [b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"])
def test_what_a_body_claims_takes_no_memory_before_it_is_there(claim: bytes) -> None:  # H50
    data = sealed(claim)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt):
            decode_checkpoint(data)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_file_over_the_bound_is_refused_both_ways() -> None:  # H50
    data = encode_checkpoint(SMALL)
    assert len(encode_checkpoint(SMALL, bytes_max=len(data))) == len(data)
    with pytest.raises(LocalProtocolError, match=r"takes \d+ bytes, and at most"):
        encode_checkpoint(SMALL, bytes_max=len(data) - 1)
    with pytest.raises(CheckpointCorrupt, match="exceeds the limit"):
        decode_checkpoint(data, bytes_max=len(data) - 1)


def with_checkpoint(**changes: Any) -> StoredCheckpoint:
    return replace(SMALL, checkpoint=replace(SMALL.checkpoint, **changes))


@pytest.mark.parametrize(
    "stored",
    [
        with_checkpoint(checkpoint_id=-1),
        with_checkpoint(checkpoint_id=CHECKPOINT_ID_MAX + 1),
        with_checkpoint(parallelism=PARALLELISM_MAX + 1),
        with_checkpoint(coordinator_state=None),
        with_checkpoint(coordinator_state=bytearray(b"x")),
        with_checkpoint(label="\ud800"),
        with_checkpoint(parallelism=2),  # a part of subtask 2 is present
        with_checkpoint(subtask_states={0: SubtaskSnapshot(events_sent=(-1,))}),
        with_checkpoint(subtask_states={0: SubtaskSnapshot(states=(SubtaskState(0, "text"),))}),  # type: ignore[arg-type]
        with_checkpoint(subtask_states={0: SubtaskSnapshot(held=(HeldEvent(2**63, b""),))}),
        replace(SMALL, operator_id=""),
        replace(SMALL, operator_id="\ud800"),
        replace(SMALL, created_ms=0.5),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_back_is_not_written(stored: StoredCheckpoint) -> None:  # H50
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        encode_checkpoint(stored)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_not_a_checkpoint(data: bytes) -> None:  # H50
    for candidate in (data, sealed(data)):
        with pytest.raises(CheckpointCorrupt):
            decode_checkpoint(candidate)


def test_the_files_of_a_state_are_in_the_sixth_format_and_only_there() -> None:  # H50, H190
    """An earlier release can restore what has no files."""
    with_files = with_checkpoint(
        subtask_states={0: SubtaskSnapshot((SubtaskState(0, b"a", HANDLE), SubtaskState(4, b""))), 2: SubtaskSnapshot()}
    )
    data = encode_checkpoint(with_files)
    assert data[11] == 6
    assert encode_checkpoint(SMALL)[11] == 1
    assert decode_checkpoint(data) == with_files
    assert list(msgpack_values(data))[8:16] == [0, 0, 2, 0, b"a", pack_handle(HANDLE), 4, b""]


def test_key_groups_are_in_the_seventh_format_and_only_there() -> None:  # H50, H190
    """An earlier release would give all groups to the subtask that has the state."""
    divided = HANDLE._replace(key_groups=KeyGroupRange(8, 16, 64))
    for groups in (None, (9, 12)):
        stored = with_checkpoint(subtask_states={0: SubtaskSnapshot((SubtaskState(0, b"a", divided, groups),))})
        data = encode_checkpoint(stored)
        assert data[11] == 7
        assert decode_checkpoint(data) == stored
        with pytest.raises(CheckpointCorrupt, match="has key groups, which this format has not"):
            decode_checkpoint(sealed(body_of(*msgpack_values(data)), version=6))


@pytest.mark.parametrize("files", [b"\x01", bytes(80), "text", 7])
def test_files_that_are_not_a_handle_are_damage(files: Any) -> None:  # H50
    with_files = with_checkpoint(subtask_states={0: SubtaskSnapshot((SubtaskState(0, b"a", HANDLE),))})
    values = list(msgpack_values(encode_checkpoint(with_files)))
    place = values.index(pack_handle(HANDLE))
    assert decode_checkpoint(sealed(body_of(*values), version=6)) == with_files
    values[place] = files
    with pytest.raises(CheckpointCorrupt, match="the files of a state must"):
        decode_checkpoint(sealed(body_of(*values), version=6))


def test_a_handle_that_could_not_be_read_again_is_not_written() -> None:
    wrong = with_checkpoint(subtask_states={0: SubtaskSnapshot((SubtaskState(0, b"a", HANDLE._replace(files=-1)),))})
    with pytest.raises(LocalProtocolError, match="cannot be encoded: the files of a state must say the number"):
        encode_checkpoint(wrong)
