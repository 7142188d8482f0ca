# SPDX-License-Identifier: Apache-2.0

"""A coordinator that records its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeAlias, cast

from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from protocol.arguments import checked
from protocol.attempts import FailureReason

Call: TypeAlias = tuple[Any, ...]
Method: TypeAlias = Callable[..., Awaitable[Any]]


class RecordingCoordinator(OperatorCoordinator):
    """Records each call as ``(method, *arguments)``, for tests of operators and of code around a coordinator.

    ``methods`` are async functions by the name of a method. Each is called with that method's arguments after the call
    was recorded, and its result is returned. Without one, a snapshot is ``b"state"`` and requests are refused.

    In the record, the gateway of ``subtask_ready`` is replaced by its attempt number, the reason of ``subtask_failed``
    by its kind, and the reason of ``subtask_suspected`` and the context of ``start`` are left out.
    """

    def __init__(self, **methods: Method) -> None:
        self.calls: list[Call] = []
        """All calls, in order."""
        self.methods: dict[str, Method] = dict(methods)
        self.gateways: dict[int, SubtaskGateway] = {}
        """The gateway of each subtask's latest attempt that became ready."""
        self.context: CoordinatorContext
        """The context that ``start`` received."""

    @checked()
    def calls_of(self, *names: str) -> list[Call]:
        """The recorded calls of these methods, in order."""
        return [call for call in self.calls if call[0] in names]

    @property
    def events(self) -> list[Any]:
        """The events that were handled, in order."""
        return [call[3] for call in self.calls_of("handle_event_from_operator")]

    async def _called(self, method: str, *args: Any, noted: Call = ()) -> Any:
        self.calls.append((method, *(noted or args)))
        function = self.methods.get(method)
        return None if function is None else await function(*args)

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        self.calls.append(("start",))
        if "start" in self.methods:
            await self.methods["start"](context)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if "handle_request" not in self.methods:
            return await super().handle_request(subtask, attempt, request)
        return await self._called("handle_request", subtask, attempt, request)

    async def handle_client_request(self, request: Any) -> Any:
        if "handle_client_request" not in self.methods:
            return await super().handle_client_request(request)
        return await self._called("handle_client_request", request)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway
        await self._called("subtask_ready", subtask, gateway, noted=(subtask, gateway.attempt.attempt))

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        await self._called("subtask_suspected", subtask, attempt, reason, noted=(subtask, attempt))

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await self._called("subtask_failed", subtask, attempt, reason, noted=(subtask, attempt, reason.kind))

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        state = await self._called("checkpoint_coordinator", checkpoint_id)
        return cast("bytes", state) if "checkpoint_coordinator" in self.methods else b"state"


def _recorded(name: str) -> Method:
    async def method(self: RecordingCoordinator, *args: Any) -> Any:
        return await self._called(name, *args)

    return wraps(getattr(OperatorCoordinator, name))(method)


# The methods of which every argument is recorded: all others of the interface, so also one that is added to it.
for _name, _method in vars(OperatorCoordinator).items():
    if isinstance(_method, FunctionType) and _name not in vars(RecordingCoordinator):
        setattr(RecordingCoordinator, _name, _recorded(_name))
