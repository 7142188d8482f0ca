# SPDX-License-Identifier: Apache-2.0

"""Answers to requests that a coordinator gives later than from ``handle_request`` itself (H84).

A ``Reply`` is the user's half: it is settled once. A *recipient* is the other half: it knows who waits for the answer,
and whether somebody still does. ``OpenReplies`` has all that are open, so that those of an attempt that is over, or of
a coordinator that is reset or closed, end with it (H85).

The half of the user does not keep the request alive. If the user loses it, nobody can ever answer, so the request
fails.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic

from actors import Reply as AskReply
from actors.coordination.engine.gateway import attempt_keys
from actors.coordination.engine.messages import GatewayMessage, RequestDeferred
from actors.coordination.host.gateway import GatewayLine
from actors.coordination.host.incarnation import Sender
from actors.coordination.statistics import OperatorStatistics
from actors.coordination.user_calls import is_fatal, traceback_text, true_cause
from actors.exits import as_exception
from protocol.arguments import ANY, checked
from protocol.describing import describe, is_a
from protocol.errors import LocalProtocolError, RequestFailed
from protocol.event_types import Answered
from protocol.gateway.types import AnswerSubmitted
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import WireLimits, encode_argument

CANCELLED = "the task no longer waits for this answer"
"""The answer to a request that was cancelled. Nobody reads it."""


class Reply(Generic[Answered]):
    """The answer to a request, to be given later. Return it from ``handle_request`` or ``handle_client_request``.

    The coordinator's next method runs meanwhile, and the requester waits until ``answer`` or ``fail`` is called. The
    answer leaves at that moment, in order with what ``send_event`` sends to the same attempt. One that is given before
    the method returns the reply leaves with that return, like any other answer.

    Each reply belongs to one request, and is settled once. Use it on the event loop; another thread calls
    ``CoordinatorContext.call_soon_threadsafe`` first. Keep a reference: a reply that is garbage-collected before it is
    settled fails its request, and the log says so. No reply outlives its coordinator: after a reset or the end, open
    ones are over. They are in no checkpoint: a task that is restored asks again if it still needs the answer.

    A type checker knows what a ``Reply[Answer]`` is answered with.
    """

    __slots__ = ("__weakref__", "_early", "_recipient", "_settled", "_thread")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._recipient: Recipient | None = None
        self._early: Callable[[Recipient], None] | None = None  # settled before there was a recipient
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether ``answer`` or ``fail`` was called."""
        return self._settled

    @property
    def over(self) -> bool:
        """Whether nobody waits for the answer any more, so that settling has no effect.

        That is so when the attempt that asked is over, when the coordinator was reset or closed, for a request from a
        restored checkpoint, and when the timeout of the request has passed. A task reports that itself, so it is known
        here a moment later, between two methods of the coordinator.
        """
        return self._recipient is not None and self._recipient.over

    def answer(self, value: Answered = None) -> None:  # type: ignore[assignment]  # None is an answer, too
        """Answer the request. Has no effect if the reply is over.

        ``value`` is encoded immediately, as in ``send_event``. If that fails, the task gets ``RequestFailed`` and the
        job continues, as for a value that ``handle_request`` returns.

        Raises:
            LocalProtocolError: the reply is settled already, or the call comes from another thread.
        """
        self._settle(lambda recipient: recipient.answer(value))

    @checked(error=ANY)
    def fail(self, error: BaseException | str) -> None:
        """Fail the request. Has no effect if the reply is over.

        A task gets ``RequestFailed`` with the type and text of the exception, or with the text alone. The driver's own
        code gets the exception itself, or ``RequestFailed`` with the text.

        Raises:
            TypeError: ``error`` is neither an exception nor a text.
            LocalProtocolError: the reply is settled already, or the call comes from another thread.
        """
        self._settle(lambda recipient: recipient.fail(error))

    def _settle(self, act: Callable[[Recipient], None]) -> None:
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(
                f"a Reply was settled from thread {threading.current_thread().name!r}, but it belongs to the event "
                "loop: call context.call_soon_threadsafe(handler), and settle it in the handler"
            )
        if self._settled:
            raise LocalProtocolError(
                "this Reply is settled already, and a request has one answer: call answer() or fail() once"
            )
        self._settled = True
        if self._recipient is None:
            self._early = act
        elif not self._recipient.over:
            act(self._recipient)

    def _bind(self, recipient: Recipient) -> None:
        """The coordinator's method has returned this for its request. Raises ``LocalProtocolError`` the second time."""
        if self._recipient is not None:
            raise LocalProtocolError("this Reply belongs to an earlier request: make a Reply() for each request")
        self._thread = threading.get_ident()
        self._recipient = recipient
        if self._early is not None:
            act, self._early = self._early, None
            if not recipient.over:
                act(recipient)

    def __del__(self) -> None:
        if not self._settled and self._recipient is not None and not self._recipient.over:
            self._recipient.open_replies.hear_loss(self._recipient)

    def __repr__(self) -> str:
        state = "settled" if self._settled else "over" if self.over else "open"
        return f"<Reply {state}>"


