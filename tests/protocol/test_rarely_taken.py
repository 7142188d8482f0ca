# SPDX-License-Identifier: Apache-2.0

"""Branches that no other quick test takes: bounds that are far away, views for people, and refusals by settings.

`make coverage` lists those that remain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from decimal import Decimal
from enum import Flag, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import numpy
import pytest
from msgpack import packb

from protocol import barrier_tracker as t
from protocol.arguments import AT_LEAST_1, checked
from protocol.attempts import SubtaskFinished, SubtaskReady
from protocol.attempts.records import REMEMBERED_MAX, Remembered, remember
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.describing import as_float, as_json, full_name
from protocol.enumerations import OUTPUTS_MAX, CurrentEnumeration
from protocol.errors import EventEncodeError, LocalProtocolError, RemoteProtocolError
from protocol.facts import StageLook, TaskOutcome
from protocol.gateway import types as g
from protocol.secret_names import unquoted
from protocol.source_events import StreamBatch, parse_stream_batch, stream_batch_event
from protocol.splits import SplitAssignmentTracker
from protocol.wire import messages as m
from protocol.wire.checkpoint_format import _ENVELOPE, _split_envelope
from protocol.wire.codec import encode_report
from protocol.wire.event_classes import event, find, learn_failures, learn_modules
from protocol.wire.events import decode_event, decode_event_in_steps, encode_event, run_steps
from protocol.wire.extension_types import ExtensionType
from protocol.wire.extension_types import mark as encode_mark
from protocol.wire.fragments import FragmentDecoder, encode_whole
from protocol.wire.framing import WireLimits
from protocol.wire.handshake import ServerHandshake
from protocol.wire.keys import KeyRing
from protocol.wire.large_leaves import LARGE_EVENT_BYTES, LEAF_BYTES, skim
from protocol.wire.messages import RestoreMode
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, job_end, opened, reg, stage, start
from tests.protocol.barrier_tracker_kit import A2, A, B, Dialogue, accepted, stored
from tests.protocol.test_gateway import a_gateway, hear
from tests.protocol.test_subtask import hear as hear_subtask
from tests.protocol.test_subtask_checkpoints import a_closed_subtask, send

# --- attempts -----------------------------------------------------------------------------------------------------


def test_a_view_of_a_run_counts_its_tasks_and_names_who_waits() -> None:  # H87
    book = Playbook(parallelism=3)
    book.feed(job(), stage(tasks=3), start(10, 0), reg(10, 0), start(11, 1))
    book.feed(reg(21, 0, number=1))
    view = book.ledger.view_run("words")
    assert view is not None
    assert (view.stage_id, view.failed_cause, view.task_count) == (1, None, 3)
    assert [(held.subtask, held.task_attempt_id) for held in view.held] == [(0, 21)]
    assert (view.attempts, view.subtasks, view.tasks_started, view.missing) == (1, 1, 3, (1, 2))
    assert book.ledger.view_run("no such operator") is None
    idle = Playbook().ledger.view_run("words")
    assert idle is not None
    assert (idle.stage_id, idle.attempts, idle.missing, idle.held) == (None, 0, (), ())


@pytest.mark.parametrize("winner", [0, 1])
def test_of_two_attempts_the_one_whose_operator_has_ended_well_counts_if_its_success_is_not_told(winner: int) -> None:
    book = Playbook(parallelism=1)
    book.feed(job(), stage(tasks=1))
    book.ready(10, 0)
    book.feed(start(11, 0, number=1, speculative=True), reg(11, 0, number=1), opened(11))
    assert book.feed(goodbye(10 + winner)) == []
    loser = 1 - winner
    assert book.feed(job_end()) == [
        f"finish 0#{winner}",
        f"kill {10 + loser}",
        f"failed 0#{loser} SUPERSEDED",
        "end run 1 well",
    ]


def test_a_copy_that_lost_to_a_success_that_nobody_has_seen_yet_fails_nothing() -> None:
    """H17: the fact of the winner's success is still on its way."""
    book = Playbook()
    book.feed(job(), stage())
    book.ready(10, 1)
    lost = end(10, 1, TaskOutcome.KILLED, reason="another attempt succeeded")
    assert book.feed(lost) == ["failed 1#0 SUPERSEDED", "reset 1"]


