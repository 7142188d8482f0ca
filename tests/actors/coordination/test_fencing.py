# SPDX-License-Identifier: Apache-2.0

"""The fence stops a replaced coordinator from acting, on every path (G16)."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import MagicMock

import anyio
import anyio.to_thread
import pytest

from actors.coordination.host.context import Context
from actors.coordination.host.gateway import AttemptSends, Confirmation, Gateway, SendEvent
from actors.coordination.host.incarnation import Incarnation, Sender
from actors.coordination.interface import CoordinatorContext, SubtaskGateway
from actors.coordination.store import StoreRevoked
from protocol.errors import AttemptOver, EventEncodeError, GatewayFull
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import decode_event
from protocol.wire.framing import DEFAULT_LIMITS
from tests.actors.coordination.operator_world import RecordingCoordinator, raising, waiting_for
from tests.actors.coordination.replacing import Bench, bench, doing_in

ATTEMPT = ExecutionAttempt("words", 1, 0, 100)


class Handlers:
    """Handlers that record their arguments."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def plain(self) -> None:
        self.heard.append("called")

    async def with_outcome(self, result: Any, error: Exception | None) -> None:
        self.heard.append((result, error))


def use(coordinator: RecordingCoordinator, handlers: Handlers, what: str) -> None:
    """Call one of the context's methods that report to a handler."""

    async def work() -> str:
        return "done"

    context = coordinator.context
    match what:
        case "call_async":
            context.call_async(lambda: "done", handler=handlers.with_outcome)
        case "run_in_background":
            context.run_in_background(work, handler=handlers.with_outcome)
        case "call_later":
            context.call_later(1.0, handlers.plain)
        case "call_soon_threadsafe":
            context.call_soon_threadsafe(handlers.plain)


HANDLED = {
    "call_async": ("done", None),
    "run_in_background": ("done", None),
    "call_later": "called",
    "call_soon_threadsafe": "called",
}


async def pass_time(under_test: Bench) -> None:
    await under_test.settle()
    await under_test.kit.advance(1.0)
    await under_test.settle()


# --- handlers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", HANDLED)
async def test_a_handler_of_the_current_coordinator_is_called(what: str) -> None:  # H9
    handlers = Handlers()
    async with bench() as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        use(under_test.coordinators[1], handlers, what)
        await pass_time(under_test)
        assert handlers.heard == [HANDLED[what]]


@pytest.mark.parametrize("what", HANDLED)
async def test_what_a_replaced_coordinator_asks_for_does_not_happen(what: str) -> None:  # G16
    handlers = Handlers()
    async with bench() as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        use(under_test.coordinators[0], handlers, what)
        await pass_time(under_test)
        assert handlers.heard == []


@pytest.mark.parametrize("what", HANDLED)
async def test_a_handler_that_was_on_its_way_at_the_reset_is_not_called(what: str) -> None:  # G16
    handlers, released = Handlers(), anyio.Event()
    async with bench(doing_in(1, handle_event_from_operator=waiting_for(released))) as under_test:
        under_test.ask("handle_event_from_operator", 0, 0, "event")
        under_test.ask("reset_to_checkpoint", 1, b"x")
        await under_test.settle()
        use(under_test.coordinators[0], handlers, what)
        await pass_time(under_test)  # the handler is in the mailbox, after the reset
        released.set()
        await under_test.settle()
        assert len(under_test.coordinators) == 2
        assert handlers.heard == []


async def test_a_handler_waits_for_the_start_of_its_coordinator() -> None:  # H5
    handlers, released = Handlers(), anyio.Event()

    async def start(context: CoordinatorContext) -> None:
        context.call_soon_threadsafe(handlers.plain)
        await released.wait()

    async with bench(doing_in(2, start=start)) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert handlers.heard == []
        released.set()
        await under_test.settle()
        assert handlers.heard == ["called"]


async def test_a_handler_of_a_coordinator_that_could_not_start_is_not_called() -> None:  # H6
    handlers = Handlers()

    async def start(context: CoordinatorContext) -> None:
        context.call_soon_threadsafe(handlers.plain)
        raise ValueError("no such topic")

    async with bench(doing_in(2, start=start)) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert handlers.heard == []


async def test_work_that_waits_for_a_thread_is_not_begun_after_the_reset() -> None:  # G16
    begun: list[str] = []
    handlers = Handlers()
    async with bench() as under_test:
        under_test.coordinators[0].context.call_async(begun.append, "begun", handler=handlers.with_outcome)
        await under_test.part.reset_to_checkpoint(1, b"x")
        await under_test.settle()
        assert begun == []
        assert handlers.heard == []


