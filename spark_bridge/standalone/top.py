# SPDX-License-Identifier: Apache-2.0

"""Show a live table of what a sidecar's process does. This only looks, and attaches no driver."""

from __future__ import annotations

import argparse
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from protocol.describing import line
from spark_bridge.common import command_line

if TYPE_CHECKING:
    from spark_bridge.observability.status import AttemptStatus, LatencyStatus, OperatorStatus, SidecarStatus

__all__ = ["add_command", "lines_of"]

DEFAULT_PORT = 7650
ANSWER_TIMEOUT_S = 15.0
COLUMNS_PLAIN = 160
SUBTASKS_PLAIN = 20

Fetch = Callable[[], "SidecarStatus | None"]

_OPERATORS = (
    ("OPERATOR", "<"),
    ("MODE", "<"),
    ("RUN", "<"),
    ("READY", ">"),
    ("UP/s", ">"),
    ("DOWN/s", ">"),
    ("REQ/s", ">"),
    ("CONFIRM p50/p99 ms", ">"),
    ("CHECKPOINT", "<"),
    ("FAILURES", ">"),
    ("QUEUE", ">"),
    ("METHOD", "<"),
)
_SUBTASKS = (
    ("OPERATOR", "<"),
    ("SUBTASK", ">"),
    ("ATTEMPT", ">"),
    ("STATE", "<"),
    ("HOST", "<"),
    ("SILENT", ">"),
    ("UNCONFIRMED", ">"),
    ("HELD", ">"),
    ("BYTES", ">"),
    ("WAITS FOR", "<"),
)


def add_command(commands: Any) -> None:
    """Add ``top`` to argparse's subcommands."""
    parser = commands.add_parser(
        "top",
        help="show what a sidecar in its own process is doing, live",
        description=__doc__,
        epilog="In a terminal, q or Ctrl-C ends it. Otherwise one table is printed for each interval.",
    )
    parser.add_argument(
        "--secret-file",
        type=command_line.path,
        required=True,
        metavar="FILE",
        help="the file that was given to the sidecar",
    )
    parser.add_argument(
        "--host", type=command_line.host, default="127.0.0.1", help="of the sidecar (default: loopback)"
    )
    parser.add_argument(
        "--port", type=command_line.open_port, default=DEFAULT_PORT, help=f"of the sidecar (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--tls", action="store_true", help="the sidecar was started with --tls")
    parser.add_argument(
        "--interval", type=command_line.seconds, default=1.0, metavar="SECONDS", help="between tables (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 0 after q, Ctrl-C, SIGTERM and ``--once``; 1, with one line, if the sidecar cannot be asked."""
    from spark_bridge.common.errors import SidecarError

    try:
        fetch = _fetch_from(options)
        if options.once or not sys.stdout.isatty():
            _print_tables(fetch, options.interval, once=options.once)
        else:
            _show_live(fetch, options.interval)
    except (SidecarError, ValueError) as error:
        command_line.tell(sys.stderr, f"top: {error}")
        return 1
    except (KeyboardInterrupt, _Terminated):
        pass
    return 0


def _fetch_from(options: argparse.Namespace) -> Fetch:
    from protocol.wire.keys import IDENTITY_BYTES, KeyRing
    from spark_bridge.common.certificates import certificate_digest
    from spark_bridge.standalone.control_client import ControlAddress, ask
    from spark_bridge.standalone.secret_file import read_secret
    from spark_bridge.standalone.status_bytes import unpack_status

    keys = KeyRing(read_secret(options.secret_file))
    address = ControlAddress(options.host, options.port, keys, certificate_digest(options.tls, keys))
    onlooker = secrets.token_bytes(IDENTITY_BYTES)  # not a driver's: it cannot be taken for the one that is attached

    def fetch() -> SidecarStatus | None:
        packed = ask(address, onlooker, "look", timeout_s=ANSWER_TIMEOUT_S, connect_timeout_s=0.0)
        return None if packed is None else unpack_status(packed)

    return fetch


def _print_tables(fetch: Fetch, interval_s: float, *, once: bool) -> None:
    while True:
        lines = lines_of(fetch(), COLUMNS_PLAIN, subtasks_max=SUBTASKS_PLAIN)
        for one in [*lines, *([] if once else [""])]:
            command_line.tell(sys.stdout, one)
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval_s)


