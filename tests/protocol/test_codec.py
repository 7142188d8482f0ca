# SPDX-License-Identifier: Apache-2.0

"""Messages and events as bytes: they survive a round trip, and nothing else is decoded (H21, H60, H62)."""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
import math
from collections import namedtuple
from dataclasses import fields, replace
from typing import Any, get_args

import msgpack
import msgpack.fallback
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import EventEncodeError, LocalProtocolError, RemoteProtocolError
from protocol.wire import codec, events
from protocol.wire import messages as m
from protocol.wire.codec import (
    DEFAULT_LIMITS,
    FrameDecoder,
    WireLimits,
    decode_event,
    decode_event_in_steps,
    decode_message,
    encode_event,
    encode_message,
    run_steps,
)
from protocol.wire.extension_types import ExtensionType
from protocol.wire.format import BY_KIND
from protocol.wire.framing import CLAIMS_UNCHECKED
from protocol.wire.state_handles import StateHandle
from tests.fuzz.target import within_memory

SMALL = WireLimits(
    message_bytes_max=4096,
    event_bytes_max=1000,
    event_nesting_max=4,
    event_items_max=10,
    name_chars_max=20,
    text_chars_max=30,
    held_events_max=3,
)
FILES = StateHandle("9-1-ab/0-100-cd-manifest", 4711, bytes(range(32)), 2**30, 12)
SAMPLES: tuple[m.Message, ...] = (
    m.EventMessage(7, 1, b"\xc0"),
    m.Confirm(7, 0),
    m.Register(7, "words", 3, 2, 0, m.RestoreMode.STREAMING, 8, "host:123", "3.11.7"),
    m.Resume(7, "words", 12, b"the token of this attempt"),
    m.Opened(7, 1, awaits_start=True),
    m.RequestMessage(7, 2, 1, b"\xc3"),
    m.RequestCancelled(7, 3, 1),
    m.ClosedForCheckpoint(7, 3, 5),
    m.CheckpointAcknowledged(
        7, 4, 5, b"state", (m.HeldEvent(3, b"\x01"), m.HeldEvent(0, b"\x02", is_request=True)), (12,)
    ),
    m.CheckpointAcknowledged(7, 4, 5, b"state", (), (12,), state_follows=True),
    m.StateStored(7, 5, 5, FILES, 3),
    m.StateFailed(7, 5, 5, "disk full", 3),
    m.CheckpointDeclined(7, 5, 5, "no"),
    m.Finished(7, 6, "", b"", (12,)),
    m.Finished(7, 6, "", b"", (12,), FILES),
    m.RestoredEventMessage(7, 7, 3, b"\xc2"),
    m.Heartbeat(7),
    m.RestoredRequestMessage(7, 8, 3, b"\xc3"),
    m.Registered(7, 2, -1, (), (), 30.0, 100, 1000, (), b"the token of this attempt"),
    m.Registered(
        7, 2, 9, (m.SubtaskState(1, b""), m.SubtaskState(5, b"s")), (m.HeldEvent(5, b"\x01"),), 0.5, 100, 1000, (8,)
    ),
    m.Registered(7, 2, -1, (), (), 30.0, 100, 1000, (), hold_events=False),
    m.Registered(
        7,
        2,
        9,
        (m.SubtaskState(1, b"", FILES),),
        (),
        0.5,
        100,
        1000,
        (8,),
        files_from="s3://bucket/savepoint-one.state",
    ),
    m.Resumed(7, 4),
    m.Refused(7, m.RefusalCode.CONCURRENT_RUN, "one at a time"),
    m.AttemptEnded(7, "killed"),
    m.CoordinatorAwaited(7, "handle_request(subtask=1, attempt=0)", 10.5, "jobs.py:31 in meet"),
    m.AnswerMessage(7, 1, 4, "", b"\xc2"),
    m.CloseForCheckpoint(7, 2, 6),
    m.SavepointTarget(7, 3, 6, "s3://bucket/savepoint-one.state"),
    m.BarrierMessage(7, 3, 6, 2),
    m.CheckpointCompleted(7, 4, 6),
    m.CheckpointAborted(7, 5, 7),
    m.SavepointTaken(7, 6, 8),
    m.StartProcessing(7, 7),
    m.UrgentEventMessage(7, 8, b"\xc0"),
)
A_REGISTERED = next(message for message in SAMPLES if isinstance(message, m.Registered))


