# SPDX-License-Identifier: Apache-2.0

"""The status server over real TCP: who may ask, what it refuses, and that no peer can hold it up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from actors import AskTimeout
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.observability import status_server
from spark_bridge.observability.status_server import (
    CONNECTIONS_MAX,
    REQUEST_BYTES_MAX,
    Content,
    LoopCaller,
    RecentStatus,
    Request,
    Route,
    StatusServer,
    Unavailable,
)
from spark_bridge.server.server import ServerStartError
from spark_bridge.standalone.command import status_token

TOKEN = "a-token-of-20-letters"


def echo(request: Request) -> Content:
    return Content("text/plain", repr(request).encode())


@contextmanager
def running(
    routes: Mapping[str, Route] | None = None, host: str = "127.0.0.1", token: str | None = None
) -> Iterator[StatusServer]:
    server = StatusServer(host, 0, {"/": echo} if routes is None else routes, token)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ask(
    server: StatusServer, target: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    with closing(HTTPConnection(*server.address, timeout=60)) as connection:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def exchange(server: StatusServer, sent: bytes) -> bytes:
    """Everything that the server answers to these bytes, until it closes the connection."""
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(65_536):
            received += part
        return received


def test_a_route_answers_with_its_type_and_nothing_is_stored_or_embedded() -> None:
    with running() as server:
        status, headers, body = ask(server, "/?a=1&a=2&b=%20", Accept="text/html")
    assert (status, headers["Content-Type"]) == (200, "text/plain")
    assert body == b"Request(path='/', query={'a': '2', 'b': ' '}, accept='text/html')"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Connection"] == "close"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy
    assert headers["Server"].strip() == "headgate"  # no versions


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT", "OPTIONS", "SOMETHING"])
def test_only_get_is_answered(method: str) -> None:
    with running() as server:
        status, headers, _ = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("target", ["/other", "/../etc/passwd", "/static/"])
def test_an_unknown_path_is_not_found_and_not_repeated(target: str) -> None:
    with running() as server:
        status, _, body = ask(server, target)
    assert (status, body) == (404, b"Not Found\n")


def test_it_listens_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with running(host="::1") as server:
        assert server.address[0] == "::1"
        assert ask(server)[0] == 200


# --- names: DNS rebinding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:99"])
def test_a_loopback_host_is_answered_on_any_port(host: str) -> None:
    with running() as server:  # an SSH tunnel may have another port
        assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["attacker.example", "localhost.attacker.example", "127.0.0.1.attacker.example:80", "10.0.0.1", "", "[::1"]
)
def test_a_foreign_host_name_is_refused_on_loopback(host: str) -> None:
    with running() as server:
        assert ask(server, Host=host)[0] == 403


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: attacker.example\r\n"])
def test_no_host_and_two_hosts_are_refused(hosts: bytes) -> None:
    with running() as server:
        assert exchange(server, b"GET / HTTP/1.1\r\n" + hosts + b"\r\n").startswith(b"HTTP/1.1 403 ")


# --- the token ----------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_shown() -> None:
    with running(token=TOKEN) as server:
        for headers in ({}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": f"Basic {TOKEN}"}):
            status, answered, body = ask(server, **headers)
            assert (status, answered["WWW-Authenticate"]) == (401, 'Bearer realm="headgate"')
            assert b"Request" not in body
        assert ask(server, "/?token=wrong")[0] == 401
        assert ask(server, "/other")[0] == 401  # it does not say which paths there are


def test_the_token_as_a_header_is_accepted() -> None:
    with running(token=TOKEN) as server:
        assert ask(server, Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, Authorization=f"bearer {TOKEN}")[0] == 200


def test_a_browser_that_shows_the_token_gets_a_cookie_for_this_server_only() -> None:
    with running(token=TOKEN) as server, running(token=TOKEN) as other:
        status, headers, body = ask(server, f"/?token={TOKEN}")
        assert status == 200
        assert b'content="0;url=/"' in body  # the token leaves the address
        assert TOKEN.encode() not in body
        cookie, *attributes = headers["Set-Cookie"].split("; ")
        assert sorted(attributes) == ["HttpOnly", "Path=/", "SameSite=Strict"]
        assert TOKEN not in cookie  # other servers on this host get it too
        assert ask(server, Cookie=cookie)[0] == 200
        name, _, value = cookie.partition("=")
        assert ask(server, Cookie=f"{name}=x{value[1:]}")[0] == 401
        assert ask(server, Cookie=f"{other.cookie_name}={value}")[0] == 401
        assert ask(other, Cookie=f"{other.cookie_name}={value}")[0] == 401
        assert ask(server, Cookie="=;;=")[0] == 401


def test_signing_in_leads_to_a_page_of_this_server() -> None:
    with running({"/": echo, "/a&b": echo}, token=TOKEN) as server:
        for path, expected in (
            ("/", "/"),
            ("/a&b", "/a&amp;b"),
            ("//attacker.example/", "/"),
            ("/\\attacker.example", "/"),
            ('/"><script>alert(1)</script>', "/"),
        ):
            body = exchange(server, f"GET {path}?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert f'content="0;url={expected}"'.encode() in body
            assert b"<script" not in body


def test_another_host_than_loopback_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "driver.example"):
        with pytest.raises(ValueError, match="needs a token: set status_token"):
            SidecarConfig(watching=Watching(status_port=0, status_host=host))
        with pytest.raises(ValueError, match="needs a token"):
            StatusServer(host, 0, {})
        assert Watching(status_port=0, status_host=host, status_token=TOKEN).status_host == host
        SidecarConfig(watching=Watching(status_host=host))  # off
    for host in ("localhost", "127.0.0.1", "::1"):
        SidecarConfig(watching=Watching(status_port=0, status_host=host))


def test_a_server_for_other_machines_answers_to_every_name_that_shows_the_token() -> None:
    with running(host="0.0.0.0", token=TOKEN) as server:
        assert ask(server, Host="driver.example", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, Host="localhost")[0] == 401


@pytest.mark.parametrize(
    "token", ["", "short", "fifteen-letters", "twenty letters, with blanks", "übergroß-und-lang-genug"]
)
def test_a_weak_token_is_refused_with_a_way_to_make_one(token: str) -> None:
    with pytest.raises(ValueError, match="token_urlsafe"):
        SidecarConfig(watching=Watching(status_token=token))


@pytest.mark.parametrize("port", [-1, 65_536, True, "8080"])
def test_an_invalid_port_is_refused(port: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="status_port must be a port from 0 to 65535"):
        SidecarConfig(watching=Watching(status_port=port))


def test_the_command_takes_the_token_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert status_token(str(file)) == TOKEN
    with pytest.raises(ValueError, match="--status-token-file"):
        status_token(str(tmp_path / "missing"))
    assert status_token(None) is None
    monkeypatch.setenv("HEADGATE_STATUS_TOKEN", TOKEN)
    assert status_token(None) == TOKEN


# --- hostile peers ------------------------------------------------------------------------------------------------


def test_a_request_is_bounded() -> None:
    filler = b"a" * REQUEST_BYTES_MAX
    with running() as server:
        line = exchange(server, b"GET /" + filler + b" HTTP/1.1\r\n\r\n")
        header = exchange(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + filler + b"\r\n\r\n")
    assert line.startswith(b"HTTP/1.1 431 ")
    assert header.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"<script> / HTTP/1.1\r\n\r\n",
    ],
)
def test_nonsense_is_refused_and_not_repeated(sent: bytes) -> None:
    with running() as server:
        answer = exchange(server, sent)
        assert b"script" not in answer.partition(b"\r\n\r\n")[2]
        assert b" 200 " not in answer
        assert ask(server)[0] == 200


def test_a_slow_request_ends_at_its_deadline_whatever_it_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "REQUEST_TIMEOUT_S", 1.0)
    with running() as server, socket.create_connection(server.address, timeout=60) as connection:
        connection.settimeout(0.05)
        for _ in range(200):
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(4096):
                    return  # the server has closed it, although each byte came early enough
    pytest.fail("200 bytes, one every 50 ms, and the server still waits")


def test_a_peer_that_trickles_after_its_answer_is_gone_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte every half second kept a place for hours (H158)."""
    monkeypatch.setattr(status_server, "LINGER_S", 1.0)
    with running() as server, socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while connection.recv(4096):
            """Read the answer."""
        with suppress(OSError):  # it is reset when its time is over
            for _ in range(200):
                connection.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("200 bytes, one every 50 ms, and the server still waits")


