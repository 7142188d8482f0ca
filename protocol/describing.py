# SPDX-License-Identifier: Apache-2.0

"""Texts of values and exceptions of users' code, which may raise or return nonsense when they are asked for one.

No text is worth an error: these functions never raise, whatever ``__str__``, ``__repr__`` or ``__format__`` does, and
return plain ``str``, not a subclass of it, which can always be encoded and is never long. So an exception that cannot
describe itself, or not briefly, still fails a task, a job or a request as itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Any, Final, TypeGuard, TypeVar

__all__ = [
    "TEXT_CHARS_MAX",
    "a_type",
    "class_name",
    "describe",
    "full_name",
    "is_a",
    "name_of",
    "readable",
    "show",
    "text_of",
    "type_name",
    "with_article",
]

T = TypeVar("T")

SHOWN_CHARS_MAX: Final = 300
TEXT_CHARS_MAX: Final = 16_384
"""The texts of exceptions are kept, logged and sent, some of them for a long time."""
_NAME: Final[Callable[[type], str]] = vars(type)["__name__"].__get__


def describe(error: BaseException) -> str:
    """The type and the text of ``error``."""
    return f"{type_name(error)}: {text_of(error)}"


def is_a(value: object, kind: type[T] | UnionType) -> TypeGuard[T]:
    """Whether ``value`` is an instance of a class, whatever its ``__class__`` says or raises."""
    return issubclass(type(value), kind)


def type_name(value: object) -> str:
    """The name of the type of ``value``, whatever its metaclass or its ``__class__`` says."""
    return class_name(type(value))


def a_type(value: object) -> str:
    """The name of the type of ``value`` after its article: ``a str``, ``an int``."""
    return with_article(type_name(value))


def with_article(name: str) -> str:
    """A name after ``a`` or ``an``."""
    return f"an {name}" if name[:1] in tuple("AEIOUaeiou") else f"a {name}"


def class_name(kind: type) -> str:
    """The name of a class, whatever its metaclass says."""
    name: str = _NAME(kind)
    return name


def full_name(kind: type) -> str:
    """The module and the qualified name of a class, or its name alone if its metaclass does not say them."""
    try:
        return f"{str.__str__(kind.__module__)}.{str.__str__(kind.__qualname__)}"
    except BaseException:
        return class_name(kind)


def text_of(error: BaseException) -> str:
    """What ``str(error)`` returns, ``readable``, or in angle brackets why there is nothing."""
    return _plain(error, str, "__str__")


def show(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """What ``repr(value)`` returns, cut after so many characters; or the type, and why there is nothing."""
    shown = _plain(value, repr, "__repr__")
    if shown.startswith("<its "):
        shown = f"{type_name(value)} {shown}"
    return shown if len(shown) <= chars_max else f"{shown[: chars_max - 3]}..."


def readable(text: str) -> str:
    """The text with its lone surrogates escaped, and without its middle if it is too long."""
    if len(text) > TEXT_CHARS_MAX:
        text = f"{text[: TEXT_CHARS_MAX // 2]}…{text[-TEXT_CHARS_MAX // 2 :]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def name_of(function: Callable[..., Any]) -> str:
    """How to name a function or another callable of a user in a text."""
    try:
        return str.__str__(function.__qualname__)
    except BaseException:  # it has none, or one that is not a str
        return show(function)


def _plain(value: object, convert: Callable[[object], str], method: str) -> str:
    try:
        return readable(str.__str__(convert(value)))
    except BaseException as broken:  # an exit too: it must not replace what is described
        return f"<its {method} raised {type_name(broken)}>"