@pytest.fixture(params=["c", "python"])
def either_msgpack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use both of msgpack's implementations: if no wheel fits, an executor runs the one in pure Python."""
    if request.param == "python":
        monkeypatch.setattr(codec, "_pack", lambda value: msgpack.fallback.Packer().pack(value))
        monkeypatch.setattr(events, "_Packer", msgpack.fallback.Packer)
        monkeypatch.setattr(events, "_packers", [])
        monkeypatch.setattr(events, "_unpack", msgpack.fallback.unpackb)
        monkeypatch.setattr(events, "_Unpacker", msgpack.fallback.Unpacker)
        monkeypatch.setattr(codec, "_unpack", msgpack.fallback.unpackb)
        monkeypatch.setattr(codec, "_Unpacker", msgpack.fallback.Unpacker)


def body_of(message: m.Message) -> bytes:
    (body,) = FrameDecoder().feed(encode_message(message))
    return body


def packed(*values: object) -> bytes:
    return bytes(msgpack.packb(values))


# --- messages -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message: m.Message) -> None:  # H60
    assert decode_message(body_of(message)) == message


def test_every_message_of_the_protocol_has_a_sample_here() -> None:
    assert {type(message) for message in SAMPLES} == set(get_args(m.Message))


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**63 - 1), st.binary(max_size=300))
def test_events_and_confirmations_of_any_number_come_out_as_they_went_in(task: int, seq: int, data: bytes) -> None:
    for message in (m.EventMessage(task, seq, data), m.Confirm(task, seq)):
        assert decode_message(body_of(message)) == message


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**63 - 1), st.binary(max_size=300))
def test_the_fixed_layout_and_the_shortest_msgpack_mean_the_same(task: int, seq: int, data: bytes) -> None:
    event, confirm = m.EventMessage(task, seq, data), m.Confirm(task, seq)
    assert decode_message(packed(1, task, seq, data, 0)) == event
    assert decode_message(packed(2, task, seq)) == confirm
    assert msgpack.unpackb(body_of(event)) == [1, task, seq, data, 0]
    assert msgpack.unpackb(body_of(confirm)) == [2, task, seq]


def test_what_a_snapshot_holds_comes_out_as_it_went_in() -> None:  # H31, H52
    for message in SAMPLES:
        decoded: Any = decode_message(body_of(message))
        for name, kind in (("held", m.HeldEvent), ("states", m.SubtaskState)):
            assert all(type(pair) is kind for pair in getattr(decoded, name, ()))


@pytest.mark.parametrize("pair", [[1], [1, b"", 0], [-1, b""], ["1", b""], [1, "text"], b"\x01\x02", 7, {1: b""}])
def test_a_pair_that_is_none_is_refused(pair: object) -> None:  # H62
    for name, values in (("states", ([pair], [])), ("held", ([], [pair]))):
        with pytest.raises(RemoteProtocolError, match=rf"Registered\.{name} (must|1 exceeds max_map_len)"):
            decode_message(
                packed(30, 7, 2, 5, *values, 1.0, 100, 1000, b"", b"", 0.0, True, False, "", [["", False]], "")
            )


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("place", [0, 50, 99])
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ((-1, b"", False, 0), "must be from 0 to"),
        ((2**63, b"", False, 0), "must be from 0 to"),
        ((True, b"", False, 0), "must be an integer, is bool"),
        ((1, "text", False, 0), "must be bytes, is str"),
        ((1, bytes(DEFAULT_LIMITS.event_bytes_max + 1), False, 0), "must have at most"),
        ((1, b"", 1, 0), "must be a bool, is int"),
        ((1, b"", False, -1), "must be from 0 to 127"),
        ((1, b"", False, 128), "must be from 0 to 127"),
        ((1, b"", False), "must hold lists of 4"),
        ((1, [1, b"", False, 0], False, 0), "must hold lists of single values|must be bytes"),
        (7, "must hold lists of 4"),
    ],
)
def test_one_invalid_entry_among_many_is_found(place: int, entry: object, text: str) -> None:  # H62
    """The entries are checked by column, and their extremes stand for all."""
    held: list[object] = [(sender, bytes(sender), sender % 2 == 0, sender % 3) for sender in range(99)]
    held.insert(place, entry)
    body = packed(15, 7, 1, 1, b"state", held, b"", 0, False)
    assert len(body) > CLAIMS_UNCHECKED
    with pytest.raises(RemoteProtocolError, match=rf"CheckpointAcknowledged\.held ({text})"):
        decode_message(body)
    if isinstance(entry, tuple) and len(entry) == 4:
        acknowledged = m.CheckpointAcknowledged(7, 1, 1, b"state", tuple(m.HeldEvent(*some) for some in held), ())  # type: ignore[misc]
        with pytest.raises(LocalProtocolError, match=rf"CheckpointAcknowledged\.held ({text})"):
            encode_message(acknowledged)


