# SPDX-License-Identifier: Apache-2.0

"""Hostile peers at the port for drivers' requests that know a driver's key (H62, H76)."""

from __future__ import annotations

from typing import Any

from protocol.errors import EventEncodeError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.framing import DEFAULT_LIMITS, frame
from tests.fuzz import mutations, samples
from tests.fuzz.attackers import AT_MOST_ONE_LINE, NO_LINE, ONE_LINE, Attack, Intruder

ATTACHED, ANOTHER = "the attached driver", "another driver"
"""The names of two drivers, of which the first is attached."""
REQUESTS = 10
_METHODS = (
    *("begin", "end", "failures", "settle", "statistics", "failure", "checkpoint", "savepoint", "request"),
    *("operators", "uncommitted", "", "__init__", "x" * 4_000_000),
)
_ARGUMENTS: tuple[Any, ...] = (
    *(None, 7, -1.5, "honest", "y" * 4_000_000, b"\xff", {}, [], [None, None], ["x", 7]),
    *(["honest", 1e308], ["honest", "x", "x"], [["honest"], {}, float("nan")], [7, ["honest"]]),
)


async def bad_requests(intruder: Intruder) -> None:
    """Ask for what does not exist, or with an argument of a wrong type. An error is answered, of limited size."""
    random = intruder.random
    for _ in range(REQUESTS):
        method = random.choice(_METHODS)
        argument = random.choice((*_ARGUMENTS, samples.event(random)))
        try:
            question = encode_event([method, argument])
        except EventEncodeError:  # both are large
            question = encode_event([method, None])
        await _ask(intruder, random.choice((ATTACHED, ANOTHER)), frame(question))


async def bad_request_bytes(intruder: Intruder) -> None:
    """Send what is not a request: wrong shapes, mutated and random bytes, texts that are not UTF-8."""
    random = intruder.random
    right = encode_event(["statistics", "honest"])
    body = random.choice(
        (
            mutations.mutated(random, right) or b"\xc1",
            random.randbytes(random.randrange(1, 100)),
            encode_event(["statistics"]),
            encode_event([["statistics"], "honest"]),
            encode_event("statistics"),
            b"\x92\xa3\xed\xb2\x80\xc0",
            b"\x92\xdb\x00\x3d\x09\x00" + b"\xff" * 4_000_000 + b"\xc0",
            b"\x91" * 4096,
            b"\xdd\xff\xff\xff\xff" * 20,
        )
    )
    await _ask(intruder, random.choice((ATTACHED, ANOTHER)), frame(body))


async def bad_control_frame(intruder: Intruder) -> None:
    """Send a frame with a bad length, or two requests together."""
    line = await intruder.authenticated(ONE_LINE, ANOTHER)
    question = frame(encode_event(["operators", None]))
    await line.send(
        intruder.random.choice((b"\x00\x00\x00\x00", b"\xff\xff\xff\xff" + bytes(100), question + question))
    )
    assert not await line.until_closed()
    await line.close()


async def leave_before_the_answer(intruder: Intruder) -> None:
    line = await intruder.authenticated(NO_LINE, ATTACHED)
    await line.send(frame(encode_event(["statistics", "honest"])))
    line.reset()
    await line.close()


async def _ask(intruder: Intruder, name: str, request: bytes) -> None:
    """Ask as this driver; check the answer, if the connection is not dropped instead."""
    line = await intruder.authenticated(AT_MOST_ONE_LINE, name)
    await line.send(request)
    for body in await line.frames():
        match decode_event(body):
            case [False, str(), str(text)]:
                assert len(text) <= DEFAULT_LIMITS.text_chars_max, f"an error of {len(text)} characters"
            case [True, answer]:
                assert name == ATTACHED, f"another driver was answered {answer!r:.200}"
            case other:
                raise AssertionError(f"an invalid answer: {other!r:.200}")
    await line.close()


CONTROL_INSIDERS: tuple[Attack, ...] = (bad_requests, bad_request_bytes, bad_control_frame, leave_before_the_answer)
