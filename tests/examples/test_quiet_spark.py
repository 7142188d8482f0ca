# SPDX-License-Identifier: Apache-2.0

"""How the examples' programs handle a Ctrl-C."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

from examples.quiet_spark import interrupt_quietly
from spark_bridge.driver.interrupts import interrupts_held_back


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    handler, filters = signal.getsignal(signal.SIGINT), list(logging.getLogger().filters)
    yield
    signal.signal(signal.SIGINT, handler)
    logging.getLogger().filters[:] = filters


def test_only_the_first_ctrl_c_interrupts() -> None:
    # A second one came while Py4J cleaned up after the first: after that it could not stop a session any more.
    interrupt_quietly()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def interrupted_twice_while_held_back() -> None:
    with interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_several_that_were_held_back_are_one() -> None:
    interrupt_quietly()
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice_while_held_back()
    signal.raise_signal(signal.SIGINT)