@pytest.mark.usefixtures("either_msgpack")
def test_lists_inside_an_entry_take_no_more_memory_than_entries_may() -> None:  # H62
    tree = b"\x90"
    while len(tree) < 200_000:
        tree = b"\x93" + tree * 3
    body = b"\x99\x0f\x07\x01\x01\xc4\x00\xdc\x00\x10" + tree * 16 + b"\xc4\x00\x00\xc2"

    def refused(data: bytes) -> None:
        with pytest.raises(RemoteProtocolError, match=r"held must hold lists of single values"):
            decode_message(data)

    within_memory(refused, body, 3)


def test_enumerations_come_out_as_enumerations() -> None:
    assert isinstance(decode_message(body_of(SAMPLES[2])).mode, m.RestoreMode)  # type: ignore[union-attr]


@pytest.mark.usefixtures("either_msgpack")
def test_an_unknown_tag_is_named() -> None:  # H60
    with pytest.raises(RemoteProtocolError, match="tag 99"):
        decode_message(packed(99, 1, 2))


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("body", [packed(), packed("1", 2), packed(True, 1, 2), b"\x01", b"\xc0", b"\x80", b"\xc1"])
def test_a_body_that_is_not_a_tagged_list_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(body)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_with_a_field_too_many_or_too_few_is_refused(message: m.Message) -> None:
    values = msgpack.unpackb(body_of(message))
    for wrong in (values[:-1], [*values, 0]):
        with pytest.raises(RemoteProtocolError, match=rf"{type(message).__name__} must have {len(values) - 1}"):
            decode_message(packed(*wrong))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_field_of_another_type_is_refused_by_name(message: m.Message) -> None:  # H62
    values = msgpack.unpackb(body_of(message))
    others: tuple[object, ...] = (True, {}, [[]], 1.5, "x", b"x", 2**63, -2)
    for position, field in enumerate(fields(message), start=1):
        refused = 0
        for other in others:
            changed = [*values[:position], other, *values[position + 1 :]]
            try:
                decoded = decode_message(packed(*changed))
            except RemoteProtocolError as error:
                refused += f"{type(message).__name__}.{field.name} " in str(error)
            else:  # then the value had the right type after all
                assert getattr(decoded, field.name) == other
                refused += type(other) in (str, bytes, float, int, bool)
        assert refused == len(others)


@pytest.mark.parametrize(
    "body", [packed(1, 1, 0, b"", 0), packed(1, -1, 1, b"", 0), packed(1, 1, 2**63, b"", 0), packed(1, 1, 1, b"", 128)]
)
def test_numbers_out_of_range_are_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="must be from"):
        decode_message(body)


