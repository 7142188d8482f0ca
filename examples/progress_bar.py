# SPDX-License-Identifier: Apache-2.0

"""The progress of a job for a log. On a terminal, Headgate's own bar takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from headgate import OperatorHandle


class ProgressLines:
    """A line for each tenth, except while the bar of a terminal shows the same."""

    def __init__(self, total: int, out: TextIO, *, on_terminal: bool = False) -> None:
        self._total = total
        self._out = out
        self._on_terminal = on_terminal
        self._shown = 0
        self._say_beside_bar: Callable[[str], None] | None = None

    @contextmanager
    def of(self, handle: OperatorHandle) -> Iterator[None]:
        if not self._on_terminal:
            yield
            return
        with handle.progress() as bar:
            self._say_beside_bar = bar.say
            yield
        self._say_beside_bar = None

    def show(self, done: int) -> None:
        if not self._on_terminal and 10 * done // self._total > 10 * self._shown // self._total:
            self._shown = done
            self._write(f"{done}/{self._total} splits")

    def say(self, text: str) -> None:
        if self._say_beside_bar is not None:
            self._say_beside_bar(f"  {text}")
        else:
            self._write(f"  {text}")

    def _write(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()