def test_idle_peers_give_way_to_those_who_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest was refused, so 40 idle connections kept out everybody for ten seconds (H158)."""
    monkeypatch.setattr(status_server, "REQUEST_TIMEOUT_S", 1000.0)
    with running() as server, ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(server.address, timeout=60)) for _ in range(40)]
        for one in idle:
            with suppress(OSError):
                one.sendall(b"GET ")
        assert ask(server)[0] == 200
        assert [one.recv(1) for one in idle[:8]] == [b""] * 8, "the oldest are gone"
        idle[-1].sendall(b"/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
    assert CONNECTIONS_MAX == 32


def test_peers_that_are_being_answered_keep_their_places_and_the_next_is_told() -> None:  # H158
    arrived, may_answer = threading.Semaphore(0), threading.Event()

    def slow(request: Request) -> Content:
        arrived.release()
        assert may_answer.wait(60)
        return Content("text/plain", b"x")

    with running({"/": slow}) as server, ExitStack() as stack:
        asking = [stack.enter_context(socket.create_connection(server.address, timeout=60)) for _ in range(32)]
        for one in asking:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert arrived.acquire(timeout=60)
        assert exchange(server, b"").startswith(b"HTTP/1.1 503 ")
        may_answer.set()
        assert [one.recv(12) for one in asking] == [b"HTTP/1.1 200"] * 32


def test_a_peer_with_the_token_keeps_its_place_while_it_reads() -> None:  # H158
    large = bytes(20 * 2**20)
    with running({"/": lambda request: Content("text/plain", large)}, token=TOKEN) as server, ExitStack() as stack:
        reader = stack.enter_context(socket.create_connection(server.address, timeout=60))
        reader.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        received = len(reader.recv(1))
        for _ in range(40):
            stack.enter_context(socket.create_connection(server.address, timeout=60))
        assert ask(server)[0] == 401
        while part := reader.recv(2**20):
            received += len(part)
        assert received > len(large)


def test_a_request_without_its_end_is_not_answered() -> None:
    """The route was called for a peer that has left."""
    asked: list[Request] = []

    def route(request: Request) -> Content:
        asked.append(request)
        return echo(request)

    with running({"/": route}) as server, socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096) == b""
    assert asked == []


def test_the_cookie_is_found_behind_any_other_and_no_other_is_parsed() -> None:
    """One of 16 KiB held the interpreter for half a second (H157)."""
    with running(token=TOKEN) as server:
        _, headers, _ = ask(server, f"/?token={TOKEN}")
        cookie = headers["Set-Cookie"].split("; ")[0]
        costly = 'a="' + "\\a" * 3000 + '"'
        for others in (f"{costly}; {cookie}", f"{cookie}; {costly}", f"=; x={cookie}; {cookie}; b=2", f'"; {cookie}'):
            assert ask(server, Cookie=others)[0] == 200, others[:50]
        for wrong in (f"x{cookie}", f"x={cookie}", cookie[:-1], f"{cookie}x", costly):
            assert ask(server, Cookie=wrong)[0] == 401, wrong[:50]


def test_closing_ends_idle_connections_and_all_threads() -> None:
    before = set(threading.enumerate())
    with running() as server, socket.create_connection(server.address, timeout=60) as idle:
        idle.sendall(b"GET ")
        assert ask(server)[0] == 200
        server.close()
        assert set(threading.enumerate()) <= before
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address, timeout=60)


def test_a_port_in_use_is_said_with_the_setting() -> None:
    with running() as server:
        other = StatusServer(*server.address, {})
        with pytest.raises(ServerStartError, match="choose another status_port"):
            other.start()


# --- the sidecar's event loop -------------------------------------------------------------------------------------


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def route_of(call: LoopCaller, function: Any) -> Route:
    return lambda request: Content("text/plain", call(function))


def test_a_route_that_asks_the_loop_answers() -> None:
    async def name() -> bytes:
        return threading.current_thread().name.encode()

    with looping() as loop, running({"/": route_of(LoopCaller(loop), name)}) as server:
        status, _, body = ask(server)
    assert status == 200
    assert not body.startswith(b"headgate-status")


def test_a_blocked_loop_is_said() -> None:
    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    with looping() as loop:
        released = threading.Event()
        loop.call_soon_threadsafe(released.wait, 60)
        with running({"/": route_of(LoopCaller(loop, timeout_s=0.1), never)}) as server:
            status, _, body = ask(server)
            released.set()
            assert ask(server)[0] == 503  # it turns, and the function does not return
    assert status == 503
    assert b"event loop has not answered for 0.1 s" in body


def test_closing_ends_the_calls_that_wait() -> None:
    entered = threading.Event()

    async def never() -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    with looping() as loop:
        call = LoopCaller(loop, timeout_s=600)
        with running({"/": route_of(call, never)}) as server:
            answers: list[int] = []
            thread = threading.Thread(target=lambda: answers.append(ask(server)[0]))
            thread.start()
            entered.wait()
            call.close()
            thread.join()
            assert answers == [503]
            assert ask(server)[0] == 503


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (Unavailable("because"), 503, b"because"),
        (SidecarNotRunning("closed"), 503, b"starting or closing"),
        (AskTimeout("the tracker", "ViewOperator", 10.0), 503, b"the tracker"),
        (KeyError("a secret"), 500, b"log"),
    ],
)
def test_a_route_that_raises_answers_with_the_reason_or_points_to_the_log(
    error: Exception, expected: int, text: bytes
) -> None:
    async def fail() -> bytes:
        raise error

    with looping() as loop, running({"/": route_of(LoopCaller(loop), fail)}) as server:
        status, _, body = ask(server)
    assert status == expected
    assert text in body
    assert b"a secret" not in body


def test_many_who_look_take_one_status() -> None:
    taken: list[object] = []

    async def take() -> Any:
        taken.append(object())
        return taken[-1]

    with looping() as loop:
        recent = RecentStatus(LoopCaller(loop), take)
        recent.KEPT_S = 600.0
        assert recent() is recent() is taken[0]
        recent.KEPT_S = -1.0
        assert recent() is taken[1]