def test_nothing_is_kept_of_jobs_that_have_ended() -> None:
    """Whatever the ledger keeps of the engine is bounded, however long the application runs."""
    book = Playbook(parallelism=1)

    def sizes() -> dict[str, int]:
        engine = book.ledger._engine
        return {name: len(kept) for name, kept in vars(engine).items() if isinstance(kept, dict | set | list)}

    def run(number: int) -> None:
        book.feed(job(number, stages=(number,)), stage(number, tasks=1))
        book.ready(number, 0, run=number)
        book.feed(goodbye(number), end(number, 0, TaskOutcome.SUCCESS, stage=number), job_end(number))
        book.wait(200.0)

    for number in range(1, REMEMBERED_MAX + 3):
        run(number)
    before = sizes()
    run(REMEMBERED_MAX + 3)
    assert sizes() == before
    assert before["job_seen_at"] == 0


def test_only_the_most_recent_ids_are_remembered_and_one_that_comes_again_is_recent() -> None:
    ids: Remembered = {}
    for id in range(REMEMBERED_MAX):
        remember(ids, id)
    remember(ids, 0)
    remember(ids, REMEMBERED_MAX)
    assert len(ids) == REMEMBERED_MAX
    assert 0 in ids
    assert 1 not in ids


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_view_of_a_checkpoint_in_progress_has_the_step_of_each_subtask() -> None:  # H87
    dialogue = Dialogue().run(A, B)
    assert dialogue.tracker.view() == ()
    dialogue.close(3, A)
    (view,) = dialogue.tracker.view()
    assert (view.checkpoint_id, view.savepoint, view.deadline) == (3, False, 10.0)
    assert view.steps[A.subtask] is not view.steps[B.subtask]


@pytest.mark.parametrize("first_is_ready", [True, False])
def test_of_two_attempts_the_one_that_has_ended_well_speaks_for_the_subtask(first_is_ready: bool) -> None:  # H47
    dialogue = Dialogue(1, mode=RestoreMode.BATCH)
    dialogue.tell(accepted(A, RestoreMode.BATCH), *([SubtaskReady(A)] if first_is_ready else []))
    dialogue.run(A2)
    dialogue.tell(t.SubtaskFinalState(A2, b"final"), SubtaskFinished(A2))
    assert dialogue.tell(t.CheckpointTriggered(1)) == [t.SnapshotCoordinator(1)]
    checkpoint = stored(dialogue.tell(t.CoordinatorSnapshotTaken(1, b"coordinator")))
    assert [state.state for state in checkpoint.subtask_states[0].states] == [b"final"]


def test_a_report_that_changes_nothing_is_told_with_its_reason() -> None:  # H44
    dialogue = Dialogue().run(A, B).close(1, A)
    assert dialogue.tell(t.SubtaskClosed(A, 1), t.SubtaskClosed(A2, 1), t.SubtaskClosed(A, 2)) == [
        t.ReportStale(f"SubtaskClosed of {A} for checkpoint 1, said before"),
        t.ReportStale(f"SubtaskClosed of {A2}, which has no part in checkpoint 1"),
        t.ReportStale("SubtaskClosed for checkpoint 2, which is not pending"),
    ]
    with pytest.raises(LocalProtocolError, match="CheckpointStored for checkpoint 1, which is closing"):
        dialogue.tell(t.CheckpointStored(1))


def test_an_operator_without_subtasks_has_no_checkpoints() -> None:
    with pytest.raises(LocalProtocolError, match="'words': parallelism 0 must be 1 or more"):
        BarrierTracker("words", 0, t.CheckpointConfig(10.0))


