# SPDX-License-Identifier: Apache-2.0

"""What holds a Ctrl-C back, and who gets it then: one who waits, a block that lets it through, or the end (H160)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from spark_bridge.driver.interrupts import holding_interrupts
from tests.spark_bridge.interrupting import python_handles_interrupts


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    with python_handles_interrupts():
        yield


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def gets(function: Callable[[], object]) -> object:
    """What a function returns, or the class of the interrupt that it ends with."""
    try:
        return function()
    except KeyboardInterrupt as error:
        return type(error)


def test_an_interrupt_comes_at_the_end_of_the_outermost_block() -> None:
    passed = []

    def nested() -> None:
        with holding_interrupts() as outer:
            with holding_interrupts() as inner:
                interrupt()
                passed.append(inner is outer)
            passed.append(True)

    assert gets(nested) is KeyboardInterrupt
    assert passed == [True, True]


def test_the_one_who_waits_gets_an_interrupt_that_came_before_or_comes_meanwhile_and_gets_it_once() -> None:
    got: list[BaseException | None] = []

    def waiting() -> None:
        with holding_interrupts() as interrupts:
            interrupt()
            got.append(interrupts.wait(Future(), 20.0))
            threading.Thread(target=interrupt_main_thread).start()
            got.append(interrupts.wait(Future(), 20.0))
            got.append(interrupts.wait(Future(), 0.0))

    assert gets(waiting) is None
    assert list(map(type, got)) == [KeyboardInterrupt, KeyboardInterrupt, type(None)]


def interrupt_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_a_wait_for_what_is_done_leaves_an_interrupt_to_the_block() -> None:
    got: list[BaseException | None] = []
    done: Future[int] = Future()
    done.set_result(1)

    def waiting() -> None:
        with holding_interrupts() as interrupts:
            interrupt()
            got.append(interrupts.wait(done))

    assert gets(waiting) is KeyboardInterrupt
    assert got == [None]


@pytest.mark.parametrize("before", [True, False])
def test_a_block_within_lets_an_interrupt_through_also_one_that_was_held_back_before(before: bool) -> None:
    passed = []

    def within() -> None:
        with holding_interrupts() as interrupts:
            if before:
                interrupt()
            with interrupts.let_through():
                passed.append("begun")
                interrupt()
                passed.append("not interrupted")

    assert gets(within) is KeyboardInterrupt
    assert passed == ([] if before else ["begun"])


def test_a_handler_that_the_program_sets_within_stays() -> None:
    heard: list[str] = []

    def handler(*_: object) -> None:
        heard.append("theirs")

    def within() -> list[str]:
        with holding_interrupts() as interrupts:
            with interrupts.let_through():
                signal.signal(signal.SIGINT, handler)
            interrupt()
            return list(heard)

    assert gets(within) == []
    assert heard == ["theirs"]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_another_thread_holds_nothing_back() -> None:
    seen: list[Any] = []

    def look() -> None:
        with holding_interrupts() as interrupts:
            seen.append((interrupts is outer, signal.getsignal(signal.SIGINT) is outer))
            with interrupts.let_through():
                seen.append(signal.getsignal(signal.SIGINT) is outer)

    with holding_interrupts() as outer:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [(False, True), True]