def test_the_fixed_layout_refuses_numbers_out_of_range_too() -> None:
    for task, seq in ((2**63, 1), (1, 0), (1, 2**63)):
        head = codec._EVENT_HEAD.pack(0, codec._EVENT_PREFIX, task, 0xCF, seq, 0xC6, 0)[4:]
        with pytest.raises(RemoteProtocolError, match="must be from"):
            decode_message(head + b"\0")
    with pytest.raises(RemoteProtocolError, match="must be from"):
        decode_message(codec._CONFIRM_BODY.pack(0x93, 2, 0xCF, 2**63, 0xCF, 1))
    for task, seq, checkpoint_id, count, last in (
        (2**63, 1, 1, 0, 0),
        (1, 0, 1, 0, 0),
        (1, 2**63, 1, 0, 0),
        (1, 1, 2**63, 0, 0),
        (1, 1, 1, 2**63, 0),
        (1, 1, 1, 0, 2**63),
    ):
        numbers = (0xCF, task, 0xCF, seq, 0xCF, checkpoint_id)
        with pytest.raises(RemoteProtocolError, match="must be from"):
            decode_message(codec._REPORT_FRAME.pack(0, 0x95, 35, *numbers, 0xCF, count | last)[4:])
        with pytest.raises(RemoteProtocolError, match="must be from"):
            decode_message(codec._BARRIER_FRAME.pack(0, 0x96, 36, *numbers, 0xCF, count, 0xCF, last)[4:])
        head = codec._ACKNOWLEDGED_HEAD.pack(0, 0x99, 15, *numbers, 0xC6, 2)[4:]
        with pytest.raises(RemoteProtocolError, match="must be from"):
            decode_message(head + b"st" + codec._ACKNOWLEDGED_ENDS[2].pack(0x90, 0xC5, 16, count, 1, 0xCF, last, 0xC2))


@pytest.mark.parametrize("last", range(m.PARTS_MAX, 256))
def test_the_fixed_layout_refuses_an_impossible_part(last: int) -> None:  # H62, H150
    body = encode_message(m.EventMessage(7, 1, b"\xc0", m.PARTS_MAX - 1))[4:]
    assert decode_message(body).part == m.PARTS_MAX - 1  # type: ignore[union-attr]
    with pytest.raises(RemoteProtocolError):
        decode_message(body[:-1] + bytes([last]))


def test_an_acknowledgement_whose_state_is_not_as_long_as_it_claims_is_refused() -> None:
    end = codec._ACKNOWLEDGED_ENDS[0].pack(0x90, 0xC5, 0, 0xCF, 0, 0xC2)
    for claimed in (0, 1, 3, 20, 21, 2**32 - 1):
        head = codec._ACKNOWLEDGED_HEAD.pack(0, 0x99, 15, 0xCF, 1, 0xCF, 1, 0xCF, 1, 0xC6, claimed)[4:]
        with pytest.raises(RemoteProtocolError):
            decode_message(head + b"st" + end)


def test_an_acknowledgement_that_is_too_large_does_not_leave() -> None:
    limits = WireLimits(message_bytes_max=1000, event_bytes_max=100, text_chars_max=100)
    fitting = m.CheckpointAcknowledged(
        1, 1, 1, bytes(1000 - codec._ACKNOWLEDGED_BODY.size - codec._ACKNOWLEDGED_ENDS[0].size), (), ()
    )
    assert len(encode_message(fitting, limits)) == 4 + 1000
    with pytest.raises(LocalProtocolError, match="keep less state"):
        encode_message(replace(fitting, state=bytes(1001)), limits)


def test_a_report_of_the_length_of_the_fixed_layout_need_not_have_it() -> None:
    """Signed 64-bit integers take as many bytes."""
    body = bytes((0x95, 35)) + b"".join(b"\xd3" + number.to_bytes(8, "big", signed=True) for number in (7, 8, -1, 6))
    assert len(body) == codec._REPORT_BODY.size
    assert decode_message(body) == m.CloseForCheckpoint(7, 8, -1, 6)


@pytest.mark.parametrize(
    "message",
    [
        m.EventMessage(1, 0, b""),
        m.EventMessage(-1, 1, b""),
        m.Confirm(1, -1),
        m.Opened(1, 0),
        m.CloseForCheckpoint(-1, 1, 1),
        m.CloseForCheckpoint(1, 0, 1),
        m.CloseForCheckpoint(1, 1, -2),
        m.CloseForCheckpoint(1, 1, 2**63),
        m.BarrierMessage(1, 1, 1, -1),
        m.BarrierMessage(1, 1, 2**63, 0),
        m.CheckpointAcknowledged(1, 0, 1, b"", (), ()),
        m.CheckpointAcknowledged(1, 1, 1, b"", (), (2**63,)),
        m.EventMessage(1, 1, b"", 128),
        m.EventMessage(1, 1, b"", -1),
        m.CheckpointAcknowledged(1, 1, 1, b"", (), (), 2**63),
        m.CheckpointCompleted(1, 1, 1, -1),
        m.BarrierMessage(1, 1, 1, 0, 2**63),
    ],
)
def test_a_number_out_of_range_does_not_leave(message: m.Message) -> None:
    with pytest.raises(LocalProtocolError, match="must be from"):
        encode_message(message)