# --- gateway ------------------------------------------------------------------------------------------------------


def test_a_gateway_tells_since_when_an_event_is_unconfirmed_and_when_its_peer_was_heard() -> None:  # H87
    gateway = a_gateway(ready=False)
    before = gateway.ready
    gateway.handle(g.ReadyAnnounced(), 0.0)
    assert (before, gateway.ready) == (False, True)
    since = [gateway.unconfirmed_since]
    gateway.handle(g.EventSubmitted(41, b"a"), 1.0)
    gateway.handle(g.EventSubmitted(42, b"b"), 2.0)
    since.append(gateway.unconfirmed_since)
    gateway.handle(g.ConnectionLost(), 3.0)
    gateway.handle(g.ConnectionAttached(0), 5.0)
    since.append(gateway.unconfirmed_since)  # the event was not out while there was no connection
    hear(gateway, m.Confirm(7, 1), 6.0)
    since.append(gateway.unconfirmed_since)
    assert since == [None, 1.0, 3.0, 4.0]
    assert gateway.heard_at == 6.0


def test_a_subtask_tells_how_much_it_holds_and_how_much_is_unconfirmed() -> None:  # H87
    subtask = a_closed_subtask()
    send(subtask, b"out", b"too")
    hear_subtask(subtask, m.CloseForCheckpoint(7, 1, 5))
    send(subtask, b"held", b"as well", b"and so")
    figures = subtask.statistics()
    assert (figures.held_events, figures.held_bytes, figures.closed_for) == (3, 17, (5,))
    assert (figures.unconfirmed_events, figures.unconfirmed_bytes) == (2, 6)


# --- sources ------------------------------------------------------------------------------------------------------


def test_outputs_of_the_oldest_enumerations_are_forgotten() -> None:
    """H68: as many are remembered as two stages of a large job have."""
    current = CurrentEnumeration()
    for outputs in (range(OUTPUTS_MAX), [OUTPUTS_MAX], [OUTPUTS_MAX + 1]):
        current.see(StageLook(outputs=frozenset(outputs)), anew=True)
    assert len(current._earlier_outputs) == OUTPUTS_MAX
    assert OUTPUTS_MAX in current._earlier_outputs


def test_a_batch_of_a_stream_comes_out_as_it_went_in_and_nothing_else_is_one() -> None:
    batch = StreamBatch("a stream", 3, 9)
    sent = decode_event(encode_event(stream_batch_event(batch)))
    assert parse_stream_batch(sent) == batch
    for other in (["another", "a stream", 3, 9], [*sent, 1], [sent[0], 3, 3, 9], "text", None):
        assert parse_stream_batch(other) is None


def test_the_newest_splits_are_taken_back_until_none_is_left() -> None:
    tracker: SplitAssignmentTracker[str] = SplitAssignmentTracker()
    tracker.record(1, [])
    tracker.record(1, ["a", "b", "c"])
    assert tracker.take_back(1, 2, lambda split: split != "c") == ["b", "a"]
    assert tracker.take_back(1, 5, lambda split: True) == ["c"]
    assert tracker.take_back(1, 5, lambda split: True) == []
    assert tracker.get_and_remove(1, -1) == []


# --- the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "numbers"),
    [
        (RestoreMode, range(2)),
        (m.RefusalCode, range(1, 10)),
        (ExtensionType, [*range(1, 7), *range(16, 24)]),
    ],
)
def test_the_numbers_of_codes_on_the_wire_are_different_and_stay(codes: type[IntEnum], numbers: Sequence[int]) -> None:
    """H60: the other end may be of another release, and has checkpoints with them."""
    assert [code.value for code in codes.__members__.values()] == list(numbers)


