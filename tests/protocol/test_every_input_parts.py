# SPDX-License-Identifier: Apache-2.0

"""Every input in every state of the smaller machines: handshake, frames, streams, splits, restarts, source events."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import HandshakeFailed, LocalProtocolError, RemoteProtocolError, VersionMismatch
from protocol.restart import ExponentialDelay, FixedDelay, RestartBackoff, RestartStrategy
from protocol.source_events import (
    NoMoreSplits,
    SplitRequested,
    SplitsAdded,
    no_more_splits_event,
    parse_source_event,
    split_request_event,
    splits_event,
)
from protocol.splits import SplitAssignmentTracker
from protocol.streams import IncomingStream, OutgoingStream
from protocol.wire.framing import FrameDecoder, frame
from protocol.wire.handshake import PROTOCOL_VERSION, ClientHandshake, HandshakeState, ServerHandshake
from tests.exploration.freezing import freeze
from tests.protocol.test_every_input import HUGE

SECRET, CLIENT_NONCE, SERVER_NONCE = b"s" * 32, bytes(range(32)), bytes(range(100, 132))

# --- the handshake: which bytes lead where ----------------------------------------------------------------

Handshake = ClientHandshake | ServerHandshake


def a_peer(ours: type[Handshake], secret: bytes = SECRET, version: int = PROTOCOL_VERSION) -> Handshake:
    if ours is ClientHandshake:
        return ServerHandshake(secret, SERVER_NONCE, version)
    return ClientHandshake(secret, CLIENT_NONCE, version)


def a_handshake(ours: type[Handshake]) -> Handshake:
    return ours(SECRET, CLIENT_NONCE if ours is ClientHandshake else SERVER_NONCE)


def words_of(peer: Handshake, own_hello: bytes) -> tuple[bytes, bytes]:
    """Return the hello and the proof of a peer, which may be a wrong one."""
    if isinstance(peer, ClientHandshake):
        hello = peer.initial_bytes()
        return hello, peer.receive(own_hello)
    hello = peer.receive(own_hello)
    return hello, peer._proof(peer._own_label)


def a_handshake_in(ours: type[Handshake], state: HandshakeState) -> tuple[Handshake, bytes, bytes]:
    """Return an end that waits for this, and the correct hello and proof of its peer."""
    end = a_handshake(ours)
    hello, proof = words_of(a_peer(ours), a_handshake(ours)._hello)
    if state in (HandshakeState.PROOF, HandshakeState.DONE):
        end.receive(hello)
    if state is HandshakeState.DONE:
        end.receive(proof)
    if state is HandshakeState.FAILED:
        with pytest.raises(HandshakeFailed):
            end.receive(b"GET / HTTP/1.1")
    assert end.state is state
    return end, hello, proof


HELLO_ENDS: dict[str, tuple[HandshakeState, type[Exception] | None]] = {
    "nothing": (HandshakeState.HELLO, None),
    "a part": (HandshakeState.HELLO, None),
    "hello": (HandshakeState.PROOF, None),
    "hello and proof": (HandshakeState.DONE, None),
    "hello, proof and more": (HandshakeState.DONE, None),
    "wrong magic": (HandshakeState.FAILED, HandshakeFailed),
    "wrong version": (HandshakeState.FAILED, VersionMismatch),
    "our own nonce": (HandshakeState.FAILED, HandshakeFailed),
    "hello and wrong proof": (HandshakeState.FAILED, HandshakeFailed),
}
PROOF_ENDS: dict[str, tuple[HandshakeState, type[Exception] | None]] = {
    "nothing": (HandshakeState.PROOF, None),
    "a part of the proof": (HandshakeState.PROOF, None),
    "proof": (HandshakeState.DONE, None),
    "proof and more": (HandshakeState.DONE, None),
    "wrong proof": (HandshakeState.FAILED, HandshakeFailed),
    "hello": (HandshakeState.FAILED, HandshakeFailed),
}


def handshake_bytes(what: str, hello: bytes, proof: bytes, own_hello: bytes) -> bytes:
    wrong = bytes(byte ^ 1 for byte in proof)
    return {
        "nothing": b"",
        "a part": hello[:20],
        "hello": hello,
        "hello and proof": hello + proof,
        "hello, proof and more": hello + proof + b"more",
        "wrong magic": b"HDGX" + hello[4:],
        "wrong version": hello[:4] + (PROTOCOL_VERSION + 1).to_bytes(2, "big"),
        "our own nonce": own_hello,
        "hello and wrong proof": hello + wrong,
        "a part of the proof": proof[:31],
        "proof": proof,
        "proof and more": proof + b"more",
        "wrong proof": wrong,
    }[what]


@pytest.mark.parametrize("ours", [ClientHandshake, ServerHandshake])
@pytest.mark.parametrize(
    ("state", "what"),
    [(HandshakeState.HELLO, what) for what in HELLO_ENDS] + [(HandshakeState.PROOF, what) for what in PROOF_ENDS],
)
def test_each_cell_of_the_handshake_leads_where_it_says(
    ours: type[Handshake], state: HandshakeState, what: str
) -> None:
    # H60, H61: whole, and in single bytes
    target, error = (HELLO_ENDS if state is HandshakeState.HELLO else PROOF_ENDS)[what]
    for portion in (1, 1000):
        end, hello, proof = a_handshake_in(ours, state)
        data = handshake_bytes(what, hello, proof, end._hello)
        answers = b""
        raised: Exception | None = None
        while data and raised is None and not end.done:
            part, data = data[:portion], data[portion:]
            try:
                answers += end.receive(part)
            except (HandshakeFailed, VersionMismatch) as failure:
                raised = failure
        assert end.state is target
        assert type(raised) is (error or type(None))
        if error is not None and state is HandshakeState.PROOF:
            assert answers == b""  # an unauthenticated peer learns nothing
        if end.done:
            assert (end.trailing_data + data) == (b"more" if what.endswith("more") else b"")


@pytest.mark.parametrize("ours", [ClientHandshake, ServerHandshake])
@pytest.mark.parametrize("data", [b"", b"x", b"HDGT", bytes(100)])
def test_a_handshake_that_is_over_takes_nothing_more(ours: type[Handshake], data: bytes) -> None:
    # H61: it fails again in the same way, or says that it does not expect these bytes
    for state, error in ((HandshakeState.FAILED, HandshakeFailed), (HandshakeState.DONE, ValueError)):
        end, _, _ = a_handshake_in(ours, state)
        before = freeze(end)
        with pytest.raises(error):
            end.receive(data)
        assert freeze(end) == before


# --- frames -----------------------------------------------------------------------------------------------

FRAME_PARTS = {
    "nothing": b"",
    "part of a length": b"\0\0",
    "a whole frame": frame(b"body"),
    "a length of zero": b"\0\0\0\0",
    "a length over the bound": b"\0\0\0\x64",
    "a length and part of a body": b"\0\0\0\x08half",
    "noise": b"\xff\xff\xff\xff\xff",
}


@settings(max_examples=200, print_blob=True)
@given(st.lists(st.sampled_from(sorted(FRAME_PARTS)), max_size=8), st.lists(st.integers(1, 9), max_size=20))
def test_a_decoder_in_any_state_takes_any_bytes_or_is_broken_for_good(parts: list[str], cuts: list[int]) -> None:
    # H60, H62: compare with the simplest reading of the same bytes
    stream = b"".join(FRAME_PARTS[part] for part in parts)
    bodies, rest, broken = read_frames(stream, 20)
    decoder, received, raised = FrameDecoder(20), list[bytes](), False
    sizes = iter(cuts)
    left = stream
    while left and not raised:
        size = next(sizes, 5)
        try:
            received += decoder.feed(left[:size])
        except RemoteProtocolError:
            raised = True
        left = left[size:]
    assert raised == broken
    assert received == bodies[: len(received)]  # the frames of the chunk that breaks it are dropped with it
    if raised:
        before = freeze(decoder)
        for data in FRAME_PARTS.values():
            with pytest.raises(RemoteProtocolError):
                decoder.feed(data)
        assert freeze(decoder) == before
        assert decoder.buffered_bytes == 0
    else:
        assert received == bodies
        assert decoder.buffered_bytes == len(rest)


def read_frames(stream: bytes, size_max: int) -> tuple[list[bytes], bytes, bool]:
    bodies: list[bytes] = []
    while len(stream) >= 4:
        length = int.from_bytes(stream[:4], "big")
        if not 0 < length <= size_max:
            return bodies, b"", True
        if len(stream) < 4 + length:
            break
        bodies.append(stream[4 : 4 + length])
        stream = stream[4 + length :]
    return bodies, stream, False


# --- the two halves of a stream ---------------------------------------------------------------------------


@settings(max_examples=150, print_blob=True)
@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_a_stream_and_its_reader_lose_and_double_nothing_whatever_numbers_are_named(numbers: list[int]) -> None:
    # H22, H24, H27, H30
    out: OutgoingStream[int] = OutgoingStream()
    came = IncomingStream()
    kept: list[tuple[int, int | None]] = []  # the model: items that are sent and not confirmed
    untaken: list[tuple[int, int]] = []
    for number in numbers:
        dice = Random(number)
        step = dice.choice(
            ("append", "append", "confirm", "resume", "arrive", "take", "clear" if number % 40 == 0 else "arrive")
        )
        named = dice.choice(
            (0, -1, -HUGE, HUGE, out.last_seq, out.last_seq + 1, out.confirmed_seq, came.received_seq + 1)
        )
        before = freeze(out)
        if step == "append":
            size = dice.choice((None, 0, 7))
            out.append(out.last_seq + 1, size, out.last_seq + 1)
            kept.append((out.last_seq, size))
        elif step in ("confirm", "resume"):
            first = kept[0][0] if kept else out.last_seq + 1
            refused = named > out.last_seq or (step == "resume" and named < first - 1)
            try:
                gone = out.confirm(named) if step == "confirm" else out.resume(named)
            except RemoteProtocolError:
                assert refused
                assert freeze(out) == before
            else:
                assert not refused
                assert [entry[0] for entry in gone] == [seq for seq, _ in kept if seq <= named]
                kept = [entry for entry in kept if entry[0] > named]
        elif step == "arrive":
            expected = came.received_seq + 1
            there = freeze(came)
            try:
                new = came.is_new(named)
            except RemoteProtocolError:
                assert named > expected
            else:
                assert new == (named == expected)
            assert freeze(came) == there  # reading a number changes nothing
            if dice.random() < 0.7:
                came.advance(size := dice.choice((None, 0, 5)))
                untaken += [] if size is None else [(came.received_seq, size)]
        elif step == "take":
            came.take(named)
            untaken = [entry for entry in untaken if entry[0] > named]
        else:
            out.clear()
            came.clear()
            kept, untaken = [], []
        out.check_invariants()
        came.check_invariants()
        assert list(out.unconfirmed()) == [seq for seq, _ in kept] == list(out.tags())
        assert out.bytes_unconfirmed == sum(size or 0 for _, size in kept)
        assert came.untaken_bytes == sum(size for _, size in untaken)
        assert came.confirmable_seq == (untaken[0][0] - 1 if untaken else came.received_seq)


# --- splits -----------------------------------------------------------------------------------------------


@settings(max_examples=150, print_blob=True)
@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_split_assignments_survive_every_input_and_a_snapshot_in_every_state(numbers: list[int]) -> None:
    # H4, H56: an id that does not increase is refused without a change; a restored tracker behaves as the saved one
    tracker: SplitAssignmentTracker[int] = SplitAssignmentTracker()
    newest = -1
    for number in numbers:
        dice = Random(number)
        checkpoint_id = dice.choice((newest + 1, newest + 1, newest, newest - 1, -1, 0, -HUGE))
        subtask = dice.choice((0, 1, 2, -1, HUGE))
        before = freeze(tracker)
        restored = SplitAssignmentTracker[int].restore(copy.deepcopy(tracker.snapshot()))
        restored.check_invariants()
        assert restored.snapshot() == tracker.snapshot()
        match dice.choice(("record", "record", "checkpoint", "complete", "reset", "look")):
            case "record":
                splits = [dice.randrange(9) for _ in range(dice.choice((0, 1, 3)))]
                tracker.record(subtask, splits)
                assert splits or freeze(tracker) == before
            case "checkpoint" if checkpoint_id > newest:
                tracker.on_checkpoint(checkpoint_id)
                newest = checkpoint_id
            case "checkpoint":
                with pytest.raises(LocalProtocolError):
                    tracker.on_checkpoint(checkpoint_id)
                assert freeze(tracker) == before
            case "complete":
                tracker.on_checkpoint_complete(checkpoint_id)
            case "reset":
                assert restored.get_and_remove(subtask, checkpoint_id) == tracker.get_and_remove(subtask, checkpoint_id)
                assert tracker.get_and_remove(subtask, checkpoint_id) == []
            case _:
                assert restored.assigned(subtask) == tracker.assigned(subtask)
                assert freeze(tracker) == before
        tracker.check_invariants()


def snapshots(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values that are nearly snapshots."""
    assignments = st.dictionaries(
        st.integers(-1, 3) | st.text(max_size=1), st.lists(inner, max_size=3) | inner, max_size=3
    )
    history = st.dictionaries(st.integers(-2, 3) | st.text(max_size=1), assignments | inner, max_size=3)
    return st.lists(inner, max_size=2) | st.fixed_dictionaries(
        {"open": assignments | inner}, optional={"by_checkpoint": history | inner}
    )


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), snapshots, max_leaves=12))
def test_whatever_is_restored_as_split_assignments_is_whole_or_refused(value: Any) -> None:
    try:
        tracker: SplitAssignmentTracker[Any] = SplitAssignmentTracker.restore(value)
    except LocalProtocolError:
        return
    tracker.check_invariants()


