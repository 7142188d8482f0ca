# SPDX-License-Identifier: Apache-2.0

"""Makes the pictures of the documentation, of a real job in Spark's own UI: ``make pictures``.

The job crawls: tasks ask the coordinator what to fetch, report what they found, and one of them is killed on the way.
In the end the coordinator does not answer any more, and the page says who waits for whom.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from pyspark.sql import SparkSession

from headgate import CheckpointConfig, Sidecar, SubtaskContext, SubtaskOperator
from tests.browser.fixtures import ARGUMENTS, NoChromium, find_chromium
from tests.spark.actions import Action

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
BYTES_MAX = 150_000
SUBTASKS = 8
SECONDS = float(os.environ.get("PICTURES_AFTER_S", "45"))


class Fetch(SubtaskOperator):
    """Asks for work, works, and reports, until it is told to stop."""

    snapshot_anywhere = True

    def __init__(self) -> None:
        self.stopping = False
        self.pages = 0

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.pages = int(state or b"0")

    def handle_event(self, event: Any) -> None:
        if event == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.stopping = event == "stop"

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.pages

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        dice = random.Random(self.context.subtask)
        while not self.stopping:
            if dice.random() < 0.2:
                self.context.request(["next", self.pages], timeout_s=600.0)
            self.context.send_event(["found", dice.randrange(1000)])
            self.pages += 1
            self.context.wait_for_event(timeout_s=dice.uniform(0.005, 0.04))


def a_crawler() -> Any:
    """The coordinator. Its file has a plain name in the picture, wherever the repository lies."""
    source = Path(__file__).with_name("crawl.py").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "crawl"}
    exec(compile(source, "crawl.py", "exec"), namespace)
    return namespace["Crawler"]()


def take(browser: Browser, name: str, url: str, ready: str, *, height: int, seconds: float) -> None:
    """Watch a page for this long, then take a picture of it in light and in dark."""
    looking = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": height})
        page = context.new_page()
        page.goto(url)
        looking.append((scheme, context, page))
    deadline = time.monotonic() + seconds
    for scheme, context, page in looking:
        page.bring_to_front()
        while time.monotonic() < deadline or not page.evaluate(ready):
            assert time.monotonic() < deadline + 60, page.locator("#headgate").inner_text()
            page.wait_for_timeout(200)
        page.wait_for_timeout(1500)
        page.evaluate("document.querySelector('.scroll-btn-container')?.remove()")  # Spark's; it hides what is below
        shot = Image.open(io.BytesIO(page.screenshot()))
        path = PICTURES / f"{name}-{scheme}.png"
        shot.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
        size = path.stat().st_size
        print(f"{path.relative_to(PICTURES.parents[1])}: {size:,} bytes")
        assert size < BYTES_MAX, "too large for the documentation"
        context.close()


def main() -> int:
    try:
        path = find_chromium()
    except NoChromium as error:
        print(error, file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    session = SparkSession.Builder().master(f"local[{SUBTASKS + 4},4]").appName("crawler")
    settings = {"spark.ui.port": "0", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for key, value in settings.items():
        session = session.config(key, value)
    spark = session.getOrCreate()
    url = str(spark.sparkContext.uiWebUrl).rstrip("/") + "/headgate/"
    crawler, resizer = a_crawler(), a_crawler()
    with Sidecar(spark) as sidecar:
        checkpoint = CheckpointConfig(interval_s=3.0, timeout_s=60.0)
        crawl = sidecar.coordinate("crawl", crawler, parallelism=SUBTASKS, mode="streaming", checkpoint=checkpoint)
        resize = sidecar.coordinate("resize", resizer, parallelism=4)
        context = spark.sparkContext
        jobs = [
            Action(context.parallelize(range(one.parallelism), one.parallelism).mapPartitions(one.subtask(Fetch)).count)
            for one in (crawl, resize)
        ]
        seen = sidecar.status
        while sum(one.ready for one in seen().operators.values()) < SUBTASKS + 4:
            time.sleep(0.2)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
            time.sleep(SECONDS / 3)
            crawler.tell("die", 5)
            take(browser, "overview", url, "true", height=560, seconds=SECONDS)
            operator = url + "#/operator/crawl/subtask/5"
            take(browser, "operator", operator, "true", height=1280, seconds=SECONDS / 2)
            crawler.fall_silent()
            stuck = "document.querySelectorAll('.hg-diagnosis li').length >= 2"
            take(browser, "stuck", operator, stuck, height=860, seconds=12)
            crawler.speak()
            browser.close()
        crawler.tell("stop")
        resizer.tell("stop")
        for job in jobs:
            job.result()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
