# SPDX-License-Identifier: Apache-2.0

"""Defines mutants, and puts their changes into the product without touching a file.

A function is recompiled from its own source with one fragment replaced. The result replaces the original on its class,
in its module, in the modules that have imported it, and in the tables that dispatch to it. If the product has changed
and an edit no longer matches its function, the error names the edit.
"""

from __future__ import annotations
import __future__

import difflib
import importlib
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

PRODUCT = ("protocol", "actors", "spark_bridge")


class DoesNotFit(Exception):
    """The fragment does not occur exactly once, or the function no longer exists: fix the mutant."""


@dataclass(frozen=True)
class Edit:
    """``old`` becomes ``new`` in a function of the product, say ``protocol.gateway.machine:GatewayMachine._take``.

    ``old`` must occur exactly once in the source; indentation counts from the ``def``.
    """

    where: str
    old: str
    new: str

    def sources(self) -> tuple[str, str]:
        """Return the function's source before and after the edit. Raises ``DoesNotFit``."""
        source = textwrap.dedent(inspect.getsource(self.function()))
        if (count := source.count(self.old)) != 1:
            raise DoesNotFit(f"{self.where} holds {self.old!r} {count} times, not once")
        return source, source.replace(self.old, self.new)

    def diff(self) -> str:
        """Return the changed lines, for people."""
        before, after = (source.splitlines() for source in self.sources())
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        return "\n".join([self.where, *(line for line in lines if not line.startswith("@@"))])

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the changed function in every place of the old one. Raises ``DoesNotFit``."""
        module, owner, name = self._place()
        old = inspect.getattr_static(owner, name)
        source = self.sources()[1]
        filename = f"<mutant of {self.where}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        made: dict[str, Any] = {}
        late = _LateImports()
        monkeypatch.setitem(late, old, None)  # the first change is undone last
        flags = __future__.annotations.compiler_flag
        exec(compile(source, filename, "exec", flags=flags, dont_inherit=True), vars(module), made)
        new = made[name]
        late.mutated = new
        if owner is not module:
            monkeypatch.setattr(owner, name, new)
        for mapping, key in _everywhere(old):
            monkeypatch.setitem(mapping, key, new)

    def _place(self) -> tuple[ModuleType, Any, str]:
        module_name, _, path = self.where.partition(":")
        *owners, name = path.split(".")
        module = importlib.import_module(module_name)
        owner: Any = module
        try:
            for step in owners:
                owner = getattr(owner, step)
            inspect.getattr_static(owner, name)
        except AttributeError as error:
            raise DoesNotFit(f"there is no {self.where} any more") from error
        return module, owner, name

    def function(self) -> Any:
        """Return the current function; for a property, its getter. Raises ``DoesNotFit``."""
        _, owner, name = self._place()
        found = inspect.getattr_static(owner, name)
        return found.fget if isinstance(found, property) else found


class _LateImports(dict[Any, Any]):
    """Undone like a change of a mapping: a module that was imported with the mutant in the product loses it, too."""

    mutated: Any = None

    def __delitem__(self, old: Any) -> None:
        super().__delitem__(old)
        for mapping, key in _everywhere(self.mutated):
            mapping[key] = old


def _everywhere(value: object) -> list[tuple[MutableMapping[Any, Any], Any]]:
    """The places of a function in the modules of the product that are loaded."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in PRODUCT]
    return [place for module in loaded for place in _places(vars(module), value)]


def _places(mapping: MutableMapping[Any, Any], old: object) -> Iterator[tuple[MutableMapping[Any, Any], Any]]:
    """Yield the places of ``old`` in a module's names and in its tables of functions."""
    for key, value in list(mapping.items()):
        if value is old:
            yield mapping, key
        elif isinstance(value, dict) and value is not mapping and not str(key).startswith("__"):
            yield from _places(value, old)


@dataclass(frozen=True)
class Mutant:
    """One bug.

    ``what``: the bug as a fact, in one sentence. ``origin``: where it is known from. ``rules``: the rules it breaks.
    ``argued``: why no checker can see it, if it changes nothing that the contract promises.
    """

    name: str
    what: str
    origin: str
    rules: tuple[str, ...]
    edits: tuple[Edit, ...]
    argued: str = ""

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Change the product until ``monkeypatch`` is undone. Raises ``DoesNotFit``, with the mutant's name."""
        try:
            for edit in self.edits:
                edit.apply(monkeypatch)
        except DoesNotFit as error:
            raise DoesNotFit(f"mutant {self.name!r}: {error}") from None

    def diff(self) -> str:
        return "\n".join(edit.diff() for edit in self.edits)


def catalogue(text: str) -> tuple[Mutant, ...]:
    """Read mutants from a table. Each begins at the left margin with its name, its origin and its rules::

        complete-before-durable [G4; H50]
          A checkpoint counts as complete before the storage has written it.
          @ package.module:Class.function
          - the old fragment
          + the new fragment

    A mutant may have several edits, and an edit several lines. A line that ends with a backslash continues on the next
    one. ``Argued:`` after the first sentence begins the argument why no checker can see the mutant.
    """
    return tuple(map(_read, re.split(r"\n(?=\S)", text.strip())))


def _read(block: str) -> Mutant:
    about, *edits = block.split("\n  @ ")
    head, *prose = about.split("\n")
    parts = re.fullmatch(r"(\S+) \[(.+); ((?:H\d+|invariant)(?: H\d+)*)\]", head)
    assert parts is not None, head
    what, _, argued = " ".join(line.strip() for line in prose).partition(" Argued: ")
    return Mutant(parts[1], what, parts[2], tuple(parts[3].split()), tuple(map(_read_edit, edits)), argued)


def _read_edit(text: str) -> Edit:
    where, *lines = text.split("\n")
    old, new = ("\n".join(line[4:] for line in lines if line[2] == mark).replace("\\\n", "") for mark in "-+")
    return Edit(where, old, new)
