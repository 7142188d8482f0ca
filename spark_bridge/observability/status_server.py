# SPDX-License-Identifier: Apache-2.0

"""A small HTTP server that shows a sidecar to people and machines: ``Watching.status_port``.

It has its own threads, so it can report that the sidecar's event loop is blocked. It answers GET requests only,
reads no request bodies, and closes each connection after one answer. Whatever a peer does, it holds at most
``CONNECTIONS_MAX`` connections, each with a small buffer and deadlines that no byte moves. One more takes the place of
the oldest that has not shown the token, unless that one's request is being answered at this moment (H158).

On a loopback address, a request must name a loopback host, so that no web page can reach the server through a host name
that it controls (DNS rebinding). On any other address, each request needs the token.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import ipaddress
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from actors import ActorError
from actors.logs import get_logger
from spark_bridge.common.addresses import written
from spark_bridge.common.errors import SidecarNotRunning
from spark_bridge.common.forks import let_go_in_forks
from spark_bridge.observability.status import SidecarStatus
from spark_bridge.server.server import ServerStartError

T = TypeVar("T")
log = get_logger("headgate.observability")

CONNECTIONS_MAX = 32
REQUEST_BYTES_MAX = 16 * 1024
"""Of the request line and the headers together."""
REQUEST_TIMEOUT_S = 10.0
"""How long a whole request may take to arrive, and then how long its answer may take to be sent."""
LINGER_S = 0.5
"""How long a peer that has its answer may take to close its end."""
LINGER_BYTES_MAX = 64 * 1024
ANSWER_TIMEOUT_S = 5.0
"""How long a request waits for the sidecar's event loop."""
TOKEN_CHARACTERS_MIN = 16
LISTEN_BACKLOG = 64
CLOSE_TIMEOUT_S = 5.0

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"


class Request(NamedTuple):
    """What a route is told: the path, the last value of each query parameter, and the header ``Accept``."""

    path: str
    query: Mapping[str, str]
    accept: str


class Content(NamedTuple):
    """What a route answers."""

    content_type: str
    body: bytes


Route = Callable[[Request], Content]
"""Makes the answer of one path. It is called on a thread of the server, concurrently if several clients ask.

It may raise ``Unavailable``, and must end soon.
"""


class Unavailable(Exception):
    """There is no answer now. The text says why, and goes to the client, with the status 503."""


class LoopCaller:
    """Calls coroutine functions on an event loop from the server's threads.

    ``close`` may be called on any thread. It ends the calls that wait; later ones raise ``Unavailable``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    def __call__(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``function()``, awaited on the loop. Raises what it raises, and ``Unavailable``."""
        if self._loop is asyncio._get_running_loop():
            raise Unavailable("the sidecar's event loop cannot wait for itself: collect or look on another thread")
        with self._lock:
            if self._closed:
                raise Unavailable("the sidecar is closing")
            future = asyncio.run_coroutine_threadsafe(function(), self._loop)
            self._waiting.add(future)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the function's own
            future.cancel()
            raise Unavailable(
                f"the sidecar's event loop has not answered for {self._timeout_s:g} s: a coordinator computes or "
                "waits without awaiting, and the sidecar's log names the place"
            ) from None
        except (CancelledError, SidecarNotRunning):
            raise Unavailable("the sidecar is starting or closing") from None
        except ActorError as error:
            raise Unavailable(f"an operator does not answer, or is being released: {error}") from None
        finally:
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """See the class."""
        with self._lock:
            self._closed = True
            waiting = tuple(self._waiting)
        for future in waiting:
            future.cancel()


class RecentStatus:
    """The status for other threads, at most ``KEPT_S`` old: many who look cost the event loop no more than one.

    ``close`` is that of the ``LoopCaller``.
    """

    KEPT_S = 0.25

    def __init__(self, call: LoopCaller, take: Callable[[], Coroutine[Any, Any, SidecarStatus]]) -> None:
        self._call = call
        self._take = take
        self.close = call.close
        self._lock = threading.Lock()
        self._status: SidecarStatus | None = None
        self._taken = 0.0

    def __call__(self) -> SidecarStatus:
        """Raises as ``LoopCaller`` does."""
        if not self._lock.acquire(timeout=ANSWER_TIMEOUT_S):
            raise Unavailable("the sidecar's event loop does not answer: look for `event loop blocked` in the log")
        try:
            if self._status is None or time.monotonic() > self._taken + self.KEPT_S:
                self._status = self._call(self._take)
                self._taken = time.monotonic()
            return self._status
        finally:
            self._lock.release()


