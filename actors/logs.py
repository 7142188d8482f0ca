# SPDX-License-Identifier: Apache-2.0

"""The loggers of Headgate: structlog's if the program has configured it, the standard library's otherwise.

``get_logger(name)`` returns a logger with the methods of structlog, ``log.warning("attempt failed", subtask=3)``. Where
a line goes is decided when it is written:

* If ``structlog.configure`` was called, to structlog, with the keys as they are.
* Otherwise to ``logging.getLogger("headgate....")``, whose level decides whether it is written. The message is the
  event with its keys, ``attempt failed subtask=3``, and the record's attribute ``headgate`` is a dict of both. If no
  handler is configured, the line goes to standard error with time, level and name.

No failure of the log reaches the code that writes a line, whatever a processor, a filter, a handler or a stream raises
(H155). All are counted, and the first of each kind is reported on standard error, with the line that was lost.

Lines that a peer can cause, and repeat without end, go through a ``LimitedLog`` or a ``CountedLog``, which count them
per kind and write them at a bounded rate. For each kind of line by itself, the first 20 lines are written as they come.
In the 10 s from the first one on, further lines are only counted, and at the end of that time one line says how many
there were. After such a flood the next interval is twice as long, up to 640 s; after an interval without one,
everything begins again. So a flood of one kind soon costs 21 lines in ten minutes, and a few lines are written without
delay.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import is_not
from typing import Any, TextIO

import structlog

from actors.clock import Clock, Scheduled
from protocol.describing import (
    LEFT_OUT,
    TEXT_CHARS_MAX,
    describe,
    is_a,
    line,
    lines,
    readable,
    show,
    traceback_of,
    type_name,
)

__all__ = [
    "LINES_MAX",
    "ROOT",
    "CountedLog",
    "LimitedLog",
    "LineLimit",
    "Log",
    "Suppressed",
    "failures",
    "get_logger",
]

ROOT = "headgate"
"""The standard logger above all others of Headgate."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the moment, so that a program may replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_last_resort = _StandardError()


