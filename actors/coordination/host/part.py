# SPDX-License-Identifier: Apache-2.0

"""The parts of an operator on the driver, and the coordinator that each of them has now (H80, R101).

To Spark and to checkpoints, an operator is one thing. It consists of *parts*: the user's own, whose index is 0, and
others with names, which are ready-made or the stages of a chain. Each has a coordinator, which has its own context,
gateways and state. What concerns the whole operator reaches the parts in a fixed order: those with names in the order
in which they were given, then the user's own. So what a named part sends in ``subtask_ready`` is there when the values
of the user's own arrive. ``close`` has the reverse order.

A coordinator was given as an instance, which stays, or with ``RecreateOnReset``. Then it has *incarnations*, and a
reset has three steps. ``reset_to_checkpoint`` waits only for the first:

1. The next incarnation takes the place of the old one, which cannot act from here on (G16; see
   ``actors.coordination.host.incarnation``).
2. The old one is closed, concurrently with everything else, after its current call has ended.
3. The new one is created, reset to the checkpoint, and started, in this order.

All calls of the part after a reset wait for the new incarnation and then reach it in order. Each call is awaited before
the next (H5), so no call is in progress at a reset. If a second reset comes before the new incarnation is created, it
is created for the second one. If the new incarnation is already starting, it is fenced, and closed after its start has
ended.

Every incarnation that was created is closed once, whenever the resets and the end of the operator come.

A close that raises is logged. One that takes longer than ``close_timeout_s`` is logged and cancelled. Flink fails the
job in both cases (R104), because its old coordinator can still act. Here it is fenced, so the job continues. If the new
one cannot be created, reset or started, every call until the next reset raises that failure. If there is no call, a
handler raises it. So it is a global failure (H7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Generic

import anyio

from actors.coordination.host.context import Context, Host
from actors.coordination.host.incarnation import Incarnation, Sender
from actors.coordination.interface import OperatorCoordinator
from actors.coordination.store import CoordinatorStore
from actors.coordination.user_calls import call_user
from protocol.arguments import checked
from protocol.describing import name_of
from protocol.errors import LocalProtocolError
from protocol.event_types import Received, Sent
from protocol.parts import PartTable
from protocol.wire.messages import OperatorPart

__all__ = ["Part", "Parts", "RecreateOnReset", "parts_of"]


class RecreateOnReset(Generic[Received, Sent]):
    """A coordinator for ``coordinate`` that is built anew at each reset.

    ``coordinate`` does this by itself if it is given a class or a factory. Use this class to set ``close_timeout_s``.

    Each coordinator gets ``reset_to_checkpoint`` at most once, before its ``start``. So it begins its work in
    ``start``. Gateways are not carried over: every subtask becomes ready again after a reset. A coordinator that was
    replaced has no effect any more: what it sends fails, and its writes to the shared store raise.

    Args:
        factory: makes a coordinator, on the event loop. It must return a new one each time and must not block.
        close_timeout_s: how many seconds the next coordinator waits until the one before is closed. Then that ``close``
            is cancelled, with an error in the log, and the job continues.
        name: the coordinator's name in logs; by default the factory's.
    """

    @checked()
    def __init__(
        self,
        factory: Callable[[], OperatorCoordinator[Received, Sent]],
        *,
        close_timeout_s: float = 60.0,
        name: str | None = None,
    ) -> None:
        self.factory = factory
        self.close_timeout_s = close_timeout_s
        self.name = name or name_of(factory)

    def __repr__(self) -> str:
        return f"<RecreateOnReset {self.name}>"


Kept = OperatorCoordinator | RecreateOnReset
"""How a part is given: an instance stays over resets, the other is built anew."""


class _Life(Incarnation):
    """One of the user's coordinators, from before its creation until after its end."""

    def __init__(self, part: Sender, number: int, coordinator: OperatorCoordinator | None = None) -> None:
        super().__init__(part, number)
        self.coordinator = coordinator
        self.live: OperatorCoordinator | None = None
        """The coordinator while it takes calls: from after its start until its end."""
        self.restore: tuple[int, bytes | None] | None = None
        self.store: CoordinatorStore | None = None
        self.ended = anyio.Event()  # closed, or given up

    @cached_property
    def beginning(self) -> anyio.CancelScope:  # made on the loop: the coordinator may come from any thread
        return anyio.CancelScope()

    @property
    def awaited(self) -> bool:
        """The coordinator is not created yet."""
        return self.coordinator is None and not self.begun.is_set()

    def end(self) -> None:
        """From here on, the incarnation's actions have no effect."""
        if self.part.acting == self.number:
            self.part.acting = 0
        self.live = None
        self.cancel_guarded()
        if self.store is not None:
            self.store.revoke()
        self.ended.set()


