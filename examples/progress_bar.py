# SPDX-License-Identifier: Apache-2.0

"""A progress bar for a terminal, or for a log."""

from __future__ import annotations

import time
from typing import TextIO

SHOW_EVERY_S = 0.05


class ProgressBar:
    """One line that grows on a terminal; elsewhere a line for each tenth."""

    WIDTH = 40

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._on_terminal = out.isatty()
        self._shown = 0
        self._shown_at = 0.0

    def show(self, done: int) -> None:
        if self._on_terminal:
            now = time.monotonic()
            if done == self._total or now - self._shown_at >= SHOW_EVERY_S:
                self._shown, self._shown_at = done, now
                self._draw()
        elif 10 * done // self._total > 10 * self._shown // self._total:
            self._shown = done
            self._write(f"{done}/{self._total} splits\n")

    def say(self, text: str) -> None:
        if self._on_terminal:
            self._write(f"\r\033[K  {text}\n")
            self._draw()
        else:
            self._write(f"  {text}\n")

    def end(self) -> None:
        if self._on_terminal:
            self._write("\n")

    def _draw(self) -> None:
        filled = self.WIDTH * self._shown // self._total
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        self._write(f"\r\033[K[{bar}] {self._shown}/{self._total} splits")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
