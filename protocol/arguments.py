# SPDX-License-Identifier: Apache-2.0

"""Refuse a wrong argument where it is given: with its name, what was given, and what is expected (H165).

What has only another form is passed on in the right one: a number of NumPy as one of Python, a ``Path`` as the text of
a path, a tuple in place of a list.

``checked`` is for functions that a user calls, and ``check_fields`` for settings. Both take what is expected from the
annotations. A rule says what a type cannot: ``@checked(burst=AT_LEAST_1)``. Without one,

- a number must be finite; one whose name ends in ``_s`` is a positive number of seconds;
- an integer must be 0 or more, and fit into 64 bits;
- a str must not be empty, unless that is its default, and has no NUL characters and lone surrogates; a ``name`` and an
  ``operator_id`` must be a name;
- the same holds for the elements of a collection, and for the values of a mapping; a text is not a collection, and a
  mapping is one only where that is what is expected;
- an async function is not a function where its result is used, and a class is one only if it makes what is expected.

The check costs some microseconds, so what is called for each event is not decorated.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import EnumMeta
from functools import partial, wraps
from itertools import chain, repeat
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from protocol.describing import a_type, is_encodable, show, with_article
from protocol.secret_names import PEM, SECRET_WORDS, may_have_secret

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

NAME_CHARS_MAX = 256
SHOWN_CHARS_MAX = 100
_HUGE = 2**63
_PATHS = frozenset({"directory", "path", "restore", "savepoint_directory", "url"})
"""Arguments that take a path or a URL as text, and a ``Path`` as well."""
_FOR_PEOPLE = frozenset({"cause", "error", "failure", "reason"})
"""Arguments that take any text, because it is only shown."""
_USUAL = frozenset({int, float, str, bool, bytes, dict, type(None)})
"""Types of most values, which stay as they are."""
_UNIONS = (Union, types.UnionType)
_SECRET = frozenset({"catalog", "config", "conninfo", "options", "password", "status_token", "storage_options"})
"""Arguments that may contain a password: the text of an error has only the type."""
_SEARCHED_CHARS_MAX = 4_096
_MISPLACED_CHARS_MAX = 8
"""Of a text where none is expected, more is not shown: it may be a token or a password in the wrong place."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is expected of a value, in addition to its type. ``expected`` completes "must be", in an error.

    ``accepts`` is only called with a number or a text that has the type; a path is a text. With ``is_type`` it judges
    the type instead, of values whose class is not imported here. ``advice`` ends the error of a value that is refused.
    """

    expected: str
    accepts: Callable[[Any], bool]
    is_type: bool = False
    advice: Callable[[Any], str] | None = None


def _is_label(value: str, chars_max: int = NAME_CHARS_MAX) -> bool:
    return (
        len(value) <= chars_max
        and bool(str.strip(value))
        and not any(one < " " or "\x7f" <= one < "\xa0" or "\ud800" <= one <= "\udfff" for one in value)
    )


def _is_name(value: str) -> bool:
    return "/" not in value and _is_label(value)


def _is_text(value: str) -> bool:
    return "\0" not in value and is_encodable(value)


def _is_path(value: str) -> bool:
    return bool(value) and _is_text(value) and PEM not in value


def between(least: float, most: float, expected: str) -> Rule:
    """A rule for a number from ``least`` to ``most``."""
    return Rule(expected, lambda value: least <= value <= most)


def _is_finite(value: Any) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


ANY = Rule("", lambda value: True)
"""Everything that has the type."""
ANY_NUMBER = Rule("a finite number", _is_finite)
POSITIVE = Rule("a positive number", lambda value: _is_finite(value) and value > 0)
NOT_NEGATIVE = Rule("a number of at least 0", lambda value: _is_finite(value) and value >= 0)
SECONDS = Rule("a positive number of seconds", POSITIVE.accepts)
WAIT = Rule("a number of seconds, at least 0", NOT_NEGATIVE.accepts)
INT64 = between(-_HUGE, _HUGE - 1, "an int of at most 64 bits")
AT_LEAST_0 = between(0, _HUGE - 1, "an int of at least 0")
AT_LEAST_1 = between(1, _HUGE - 1, "an int of at least 1")
SUBTASKS_MAX = 1_000_000
"""Of one operator. A checkpoint looks at all of them in one turn of the event loop, which stays below a second."""
PARALLELISM = between(1, SUBTASKS_MAX, f"an int from 1 to {SUBTASKS_MAX}")
ID = between(-1, _HUGE - 1, "the id of a checkpoint, or -1 for none")
FACTOR = Rule("a number of at least 1", lambda value: _is_finite(value) and value >= 1)
FRACTION = between(0, 1, "a number from 0 to 1")
ACTION = Rule("a function without arguments, such as lambda: rdd.count()", callable, is_type=True)
SCHEMA = Rule(
    "a pyarrow.Schema",
    lambda value: not _is(value, type) and hasattr(value, "names") and hasattr(value, "types"),
    is_type=True,
)
TEXT = Rule("a str without NUL characters and lone surrogates", _is_text)
"""Also an empty one."""
PORT = between(0, 65_535, "a port from 0 to 65535")
LABEL = Rule(
    f"a str of 1 to {NAME_CHARS_MAX} characters, not only blanks, without control characters and lone surrogates",
    _is_label,
)
ACTOR_NAME = Rule(
    f"a str of 1 to {2 * NAME_CHARS_MAX} characters, not only blanks, without control characters and lone surrogates",
    lambda value: _is_label(value, 2 * NAME_CHARS_MAX),
)
"""It may contain the name of an operator."""
NAME = Rule(
    f"a str of 1 to {NAME_CHARS_MAX} characters, not only blanks, without slashes, control characters and lone "
    "surrogates",
    _is_name,
)


# --- types ------------------------------------------------------------------------------------------------------------


def _is(value: Any, kinds: Any) -> bool:
    """Whether a value is an instance, also one whose ``__class__`` raises."""
    try:
        return isinstance(value, kinds)
    except (TypeError, KeyboardInterrupt):  # a Ctrl-C is never the value's
        raise
    except BaseException:  # of the user's class
        return issubclass(type(value), kinds)


def _of_class(hint: Any, value: Any) -> bool:
    if hint is float:
        return _is(value, int | float) and not _is(value, bool)
    if hint is int:
        return _is(value, int) and not _is(value, bool)
    if hint is bytes:
        return _is(value, bytes | bytearray | memoryview)
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        names = [name for name in vars(hint) if not name.startswith("_")]
        return not _is(value, type) and all(hasattr(value, name) for name in names)
    try:
        return _is(value, hint)
    except TypeError:  # not a class: a type variable, or a type that is only for type checkers
        return True


def _has_elements(origin: type, args: tuple[Any, ...], value: Any) -> bool:
    """Whether a collection, and not just an iterator, has elements of the right type."""
    if not _is(value, origin) or _is(value, str | bytes | bytearray | memoryview):  # characters are seldom meant
        return False
    is_mapping = _is(value, collections.abc.Mapping)
    if is_mapping and not issubclass(origin, collections.abc.Mapping):
        return False  # neither are the keys without the values
    if not args or not _is(value, collections.abc.Collection):
        return True
    try:
        if is_mapping and len(args) == 2 and not _have_type(value.values(), args[1]):  # a Counter has no type for them
            return False
        if origin is tuple and args[-1] is not Ellipsis:
            return len(value) == len(args) and all(map(has_type, value, args))
        return _have_type(value, args[0])
    except Exception:  # a collection of the user's that cannot be looked through
        return False


def _have_type(values: Iterable[Any], hint: Any) -> bool:
    """Whether all values have a type. They are not looked at if any type is right: there may be a million."""
    return hint is Any or isinstance(hint, TypeVar) or all(has_type(one, hint) for one in values)


def is_async(value: Any) -> bool:
    """Whether calling a function only makes a coroutine or an async generator."""
    while _is(value, partial):
        value = value.func
    functions = (value, getattr(type(value), "__call__", None))  # noqa: B004 - not whether it can be called
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in functions)


def _is_function(value: Any, signature: tuple[Any, ...]) -> bool:
    """Whether a value can be called with so many arguments, for such a result, as far as that is certain."""
    if not callable(value):
        return False
    if not signature:
        return True
    given, result = signature
    if isinstance(given, list) and not _takes(value, len(given)):
        return False
    if _is(value, type):
        return _makes(value, result)
    if get_origin(result) in (collections.abc.Awaitable, collections.abc.Coroutine):
        return not inspect.isgeneratorfunction(value) and not inspect.isasyncgenfunction(value)
    return not is_async(value)


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature = inspect.signature(function)
    except Exception:  # it has none that Python knows, or the user's code raises
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _makes(kind: type, hint: Any) -> bool:
    """Whether a class makes what has the type of an annotation."""
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return True
    origin = get_origin(hint)
    if origin in _UNIONS:
        return any(_makes(kind, one) for one in get_args(hint))
    try:
        return issubclass(kind, (float, int) if hint is float else origin or hint)
    except TypeError:  # as in _of_class
        return True


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation, as far as that is seen without calling it or using it up."""
    if hint is None or hint is types.NoneType:
        return value is None
    origin = get_origin(hint)
    if origin in _UNIONS:
        return any(has_type(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return _is_function(value, get_args(hint))
    if origin is type:
        return _is(value, type) and _makes(value, get_args(hint)[0])
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return _has_elements(origin, get_args(hint), value)
    return _of_class(hint if origin is None else origin, value)


_PLAIN = {
    "bool": "True or False",
    "int": "an int",
    "float": "a number",
    "bytes": "bytes",
    "PathLike": "a path",
    "type": "a class",
    "Callable": "a function",
    "Sequence": "a list",
    "Collection": "a list",
    "Iterable": "an iterable, neither a text nor a mapping",
}


def _named(hint: Any) -> str:
    """What is expected, from an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        has_words = any(get_origin(one) is Literal for one in args)
        kinds = [one for one in args if one is not types.NoneType and not (has_words and isinstance(one, EnumMeta))]
        return _either(list(dict.fromkeys(map(_named, kinds))))  # the members of the enumeration have these words too
    if origin is Literal:
        return _either(list(map(repr, args)))
    name = getattr(origin or hint, "__name__", str(hint))
    named = _PLAIN.get(name) or with_article(name)
    if named == "a function" and len(args) == 2:
        return _named_function(*args)
    if named == "a class" and args:
        return f"a class derived from {getattr(args[0], '__name__', args[0])}"
    return named


def _either(kinds: list[str]) -> str:
    return f"{', '.join(kinds[:-1]).replace(' or False', ', False')} or {kinds[-1]}" if kinds[1:] else kinds[0]


def _named_function(given: Any, result: Any) -> str:
    takes = ""
    if isinstance(given, list):
        takes = f" of {len(given)} argument{'' if len(given) == 1 else 's'}" if given else " without arguments"
    if get_origin(result) in (collections.abc.Awaitable, collections.abc.Coroutine):
        return f"an async function{takes}"
    names = [
        _named(one) for one in _kinds(result) if isinstance(get_origin(one) or one, type) and one not in (Any, object)
    ]
    names = [one for one in names if one != "a NoneType"]
    return f"a function{takes}, not an async one" + (f", that returns {' or '.join(names)}" if names else "")


# --- the check of one value -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Expected:
    """What is expected of one argument."""

    name: str
    hint: Any
    rule: Rule | None
    each: Rule | None = None
    """For the elements of a collection, and for the values of a mapping."""

    def check(self, value: Any) -> Any:
        """Return the value, as the annotated type if it is only another form of it. Raise if it is something else."""
        value = _as_annotated(value, self.hint, self.name)
        rule = self.rule
        if not has_type(value, self.hint) or (rule is not None and rule.is_type and not rule.accepts(value)):
            raise self._wrong_type(value)
        if rule is not None and not _keeps(value, rule):
            raise ValueError(self._text(value))
        if self.each is not None and not _is(value, str) and _is(value, collections.abc.Collection):
            many = value.values() if _is(value, collections.abc.Mapping) else value
            if not all(_keeps(one, self.each) for one in many):
                raise ValueError(self._text(value))
        return value

    def _wrong_type(self, value: Any) -> TypeError | ValueError:
        """What to raise: for a text that is none of the words to choose from, the type is right."""
        is_choice = _is(value, str) and any(get_origin(kind) is Literal for kind in (self.hint, *get_args(self.hint)))
        return ValueError(self._text(value)) if is_choice else TypeError(self._text(value))

    def _text(self, value: Any) -> str:
        expected = (self.rule.expected if self.rule is not None else "") or _named(self.hint)
        if self.each is not None:
            expected = (
                f"{expected} whose {'values' if 'Mapping' in expected else 'elements'} are each {self.each.expected}"
            )
        if self.rule in (AT_LEAST_0, AT_LEAST_1, ID) and _is(value, int) and value >= _HUGE:
            expected += ", and less than 2**63"
        elif self.rule in (POSITIVE, NOT_NEGATIVE, SECONDS, WAIT, FACTOR) and _is(value, int | float) and value > 0:
            expected += ", and finite"  # what else can be wrong with a positive one
        hint = None if self.rule is not None and self.rule.is_type else self.hint
        advice = self.rule.advice(value) if self.rule is not None and self.rule.advice is not None else ""
        return f"{self.name} must be {expected}, not {given(self.name, value, hint)}{advice and ': '}{advice}"


def _is_secret(name: str) -> bool:
    return name in _SECRET or (any(word in name.lower() for word in SECRET_WORDS) and not name.endswith("_file"))


def given(name: str, value: Any, hint: Any = str) -> str:
    """A value for a message; only its type if it may be, or contain, a secret (H76). ``hint``: what is expected.

    Arguments are often given in the wrong order, so a secret may be in any of them.
    """
    shown = show(value, _SEARCHED_CHARS_MAX)
    if _is_secret(name) or (name in _PATHS and not {"@", "?"}.isdisjoint(shown)):
        return a_type(value)
    if may_have_secret(shown):
        return f"{a_type(value)} that may contain a secret"
    for kind, unit in ((str, "characters"), (bytes, "bytes"), (bytearray, "bytes")):
        if _is(value, kind) and kind.__len__(value) > _MISPLACED_CHARS_MAX and not _takes_text(value, hint):
            return f"{a_type(value)} of {kind.__len__(value)} {unit}"
    return show(value, SHOWN_CHARS_MAX)


def _takes_text(value: Any, hint: Any) -> bool:
    kinds = _kinds(hint)
    return Any in kinds or (_is(value, str) and (str in kinds or any(get_origin(kind) is Literal for kind in kinds)))


def _as_annotated(value: Any, hint: Any, name: str) -> object:
    """A number of NumPy as one of Python, a path as text, a tuple as a list, and the like."""
    if value is None or type(value) in _USUAL:
        return value
    wanted = {get_origin(kind) or kind for kind in _kinds(hint)}
    if str in wanted and _is(value, str):
        return str.__str__(cast("str", value))
    if _is(value, Real):
        return _as_number(value, wanted)
    if name in _PATHS and str in wanted and _is_path_object(value):
        return value.__fspath__()
    return _as_builtin(value, wanted)


def _as_builtin(value: Any, wanted: set[Any]) -> object:
    if bytes in wanted and _is(value, bytearray | memoryview):
        return bytes(value)
    if list in wanted and tuple not in wanted and _is(value, tuple):
        return list(value)
    if dict in wanted and _is(value, collections.abc.Mapping) and not _is(value, dict):
        return dict(value)
    return value


def _as_number(value: Any, wanted: set[Any]) -> object:
    if issubclass(type(value), int | float):
        return value
    if _is(value, Integral) and not wanted.isdisjoint((int, float)):
        return int(value)
    return float(value) if float in wanted else value


def _is_path_object(value: Any) -> bool:
    return hasattr(value, "__fspath__") and not _is(value, type)


def _keeps(value: Any, rule: Rule) -> bool:
    """Whether a value keeps a rule. Rules are for numbers, texts and paths."""
    if _is_path_object(value):
        value = value.__fspath__()
    return not _is(value, int | float | str) or _is(value, bool) or rule.accepts(value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in _UNIONS else (hint,)


def _rule_for_each(name: str, hint: Any) -> Rule | None:
    for kind in _kinds(hint):
        origin, args = get_origin(kind), get_args(kind)
        if args and isinstance(origin, type) and issubclass(origin, collections.abc.Collection):
            rule = _rule_for(name, args[-1] if issubclass(origin, collections.abc.Mapping) else args[0], None)
            if rule is not None:
                return WAIT if rule is SECONDS else rule
    return None


def _rule_for(name: str, hint: Any, default: object) -> Rule | None:
    kinds = _kinds(hint)
    if float in kinds:
        return SECONDS if name.endswith("_s") else ANY_NUMBER
    if int in kinds:
        return AT_LEAST_0
    return _rule_for_text(name, hint, default) if str in kinds else None


def _rule_for_text(name: str, hint: Any, default: object) -> Rule | None:
    if name in ("name", "part", "operator_id"):
        return NAME if name == "operator_id" else LABEL
    if any(hasattr(get_origin(kind), "__fspath__") for kind in _kinds(hint)):
        return Rule(f"{_named(hint)} of a file, not what is in the file", _is_path)
    if name in _FOR_PEOPLE:
        return None if default == "" else Rule(f"{_named(hint)} that is not empty", bool)
    if default == "":
        return TEXT
    expected = f"{_named(hint)} that is not empty, without NUL characters and lone surrogates"
    return Rule(expected, lambda value: bool(value) and _is_text(value))


def _hints_of(annotations: Mapping[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """The annotations, as far as they can be evaluated: a name that only type checkers import means any type."""
    hints = {}
    for name, annotation in annotations.items():

        def alone() -> None:
            """Has one annotation, so that another one that cannot be evaluated does not matter."""

        alone.__annotations__ = {name: annotation}
        with suppress(NameError):
            hints.update(get_type_hints(alone, namespace))
    return hints


def _expectations(
    annotations: Mapping[str, Any], namespace: dict[str, Any], defaults: Mapping[str, Any], rules: Mapping[str, Rule]
) -> dict[str, _Expected]:
    hints = _hints_of(annotations, namespace)
    found = {}
    for name in annotations:
        hint = hints.get(name, Any)
        rule = rules[name] if name in rules else _rule_for(name, hint, defaults.get(name))
        if hint is not Any or rule is not None:
            found[name] = _Expected(name, hint, rule, _rule_for_each(name, hint))
    return found


REAL = frozenset({float, int})
WAIT_MAX_S = 1e300


def check_wait(name: str, value: Any) -> None:
    """Check a number of seconds, 0 or more, in a function that is too busy for ``checked``. It looks itself first.

    Raises ``TypeError`` or ``ValueError``.
    """
    _Expected(name, float, WAIT).check(value)


# --- functions and settings -------------------------------------------------------------------------------------------


def checked(**rules: Rule) -> Callable[[F], F]:
    """Check the arguments of a function, each time it is called and before anything else happens.

    Arguments in ``**kwargs``, and those whose annotation is ``Any``, are not checked. Raises ``TypeError`` or
    ``ValueError``; an async function raises when it is called, not when it is awaited.
    """

    def decorate(function: F) -> F:
        inner: Any = function
        while hasattr(inner, "__wrapped__"):  # a context manager's
            inner = inner.__wrapped__
        code = inner.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        positional = names[: code.co_argcount]
        given_defaults = dict(zip(reversed(positional), reversed(inner.__defaults__ or ()), strict=False))
        defaults = given_defaults | (inner.__kwdefaults__ or {})
        takes_any = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        more = code.co_varnames[len(names)] if code.co_flags & inspect.CO_VARARGS else ""
        unknown = set(rules) - set(names)
        if unknown:
            raise TypeError(f"{function.__qualname__} has no parameter {', '.join(sorted(unknown))}")
        expected: dict[str, _Expected] = {}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not expected:  # at the first call: then everything is imported
                annotations = {name: one for name, one in inner.__annotations__.items() if name in (*names, more)}
                expected.update(_expectations(annotations, inner.__globals__, defaults, rules))
            for place, (name, value) in enumerate(zip(chain(positional, repeat(more)), args, strict=False)):
                if name in expected and value is not defaults.get(name, call):
                    plain = expected[name].check(value)
                    args = args if plain is value else (*args[:place], plain, *args[place + 1 :])
            for name, value in kwargs.items():
                if name in expected:
                    if value is not defaults.get(name, call):
                        kwargs[name] = expected[name].check(value)
                elif name not in names and not takes_any:
                    *owners, called = function.__qualname__.split(".")
                    called = owners[-1] if called == "__init__" else called
                    raise _unknown(called, name, value, [one for one in names if one not in ("self", "cls")])
            return function(*args, **kwargs)

        return cast("F", call)

    return decorate


def checked_names(kind: type[T]) -> type[T]:
    """Refuse an argument that a class of settings does not have, as ``checked`` does for functions.

    ``check_fields`` checks the others. Raises ``TypeError``.
    """
    make: Any = kind.__init__
    names = [name for name, one in getattr(kind, "__dataclass_fields__").items() if one.init]  # noqa: B009 - for mypy

    @wraps(make)
    def call(*args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in names:
                raise _unknown(kind.__name__, name, value, names)
        make(*args, **kwargs)

    kind.__init__ = call  # type: ignore[method-assign]
    return kind


def _unknown(called: str, name: str, value: Any, known: Sequence[str]) -> TypeError:
    near = get_close_matches(name, known, n=1)
    return TypeError(
        f"{called}() has no argument {name!r}, but was given {name}={given(name, value, None)}: it has "
        f"{', '.join(known)}{f'. Did you mean {near[0]}?' if near else ''}"
    )


def moved(**places: str) -> Callable[[F], F]:
    """Refuse arguments that a function, or a class, had in earlier releases, with an error that names the new places.

    ``places`` are as one writes them, for example ``gateway=GatewayLimits(events_max=...)``. Decorate outside of
    ``checked``, which otherwise refuses such an argument as an unknown one. Raises ``TypeError``.
    """

    def decorate(subject: F) -> F:
        kind: Any = subject
        function: Any = kind.__init__ if isinstance(subject, type) else subject

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            _check_not_moved(subject.__name__, kwargs, places)
            return function(*args, **kwargs)

        if kind is function:
            return cast("F", call)
        kind.__init__ = call
        return subject

    return decorate


def _check_not_moved(called: str, given: Collection[str], places: Mapping[str, str]) -> None:
    if gone := [name for name in given if name in places]:
        raise TypeError(
            f"{called}() takes {', '.join(gone)} in another place: "
            + "; ".join(f"{name} is {places[name]}" for name in gone)
        )


def check_attributes(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Check the attributes that a class annotates in its body, each time one of them is set.

    Raises ``TypeError`` or ``ValueError``.
    """

    def decorate(kind: type[T]) -> type[T]:
        names: dict[str, Any] = kind.__annotations__
        expected: dict[str, _Expected] = {}
        inherited = kind.__setattr__

        def set_checked(self: T, name: str, value: Any) -> None:
            if name in names:
                if not expected:  # as in checked
                    expected.update(_expectations(names, _globals_of(kind), {}, rules))
                value = expected[name].check(value)
            inherited(self, name, value)

        kind.__setattr__ = set_checked  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def check_settings(subject: object, owner: type, **rules: Rule) -> None:
    """Check the attributes that ``owner`` annotates and sets, in a subclass or an instance. A property is not checked.

    Raises ``TypeError`` or ``ValueError``.
    """
    annotations = {name: one for name, one in owner.__annotations__.items() if name in vars(owner)}
    kind = subject if isinstance(subject, type) else type(subject)
    for name, one in _expectations(annotations, _globals_of(owner), vars(owner), rules).items():
        value = inspect.getattr_static(subject, name)
        if not hasattr(type(value), "__get__"):
            replace(one, name=f"{kind.__name__}.{name}").check(value)


def _globals_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in vars(kind).values() if inspect.isfunction(one)).__globals__
    return found


_FIELDS: dict[type, dict[str, _Expected]] = {}


def check_fields(settings: Any, **rules: Rule) -> None:
    """Check the fields of a dataclass, in its ``__post_init__``. Raises ``TypeError`` or ``ValueError``."""
    kind = type(settings)
    expected = _FIELDS.get(kind)
    if expected is None:
        fields = kind.__dataclass_fields__
        annotations = {name: one.type for name, one in fields.items() if one.init}
        defaults = {name: one.default for name, one in fields.items()}
        expected = _FIELDS[kind] = _expectations(annotations, kind.__post_init__.__globals__, defaults, rules)
    for name, one in expected.items():
        value = getattr(settings, name)
        plain = one.check(value)
        if plain is not value:
            object.__setattr__(settings, name, plain)
