# SPDX-License-Identifier: Apache-2.0

"""The public names: those in ``__all__`` exist, have docstrings and are listed once."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The packages that users import from, with their purpose. `tests/test_front_door.py` lists the names of `headgate`.
PUBLIC = {
    "headgate": "programs on Spark",
    "headgate.actors": "the actor runtime by itself, without Spark",
    "headgate.actors.testing": "tests of such actors in virtual time",
    "headgate.testing": "tests of coordinators and operators without Spark, in virtual time",
    "headgate.errors": "handlers of errors",
    "headgate.sinks": "programs that write exactly once, and authors of sinks",
    "headgate.sources": "programs that read an input, and authors of sources",
    "headgate.types": "annotations of values that a program is given, and states in files",
    "actors": "the same as headgate.actors",
    "actors.testing": "the same as headgate.actors.testing",
}
# Packages that collect names for other layers. Users find the names that they need in `headgate`.
INTERNAL = {
    "actors.coordination": "what an engine needs to run coordinators, for spark_bridge",
    "spark_bridge.bridge.relay": "the relay of Spark's events, for the sidecar",
    "spark_bridge.storage": "durable checkpoints, for the sidecar",
    "spark_bridge.subtask": "the half that runs in a task",
}


def every_module() -> list[str]:
    files = (file for top in ("actors", "headgate", "protocol", "spark_bridge") for file in (ROOT / top).rglob("*.py"))
    paths = sorted(file.relative_to(ROOT).with_suffix("").parts for file in files)
    return [".".join(path[:-1] if path[-1] == "__init__" else path) for path in paths]


def public_names(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_its_names(name: str) -> None:
    assert public_names(importlib.import_module(name)), f"{name} has no __all__"


def test_no_other_package_collects_names() -> None:
    packages = [name for name in every_module() if hasattr(importlib.import_module(name), "__path__")]
    collecting = {name for name in packages if public_names(importlib.import_module(name))}
    assert collecting == (PUBLIC.keys() | INTERNAL.keys()) & set(packages)


@pytest.mark.parametrize("name", INTERNAL)
def test_an_internal_package_collects_only_what_others_import_from_it(name: str) -> None:
    assert set(public_names(importlib.import_module(name))) - imported_names()[name] == set()


@functools.cache
def imported_names() -> dict[str, set[str]]:
    """Return, for each module, the names that this repository's code imports from it, or uses with it as a prefix."""
    names: dict[str, set[str]] = {}
    for folder in ("actors", "benchmarks", "headgate", "protocol", "spark_bridge", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            prefixes: dict[str, str] = {}
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names.setdefault(node.module, set()).update(alias.name for alias in node.names)
                    prefixes.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in prefixes:
                    names.setdefault(prefixes[node.value.id], set()).add(node.attr)
    return names


@pytest.mark.parametrize("name", every_module())
def test_a_module_explains_itself(name: str) -> None:
    assert inspect.getdoc(importlib.import_module(name)), f"{name} has no docstring"


@pytest.mark.parametrize("name", every_module())
def test_a_promised_name_exists_and_is_promised_once(name: str) -> None:
    module = importlib.import_module(name)
    names = public_names(module)
    assert [promised for promised in names if not hasattr(module, promised)] == []
    assert [promised for promised in names if promised.startswith("_") or names.count(promised) > 1] == []


@pytest.mark.parametrize("name", every_module())
def test_a_promised_class_or_function_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    promised = {name: getattr(module, name) for name in public_names(module)}
    silent = [
        name
        for name, value in promised.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not own_doc(value)
    ]
    assert silent == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("actors.testing", "headgate.testing")])
def test_completion_shows_only_promised_names(name: str) -> None:
    module = importlib.import_module(name)
    assert {shown for shown in dir(module) if not shown.startswith("__")} == set(public_names(module))


@pytest.mark.parametrize("name", ["actors", "actors.testing"])
def test_alias_has_the_same_objects(name: str) -> None:
    module, alias = importlib.import_module(name), importlib.import_module(f"headgate.{name}")
    assert public_names(alias) == public_names(module)
    assert all(getattr(alias, promised) is getattr(module, promised) for promised in public_names(module))


def own_doc(thing: object) -> str:
    """Return its own docstring: not an inherited one, nor the signature that ``dataclass`` writes in its place."""
    doc = getattr(thing, "__doc__", None) or ""
    name = getattr(thing, "__name__", "")
    return "" if doc.startswith(f"{name}(") else doc


def test_a_generated_docstring_does_not_count() -> None:
    from dataclasses import dataclass

    @dataclass
    class Silent:
        x: int

    class Child(Silent):
        pass

    assert not own_doc(Silent)
    assert not own_doc(Child)
    assert own_doc(own_doc)


FACTORIES = {"budget", "cache", "group", "permits", "shared", "work_queue"}
BOTH = {
    "checkpoint",
    "coordinate",
    "explain",
    "release",
    "request",
    "rescale",
    "run",
    "savepoint",
    "source",
    "status",
    "trace",
}
PROPERTIES = {"address", "lost", "relay_kind", "status_address"}
METHODS = {
    "Sidecar": FACTORIES | BOTH | PROPERTIES | {"for_each_batch", "is_running", "stop"},
    "SidecarRuntime": FACTORIES | BOTH | PROPERTIES | {"handles"},
}
"""What a sidecar publishes: what a user needs, and nothing that only another module of Headgate calls."""


@pytest.mark.parametrize("name", METHODS)
def test_a_sidecar_publishes_what_a_user_needs_and_nothing_else(name: str) -> None:
    kind = getattr(importlib.import_module("headgate"), name)
    assert {one for one in dir(kind) if not one.startswith("_")} == METHODS[name]
    assigned = {
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    assert {one for one in assigned if not one.startswith("_")} == set()


# What was true of an earlier release and is not any more. Events have had tuples, classes and arrays for long.
FALSE = re.compile(
    r"arrive as lists|any value that msgpack|msgpack can(not)? (carry|encode) (it|the event|``)|"
    r"needs no Java compilation|refuses to compile|could not be compiled"
)


@pytest.mark.parametrize("name", every_module())
def test_no_docstring_says_what_was_true_of_an_earlier_release(name: str) -> None:
    source = Path(importlib.import_module(name).__file__ or "").read_text(encoding="utf-8")
    assert [match[0] for match in FALSE.finditer(" ".join(source.split()))] == []