@pytest.mark.parametrize("size", [2**20 - 1, 2**30 + 1, 2.0**21, True])
def test_a_size_of_events_outside_of_its_range_is_refused_with_the_range(size: Any) -> None:
    with pytest.raises(ValueError, match=r"an int from 1048576 \(1 MiB\) to 1073741824 \(1 GiB\), not "):
        WireLimits.for_events(size)


def test_a_message_has_space_for_an_event_of_any_size_and_64_mebibytes_beside_it() -> None:
    for size in (2**20, 2**30):
        assert WireLimits.for_events(size).message_bytes_max == size + 64 * 2**20


def test_a_secret_has_at_least_16_bytes() -> None:
    assert KeyRing(b"s" * 16).task_key("op") != KeyRing(b"t" * 16).task_key("op")
    with pytest.raises(ValueError, match="at least 16 bytes, has 15"):
        KeyRing(b"s" * 15)


def test_fragments_that_have_no_space_for_a_text_are_refused() -> None:
    with pytest.raises(ValueError, match="fragment_bytes leaves no space for a text"):
        WireLimits(fragment_bytes=100)


def test_a_number_with_too_many_digits_is_refused_by_its_sender() -> None:
    assert decode_event(encode_event(Decimal("1" * 4096))) == Decimal("1" * 4096)
    with pytest.raises(EventEncodeError, match="a Decimal of 4097 characters, and at most 4096 can be sent"):
        encode_event(Decimal("1" * 4097))


def test_large_arrays_that_are_too_large_together_are_refused_by_their_sender() -> None:
    limits = WireLimits(event_bytes_max=4 * LEAF_BYTES)
    array = numpy.zeros(LEAF_BYTES, "u1")
    assert len(encode_event([array] * 3, limits)) <= limits.event_bytes_max
    with pytest.raises(EventEncodeError):
        encode_event([array] * 4, limits)  # only their headers are too much
    with pytest.raises(EventEncodeError):
        encode_event([array] * 5, limits)


def test_an_object_that_is_as_large_as_an_array_and_is_none_is_refused_by_its_sender() -> None:
    @dataclass
    class Frame:
        nbytes: int = LEAF_BYTES

    with pytest.raises(EventEncodeError, match="Frame"):
        encode_event([Frame(), numpy.zeros(LEAF_BYTES)])


@pytest.mark.parametrize("head", [b"\xc8\x00\x00", b"\xc7\x00", b"\xc9\x00\x00\x00\x00"])
@pytest.mark.parametrize("filler", [b"", b"\xc6\x00\x20\x00\x00" + bytes(2**21)], ids=["small", "large"])
def test_a_class_is_found_however_the_peer_writes_its_mark(head: bytes, filler: bytes) -> None:
    """H96: msgpack has several heads for an extension value, and only one is what an honest peer writes."""
    sent = encode_event(Measured("name", 5))
    mark = encode_mark(ExtensionType.REGISTERED)
    assert sent.count(mark) == 1
    data = b"\x92" + sent.replace(mark, head + mark[-1:]) + (filler or b"\xc0")
    for decoded in (decode_event(data), run_steps(decode_event_in_steps(data))):
        assert decoded[0] == Measured("name", 5)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"\xd4\x7f\x00", "extension type 127"),  # a placeholder of ours
        (b"\x92\xc0\xc7", "it ends within its last value"),
        (b"\xc7\x01", "it ends within its last value"),
    ],
)
def test_what_no_event_has_is_refused_before_anything_is_cut_out(value: bytes, why: str) -> None:  # H62
    with pytest.raises(ValueError, match=why):
        run_steps(skim(value, WireLimits()))


def test_a_large_array_of_objects_is_refused_by_its_sender() -> None:
    with pytest.raises(EventEncodeError, match="values of dtype object cannot be sent"):
        encode_event(numpy.full(LEAF_BYTES, None))


MANY = [f"{number:060}" for number in range(20_000)]
"""More than ``LARGE_EVENT_BYTES``."""