async def test_background_work_is_cancelled_by_the_reset() -> None:  # G16
    never, ends, handlers = anyio.Event(), list[str](), Handlers()

    async def work() -> None:
        try:
            await never.wait()
        finally:
            ends.append("cancelled")

    async with bench() as under_test:
        under_test.coordinators[0].context.run_in_background(work, handler=handlers.with_outcome)
        await under_test.settle()
        assert ends == []
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert ends == ["cancelled"]
        assert handlers.heard == []


async def test_a_replaced_coordinator_that_is_still_closing_cannot_act() -> None:  # G16
    released, handlers = anyio.Event(), Handlers()

    async def close() -> None:
        context = under_test.coordinators[0].context
        context.fail_job("while closing")
        context.call_soon_threadsafe(handlers.plain)
        await released.wait()
        context.fail_job("given up long ago")

    async with bench(doing_in(1, close=lambda: _shielded(close)), close_timeout_s=60.0) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.kit.advance(60.0)  # given up, and ignores its cancellation
        assert len(under_test.coordinators) == 2
        released.set()
        await under_test.settle()
        assert handlers.heard == []
        assert under_test.context.failures == []


async def _shielded(close: Any) -> None:
    with anyio.CancelScope(shield=True):
        await close()


async def test_a_replaced_coordinator_cannot_act_from_another_thread() -> None:  # G16
    handlers = Handlers()
    async with bench() as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        context = under_test.coordinators[0].context
        await anyio.to_thread.run_sync(context.call_soon_threadsafe, handlers.plain)
        await under_test.settle()
        assert handlers.heard == []


# --- gateways -----------------------------------------------------------------------------------------------------


def sends_to_one(events_max: int = 100) -> tuple[AttemptSends, list[SendEvent]]:
    """What the parts send to one attempt, and what has been sent."""
    sent: list[SendEvent] = []
    return AttemptSends(ATTEMPT, sent.append, (events_max, 2**20), lambda: 0.0, DEFAULT_LIMITS), sent


async def ready_gateway(under_test: Bench, sends: AttemptSends) -> SubtaskGateway:
    """Return the gateway that the current coordinator has got."""
    await under_test.call("subtask_ready", 1, Gateway(sends, under_test.part.current))
    return under_test.coordinators[-1].gateways[1]


def is_refused(confirmation: Confirmation) -> bool:
    return isinstance(confirmation.error(), AttemptOver)


async def test_the_current_coordinator_sends_through_its_gateway() -> None:  # H20, H22
    below, sent = sends_to_one(events_max=2)
    async with bench() as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        gateway = await ready_gateway(under_test, below)
        assert not (await gateway.send_event("a")).done()
        assert not gateway.send_event_nowait("b", loss_tolerant=True).done()
        with pytest.raises(GatewayFull):
            gateway.send_event_nowait("one too many")
        assert [(decode_event(one.payload), one.loss_tolerant) for one in sent] == [("a", False), ("b", True)]
        assert (gateway.attempt, gateway.events_pending, gateway.bytes_pending) == (ATTEMPT, 2, 4)


async def test_what_a_replaced_coordinator_sends_fails_immediately() -> None:  # G16, H26
    below, sent = sends_to_one()
    async with bench() as under_test:
        gateway = await ready_gateway(under_test, below)
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert is_refused(await gateway.send_event("a"))
        assert is_refused(gateway.send_event_nowait("b"))
        assert (sent, below.budget(0).events) == ([], 0)
        with pytest.raises(AttemptOver, match="replaced by a reset"):
            await gateway.send_event_nowait("c")


async def test_what_cannot_be_encoded_raises_though_it_would_not_be_sent() -> None:  # H21
    below, _ = sends_to_one()
    async with bench() as under_test:
        gateway = await ready_gateway(under_test, below)
        await under_test.call("reset_to_checkpoint", 1, b"x")
        with pytest.raises(EventEncodeError):
            await gateway.send_event(object())
        with pytest.raises(EventEncodeError):
            gateway.send_event_nowait(object())


