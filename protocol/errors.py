# SPDX-License-Identifier: Apache-2.0

"""Errors of the protocol.

There are two families, as in h11: a *local* error is the caller's fault, a *remote* error is the peer's. A remote error
closes one connection or fails one attempt, and affects nothing else (H62).
"""

from __future__ import annotations

from protocol.describing import lines

SAME_RELEASE = "use the same release of Headgate on the driver and on every executor"
"""What to do about a message that this end does not know."""


class HeadgateError(Exception):
    """Base of all errors of Headgate. Wrong arguments raise ``TypeError`` or ``ValueError`` instead."""


class ProtocolError(HeadgateError):
    """Base of the errors between a task and its coordinator."""


class LocalProtocolError(ProtocolError):
    """The caller did something that the protocol does not allow. Nothing was changed.

    Correct the call, as the text says.
    """


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow. Its connection is closed.

    Install the same release at both ends; if that is so, report it with the log.
    """


class EventEncodeError(LocalProtocolError):
    """A value in the event is of a type that events cannot have, or it exceeds a limit. Nothing was sent.

    The text names the place, or the limit and what to do about it.
    """


class GatewayFull(LocalProtocolError):
    """There is no capacity for the event: too many are held back or unconfirmed. Nothing was sent; try again later."""


class VersionMismatch(RemoteProtocolError):
    """Driver and executor run releases with different protocol versions. Install the same release at both ends."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return f"protocol version {self.ours} here, {self.theirs} at the peer: {SAME_RELEASE}"


class HandshakeFailed(RemoteProtocolError):
    """The peer did not prove that it knows the secret. Give both ends the same secret."""


class AttemptOver(ProtocolError):
    """The task attempt that an event was for, or came from, is over.

    If the call that sends raises it, the event was not sent. If a ``Confirmation`` does, the event had left, and its
    receiver may or may not have handled it. Nothing has to be done: the next attempt begins at its restore point.
    """


class ConfirmationTimeout(AttemptOver):
    """The task did not confirm the event within ``confirm_timeout_s``.

    The attempt was failed for that, unless the event was loss-tolerant: then nothing failed, and the event may still
    arrive. If native code held the interpreter lock for so long, raise ``GatewayLimits.confirm_timeout_s``.
    """


class RequestFailed(ProtocolError):
    """The coordinator answered a request with an error; the text is the coordinator's.

    In a task, if ``handle_request`` raised, ``__cause__`` is a ``CoordinatorTraceback``. Both escape what a terminal
    would obey. Correct the method that it names.
    """

    def __init__(self, text: str) -> None:
        super().__init__(lines(text))


class NoRestart(HeadgateError):
    """Each further run would fail in the same way, until somebody changes something: none is tried."""


class RunRefused(HeadgateError):
    """A run may not begin, and another try would be refused in the same way. The text says what to do first."""


class InputRefused(RunRefused):
    """It is not known which records of a run the restored checkpoint has: the text says what to do."""


class CheckpointCorrupt(ProtocolError):
    """The bytes are not a complete checkpoint. The message says what is wrong. Restore another one."""


class CheckpointTooNew(CheckpointCorrupt):
    """A complete checkpoint in a format that this release does not know.

    Use the release that wrote it, or a later one.
    """

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return (
            f"checkpoint format {self.theirs}, and this release reads {self.ours}: "
            "restore it with the release of Headgate that wrote it, or a later one"
        )
