# SPDX-License-Identifier: Apache-2.0

"""Frames, and the limits of the wire (H60, H62).

A frame is a big-endian u32 length and a body of that many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from struct import Struct

from protocol.arguments import AT_LEAST_1, check_fields
from protocol.errors import SAME_RELEASE, RemoteProtocolError

_LENGTH = Struct(">I")

CLAIMS_UNCHECKED = 1024
"""A list that claims so many entries at most is not checked first, nor is a message of so many bytes. msgpack nests at
most 1024 lists: if each claims this, they take 8 MiB until the end of the data is met."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The limits of the wire (H62). Both ends of a connection must use the same.

    ``message_bytes_max`` limits a message, and with it a snapshot's state and held events. An event has at most
    ``event_bytes_max`` bytes and ``event_nesting_max`` levels of nested containers (an empty list counts as one). All
    its lists and maps together are at most ``event_containers_max`` and have at most ``event_items_max`` entries; a
    key and its value are one. A map has at most ``event_map_entries_max`` entries, because a peer can choose keys with
    which its cost grows with the square of their number. So the largest event costs a receiver a known amount of
    memory and time, and a sender learns that an event exceeds a limit before it leaves. A name (operator id) has at
    most ``name_chars_max`` characters, a text for people (reason, error) ``text_chars_max``; a longer text is truncated
    when it is sent. A snapshot carries at most ``held_events_max`` held events. A message whose body is larger than
    ``fragment_bytes`` travels in parts of this size (``protocol.wire.fragments``).

    Three follow from the others. Each container and each entry takes a byte, so an event of at most
    ``event_bytes_uncounted`` exceeds none of the counts, and one of at most ``event_bytes_flat`` does not nest too deep
    either. One with at most ``event_entries_few`` entries exceeds none either, whatever extension types it has.
    """

    message_bytes_max: int = 128 * 2**20
    event_bytes_max: int = 64 * 2**20
    event_nesting_max: int = 64
    event_containers_max: int = 2**17
    event_items_max: int = 2**18
    event_map_entries_max: int = 2**13
    name_chars_max: int = 256
    text_chars_max: int = 32_768
    held_events_max: int = 2**16
    fragment_bytes: int = 256 * 1024
    event_bytes_uncounted: int = field(init=False, repr=False, compare=False)
    event_bytes_flat: int = field(init=False, repr=False, compare=False)
    event_entries_few: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, **{limit.name: AT_LEAST_1 for limit in fields(self) if limit.init})
        if self.message_bytes_max > 2**32 - 1:
            raise ValueError(f"message_bytes_max must fit 32 bits, is {self.message_bytes_max}")
        if self.event_nesting_max > 512:
            raise ValueError(f"event_nesting_max must be at most 512, is {self.event_nesting_max}")
        if self.event_bytes_max + 64 + 4 * self.text_chars_max > self.message_bytes_max:
            raise ValueError("message_bytes_max leaves no space for an event of event_bytes_max and its headers")
        if 5 + 64 + 4 * self.text_chars_max > self.fragment_bytes:
            raise ValueError("fragment_bytes leaves no space for a text and the headers of its message")
        counts = (self.event_containers_max, self.event_items_max, self.event_map_entries_max)
        object.__setattr__(self, "event_bytes_uncounted", min(self.event_bytes_max, *counts))
        object.__setattr__(self, "event_bytes_flat", min(self.event_bytes_uncounted, self.event_nesting_max))
        unchecked = min(counts[:2]) // 2 - 1  # entries that exceed no count but that of one map
        few = min(16, unchecked, self.event_map_entries_max) if self.event_nesting_max > 1 else 0
        object.__setattr__(self, "event_entries_few", few)

    @classmethod
    def for_events(cls, event_bytes_max: int) -> WireLimits:
        """The limits with events of this size. A snapshot can always carry one and 64 MiB of state.

        Raises ``ValueError`` unless the size is from 1 MiB to 1 GiB.
        """
        if type(event_bytes_max) is not int or not EVENT_BYTES_LEAST <= event_bytes_max <= EVENT_BYTES_MOST:
            raise ValueError(
                f"event_bytes_max must be an int from {EVENT_BYTES_LEAST} (1 MiB) to {EVENT_BYTES_MOST} (1 GiB), "
                f"not {event_bytes_max!r}"
            )
        return cls(message_bytes_max=event_bytes_max + BESIDE_AN_EVENT_BYTES, event_bytes_max=event_bytes_max)

    @property
    def is_a_setting(self) -> bool:
        """Whether ``event_bytes_max`` can be raised by the one who runs the sidecar."""
        return EVENT_BYTES_LEAST <= self.event_bytes_max < EVENT_BYTES_MOST and self == WireLimits.for_events(
            self.event_bytes_max
        )


EVENT_BYTES_LEAST = 2**20
EVENT_BYTES_MOST = 2**30
BESIDE_AN_EVENT_BYTES = 64 * 2**20

DEFAULT_LIMITS = WireLimits()

CODEC_LIMITS = WireLimits.for_events(EVENT_BYTES_MOST)
"""The limits of what is encoded or decoded by itself: the sender's own settings limit what leaves."""


