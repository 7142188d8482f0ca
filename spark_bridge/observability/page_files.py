# SPDX-License-Identifier: Apache-2.0

"""The page that shows a sidecar: static files, the same in Spark's UI and on the status server."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from spark_bridge.observability.diagnosis import explain
from spark_bridge.observability.page_data import page_json
from spark_bridge.observability.status import SidecarStatus
from spark_bridge.observability.status_server import Content, Request, Route


def body() -> str:
    """The body as HTML that is also well-formed XML."""
    return _read("page.html")


def script() -> bytes:
    """The script. It asks for ``status.json`` next to its own address."""
    return _read("page.js").encode()


def style() -> bytes:
    """The style sheet."""
    return _read("page.css").encode()


def document() -> str:
    """The whole page, for a server that adds no frame. Script and style are ``page.js`` and ``page.css``."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n<title>Headgate</title>\n'
        '<link rel="icon" href="data:,"/>\n<link rel="stylesheet" type="text/css" href="page.css"/>\n'
        '<script defer="defer" src="page.js"></script>\n</head>\n<body class="hg-alone">\n<main>\n<h1>Headgate</h1>\n'
        f"{body()}</main>\n</body>\n</html>\n"
    )


def page_routes(take: Callable[[], SidecarStatus]) -> dict[str, Route]:
    """The page on the status server. ``take`` is called on its threads."""

    def fixed(content_type: str, body: bytes) -> Route:
        return lambda request: Content(content_type, body)

    def status(request: Request) -> Content:
        newest = take()
        return Content("application/json", page_json(newest, explain(newest)))

    return {
        "/": fixed("text/html; charset=utf-8", document().encode()),
        "/page.js": fixed("text/javascript; charset=utf-8", script()),
        "/page.css": fixed("text/css; charset=utf-8", style()),
        "/status.json": status,
    }


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")
