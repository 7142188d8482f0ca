# SPDX-License-Identifier: Apache-2.0

"""How the modules of the front door load a name, when it is first used, from the module that defines it."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from opcode import opmap
from typing import Any

_LAZY = ("headgate", "headgate.sinks", "headgate.sources", "headgate.errors", "headgate.types")
_OTHERS = ("headgate.testing", "headgate.actors")


def lazy(namespace: dict[str, Any]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for the module with these globals.

    The module imports each of its names, ``as`` itself, under ``if TYPE_CHECKING:``. That block is the one list of
    them: type checkers read it, and this function reads it as text, so that nothing is imported.
    """
    package = namespace["__name__"]
    # Finds the source in a zip, too, and that of a module which pytest has loaded: its loader gives none.
    modules = _imported("".join(linecache.getlines(namespace["__file__"], namespace)))

    def get(name: str) -> Any:
        try:
            value = namespace[name] = _load(package, modules, name)
        except AttributeError as error:
            user = sys._getframe(1)
            if user.f_code.co_code[user.f_lasti] == opmap["IMPORT_FROM"]:  # which would drop the text of this error
                raise ImportError(str(error), name=package) from None
            raise
        return value

    def names() -> list[str]:
        return [*modules, *(name for name in namespace if name.startswith("__"))]

    return list(modules), get, names


def _imported(source: str) -> dict[str, str]:
    """Return the names that ``source`` imports under ``if TYPE_CHECKING:``, each with its module."""
    blocks = (node.body for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for node in next(blocks) if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _load(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Return the value of ``name``.

    Raises ``AttributeError`` for a name that ``package`` does not have; if another module of the front door has it, the
    text names that module. Raises ``ImportError`` if a package of another distribution has the name of one of ours; the
    text names that distribution.
    """
    module = modules.get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(package, name)}")
    # Here, not above: pytest imports this package in every project, and those without Headgate may have any names.
    from spark_bridge.common import foreign_packages  # refuses what has the name of one of ours

    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        foreign_packages.explain(error)
        raise


def _elsewhere(package: str, name: str) -> str:
    if f"{package}.{name}" in (*_LAZY, *_OTHERS):
        return f": it is a module, write 'import {package}.{name}'"
    if not name.startswith("_"):
        for other in _LAZY:
            if name in import_module(other).__all__:
                return f": write 'from {other} import {name}'"
        near = get_close_matches(name, import_module(package).__all__, n=1, cutoff=0.75)
        return f": did you mean {near[0]}?" if near else ""
    return ""
