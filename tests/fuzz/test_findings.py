# SPDX-License-Identifier: Apache-2.0

"""The fuzzer's findings, each in its shortest form."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway.machine import GatewayMachine
from protocol.gateway.types import CheckpointOutcome, CheckpointOver, CloseRequested, GatewayLimits, RefuseMessage
from protocol.ids import ExecutionAttempt
from protocol.streams import ConnectionAttached
from protocol.wire.codec import decode_event, decode_message, encode_message
from protocol.wire.messages import (
    CheckpointAcknowledged,
    ClosedForCheckpoint,
    Confirm,
    EventMessage,
    Registered,
    UpMessage,
)


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- memory for claimed sizes -------------------------------------------------------------------------------------


def test_lists_in_one_another_that_claim_much_take_no_memory() -> None:  # H62
    # 130 KB took 39 MiB with msgpack 1.2, and 500 MiB with msgpack 1.1, which makes the whole list at its header.
    claims = (b"\xdd" + (2**17).to_bytes(4, "big")) * 500 + bytes(2**17)

    def decode() -> None:
        with pytest.raises(RemoteProtocolError, match="not msgpack within the limits"):
            decode_event(claims)

    assert peak_bytes(decode) < 4 * len(claims)


def test_a_message_makes_no_lists_that_no_field_can_hold() -> None:  # H62
    # 64 MiB of empty lists took 4 GiB, and seconds of the loop, before the first field was read.
    width = (2**9).to_bytes(2, "big")
    bush = b"\xdc" + width + (b"\xdc" + width + b"\x90" * 2**9) * 2**9

    def decode() -> None:
        with pytest.raises(RemoteProtocolError, match=r"Registered\.states "):
            decode_message(b"\xdc\x00\x11\x1e\x01\x01\x01" + bush)

    assert peak_bytes(decode) < 4 * len(bush)


# --- memory held for a task ---------------------------------------------------------------------------------------

ATTEMPT = ExecutionAttempt("words", 0, 0, 7)


def an_attempt_with_an_event_that_waits_for_readiness() -> GatewayMachine:
    machine = GatewayMachine(ATTEMPT, GatewayLimits())
    machine.handle(ConnectionAttached(0), 0.0)
    machine.handle_batch([EventMessage(7, 1, b"\xc0")], 0.0)
    return machine


def test_a_task_that_is_not_ready_cannot_fill_the_driver_with_snapshots() -> None:  # H27, H62
    # All items after an event that waits for readiness were kept, and a snapshot counts against no window.
    machine = an_attempt_with_an_event_that_waits_for_readiness()

    def acknowledge() -> None:
        for seq in range(2, 102):
            snapshot: list[UpMessage] = [CheckpointAcknowledged(7, seq, seq, bytes(100_000), (), ())]
            assert RefuseMessage in map(type, machine.handle_batch(snapshot, 0.0))

    assert peak_bytes(acknowledge) < 1_000_000
    machine.check_invariants()


def test_what_waits_for_readiness_waits_once_and_until_its_checkpoint_is_over() -> None:  # H27, H44
    machine = an_attempt_with_an_event_that_waits_for_readiness()
    for seq, checkpoint_id in ((2, 1), (4, 2)):
        machine.handle(CloseRequested(checkpoint_id), 0.0)
        for again in (False, True):
            closed: list[UpMessage] = [ClosedForCheckpoint(7, seq + again, checkpoint_id)]
            refused = [effect for effect in machine.handle_batch(closed, 0.0) if isinstance(effect, RefuseMessage)]
            if again:
                assert "was reported before" in refused[0].why
            else:  # the checkpoint before it is over: its messages are dropped
                assert ["is over" in effect.why for effect in refused] == [True] * (checkpoint_id - 1)
            machine.check_invariants()
        machine.handle(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED), 0.0)


# --- our own side's mistakes --------------------------------------------------------------------------------------

A_REGISTERED = Registered(7, 0, -1, (), (), 10**400, 1, 1, ())
WRONG: list[tuple[Any, str]] = [
    (EventMessage(7, 1, "text"), r"EventMessage\.payload must be bytes"),  # type: ignore[arg-type]
    (EventMessage(7, 1.5, b""), r"EventMessage\.seq must be an integer"),  # type: ignore[arg-type]
    (EventMessage("7", 1, b""), r"EventMessage\.task_attempt_id must be an integer"),  # type: ignore[arg-type]
    (Confirm(7, None), r"Confirm\.seq must be an integer"),  # type: ignore[arg-type]
    (A_REGISTERED, r"Registered\.reconnect_timeout_s"),
]


@pytest.mark.parametrize(("message", "why"), WRONG)
def test_a_field_of_the_wrong_type_is_named_in_the_fixed_layout_too(message: Any, why: str) -> None:
    # struct.error, TypeError and OverflowError were raised, which no caller expects.
    with pytest.raises(LocalProtocolError, match=why):
        encode_message(message)
