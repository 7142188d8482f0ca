"""The wire of the raw baseline: a length, and ``[kind, seq, payload]`` as msgpack."""

from __future__ import annotations

from struct import Struct

LENGTH = Struct(">I")
EVENT = 1
"""To be confirmed."""
ECHO = 2
"""To be answered with its payload."""
CONFIRM = 3
ANSWER = 4
FLOOD = 5
"""To be answered ``count`` times with ``[ANSWER, place, payload]``, the last place being 0.

As a raw frame ``[FLOOD, 0, [count, payload]]``, as an event ``[FLOOD, 0, payload, count]``.
"""
