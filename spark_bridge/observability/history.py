# SPDX-License-Identifier: Apache-2.0

"""``headgate history``: the timeline of an application, from Spark's event log alone.

It reads a file or the directory of a rolling log, plain or compressed with zstd, of a finished or a running
application. It needs neither Spark nor Java.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import IO, Any, NamedTuple

from protocol.describing import as_json, line, plain, show
from spark_bridge.common import command_line
from spark_bridge.common.regular_files import open_regular

_READ, _NO_NOTES, _UNREADABLE = 0, 1, 2
NOTES = "headgate.observability.SparkNotes$Notes"
_ROLLED = re.compile(r"events_(\d+)_")
_OTHER_CODECS = (".lz4", ".snappy", ".lzf")
LINE_BYTES_MAX = 64 * 2**20
"""Of one event. Spark's largest ones, plans of queries, take a few MB."""
ENTRIES_MAX = 250_000
KEPT_BYTES_MAX = 64 * 2**20
"""Of the notes and texts of all entries: some have long ones."""
_READ_BYTES = 1 << 20
_PACKED_BYTES = 1 << 10
"""What is decompressed in one step: whatever a frame claims, each of its blocks takes 4 bytes, and becomes 128 KiB."""
_TIME_MAX_S = 253_402_300_799
"""The last second of the year 9999."""


class Unreadable(Exception):
    """The event log cannot be read. The text says why, and what to do."""


class Entry(NamedTuple):
    """One line of the timeline: when, in seconds since the epoch; of which operator, or ""; and all that is known."""

    at: float
    operator: str
    text: str
    fields: dict[str, Any]


