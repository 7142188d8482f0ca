# SPDX-License-Identifier: Apache-2.0

"""What tasks and the sidecar say to each other, as a dialect of the server."""

from __future__ import annotations

from functools import partial
from typing import cast, get_args

from protocol.describing import type_name
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import DEFAULT_LIMITS, WireLimits, decode_message, encode_message
from protocol.wire.messages import Message, UpMessage
from spark_bridge.server.connection import Dialect

__all__ = ["task_dialect"]

_UPWARD = frozenset(get_args(UpMessage))


def task_dialect(limits: WireLimits = DEFAULT_LIMITS) -> Dialect:
    """Messages of a task (``UpMessage``) in, messages to it (``Downward``) out, within these limits."""

    def decode(body: bytes | Message) -> Message:
        message = decode_message(body, limits) if type(body) is bytes else cast(Message, body)
        if type(message) not in _UPWARD:
            raise RemoteProtocolError(f"unexpected message: tasks do not send {type_name(message)}")
        return message

    return Dialect(decode, partial(encode_message, limits=limits), fragments=limits)
