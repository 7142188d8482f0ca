# SPDX-License-Identifier: Apache-2.0

"""Large messages in fragments, so that small ones pass between them (H60, H62, H112 to H115).

A message of more than ``WireLimits.fragment_bytes`` does not leave in one frame. It leaves as a *start* and as many
*parts* as it takes, each of them a frame:

    start   0xC0, u32 size of all parts together, envelope
    part    0xC1, ``fragment_bytes`` bytes of it; the last part has the rest

The envelope is the message itself with an empty payload, so that the payload, which is all that is large, is neither
copied into a message nor out of it. Any other message (a snapshot, a restored state) has an empty envelope, and its
parts are the body of its frame. No message begins with either mark, because each is a msgpack array.

One direction of a connection has at most one such message under way. What waits behind it keeps its order; only
messages without a place in the order of the items, the ``PASSING`` ones, leave between the parts.

Both ends are sans-IO, and each object serves one connection and one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from struct import Struct
from typing import Any, NoReturn, cast, get_args

from protocol.describing import type_name
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import decode_message, encode_message, encode_report
from protocol.wire.framing import WRONG_PEER, FrameDecoder, WireLimits
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    Confirm,
    CoordinatorAwaited,
    EventMessage,
    Heartbeat,
    Message,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    UrgentEventMessage,
)

__all__ = [
    "PASSING",
    "FragmentDecoder",
    "LargeMessage",
    "Outbox",
    "encode_frames",
    "encode_whole",
]

PASSING: frozenset[type[Message]] = frozenset({Confirm, Heartbeat, CoordinatorAwaited, AttemptEnded})
"""What may leave before a large message that was sent earlier: it says nothing about the items of its direction."""

_START, _PART = 0xC0, 0xC1
_MARKS = frozenset({_START, _PART})
_START_HEAD = Struct(">BI")
_START_FRAME = Struct(">IBI")
_PART_FRAME = Struct(">IB")

_WithPayload = (
    EventMessage | UrgentEventMessage | RequestMessage | AnswerMessage | RestoredEventMessage | RestoredRequestMessage
)
_ENVELOPES: frozenset[type[Message]] = frozenset(get_args(_WithPayload))


# --- sending ------------------------------------------------------------------------------------------------------


class LargeMessage:
    """A message on its way in fragments. It refers to the payload, and copies one part of it at a time."""

    __slots__ = ("_data", "_envelope", "_part_bytes", "_position", "_started")

    def __init__(self, envelope: bytes, data: bytes | memoryview, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._envelope = envelope
        self._data = memoryview(data)
        self._position = 0
        self._started = False

    @property
    def bytes_left(self) -> int:
        """How many bytes of the parts have not been taken."""
        return len(self._data) - self._position

    def next(self) -> bytes:
        """Return the next frames: a part, with the start before the first one. Not to be called after the last."""
        part = self._data[self._position : self._position + self._part_bytes]
        self._position += len(part)
        head = _PART_FRAME.pack(1 + len(part), _PART)
        if self._started:
            return b"".join((head, part))
        self._started = True
        start = _START_FRAME.pack(_START_HEAD.size + len(self._envelope), _START, len(self._data))
        return b"".join((start, self._envelope, head, part))


def encode_frames(message: Message, limits: WireLimits) -> bytes | LargeMessage:
    """Encode a message as one frame, or prepare it for fragments. Raises as ``encode_message`` does."""
    kind = type(message)
    if kind in _ENVELOPES:
        payload = cast(_WithPayload, message).payload
        if type(payload) is bytes and limits.fragment_bytes < len(payload) <= limits.event_bytes_max:
            envelope: Any = replace(cast(Any, message), payload=b"")
            return LargeMessage(encode_message(envelope, limits)[4:], payload, limits.fragment_bytes)
    data = encode_message(message, limits)
    if len(data) <= 4 + limits.fragment_bytes:
        return data
    return LargeMessage(b"", memoryview(data)[4:], limits.fragment_bytes)


def encode_whole(message: Message, limits: WireLimits) -> bytes:
    """Encode a message as all its frames. Raises as ``encode_message`` does."""
    encoded = encode_frames(message, limits)
    if isinstance(encoded, bytes):
        return encoded
    frames = []
    while encoded.bytes_left:
        frames.append(encoded.next())
    return b"".join(frames)


class Outbox:
    """What one end of a connection sends, in the order of the wire.

    ``busy``: a large message is under way, so the caller writes what ``next`` returns, as fast as the peer reads.
    ``kept_bytes``: the size of the small messages that wait behind it. A large one takes no
    memory in addition to its payload.
    """

    __slots__ = ("_limits", "_waiting", "busy", "kept_bytes")

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._waiting: list[bytes | LargeMessage] = []
        self.busy = False
        self.kept_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """The size of what has not left."""
        return sum(len(one) if isinstance(one, bytes) else one.bytes_left for one in self._waiting)

    def put(self, message: Message) -> bytes:
        """Take a message. Return its frame if it may leave now, and nothing if it is large or waits for a large one.

        Raises ``LocalProtocolError``, as ``encode_message`` does, and changes nothing.
        """
        if not self.busy and (report := encode_report(message)):
            return report  # as most messages about a checkpoint
        encoded = encode_frames(message, self._limits)
        if isinstance(encoded, bytes):
            if not self.busy or type(message) in PASSING:
                return encoded
            self.kept_bytes += len(encoded)
        self._waiting.append(encoded)
        self.busy = True
        return b""

    def next(self) -> bytes:
        """Return the next frames of what waits, about ``fragment_bytes`` at most; nothing unless ``busy``."""
        waiting = self._waiting
        frames: list[bytes] = []
        size, most = 0, self._limits.fragment_bytes
        while waiting and size < most:
            first = waiting[0]
            if isinstance(first, bytes):
                frames.append(first)
                size += len(first)
                self.kept_bytes -= len(first)
            elif frames:
                break
            else:
                frames.append(first.next())
                size = most
                if first.bytes_left:
                    break
            del waiting[0]
        self.busy = bool(waiting)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._waiting.clear()
        self.busy = False
        self.kept_bytes = 0


# --- receiving ----------------------------------------------------------------------------------------------------


class FragmentDecoder:
    """Splits the byte stream of one connection into messages, and puts together those that come in fragments.

    It keeps at most one incomplete message and one incomplete frame. What a start claims is checked before any memory
    is used for its parts. After an error the decoder stays broken, like ``FrameDecoder``.
    """

    __slots__ = (
        "_envelope",
        "_failure",
        "_frames",
        "_gathered",
        "_limits",
        "_missing",
        "_part_left",
        "_parts",
        "is_another",
    )

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._frames = FrameDecoder(min(limits.message_bytes_max, limits.fragment_bytes) + 1)
        self._envelope: Message | None = None
        self._parts: BytesIO | None = None
        self._gathered = 0
        self._missing = 0
        self._part_left = 0  # of the part that is coming
        self._failure: RemoteProtocolError | None = None
        self.is_another = False
        """Whether what is incomplete now began in the last ``feed``."""

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of what is incomplete have arrived."""
        return self._gathered + self._frames.buffered_bytes

    def feed(self, data: bytes) -> Sequence[bytes | Message]:
        """Take bytes in the order in which they arrived; return the messages that are now complete, in order.

        One that came in a single frame, or without an envelope, is returned as its body; ``decode_message`` decodes it.
        Raises ``RemoteProtocolError`` for a bad frame and for fragments that no sender makes, and on every later call.
        """
        if self._failure is not None:
            raise self._failure
        if self._parts is not None:
            return self._feed_large(data)
        bodies = self._frames.feed(data)
        self.is_another = bool(bodies)
        for body in bodies:
            if body[0] in _MARKS:
                return self._take(bodies)
        return bodies

    def whole(self, data: bytes) -> bytes:
        """The body, if ``data`` is one frame that is a message, and nothing was incomplete: the usual case.

        Otherwise return nothing, and change nothing: ``feed`` has to take the data. It would return the same.
        """
        if self._parts is not None or self._failure is not None:
            return b""
        body = self._frames.whole(data)
        return b"" if body and body[0] in _MARKS else body

    def messages(self, data: bytes) -> list[Message]:
        """Like ``feed``, with every message decoded."""
        limits = self._limits
        if body := self.whole(data):
            return [decode_message(body, limits)]
        return [decode_message(one, limits) if isinstance(one, bytes) else one for one in self.feed(data)]

    def _feed_large(self, data: bytes) -> list[bytes | Message]:
        """Write what belongs to the present part straight to its place; otherwise it would be copied twice more."""
        self.is_another = False
        complete: list[bytes | Message] = []
        if self._part_left:
            count = min(len(data), self._part_left)
            self._part_left -= count
            self._gathered += count
            self._write(memoryview(data)[:count], complete)
            if count == len(data):
                return complete
            data = data[count:]
        bodies = self._frames.feed(data)
        return self._take(bodies, complete)

    def _take(self, bodies: list[bytes], complete: list[bytes | Message] | None = None) -> list[bytes | Message]:
        complete = [] if complete is None else complete
        try:
            for body in bodies:
                if body[0] == _PART:
                    self._begin_part(len(body) - 1)
                    self._gathered += 4 + len(body)
                    self._write(memoryview(body)[1:], complete)
                elif body[0] == _START:
                    self._begin(body)
                else:
                    complete.append(body)
            if self._parts is not None:
                self._take_incomplete()
        except RemoteProtocolError as error:
            self._failure = error
            self._forget()
            raise
        return complete

    def _take_incomplete(self) -> None:
        """If a part has begun to come, take what is there, so that the rest is written to its place."""
        came = self._frames.take_incomplete(_PART_FRAME.size)
        if not came:
            return
        length, mark = _PART_FRAME.unpack_from(came)
        if mark != _PART:
            self._frames.feed(came)  # a small message; it is incomplete still
            return
        self._begin_part(length - 1)
        self._gathered += len(came)
        self._part_left = length - len(came) + 4
        self._write(memoryview(came)[_PART_FRAME.size :], [])

    def _begin(self, body: bytes) -> None:
        if self._parts is not None:
            self._refuse("a large message began before the one before it was complete")
        if len(body) < _START_HEAD.size:
            self._refuse("a large message began without its size")
        _, size = _START_HEAD.unpack_from(body)
        envelope = body[_START_HEAD.size :]
        most = self._limits.event_bytes_max if envelope else self._limits.message_bytes_max
        least = self._limits.fragment_bytes + 1
        if not least <= size <= most:
            self._refuse(f"a large message of {size} bytes, where {least} to {most} are allowed")
        self._envelope = self._open(envelope) if envelope else None
        self._parts, self._gathered, self._missing = BytesIO(), 4 + len(body), size

    def _open(self, envelope: bytes) -> Message:
        message = decode_message(envelope, self._limits)
        if type(message) not in _ENVELOPES or cast(_WithPayload, message).payload:
            self._refuse(f"{type_name(message)} as the envelope of a payload")
        return message

    def _begin_part(self, size: int) -> None:
        if self._parts is None:
            self._refuse("a part of a large message that has not begun")
        if size != (expected := min(self._limits.fragment_bytes, self._missing)):
            self._refuse(f"a part of {size} bytes, where {expected} had to come")

    def _write(self, data: memoryview, complete: list[bytes | Message]) -> None:
        assert self._parts is not None
        self._parts.write(data)
        self._missing -= len(data)
        if not self._missing:
            whole = self._parts.getvalue()  # which is not a copy
            complete.append(whole if self._envelope is None else replace(cast(Any, self._envelope), payload=whole))
            self._forget()
            self.is_another = True

    def _forget(self) -> None:
        self._envelope = self._parts = None
        self._gathered = self._missing = self._part_left = 0

    def _refuse(self, why: str) -> NoReturn:
        raise RemoteProtocolError(f"{why}: {WRONG_PEER}")