class Failures:
    """The lines that could not be written. Any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._told: set[str] = set()

    def add(self, name: str, event: str, error: Exception) -> None:
        """Count one, and report it if it is the first of its kind."""
        self.count += 1
        kind = type_name(error)
        if kind in self._told or len(self._told) >= _KINDS_MAX:
            return
        self._told.add(kind)
        with suppress(Exception):  # standard error may be closed, or the very stream that fails
            sys.stderr.write(f"{name}: log line not written: {line(show(event))}: {line(describe(error))}\n")


_KINDS_MAX = 20
failures = Failures()
"""Of all loggers in this process."""


class Log:
    """A logger with bound keys; see the module. Any thread.

    ``debug``, ``info``, ``warning``, ``error``, ``critical`` and ``exception`` take an event and keys. Everything else
    that structlog's loggers have works only after ``structlog.configure``.
    """

    __slots__ = ("_bound", "_configuration", "_keys", "_name", "_standard")

    def __init__(self, name: str, keys: Mapping[str, Any]) -> None:
        self._name = name
        self._keys = keys
        self._standard = logging.getLogger(name)
        self._configuration: tuple[object, ...] = ()  # of structlog, when `_bound` was made
        self._bound: Any = None

    def __repr__(self) -> str:
        return f"<Log {self._name} {dict(self._keys)}>"

    def bind(self, **keys: Any) -> Log:
        """Return a logger with these keys in addition."""
        return Log(self._name, {**self._keys, **keys})

    def new(self, **keys: Any) -> Log:
        """Return a logger with only these keys."""
        return Log(self._name, keys)

    def unbind(self, *keys: str) -> Log:
        """Return a logger without these keys. Raises ``KeyError`` for one that is not bound."""
        for key in keys:
            self._keys[key]
        return self.try_unbind(*keys)

    def try_unbind(self, *keys: str) -> Log:
        """Return a logger without these keys."""
        return Log(self._name, {key: value for key, value in self._keys.items() if key not in keys})

    def debug(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level DEBUG."""
        return self._write("debug", event, args, keys)

    def info(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level INFO."""
        return self._write("info", event, args, keys)

    def warning(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level WARNING."""
        return self._write("warning", event, args, keys)

    def error(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level ERROR."""
        return self._write("error", event, args, keys)

    def critical(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level CRITICAL."""
        return self._write("critical", event, args, keys)

    def exception(self, event: str, *args: Any, **keys: Any) -> Any:
        """Write a line at the level ERROR, with the traceback of the exception that is being handled."""
        keys.setdefault("exc_info", True)
        return self._write("exception", event, args, keys)

    msg, warn, fatal = info, warning, critical

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not structlog.is_configured():
            raise AttributeError(f"{name!r}: a logger has debug, info, warning, error, critical, exception and bind")
        return getattr(self._of_structlog(), name)

    def _of_structlog(self) -> Any:
        """structlog's logger as it is configured now."""
        config = structlog.get_config()
        now = (config["processors"], config["wrapper_class"], config["logger_factory"])
        if len(self._configuration) != len(now) or any(map(is_not, self._configuration, now)):
            self._configuration, self._bound = now, structlog.get_logger(self._name).bind(**self._keys)
        return self._bound

    def _write(self, method: str, event: str, args: tuple[Any, ...], keys: dict[str, Any]) -> Any:
        try:
            return self._written(method, event, args, keys)
        except Exception as error:
            failures.add(self._name, event, error)
            return None

    def _written(self, method: str, event: str, args: tuple[Any, ...], keys: dict[str, Any]) -> Any:
        for key, value in keys.items():
            if is_a(value, str) and len(value) > TEXT_CHARS_MAX:
                keys[key] = readable(value)
        if keys.get("exc_info") is not None:
            keys = _printable(keys)
        if structlog.is_configured():
            if (shortened := _shortened(_exc_info(keys.get("exc_info")))) is not None:
                keys["exc_info"], keys["exception"] = None, shortened
            return getattr(self._of_structlog(), method)(event, *args, **keys)
        logger, level = self._standard, _LEVELS[method]
        if logger.isEnabledFor(level):
            self._write_standard(logger, level, event % args if args else event, keys)
        return None

    def _write_standard(self, logger: logging.Logger, level: int, event: str, keys: dict[str, Any]) -> None:
        exc_info, stack_info = keys.pop("exc_info", None), keys.pop("stack_info", False)
        keys = {**dict(sorted(structlog.contextvars.get_contextvars().items())), **self._keys, **keys}
        file, line, function, stack = logger.findCaller(stack_info, stacklevel=5)
        record = logger.makeRecord(
            self._name,
            level,
            file,
            line,
            _rendered(event, keys),
            (),
            _exc_info(exc_info),
            function,
            {"headgate": {"event": event, **keys}},
            stack,
        )
        if (shortened := _shortened(record.exc_info)) is not None:
            record.exc_text = shortened  # formatters use it instead
        if logger.hasHandlers():
            logger.handle(record)
        elif not logger.disabled and logger.filter(record):
            _last_resort.handle(record)


def get_logger(name: str, **keys: Any) -> Log:
    """The logger of this name, which begins with ``headgate``, with these keys bound."""
    return Log(name, keys)


def _printable(keys: dict[str, Any]) -> dict[str, Any]:
    """The same keys, if Python can print the traceback; otherwise with a description of the exception instead."""
    given = keys["exc_info"]
    error: Any = sys.exc_info()[1] if given is True else given[1] if type(given) is tuple else given
    if error is None or error is False:
        return keys
    try:
        bool(error)
    except BaseException:  # of the user's class
        shown = None
    else:
        shown = traceback_of(error)
    return keys if shown is not None else {**keys, "exc_info": None, "error": describe(error)}


def _rendered(event: str, keys: Mapping[str, Any]) -> str:
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in keys.items())])


def _value(value: Any) -> str:
    """The value on one line: as it is if it is a plain word, otherwise as Python writes it."""
    try:
        text = value if isinstance(value, str) else line(repr(value))
    except BaseException as error:  # an exit too: nothing that is logged ends the one who logs
        return f"<not shown: {type_name(error)}>"
    if isinstance(value, str) and not (text.isprintable() and text and not set(text) & _QUOTED):
        return repr(text)
    return text


_QUOTED = frozenset(" '\"=")


def _shortened(exc_info: Any) -> str | None:
    """The traceback if Python would print it too long, or as something that a terminal obeys or cannot show."""
    if not exc_info or exc_info[1] is None:
        return None
    text = traceback_of(exc_info[1])
    if text is None:
        return None
    shown = lines(text.rstrip("\n"))
    return None if shown == text.rstrip("\n") and not text.endswith(LEFT_OUT) else shown


def _exc_info(given: Any) -> Any:
    match given:
        case BaseException():
            return type(given), given, given.__traceback__
        case tuple():
            return given
        case _:
            return sys.exc_info() if given else None


LINES_MAX = 20
INTERVAL_S = 10.0
INTERVAL_MAX_S = 640.0

