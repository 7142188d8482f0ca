# SPDX-License-Identifier: Apache-2.0

"""Texts of values that cannot describe themselves, and where the product makes such texts (H178)."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from protocol.describing import (
    LEFT_OUT,
    TEXT_CHARS_MAX,
    a_type,
    describe,
    name_of,
    show,
    text_of,
    traceback_of,
    with_article,
)
from protocol.errors import RequestFailed
from spark_bridge.subtask.errors import CoordinatorTraceback

ROOT = Path(__file__).resolve().parent.parent.parent


class Sneaky(str):
    """A text with overridden methods."""

    def __format__(self, spec: str) -> NoReturn:
        raise ZeroDivisionError

    def __str__(self) -> NoReturn:
        raise ZeroDivisionError

    def __getitem__(self, place: Any) -> NoReturn:
        raise ZeroDivisionError


def raising(error: BaseException) -> Callable[[object], NoReturn]:
    def method(self: object) -> NoReturn:
        raise error

    return method


BROKEN: dict[str, Callable[[object], Any]] = {
    "raises": raising(ValueError("no")),
    "raises an exit": raising(SystemExit(3)),
    "raises an interrupt": raising(KeyboardInterrupt()),
    "raises what is not an Exception": raising(BaseException("no")),
    "returns a number": lambda self: 7,
    "returns None": lambda self: None,
    "returns bytes": lambda self: b"text",
    "recurses": lambda self: str(self) + repr(self),
}


def an_error(method: Callable[[object], Any]) -> BaseException:
    error: BaseException = type("Unspeakable", (Exception,), {"__str__": method, "__repr__": method})("hidden")
    return error


@pytest.mark.parametrize("how", BROKEN)
def test_an_exception_that_cannot_describe_itself_has_its_type_as_its_text(how: str) -> None:  # H178
    error = an_error(BROKEN[how])
    assert describe(error).startswith("Unspeakable: <its __str__ raised ")
    assert show(error).startswith("Unspeakable <its __repr__ raised ")
    assert type(text_of(error)) is str


def test_a_text_with_overridden_methods_becomes_a_plain_one() -> None:
    error = an_error(lambda self: Sneaky("plain"))
    assert describe(error) == "Unspeakable: plain"
    assert type(describe(error)) is type(show(error)) is str


def test_a_long_text_is_cut() -> None:
    assert show("x" * 1000, 10) == "'xxxxxx..."
    assert show("x", 10) == "'x'"


CYCLE: list[Any] = [1]
CYCLE += [(CYCLE,), {"again": CYCLE}]


@pytest.mark.parametrize(
    "value",
    [
        [],
        (),
        {},
        [1],
        (1,),
        (1, 2),
        {1: [2], (3,): {"x": None}},
        [[], ((),)],
        {1, 2},
        {frozenset({3})},
        CYCLE,
        [Sneaky("x"), 0.5],
    ],
)
def test_a_value_is_shown_as_python_shows_it(value: Any) -> None:
    shown = repr(value)
    assert show(value, 1000) == shown
    assert show(value, 10) == (shown if len(shown) <= 10 else f"{shown[:7]}...")


def test_only_as_many_values_are_asked_for_their_texts_as_are_shown() -> None:  # H157
    asked = []

    class Slow:
        def __repr__(self) -> str:
            asked.append(self)
            return "slow"

    shown = show(["name", {"many": [(Slow(), number) for number in range(10_000)]}], 100)
    assert shown.startswith("['name', {'many': [(slow, 0), (slow, 1), ")
    assert len(shown) == 100
    assert len(asked) < 20


def test_a_text_without_bounds_keeps_its_beginning_and_its_end() -> None:  # H178
    error = LookupError("begins" + "x" * 10_000_000 + "ends")
    for text in (text_of(error), describe(error)):
        assert len(text) < 2 * TEXT_CHARS_MAX
        assert "begins" in text
        assert text.endswith("ends")
    assert len(text_of(LookupError("\udc80" * 10_000_000))) < 10 * TEXT_CHARS_MAX


def test_a_text_that_cannot_be_encoded_is_escaped() -> None:  # H178
    assert text_of(LookupError("a\udc80b")) == "a\\udc80b"
    assert describe(LookupError("grün")) == "LookupError: grün"


class UnnamedType(type):
    """Raises when somebody asks for the name of its class, as ``traceback`` does."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Unnamed(Exception, metaclass=UnnamedType):
    pass


