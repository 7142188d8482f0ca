"""The names that a package promises in ``__all__`` are there, explained, and told once."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What users import from. These must say what they promise; any other module may.
FRONT_DOORS = (
    "actors",
    "actors.coordination",
    "actors.testing",
    "headgate",
    "spark_bridge.subtask",
)


def every_module() -> list[str]:
    files = (file for top in ("actors", "headgate", "protocol", "spark_bridge") for file in (ROOT / top).rglob("*.py"))
    paths = sorted(file.relative_to(ROOT).with_suffix("").parts for file in files)
    return [".".join(path[:-1] if path[-1] == "__init__" else path) for path in paths]


def public_names(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


@pytest.mark.parametrize("name", FRONT_DOORS)
def test_a_front_door_says_what_it_promises(name: str) -> None:
    assert public_names(importlib.import_module(name)), f"{name} has no __all__"


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


def own_doc(thing: object) -> str:
    """Its own docstring: not an inherited one, nor the signature that ``dataclass`` writes in its place."""
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
