# SPDX-License-Identifier: Apache-2.0

"""The page of log events has every warning and error that the product logs, with its level, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/log-events.md"
LEVELS = ("warning", "error", "exception", "critical")
ROW = re.compile(r"^\| `(?P<event>[^`]+)` \| (?P<level>\w+) \| (?P<meaning>.+) \|$", re.MULTILINE)
PASSED_ON = {"what": ("_tell_unhandled", "log_failure")}
"""Variables that hold the event, and the functions that are called with it."""


AT_ANOTHER_LEVEL = {"similar lines suppressed": "warning"}
"""What has the level of the lines that it counts, which are warnings as a rule."""


def phrases(call: ast.Call, tree: ast.Module) -> list[str]:
    """The events that a call of a logger can write."""
    event = call.args[0]
    if isinstance(event, ast.Constant):
        return [str(event.value)]
    if isinstance(event, ast.IfExp):
        return [str(one.value) for one in (event.body, event.orelse) if isinstance(one, ast.Constant)]
    assert isinstance(event, ast.Name), f"line {call.lineno}: what is logged is not a fixed phrase"
    given = [one for other in calls(tree, PASSED_ON[event.id]) for one in other.args]
    return [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def calls(tree: ast.Module, names: tuple[str, ...]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield node


def logged() -> dict[str, str]:
    """The level of each event of the product."""
    found: dict[str, str] = {}
    for folder in ("actors", "protocol", "spark_bridge", "headgate"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            for call in calls(tree, LEVELS):
                assert isinstance(call.func, ast.Attribute)
                if call.args and re.search(r"(log|repeated)$", ast.unparse(call.func.value)):
                    found |= dict.fromkeys(phrases(call, tree), call.func.attr)
    return found | AT_ANOTHER_LEVEL


def test_the_page_of_log_events_has_every_warning_and_error_and_no_other() -> None:
    page = {row["event"]: row["level"] for row in ROW.finditer(PAGE.read_text("utf-8"))}
    assert page == logged()


REMEDY = re.compile(
    r"\b(correct|look|check|give|run|add|override|use|pass|let|report|make|raise|await|set|do not|define|choose|keep"
    r"|start|delete it|nothing has to be done|nothing else|nothing is lost|not affected|does no harm|in the way"
    r"|(tried|opened|connects|asked) again|is retried|retries it|ends it|shows it|trace a)\b|\]\(",
    re.IGNORECASE,
)


def test_each_event_is_on_the_page_once_and_says_what_to_do() -> None:
    rows = [(row["event"], row["meaning"]) for row in ROW.finditer(PAGE.read_text("utf-8"))]
    assert len(rows) == len({event for event, _ in rows})
    assert [event for event, meaning in rows if not REMEDY.search(meaning)] == []
