# SPDX-License-Identifier: Apache-2.0

"""Several coordinators of one operator: the parts of a chain (H80).

To the protocol a chain is one operator with one coordinator. The ``CoordinatorChain`` is that coordinator. Its *main*
coordinator is the user's; the other parts have names, and their events travel as ``PartEvent``. Each part has its
own context, gateways and state. A call that concerns the whole operator reaches the parts in a fixed order: those with
names in the order in which they were given, then the main one. So what a part sends in ``subtask_ready`` is there when
the main coordinator's values arrive. ``close`` has the reverse order.

The state of a chain whose named parts have none is the state of its main coordinator, byte for byte. So the checkpoints
of an operator that gets its first part can still be read.

The operator may also consist of *stages* that feed each other in its tasks: ``headgate.chain``. Each stage is a named
part with a coordinator of the user's. They stand after the ready-made parts, in the order in which data flows, and the
main coordinator is a ``NoMainCoordinator``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

from actors.coordination.confirmation import Confirmation
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.live_gateways import LiveGateways
from actors.coordination.parts_cut import PartsCut
from actors.coordination.turns import in_turns
from actors.coordination.user_calls import call_each
from actors.coordination.wrapped_gateway import WrappedGateway
from protocol.attempts import FailureReason
from protocol.describing import is_a, type_name
from protocol.errors import LocalProtocolError
from protocol.parts import ONE_PART, PartTable, join_states_in_steps, split_states_in_steps
from protocol.wire.extension_types import PartEvent
from protocol.wire.messages import OperatorPart

__all__ = ["CoordinatorChain", "NoMainCoordinator", "cut_of", "main_of", "table_of", "users_coordinators"]


class CoordinatorChain(OperatorCoordinator):
    """The coordinator of an operator that has named parts; see the module.

    ``main`` is the user's coordinator, ``parts`` maps names to the others. ``stages`` has the names of the stages.
    """

    def __init__(
        self,
        main: OperatorCoordinator,
        parts: Mapping[str, OperatorCoordinator],
        stages: Collection[str] = (),
        outside: Collection[str] = (),
    ) -> None:
        self.main = main
        self.stages = tuple(stages)
        self.outside = frozenset(outside)
        self.cut = PartsCut()
        self._parts = dict(parts)
        self._unclosed = list(self._all())

    @property
    def coordinators(self) -> tuple[OperatorCoordinator, ...]:
        """All of them, the main one first."""
        return self.main, *self._parts.values()

    @property
    def parts(self) -> Mapping[str, OperatorCoordinator]:
        """Those with names, in their order."""
        return self._parts

    def _all(self) -> Iterator[tuple[str, OperatorCoordinator]]:
        yield from self._parts.items()
        yield "", self.main

    def _part(self, name: str) -> OperatorCoordinator:
        part = self._parts.get(name)
        if part is None:
            raise LocalProtocolError(
                f"something was sent to the part {name!r}, which this operator does not have: pass it to "
                "coordinate(..., uses=[...]), or to chain(...) if it is a stage"
            )
        return part

    async def start(self, context: CoordinatorContext) -> None:
        for name, part in self._all():
            with _Named(name):
                await part.start(cast("CoordinatorContext", PartContext(context, name)) if name else context)

    async def close(self) -> None:
        await call_each("close", map(self._closing, self._unclosed_parts()))

    def _unclosed_parts(self) -> Iterator[tuple[str, OperatorCoordinator]]:
        while self._unclosed:
            yield self._unclosed.pop()

    @staticmethod
    def _closing(named: tuple[str, OperatorCoordinator]) -> Callable[[], Awaitable[None]]:
        name, part = named

        async def close() -> None:
            with _Named(name):
                await part.close()

        return close

    # --- what concerns one part -----------------------------------------------------------------------------------

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if type(event) is PartEvent:
            with _Named(event.name):
                await self._part(event.name).handle_event_from_operator(subtask, attempt, event.event)
        else:
            await self.main.handle_event_from_operator(subtask, attempt, event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if type(request) is PartEvent:
            return await self._part(request.name).handle_request(subtask, attempt, request.event)
        return await self.main.handle_request(subtask, attempt, request)

    async def handle_client_request(self, request: Any) -> Any:
        if type(request) is PartEvent:
            part = self._part(request.name)
            answers_none = type(part).handle_client_request is OperatorCoordinator.handle_client_request
            if answers_none and request.name not in self.stages:
                raise LocalProtocolError(
                    f"the driver cannot ask the part {request.name!r}: request(..., part=...) names a stage of a "
                    "chain; leave it out to ask the operator's own coordinator"
                )
            return await part.handle_client_request(request.event)
        return await self.main.handle_client_request(request)

    # --- what concerns all of them --------------------------------------------------------------------------------

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        for name, part in self._all():
            with _Named(name):
                await part.subtask_ready(subtask, PartGateway(gateway, name) if name else gateway)

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        await self._each(lambda part: part.subtask_suspected(subtask, attempt, reason))

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        await self._each(lambda part: part.subtask_responsive(subtask, attempt))

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await self._each(lambda part: part.subtask_failed(subtask, attempt, reason))

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        await self._each(lambda part: part.subtask_finished(subtask, attempt))

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await self._each(lambda part: part.subtask_reset(subtask, checkpoint_id))

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await self._each(lambda part: part.notify_checkpoint_complete(checkpoint_id))

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        await self._each(lambda part: part.notify_checkpoint_aborted(checkpoint_id))

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await self._each(lambda part: part.notify_checkpoint_discarded(checkpoint_id))

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await self._each(lambda part: part.run_ended(run_id, succeeded, reason))

    async def _each(self, call: Callable[[OperatorCoordinator], Awaitable[None]]) -> None:
        for name, part in self._all():
            with _Named(name):
                await call(part)

    # --- state ----------------------------------------------------------------------------------------------------

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        states: dict[str, bytes] = {}
        for name, part in self._all():
            with _Named(name):
                state = await part.checkpoint_coordinator(checkpoint_id)
                if not isinstance(state, bytes | bytearray | memoryview):
                    raise TypeError(
                        f"checkpoint_coordinator{f' of {name!r}' if name else ''} returned {type_name(state)}, not "
                        "bytes; return b'' for no state"
                    )
                states[name] = bytes(state)
                self.cut.snapshot_taken(name)
        return await in_turns(join_states_in_steps(states.pop(""), states, self.stages))

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        main: bytes | None = None
        states: dict[str, bytes] = {}
        if state is not None:
            main, states = await in_turns(split_states_in_steps(state, self._parts))
        for name, part in self._all():
            with _Named(name):
                await part.reset_to_checkpoint(checkpoint_id, states.get(name) if name else main)


class NoMainCoordinator(OperatorCoordinator):
    """The main coordinator of an operator that consists of stages: nothing is meant for it."""

    def __init__(self, stages: Collection[str]) -> None:
        self._stages = tuple(stages)

    async def handle_client_request(self, request: Any) -> Any:
        known = ", ".join(map(repr, self._stages))
        raise LocalProtocolError(
            f"this operator is a chain, so a request needs the name of a stage: request(..., part=...), one of {known}"
        )

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state:
            raise LocalProtocolError(
                "the checkpoint is that of an operator that was not a chain: coordinate the chain under another name, "
                'or start without the checkpoint (restore="none")'
            )


def main_of(coordinator: OperatorCoordinator) -> OperatorCoordinator:
    """The user's own coordinator: the main one of a chain."""
    return coordinator.main if isinstance(coordinator, CoordinatorChain) else coordinator