class WaitingTask:
    """A task's attempt waits for the answer. A restored request has no ``request_id``: nobody waits (H73).

    ``part`` was asked.
    """

    __slots__ = ("_gateway_ref", "_part", "attempt", "open_replies", "over", "request_id")

    def __init__(
        self,
        open_replies: OpenReplies,
        attempt: ExecutionAttempt,
        gateway_ref: GatewayLine[GatewayMessage],
        request_id: int | None,
        part: Sender,
    ) -> None:
        self.attempt = attempt
        self.over = request_id is None
        self.open_replies = open_replies
        self._gateway_ref = gateway_ref
        self.request_id = request_id
        self._part = part

    def defer(self) -> None:
        """The answer comes later."""
        assert self.request_id is not None
        self._gateway_ref.tell_direct(RequestDeferred(self.request_id))

    def answer(self, value: Any) -> None:
        try:
            payload = encode_argument("the answer", value, self.open_replies.limits)
        except Exception as error:
            self.fail(error)
            if is_fatal(error):
                raise
        else:
            self._submit("", payload)

    def fail(self, error: BaseException | str) -> None:
        text, payload = describe_failure(error)
        self.open_replies.log_failure("request failed", text, error, attempt_keys(self.attempt))
        self._submit(text, payload)

    def _submit(self, error: str, payload: bytes) -> None:
        assert self.request_id is not None
        answer = AnswerSubmitted(self.request_id, error, payload)
        self._part.submit(partial(self._gateway_ref.tell_direct, answer))
        self.end()

    def cancel(self) -> None:
        """The task waits no longer. It still needs an answer, which gives the place of its request back (H85)."""
        self._submit(CANCELLED, b"")

    def end(self) -> None:
        """Nobody waits any more."""
        self.over = True
        self.open_replies.forget_task(self)


class WaitingClient:
    """The driver's own code waits for the answer."""

    __slots__ = ("_ended", "_reply_to", "open_replies")

    def __init__(self, open_replies: OpenReplies, reply_to: AskReply[Any]) -> None:
        self.open_replies = open_replies
        self._reply_to = reply_to
        self._ended = False

    @property
    def over(self) -> bool:
        return self._ended or not self._reply_to.open

    def answer(self, value: Any) -> None:
        self._reply_to.answer(value)
        self.end()

    def fail(self, error: BaseException | str) -> None:
        if not self.over:
            text, _ = describe_failure(error)
            self.open_replies.log_failure("client request failed", text, error, {})
            told = as_exception("Reply.fail", error) if is_a(error, BaseException) else RequestFailed(text)
            self._reply_to.fail(told)
        self.end()

    def end(self) -> None:
        self._ended = True
        self.open_replies.forget_client(self)


Recipient = WaitingTask | WaitingClient
"""Who waits for the answer to one request."""


