# SPDX-License-Identifier: Apache-2.0

"""A local directory of checkpoints whose answers are wrong for a while: ``faulty:///path`` for fsspec.

A trouble waits until a checkpoint has got its name. That rename reports a failure, or does not answer for a while.
Then the directory may be out of reach, or refuse every deletion, until the trouble is over. The storage's answers are
wrong then, but its contents are right: so a restored checkpoint must find all that it refers to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "faulty"
LOST_ANSWER, OUT_OF_REACH, REFUSED_DELETIONS, HANGING = "lost answer", "out of reach", "refused deletions", "hanging"
TROUBLES = (LOST_ANSWER, OUT_OF_REACH, REFUSED_DELETIONS, HANGING)
HANGING_S = 4.0
"""Longer than a checkpoint may take."""


class Trouble:
    """The current trouble of the directory. Thread-safe; ``on_struck`` is called in the thread that writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: tuple[str, float, Callable[[], None]] | None = None
        self._over_at: dict[str, float] = {}

    def begin(self, how: str, lasts_s: float, on_struck: Callable[[], None]) -> None:
        """Give the trouble to the next checkpoint that is renamed; its effects last for ``lasts_s`` seconds."""
        with self._lock:
            self._waiting = how, lasts_s, on_struck

    def end(self) -> None:
        """Answer everything again."""
        with self._lock:
            self._waiting = None
        self._over_at.clear()

    def check(self, deletes: bool) -> None:
        """Call this before an operation. Raises ``OSError``."""
        now = time.monotonic()
        if self._over_at.get(OUT_OF_REACH, now) > now:
            raise OSError("the directory is out of reach, on purpose")
        if deletes and self._over_at.get(REFUSED_DELETIONS, now) > now:
            raise PermissionError("deletions are refused, on purpose")

    def renamed(self) -> None:
        """Call this when a checkpoint has got its name. Raises ``OSError``."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        how, lasts_s, on_struck = waiting
        self._over_at[how] = time.monotonic() + lasts_s
        on_struck()
        if how == HANGING:
            time.sleep(HANGING_S)
        raise TimeoutError("no answer to the rename, on purpose")


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A local directory that answers only as ``trouble`` allows."""

    protocol: ClassVar = PROTOCOL
    trouble: ClassVar = Trouble()

    @classmethod
    def _strip_protocol(cls, path: str | os.PathLike[str]) -> str:
        text = os.fspath(path) if isinstance(path, Path) else str(path)
        return text.removeprefix(f"{PROTOCOL}://").rstrip("/") or "/"

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.trouble.check(deletes=False)
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.trouble.check(deletes=False)
        return super().info(path, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.trouble.check(deletes=False)
        super().makedirs(path, exist_ok=exist_ok)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self.trouble.check(deletes=False)
        return super().cat_file(path, start=start, end=end, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.trouble.check(deletes=False)
        Path(self._strip_protocol(path)).write_bytes(value)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self.trouble.check(deletes=False)
        os.replace(self._strip_protocol(path1), self._strip_protocol(path2))
        self.trouble.renamed()

    def rm_file(self, path: str) -> None:
        self.trouble.check(deletes=True)
        super().rm_file(path)


fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