# --- restarts ---------------------------------------------------------------------------------------------

STRATEGIES: list[RestartStrategy] = [
    FixedDelay(0, 1.0),
    FixedDelay(2, 0.0),
    FixedDelay(None, 3.0),
    ExponentialDelay(1.0, 5.0, 2.0, 10.0, None),
    ExponentialDelay(0.0, 0.0, 1.0, 0.0, 2),
    ExponentialDelay(1.0, 60.0, 10.0, 10.0, 3),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@given(steps=st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 10.0, 1e9])), max_size=40))
def test_a_backoff_answers_every_failure_within_its_bounds(
    strategy: RestartStrategy, steps: list[tuple[bool, float]]
) -> None:
    # H15: failures without a beginning, beginnings without a failure, and clocks that stand
    backoff, now, granted = RestartBackoff(strategy), 0.0, 0
    for begins, passed_s in steps:
        now += passed_s
        if begins:
            backoff.begun(now)
            continue
        before = freeze(backoff)
        delay_s = backoff.failed(now)
        granted = backoff.restarts
        if delay_s is None:
            assert granted == strategy.restarts_max
            assert freeze(backoff) == before or isinstance(strategy, ExponentialDelay)
        else:
            most = strategy.delay_s if isinstance(strategy, FixedDelay) else strategy.maximum_s
            assert 0 <= delay_s <= most
            assert granted >= 1
            assert strategy.restarts_max is None or granted <= strategy.restarts_max


# --- source events ----------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([split_request_event()[0], splits_event([])[0], no_more_splits_event()[0]])


@given(values | st.lists(names | values, max_size=3))
def test_any_value_is_a_source_event_or_the_users_own(value: Any) -> None:
    builders: dict[type, Callable[[Any], list[Any]]] = {
        SplitRequested: lambda _: split_request_event(),
        SplitsAdded: lambda event: splits_event(event.splits),
        NoMoreSplits: lambda _: no_more_splits_event(),
    }
    event = parse_source_event(value)
    if event is not None:
        assert freeze(builders[type(event)](event)) == freeze(value)


def test_every_source_event_comes_back_as_itself() -> None:
    events = [split_request_event(), splits_event([1, "a"]), splits_event([]), no_more_splits_event()]
    assert [type(parse_source_event(event)).__name__ for event in events] == [
        "SplitRequested",
        "SplitsAdded",
        "SplitsAdded",
        "NoMoreSplits",
    ]
