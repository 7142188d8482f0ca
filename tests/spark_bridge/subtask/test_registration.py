# SPDX-License-Identifier: Apache-2.0

"""A task that cannot start raises a clear error for each cause, within seconds, and leaves nothing behind (H48)."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from typing import Any

import pytest

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.handshake import PROTOCOL_VERSION
from protocol.wire.keys import KeyRing
from protocol.wire.messages import AttemptEnded, Confirm, RefusalCode, Refused, Register
from spark_bridge.subtask import AttemptOver, CannotReachSidecar, RegistrationFailed, RegistrationRefused
from spark_bridge.subtask.connection import Connection, ConnectionBroken, Interrupted, Waker, _wait
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import KEYS, TASK_ID, Peer, PeerConnection, RunningTask, registered


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def registering(peer: Peer, **changes: Any) -> tuple[RunningTask, PeerConnection]:
    """Start a task, and receive its registration."""
    task = peer.start(Recorder, **changes)
    connection = peer.accept()
    connection.expect(Register)
    return task, connection


def test_nothing_listening_is_said_with_address_and_fix(peer: Peer) -> None:
    port = free_port()
    error = peer.start(Recorder, port=port, connect_timeout_s=0.2).error()
    assert isinstance(error, CannotReachSidecar)
    text = str(error)
    assert f"127.0.0.1:{port}" in text
    assert os.strerror(errno.ECONNREFUSED) in text
    assert socket.gethostname() in text
    assert "advertised_host" in text


def test_a_sidecar_that_listens_a_moment_later_is_found(peer: Peer) -> None:
    port = free_port()
    task = peer.start(Recorder, port=port, connect_timeout_s=20.0)
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(20.0)
        sock, _ = listener.accept()
        sock.sendall(b"not this one")
        assert isinstance(task.error(), HandshakeFailed)
        sock.close()


def test_the_latest_reason_is_said_if_no_address_of_a_name_answers(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, free_port())) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with pytest.raises(CannotReachSidecar, match=os.strerror(errno.ECONNREFUSED)):
        peer.start(Recorder, host="sidecar.invalid", connect_timeout_s=0.1).outputs()
    found.clear()
    with pytest.raises(CannotReachSidecar, match=r"sidecar\.invalid has no address"):
        peer.start(Recorder, host="sidecar.invalid", connect_timeout_s=0.1).outputs()


def test_a_name_that_does_not_resolve_is_said(peer: Peer) -> None:
    with pytest.raises(CannotReachSidecar, match=r"no-such-host\.invalid"):
        peer.start(Recorder, host="no-such-host.invalid", connect_timeout_s=0.1).outputs()


def test_a_deadline_holds_for_a_peer_from_which_there_is_always_more_to_read() -> None:
    """It was looked at only when there was nothing to read (H158)."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        with pytest.raises(ConnectionBroken, match="timed out waiting for more"):
            _wait(ours, selectors.EVENT_READ, time.monotonic(), None, "more")


def test_a_listener_that_never_answers_is_given_up(peer: Peer) -> None:
    task = peer.start(Recorder, connect_timeout_s=0.2)
    with peer.accept_raw(), pytest.raises(CannotReachSidecar, match="timed out waiting for the handshake"):
        task.outputs()


def test_a_peer_that_knows_another_secret_is_refused_by_both_sides() -> None:  # H61
    with Peer(KeyRing(b"another secret, as long as it is")) as peer:
        task = peer.start(Recorder)
        with pytest.raises(HandshakeFailed):
            peer.accept()
        error = task.error()
    assert isinstance(error, HandshakeFailed)
    assert "secret" in str(error)
    assert repr(KEYS.task_key("words").secret) not in str(error)


def test_another_protocol_version_is_named_on_both_sides(peer: Peer) -> None:  # H60
    task = peer.start(Recorder)
    with peer.accept_raw() as sock:
        sock.sendall(b"HDGT" + struct.pack(">H", PROTOCOL_VERSION + 1) + bytes(32))
        error = task.error()
    assert isinstance(error, VersionMismatch)
    assert (error.ours, error.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


def test_a_peer_that_speaks_something_else_is_refused_immediately(peer: Peer) -> None:  # H61
    task = peer.start(Recorder)
    with peer.accept_raw() as sock:
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert isinstance(task.error(), HandshakeFailed)


def test_a_refusal_carries_the_sidecars_words(peer: Peer) -> None:  # H55
    task, connection = registering(peer)
    connection.send(Refused(TASK_ID, RefusalCode.CONCURRENT_RUN, "run 4 is still going on"))
    error = task.error()
    assert isinstance(error, RegistrationRefused)
    assert error.code == RefusalCode.CONCURRENT_RUN
    assert "CONCURRENT_RUN" in str(error)
    assert "run 4 is still going on" in str(error)


def test_an_attempt_that_ended_before_it_was_taken_is_over(peer: Peer) -> None:  # H11
    task, connection = registering(peer)
    connection.send(AttemptEnded(TASK_ID, "killed"))
    assert isinstance(task.error(), AttemptOver)


def test_a_registration_that_is_never_answered_says_what_it_waited_for(peer: Peer) -> None:  # H48
    task, _ = registering(peer, register_timeout_s=0.1)
    error = task.error()
    assert isinstance(error, RegistrationFailed)
    assert "register_timeout_s" in str(error)
    assert "subtask 2 of 'words'" in str(error)


def test_a_connection_that_breaks_before_the_answer_fails_the_task(peer: Peer) -> None:
    task, connection = registering(peer)
    connection.close()
    assert isinstance(task.error(), RegistrationFailed)


def test_an_answer_that_is_none_is_the_peers_fault(peer: Peer) -> None:
    task, connection = registering(peer)
    connection.send(Confirm(TASK_ID, 0))
    assert isinstance(task.error(), RemoteProtocolError)


def test_what_comes_right_after_the_answer_is_not_lost(peer: Peer) -> None:  # H22
    operator = Recorder()
    task = peer.start(operator)
    connection = peer.accept()
    connection.expect(Register)
    connection.send(registered(), connection.event(1, "immediately"))
    connection.confirmed(1)
    connection.receive()  # Opened
    peer.finish(task)
    assert ("event", "immediately") in operator.calls


def test_a_connection_that_waits_ends_as_soon_as_its_thread_has_to(peer: Peer) -> None:  # H57
    looks = 0

    def has_to_end() -> bool:
        nonlocal looks
        looks += 1
        waker.wake()
        return looks == 5

    waker = Waker(has_to_end)
    waker.wake()
    with pytest.raises(Interrupted):
        Connection.open(peer.endpoint(), time.monotonic() + 60.0, waker)
    waker.close()
    assert looks == 5
    with peer.accept_raw() as sock:
        while sock.recv(1000):
            pass


def test_the_endpoint_never_shows_its_secret(peer: Peer) -> None:  # H61
    assert repr(KEYS.task_key("words").secret) not in repr(peer.endpoint())