def check_status_access(host: str, port: object, token: str | None) -> None:
    """Raise ``ValueError``, saying what to do, if the server may not be started with these settings."""
    if token is not None and not _is_strong(token):
        raise ValueError(
            f"status_token must be a str of at least {TOKEN_CHARACTERS_MIN} characters out of letters, digits and "
            "-._~, not this one: make one with python -c 'import secrets; print(secrets.token_urlsafe(24))'"
        )
    if port is not None and token is None and not is_loopback(host):
        raise ValueError(
            f"status_host {host!r} can be reached from other machines, so it needs a token: set status_token (for "
            "headgate sidecar: --status-token-file or HEADGATE_STATUS_TOKEN), or use 127.0.0.1"
        )


def _is_strong(token: str) -> bool:
    return len(token) >= TOKEN_CHARACTERS_MIN and token.isascii() and not token.translate(_UNRESERVED).strip("")


_UNRESERVED = {ord(one): None for one in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"}


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback address; no name is looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class StatusServer:
    """The server; see the module. ``routes`` maps paths to the functions that answer them.

    ``start`` listens and returns. Raises ``ServerStartError`` for an address that cannot be used. ``close`` may be
    called on any thread except those of the server, blocks until all of them have ended, and may be called twice.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], token: str | None = None) -> None:
        check_status_access(host, port, token)
        self.routes = routes
        self.host = host
        self.only_local = is_loopback(host)
        self.address: tuple[str, int] = (host, port)
        """The host and port on which it listens."""
        self._token = token
        self._session = secrets.token_urlsafe(32)  # the value of the cookie: worth nothing after this server's end
        self._connections: dict[socket.socket, bool] = {}  # the oldest first; whether it keeps its place
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._waker, self._wakes = socket.socketpair()
        self._accepting: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        let_go_in_forks(self)

    def descriptors(self) -> Iterable[int]:
        """See ``OwnsSockets``."""
        sockets = (self._waker, self._wakes, self._listener, *self._connections)
        selector = () if self._selector.get_map() is None else (self._selector.fileno(),)
        return [*selector, *(one.fileno() for one in sockets if one is not None)]

    def start(self) -> None:
        """See the class."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self.host, self.address[1], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
        except OSError as error:
            self.close()
            raise ServerStartError(
                f"cannot show the status on {written(*self.address)}: {error.strerror or error}. If another "
                "application uses the port, choose another status_port (0 takes any free port); status_host must be "
                "an address of this machine"
            ) from error
        self._listener.setblocking(False)
        self.address = self._listener.getsockname()[:2]
        self._accepting = threading.Thread(target=self._accept, name="headgate-status", daemon=True)
        self._accepting.start()

    @property
    def cookie_name(self) -> str:
        """Cookies do not tell the ports of one host apart."""
        return f"headgate-status-{self.address[1]}"

    def close(self) -> None:
        """See the class."""
        self._waker.close()
        if self._accepting is not None:
            self._accepting.join()
        self._selector.close()
        self._wakes.close()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            threads = tuple(self._threads)
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        with self._selector as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while all(key.fileobj is listener for key, _ in selector.select()):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    time.sleep(0.01)  # the peer has gone, or there are no file descriptors: do not spin
                    continue
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        if not self._take_in(connection):
            with connection, suppress(OSError):
                connection.setblocking(False)
                connection.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        thread = threading.Thread(target=self._converse, args=(connection,), name="headgate-status-client", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _take_in(self, connection: socket.socket) -> bool:
        """Whether there is a place for it, which may be that of the oldest one that does not keep its own."""
        with self._lock:
            if len(self._connections) >= CONNECTIONS_MAX:
                oldest = next((one for one, keeps in self._connections.items() if not keeps), None)
                if oldest is None:
                    return False
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._connections[connection] = False
            return True

    def keep(self, connection: socket.socket, keeps: bool) -> None:
        """Whether the connection keeps its place while others come. One that has shown the token always does."""
        with self._lock:
            if connection in self._connections:
                self._connections[connection] = keeps or self._token is not None

    def _converse(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):
                _Conversation(connection, self)
        except Exception:
            log.exception("status request failed")
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)
                self._threads.discard(threading.current_thread())

    # --- who may ask ----------------------------------------------------------------------------------------------

    def accepts_host(self, host: str | None) -> bool:
        """Whether the header ``Host`` names this server in a way that no foreign web page can."""
        if not self.only_local:
            return True  # the token protects it, and its cookie belongs to one host name
        if host is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def accepts_token(self, token: str) -> bool:
        """Compare in constant time."""
        return self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def accepts(self, authorization: str, cookie: str) -> bool:
        """Whether these two headers prove that the peer knows the token, or none is needed."""
        if self._token is None:
            return True
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.accepts_token(token.strip()):
            return True
        _, _, value = f"; {cookie}".partition(f"; {self.cookie_name}=")  # no other cookie is parsed (H157)
        return hmac.compare_digest(value.partition(";")[0].encode(), self._session.encode())

    @property
    def cookie(self) -> str:
        """What to set in a browser that has shown the token."""
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"


class _TooMuch(Exception):
    """The request is too large."""


class _Incoming(io.RawIOBase):
    """The bytes of one request, until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + REQUEST_TIMEOUT_S
        self._left = REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise _TooMuch
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        if not count:
            raise ConnectionAbortedError("the peer has left within its request")
        self._left -= count
        return count


class _Conversation(BaseHTTPRequestHandler):
    """One request and its answer."""

    command = ""
    request_version = "HTTP/1.1"
    requestline = ""
    protocol_version = "HTTP/1.1"
    server_version = "headgate"
    sys_version = ""

    def __init__(self, connection: socket.socket, server: StatusServer) -> None:
        self._status_server = server
        super().__init__(connection, connection.getpeername(), cast(Any, server))

    def setup(self) -> None:
        self.connection = self.request
        self.rfile = io.BufferedReader(_Incoming(self.connection))
        self.wfile = io.BytesIO()  # sent as a whole

    def handle(self) -> None:
        self.close_connection = True
        try:
            self.handle_one_request()
        except _TooMuch:
            self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def finish(self) -> None:
        self.rfile.close()
        self.connection.settimeout(REQUEST_TIMEOUT_S)
        self.connection.sendall(cast(io.BytesIO, self.wfile).getvalue())
        self.connection.shutdown(socket.SHUT_WR)
        # Closing with unread bytes would reset the connection before the answer is read.
        deadline, left = time.monotonic() + LINGER_S, LINGER_BYTES_MAX
        while left > 0 and (left_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            if not (count := len(self.connection.recv(4096))):
                break
            left -= count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # all methods except GET, known ones and others
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET"})

    def do_GET(self) -> None:
        server, headers = self._status_server, self.headers
        if len(headers.get_all("Host", ())) > 1 or not server.accepts_host(headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "use the host name localhost or a loopback address")
            return
        try:
            target = urlsplit(self.path)
            query = dict(parse_qsl(target.query, max_num_fields=64))
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        token = query.pop("token", None)
        if token is not None and server.accepts_token(token):
            self._sign_in(target.path)
        elif not server.accepts(headers.get("Authorization", ""), headers.get("Cookie", "")):
            self._answer(
                HTTPStatus.UNAUTHORIZED,
                "this needs the token of status_token: send Authorization: Bearer TOKEN, or open /?token=TOKEN once",
                headers={"WWW-Authenticate": 'Bearer realm="headgate"'},
            )
        else:
            self._route(Request(target.path, query, headers.get("Accept", "")))

    def _sign_in(self, path: str) -> None:
        """Set the cookie, and continue without the token in the address.

        A redirect would not do: after a link from another site, a browser would not send the strict cookie with it.
        """
        path = path if path in self._status_server.routes else "/"  # anything else might lead to another host
        page = f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(path)}"><title>Headgate</title>'
        self._send(HTTPStatus.OK, Content(_HTML, page.encode()), {"Set-Cookie": self._status_server.cookie})

    def _route(self, request: Request) -> None:
        route = self._status_server.routes.get(request.path)
        if route is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        self._status_server.keep(self.connection, True)
        try:
            content = route(request)
        except Unavailable as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            log.exception("status request failed", path=request.path)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the sidecar's log says why")
        else:
            self._send(HTTPStatus.OK, content)
        finally:
            self._status_server.keep(self.connection, False)

    def _answer(self, status: HTTPStatus, text: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        said = f"{status.phrase}: {text}" if text else status.phrase
        self._send(status, Content(_TEXT, f"{said}\n".encode()), headers or {})

    def _send(self, status: HTTPStatus, content: Content, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        everything = {"Content-Type": content.content_type, **_HEADERS, "Connection": "close", **(headers or {})}
        for name, value in {**everything, "Content-Length": str(len(content.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For a request that cannot be read. Says nothing that came from the peer."""
        self._answer(HTTPStatus(code))

    def version_string(self) -> str:
        return self.server_version

    def log_message(self, format: str, *args: Any) -> None:
        """A look at the status is not worth a line in the log."""