@pytest.mark.parametrize("counts", [(1, 0), (0,), (1,) * 129])
def test_positions_that_end_with_0_or_are_too_many_do_not_leave_and_are_refused(counts: tuple[int, ...]) -> None:
    """H150: there is one way to say the same positions."""
    said = m.CheckpointAcknowledged(1, 1, 1, b"", (m.HeldEvent(1, b""),), counts)
    for acknowledged in (said, replace(said, held=())):
        with pytest.raises(LocalProtocolError, match="must have at most 128 numbers, of which the last one is not 0"):
            encode_message(acknowledged)
    data = b"".join(count.to_bytes(8, "big") for count in counts)
    for held in ((), ((1, b"", False, 0),)):
        with pytest.raises(RemoteProtocolError, match=r"CheckpointAcknowledged\.events_sent must have"):
            decode_message(packed(15, 1, 1, 1, b"", held, data, 0, False))


@pytest.mark.usefixtures("either_msgpack")
def test_positions_whose_bytes_are_not_whole_numbers_are_refused() -> None:  # H150
    for held in ((), ((1, b"", False, 0),)):
        for size in (1, 7, 9):
            with pytest.raises(RemoteProtocolError, match="events_sent must have 8 bytes for each of at most 128"):
                decode_message(packed(15, 1, 1, 1, b"", held, bytes(size), 0, False))


def test_what_is_not_a_message_does_not_leave() -> None:
    with pytest.raises(LocalProtocolError, match="str is not a message"):
        encode_message("hello")  # type: ignore[arg-type]


