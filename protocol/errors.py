"""Errors of the protocol.

Two families, after h11: a *local* error is our caller's fault, a *remote* error is the peer's. A remote error
closes one connection or fails one attempt; it never harms anybody else (H62).
"""

from __future__ import annotations


class HeadgateError(Exception):
    """Base of all errors of Headgate. Wrong arguments raise ``TypeError`` or ``ValueError`` instead."""


class ProtocolError(HeadgateError):
    """Base of what goes wrong between a task and its coordinator."""


class LocalProtocolError(ProtocolError):
    """The caller asked for something that the protocol does not allow; nothing was changed."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow; its connection is to be closed."""


class EventEncodeError(LocalProtocolError):
    """An event is no value that msgpack can carry, or is larger than a bound (H21, H62)."""


class GatewayFull(LocalProtocolError):
    """The bound on held and unconfirmed events is reached (H27)."""


class VersionMismatch(RemoteProtocolError):
    """The two ends speak different protocol versions (H60)."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return (
            f"protocol version {self.ours} here, {self.theirs} at the peer: "
            "install the same release of headgate on the driver and on every executor"
        )


class HandshakeFailed(RemoteProtocolError):
    """The peer did not prove that it knows the secret (H61)."""


class AttemptOver(ProtocolError):
    """The execution attempt that this event was meant for, or came from, is over (H26)."""


class ConfirmationTimeout(AttemptOver):
    """No confirmation within ``confirm_timeout_s``.

    The attempt was failed for it (H25), unless the event was loss-tolerant: then nothing was failed, and the event may
    still arrive (H72).
    """


class CheckpointCorrupt(ProtocolError):
    """These bytes are no whole checkpoint; the message says what is wrong with them (H50)."""


class CheckpointTooNew(CheckpointCorrupt):
    """A whole checkpoint, but of a format that this release does not know (H50)."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return (
            f"checkpoint format {self.theirs}, and this release reads {self.ours}: "
            "restore it with the release of headgate that wrote it, or a later one"
        )
