# SPDX-License-Identifier: Apache-2.0

"""Modules import each other without cycles, even counting the imports that only types need.

No module in a cycle can be read alone. The front of a package (``__init__``) re-exports its modules, so an import from
the package itself counts, and a module inside it must import from its siblings directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_import_rules import imported_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "protocol", "spark_bridge")

ALLOWED: tuple[set[str], ...] = ()
"""The remaining cycles, each with its reason; remove the entry together with the cycle."""


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(source: str, importer: str, known: set[str]) -> set[str]:
    """Return the modules among ``known`` that ``source`` imports, at run time or for types only."""
    names = [name for _, name in imported_names(source, importer.rpartition(".")[0])]
    found = {name if name in known else name.rpartition(".")[0] for name in names}
    return (found & known) - {importer}


def cycles(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the sets of modules in which each can be reached from every other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo.extend(edges[name])
        return seen

    reached = {name: reach(name) for name in edges}
    told: set[str] = set()
    for name in sorted(edges):
        if name in reached[name] and name not in told:
            cycle = {other for other in reached[name] if name in reached[other]}
            told |= cycle
            yield cycle


def test_no_module_can_be_reached_from_itself() -> None:
    files = modules()
    edges = {name: imports(file.read_text(encoding="utf-8"), name, set(files)) for name, file in files.items()}
    assert sorted(map(sorted, cycles(edges))) == sorted(map(sorted, ALLOWED))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b", {"a.b"}),
        ("from a.b import Something", {"a.b"}),
        ("from a import Something", {"a"}),
        ("if TYPE_CHECKING:\n    from a.b import Something", {"a.b"}),
        ("def f():\n    from a.b import Something", {"a.b"}),
        ("import asyncio", set()),
        ("from a.c import Something", set()),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, expected: set[str]) -> None:
    assert imports(source, "a.c", {"a", "a.b", "a.c"}) == expected


def test_a_cycle_is_found_once_and_whole() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert list(cycles(edges)) == [{"a", "b", "c"}]