def test_a_field_of_another_type_does_not_leave() -> None:
    with pytest.raises(LocalProtocolError, match=r"Registered\.held"):
        encode_message(replace(A_REGISTERED, held=("text",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        m.EventMessage(1, 1, bytes(1001)),
        m.RequestMessage(1, 1, 1, bytes(1001)),
        m.AnswerMessage(1, 1, 1, "", bytes(1001)),
        m.RestoredEventMessage(1, 1, 0, bytes(1001)),
        m.RestoredRequestMessage(1, 1, 0, bytes(1001)),
        m.CheckpointAcknowledged(1, 1, 1, b"", (m.HeldEvent(0, bytes(1001)),), ()),
        m.CheckpointAcknowledged(1, 1, 1, b"", (m.HeldEvent(0, b""),) * 4, ()),
        m.Finished(1, 1, "", bytes(5000), ()),
        m.Resume(1, "o" * 21, 0),
        m.Resume(1, "", 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_over_a_bound_neither_leaves_nor_arrives(message: m.Message) -> None:  # H62
    with pytest.raises(LocalProtocolError):
        encode_message(message, SMALL)
    values = [getattr(message, field.name) for field in fields(message)]
    tag = BY_KIND[type(message)][0]
    if type(message) is not m.Finished:  # its frame is too large
        with pytest.raises(RemoteProtocolError, match="must have"):
            decode_message(packed(tag, *values), SMALL)


def test_the_fixed_layout_holds_the_bound_of_an_event_too() -> None:  # H62
    with pytest.raises(RemoteProtocolError, match="at most 1000 bytes"):
        decode_message(body_of(m.EventMessage(1, 1, bytes(1001))), SMALL)


def test_a_long_text_for_people_is_cut_rather_than_refused() -> None:
    (body,) = FrameDecoder().feed(encode_message(m.AttemptEnded(1, "x" * 1000), SMALL))
    message = decode_message(body, SMALL)
    assert isinstance(message, m.AttemptEnded)
    assert message.reason == "x" * 29 + "…"
    with pytest.raises(RemoteProtocolError, match="at most 30 characters"):
        decode_message(packed(33, 1, "x" * 31), SMALL)


def test_a_text_with_a_lone_surrogate_still_arrives() -> None:
    message = decode_message(body_of(m.Finished(1, 1, "no file \udcff here", b"", ())))
    assert isinstance(message, m.Finished)
    assert message.failure == "no file \\udcff here"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_time_that_is_not_a_time_is_refused(value: float) -> None:
    with pytest.raises(RemoteProtocolError, match="reconnect_timeout_s"):
        decode_message(
            packed(30, 7, 2, -1, (), (), value, 100, 1000, b"", b"", 0.0, True, False, "", [["", False]], "")
        )


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_remote_error(data: bytes) -> None:  # H62
    try:
        message = decode_message(data)
    except RemoteProtocolError:
        return
    assert decode_message(body_of(message)) == message


@given(st.sampled_from(SAMPLES), st.integers(0, 200), st.integers(0, 255))
def test_a_message_with_one_changed_byte_is_a_message_or_a_remote_error(
    message: m.Message, position: int, value: int
) -> None:
    body = bytearray(body_of(message))
    body[position % len(body)] = value
    with contextlib.suppress(RemoteProtocolError):
        decode_message(bytes(body))


# --- events -------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner)
    ),
    max_leaves=20,
)


@pytest.mark.usefixtures("either_msgpack")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values)
def test_an_event_comes_out_as_it_went_in(value: Any) -> None:  # H21
    assert decode_event(encode_event(value)) == value


def test_a_tuple_arrives_as_a_tuple_and_a_list_as_a_list() -> None:  # H95
    assert decode_event(encode_event({"a": (1, [2, (3,)])})) == {"a": (1, [2, (3,)])}


def test_the_events_of_older_checkpoints_still_decode() -> None:  # H97
    """The bytes are those of the release before extension types, which sent a tuple as a list."""
    data = bytes.fromhex("82a573706c697492a161cd30390796cb3ff8000000000000c40101c080ffc3")
    assert decode_event(data) == {"split": ["a", 12345], 7: [1.5, b"\x01", None, {}, -1, True]}


def test_a_later_change_of_the_event_changes_nothing() -> None:  # H21
    event = {"files": ["a"]}
    data = encode_event(event)
    event["files"].append("b")
    assert decode_event(data) == {"files": ["a"]}


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Point(1, 2),
        msgpack.Timestamp(1),
        msgpack.ExtType(5, b"x"),
        msgpack.ExtType(ExtensionType.TUPLE, b""),
        collections.OrderedDict(a=1),
        Exception(1),
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_event_cannot_have_is_refused_where_it_is_sent(value: object) -> None:  # H21
    many: list[Any] = [0] * 40
    for event, place in (
        (value, "the event is"),
        ({"a": [0, value]}, r"the event\['a'\]\[1\] is"),
        ({"a": [*many, value, *many]}, r"the event\['a'\]\[40\] is"),
        ((1, {2: value}), r"the event\[1\]\[2\] is"),
    ):
        with pytest.raises(EventEncodeError, match=rf"{place} of type .*{type(value).__name__}.*convert it"):
            encode_event(event)


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [2**64], "\ud800", {"\ud800": 1}])
def test_a_number_beyond_64_bits_and_a_broken_string_are_refused(value: object) -> None:  # H21
    with pytest.raises(EventEncodeError, match=r"An integer has 64 bits: send|A str must be valid Unicode: send"):
        encode_event(value)


def test_a_key_that_an_event_cannot_have_is_named() -> None:
    with pytest.raises(EventEncodeError, match=r"the event\['a'\]\[the key .*\] is of type .*Point"):
        encode_event({"a": {Point(1, 2): 3}})


def test_an_event_over_the_bound_of_bytes_is_refused_with_the_fix() -> None:  # H62
    encode_event(bytes(990), SMALL)
    with pytest.raises(EventEncodeError, match="exceeds the limit of 1000: send it in parts"):
        encode_event(bytes(1000), SMALL)
    with pytest.raises(RemoteProtocolError, match="exceeds the limit of 1000"):
        decode_event(msgpack.packb(bytes(1000)), SMALL)


