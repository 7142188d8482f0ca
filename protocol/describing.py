# SPDX-License-Identifier: Apache-2.0

"""The door for all that is shown, exported, traced, logged or noted: texts, numbers and JSON of any value (H156).

Values and exceptions of users' code may raise or return nonsense when they are asked for a text. No text is worth an
error: these functions never raise, whatever ``__str__``, ``__repr__`` or ``__format__`` does, and return plain ``str``,
not a subclass of it, which can always be encoded and is never long. So an exception that cannot describe itself, or not
briefly, still fails a task, a job or a request as itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf, isfinite, nan
from traceback import TracebackException
from types import UnionType
from typing import Any, Final, TypeGuard, TypeVar

T = TypeVar("T")

SHOWN_CHARS_MAX: Final = 300
TEXT_CHARS_MAX: Final = 16_384
"""The texts of exceptions are kept, logged and sent, some of them for a long time."""
LEFT_OUT: Final = "... and more, which is left out\n"
NOT_FINITE: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
"""How JSON has the floats for which it has no numbers, as in Protobuf's mapping."""
_DIGITS_BITS: Final = 14_000
"""Python writes no longer integer as text, by default."""
_LEVELS_MAX: Final = 50
_BRACKETS: Final[dict[type, tuple[str, str]]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
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


_SPOKEN_AS_YOU = ("eu", "uni", "use", "uuid")


def with_article(name: str) -> str:
    """A name after ``a`` or ``an``, as it is spoken: ``an RDD``, ``a UUID``."""
    if len(name) > 1 and name[:2].isupper():  # it is spelt out
        vowel = name[0] in "AEFHILMNORSX"
    else:
        vowel = name[:1].lower() in tuple("aeiou") and not name.lower().startswith(_SPOKEN_AS_YOU)
    return f"an {name}" if vowel else f"a {name}"


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


def traceback_of(error: BaseException, chars_max: float = 2**20) -> str | None:
    """The traceback as Python writes it, with whatever characters; None if Python cannot, because of the user's class.

    Of endless notes, only the first ``chars_max`` characters or so are read, and then comes ``LEFT_OUT``.
    """
    try:
        pieces, chars = [], 0
        for piece in TracebackException(type(error), error, error.__traceback__, compact=True).format():
            if chars > chars_max:
                pieces.append(LEFT_OUT)
                break
            pieces.append(piece)
            chars += len(piece)
        return "".join(pieces)
    except BaseException:  # of the user's class
        return None


def show(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """What ``repr(value)`` returns, as one ``line`` of so many characters; or the type, and why there is none."""
    shown = line(_plain(value, partial(_repr, chars_max=chars_max), "__repr__"))
    if shown.startswith("<its "):
        shown = f"{type_name(value)} {shown}"
    return shown if len(shown) <= chars_max else f"{shown[: chars_max - 3]}..."


def _repr(value: object, chars_max: int) -> str:
    """What ``repr(value)`` returns, or a beginning of it with more than ``chars_max`` characters."""
    pieces, chars = [], 0
    for piece in _pieces_of_repr(value, ()):
        pieces.append(piece)
        chars += len(piece)
        if chars > chars_max:
            break
    return "".join(pieces)


def _pieces_of_repr(value: object, around: tuple[int, ...]) -> Iterator[str]:
    """The values in a container one by one: a peer's event may have many, each with a ``repr`` that takes long."""
    if type(value) not in _BRACKETS or not value:
        yield str.__str__(repr(value))
        return
    first, last = _BRACKETS[type(value)]
    if id(value) in around:
        yield f"{first}...{last}"
        return
    around = (*around, id(value))
    yield first
    separator = ""
    for one in value:  # type: ignore[attr-defined]  # it is one of these containers
        yield separator
        separator = ", "
        yield from _pieces_of_repr(one, around)
        if type(value) is dict:
            yield ": "
            yield from _pieces_of_repr(value[one], around)
    yield ",)" if type(value) is tuple and len(value) == 1 else last


def readable(text: str) -> str:
    """The text with its lone surrogates escaped, and without its middle if it is too long."""
    if len(text) > TEXT_CHARS_MAX:
        text = f"{text[: TEXT_CHARS_MAX // 2]}…{text[-TEXT_CHARS_MAX // 2 :]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def line(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """One line that a terminal can show: control characters and others that are not printable are escaped."""
    if len(text) > chars_max:
        text = f"{text[: chars_max - 1]}…"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def lines(text: str) -> str:
    """Several lines that a terminal can show; see ``line``."""
    return "\n".join(map(line, readable(text).expandtabs().split("\n")))


def as_float(number: Any) -> float:
    """The number as a float: infinite if no float is as large, NaN if it is not a number."""
    try:
        return float(number)
    except OverflowError:
        return inf if number > 0 else -inf
    except Exception:  # of the user's class
        return nan


def as_json(value: Any) -> bytes:
    """The value as compact JSON in ASCII that every reader takes. Never raises; see ``plain``."""
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        if text.isascii():
            return text.encode()
        text.encode()  # raises if there is a lone surrogate, which most readers refuse even if it is escaped
    except Exception:  # something in it is not plain
        value = plain(value)
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any, levels: int = _LEVELS_MAX) -> Any:
    """What JSON can hold: floats that are not finite are texts (``NOT_FINITE``), and so is what is not plain at all.

    Of nested values, the innermost may be texts; numbers of NumPy and the like are numbers.
    """
    if value is None or type(value) is bool:
        return value
    if is_a(value, int):
        return int(value) if int(value).bit_length() <= _DIGITS_BITS else plain(as_float(value))
    if is_a(value, str):
        return readable(str.__str__(value))
    try:
        if is_a(value, float) or hasattr(type(value), "__float__"):
            return value.__index__() if hasattr(type(value), "__index__") else _plain_float(as_float(value))
        if levels and is_a(value, Mapping | tuple | list):
            return _plain_elements(value, levels - 1)
    except Exception:  # of the user's class
        pass
    return show(value)


def _plain_elements(values: Any, levels: int) -> Any:
    if is_a(values, Mapping):
        return {_key(key): plain(one, levels) for key, one in values.items()}
    return [plain(one, levels) for one in values]


def _plain_float(number: float) -> float | str:
    return number if isfinite(number) else "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"


def _key(key: object) -> str:
    return readable(str.__str__(key)) if is_a(key, str) else show(key)


def is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogates."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


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
