# SPDX-License-Identifier: Apache-2.0

"""Pages that are printed from the code: the texts of all errors, and the limits.

``python -m tests.printed_pages`` writes them; `tests/test_printed_pages.py` compares.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from actors.coordination.engine.inputs import INPUT_ID_CHARS_MAX
from headgate import Addresses, CheckpointConfig, GatewayLimits, LedgerConfig, SidecarLimits, StorageDetails, Watching
from headgate.errors import HeadgateError
from protocol.arguments import SUBTASKS_MAX
from protocol.gateway.types import HEARTBEAT_TIMEOUT_S
from protocol.wire.checkpoint_format import CHECKPOINT_BYTES_MAX
from protocol.wire.framing import EVENT_BYTES_MOST, WireLimits
from protocol.wire.messages import PARTS_MAX
from spark_bridge.common.control import CONTROL_LIMITS
from spark_bridge.observability.status_server import CONNECTIONS_MAX as STATUS_CONNECTIONS_MAX
from spark_bridge.observability.trace import BYTES_MAX as TRACE_BYTES_MAX
from spark_bridge.primitives.counters.book import BUCKETS_MAX, NAMES_MAX
from spark_bridge.primitives.group.driver import BLOB_BYTES_MAX, ROUND_BYTES_MAX
from spark_bridge.primitives.primitive import NAME_CHARS_MAX as PART_NAME_CHARS_MAX
from spark_bridge.primitives.shared_value.encoding import VALUE_BYTES_MAX
from spark_bridge.primitives.work_queue.driver import QUEUE_BYTES_MAX
from spark_bridge.server.connection import ServerConfig
from spark_bridge.sinks.redis.sink import COLUMNS_MAX
from spark_bridge.sinks.two_phase.driver import LISTED_BYTES_MAX
from spark_bridge.sources.files.csv_files import BLOCK_BYTES_MAX
from spark_bridge.sources.files.driver import FORGET_AFTER_S
from spark_bridge.sources.postgres.driver import READ_BYTES_MAX

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "protocol", "spark_bridge")

# --- errors -------------------------------------------------------------------------------------------------------

PYTHONS_OWN = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, FileNotFoundError)
ERRORS_INTRO = """\
# Error texts

Every class of errors of Headgate, when it is raised and what to do, and the texts that it has in the code. `…` stands
for what differs from case to case. Search this page for a part of your text. [Errors](errors.md) has the tree of the
classes, and [troubleshooting](../troubleshooting.md) begins with what you see.

This page is printed from the code.
"""


def every_error() -> dict[str, type[BaseException]]:
    """Return every class of the packages that derives from `HeadgateError`, with its name."""
    for top in PACKAGES:
        package = importlib.import_module(top)
        for module in pkgutil.walk_packages(package.__path__, f"{top}."):
            importlib.import_module(module.name)
    found: dict[str, type[BaseException]] = {}
    waiting: list[type[BaseException]] = [HeadgateError]
    while waiting:
        error = waiting.pop()
        found[error.__name__] = error
        waiting += error.__subclasses__()
    return {name: error for name, error in found.items() if error.__module__.startswith(PACKAGES)}


def template(node: ast.expr) -> str | None:
    """The text of an expression, with `…` for what differs; None if it does not begin with a fixed text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) or "…" for part in parts)
        case ast.FormattedValue():
            return "…"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = [template(left), template(right)]
            return "".join(text or "…" for text in texts) if any(texts) else None
    return None