@event
@dataclass(frozen=True)
class Measured:
    name: str
    data: Any


@pytest.mark.parametrize(
    "value",
    [
        MANY,
        [*MANY, Decimal("1.5"), (1, 2)],
        [Measured("in it", 1), *MANY],
        Measured("of one leaf", b"x" * (LARGE_EVENT_BYTES + LEAF_BYTES)),
        [Measured("of several", b"x" * LEAF_BYTES), b"y" * LARGE_EVENT_BYTES, Decimal("1.5")],
    ],
    ids=["numbers", "with-extensions", "with-a-class", "of-a-class", "with-leaves"],
)
def test_a_large_event_comes_out_of_its_steps_as_it_went_in(value: Any) -> None:
    """H62: and a part of it does not."""
    data = encode_event(value)
    assert len(data) > LARGE_EVENT_BYTES
    decoding = decode_event_in_steps(data)
    next(decoding)  # it is not decoded in one step
    assert run_steps(decoding) == value
    with pytest.raises(RemoteProtocolError):
        run_steps(decode_event_in_steps(data[:-1]))


def test_a_message_with_a_field_of_another_type_has_no_short_form() -> None:
    wrong: Any = "seven"
    assert encode_report(m.BarrierMessage(7, 1, 3, 0)) != b""
    assert encode_report(m.BarrierMessage(7, 1, wrong, 0)) == b""
    assert encode_report(m.Confirm(7, 1)) == b""  # it has no fixed length


def test_the_server_of_a_handshake_waits_for_its_client_and_knows_no_identity_before() -> None:
    server = ServerHandshake(lambda identity: None, b"n" * 32)
    assert (server.initial_bytes(), server.identity) == (b"", b"")


def test_a_small_event_with_extensions_comes_out_of_its_steps_as_it_went_in() -> None:
    sent = [Decimal("1.5"), (1, 2), {"a set": {1, 2}}]
    assert run_steps(decode_event_in_steps(encode_event(sent[:1]))) == sent[:1]
    assert run_steps(decode_event_in_steps(encode_event(sent))) == sent


def test_an_event_of_a_class_whose_module_is_not_imported_yet_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H97
    (tmp_path / "rules_of_a_driver.py").write_text(
        "from dataclasses import dataclass\n"
        "from protocol.wire.event_classes import event\n"
        "@event('rules.of_a_driver')\n"
        "@dataclass\n"
        "class Rule:\n"
        "    limit: int\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    learn_modules({"rules.of_a_driver": "rules_of_a_driver"})
    rule: Any = find("rules.of_a_driver").cls
    assert decode_event(encode_event([rule(5)])) == [rule(5)]


def test_the_error_for_an_unknown_class_says_why_it_was_not_sent() -> None:
    learn_failures({"a class that cannot be sent": "it is local"})
    with pytest.raises(
        ValueError, match=r"because its class was not sent with it \(it is local\): define it in a module"
    ):
        find("a class that cannot be sent")


# --- settings and texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval_s", "timeout_s", "outcome"),
    [
        (None, None, None),
        (0.5, None, g.HEARTBEAT_TIMEOUT_S),
        (0.5, 1.0, 1.0),
        (2.0, 4.0, 4.0),
        (None, 1.0, r"heartbeat_interval_s must be given with heartbeat_timeout_s=1.0"),
        (0.6, None, r"at most half of heartbeat_timeout_s \(1.0\), not 0.6"),
        (2.1, 4.0, r"at most half of heartbeat_timeout_s \(4.0\), not 2.1"),
    ],
)
def test_a_time_without_signs_of_life_is_at_least_twice_their_interval(
    interval_s: float | None, timeout_s: float | None, outcome: float | str | None
) -> None:
    with pytest.raises(ValueError, match=outcome) if isinstance(outcome, str) else nullcontext():
        made = g.GatewayLimits(heartbeat_interval_s=interval_s, heartbeat_timeout_s=timeout_s)
        assert made.heartbeat_timeout_s == outcome


