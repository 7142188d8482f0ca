# SPDX-License-Identifier: Apache-2.0

"""Decodes events of any size without holding the event loop.

One event of 4 MiB can cost more than a second, if the keys of its maps were chosen so that each collides with those
before it. A thread would not help, because msgpack holds the interpreter lock. So the codec divides a large event into
steps, and other work of the loop gets a turn after each. The coordinator takes one message at a time, so the order of
its events stays as it is.
"""

from __future__ import annotations

from typing import Any

from actors.coordination.turns import in_turns
from protocol.wire.codec import EVENT_STEP_BYTES, decode_event, decode_event_in_steps

__all__ = ["decode_in_turns"]


async def decode_in_turns(payload: bytes) -> Any:
    """Decode an event. Between the steps of a large one, other work of the loop gets a turn.

    Raises ``RemoteProtocolError`` if it is not an event, or exceeds a limit.
    """
    if len(payload) <= EVENT_STEP_BYTES:
        return decode_event(payload)
    return await in_turns(decode_event_in_steps(payload))
