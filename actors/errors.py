"""What can go wrong between actors, as exceptions.

Every error names actors by their path (a string), never by a live reference, so it can be logged, compared
and pickled. Each class passes all of its constructor arguments to ``Exception``, which is what makes pickling
work.
"""

from __future__ import annotations

from protocol.errors import HeadgateError


class ActorError(HeadgateError):
    """The base of every error that this package raises on its own account."""


class ActorStopped(ActorError):
    """The target is stopped, is stopping, or was restarted before it answered."""

    def __init__(self, actor: str, detail: str = "is stopped") -> None:
        super().__init__(actor, detail)
        self.actor = actor
        self.detail = detail

    def __str__(self) -> str:
        return f"actor {self.actor!r} {self.detail}"


class MailboxFull(ActorError):
    """The mailbox has no room, and its policy is not to make this caller wait."""

    def __init__(self, actor: str, capacity: int, detail: str = "") -> None:
        super().__init__(actor, capacity, detail)
        self.actor = actor
        self.capacity = capacity
        self.detail = detail

    def __str__(self) -> str:
        tail = f" ({self.detail})" if self.detail else ""
        return f"the mailbox of actor {self.actor!r} is full at {self.capacity} messages{tail}"


class AskTimeout(ActorError):
    """No answer came within the time that the caller gave. ``detail`` says why, where that is known."""

    def __init__(self, actor: str, message_type: str, timeout_s: float, detail: str = "") -> None:
        super().__init__(actor, message_type, timeout_s, detail)
        self.actor = actor
        self.message_type = message_type
        self.timeout_s = timeout_s
        self.detail = detail

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"actor {self.actor!r} did not answer {self.message_type} within {self.timeout_s} s{tail}"


class HandlerFailed(ActorError):
    """The handler of an asked message raised, and the actor went on without answering (it was resumed)."""

    def __init__(self, actor: str, message_type: str) -> None:
        super().__init__(actor, message_type)
        self.actor = actor
        self.message_type = message_type

    def __str__(self) -> str:
        return f"actor {self.actor!r} failed while it handled {self.message_type}"


class HandlerCancelled(ActorError):
    """A handler let a cancellation out that nobody asked of it: it awaited something that others
    cancelled."""

    def __init__(self, actor: str, what: str) -> None:
        super().__init__(actor, what)
        self.actor = actor
        self.what = what

    def __str__(self) -> str:
        return f"actor {self.actor!r}: {self.what} awaited something that was cancelled from outside"


class ExitRaised(HeadgateError, RuntimeError):
    """Code raised something that is not an ``Exception``, such as ``SystemExit``; that is the ``__cause__``.

    It would have ended the event loop or the task, so it fails only the call that raised it.
    """

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(what, detail)
        self.what = what
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what} {self.detail}"


class ActorCancelled(ActorError):
    """The actor was cut off in the middle: it did not stop within the deadline of a stop."""

    def __init__(self, actor: str) -> None:
        super().__init__(actor)
        self.actor = actor

    def __str__(self) -> str:
        return f"actor {self.actor!r} did not stop in time and was cancelled"


class NameTaken(ActorError):
    """A living sibling already has this name."""

    def __init__(self, actor: str) -> None:
        super().__init__(actor)
        self.actor = actor

    def __str__(self) -> str:
        return f"there is already an actor {self.actor!r}"


class SystemNotRunning(ActorError):
    """The actor system is not entered yet, is shutting down, or is gone."""

    def __init__(self, system: str, detail: str = "is not running") -> None:
        super().__init__(system, detail)
        self.system = system
        self.detail = detail

    def __str__(self) -> str:
        return f"actor system {self.system!r} {self.detail}"


class WouldDeadlock(ActorError):
    """The caller would wait for its own end."""

    def __init__(self, actor: str, what: str) -> None:
        super().__init__(actor, what)
        self.actor = actor
        self.what = what

    def __str__(self) -> str:
        return f"actor {self.actor!r} would wait for itself: {self.what}"
