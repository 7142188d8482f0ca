# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.fuzz.besieged``: run the driver's half in a separate process with its own memory, files and log.

It reads lines of JSON and answers each: first the settings, then commands. When its standard input ends, it ends. The
secret arrives the same way.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import asdict
from typing import Any

import structlog

from protocol.facts import TaskOutcome
from protocol.wire.keys import KeyRing
from spark_bridge.common.certificates import encryption
from spark_bridge.server.server import ServerConfig
from tests.fuzz.driver_half import DriverHalf, running_driver_half

_ABOUT_A_LINE = ("event", "log_level", "peer", "why", "reason", "exception")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Log:
    """Log lines since the last reading. Uninteresting lines are only counted."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, self])

    def __call__(self, logger: Any, method: str, entry: MutableMapping[str, Any]) -> Any:
        level = entry.pop("level")
        if level != "debug":
            entry["log_level"] = level
            self.lines.append({key: str(entry[key])[:2000] for key in _ABOUT_A_LINE if key in entry})
        raise structlog.DropEvent

    def take(self) -> list[dict[str, Any]]:
        lines, self.lines = self.lines, []
        return lines

    def hear_asyncio(self) -> None:
        """Count the event loop's complaints as faults, too."""
        heard = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                heard.lines.append({"event": f"asyncio: {record.getMessage()}"[:2000], "log_level": "error"})

        logging.getLogger("asyncio").addHandler(Handler(logging.WARNING))


def _reading(half: DriverHalf, log: _Log) -> dict[str, Any]:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident_pages = int(statm.read().split()[1])
    return {
        "resident_bytes": resident_pages * _PAGE_BYTES,
        "files": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "connections": asdict(half.server.statistics),
        "gateways": half.router.gateway_count,
        "taken": list(half.honest.taken.values()),
        "victim_events": half.victim.events,
        "killed": half.spark.killed,
        "checkpoints": half.checkpoints,
        "running_tasks": sorted(half.spark.running),
        "faults": half.faults,
        "log": log.take(),
    }


async def _serve(settings: dict[str, Any], log: _Log) -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    keys = KeyRing(bytes.fromhex(settings["secret"]))
    config = ServerConfig(**settings["server"], tls=encryption(settings["tls"], keys).context)
    async with running_driver_half(keys, config) as half, asyncio.TaskGroup() as group:
        acts: dict[str, Callable[..., Any]] = {
            "reading": lambda: _reading(half, log),
            "introduce": half.spark.introduce,
            "end": lambda task: half.spark.end(task, TaskOutcome.FAILED, "it ended"),
            "checkpoint": lambda operator: bool(group.create_task(half.checkpoint(operator, timeout_s=2.0))),
        }
        _answer(half.server.address)
        while line := await commands.readline():
            name, *arguments = json.loads(line)
            _answer(acts[name](*arguments))


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starting process handles it; this one ends with its input
    settings = json.loads(sys.stdin.readline())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (settings["files_max"], hard))
    log = _Log()
    log.hear_asyncio()
    asyncio.run(_serve(settings, log))


if __name__ == "__main__":
    main()
