# SPDX-License-Identifier: Apache-2.0

"""The assertions of Flink's own tests of its recreate-on-reset coordinator (R101 to R107).

S numbers are those of the parity list. S90 differs on purpose: a close that takes too long does not fail the job,
because an unclosed coordinator is fenced (G16).
"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from protocol.attempts import FailureKind, FailureReason
from tests.actors.coordination.operator_world import Call, Method, RecordingCoordinator, raising, waiting_for
from tests.actors.coordination.replacing import bench, doing_in

FAILED = FailureReason(FailureKind.FAILED, "by the test")


# --- the context --------------------------------------------------------------------------------------------------


async def test_the_coordinator_sees_the_properties_of_its_operator() -> None:  # S86, R101
    async with bench() as under_test:
        context = under_test.coordinators[0].context
        assert (context.operator_id, context.parallelism, context.mode) == (
            under_test.context.operator_id,
            under_test.context.parallelism,
            under_test.context.mode,
        )


async def test_the_current_coordinator_fails_the_job_and_a_replaced_one_does_not() -> None:  # S87, S88, R102
    cause = ValueError("no such topic")
    async with bench() as under_test:
        under_test.coordinators[0].context.fail_job(cause)
        assert under_test.context.failures == [cause]
        await under_test.call("reset_to_checkpoint", 1, b"x")
        under_test.coordinators[0].context.fail_job(ValueError("too late"))
        assert under_test.context.failures == [cause]


# --- the reset ----------------------------------------------------------------------------------------------------


async def test_a_reset_closes_the_coordinator_and_resets_and_starts_another() -> None:  # S89, R102, R103
    async with bench() as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert under_test.calls(1) == [("start",), ("close",)]  # never reset
        assert under_test.calls(2) == [("reset_to_checkpoint", 1, b"x"), ("start",)]
        assert len(under_test.coordinators) == 2
        assert under_test.errors == []


async def test_a_close_that_does_not_end_is_given_up_and_the_job_goes_on() -> None:  # S90, G16
    never = anyio.Event()
    async with bench(doing_in(1, close=waiting_for(never)), close_timeout_s=0.001) as under_test:
        await under_test.call("reset_to_checkpoint", 2, b"x")
        assert len(under_test.coordinators) == 1
        await under_test.kit.advance(0.001)
        assert under_test.calls(2) == [("reset_to_checkpoint", 2, b"x"), ("start",)]
        await under_test.call("notify_checkpoint_complete", 3)
        assert under_test.calls(2)[-1] == ("notify_checkpoint_complete", 3)
        under_test.coordinators[0].context.fail_job("I am still here")
        assert under_test.context.failures == []
        assert under_test.errors == []


async def test_what_is_given_up_is_cancelled_and_logged_and_what_ends_in_time_is_not(  # S90, G16, H48
    caplog: pytest.LogCaptureFixture,
) -> None:
    given_up: list[str] = []

    def waiting_in(what: str) -> Method:
        async def method(*args: Any) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                given_up.append(what)

        return method

    async with bench(
        lambda number: {1: {"close": waiting_in("close")}, 2: {"start": waiting_in("start")}}.get(number, {}),
        close_timeout_s=60.0,
    ) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.kit.advance(60.0)
        assert given_up == ["close"]
        await under_test.call("reset_to_checkpoint", 2, b"y")
        await under_test.kit.advance(60.0)
        assert given_up == ["close", "start"]
        assert under_test.calls(3) == [("reset_to_checkpoint", 2, b"y"), ("start",)]
        assert under_test.errors == []
        assert caplog.text.count("close abandoned") == 2
        caplog.clear()
        await under_test.call("reset_to_checkpoint", 3, b"z")  # the third one closes immediately
        await under_test.kit.advance(60.0)
        assert len(under_test.coordinators) == 4
        assert "close abandoned" not in caplog.text


async def test_calls_during_a_long_close_wait_for_the_new_coordinator() -> None:  # S91, R103
    state = b"what the second one returns"
    released = anyio.Event()

    async def snapshot(checkpoint_id: int) -> bytes:
        return state

    async with bench(
        lambda number: {"close": waiting_for(released)} if number == 1 else {"checkpoint_coordinator": snapshot}
    ) as under_test:
        under_test.ask("reset_to_checkpoint", 2, b"x")
        under_test.ask("handle_event_from_operator", 1, 0, "event")
        under_test.ask("subtask_failed", 1, 0, FAILED)
        under_test.ask("notify_checkpoint_complete", 1234)
        await under_test.settle()
        assert len(under_test.coordinators) == 1
        assert under_test.outcomes == [("start", None), ("reset_to_checkpoint", None)]  # which returned immediately
        released.set()
        await under_test.call("checkpoint_coordinator", 5678)
        assert under_test.calls(2) == [
            ("reset_to_checkpoint", 2, b"x"),
            ("start",),
            ("handle_event_from_operator", 1, 0, "event"),
            ("subtask_failed", 1, 0, FailureKind.FAILED),
            ("notify_checkpoint_complete", 1234),
            ("checkpoint_coordinator", 5678),
        ]
        assert under_test.outcomes[-1] == ("checkpoint_coordinator", state)
        assert len(under_test.coordinators) == 2


async def test_a_thousand_resets_keep_the_rounds_apart() -> None:  # S92, R106
    rounds = 1000

    def calls_of(number: int) -> list[Call]:
        return [
            ("handle_event_from_operator", number, 0, number),
            ("subtask_failed", number, 0, FailureKind.FAILED),
            ("checkpoint_coordinator", number),
            ("notify_checkpoint_complete", number),
        ]

    async with bench() as under_test:
        for number in range(rounds):
            under_test.ask("handle_event_from_operator", number, 0, number)
            under_test.ask("subtask_failed", number, 0, FAILED)
            under_test.ask("checkpoint_coordinator", number)
            under_test.ask("notify_checkpoint_complete", number)
            under_test.ask("reset_to_checkpoint", number, bytes(number + 1))
        await under_test.settle()
        assert len(under_test.coordinators) == rounds + 1
        for number in range(rounds):
            restored = [("reset_to_checkpoint", number - 1, bytes(number))] if number else []
            assert under_test.calls(number + 1) == [*restored, ("start",), *calls_of(number), ("close",)]
        await under_test.stop()
        assert under_test.calls(rounds + 1) == [
            ("reset_to_checkpoint", rounds - 1, bytes(rounds)),
            ("start",),
            ("close",),
        ]
        assert under_test.errors == []


async def test_resets_without_calls_in_between_create_one_coordinator_for_the_last() -> None:  # S92, R106
    released = anyio.Event()
    async with bench(doing_in(1, close=waiting_for(released))) as under_test:
        for number in range(1000):
            under_test.ask("reset_to_checkpoint", number, bytes(number))
        under_test.ask("handle_event_from_operator", 0, 0, "event")
        await under_test.settle()
        released.set()
        await under_test.settle()
        assert len(under_test.coordinators) == 2
        assert under_test.calls(2) == [
            ("reset_to_checkpoint", 999, bytes(999)),
            ("start",),
            ("handle_event_from_operator", 0, 0, "event"),
        ]


async def test_an_aborted_checkpoint_is_told() -> None:  # S93, R107
    async with bench() as under_test:
        await under_test.call("notify_checkpoint_aborted", 10)
        assert under_test.calls(1)[-1] == ("notify_checkpoint_aborted", 10)


async def test_a_reset_during_a_start_lets_it_end_then_closes_it() -> None:  # H5, R106
    released = anyio.Event()
    async with bench(doing_in(2, start=waiting_for(released))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("reset_to_checkpoint", 2, b"y")
        assert under_test.calls(2) == [("reset_to_checkpoint", 1, b"x"), ("start",)]
        assert len(under_test.coordinators) == 2
        released.set()
        await under_test.call("handle_event_from_operator", 0, 0, "event")
        assert under_test.calls(2)[2:] == [("close",)]
        assert under_test.calls(3) == [
            ("reset_to_checkpoint", 2, b"y"),
            ("start",),
            ("handle_event_from_operator", 0, 0, "event"),
        ]


async def test_a_restore_before_the_start_is_the_first_call_of_the_coordinator() -> None:  # H6, H52, R109
    async with bench(started=False) as under_test:
        await under_test.call("reset_to_checkpoint", 7, b"x")
        await under_test.start()
        assert under_test.calls(1) == [("reset_to_checkpoint", 7, b"x"), ("start",)]
        assert len(under_test.coordinators) == 1


# --- failures -----------------------------------------------------------------------------------------------------


async def test_a_close_that_fails_is_logged_and_the_job_goes_on(  # R104, G16
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench(doing_in(1, close=raising(ValueError("still open")))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert under_test.calls(2) == [("reset_to_checkpoint", 1, b"x"), ("start",)]
        assert under_test.errors == []
    logged = caplog.text
    assert "still open" in logged
    assert "under test" in logged  # the name that the user gave


@pytest.mark.parametrize("method", ["factory", "reset_to_checkpoint", "start"])
async def test_a_coordinator_that_cannot_begin_fails_the_calls_until_the_next_reset(method: str) -> None:  # R104, H7
    cause = ValueError("no such topic")
    async with bench(doing_in(2, **{method: raising(cause)})) as under_test:
        under_test.factory_fails = cause if method == "factory" else None
        under_test.ask("reset_to_checkpoint", 1, b"x")
        under_test.ask("handle_event_from_operator", 0, 0, "event")
        await under_test.settle()
        assert ("handle_event_from_operator", cause) in under_test.outcomes
        assert all(error is cause for _, error in under_test.errors)
        under_test.factory_fails = None
        await under_test.call("reset_to_checkpoint", 2, b"y")
        before = len(under_test.errors)
        await under_test.call("handle_event_from_operator", 0, 0, "event")
        *earlier, latest = under_test.coordinators
        assert latest.calls[:2] == [("reset_to_checkpoint", 2, b"y"), ("start",)]
        assert latest.events == ["event"]
        # Every earlier coordinator that was created is closed.
        assert [coordinator.calls[-1] for coordinator in earlier] == [("close",)] * len(earlier)
        assert len(under_test.errors) == before


async def test_a_coordinator_that_cannot_begin_fails_the_job_without_a_call() -> None:  # R104, H7
    cause = ValueError("no such topic")
    async with bench(doing_in(2, start=raising(cause))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        assert under_test.errors == [("handler", cause)]


async def test_a_failure_to_begin_has_no_effect_after_a_reset() -> None:  # R104, H15
    released = anyio.Event()

    async def fail_late(*args: Any) -> None:
        await released.wait()
        raise ValueError("too late to matter")

    async with bench(doing_in(2, start=fail_late)) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("reset_to_checkpoint", 2, b"y")
        released.set()
        await under_test.settle()
        assert under_test.calls(3) == [("reset_to_checkpoint", 2, b"y"), ("start",)]
        assert under_test.errors == []


async def test_the_first_start_fails_as_any_coordinators_does_and_is_closed() -> None:  # H6
    cause = ValueError("no such topic")
    async with bench(doing_in(1, start=raising(cause))) as under_test:
        assert under_test.errors == [("start", cause)]
        await under_test.stop()
        assert under_test.calls(1) == [("start",), ("close",)]


async def test_a_start_that_awaits_what_was_cancelled_has_failed() -> None:  # H7
    async with bench(doing_in(2, start=raising(anyio.get_cancelled_exc_class()()))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("handle_event_from_operator", 0, 0, "event")
        assert [method for method, _ in under_test.errors] == ["handler", "handle_event_from_operator"]
        assert "start awaited something that was cancelled" in str(under_test.errors[0][1])


# --- the end ------------------------------------------------------------------------------------------------------


async def test_close_reaches_the_current_coordinator_and_its_failure_comes_out() -> None:  # R105, H6
    cause = ValueError("still open")
    async with bench(doing_in(1, close=raising(cause))) as under_test:
        await under_test.call("close")
        assert under_test.errors == [("close", cause)]


async def test_close_does_not_wait_for_an_earlier_close_and_nothing_more_is_created() -> None:  # R105
    released = anyio.Event()
    async with bench(doing_in(1, close=waiting_for(released))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("close")
        assert under_test.outcomes[-1] == ("close", None)
        released.set()
        await under_test.settle()
        assert len(under_test.coordinators) == 1
        assert under_test.calls(1) == [("start",), ("close",)]


async def test_an_operator_that_ends_during_a_start_closes_what_was_created() -> None:  # R105, H6
    never = anyio.Event()
    async with bench(doing_in(2, start=waiting_for(never))) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.stop()
        assert under_test.calls(2) == [("reset_to_checkpoint", 1, b"x"), ("start",), ("close",)]


async def cancelled_at_its_first_await(*args: Any) -> None:
    """Imitate a close that the runtime cancels from outside."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("close", "what"),
    [
        (None, "a close that ends well"),
        (raising(ValueError("still open")), "a close that fails"),
        (raising(SystemExit(3)), "a close that exits"),
        (raising(asyncio.CancelledError()), "a close that awaits what was cancelled"),
        (cancelled_at_its_first_await, "a close that is cancelled"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
async def test_an_incarnation_that_was_replaced_in_its_start_is_closed_once_when_the_operator_ends(  # H6, R105
    close: Method | None, what: str
) -> None:
    never = anyio.Event()
    methods = {"start": waiting_for(never), **({} if close is None else {"close": close})}
    async with bench(doing_in(2, **methods)) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("reset_to_checkpoint", 2, b"y")
        await under_test.stop()
        assert [coordinator.calls_of("close") for coordinator in under_test.coordinators] == [[("close",)]] * 2, what


async def test_a_current_incarnation_is_closed_though_the_close_of_a_replaced_one_is_cancelled() -> None:  # H6
    never = anyio.Event()

    def methods(number: int) -> dict[str, Method]:
        if number == 2:
            return {"start": waiting_for(never), "close": cancelled_at_its_first_await}
        return {}

    async with bench(methods, close_timeout_s=5.0) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("reset_to_checkpoint", 2, b"y")
        under_test.part._current.coordinator = current = RecordingCoordinator()
        under_test.part._unclosed.append(under_test.part._current)
        await under_test.stop()
        assert under_test.calls(2)[-1] == ("close",)
        assert current.calls == [("close",)]


async def test_a_coordinator_that_is_given_up_in_its_start_is_closed_once() -> None:  # H6, H48
    never = anyio.Event()
    async with bench(doing_in(2, start=waiting_for(never)), close_timeout_s=60.0) as under_test:
        await under_test.call("reset_to_checkpoint", 1, b"x")
        await under_test.call("reset_to_checkpoint", 2, b"y")
        await under_test.kit.advance(60.0)
        await under_test.settle()
        assert under_test.calls(2)[2:] == [("close",)]
        await under_test.stop()
        assert [coordinator.calls_of("close") for coordinator in under_test.coordinators] == [[("close",)]] * 3


async def test_starting_twice_is_an_error() -> None:  # R105
    async with bench() as under_test:
        await under_test.call("start", under_test.context)
        ((method, error),) = under_test.errors
        assert (method, str(error)) == ("start", "under test was started before: make a new one for each operator")


async def test_a_call_before_the_start_or_after_the_end_is_an_error() -> None:  # R105, H6
    async with bench(started=False) as under_test:
        await under_test.call("notify_checkpoint_complete", 1)
        await under_test.start()
        await under_test.call("close")
        await under_test.call("notify_checkpoint_complete", 1)
        assert [str(error) for _, error in under_test.errors] == [
            "under test is not running: use it only after start and before close"
        ] * 2
