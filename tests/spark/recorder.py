# SPDX-License-Identifier: Apache-2.0

"""A coordinator that records its calls in order, and lets a test wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from actors.coordination import Confirmation, CoordinatorContext, OperatorCoordinator, SubtaskGateway
from protocol.attempts import FailureReason

WAIT_S = 300.0

Callback = tuple[Any, ...]


class Recorder(OperatorCoordinator):
    """Records its calls in ``story``, such as ``("ready", subtask, attempt)``. ``wait_for`` is for any thread."""

    def __init__(self) -> None:
        self.story: list[Callback] = []
        self.reasons: list[FailureReason] = []
        self.gateways: dict[int, SubtaskGateway] = {}
        self.confirmations: list[Confirmation] = []
        self.context: CoordinatorContext
        self._changed = threading.Condition()

    def record(self, *callback: Any) -> None:
        with self._changed:
            self.story.append(callback)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[Callback]], bool], timeout_s: float = WAIT_S) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.story), timeout_s):
                so_far = f"the story so far: {self.story}; failures: {self.reasons}"
                raise AssertionError(f"did not happen within {timeout_s:g} s; {so_far}")

    def of_subtask(self, subtask: int, *names: str) -> list[Callback]:
        """The lifecycle of one subtask; events only on request."""
        wanted = names or ("ready", "failed", "reset")
        return [callback for callback in self.story if callback[0] in wanted and callback[1] == subtask]

    def named(self, *names: str) -> list[Callback]:
        return [callback for callback in self.story if callback[0] in names]

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        self.record("start")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.record("event", subtask, attempt, event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        self.record("request", subtask, attempt, request)
        return [request, "answered"]

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway
        self.record("ready", subtask, gateway.attempt.attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.reasons.append(reason)
        self.record("failed", subtask, attempt, reason.kind.name)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.record("reset", subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.record("checkpoint", checkpoint_id)
        return b"state"

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.record("complete", checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.record("aborted", checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.record("reset_to_checkpoint", checkpoint_id, state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.record("run_ended", succeeded)

    async def close(self) -> None:
        self.record("close")