@pytest.mark.usefixtures("either_msgpack")
def test_nesting_is_bounded_on_both_ends() -> None:  # H62
    assert decode_event(encode_event([[[[1]]]], SMALL), SMALL) == [[[[1]]]]
    with pytest.raises(EventEncodeError, match="nests deeper than 4"):
        encode_event([[[[[]]]]], SMALL)
    with pytest.raises(RemoteProtocolError, match="nests deeper than 4"):
        decode_event(msgpack.packb([[[[{}]]]]), SMALL)


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [600, 5000, 200_000])
def test_a_nesting_bomb_is_a_remote_error(opening: bytes, depth: int) -> None:  # H62
    for decode in (decode_event, decode_message):
        with pytest.raises(RemoteProtocolError):
            decode(opening * depth + b"\xc0")


@pytest.mark.usefixtures("either_msgpack")
def test_counts_are_bounded_on_both_ends() -> None:  # H62
    assert decode_event(encode_event([0] * 10, SMALL), SMALL) == [0] * 10
    for value in ([0] * 11, dict.fromkeys(range(11), 0)):
        with pytest.raises(EventEncodeError, match="has 11 entries, more than 10"):
            encode_event(value, SMALL)
        with pytest.raises(RemoteProtocolError, match="exceeds max_"):
            decode_event(msgpack.packb(value), SMALL)


COUNTED = WireLimits(event_containers_max=300, event_items_max=2000, event_map_entries_max=400)
"""Limits of counts that an event may exceed whose size is far within its own limit."""


def lists_of(entries: int, count: int) -> list[Any]:
    return [[0] * entries for _ in range(count)]


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    ("within", "beyond", "here", "there"),
    [
        ([{}] * 299, [{}] * 300, "more than 300 lists and maps: send it in parts", "more than 300 lists and maps"),
        ({"a": [[]] * 298}, {"a": [[]] * 299}, "more than 300 lists and maps", "more than 300 lists and maps"),
        (
            lists_of(198, 10),
            lists_of(200, 10),
            "more than 2000 entries altogether: send it in parts",
            "more than 2000 entries in its lists and maps",
        ),
        ([0] * 2000, [0] * 2001, "the event has 2001 entries, more than 2000", "exceeds max_"),
        (
            dict.fromkeys(range(400)),
            dict.fromkeys(range(401)),
            "the event has 401 entries, and a map at most 400: send it in parts, or send a list of pairs",
            "exceeds max_",
        ),
        (
            [dict.fromkeys(range(300))] * 6,
            [dict.fromkeys(range(300))] * 7,
            "more than 2000 entries altogether",
            "more than 2000 entries in its lists and maps",
        ),
    ],
    ids=["maps", "lists", "entries", "one-list", "one-map", "pairs"],
)
def test_the_containers_and_entries_of_a_whole_event_are_bounded_on_both_ends(  # H62
    within: Any, beyond: Any, here: str, there: str
) -> None:
    assert decode_event(encode_event(within, COUNTED), COUNTED) == within
    with pytest.raises(EventEncodeError, match=here):
        encode_event(beyond, COUNTED)
    with pytest.raises(RemoteProtocolError, match=there):
        decode_event(msgpack.packb(beyond), COUNTED)


def test_the_place_of_a_map_that_is_too_large_is_named() -> None:
    with pytest.raises(EventEncodeError, match=r"the event\['offsets'\] has 401 entries"):
        encode_event({"offsets": dict.fromkeys(range(401))}, COUNTED)


@pytest.mark.parametrize(
    "wrap", [lambda value: [value], lambda value: [[0] * 20, *[value] * 2]], ids=["one", "several"]
)
def test_a_map_that_is_too_large_is_found_among_few_entries(wrap: Any) -> None:  # H62
    encode_event(wrap(dict.fromkeys(range(8192))))
    with pytest.raises(EventEncodeError, match="has 8193 entries, and a map at most 8192"):
        encode_event(wrap(dict.fromkeys(range(8193))))


@given(values)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_one_end_sends_the_other_accepts_whatever_the_limits(value: Any) -> None:  # H62
    with contextlib.suppress(EventEncodeError):
        assert decode_event(encode_event(value, SMALL), SMALL) == value
    tight = replace(SMALL, event_containers_max=2, event_map_entries_max=1)
    try:
        data = encode_event(value, tight)
    except EventEncodeError:
        with contextlib.suppress(EventEncodeError), pytest.raises(RemoteProtocolError):
            decode_event(encode_event(value), tight)
    else:
        assert decode_event(data, tight) == value