Kind = tuple[str, str]
"""The level of a line and its event, which is a fixed phrase."""


@dataclass(frozen=True, slots=True)
class Suppressed:
    """How many lines of a kind were not written in the last ``interval_s`` seconds."""

    kind: Kind
    count: int
    interval_s: float


@dataclass(slots=True)
class _Interval:
    ends_at: float
    length_s: float
    written: int = 0
    suppressed: int = 0


class LineLimit:
    """Decides which lines are written; see the module. It has no clock: the caller says what time it is, in seconds.

    ``lines_max`` lines of a kind are written in each interval, which begins with the first of them.
    """

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        if lines_max < 1:
            raise ValueError(f"lines_max must be at least 1, is {lines_max}")
        self._lines_max = lines_max
        self._intervals: dict[Kind, _Interval] = {}

    def admit(self, kind: Kind, now: float) -> bool:
        """Whether to write this line. If not, it is counted. Call ``take_due`` first if its deadline has passed."""
        interval = self._intervals.get(kind)
        if interval is None or (now >= interval.ends_at and not interval.suppressed):
            interval = self._intervals[kind] = _Interval(now + INTERVAL_S, INTERVAL_S)
        if interval.written < self._lines_max:
            interval.written += 1
            return True
        interval.suppressed += 1
        return False

    def next_deadline(self) -> float | None:
        """When the next count is due; None if nothing has been suppressed."""
        return min((each.ends_at for each in self._intervals.values() if each.suppressed), default=None)

    def take_due(self, now: float) -> list[Suppressed]:
        """Return the counts of the intervals that are over, and begin longer ones for these kinds."""
        due = []
        for kind, interval in list(self._intervals.items()):
            if now < interval.ends_at:
                continue
            if interval.suppressed:
                due.append(Suppressed(kind, interval.suppressed, interval.length_s))
                length_s = min(2 * interval.length_s, INTERVAL_MAX_S)
                self._intervals[kind] = _Interval(now + length_s, length_s)
            else:
                del self._intervals[kind]
        return due

    def take_all(self) -> list[Suppressed]:
        """Return every count, and forget all kinds."""
        intervals, self._intervals = self._intervals, {}
        return [
            Suppressed(kind, interval.suppressed, interval.length_s)
            for kind, interval in intervals.items()
            if interval.suppressed
        ]


class LimitedLog:
    """Writes lines to ``log``, a structlog logger, within a ``LineLimit``. Loop only.

    The counts are written as ``similar lines suppressed``, at the level of the lines, when they are due on ``clock``.
    """

    def __init__(self, log: Any, clock: Clock, lines_max: int = LINES_MAX) -> None:
        self._log = log
        self._clock = clock
        self._limit = LineLimit(lines_max)
        self._timer: Scheduled | None = None

    def warning(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("warning", event, keys)

    def info(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("info", event, keys)

    def error(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("error", event, keys)

    def close(self) -> None:
        """Write the counts that are not due yet. Lines may still follow. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _tell(self._log, self._limit.take_all())

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        if self._limit.admit((level, event), self._clock.now()):
            getattr(self._log, level)(event, **keys)
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        deadline = self._limit.next_deadline()
        self._timer = None
        if deadline is not None:
            self._timer = self._clock.call_later(max(0.0, deadline - self._clock.now()), self._time_is_up)

    def _time_is_up(self) -> None:
        _tell(self._log, self._limit.take_due(self._clock.now()))
        self._arm()


class CountedLog:
    """Like ``LimitedLog``, without a timer: the counts that are due are written before the next line. Any thread."""

    def __init__(self, log: Any, now: Callable[[], float] = time.monotonic, lines_max: int = LINES_MAX) -> None:
        self._log = log
        self._now = now
        self._limit = LineLimit(lines_max)
        self._lock = threading.RLock()  # a collected object may write a line while another one is being written

    def warning(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("warning", event, keys)

    def error(self, event: str, **keys: Any) -> None:
        """Write the line, or count it."""
        self._write("error", event, keys)

    def _write(self, level: str, event: str, keys: dict[str, Any]) -> None:
        with self._lock:
            now = self._now()
            counts, admitted = self._limit.take_due(now), self._limit.admit((level, event), now)
        _tell(self._log, counts)
        if admitted:
            getattr(self._log, level)(event, **keys)


def _tell(log: Any, counts: list[Suppressed]) -> None:
    for each in counts:
        level, event = each.kind
        getattr(log, level)("similar lines suppressed", line=event, count=each.count, within_s=round(each.interval_s))