def test_a_mode_is_named_by_its_lower_case_name() -> None:
    assert [RestoreMode.named(mode) for mode in ("batch", RestoreMode.STREAMING)] == [*RestoreMode]
    for wrong in ("BATCH", "stream", 0, 1, None):
        with pytest.raises(ValueError, match=f"mode must be 'batch' or 'streaming', not {wrong!r}"):
            RestoreMode.named(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", range(8))
def test_a_text_is_unquoted_as_often_as_somebody_may_have_quoted_it_and_not_without_end(times: int) -> None:
    text = quoted = "password=a b"
    for _ in range(times):
        quoted = quote(quoted)
    assert (unquoted(quoted) == text) is (times <= 5)


class BadValue:
    """A value of a user whose methods fail."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        return "<bad>"


class BadMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class BadMeta(type):
    @property
    def __module__(self) -> str:  # type: ignore[override]
        raise RuntimeError("no module")


def test_what_a_user_s_class_raises_is_not_met_where_its_values_are_shown() -> None:
    assert as_float(BadValue()) != as_float(BadValue()), "not a number"
    assert json.loads(as_json({"a": BadValue(), "b": 1.5, "c": BadMapping()})) == {"a": "NaN", "b": 1.5, "c": "{}"}
    nested: Any = "innermost"
    for _ in range(100):
        nested = [nested]
    shown = as_json([nested, BadValue()])
    assert len(shown) < 1000
    assert full_name(BadMeta("Odd", (), {})) == "Odd"


# --- old and foreign bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chars", [1, 31, 32, 255, 256, 300])
def test_a_held_event_of_before_names_its_part_in_whichever_length(chars: int) -> None:
    name = "n" * chars
    payload = _ENVELOPE + packb(name) + b"the event"
    assert _split_envelope(payload) == (name, b"the event")
    assert _split_envelope(b"the event") == ("", b"the event")
    with pytest.raises(ValueError, match="the event of a part has no name"):
        _split_envelope(_ENVELOPE + packb(chars) + b"the event")


def test_a_small_message_may_come_in_any_pieces_beside_large_ones() -> None:
    limits = WireLimits(fragment_bytes=256 * 1024)
    small, large = (m.EventMessage(1, number, bytes(size)) for number, size in ((1, 10), (2, 600_000)))
    data = b"".join(encode_whole(one, limits) for one in (small, large, small))
    for step in (1, 3, 7, 1000):
        decoder, met = FragmentDecoder(limits), list[Any]()
        for first in range(0, len(data), step):
            met += decoder.messages(data[first : first + step])
        assert met == [small, large, small]


def test_combinations_of_flags_are_members_too() -> None:
    @event
    class Kind(Flag):
        A = 1
        B = 2

    both = Kind.A | Kind.B
    assert 3 in Kind._value2member_map_
    assert 1 in Kind._value2member_map_
    assert 4 not in Kind._value2member_map_
    assert decode_event(encode_event(both)) is both


def test_an_argument_of_a_similar_type_arrives_as_the_annotated_one() -> None:
    @checked()
    def given_back(data: bytes, names: list[str], sizes: dict[str, int], pair: tuple[int, ...]) -> tuple[Any, ...]:
        return data, names, sizes, pair

    for data in (bytearray(b"a"), memoryview(b"a")):
        found = given_back(data, ("x",), MappingProxyType({"a": 1}), (1,))  # type: ignore[arg-type]
        assert found == (b"a", ["x"], {"a": 1}, (1,))
        assert [type(one) for one in found] == [bytes, list, dict, tuple]


def test_a_rule_for_a_parameter_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="function has no parameter other, that"):

        @checked(that=AT_LEAST_1, other=AT_LEAST_1)
        def function(this: int) -> None: ...
