# SPDX-License-Identifier: Apache-2.0

"""Counts the lines of a sink's own code while they run, and ends its process before one of them.

So a test needs no hooks in the sink: between any two effects of a sink there is a line of it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Died", "Lines", "source_folders"]


class Died(BaseException):
    """Stands for the death of the process in which it is raised. Let it pass."""


def source_folders(*things: object) -> tuple[frozenset[str], frozenset[str]]:
    """Where the code of these objects is: files by themselves, and folders of packages with one sink each.

    What the pattern itself brings does not count.
    """
    files: set[str] = set()
    packages: set[str] = set()
    for thing in things:
        for class_ in type(thing).__mro__:
            module = inspect.getmodule(class_)
            file = getattr(module, "__file__", None)
            if file is None or class_.__module__.startswith(("spark_bridge.sinks.two_phase", "typing")):
                continue
            if class_.__module__.startswith("spark_bridge.sinks."):
                packages.add(os.path.dirname(file))
            else:
                files.add(file)
    return frozenset(files), frozenset(packages)


class Lines:
    """Watches the lines of some code inside ``watch``.

    ``before(place)`` is called before each line, with its place as ``file:line``; it may raise.
    """

    def __init__(self, things: tuple[object, ...], before: Callable[[str], None]) -> None:
        self._files, self._packages = source_folders(*things)
        self._before = before

    def watch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` and watch it."""
        outer = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return function(*args)
        finally:
            sys.settrace(outer)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file in self._files or os.path.dirname(file) in self._packages:
            return self._on_line
        return None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._before(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return self._on_line
