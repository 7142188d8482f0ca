# SPDX-License-Identifier: Apache-2.0

"""The router between the server and the actors: which gateway gets the messages of a connection."""

from __future__ import annotations

from typing import Any, cast

import pytest

from actors.coordination.engine.messages import AttachConnection, ConnectionClosed, MessagesArrived
from protocol.ids import ExecutionAttempt
from protocol.wire.keys import identity_of
from protocol.wire.messages import Confirm, RefusalCode, Refused, Register, RestoreMode, Resume
from spark_bridge.bridge.messages import RegistrationAbandoned, RegistrationReceived, UnknownAttemptResumed
from spark_bridge.bridge.router import ConnectionRouter

ATTEMPT = ExecutionAttempt("words", 1, 0, 10)
REGISTER = Register(10, "words", 1, 3, 0, RestoreMode.BATCH, 4, "host/1", "3.11.7")
CONFIRM = Confirm(10, 1)


def token_of(operator_id: str, task_attempt_id: int) -> bytes:
    return f"{operator_id} {task_attempt_id}".encode()


def a_resume(task_attempt_id: int, received_seq: int) -> Resume:
    return Resume(task_attempt_id, "words", received_seq, token_of("words", task_attempt_id))


class Told:
    """Stands in for an actor: records its calls in order."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def tell_direct(self, message: Any) -> None:
        self.messages.append(message)

    tell = tell_direct


class Line:
    """Stands in for a connection."""

    def __init__(self, connection_id: int, operator_id: str = "words") -> None:
        self.connection_id = connection_id
        self.peer = f"peer {connection_id}"
        self.authenticated_as = identity_of(operator_id)
        self.is_identified = False
        self.sent: list[Any] = []
        self.closed = False

    def identified(self) -> None:
        self.is_identified = True

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self, *, flush: bool = True) -> None:
        self.closed = True

    def drop(self, why: str) -> None:
        assert why
        self.closed = True


class Scene:
    """A router with its bridge, one gateway, and connections to send on."""

    def __init__(self, *, takes_over: bool = False) -> None:
        self.router = ConnectionRouter(token_of, takes_over=takes_over)
        self.bridge = Told()
        self.gateway = Told()
        if not takes_over:
            self.attach()

    def attach(self) -> None:
        self.router.attach(cast(Any, self.bridge))

    def line(self, connection_id: int) -> Line:
        line = Line(connection_id)
        self.router.connected(cast(Any, line))
        return line

    def say(self, line: Line, *messages: Any) -> None:
        self.router.messages_received(cast(Any, line), list(messages))

    def hang_up(self, line: Line) -> None:
        self.router.disconnected(cast(Any, line), "gone")

    def accept(self, line: Line) -> None:
        self.router.gateway_opened(ATTEMPT, cast(Any, self.gateway), cast(Any, line))


def a_registered_line() -> tuple[Scene, Line]:
    scene = Scene()
    line = scene.line(1)
    scene.say(line, REGISTER)
    scene.accept(line)
    return scene, line


def test_a_registration_goes_to_the_bridge_and_what_follows_to_the_gateway() -> None:
    scene, line = a_registered_line()
    scene.say(line, CONFIRM)
    assert scene.bridge.messages == [RegistrationReceived(cast(Any, line), REGISTER)]
    assert scene.gateway.messages == [MessagesArrived(1, [CONFIRM])]
    assert line.is_identified


def test_messages_of_an_ended_attempt_are_dropped_and_counted() -> None:  # H3
    scene, line = a_registered_line()
    scene.router.gateway_closed(ATTEMPT)
    scene.say(line, CONFIRM, CONFIRM)
    scene.hang_up(line)
    assert scene.gateway.messages == []
    assert scene.router.messages_dropped == 2
    assert len(scene.bridge.messages) == 1, "its end is not an abandoned registration"
    assert scene.router.gateway_count == 0


@pytest.mark.parametrize("sent", [(CONFIRM,), (REGISTER, CONFIRM)])
def test_a_peer_that_sends_before_it_has_an_answer_is_disconnected(sent: tuple[Any, ...]) -> None:  # H62
    scene = Scene()
    line = scene.line(1)
    scene.say(line, *sent)
    assert line.closed
    assert scene.bridge.messages == []


def test_a_registration_whose_connection_closes_is_abandoned() -> None:  # H19
    scene = Scene()
    line = scene.line(1)
    scene.say(line, REGISTER)
    scene.hang_up(line)
    assert scene.bridge.messages[1:] == [RegistrationAbandoned(1)]


def test_an_attempt_accepted_after_its_connection_closed_is_notified() -> None:  # H24
    scene = Scene()
    line = scene.line(1)
    scene.say(line, REGISTER)
    scene.hang_up(line)
    scene.accept(line)
    assert [type(message) for message in scene.gateway.messages] == [ConnectionClosed]


def test_a_resume_finds_the_gateway_of_its_attempt() -> None:  # H24
    scene, first = a_registered_line()
    scene.hang_up(first)
    second = scene.line(2)
    scene.say(second, a_resume(10, 5), CONFIRM)
    assert scene.gateway.messages == [
        ConnectionClosed(1, "gone"),
        AttachConnection(cast(Any, second), 5),
        MessagesArrived(2, [CONFIRM]),
    ]


def test_after_a_resume_it_is_the_new_connection_that_ends_with_the_attempt() -> None:  # H3
    scene, first = a_registered_line()
    second = scene.line(2)
    scene.say(second, a_resume(10, 5))
    scene.hang_up(first)
    scene.router.gateway_closed(ATTEMPT)
    scene.say(second, CONFIRM)
    assert scene.router.messages_dropped == 1


def test_a_resume_of_an_ended_attempt_is_refused() -> None:  # H20
    scene, line = a_registered_line()
    scene.router.gateway_closed(ATTEMPT)
    late = scene.line(2)
    scene.say(late, a_resume(10, 5))
    (refused,) = late.sent
    assert isinstance(refused, Refused)
    assert refused.code == RefusalCode.ATTEMPT_OVER
    assert late.closed
    assert not line.closed


def test_messages_after_a_refused_resume_are_dropped() -> None:  # H62
    # Each of thousands in one read used to be refused inside the one before it, until Python's stack overflowed.
    scene = Scene()
    line = scene.line(1)
    scene.say(line, *[a_resume(99, 0)] * 5000, REGISTER)
    assert [type(message) for message in line.sent] == [Refused]
    assert scene.bridge.messages == []


# --- taking over from a sidecar that died ---------------------------------------------------------------------------


def test_tasks_that_connect_before_the_coordinators_start_wait_for_them() -> None:  # H24
    scene = Scene(takes_over=True)
    new, old, gone = (scene.line(number) for number in (1, 2, 3))
    scene.say(new, REGISTER)
    scene.say(old, a_resume(11, 4), CONFIRM)
    scene.say(gone, REGISTER)
    scene.hang_up(gone)
    assert all(line.is_identified and not line.closed for line in (new, old))

    scene.attach()

    assert scene.bridge.messages == [RegistrationReceived(cast(Any, new), REGISTER), UnknownAttemptResumed(11)]


def test_an_attempt_of_a_dead_sidecar_is_left_without_an_answer_until_spark_kills_it() -> None:
    """spark-facts 16: a refusal would end it as a failure, which Spark counts."""
    scene = Scene(takes_over=True)
    scene.attach()
    line = scene.line(1)
    scene.say(line, a_resume(11, 4))
    scene.say(line, CONFIRM)
    assert scene.bridge.messages == [UnknownAttemptResumed(11)]
    assert (line.sent, line.closed, scene.router.messages_dropped) == ([], False, 1)


# --- peers that claim to be others ----------------------------------------------------------------------------


def test_a_task_cannot_register_for_another_operator() -> None:  # H76
    scene = Scene()
    line = Line(1, "numbers")
    scene.router.connected(cast(Any, line))
    scene.say(line, REGISTER)
    assert line.closed
    assert line.sent == []
    assert scene.bridge.messages == []


def test_a_task_cannot_resume_an_attempt_of_another_operator() -> None:  # H76
    scene, _ = a_registered_line()
    line = Line(2, "numbers")
    scene.router.connected(cast(Any, line))
    scene.say(line, a_resume(10, 5))
    assert line.closed
    assert scene.gateway.messages == []


def test_an_attempt_is_resumed_only_with_its_token() -> None:  # H74
    for token in (b"", token_of("words", 11), token_of("numbers", 10)):
        scene, _ = a_registered_line()
        line = scene.line(2)
        scene.say(line, Resume(10, "words", 5, token), CONFIRM)
        assert line.closed
        assert line.sent == []
        assert scene.gateway.messages == []


def test_a_peer_without_a_token_has_no_task_of_an_earlier_sidecar_killed() -> None:  # H74
    scene = Scene(takes_over=True)
    scene.attach()
    line = scene.line(1)
    scene.say(line, Resume(10, "words", 5, b"guessed"))
    assert line.closed
    assert scene.bridge.messages == []