def test_a_traceback_that_python_cannot_write_is_none_and_the_exception_is_described() -> None:  # H178
    assert traceback_of(Unnamed("why")) is None
    assert describe(Unnamed("why")) == "Unnamed: why"


def test_of_endless_notes_only_the_first_are_read() -> None:  # H178
    read: list[int] = []

    class Note(str):
        def split(self, *_: Any) -> list[str]:
            read.append(1)
            return ["n" * 10_000]

        def __str__(self) -> str:
            return self

    error = LookupError("text")
    for _ in range(10_000):
        error.add_note(Note())
    text = traceback_of(error, chars_max=100_000)
    assert text is not None
    assert text.startswith("LookupError: text\nnnn")
    assert text.endswith(f"n\n{LEFT_OUT}")
    assert 10 <= len(read) <= 12
    assert len(text) < 120_000


def test_a_callable_without_a_name_is_shown_and_a_broken_one_too() -> None:
    class Callee:
        def __call__(self) -> None: ...

        __repr__ = BROKEN["raises"]

        def __getattr__(self, name: str) -> NoReturn:
            raise SystemExit

    assert name_of(Callee()).startswith("Callee <its __repr__ raised")
    assert name_of(an_error) == "an_error"


# --- the product ----------------------------------------------------------------------------------------------------


def described_without_care(file: Path) -> list[str]:
    """The places where a user's exception becomes a part of a text, other than by the functions above."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            if broad and node.name is not None:
                found += [f"{file.relative_to(ROOT)}:{line}" for line in _texts_of(node.name, node.body)]
    return found


def _texts_of(name: str, body: list[ast.stmt]) -> list[int]:
    lines = []
    for node in (inner for statement in body for inner in ast.walk(statement)):
        value = node.value if isinstance(node, ast.FormattedValue) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            value = node.args[0] if node.args else None
        if isinstance(value, ast.Name) and value.id == name:
            lines.append(value.lineno)
    return lines


NOT_OF_USERS = {
    "driver/installation.py": "a command that runs Spark by itself",
    "common/foreign_packages.py": "errors of imports",
    "storage/files.py": "errors of filesystems",
    "bridge/": "errors of Py4J and of the JVM",
    "connect/": "errors of the client and of the JVM",
    "sinks/files/moves.py": "errors of filesystems",
    "sinks/files/task.py": "errors of filesystems",
    "observability/spark": "errors of Py4J and of the JVM",
    "observability/event_log.py": "errors of Py4J and of the JVM",
}


@pytest.mark.parametrize("package", ["actors", "protocol", "spark_bridge", "headgate"])
def test_whatever_is_caught_is_described_with_care(package: str) -> None:
    """An ``except Exception`` may have caught a user's exception, whose ``__str__`` may raise."""
    found = [
        place
        for file in sorted((ROOT / package).rglob("*.py"))
        if not any(f"spark_bridge/{known}" in file.as_posix() for known in NOT_OF_USERS)
        for place in described_without_care(file)
    ]
    assert found == [], "use protocol.describing"


@pytest.mark.parametrize(
    "spoken",
    [
        "an OperatorHandle",
        "a Sidecar",
        "an RDD",
        "an NDArray",
        "a UUID",
        "a URL",
        "a user",
        "an unknown",
        "a uuid",
        "an E",
    ],
)
def test_a_name_has_the_article_with_which_it_is_spoken(spoken: str) -> None:
    assert with_article(spoken.split()[1]) == spoken


def test_a_type_has_the_article_of_its_name() -> None:
    kinds: tuple[object, ...] = (1, "x", {}, type("", (), {})())
    assert list(map(a_type, kinds)) == ["an int", "a str", "a dict", "a "]


def test_a_text_of_a_peer_or_a_users_value_makes_no_terminal_obey() -> None:  # H156
    hostile = "one\x1b[2J\x00\u202e\u2028two\nthree"
    shown = show(type("Hostile", (float,), {"__repr__": lambda self: hostile})())
    assert shown.isprintable(), shown
    failed = RequestFailed(hostile)
    assert all(one.isprintable() for one in str(failed).split("\n"))
    assert str(failed).endswith("two\nthree")
    assert str(pickle.loads(pickle.dumps(failed))) == str(failed)
    told = CoordinatorTraceback(hostile)
    assert all(one.isprintable() for one in str(told).split("\n"))