async def test_an_event_that_waited_for_capacity_at_the_reset_is_not_sent() -> None:  # G16, H27
    (below, sent), outcomes = sends_to_one(events_max=1), list[Confirmation]()
    async with bench() as under_test:
        gateway = await ready_gateway(under_test, below)
        first = gateway.send_event_nowait("fills it")

        async def send() -> None:
            outcomes.append(await gateway.send_event("a"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await under_test.settle()
            assert outcomes == []
            await under_test.call("reset_to_checkpoint", 1, b"x")
            below.give_back(first)
        assert is_refused(outcomes[0])
        assert (len(sent), below.budget(0).events) == (1, 0)


# --- the store ----------------------------------------------------------------------------------------------------


async def test_all_coordinators_see_the_same_store() -> None:  # R100
    async with bench() as under_test:
        under_test.coordinators[0].context.store.put_if_absent("leader", "one")
        assert under_test.context.store.get("leader") == "one"
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert under_test.coordinators[1].context.store.get("leader") == "one"


async def test_a_replaced_coordinator_takes_back_in_its_close_what_it_has_put() -> None:  # R100, G16
    seen: list[bool] = []

    async def close() -> None:
        under_test.coordinators[0].context.store.compute("leader", lambda _: None)

    async def start(context: CoordinatorContext) -> None:
        seen.append(context.store.contains("leader"))

    async with bench(lambda number: {"close": close} if number == 1 else {"start": start}) as under_test:
        under_test.coordinators[0].context.store.put_if_absent("leader", "one")
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert seen == [False]


async def test_a_coordinator_that_is_closed_writes_nothing_any_more() -> None:  # R100, G16
    async with bench() as under_test:
        old = under_test.coordinators[0].context.store
        await under_test.call("reset_to_checkpoint", 1, b"x")
        with pytest.raises(StoreRevoked):
            old.put_if_absent("leader", "one")
        assert under_test.coordinators[1].context.store.put_if_absent("leader", "two") is None
        assert old.get("leader") == "two"


async def test_a_coordinator_whose_close_was_given_up_writes_nothing_before_the_next_begins() -> None:  # R100, G16
    refused: list[bool] = []

    async def start(context: CoordinatorContext) -> None:
        with pytest.raises(StoreRevoked):
            under_test.coordinators[0].context.store.put_if_absent("leader", "one")
        refused.append(True)

    never = anyio.Event()
    async with bench(
        lambda number: {"close": waiting_for(never)} if number == 1 else {"start": start}, close_timeout_s=60.0
    ) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.kit.advance(60.0)
        assert refused == [True]


async def test_the_last_coordinator_cannot_act_after_its_close() -> None:  # G16, H6
    async with bench(doing_in(1, close=raising(ValueError("still open")))) as under_test:
        await under_test.call("close")
        under_test.coordinators[0].context.fail_job("too late")
        assert under_test.context.failures == []
        with pytest.raises(StoreRevoked):
            under_test.coordinators[0].context.store.put_if_absent("leader", "one")


# --- nothing is forgotten -----------------------------------------------------------------------------------------


READ_ONLY = {
    "handles_restored",
    "input_begins_again",
    "operator_id",
    "parallelism",
    "mode",
    "log",
    "clock",
    "store",
    "checkpoints_in_doubt",
    "events_taken",
    "look_at_run",
}
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "fail_job": (("cause",), {}),
    "call_async": ((print, "x"), {"handler": print}),
    "run_in_background": ((print, "x"), {"handler": print}),
    "call_later": ((1.0, print), {}),
    "call_soon_threadsafe": ((print,), {}),
}


VIEWS = {"gateways"}
"""An incarnation has its own sight of them, which ends with it: ``test_live_gateways``."""


def public(protocol: type) -> list[str]:
    return sorted(name for name, _ in inspect.getmembers(protocol) if not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in public(CoordinatorContext) if name not in READ_ONLY | VIEWS])
async def test_each_method_of_the_context_does_nothing_once_its_incarnation_is_replaced(name: str) -> None:  # G16
    host, part = MagicMock(), Sender("", 0)
    context = Context(host, Incarnation(part, 1), host.store, MagicMock())
    args, named = ARGUMENTS[name]  # a new method needs a line there, and a fence
    getattr(context, name)(*args, **named)
    assert len(host.method_calls) == 1
    part.acting = 2
    getattr(context, name)(*args, **named)
    assert len(host.method_calls) == 1


@pytest.mark.parametrize("name", sorted(READ_ONLY))
async def test_what_is_only_read_stays_readable(name: str) -> None:  # S86, R101
    async with bench() as under_test:
        context = under_test.coordinators[0].context
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert getattr(context, name) is not None
        assert context.events_taken(2) == 42


@pytest.mark.parametrize(("protocol", "kind"), [(SubtaskGateway, Gateway), (CoordinatorContext, Context)])
async def test_each_interface_has_one_class_that_has_all_of_it(protocol: type, kind: type) -> None:  # H20
    own = vars(kind) if protocol is SubtaskGateway else {**vars(kind), **vars(Context(*[MagicMock()] * 4))}
    assert [name for name in public(protocol) if name not in own] == []
