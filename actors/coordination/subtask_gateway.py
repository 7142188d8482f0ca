# SPDX-License-Identifier: Apache-2.0

"""The interface of a gateway: a coordinator's way to one execution attempt."""

from __future__ import annotations

from typing import Protocol

from actors.coordination.confirmation import Confirmation
from protocol.event_types import Sent_contra
from protocol.ids import ExecutionAttempt

__all__ = ["SubtaskGateway"]


class SubtaskGateway(Protocol[Sent_contra]):
    """The way to one execution attempt. It never points to a later attempt.

    Use it on the event loop only. Another thread calls ``CoordinatorContext.call_soon_threadsafe`` first. The events of
    one gateway arrive in the order in which they were sent, each once. Inside ``subtask_failed`` and later the attempt
    is over, and whatever is sent fails immediately with ``AttemptOver``.
    """

    # H14, H20, H22, H26

    @property
    def attempt(self) -> ExecutionAttempt:
        """The attempt that this gateway leads to."""
        ...

    @property
    def events_pending(self) -> int:
        """How many events were sent and neither confirmed nor failed. The gateway's limits bound this number."""
        ...

    @property
    def bytes_pending(self) -> int:
        """The size of these events' payloads in bytes."""
        ...

    async def send_event(
        self, event: Sent_contra, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Confirmation:
        """Send an event, after waiting for capacity if the gateway's limits are reached, and return its confirmation.

        The event is encoded immediately, so later changes to it have no effect. Awaiting the *confirmation* waits until
        the event is in the operator's mailbox, or raises ``AttemptOver``.

        A call that is never awaited sends nothing; a warning in the log names the place. A call that is cancelled while
        it waits for capacity sends nothing either.

        Args:
            event: a value of a type that events can have; ``event`` registers your own classes.
            loss_tolerant: the event may be lost. A missing confirmation then fails no attempt, and no checkpoint waits
                for it. After ``confirm_timeout_s``, awaiting the confirmation raises ``ConfirmationTimeout``, although
                the event may still arrive.
            urgent: call the operator's ``handle_urgent`` as soon as the event arrives, on a separate thread, while the
                task computes or blocks in foreign code. Urgent events keep their order, and overtake only ordinary
                events that the operator has not handled yet. An operator without ``handle_urgent`` gets them as
                ordinary events. Checkpoints include and hold them like any other event.

        Raises:
            EventEncodeError: a value in the event is of a type that events cannot have, or it is too large.
            LocalProtocolError: the call comes from another thread.
        """
        # H21, H23, H27, H28, H90. The state of the attempt raises nothing here: it shows in the confirmation.
        ...

    def send_event_nowait(
        self, event: Sent_contra, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Confirmation:
        """Send an event as ``send_event`` does, but raise ``GatewayFull`` instead of waiting for capacity."""
        ...