class Part(Sender):
    """One part of an operator, for the life of the operator. Loop only, except ``coordinator``.

    ``is_stage``: whether it is a stage of a chain, so its coordinator is the user's. ``outside``: whether its messages
    are outside of checkpoints (H152).
    """

    __slots__ = ("_closed", "_current", "_host", "_recreate", "_unclosed", "is_stage", "outside")

    def __init__(self, name: str, index: int, given: Kept, *, is_stage: bool = False, outside: bool = False) -> None:
        super().__init__(name, index)
        self.is_stage = is_stage
        self.outside = outside
        self._host: Host | None = None
        self._closed = False
        self._recreate = given if isinstance(given, RecreateOnReset) else None
        self._current = _Life(self, 1, given if isinstance(given, OperatorCoordinator) else None)
        # Created, and their ``close`` was not called yet; the oldest first.
        self._unclosed = [] if self._current.coordinator is None else [self._current]

    # --- calls ----------------------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> OperatorCoordinator | None:
        """The coordinator that takes the calls now; None before it is created."""
        return self._current.coordinator

    @property
    def current(self) -> Incarnation:
        """Who takes the calls now."""
        return self._current

    @property
    def kind(self) -> str:
        """The name of the coordinator's class, or of the factory that has not made it yet."""
        coordinator = self.coordinator
        return self._name if coordinator is None else type(coordinator).__qualname__

    @property
    def _name(self) -> str:
        return type(self._current.coordinator).__qualname__ if self._recreate is None else self._recreate.name

    def overrides(self, method: str) -> bool:
        """Whether the coordinator has its own method of this name. One that is not created yet may have it."""
        coordinator = self.coordinator
        if coordinator is None:
            return True
        return getattr(getattr(coordinator, method), "__func__", None) is not getattr(OperatorCoordinator, method)

    @property
    def is_live(self) -> bool:
        """Whether its coordinator, or the incarnation that is the current one, has started."""
        return self._current.live is not None

    @property
    def is_built_anew(self) -> bool:
        """Whether each reset has a new coordinator."""
        return self._recreate is not None

    def method(self, name: str) -> Callable[..., Awaitable[Any]]:
        """What to call for a method of the coordinator: the method itself, or what waits for an incarnation first."""
        live = self._current.live
        return partial(self._call, name) if live is None else getattr(live, name)

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of an incarnation once that has started."""
        current = self._current
        if self._host is None or self._closed:
            raise RuntimeError(f"{self._name} is not running: use it only after start and before close")
        if not await current.takes_calls():
            assert current.failure is not None
            raise current.failure
        return await getattr(current.coordinator, method)(*args)

    def explain(self, error: Exception) -> Exception:
        """Say in a failure which part it comes from."""
        if self.name:
            error.add_note(f"in the part {self.name!r} of the operator")
        return error

    # --- the incarnations -----------------------------------------------------------------------------------------

    async def start(self, host: Host) -> None:
        if self._host is not None:
            raise RuntimeError(f"{self._name} was started before: make a new one for each operator")
        self._host = host
        await self._begin(host, self._current)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Reset the coordinator that stays; or fence it and return, and a new one is created in the background."""
        host, old, point = self._host, self._current, (checkpoint_id, state)
        if self._recreate is None:
            assert old.coordinator is not None
            await call_user("reset_to_checkpoint", old.coordinator.reset_to_checkpoint, *point)
        elif host is None or old.awaited:
            old.restore = point
        else:
            self._current = new = _Life(self, old.number + 1)
            self.acting = new.number
            old.cancel_guarded()
            new.restore = point
            over = partial(self._over, new)
            host.run_in_background(self._end, host, old, self._recreate.close_timeout_s, handler=over)
            host.run_in_background(self._follow, host, old, new, handler=over)

    async def close(self) -> None:
        """Close the current incarnation, whose start has been cancelled if it was in progress.

        An earlier one whose own ``close`` was never called, because its start was in progress, is closed before it. One
        that is still closing is not waited for, and one that does not exist yet is never created.
        """
        # R105
        self._closed = True
        current, interrupted = self._current, None
        try:
            for replaced in [one for one in self._unclosed if one is not current]:
                try:
                    await self._close_one(replaced)
                except asyncio.CancelledError as error:  # of this call: the others are closed nevertheless
                    interrupted = error
                except BaseException:
                    self._log_of(replaced).exception("replaced coordinator close failed")
                finally:
                    replaced.end()
            await self._close_one(current)
        finally:
            current.end()
        if interrupted is not None:
            raise interrupted

    async def _close_one(self, incarnation: _Life) -> None:
        """Close an incarnation if it was created, and only once."""
        if incarnation in self._unclosed:
            self._unclosed.remove(incarnation)
            assert incarnation.coordinator is not None
            await call_user("close", incarnation.coordinator.close)

    def _log_of(self, incarnation: _Life) -> Any:
        assert self._host is not None
        keys: dict[str, Any] = {"part": self.name} if self.name else {}
        if self._recreate is not None:
            keys |= {"coordinator": self._name, "incarnation": incarnation.number}
        return self._host.log.bind(**keys)

    async def _begin(self, host: Host, new: _Life) -> None:
        new.store = host.store.view()
        log = self._log_of(new)
        try:
            with new.beginning:
                if self._recreate is not None:
                    new.coordinator = await call_user("factory", self._create, self._recreate.factory)
                    self._unclosed.append(new)
                assert new.coordinator is not None
                if new.restore is not None:
                    await call_user("reset_to_checkpoint", new.coordinator.reset_to_checkpoint, *new.restore)
                await call_user("start", new.coordinator.start, Context(host, new, new.store, log))
                if self._recreate is not None:
                    log.debug("coordinator started", restored=new.restore and new.restore[0])
                new.live = new.coordinator
        except Exception as error:  # call_user lets no other one out, except a cancellation of this task
            new.failure = error
            raise
        finally:
            new.begun.set()

    @staticmethod
    async def _create(factory: Callable[[], OperatorCoordinator]) -> OperatorCoordinator:
        return factory()

    async def _follow(self, host: Host, old: _Life, new: _Life) -> None:
        await old.ended.wait()
        if self._closed:
            return
        try:
            await self._begin(host, new)
        except Exception:
            if new.may_act():  # otherwise a reset has overtaken it
                raise

    async def _end(self, host: Host, old: _Life, timeout_s: float) -> None:
        """Close a replaced incarnation. One that is given up during its start is closed too, and delays nothing."""
        log, closing = self._log_of(old), anyio.CancelScope()
        deadlines = [host.clock.call_later(timeout_s, partial(self._give_up, old, timeout_s, log))]
        try:
            await old.begun.wait()
            deadlines.append(host.clock.call_later(timeout_s, closing.cancel))
            with closing:
                await self._close_one(old)
        except Exception:
            log.exception("replaced coordinator close failed")
        finally:
            for deadline in deadlines:
                deadline.cancel()
            old.end()

    @staticmethod
    def _give_up(old: _Life, timeout_s: float, log: Any) -> None:
        log.warning("replaced coordinator close abandoned", close_timeout_s=timeout_s)
        old.beginning.cancel()
        old.end()

    async def _over(self, incarnation: _Life, result: None, error: Exception | None) -> None:
        """Report, in the coordinator's order, a failure to begin as global, unless a reset has overtaken it."""
        if error is not None and incarnation.may_act():
            raise error


