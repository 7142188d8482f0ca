# SPDX-License-Identifier: Apache-2.0

"""The exceptions of the actor runtime.

Every error names actors by their path, a string, and holds no live reference. So it can be logged, compared and
pickled. Each class passes all its constructor arguments to ``Exception``, which makes pickling work.
"""

from __future__ import annotations

from protocol.errors import HeadgateError


class ActorError(HeadgateError):
    """The base class of the errors that the actor runtime itself raises, except ``ExitRaised``.

    Each of them says what to do.
    """


class ActorStopped(ActorError):
    """The actor has stopped, is stopping, or restarted before it answered. If it restarted, ask again."""

    def __init__(self, actor: str, detail: str = "is stopped") -> None:
        super().__init__(actor, detail)
        self.actor = actor
        self.detail = detail

    def __str__(self) -> str:
        return f"actor {self.actor!r} {self.detail}"


class MailboxFull(ActorError):
    """The mailbox is full, and its policy or the call does not allow waiting.

    Send later, or give the actor another policy or a larger mailbox.
    """

    def __init__(self, actor: str, capacity: int, detail: str = "") -> None:
        super().__init__(actor, capacity, detail)
        self.actor = actor
        self.capacity = capacity
        self.detail = detail

    def __str__(self) -> str:
        tail = f" ({self.detail})" if self.detail else ""
        return f"the mailbox of actor {self.actor!r} is full at {self.capacity} messages{tail}"


class AskTimeout(ActorError):
    """No answer came within the caller's ``timeout_s``. ``detail`` says why, if that is known.

    Ask again, or allow more time.
    """

    def __init__(self, actor: str, message_type: str, timeout_s: float, detail: str = "") -> None:
        super().__init__(actor, message_type, timeout_s, detail)
        self.actor = actor
        self.message_type = message_type
        self.timeout_s = timeout_s
        self.detail = detail

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return (
            f"actor {self.actor!r} did not answer {self.message_type} within {self.timeout_s} s{tail}. "
            "Raise timeout_s, or have it answer sooner"
        )


class HandlerFailed(ActorError):
    """The handler of an asked message raised before it answered; the exception is the ``__cause__``.

    Correct the handler.
    """

    def __init__(self, actor: str, message_type: str) -> None:
        super().__init__(actor, message_type)
        self.actor = actor
        self.message_type = message_type

    def __str__(self) -> str:
        return (
            f"actor {self.actor!r} failed while it handled {self.message_type}: correct what its handler raised, which "
            "is the cause of this error"
        )


class HandlerCancelled(ActorError):
    """A handler awaited something that others cancelled, and let that cancellation out.

    Catch the cancellation in the handler.
    """

    def __init__(self, actor: str, what: str) -> None:
        super().__init__(actor, what)
        self.actor = actor
        self.what = what

    def __str__(self) -> str:
        return (
            f"actor {self.actor!r}: {self.what} awaited something that was cancelled from outside: catch "
            "asyncio.CancelledError around that await, or do not cancel it"
        )


class ScopeLeftOpen(ActorError):
    """The actor's code entered a cancel scope or a task group of anyio and never left it; what anyio says is chained.

    The usual reason is an async generator that yields inside of one, and is not read to its end. Close such a generator
    with ``contextlib.aclosing``.
    """

    def __init__(self, actor: str) -> None:
        super().__init__(actor)
        self.actor = actor

    def __str__(self) -> str:
        return (
            f"actor {self.actor!r} entered a cancel scope or a task group and did not leave it: an async generator "
            "must not yield inside of one, unless it is closed in the same handler (contextlib.aclosing)"
        )


class ExitRaised(HeadgateError, RuntimeError):
    """Code raised something that is not an ``Exception``, such as ``SystemExit``; that is the ``__cause__``.

    That would have ended the event loop or the task. As this error, it only fails the call that raised it. Raise an
    ordinary exception instead.
    """

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(what, detail)
        self.what = what
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what} {self.detail}"


class ActorCancelled(ActorError):
    """The actor did not stop within the deadline of a stop, and was cancelled. Let its handlers return sooner."""

    def __init__(self, actor: str) -> None:
        super().__init__(actor)
        self.actor = actor

    def __str__(self) -> str:
        return (
            f"actor {self.actor!r} did not stop in time and was cancelled: let its handlers end sooner, or raise "
            "shutdown_timeout_s"
        )


class NameTaken(ActorError):
    """A living sibling already has this name. Choose another name, or stop that one first."""

    def __init__(self, actor: str) -> None:
        super().__init__(actor)
        self.actor = actor

    def __str__(self) -> str:
        return f"there is already an actor {self.actor!r}: choose another name, or stop that one first"


class SystemNotRunning(ActorError):
    """The actor system has not been entered, is shutting down, or has ended.

    Use it inside its ``async with`` block.
    """

    def __init__(
        self, system: str, detail: str = "is not running: enter it with `async with`, and use it inside the block"
    ) -> None:
        super().__init__(system, detail)
        self.system = system
        self.detail = detail

    def __str__(self) -> str:
        return f"actor system {self.system!r} {self.detail}"


class WouldDeadlock(ActorError):
    """The caller would wait for its own end. Wait for it in another task."""

    def __init__(self, actor: str, what: str) -> None:
        super().__init__(actor, what)
        self.actor = actor
        self.what = what

    def __str__(self) -> str:
        return f"actor {self.actor!r} would wait for itself: {self.what}"
