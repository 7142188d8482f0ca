# SPDX-License-Identifier: Apache-2.0

"""Serves the page with a status that a test makes up, and strict headers."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable
from types import TracebackType

from spark_bridge.observability import page_files as page
from spark_bridge.observability.diagnosis import explain
from spark_bridge.observability.page_data import page_json
from spark_bridge.observability.status import SidecarStatus

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"


class PageServer:
    """Serves on loopback while it is entered. ``make`` makes the next status; None: there is no page any more.

    While ``has_figures`` is False, the status has no content, as that of Spark's tab before the first figures.
    """

    has_figures = True

    def __init__(self, make: Callable[[], SidecarStatus | None]) -> None:
        self.make = make
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = outer._answer(self.path)
                if answer is None:
                    self.send_error(404)
                    return
                content_type, body = answer
                self.send_response(200 if body else 204)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def _answer(self, path: str) -> tuple[str, bytes] | None:
        match path:
            case "/":
                return "text/html; charset=utf-8", page.document().encode()
            case "/page.js":
                return "text/javascript; charset=utf-8", page.script()
            case "/page.css":
                return "text/css; charset=utf-8", page.style()
            case "/status.json":
                status = self.make()
                if not self.has_figures:
                    return "application/json", b""
                return None if status is None else ("application/json", page_json(status, explain(status)))
            case _:
                return None

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
