# SPDX-License-Identifier: Apache-2.0

"""The text of an error says what happened, why, and what to do: those that a reader had found to say less."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pytest

import headgate
from actors.errors import AskTimeout, HandlerFailed
from protocol.errors import SAME_RELEASE
from protocol.wire.events import encode_event
from protocol.wire.framing import FrameDecoder
from protocol.wire.handshake import PROTOCOL_VERSION
from protocol.wire.keys import KeyRing
from protocol.wire.state import decode_state, encode_state
from spark_bridge.primitives.counters import driver as counters
from spark_bridge.primitives.group import messages as group
from spark_bridge.primitives.work_queue import messages as work_queue
from spark_bridge.streams import task as streams
from tests.protocol.test_handshake import KEY, SERVER_NONCE, a_server

ADVICE = re.compile(
    r"\b(use|check|choose|write|restore|give|begin|start|import|install|send|name|allow|look|let|make|raise|correct)\b"
    r" [a-z@]",
    re.IGNORECASE,
)


def damaged_state() -> bytes:
    return encode_state("a group", {"n": b"x" * 10})[:-3]


def raise_(error: Exception) -> None:
    raise error


TEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a name of an event that is too long": (lambda: headgate.event("x" * 300), "must have 1 to 256 characters"),
    "a name of an event of blanks": (lambda: headgate.event(" "), "not only blanks, not 1 as ' '"),
    "an event of a number": (lambda: headgate.event(cast("Any", 3)), "3 cannot be an event, because it is neither"),
    "a state of another kind": (
        lambda: decode_state("a work queue", encode_state("a group", {})),
        "not that of a work queue, but that of a group",
    ),
    "a state that is none": (lambda: decode_state("a group", b"\xc0"), "not that of a group: "),
    "a state that is damaged": (lambda: decode_state("a group", damaged_state()), r"is damaged \("),
    "an empty frame": (lambda: FrameDecoder(100).feed(bytes(4)), "an empty frame: the peer does not speak"),
    "a large frame": (lambda: FrameDecoder(100).feed(b"\xff" * 4), f"a frame of {2**32 - 1} bytes, over 100: "),
    "a nonce that comes back": (
        lambda: a_server().receive(b"HDGT" + PROTOCOL_VERSION.to_bytes(2) + KEY.identity + SERVER_NONCE),
        "our own nonce back, so it",
    ),
    "another version": (
        lambda: a_server().receive(b"HDGT" + (PROTOCOL_VERSION + 1).to_bytes(2)),
        f"protocol version {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} at the peer: {SAME_RELEASE}",
    ),
    "a report of a work queue": (
        lambda: work_queue.parse_report(3),
        f"not a report of a work queue: 3; {SAME_RELEASE}",
    ),
    "a request of a group": (lambda: group.parse_request(3), f"not a request of a group: 3; {SAME_RELEASE}"),
    "an event of a group": (lambda: group.parse_event(3), f"not an event of a group: 3; {SAME_RELEASE}"),
    "a report of counts": (lambda: asyncio.run(counters._checked(3)), f"not a report of counts: 3; {SAME_RELEASE}"),
    "a long Decimal": (lambda: encode_event(Decimal("1" * 5000)), "5000 characters, and at most 4096 .*as a str"),
    "an array of many dimensions": (lambda: encode_event(np.zeros((1,) * 33)), "33 dimensions, .*reshape"),
    "a long integer": (lambda: encode_event([2**64]), "send a larger one as a str"),
    "a lone surrogate": (lambda: encode_event({"a": "\ud800"}), r"the event\['a'\] cannot .*send bytes, or"),
    "equal hashes": (lambda: encode_event({Decimal(n * (2**61 - 1)) for n in range(40)}), "at most 16 may: .* a list"),
    "a short secret": (lambda: KeyRing(b"short"), r"at least 16 bytes, has 5: make it .*token_bytes\(32\)"),
    "a late answer": (lambda: raise_(AskTimeout("a", "Question", 2.0, "busy")), "2.0 s: busy. Raise timeout_s"),
    "a failed handler": (lambda: raise_(HandlerFailed("a", "Question")), "correct what its handler raised"),
    "an offset of another query": (lambda: streams._pair(cast("Any", {"a": 1})), "of another query: start the query"),
}


@pytest.mark.parametrize(("cause", "says"), TEXTS.values(), ids=TEXTS)
def test_an_error_says_what_to_do(cause: Callable[[], Any], says: str) -> None:
    with pytest.raises(Exception, match=says) as raised:
        cause()
    assert ADVICE.search(str(raised.value)), raised.value