def raised_texts() -> dict[str, set[str]]:
    """Return the texts that each class of errors gets in the code of the product, with the names of the classes."""
    found: dict[str, set[str]] = {}
    for folder in (*PACKAGES, "headgate"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    text = template(node.args[0])
                    if text is not None and re.search(r"\w\w \w", text):
                        found.setdefault(node.func.id, set()).add(" ".join(text.split()))
    return found


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if len(fence) == 2 else f"`{text}`"


def _paragraphs(error: type[BaseException]) -> Iterator[str]:
    for paragraph in inspect.cleandoc(error.__doc__ or "").split("\n\n"):
        yield " ".join(paragraph.split()).replace("``", "`") + "\n"


def error_texts() -> str:
    """Return the page of all errors, in the order of their names."""
    errors, texts = every_error(), raised_texts()
    lines = [ERRORS_INTRO]
    for name in sorted(errors):
        kinds = [f"`{base.__name__}`" for base in errors[name].__bases__ if base not in (object, HeadgateError)]
        lines += [
            f"## {name}\n",
            *([f"A kind of {' and '.join(kinds)}.\n"] if kinds else []),
            *_paragraphs(errors[name]),
        ]
        lines += [f"- {_code(text)}" for text in sorted(texts.get(name, ()))]
        lines += [""] if texts.get(name) else []
    lines += ["## Errors of Python\n", "What an argument or a value does not allow; the text has what is expected.\n"]
    for error in PYTHONS_OWN:
        lines += [
            f"### {error.__name__}\n",
            *(f"- {_code(text)}" for text in sorted(texts.get(error.__name__, ()))),
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


# --- limits -------------------------------------------------------------------------------------------------------

LIMITS_INTRO = """\
# Limits

Every limit with its default, where to set it, and what happens beyond. A limit that is reached concerns the task or
the operator that reached it, and no other. A dash means that it cannot be set.

This page is printed from the code.
"""


def _size(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number % unit in (0, unit - 1) and number >= unit - 1:  # one less than a power is shown as the power
            return f"{-(-number // unit)} {name}"
    return f"{number:,} bytes"


def _time(seconds: float) -> str:
    if seconds and seconds % 86_400 == 0:
        return f"{seconds / 86_400:g} days"
    return f"{seconds / 3600:g} h" if seconds and seconds % 3600 == 0 else f"{seconds:g} s"


def _limits() -> dict[str, list[tuple[str, str, str, str]]]:
    """Return the rows of each table: what is limited, by default to what, where to set it, what happens beyond."""
    sidecar, gateway, wire = SidecarLimits(), GatewayLimits(), WireLimits()
    checkpoint, ledger, watching = CheckpointConfig(), LedgerConfig(), Watching()
    refused = "the sender gets `EventEncodeError`, and nothing is sent"
    return {
        "Events, requests and answers": [
            (
                "size when encoded",
                _size(sidecar.event_bytes_max),
                f"`SidecarLimits(event_bytes_max=...)`, up to {_size(EVENT_BYTES_MOST)}",
                refused,
            ),
            ("levels of nested containers", f"{wire.event_nesting_max}", "–", refused),
            ("lists, dicts and the like in all", f"{wire.event_containers_max:,}", "–", refused),
            ("entries of all of them together", f"{wire.event_items_max:,}", "–", refused),
            ("entries of one dict or set", f"{wire.event_map_entries_max:,}", "–", refused),
            (
                "events to a task that are held or not confirmed, for each part",
                f"{gateway.events_max:,}, {_size(gateway.bytes_max)}",
                "`GatewayLimits(events_max=..., bytes_max=...)`",
                "`send_event` waits; `send_event_nowait` raises `GatewayFull`",
            ),
            (
                "events and requests of a task that the coordinator has not taken, for each part",
                f"{gateway.upward_events_max:,}, {_size(gateway.upward_bytes_max)}",
                "`GatewayLimits(upward_events_max=..., upward_bytes_max=...)`",
                "the task's `send_event` and `request` wait",
            ),
            ("characters of an `operator_id`", f"{wire.name_chars_max}", "–", "`ValueError` at the call"),
            ("characters of an `input_id`", f"{INPUT_ID_CHARS_MAX}", "–", "`ValueError` at the call"),
            (
                "a request of the driver to a sidecar in a separate process",
                _size(CONTROL_LIMITS.event_bytes_max),
                "–",
                "the caller gets `EventEncodeError`",
            ),
        ],
        "Times": [
            (
                "signs of life of a task",
                f"off; {_time(HEARTBEAT_TIMEOUT_S)} if there is an interval",
                "`GatewayLimits(heartbeat_interval_s=..., heartbeat_timeout_s=...)`",
                "the attempt is killed, and Spark retries it",
            ),
            (
                "an event without a confirmation",
                _time(gateway.confirm_timeout_s),
                "`GatewayLimits(confirm_timeout_s=...)`",
                "the attempt is killed, and Spark retries it",
            ),
            (
                "a task without a connection",
                _time(gateway.reconnect_timeout_s),
                "`GatewayLimits(reconnect_timeout_s=...)`",
                "the attempt is given up, and Spark retries it",
            ),
            (
                "a task's attempt to connect",
                _time(sidecar.connect_timeout_s),
                "`SidecarLimits(connect_timeout_s=...)`",
                "`CannotReachSidecar` in the task",
            ),
            (
                "a task's wait for the driver to accept it",
                _time(sidecar.register_timeout_s),
                "`SidecarLimits(register_timeout_s=...)`",
                "`RegistrationFailed` in the task",
            ),
            (
                "`subtask_ready`",
                _time(sidecar.ready_timeout_s),
                "`SidecarLimits(ready_timeout_s=...)`",
                "`TimedOut` in the task",
            ),
            (
                "`start` of a coordinator",
                _time(sidecar.start_timeout_s),
                "`SidecarLimits(start_timeout_s=...)`",
                "`CoordinatorStartError` from `coordinate`",
            ),
            (
                "the end of a run and its final checkpoint",
                _time(sidecar.settle_timeout_s),
                "`SidecarLimits(settle_timeout_s=...)`",
                "`NotSettled`",
            ),
            (
                "coordinators and the relay, when the sidecar is left",
                _time(sidecar.shutdown_timeout_s),
                "`SidecarLimits(shutdown_timeout_s=...)`",
                "the method is cancelled, and the log names it",
            ),
            (
                "a peer's proof that it knows the secret",
                _time(sidecar.authenticate_timeout_s),
                "`SidecarLimits(authenticate_timeout_s=...)`",
                "its connection is closed",
            ),
            (
                "a method that has not returned",
                _time(watching.method_report_s),
                "`Watching(method_report_s=...)`",
                "the log names it; nothing else happens",
            ),
            (
                "code that holds the event loop",
                _time(watching.slow_handler_limit_s),
                "`Watching(slow_handler_limit_s=...)`",
                "the log names it; nothing else happens",
            ),
            (
                "something that waits",
                _time(watching.stalled_report_s),
                "`Watching(stalled_report_s=...)`",
                "the log says who waits for whom; nothing else happens",
            ),
            (
                "a client of a Spark Connect server, or the server, that is silent",
                _time(Addresses().relay_lease_s),
                "`Addresses(relay_lease_s=...)`",
                "the client counts as dead, or its jobs as lost",
            ),
        ],
        "Checkpoints and restarts": [
            (
                "a checkpoint from its start to its durable write",
                _time(checkpoint.timeout_s),
                "`CheckpointConfig(timeout_s=...)`",
                "it is aborted",
            ),
            (
                "failures in a row",
                f"{checkpoint.tolerated_failures}",
                "`CheckpointConfig(tolerated_failures=...)`",
                "the job fails",
            ),
            (
                "checkpoints in progress",
                f"{checkpoint.concurrent_max}",
                "`CheckpointConfig(concurrent_max=...)`",
                "one request waits, a further one is refused",
            ),
            (
                "the pause after a checkpoint",
                _time(checkpoint.min_pause_s),
                "`CheckpointConfig(min_pause_s=...)`",
                "the next one is not due before",
            ),
            ("a checkpoint", _size(CHECKPOINT_BYTES_MAX), "–", "it is aborted"),
            (
                "the state of one task",
                f"{_size(wire.message_bytes_max)}, and more with larger events",
                "`SidecarLimits(event_bytes_max=...)`",
                "the checkpoint fails",
            ),
            (
                "checkpoints that are kept",
                f"{StorageDetails().retained_checkpoints}",
                "`StorageDetails(retained_checkpoints=...)`",
                "the oldest is deleted; the last completed one never is",
            ),
            (
                "kills of a subtask by Headgate in a run",
                "`spark.task.maxFailures`",
                "`LedgerConfig(attempts_max=...)`",
                "the job fails",
            ),
            (
                "the life of an attempt after which its kills are forgotten, in streaming mode",
                _time(ledger.kills_forgotten_after_s),
                "`LedgerConfig(kills_forgotten_after_s=...)`",
                "the count starts again",
            ),
        ],
        "Ready-made parts": [
            ("subtasks of an operator", f"{SUBTASKS_MAX:,}", "–", "`coordinate` and `rescale` raise `ValueError`"),
            ("parts and stages of an operator", f"{PARTS_MAX - 1}", "–", "`coordinate` raises `LocalProtocolError`"),
            (
                "items that tasks add to a work queue",
                _size(QUEUE_BYTES_MAX),
                "`sidecar.work_queue(..., bytes_max=...)`",
                "the job fails",
            ),
            ("characters of a part's name", f"{PART_NAME_CHARS_MAX}", "–", "`ValueError` at the call"),
            ("names of counts and distributions, for each task", f"{NAMES_MAX:,}", "–", "`ValueError` at the call"),
            ("buckets of distributions, for each task", f"{BUCKETS_MAX:,}", "–", "`ValueError` at the call"),
            ("a shared value when encoded", _size(VALUE_BYTES_MAX), "–", "`set` and `update` raise"),
            ("values of one collective of a group", _size(ROUND_BYTES_MAX), "–", "the job fails"),
            ("a blob in a group's checkpoint", _size(BLOB_BYTES_MAX), "–", "the job fails"),
        ],
        "Sources, sinks and what is shown": [
            (
                "lists of parts of a sink that wait for a checkpoint",
                _size(LISTED_BYTES_MAX),
                "–",
                "the job fails",
            ),
            ("a record of a CSV file", _size(BLOCK_BYTES_MAX), "–", "the task fails"),
            (
                "what is remembered of the ranges of a `PostgresSource`",
                _size(READ_BYTES_MAX),
                "`PostgresSource(..., range_rows=...)`: larger ranges are fewer",
                "the job fails",
            ),
            ("columns of `RedisStreamsSink`", f"{COLUMNS_MAX:,}", "–", "`SinkMisused` when the sink is made"),
            (
                "the time after which `FileSource` forgets a file that is gone",
                _time(FORGET_AFTER_S),
                "`FileSource(..., forget_after_s=...)`",
                "a file that returns under its name is read again",
            ),
            (
                "connections that have proved a key",
                f"{ServerConfig().connections_max:,}, less if the process may open fewer files",
                "–",
                "the newest of the operator that has the most is closed; its task tries again",
            ),
            (
                "connections to the status port",
                f"{STATUS_CONNECTIONS_MAX}",
                "–",
                "the oldest that has not shown the token is closed",
            ),
            ("a trace file", _size(TRACE_BYTES_MAX), "–", "later events are dropped, and the log says so"),
        ],
    }


def limits() -> str:
    """Return the page of limits."""
    lines = [LIMITS_INTRO]
    for title, rows in _limits().items():
        lines += [f"## {title}\n", "| limit | default | where to set it | beyond it |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


PAGES = {"docs/reference/error-texts.md": error_texts, "docs/reference/limits.md": limits}


if __name__ == "__main__":
    for page, printed in PAGES.items():
        (ROOT / page).write_text(printed(), encoding="utf-8")
        print(page)
