# SPDX-License-Identifier: Apache-2.0

"""Defines mutants, and puts their changes into the product without touching a file.

A function is recompiled from its own source with one fragment replaced. The result replaces the original on its class,
in its module, in the modules that have imported it, and in the tables that dispatch to it. A constant of a module is
replaced in the same way, and for a Java source the function that returns the compiled relays: the jar is built with the
change when it is asked for. If the product has changed and an edit no longer matches, the error names the edit.
"""

from __future__ import annotations
import __future__

import ast
import difflib
import importlib
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from spark_bridge.bridge.jvm_classes import java_source
from tests.release import relay_jar

PRODUCT = ("protocol", "actors", "spark_bridge")


class DoesNotFit(Exception):
    """The fragment does not occur exactly once, or the function no longer exists: fix the mutant."""


@dataclass(frozen=True)
class Edit:
    """``old`` becomes ``new`` in a function of the product, say ``protocol.gateway.machine:GatewayMachine._take``.

    Or in a constant of a module, or in ``spark_bridge.connect:SessionRelay.java``.

    ``old`` must occur exactly once in the source; indentation counts from the ``def``.
    """

    where: str
    old: str
    new: str

    def sources(self) -> tuple[str, str]:
        """Return the function's source before and after the edit. Raises ``DoesNotFit``."""
        source = self._source()
        if (count := source.count(self.old)) != 1:
            raise DoesNotFit(f"{self.where} holds {self.old!r} {count} times, not once")
        return source, source.replace(self.old, self.new)

    @property
    def is_java(self) -> bool:
        return self.where.endswith(".java")

    def _source(self) -> str:
        package, _, name = self.where.partition(":")
        if self.is_java:
            return java_source(package, name.removesuffix(".java"))
        found = self.function()
        if callable(found):
            return textwrap.dedent(inspect.getsource(found))
        text = inspect.getsource(importlib.import_module(package))
        constants = (one for one in ast.parse(text).body if isinstance(one, ast.AnnAssign))
        [assigned] = (one for one in constants if ast.unparse(one.target) == name)
        return ast.get_source_segment(text, assigned) or ""

    def diff(self) -> str:
        """Return the changed lines, for people."""
        before, after = (source.splitlines() for source in self.sources())
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        return "\n".join([self.where, *(line for line in lines if not line.startswith("@@"))])

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the changed function in every place of the old one. Raises ``DoesNotFit``."""
        module, owner, name = self._place()
        old = inspect.getattr_static(owner, name)
        new = self._changed(module, name)
        monkeypatch.setitem(_LateImports(old, new), "late", True)  # the first change is undone last
        if owner is not module:
            monkeypatch.setattr(owner, name, new)
        for mapping, key in _everywhere(old):
            monkeypatch.setitem(mapping, key, new)

    def _changed(self, module: ModuleType, name: str) -> Any:
        source = self.sources()[1]
        if self.is_java:
            compiler, relay = relay_jar.javac(), self.where.partition(":")[2]
            assert compiler is not None, "a mutant of a relay needs a JDK"
            return cache(lambda: relay_jar.build(compiler, {relay: source}))
        filename = f"<mutant of {self.where}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        made: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source, filename, "exec", flags=flags, dont_inherit=True), vars(module), made)
        return made[name]

    def _place(self) -> tuple[ModuleType, Any, str]:
        place = "spark_bridge.bridge.relay_jar:jar_bytes" if self.is_java else self.where
        module_name, _, path = place.partition(":")
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


class _LateImports(dict[str, bool]):
    """Undone like a change of a mapping: a module that was imported with the mutant in the product loses it, too."""

    def __init__(self, old: object, new: object) -> None:
        super().__init__()
        self._old, self._new = old, new

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        for mapping, place in _everywhere(self._new):
            mapping[place] = self._old


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
    ``argued``: why no checker can see it, if it changes nothing that the contract promises. ``by``: the test that has
    to see it, if only a real Spark shows it.
    """

    name: str
    what: str
    origin: str
    rules: tuple[str, ...]
    edits: tuple[Edit, ...]
    argued: str = ""
    by: str = ""

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
          ~ the old fragment => the new fragment

    A mutant may have several edits. A fragment that is long, or has several lines, has its own: ``-`` before those of
    the old one, ``+`` before those of the new one, and one that ends with a backslash continues on the next. A
    statement without a new fragment becomes ``pass``; the condition after ``F`` or ``T`` is always ``False`` or
    ``True``. ``Argued:`` after the first sentence begins the argument why no checker can see the mutant, and ``By:``
    names the test on a real Spark that has to see it.
    """
    return tuple(map(_read, re.split(r"\n(?=\S)", text.strip())))


def _read(block: str) -> Mutant:
    about, *edits = block.split("\n  @ ")
    head, *prose = about.split("\n")
    parts = re.fullmatch(r"(\S+) \[(.+); ((?:H\d+|invariant)(?: H\d+)*)\]", head)
    assert parts is not None, head
    text, _, by = " ".join(line.strip() for line in prose).replace(":: ", "::").partition(" By: ")
    what, _, argued = text.partition(" Argued: ")
    return Mutant(parts[1], what, parts[2], tuple(parts[3].split()), tuple(map(_read_edit, edits)), argued, by)


def _read_edit(text: str) -> Edit:
    where, *lines = text.split("\n")
    fragments = {mark: "\n".join(line[4:] for line in lines if line[2] == mark).replace("\\\n", "") for mark in "-+FT~"}
    if change := fragments["~"]:
        return Edit(where, *change.split(" => "))
    for mark, value in (("F", "False"), ("T", "True")):
        if condition := fragments[mark]:
            return Edit(where, condition, f"{condition.partition(' ')[0]} {value}:")
    leaves_out = not any(line[2] == "+" for line in lines)
    return Edit(where, fragments["-"], "pass" if leaves_out else fragments["+"])