class OpenReplies:
    """The replies of one coordinator that are not settled. Loop only, except ``hear_loss``.

    ``soon``: calls a handler on the event loop, between methods of the coordinator; any thread may call it.
    """

    def __init__(
        self,
        operator_id: str,
        log: Any,
        statistics: OperatorStatistics,
        soon: Callable[[Callable[[], Awaitable[None]]], None],
        limits: WireLimits,
    ) -> None:
        self.limits = limits
        self._operator_id = operator_id
        self._log = log
        self._statistics = statistics
        self._soon = soon
        self._tasks: dict[int, dict[int | None, WaitingTask]] = {}  # by task attempt id, in the order of their requests
        self._clients: dict[WaitingClient, None] = {}

    def take(self, reply: Reply, recipient: Recipient) -> None:
        """A method has returned ``reply`` for the request of ``recipient``. Raises ``LocalProtocolError``."""
        settled = reply.settled
        reply._bind(recipient)
        if not settled and not recipient.over:
            self._statistics.requests_deferred += 1
            self._statistics.replies_open += 1
            if isinstance(recipient, WaitingTask):
                self._tasks.setdefault(recipient.attempt.task_attempt_id, {})[recipient.request_id] = recipient
                recipient.defer()
            else:
                self._clients[recipient] = None

    def forget_task(self, recipient: WaitingTask) -> None:
        """Its request has its answer."""
        task_attempt_id = recipient.attempt.task_attempt_id
        of_attempt = self._tasks.get(task_attempt_id, {})
        if of_attempt.pop(recipient.request_id, None) is not None:
            self._statistics.replies_open -= 1
            if not of_attempt:
                del self._tasks[task_attempt_id]

    def cancel(self, attempt: ExecutionAttempt, request_id: int) -> None:
        """The task waits no more for this answer. Has no effect if the request has been answered."""
        recipient = self._tasks.get(attempt.task_attempt_id, {}).get(request_id)
        if recipient is not None:
            recipient.cancel()

    def forget_client(self, recipient: WaitingClient) -> None:
        """Its request has its answer."""
        if recipient in self._clients:
            del self._clients[recipient]
            self._statistics.replies_open -= 1

    def attempt_over(self, task_attempt_id: int) -> None:
        """Nobody waits any more for what this attempt has asked (H33, H85)."""
        for recipient in self._tasks.pop(task_attempt_id, {}).values():
            self._statistics.replies_open -= 1
            recipient.end()

    def attempts_over(self) -> None:
        """The same for all attempts."""
        for task_attempt_id in list(self._tasks):
            self.attempt_over(task_attempt_id)

    def coordinator_reset(self) -> None:
        """No attempt is left, and the coordinator forgets what the driver's own code has asked: that fails."""
        self.attempts_over()
        self._fail_all("was reset before it answered this request: ask again")

    def close(self) -> None:
        """The coordinator is closed: what is open fails."""
        self._fail_all("was closed before it answered this request: coordinate the operator again, then ask")

    def hear_loss(self, recipient: Recipient) -> None:
        """The user has lost the reply to this request. Any thread, also inside the garbage collector."""
        self._soon(partial(self._lose, recipient))

    def log_failure(self, what: str, text: str, error: BaseException | str, keys: dict[str, Any]) -> None:
        self._log.warning(what, **keys, error=text, exc_info=error if is_a(error, BaseException) else None)

    async def _lose(self, recipient: Recipient) -> None:
        if not recipient.over:
            recipient.fail(
                f"the coordinator of operator {self._operator_id!r} has lost the Reply to this request: keep a "
                "reference to it until it is settled"
            )

    def _fail_all(self, what: str) -> None:
        tasks = [one for of_attempt in self._tasks.values() for one in of_attempt.values()]
        recipients: list[Recipient] = [*self._clients, *tasks]
        for recipient in recipients:
            recipient.fail(f"the coordinator of operator {self._operator_id!r} {what}")
            recipient.end()


def describe_failure(error: BaseException | str) -> tuple[str, bytes]:
    """The text that a task gets for a failed request, which is never empty, and the traceback if there is one."""
    if is_a(error, BaseException):
        return describe(true_cause(error)), traceback_text(error).encode()
    return str(error) or "the coordinator failed this request without a text", b""
