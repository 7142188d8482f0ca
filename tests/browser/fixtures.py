# SPDX-License-Identifier: Apache-2.0

"""A real headless Chromium, and visits to pages that must neither complain nor ask anything outside this machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Error, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing but this machine has a name
]
FIND_CHROMIUM = Path(__file__).resolve().parents[2] / ".ci" / "find-chromium"
NEWS_TIMEOUT_MS = 60_000


class NoChromium(Exception):
    """The text says how to get one."""


def find_chromium() -> str:
    """Return the path of a Chromium. Raises ``NoChromium``."""
    found = subprocess.run([FIND_CHROMIUM], capture_output=True, text=True, check=False)
    if found.returncode:
        raise NoChromium(found.stderr.splitlines()[-1])
    return found.stdout.strip()


@dataclass
class Visit:
    """One page in a separate browser context, with its requests and its complaints."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.set_default_timeout(NEWS_TIMEOUT_MS)
        self.page.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on(
            "response", lambda answer: self._note("error", f"{answer.status} {answer.url}", answer.status >= 400)
        )
        self.page.on("pageerror", lambda error: self._note("error", str(error)))

    def _note(self, kind: str, text: str, is_one: bool = True) -> None:
        if is_one and kind in ("error", "warning") and "willReadFrequently" not in text:  # about what the tests read
            self.complaints.append(text)

    def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value.

        Playwright's own ``wait_for_function`` needs ``eval``, which the page's content security policy forbids.
        """
        deadline = time.monotonic() + NEWS_TIMEOUT_MS / 1e3
        while not (value := self._now(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; the page says:\n{self.text()}"
            self.page.wait_for_timeout(50)
        return value

    def _now(self, expression: str) -> Any:
        try:
            return self.page.evaluate(expression)
        except Error as error:
            if "Execution context was destroyed" not in str(error):
                raise
            return None  # another page comes

    def close(self) -> None:
        """Leave the page: it asks nothing more."""
        self.page.context.close()

    def text(self) -> str:
        """Everything that the page of Headgate says."""
        return self.page.locator("#headgate").inner_text()

    def violations(self, selector: str = "html") -> list[str]:
        """What axe finds wrong in the part of the page under ``selector``."""
        found = Axe().run(self.page, context=selector)
        return [
            f"{one['id']}: {one['help']}: {node['html']} {node.get('failureSummary', '')}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def colors_of(self, subtask: int) -> list[int]:
        """Red, green, blue near the edge of a subtask's cell in the heat map."""
        color: list[int] = self.page.evaluate(
            """(subtask) => {
                const canvas = document.querySelector(".hg-map");
                const [columns, size] = canvas.dataset.grid.split("x").map(Number);
                const ratio = canvas.width / parseFloat(canvas.style.width);
                const x = ((subtask % columns) * size + 2.5) * ratio;
                const y = (Math.floor(subtask / columns) * size + 2.5) * ratio;
                return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3)];
            }""",
            subtask,
        )
        return color


NewVisit = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the tests of one module. Its loop must not run beside those of other tests."""
    try:
        path = find_chromium()
    except NoChromium as error:
        pytest.skip(str(error))
    home: Path = tmp_path_factory.mktemp("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=ARGUMENTS, env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[NewVisit]:
    """Open a page. At the end, no request may have left this machine, and the page may not have complained."""
    made: list[Visit] = []

    def open_page(url: str, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        one = Visit(context.new_page())
        one.watch()
        made.append(one)
        one.page.goto(url)
        return one

    yield open_page
    for one in made:
        one.close()
    complaints = [complaint for one in made for complaint in one.complaints]
    assert not complaints, complaints
    hosts = {urlsplit(url).hostname for one in made for url in one.requests if not url.startswith("data:")}
    assert hosts <= {"127.0.0.1"}, hosts


__all__ = ["NewVisit", "Visit", "browser", "visit"]
