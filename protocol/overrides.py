# SPDX-License-Identifier: Apache-2.0

"""Finds mistakes in the methods that a user's class overrides, by inspecting the class.

Such a mistake would show only when the method is called, or never: a plain function where an ``async def`` is awaited,
an ``async def`` where a plain function is called, a misspelt name. Nothing is called here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from types import CodeType, FunctionType

from protocol.describing import type_name
from protocol.values import value

_OUR_PACKAGES = ("protocol", "actors", "spark_bridge")
_GENERATOR_COROUTINE = inspect.CO_ITERABLE_COROUTINE  # decorated with types.coroutine
_LIKELY = 0.8
_UNMISTAKABLE = 0.9
_SHORT_NAME = 8  # many shorter names differ by only one letter


@value
class NeverCalled:
    """A public method that is never called, and the one that was probably meant.

    ``certain``: the class lacks a method that it must have, or one that has this name elsewhere; or this one takes the
    same arguments in the same way, and its long name is almost the same.
    """

    method: str
    meant: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.method}() is never called: did you mean {self.meant}()? Give your own method another name"


def errors_in_overrides(subject: object) -> list[str]:
    """Find mistakes in the methods of ours that ``subject``, a class or an instance of it, overrides.

    Each text names the class and the method, says what is wrong, and what to write. A plain function may replace an
    ``async def`` if its annotation says that it returns an ``Awaitable`` or a ``Coroutine``.
    """
    found = []
    for name, base in _interface(_class_of(subject)).items():
        where, member = _definition(subject, name)
        if isinstance(where, type) and _is_ours(where):
            continue
        functions = list(_functions(member))
        if functions:
            without_self = isinstance(member, staticmethod) or (member is functions[0] and not isinstance(where, type))
            problem = _problem(name, base, functions) or _cannot_take(name, base, functions[0], without_self)
        else:
            problem = _not_a_method(member)
        if problem:
            found.append(f"{_class_of(subject).__qualname__}.{name}() {problem}")
    return found


def names_never_called(
    subject: object, interface: type, mistaken: Mapping[str, str] | None = None
) -> list[NeverCalled]:
    """The user's public methods that look like misspelt methods of ``interface``.

    This excludes methods that the class itself uses, and methods that resemble one which is also overridden.
    ``mistaken``: wrong names that are not similar to the right ones, with the right one for each. They are certain.
    """
    subject_class = _class_of(subject)
    theirs = [one for one in subject_class.__mro__ if not _is_ours(one)]
    overridden = set[str]().union(*map(vars, theirs))
    hooks = {name: base for name, base in _interface(interface).items() if name not in overridden}
    called = _interface(subject_class).keys() | {name for one in theirs for name in _mentioned(one)}
    found = []
    for one in theirs:
        if not issubclass(one, interface):
            continue  # the code of an unrelated base class calls its own methods
        for name, member in _public_methods(one).items():
            method, meant = f"{one.__qualname__}.{name}", (mistaken or {}).get(name, "")
            if name in called:
                continue
            if meant in hooks:
                found.append(NeverCalled(method, meant, certain=True))
            elif misspelt := _misspelt(method, name, member, hooks):
                found.append(misspelt)
    return found


def mentions(subject_class: type, name: str) -> bool:
    """Whether the code of a class uses this name, or that of a base, unless it is overridden and not called."""
    calls_a_base = {"super", *(one.__name__ for one in subject_class.__mro__)}
    overridden = set[str]()
    for one in subject_class.__mro__:
        for attribute, member in vars(one).items():
            if attribute in overridden:
                continue
            names = set(_names_in(member))
            if name in names:
                return True
            if not names & calls_a_base:
                overridden.add(attribute)
    return False


def _misspelt(method: str, name: str, member: FunctionType, hooks: dict[str, FunctionType]) -> NeverCalled | None:
    """The hook that a method was probably meant to be: the one with the most similar name, if it is similar enough."""
    ratio, hook = max(((SequenceMatcher(None, name, hook).ratio(), hook) for hook in hooks), default=(0.0, ""))
    if ratio < _LIKELY or not _takes_the_same(member, hooks[hook]):
        return None
    is_required = "NotImplementedError" in hooks[hook].__code__.co_names  # nothing can work without it
    certain = is_required or (
        len(hook) > _SHORT_NAME and ratio >= _UNMISTAKABLE and not _problem(hook, hooks[hook], [member])
    )
    return NeverCalled(method, hook, certain)


# --- classes and their methods ------------------------------------------------------------------------------------


def _class_of(subject: object) -> type:
    return subject if isinstance(subject, type) else type(subject)


def _is_ours(one: type) -> bool:
    return one.__module__.partition(".")[0] in _OUR_PACKAGES


def _interface(subject_class: type) -> dict[str, FunctionType]:
    """The public methods that our classes among its bases define; the most derived definition of each."""
    ours = filter(_is_ours, reversed(subject_class.__mro__))
    return {name: member for one in ours for name, member in _public_methods(one).items()}


def _public_methods(one: type) -> dict[str, FunctionType]:
    """Those that this class itself defines."""
    return {
        name: member
        for name, member in vars(one).items()
        if isinstance(member, FunctionType) and not name.startswith("_")
    }


def _definition(subject: object, name: str) -> tuple[object, object]:
    """Where a name is defined, and as what. The instance itself comes first."""
    if not isinstance(subject, type) and name in getattr(subject, "__dict__", ()):
        return subject, subject.__dict__[name]
    where = next(one for one in _class_of(subject).__mro__ if name in vars(one))
    return where, vars(where)[name]


def _functions(member: object) -> Iterator[FunctionType]:
    """The function and those that it wraps. Nothing for another callable, whose kind cannot be seen."""
    inner = getattr(member, "__func__", member)  # of a bound method, a staticmethod or a classmethod
    while isinstance(inner, FunctionType):
        yield inner
        inner = getattr(inner, "__wrapped__", None)


def _not_a_method(member: object) -> str:
    if callable(member) or hasattr(member, "__get__"):
        return ""
    return f"is {type_name(member)}, not a method: remove it, or define the method"


def _takes_the_same(member: FunctionType, base: FunctionType, without_self: bool = False) -> bool:
    """Whether ``member``, not what it wraps, can be called as ``base`` is, with all arguments or the required ones."""
    takes = inspect.signature(member, follow_wrapped=False)
    called_with = [*inspect.signature(base).parameters.values()][without_self:]
    for given in (called_with, [one for one in called_with if one.default is inspect.Parameter.empty]):
        named = {one.name: None for one in given if one.kind is inspect.Parameter.KEYWORD_ONLY}
        try:
            takes.bind(*[None] * (len(given) - len(named)), **named)
        except TypeError:
            continue
        return True
    return False


def _cannot_take(name: str, base: FunctionType, member: FunctionType, without_self: bool) -> str:
    """Why a method cannot be called with the arguments that the framework passes."""
    if _takes_the_same(member, base, without_self):
        return ""
    wanted = ", ".join([*inspect.signature(base).parameters][without_self:])
    define = "async def" if inspect.iscoroutinefunction(base) else "def"
    return f"is called with other arguments than it takes: write `{define} {name}({wanted})`"


def _mentioned(one: type) -> Iterator[str]:
    """Every name that the code of this class uses."""
    for member in vars(one).values():
        yield from _names_in(member)


def _names_in(member: object) -> Iterator[str]:
    parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
    codes = [function.__code__ for part in parts for function in _functions(part)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


# --- kinds of functions -------------------------------------------------------------------------------------------


def _problem(name: str, base: FunctionType, functions: list[FunctionType]) -> str:
    """Why a method made of ``functions``, each of which wraps the next, cannot replace ``base``."""
    must_be_async = inspect.iscoroutinefunction(base)
    if any(map(inspect.isasyncgenfunction, functions)):
        return (
            f"has a `yield`, so it cannot be awaited: write `async def {name}` without `yield`"
            if must_be_async
            else f"is an async generator, but it is called without `await`: write `def {name}`"
        )
    if must_be_async:
        if any(inspect.iscoroutinefunction(one) or one.__code__.co_flags & _GENERATOR_COROUTINE for one in functions):
            return ""
        if any(_returns(one, "Awaitable", "Coroutine", "Future") for one in functions):
            return ""
        return f"is a plain function, but it is awaited: write `async def {name}`"
    if any(map(inspect.iscoroutinefunction, functions)):
        return f"is `async def`, but it is called without `await`: write `def {name}`"
    if inspect.isgeneratorfunction(functions[-1]) and not _returns(base, "Iterable", "Iterator"):
        return "has a `yield`, so calling it runs nothing: remove the `yield`"
    return ""


def _returns(function: Callable[..., object], *names: str) -> bool:
    annotation = str(getattr(function, "__annotations__", {}).get("return", ""))
    return any(name in annotation for name in names)
