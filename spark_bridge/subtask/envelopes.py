# SPDX-License-Identifier: Apache-2.0

"""How what a task sends and gets names its part: only here (H80). The user's own part has the empty name."""

from __future__ import annotations

from typing import Any

from protocol.wire.codec import decode_event
from protocol.wire.extension_types import PartEvent

__all__ = ["enveloped", "opened"]


def enveloped(part: str, value: Any) -> Any:
    """Return the event or request of a part as it travels."""
    return PartEvent(part, value) if part else value


def opened(payload: bytes) -> tuple[str, Any]:
    """Return the part that an arriving event is for, or that a restored request is of, and the event or request."""
    event = decode_event(payload)
    return (event.name, event.event) if type(event) is PartEvent else ("", event)