WRONG_PEER = f"the peer does not speak this protocol, or has other limits: check address and port, and {SAME_RELEASE}"


class FrameDecoder:
    """Splits the byte stream of one connection into frame bodies (sans-IO).

    It keeps at most one incomplete frame. A length is checked as soon as its four bytes have arrived, before any memory
    is used for the body. After an error the decoder stays broken, because the frame boundaries are lost.
    """

    __slots__ = ("_buffer", "_failure", "_frame_bytes_max", "_needed")

    def __init__(self, max_frame_bytes: int = DEFAULT_LIMITS.message_bytes_max) -> None:
        self._frame_bytes_max = max_frame_bytes
        self._buffer = bytearray()
        self._needed = 4  # with fewer bytes in the buffer there is nothing to do
        self._failure: RemoteProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of the incomplete frame have arrived, including its length."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in the order in which they arrived; return the bodies that are now complete, in order.

        Raises ``RemoteProtocolError`` for a length that is zero or exceeds the limit, and on every later call.
        Bodies before the bad length in the same ``data`` are dropped too: the connection must be closed anyway, and
        whatever was not confirmed is sent again.
        """
        if self._failure is not None:
            raise self._failure
        source: bytes | memoryview = data
        buffered: memoryview | None = None
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return []
            source = buffered = memoryview(self._buffer)  # of which a body is copied once, not twice
        bodies: list[bytes] = []
        position, end = 0, len(source)
        needed = 4
        while end - position >= 4:
            (length,) = _LENGTH.unpack_from(source, position)
            if not 0 < length <= self._frame_bytes_max:
                self._fail(length)
            if end - position < 4 + length:
                needed = 4 + length
                break
            bodies.append(bytes(source[position + 4 : position + 4 + length]))
            position += 4 + length
        if buffered is None:
            self._buffer += data[position:]
        else:
            buffered.release()
            del self._buffer[:position]
        self._needed = needed
        return bodies

    def whole(self, data: bytes) -> bytes:
        """The body, if ``data`` is one frame and nothing was incomplete, which is the usual case.

        Otherwise return nothing, and change nothing: ``feed`` has to take the data. It would return the same.
        """
        size = len(data)
        if self._buffer or size < 5:
            return b""
        (length,) = _LENGTH.unpack_from(data)
        return data[4:] if size == 4 + length and length <= self._frame_bytes_max else b""

    def take_incomplete(self, bytes_min: int) -> bytes:
        """Return the bytes of the incomplete frame and forget them, if there are so many; the caller gets the rest."""
        if len(self._buffer) < bytes_min:
            return b""
        taken, self._buffer, self._needed = bytes(self._buffer), bytearray(), 4
        return taken

    def _fail(self, length: int) -> None:
        self._buffer = bytearray()
        why = "an empty frame" if length == 0 else f"a frame of {length} bytes, over {self._frame_bytes_max}"
        self._failure = RemoteProtocolError(f"{why}: {WRONG_PEER}")
        self._frame_bytes_max = 0  # so no later frame is ``whole``
        raise self._failure


def frame(body: bytes) -> bytes:
    """Return ``body`` preceded by its length."""
    return _LENGTH.pack(len(body)) + body