@pytest.mark.usefixtures("either_msgpack")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values, st.integers(1, 40))
def test_an_event_decoded_in_steps_is_the_same_event(value: Any, step_bytes: int) -> None:  # H21
    assert run_steps(decode_event_in_steps(encode_event(value), step_bytes=step_bytes)) == value


@given(st.binary(max_size=100), st.integers(1, 40))
def test_steps_refuse_what_decoding_as_a_whole_refuses(data: bytes, step_bytes: int) -> None:  # H62
    with contextlib.suppress(RemoteProtocolError):
        event = decode_event(data, SMALL)
        assert repr(run_steps(decode_event_in_steps(data, SMALL, step_bytes))) == repr(event)
        return
    with pytest.raises(RemoteProtocolError):
        run_steps(decode_event_in_steps(data, SMALL, step_bytes))


def test_each_step_decodes_no_more_than_it_may() -> None:
    event: list[Any] = [{}] * 10_000 + [bytes(100_000)] + [[n] for n in range(10_000)]
    data = encode_event(event)
    steps = decode_event_in_steps(data, step_bytes=1000)
    count = sum(1 for _ in steps)
    assert count >= len(data) / 1000
    steps = decode_event_in_steps(msgpack.packb([[]] * 900), COUNTED, step_bytes=100)
    for _ in range(1 + 3):  # the scan, and 300 bytes: the outer list's head and 297 lists
        next(steps)
    with pytest.raises(RemoteProtocolError, match="more than 300 lists and maps"):
        next(steps)  # the list after them is refused, and nothing after it is built


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["list", "map", "str", "bin"])
def test_a_claimed_count_or_length_takes_no_memory(header: bytes) -> None:  # H62
    for decode in (decode_event, decode_message):
        with pytest.raises(RemoteProtocolError):
            decode(header + b"\xff\xff\xff\xff")


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("entries", [CLAIMS_UNCHECKED, CLAIMS_UNCHECKED + 1, 8000])
@pytest.mark.parametrize("around", [b"", b"\x91" * 3, b"\x81\xa1k"], ids=["alone", "in lists", "in a map"])
def test_small_events_that_only_claim_long_lists_take_little_memory(entries: int, around: bytes) -> None:  # H62
    size = DEFAULT_LIMITS.event_bytes_uncounted
    claims = (around + (b"\xdc" + entries.to_bytes(2, "big")) * size)[:size]

    def decode(data: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            decode_event(data)

    within_memory(decode, claims, 9 * 2**20 // size)
    assert decode_event(around + b"\xdc" + entries.to_bytes(2, "big") + bytes(entries)) is not None


def test_a_dict_of_tuples_that_would_unfold_into_a_huge_event_is_refused() -> None:  # H21, H62
    unfolding: Any = (0,)
    for _ in range(5):
        unfolding = (unfolding,) * 16
        gc.collect()  # it no longer tracks a tuple of such tuples, so the dict below is not tracked either
    with pytest.raises(EventEncodeError, match="more than"):
        encode_event({"unfolding": unfolding})


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x02",  # two values
        b"\x92\x01",  # one is missing
        b"\xa1\xff",  # not UTF-8
        b"\x81\x90\x01",  # a list as a key
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xc7\x00\x05",  # an extension type of no bytes
        b"\x91\xc7\x00\x05",
    ],
)
def test_what_is_not_an_event_is_a_remote_error(data: bytes) -> None:  # H62
    with pytest.raises(RemoteProtocolError):
        decode_event(data)


def test_an_event_that_contains_itself_is_refused() -> None:
    event: list[Any] = []
    event.append(event)
    with pytest.raises(EventEncodeError, match="nests deeper"):
        encode_event(event)


def test_a_small_event_that_would_unfold_into_a_huge_one_is_refused_before_it_does() -> None:  # H62
    event: list[Any] = []
    for _ in range(60):
        event = [event, event]
    with pytest.raises(EventEncodeError, match=r"more than 131072 lists and maps"):
        encode_event(event, WireLimits(event_bytes_max=10_000))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_an_event_or_a_remote_error(data: bytes) -> None:  # H62
    try:
        value = decode_event(data)
    except RemoteProtocolError:
        return
    encode_event(value, DEFAULT_LIMITS)
