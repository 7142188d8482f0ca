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
