# SPDX-License-Identifier: Apache-2.0

"""The span that an event or a request was sent in, as the W3C's ``traceparent`` in front of its payload.

A payload is the event alone, unless there was a current span where it was sent. Then it is a msgpack list of a mark,
the text, and the event. Machines see the payload only, so whatever holds or repeats an event carries its text along,
and one without a text costs no byte. The text is opaque here: a sender puts it in, and who handles it takes it out.
The file of a checkpoint has its events without it, because a job that continues another day belongs to another trace.
"""

from __future__ import annotations

from protocol.wire.extension_types import ExtensionType, mark
from protocol.wire.framing import CODEC_LIMITS, WireLimits

__all__ = ["TRACED_FIRST", "TRACED_START", "TRACEPARENT_BYTES_MAX", "join_traceparent", "split_traceparent"]

TRACED_START = b"\x93" + mark(ExtensionType.TRACED)
"""How a payload begins that has a text: a list of three."""
TRACED_FIRST = TRACED_START[0]
"""Its first byte, which most events do not have: to look at one byte takes a third of the time of ``startswith``."""
TRACEPARENT_BYTES_MAX = 55
_TEXT_START = TRACED_START + b"\xd9"
"""The same with the head of msgpack's "str 8", of which one byte is missing: the text's length."""
_HEAD_BYTES = len(_TEXT_START) + 1


def join_traceparent(traceparent: str, event: bytes, limits: WireLimits = CODEC_LIMITS) -> bytes:
    """Return the payload of an encoded event.

    It is the event alone if ``traceparent`` is empty or too long, or if both together exceed the limit of an event.
    """
    text = traceparent.encode("ascii", "replace")
    size = _HEAD_BYTES + len(text) + len(event)
    if not 0 < len(text) <= TRACEPARENT_BYTES_MAX or size > limits.event_bytes_max:
        return event
    return b"".join((_TEXT_START, bytes((len(text),)), text, event))


def split_traceparent(payload: bytes) -> tuple[str, bytes]:
    """Return the text in front of a payload and the event, which need not be one.

    The text is empty if there is none, or a longer one than anybody may send. It may be anything else of the peer's.
    """
    if not payload.startswith(_TEXT_START) or len(payload) < _HEAD_BYTES:
        return "", payload  # with the mark alone, it is not an event
    end = _HEAD_BYTES + payload[_HEAD_BYTES - 1]
    text = payload[_HEAD_BYTES:end]
    return text.decode("ascii", "replace") if len(text) <= TRACEPARENT_BYTES_MAX else "", payload[end:]
