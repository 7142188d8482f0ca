# SPDX-License-Identifier: Apache-2.0

"""The committed size of each scope, so that a change of the machines shows as a difference of numbers.

The search is deterministic, so the numbers depend on the code alone. A scope that is not in the file has never been
explored completely.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.exploration.scopes import SCOPES
from tests.exploration.search import Result

COUNTS = Path(__file__).with_name("counts.json")
FIGURES = ("states", "transitions", "depth", "ends")


def read() -> dict[str, dict[str, int]]:
    """Return the figures of each scope, by name."""
    counts: dict[str, dict[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return counts


def figures(result: Result) -> dict[str, int]:
    return {name: getattr(result, name) for name in FIGURES}


def differences(results: Sequence[Result]) -> list[str]:
    """Return a line for each complete result whose figures are not those of the file."""
    known = read()
    return [
        f"{result.scope.name}: {figures(result)}, and {known.get(result.scope.name, 'nothing')} in {COUNTS.name}"
        for result in results
        if result.complete and known.get(result.scope.name) != figures(result)
    ]


def write(results: Sequence[Result]) -> None:
    """Put the figures of the complete results into the file, and leave those of other scopes as they are."""
    counts = read()
    counts |= {result.scope.name: figures(result) for result in results if result.complete}
    lines = [f"{json.dumps(name)}: {json.dumps(counts[name])}" for name in SCOPES if name in counts]
    COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
