# SPDX-License-Identifier: Apache-2.0

"""A progress bar of an operator, in a terminal or a notebook: its splits or one of its counters, and what was lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from protocol.describing import line, lines
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.environment import active_context
from spark_bridge.observability.displays import Displays
from spark_bridge.primitives.counters.book import Book

T = TypeVar("T")

LOOK_EVERY_S = 0.2
DEFAULT_COUNT = "events_received"


class Progress:
    """A bar that is shown while its ``with`` block runs; see ``OperatorHandle.progress``. One thread at a time."""

    def __init__(
        self,
        operator_id: str,
        statistics: Callable[[], Mapping[str, Any]],
        total: int | None = None,
        count: str | None = None,
        *,
        counter: str | None = None,
        shown: bool | None = None,
        displays: Displays | None = None,
    ) -> None:
        """``shown`` of None: in a notebook, and if standard output and standard error are terminals.

        ``displays``: those of the sidecar, which count what fails.
        """
        if count is not None and not _is_count(known := statistics(), count):
            counts = ", ".join(sorted(name for name in known if _is_count(known, name)))
            raise ValueError(f"{count!r} is not a count of statistics(): choose one of {counts}")
        if count is not None and counter is not None:
            raise ValueError(f"a bar shows one figure: pass count={count!r} or counter={counter!r}")
        self._bar_class, self._in_notebook = _bar_class()
        self._operator_id = operator_id
        self._statistics = statistics
        self._total = total
        self._figure = partial(_counter, name=counter) if counter else partial(_count, name=count or DEFAULT_COUNT)
        self._counts_splits_by_default = count is None and counter is None
        self._shown = shown
        self._displays = displays or Displays()
        self._over = threading.Event()
        self._before = 0
        self._lost_before = (0, 0)
        self._bar: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._thread is not None:
            raise SidecarError("this progress bar was entered before: make a new one with handle.progress()")
        shown = self._in_notebook or (sys.stdout.isatty() and sys.stderr.isatty())
        self._displays.run("progress", self._begin)
        self._bar = self._draw(lambda: self._new_bar(shown if self._shown is None else self._shown))
        self._thread = threading.Thread(target=self._run, name="headgate-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        self._draw(self._end_bar)

    @property
    def done(self) -> int:
        """How far it is, as at the last look."""
        return int(self._bar.n) if self._bar is not None else 0

    def say(self, text: str) -> None:
        """Print a line above the bar, on standard error. Any thread.

        What a terminal would obey is escaped. If the line cannot be printed, that is logged.
        """
        self._draw(lambda: self._bar_class.write(lines(text), file=sys.stderr))

    def _draw(self, draw: Callable[[], T]) -> T | None:
        """Call tqdm. None if that fails."""

        def drawn() -> T:
            try:
                return draw()
            except BaseException:
                # tqdm keeps the lock of all bars if it cannot draw one: the next to draw would wait forever.
                with suppress(Exception):  # this thread does not have it
                    self._bar_class.get_lock().release()
                raise

        return self._displays.run("progress", drawn)

    def _new_bar(self, shown: bool) -> Any:
        return self._bar_class(
            total=self._total,
            desc=line(self._operator_id),
            unit=" splits" if self._counts_splits else "",
            disable=not shown,
            position=1 if not self._in_notebook and _spark_draws() else None,  # below Spark's own bar
            leave=True,
            dynamic_ncols=True,
        )

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.clear()  # it ends in the line of the cursor, where Spark's bar was
            self._bar.close()

    def _begin(self) -> None:
        """What happened before is not counted, except for splits, which begin again with each run."""
        statistics = self._statistics()
        self._counts_splits = self._counts_splits_by_default and statistics.get("splits_done") is not None
        self._before = 0 if self._counts_splits or self._figure.func is _counter else self._figure(statistics)
        self._lost_before = statistics["failures"], statistics["resets"]

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self._draw(self._look)
        self._draw(self._look)

    def _look(self) -> None:
        try:
            statistics = self._statistics()
        except SidecarError:  # the sidecar of another process is away
            return
        if self._counts_splits:
            done, total = statistics["splits_done"], self._total or statistics["splits_total"]
        else:
            done, total = self._figure(statistics) - self._before, self._total
        lost, resets = (
            now - before
            for now, before in zip((statistics["failures"], statistics["resets"]), self._lost_before, strict=True)
        )
        bar = self._bar
        if bar is None:
            return
        bar.total, bar.n = total, done or 0
        bar.set_postfix({**({"lost": lost} if lost else {}), **({"resets": resets} if resets else {})}, refresh=True)


def _count(statistics: Mapping[str, Any], name: str) -> int:
    return int(statistics[name])


def _counter(statistics: Mapping[str, Any], name: str) -> int:
    """What the tasks have counted in this action. 0 before the first of them has."""
    return int(Book.from_value(statistics["counters"]).counts.get(name, 0))


def _is_count(statistics: Mapping[str, Any], name: str) -> bool:
    return type(statistics.get(name)) is int


def _bar_class() -> tuple[Any, bool]:
    """tqdm's bar for where this runs, and whether that is a notebook."""
    try:
        from tqdm.auto import tqdm
        from tqdm.notebook import tqdm_notebook
    except ImportError as error:
        raise SidecarError("progress bars need the package tqdm: pip install 'headgate[progress]'") from error
    return tqdm, issubclass(tqdm, tqdm_notebook)


def _spark_draws() -> bool:
    """Whether Spark's own bar uses the line of the cursor."""
    context = active_context()
    return context is not None and context.getConf().get("spark.ui.showConsoleProgress") == "true"