class Timeline(NamedTuple):
    """What an event log tells. ``problem``: why the end is missing, for example because the application still runs.

    ``skipped``: how many lines have not the form that Spark and Headgate give them, and ``first_skipped``: where the
    first of them is.
    """

    application: dict[str, Any]
    entries: list[Entry]
    notes: int
    problem: str
    skipped: int = 0
    first_skipped: str = ""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``history``; its ``run`` takes the arguments and returns the exit status."""
    parser = commands.add_parser(
        "history",
        help="print the timeline of an application from Spark's event log",
        description="Print what became of an application's operators: runs, failures, resets and checkpoints, among "
        "Spark's own jobs and executors. Reads the event log only (spark.eventLog.enabled), plain or compressed with "
        "zstd.",
        epilog="Exit status: 0 printed, 1 there are no notes of Headgate in it, 2 it cannot be read.",
    )
    parser.add_argument(
        "log", type=command_line.path, metavar="EVENTLOG", help="the file, or the directory of a rolling event log"
    )
    parser.add_argument("--operator", type=command_line.label, metavar="NAME", help="only this operator's notes")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each entry")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        timeline = read_timeline(Path(arguments.log))
    except Unreadable as error:
        command_line.tell(sys.stderr, f"headgate: {error}")
        return _UNREADABLE
    entries = [one for one in timeline.entries if arguments.operator in (None, one.operator)]
    for text in _as_json(entries) if arguments.json else _as_text(timeline.application, entries):
        command_line.tell(sys.stdout, text)
    if timeline.problem:
        command_line.tell(sys.stderr, f"headgate: {timeline.problem}")
    if timeline.skipped:
        command_line.tell(
            sys.stderr,
            f"headgate: skipped lines that are not as Spark writes them: {timeline.skipped}, the first of which is "
            f"{timeline.first_skipped}",
        )
    if not timeline.notes:
        command_line.tell(
            sys.stderr,
            "headgate: there are no notes of Headgate in this event log: the application used no sidecar, or one with "
            'relay="py4j" or in its own process',
        )
        return _NO_NOTES
    return _READ


def read_timeline(log: Path) -> Timeline:
    """Read the whole event log. Raises ``Unreadable``."""
    application: dict[str, Any] = {}
    entries: list[Entry] = []
    notes, kept_bytes, skipped, first_skipped, problem = 0, 0, 0, "", ""
    for file in _files(log):
        try:
            with closing(_lines(file)) as lines:
                for number, event in enumerate(lines, 1):
                    before = len(entries)
                    try:
                        found = _take(event, application, entries)
                        notes += found
                        kept_bytes += len(event) if found else sum(len(one.text) for one in entries[before:])
                    except Exception:  # there is no end of the forms that a damaged line can have
                        skipped += 1
                        first_skipped = first_skipped or f"line {number} of {file}"
                    if len(entries) > ENTRIES_MAX or kept_bytes > KEPT_BYTES_MAX:
                        raise _Full
        except _Cut as cut:
            problem = f"{file} ends early ({cut}): the application still runs, or its driver has died"
        except _Full:
            del entries[ENTRIES_MAX:]
            problem = f"only the first {len(entries)} entries are shown, because the log has more: read {file} for them"
            break
    if not application:
        raise Unreadable(
            f"{log} is not an event log of Spark: it has no event for the start of an application. Name the file or "
            "directory that Spark has written"
        )
    entries.sort(key=lambda entry: entry.at)
    return Timeline(application, entries, notes, problem, skipped, first_skipped)


# --- files --------------------------------------------------------------------------------------------------------


class _Cut(Exception):
    """The file ends within a line or a compressed frame."""


class _Full(Exception):
    """There are more entries than are kept."""


def _files(log: Path) -> list[Path]:
    try:
        return _found(log)
    except OSError as error:
        raise Unreadable(f"cannot read {log}: {error.strerror or error}") from error


def _found(log: Path) -> list[Path]:
    if not log.exists():
        raise Unreadable(f"{log} does not exist: pass the log file, or its directory below spark.eventLog.dir")
    if log.is_file():
        return [log]
    if not log.is_dir():
        raise Unreadable(f"{log} is neither a file nor a directory: pass the log file that Spark has written")
    rolled = [(int(match[1]), file) for file in log.iterdir() if (match := _ROLLED.match(file.name))]
    if not rolled:
        raise Unreadable(
            f"{log} is not the directory of one event log: give the file, or the directory eventlog_v2_APPLICATION"
        )
    return [file for _, file in sorted(rolled)]


def _lines(file: Path) -> Generator[bytes, None, None]:
    try:
        with open_regular(file) as opened:  # a program that decompresses it reads the same descriptor
            magic = opened.read(4)
            opened.seek(0)
            name = file.name.removesuffix(".inprogress").removesuffix(".compact")
            if magic == b"\x28\xb5\x2f\xfd":
                yield from _whole_lines(file, _zstd(file, opened))
            elif name.endswith(_OTHER_CODECS):
                raise Unreadable(
                    f"{file} is compressed with a codec that only Spark can read: set "
                    "spark.eventLog.compression.codec=zstd, which is the default, or spark.eventLog.compress=false"
                )
            else:
                yield from _whole_lines(file, iter(lambda: opened.read(_READ_BYTES), b""))
    except OSError as error:
        raise Unreadable(f"cannot read {file}: {error.strerror or error}") from error


def _whole_lines(file: Path, parts: Iterable[bytes]) -> Iterator[bytes]:
    rest, size = [b""], 0
    for part in parts:
        first, *others = part.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > LINE_BYTES_MAX:
            raise Unreadable(f"{file} is not an event log of Spark: it has a line of more than {LINE_BYTES_MAX} bytes")
        if others:
            yield b"".join(rest)
            *whole, last = others
            yield from whole
            rest, size = [last], len(last)
    if b"".join(rest).strip():
        raise _Cut("within an event")


def _zstd(file: Path, opened: IO[bytes]) -> Iterator[bytes]:
    """The decompressed parts, by what this machine has: Python 3.14, a package, or the program."""
    for module in ("compression.zstd", "zstandard"):
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        yield from _decompressed(found, file, opened)
        return
    program = which("zstd")
    if program is None:
        raise Unreadable(
            f"{file} is compressed with zstd: use Python 3.14, pip install zstandard, or install the program zstd"
        )
    with subprocess.Popen(
        [program, "-dcq"], stdin=opened, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        output = process.stdout
        assert output is not None
        yield from iter(lambda: output.read(_READ_BYTES), b"")
        if process.wait():
            raise _Cut("within a compressed block")


def _decompressed(module: Any, file: Path, opened: IO[bytes]) -> Iterator[bytes]:
    """Several frames, one after the other, with either module."""
    make = module.ZstdDecompressor if hasattr(module, "ZstdFile") else lambda: module.ZstdDecompressor().decompressobj()
    decompressor, ended = make(), True
    while part := opened.read(_PACKED_BYTES):
        while part:
            try:
                yield decompressor.decompress(part)
            except module.ZstdError as error:
                raise Unreadable(f"{file} is damaged: {error}") from error
            ended, part = decompressor.eof, b""
            if ended:
                part, decompressor = decompressor.unused_data, make()
    if not ended:
        raise _Cut("within a compressed block")


# --- events -------------------------------------------------------------------------------------------------------


def _take(told_event: bytes, application: dict[str, Any], entries: list[Entry]) -> int:
    """Add what one event tells; returns how many notes of Headgate it holds.

    Raises any exception for an event of another form than Spark's and ours, and then adds nothing.
    """
    if not told_event.strip():
        return 0
    event = json.loads(told_event)
    kind = event["Event"]
    if kind == NOTES:
        notes = [
            (note, _entry(note["at"], note["operator"], _sentence(note), note)) for note in json.loads(event["notes"])
        ]
        entries.extend(entry for _, entry in notes)
        return sum(note["what"] != "notes left out" for note, _ in notes)
    told = _of_spark(kind, event)
    if told is not None:
        at, text = told[0] / 1e3, told[1]
        entries.append(_entry(at, "", text, {"at": at, "operator": "", "what": text}))
    if kind == "SparkListenerLogStart":
        application["spark"] = event.get("Spark Version", "")
    elif kind == "SparkListenerApplicationStart":
        application.update(id=event.get("App ID", ""), name=event.get("App Name", ""), at=event["Timestamp"] / 1e3)
    return 0


def _entry(at: Any, operator: Any, text: str, fields: dict[str, Any]) -> Entry:
    if type(at) not in (int, float) or not 0 <= at <= _TIME_MAX_S:
        raise ValueError(f"not a time: {show(at, 80)}")
    if type(operator) is not str:
        raise TypeError(f"not the name of an operator: {show(operator, 80)}")
    return Entry(at, line(operator), line(text), plain(fields))


def _of_spark(kind: str, event: dict[str, Any]) -> tuple[float, str] | None:
    match kind.removeprefix("SparkListener"):
        case "ApplicationStart":
            return event["Timestamp"], "application started"
        case "ApplicationEnd":
            return event["Timestamp"], "application ended"
        case "JobStart":
            return event["Submission Time"], f"job {event['Job ID']} started, stages {event.get('Stage IDs', [])}"
        case "JobEnd":
            result = event.get("Job Result", {})
            if result.get("Result") == "JobSucceeded":
                return event["Completion Time"], f"job {event['Job ID']} succeeded"
            why = str(result.get("Exception", {}).get("Message", "")).partition("\n")[0]
            return event["Completion Time"], f"job {event['Job ID']} failed: {why}"
        case "ExecutorAdded":
            host = event.get("Executor Info", {}).get("Host", "?")
            return event["Timestamp"], f"executor {event['Executor ID']} added on {host}"
        case "ExecutorRemoved":
            return event["Timestamp"], f"executor {event['Executor ID']} removed: {event.get('Removed Reason', '')}"
    return None


def _sentence(note: dict[str, Any]) -> str:
    what, why = note["what"], note.get("why", "")
    because = f": {why}" if why else ""
    match what:
        case "run started" | "run succeeded" | "run failed":
            return f"{what}, stage {note['stage']}{because}"
        case "attempt failed":
            return f"subtask {note['subtask']} attempt {note['attempt']} failed: {note['kind']}{because}"
        case "subtask reset":
            return f"subtask {note['subtask']} reset{_to(note)}"
        case "operator reset":
            return f"operator reset{_to(note)}"
        case "notes left out":
            return f"{note['count']} more notes were left out here, because there were too many"
    name = "savepoint" if note.get("savepoint") else "checkpoint"
    return f"{name} {note['checkpoint']} {what.removeprefix('checkpoint ')}{_took(note)}{because}"


def _to(note: dict[str, Any]) -> str:
    return f" to checkpoint {note['checkpoint']}" if note["checkpoint"] >= 0 else " to the beginning"


def _took(note: dict[str, Any]) -> str:
    if "duration_s" not in note:
        return ""
    phases = ", ".join(f"{phase} {_seconds(seconds)}" for phase, seconds in note["phases_s"].items())
    return f" after {_seconds(note['duration_s'])} ({phases})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms"


# --- output -------------------------------------------------------------------------------------------------------


def _as_text(application: dict[str, Any], entries: list[Entry]) -> Iterator[str]:
    began = application.get("at", entries[0].at if entries else 0.0)
    when = datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    name = line(f"{application.get('id', '?')} {application.get('name', '')}")
    yield f"{name}, Spark {application.get('spark', '?')}, started {when}"
    width = max((len(command_line.cell(entry.operator)) for entry in entries), default=0)
    for entry in entries:
        yield f"{entry.at - began:+10.3f} s  {command_line.cell(entry.operator):{width}}  {entry.text}".rstrip()


def _as_json(entries: list[Entry]) -> Iterator[str]:
    return (as_json(entry.fields).decode() for entry in entries)