def cut_of(coordinator: OperatorCoordinator) -> PartsCut:
    """What holds the events of the parts of a chain. That of any other coordinator stays empty."""
    return coordinator.cut if isinstance(coordinator, CoordinatorChain) else PartsCut()


def table_of(coordinator: OperatorCoordinator) -> PartTable:
    """The operator's parts."""
    if not isinstance(coordinator, CoordinatorChain):
        return ONE_PART
    parts = [OperatorPart(name, name in coordinator.outside) for name in ("", *coordinator.parts)]
    return PartTable(parts, coordinator.stages)


def users_coordinators(coordinator: OperatorCoordinator) -> dict[str, OperatorCoordinator]:
    """The user's own coordinators by stage: those of the stages, or the main one, whose name is empty."""
    if isinstance(coordinator, CoordinatorChain) and coordinator.stages:
        return {name: coordinator.parts[name] for name in coordinator.stages}
    return {"": main_of(coordinator)}


class PartContext:
    """A named part's ``CoordinatorContext``: the operator's, with the part's name in the log."""

    def __init__(self, context: CoordinatorContext, name: str) -> None:
        self._context = context
        self._name = name
        self.log = context.log.bind(part=name)

    @cached_property
    def gateways(self) -> LiveGateways:
        name = self._name
        return self._context.gateways.seen_by(
            lambda gateway: PartGateway(gateway, name), wrap=lambda event: PartEvent(name, event)
        )

    @property
    def handles_restored(self) -> bool:
        return self._context.handles_restored_by(self._name)  # type: ignore[attr-defined,no-any-return]

    def events_taken(self, subtask: int) -> int:
        return self._context.events_taken_by(subtask, self._name)  # type: ignore[attr-defined,no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class PartGateway(WrappedGateway):
    """A named part's ``SubtaskGateway``: what it sends reaches the part of the same name in the task."""

    __slots__ = ("_name",)

    def __init__(self, gateway: SubtaskGateway, name: str) -> None:
        super().__init__(gateway)
        self._name = name

    def __repr__(self) -> str:
        return f"<part {self._name!r} of {self._gateway!r}>"

    def send_event(
        self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False
    ) -> Coroutine[Any, Any, Confirmation]:
        return self._gateway.send_event(PartEvent(self._name, event), loss_tolerant=loss_tolerant, urgent=urgent)

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        return self._gateway.send_event_nowait(PartEvent(self._name, event), loss_tolerant=loss_tolerant, urgent=urgent)


class _Named:
    """Say in a failure which part it comes from. A generator would take three times as long for each call."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._name and is_a(error, Exception):
            error.add_note(f"in the part {self._name!r} of the operator")