def _show_live(fetch: Fetch, interval_s: float) -> None:
    from spark_bridge.common.errors import SidecarError

    with _screen() as key_within:
        while True:
            size = shutil.get_terminal_size()
            try:
                lines = lines_of(fetch(), size.columns, subtasks_max=size.lines)
            except SidecarError as error:
                lines = [line(str(error))[: size.columns]]
            encoding = sys.stdout.encoding or "utf-8"
            text = "".join(f"{one}\x1b[K\r\n" for one in lines[: size.lines - 1])
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            sys.stdout.write(f"\x1b[H{text}\x1b[J")
            sys.stdout.flush()
            if key_within(interval_s) in ("q", "Q", "\x03"):
                return


class _Terminated(Exception):
    """SIGTERM has come: leave the terminal as it was."""


@contextmanager
def _screen() -> Iterator[Callable[[float], str]]:
    """The terminal's second screen, without a cursor. The value waits for a key for some seconds, and returns it."""
    with _keys() as key_within, _terminable():
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        try:
            yield key_within
        finally:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def key_within(seconds: float) -> str:
        readable, _, _ = select.select([descriptor], [], [], seconds)
        return sys.stdin.read(1) if readable else ""

    try:
        yield key_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _terminable() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the table ----------------------------------------------------------------------------------------------------


def lines_of(status: SidecarStatus | None, columns: int, *, subtasks_max: int) -> list[str]:
    """The status as lines of at most ``columns`` characters: the sidecar, what waits, its operators, their subtasks.

    The subtasks that wait for something come first; at most ``subtasks_max`` are shown, then the count of the others.
    """
    if status is None:
        return ["no driver is attached to this sidecar"]
    from spark_bridge.observability.diagnosis import explain
    from spark_bridge.observability.html import duration

    relay = status.relay
    lines = [
        f"sidecar {status.host}:{status.port}  up {duration(status.uptime_s)}  "
        f"{relay.facts} facts by {relay.kind}, {relay.dropped} dropped  "
        f"loop lag p99 {status.loop_lag_p99_ms:.1f} ms",
        *(f"! {sentence}" for sentence in explain(status)),
        "",
        *_table(_OPERATORS, [_operator(one) for one in status.operators.values()]),
        "",
        *_subtasks(status, subtasks_max),
    ]
    return [line(one)[:columns].rstrip() for one in lines]


def _operator(operator: OperatorStatus) -> list[str]:
    call = operator.call
    return [
        operator.operator_id,
        operator.mode,
        "" if operator.run is None else f"stage {operator.run.stage_id}",
        f"{operator.ready}/{operator.parallelism}",
        f"{operator.events_up_per_s:.0f}",
        f"{operator.events_down_per_s:.0f}",
        f"{operator.requests_per_s:.0f}",
        _milliseconds(operator.confirm),
        _checkpoint(operator),
        str(operator.counts.get("failures", 0)),
        str(operator.queued),
        "" if call is None else f"{call.name} {call.running_s:.0f} s",
    ]


def _checkpoint(operator: OperatorStatus) -> str:
    last = "" if operator.last_completed_checkpoint_id < 0 else str(operator.last_completed_checkpoint_id)
    if not operator.checkpoints:
        return last
    now = operator.checkpoints[0]
    return f"{last}, {now.checkpoint_id} {now.phase}".removeprefix(", ")


def _milliseconds(latency: LatencyStatus) -> str:
    p50_us, p99_us, _ = latency.last_minute
    if p50_us is None or p99_us is None:
        return ""
    return f"{p50_us / 1e3:.1f}/{p99_us / 1e3:.1f}"


def _subtasks(status: SidecarStatus, subtasks_max: int) -> list[str]:
    live = [(name, attempt) for name, one in status.operators.items() for attempt in one.attempts if attempt.is_live]
    live.sort(key=lambda item: not item[1].waits_for)
    others = len(live) - subtasks_max + sum(one.attempts_left_out for one in status.operators.values())
    more = [f"and {others} more"] if others > 0 else []
    rows = [_subtask(name, attempt, status.taken_at) for name, attempt in live[:subtasks_max]]
    return [*_table(_SUBTASKS, rows), *more] if rows else more


def _subtask(name: str, attempt: AttemptStatus, taken_at: float) -> list[str]:
    return [
        name,
        str(attempt.subtask),
        str(attempt.attempt),
        attempt.state,
        attempt.host,
        "" if attempt.heard_at is None else f"{max(0.0, taken_at - attempt.heard_at):.1f} s",
        str(attempt.events_unconfirmed),
        str(attempt.events_held),
        str(attempt.bytes),
        attempt.waits_for,
    ]


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[str]:
    names = [name for name, _ in heads]
    rows = [[*map(line, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{align}{width}}" for cell, width, (_, align) in zip(row, widths, heads, strict=True))
        for row in (names, *rows)
    ]
