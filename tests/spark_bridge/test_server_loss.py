# SPDX-License-Identifier: Apache-2.0

"""How soon a Spark Connect client hears that its server has ended: the looks at it, in virtual time."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest

from actors import Actor, ActorContext
from actors.testing import deterministic_system
from spark_bridge.connect.relay import look_until
from spark_bridge.connect.remote_session import HEARD_WITHIN_S, LOOK_PAUSE_S, RemoteSession

PROMISED_S = 5.0


class Looking(Actor[Any]):
    """Looks at a server that ends at a moment, and notes when it knows."""

    def __init__(self, ends_at: float, back_at: float | None = None) -> None:
        self._ends_at = ends_at
        self._back_at = back_at
        self._began = 0.0
        self.heard: tuple[str | None, float] | None = None

    def _now(self) -> float:
        return anyio.current_time() - self._began

    async def receive(self, context: ActorContext[Any], message: Any) -> None:
        self._began = anyio.current_time()
        ended = False

        def over() -> bool:
            nonlocal ended
            ended = self._now() >= self._ends_at
            return self._back_at is not None and self._now() >= self._back_at

        why = await look_until(lambda: "gone" if ended else None, over)
        self.heard = why, self._now()


async def heard(looking: Looking) -> tuple[str | None, float]:
    async with deterministic_system() as kit:
        kit.system.spawn(lambda: looking, name="looking").tell("look")
        await kit.advance(60.0)
        await kit.run_until_idle()
    assert looking.heard is not None
    return looking.heard


def test_the_limits_of_a_look_and_of_the_pause_after_it_keep_the_promise() -> None:
    assert HEARD_WITHIN_S <= PROMISED_S


@pytest.mark.parametrize("ends_at", [0.0, 0.001, 0.5, 0.999, 1.0, 7.3, 30.0])
async def test_a_server_that_ends_is_known_to_have_after_one_pause(ends_at: float) -> None:
    """Whenever it ends. A look itself has its own limit, which is the rest of ``HEARD_WITHIN_S``."""
    why, at = await heard(Looking(ends_at))

    assert why == "gone"
    assert 0.0 <= at - ends_at <= LOOK_PAUSE_S


async def test_nobody_looks_on_when_the_connection_is_back() -> None:
    why, at = await heard(Looking(ends_at=30.0, back_at=2.5))

    assert why is None
    assert at - 2.5 <= LOOK_PAUSE_S


class SessionAt:
    """As much of a session as names its server."""

    def __init__(self, port: int) -> None:
        self.client = self
        self._builder = self
        self.endpoint = f"127.0.0.1:{port}"


def test_a_port_that_is_closed_is_a_server_that_has_ended_and_an_open_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        session = RemoteSession(SessionAt(port))
        assert session.why_unreachable() is None
    assert session.why_unreachable() == f"nothing listens at 127.0.0.1:{port} any more"


class Answering:
    """A session whose server answers every question with an error, or not with one."""

    def __init__(self, error: Exception | None) -> None:
        self.client = self.conf = self
        self._error = error

    def get(self, *_: object) -> str:
        if self._error is not None:
            raise self._error
        return "app-1"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, None),
        (Exception("[INVALID_HANDLE.SESSION_CLOSED] The handle is invalid.\nmore"), "[INVALID_HANDLE.SESSION_CLOSED] "),
        (Exception("[NO_ACTIVE_SESSION] No active Spark session found."), "[NO_ACTIVE_SESSION] "),
        (ValueError("Cannot invoke RPC on closed channel!"), "Cannot invoke RPC on closed channel!"),
        (Exception("deadline exceeded\nINVALID_HANDLE"), None),
        (Exception(), None),
    ],
)
def test_a_session_has_ended_if_the_first_line_of_an_answer_says_so(error: Exception | None, why: str | None) -> None:
    found = RemoteSession(Answering(error)).why_closed()
    assert found is None if why is None else found is not None and found.startswith(why) and "\n" not in found