class _OfStages(OperatorCoordinator):
    """The own part of an operator that consists of stages: nothing is meant for it."""

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


class Parts(tuple[Part, ...]):
    """The table of an operator's parts, by index: the user's own, then those with names.

    ``in_order``: as what concerns them all reaches them. ``table``: what the protocol knows of them.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.in_order = (*self[1:], self[0])
        self._by_name = {part.name: part for part in self}
        stages = [part.name for part in self if part.is_stage]
        self.table = PartTable([OperatorPart(part.name, part.outside) for part in self], stages)
        self._held: list[Callable[[], None]] = []

    def named(self, name: str) -> Part:
        """The part of this name. Raises ``LocalProtocolError`` if there is none."""
        if name not in self._by_name:
            raise LocalProtocolError(
                f"something was sent to the part {name!r}, which this operator does not have: pass it to "
                "coordinate(..., uses=[...]), or to chain(...) if it is a stage"
            )
        return self._by_name[name]

    def snapshot_taken(self, part: Part) -> None:
        """The state of ``part`` is taken, and the cut comes later: hold what it sends until then."""
        part.held = self._held

    def cut_reached(self) -> None:
        """The gateways know the cut, or the snapshot has failed: send what was held, in its order."""
        held, self._held = self._held, []
        for part in self:
            part.held = None
        for send in held:
            send()


def parts_of(
    own: Kept | None,
    named: Mapping[str, Kept] | None = None,
    stages: Collection[str] = (),
    outside: Collection[str] = (),
) -> Parts:
    """The parts of an operator. ``stages`` are the names of those that are stages; then there is no ``own``.

    ``outside`` are those of parts whose messages are outside of checkpoints.
    """
    others = [
        Part(name, index, given, is_stage=name in stages, outside=name in outside)
        for index, (name, given) in enumerate((named or {}).items(), 1)
    ]
    return Parts((Part("", 0, own if own is not None else _OfStages(stages)), *others))
