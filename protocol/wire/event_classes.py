# SPDX-License-Identifier: Apache-2.0

"""The classes whose values can be events: dataclasses, named tuples and enumerations that ``event`` registers (H97).

A value travels as the registered name of its class and its fields. The receiver builds it by calling the class that
is registered there with this name. So both sides need the class, and nothing on the wire can choose any other.

The registration is an attribute of the class. Where a class is pickled by value (cloudpickle does so for those of
``__main__`` and of a notebook), the registration travels along and registers the class where it arrives. A class that
is pickled by reference is registered when its module is imported.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload
from weakref import WeakValueDictionary

from protocol.arguments import given
from protocol.describing import describe, show
from protocol.errors import HeadgateError

__all__ = ["NoFit", "Registration", "event", "find", "learn_failures", "learn_modules", "registered", "registration_of"]

C = TypeVar("C", bound=type)

NAME_CHARS_MAX = 256
_ATTRIBUTE = "__headgate_event__"

_by_name: dict[str, Registration] = {}
_modules: dict[str, str] = {}
"""Where the driver has classes that are not registered here yet: their names, and the modules that define them."""
_failures: dict[str, str] = {}
"""Why the driver's class of this name did not come here."""


class NoFit(HeadgateError, ValueError):
    """What was sent fits no class here; the message says what to do. Any other error is of the class itself."""


class Registration:
    """A registered class: how its values are taken apart, and put together again.

    ``values(instance)`` returns the values of the fields, and raises ``AttributeError`` if one is missing.
    """

    __slots__ = ("_again", "_fields", "_kind", "_simple", "cls", "name", "qualified", "values")

    def __init__(self, cls: type, name: str, qualified: str) -> None:
        self.cls = cls
        self.name = name
        self.qualified = qualified
        # A class that was pickled by value has none of its attributes yet when its registration arrives.
        self._kind: str | None = None
        self._simple = -1  # how many fields a call with all of them, and nothing else, needs
        self.values: Callable[[Any], Sequence[Any]] = self._first_values

    def __reduce__(self) -> Any:
        return _register_pickled, (self.cls, self.name, self.qualified)

    def _first_values(self, instance: Any) -> Sequence[Any]:
        self._resolve()
        return self.values(instance)

    def build(self, values: list[Any]) -> Any:
        """Return the value with these fields. Raises ``NoFit`` if they do not fit, and what the class raises."""
        if len(values) == self._simple:
            return self.cls(*values)
        if self._kind is None:
            self._resolve()
        if self._kind == "enum":
            return self._member(values)
        fields = self._fields
        if len(values) != len(fields):
            self._check_count(len(values))
        if self._kind == "keywords":
            count = sum(not keyword for _, keyword, _ in fields)
            named = zip((name for name, _, _ in fields[count:]), values[count:], strict=False)
            built = self.cls(*values[:count], **dict(named))
        else:
            built = self.cls(*values)
        if self._again:
            for (name, _, _), value in zip(fields, values, strict=False):
                object.__setattr__(built, name, value)  # also that of a frozen class
        return built

    def _member(self, values: list[Any]) -> Any:
        cls: Any = self.cls
        if len(values) == 1:
            (value,) = values
            if issubclass(cls, enum.Flag):
                if type(value) is int and (member := _flags(cls, value)) is not None:
                    return member
            elif type(value) is str and value in cls.__members__:
                return cls[value]
        raise NoFit(f"{self} has no member {values!r:.60}: use the same release of it on both sides")

    def _check_count(self, count: int) -> None:
        missing = [name for name, _, needed in self._fields[count:] if needed]
        if missing or count > len(self._fields):
            lacks = f", and {' and '.join(missing)} has no default" if missing else ""
            raise NoFit(
                f"{self} was sent with {count} fields and has {len(self._fields)} here{lacks}: use the same release "
                "of it on both sides, or append fields with defaults"
            )

    def _resolve(self) -> None:
        kind, self._fields, self.values = _shape_of(self.cls)
        # `__post_init__` may change what it has changed before, and that is not what was sent.
        self._again = hasattr(self.cls, "__post_init__") and not issubclass(self.cls, tuple)
        self._simple = len(self._fields) if kind == "plain" and not self._again else -1
        self._kind = kind

    def __str__(self) -> str:
        return self.qualified if self.name == self.qualified else f"{self.qualified} ({self.name!r})"


@overload
def event(name: C, /) -> C: ...


@overload
def event(name: str, /) -> Callable[[C], C]: ...


def event(name: Any, /) -> Any:
    """Register a dataclass, a named tuple or an enumeration, so that its values can be sent in events.

    Use it as a decorator, ``@headgate.event`` or ``@headgate.event("name")``, above ``@dataclass``::

        @headgate.event
        @dataclass(frozen=True)
        class RulesChanged:
            version: int
            banned: frozenset[str]

    A value arrives as a value of the same class, built by calling the class with the fields, so ``__post_init__`` runs
    again, and its sent fields are those of the value that was sent. A field with ``init=False`` is not sent, because
    ``__post_init__`` sets it again. A class is refused if its values might not arrive as they are: one that defines
    ``__init__`` or ``__new__``, or whose metaclass defines ``__call__``. Fields can have every type that an event can
    have. Subclasses are not registered with their base.

    The receiver must have registered the class too, which happens when its module is imported. A class that is defined
    in ``__main__`` or in a notebook travels with the operator (``OperatorHandle.subtask``), and replaces an earlier
    definition there. Fields may be appended if they have defaults: a value that was sent without them gets these.

    Args:
        name: the name on the wire and in checkpoints, of 1 to 256 characters; by default the qualified name of the
            class. Give one if the class may move to another module while checkpoints refer to it.

    Raises:
        TypeError: the class is not a dataclass, a named tuple or an enumeration, or a value that is built from its
            fields could differ from the one that was sent.
        ValueError: another class has this name, or the name is empty, only blanks or too long.
    """
    if isinstance(name, str):
        if not 0 < len(name) <= NAME_CHARS_MAX or not str.strip(name):
            raise ValueError(
                f"the name of an event must have 1 to {NAME_CHARS_MAX} characters, not only blanks, not {len(name)} as "
                f"{show(name, 80)}: choose another name, or write @headgate.event without one"
            )
        return lambda cls: _register(cls, name)
    return _register(name, None)


def _register(cls: Any, name: str | None) -> Any:
    if not isinstance(cls, type):
        raise TypeError(
            f"{given('cls', cls, None)} cannot be an event, because it is neither a class nor the name of one: write "
            '@headgate.event or @headgate.event("name") above a dataclass, a named tuple or an enumeration'
        )
    _shape_of(cls)  # raises for a class that cannot be an event
    _refuse_what_would_change(cls)
    qualified = f"{cls.__module__}.{cls.__qualname__}"
    registration = Registration(cls, name or qualified, qualified)
    _add(registration)
    setattr(cls, _ATTRIBUTE, registration)
    return cls


def _register_pickled(cls: type, name: str, qualified: str) -> Registration:
    """Register a class that arrives by value: its registration is unpickled before its other attributes."""
    registration = Registration(cls, name, qualified)
    _add(registration)
    return registration


def _add(registration: Registration) -> None:
    name = registration.name
    other = _by_name.get(name)
    # The same module and name again: a cell of a notebook was run again, or a task brought a newer definition.
    if other is not None and other.qualified != registration.qualified:
        raise ValueError(
            f"two classes are registered as the event {name!r}: {other.qualified} and {registration.qualified}. "
            'Give one of them another name: @headgate.event("name")'
        )
    _by_name[name] = registration


def registration_of(kind: type) -> Registration | None:
    """Return the registration of exactly this class; a base's does not count."""
    registration = getattr(kind, _ATTRIBUTE, None)
    return registration if type(registration) is Registration and registration.cls is kind else None


def find(name: object) -> Registration:
    """Return the class that is registered with the name. Raises ``NoFit`` that says what to import."""
    registration = _by_name.get(name) if isinstance(name, str) else None
    if registration is None:
        registration = _import_for(name)
    return registration


def _import_for(name: object) -> Registration:
    module = _modules.get(name) if isinstance(name, str) else None
    what = f"no class is registered here as the event {name!r:.300}"
    if module is None:
        failure = _failures.get(name) if isinstance(name, str) else None
        if failure is not None:
            raise NoFit(f"{what}, because its class was not sent with it ({failure}): define it in a module")
        raise NoFit(
            f"{what}: import the module that defines it where the event is handled, or define it above the call of "
            "subtask() if it is in a notebook or in the main program"
        )
    try:
        import_module(module)
    except BaseException as error:  # whatever the user's module raises, an exit too
        raise NoFit(
            f"{what}, and its module {module} cannot be imported here ({describe(error)}): send the "
            "module to the executors, for example with addPyFile"
        ) from error
    registration = _by_name.get(str(name))
    if registration is None:
        raise NoFit(f"{what}, although its module {module} is imported: use the same release of it on both sides")
    return registration


def registered() -> list[Registration]:
    """Return all registrations of this process."""
    return list(_by_name.values())


def learn_modules(modules: Mapping[str, str]) -> None:
    """Remember which modules define the classes that the driver has registered, to import one if its event comes.

    Only the driver's own code may give the names: what a peer sends must never choose a module.
    """
    _modules.update(modules)


def learn_failures(failures: Mapping[str, str]) -> None:
    """Remember why classes of the driver did not come here, for the error if an event of theirs does."""
    _failures.update(failures)


# --- flags --------------------------------------------------------------------------------------------------------


def _flags(cls: Any, value: int) -> Any:
    """Return the flags with this value, and keep nothing of it (H157). None if the class would make it another value.

    ``enum`` keeps each combination of flags forever, and a peer can name 2**63 of them. Flags that are ints, as those
    of ``IntFlag``, are equal if their values are, so what was built is taken out again. Others are equal only if they
    are the same object: those live as long as somebody uses them.
    """
    known = cls._value2member_map_
    if cls._member_type_ is object and type(known) is not _FlagsInUse:
        known = cls._value2member_map_ = _FlagsInUse(known)
    count = len(known)
    try:
        member = cls(value) if value >= 0 else None
    except ValueError:  # bits that the class does not have
        return None
    finally:
        while len(known) > count:
            known.popitem()
    return member if isinstance(member, cls) and member.value == value else None


class _FlagsInUse(dict[int, Any]):
    """The members of a class of flags by value, in place of the dict of ``enum``. Combinations are held weakly."""

    def __init__(self, members: dict[int, Any]) -> None:
        super().__init__(members)
        self._combined: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def __missing__(self, value: int) -> Any:
        return self._combined[value]

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or value in self._combined

    def get(self, value: int, default: Any = None) -> Any:
        return self[value] if super().__contains__(value) else self._combined.get(value, default)

    def setdefault(self, value: int, member: Any = None) -> Any:
        if super().__contains__(value):
            return self[value]
        return self._combined.setdefault(value, member)


# --- the kinds of classes -----------------------------------------------------------------------------------------

_Field = tuple[str, bool, bool]  # its name, whether it is given by keyword, whether it has no default
_Shape = tuple[str, tuple[_Field, ...], Callable[[Any], Sequence[Any]]]


def _shape_of(cls: Any) -> _Shape:
    if issubclass(cls, enum.Enum):
        flags = issubclass(cls, enum.Flag)
        return "enum", (), (lambda member: (member.value,)) if flags else (lambda member: (member.name,))
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        if names is not None:
            return "plain", tuple((name, False, name not in cls._field_defaults) for name in names), tuple
    elif "__dataclass_fields__" in cls.__dict__:
        return _shape_of_dataclass(cls)
    raise TypeError(
        f"{cls.__module__}.{cls.__qualname__} cannot be an event: @event takes a dataclass, a named tuple or an "
        "enumeration. Above a dataclass, write @event above @dataclass"
    )


def _shape_of_dataclass(cls: Any) -> _Shape:
    where = f"{cls.__module__}.{cls.__qualname__} cannot be an event"
    if not cls.__dataclass_params__.init:
        raise TypeError(f"{where}: it is a dataclass with init=False, so it cannot be built from its fields")
    for name, field in cls.__dataclass_fields__.items():
        if field._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # the annotation may be a text
            raise TypeError(
                f"{where}: its {name} is an InitVar, which is not kept, so it could not be sent: make it a field, or "
                "build the value in a class method"
            )
    sent = sorted((field for field in dataclasses.fields(cls) if field.init), key=lambda field: bool(field.kw_only))
    missing = dataclasses.MISSING
    fields = tuple(
        (field.name, bool(field.kw_only), field.default is missing and field.default_factory is missing)
        for field in sent
    )
    kind = "keywords" if any(keyword for _, keyword, _ in fields) else "plain"
    if not sent:
        return kind, fields, lambda instance: ()
    get: Callable[[Any], Any] = attrgetter(*(field.name for field in sent))
    return kind, fields, get if len(sent) > 1 else lambda instance: (get(instance),)


def _refuse_what_would_change(cls: Any) -> None:
    """Raise ``TypeError`` if a value that is built from the fields of another one may differ from it.

    Not for a class that arrives by value: it was checked where it was defined.
    """
    if issubclass(cls, enum.Enum):
        return  # found by its name
    where = f"{cls.__module__}.{cls.__qualname__} cannot be an event"
    if type(cls).__call__ is not type.__call__:
        raise TypeError(
            f"{where}: its metaclass {type(cls).__qualname__} defines __call__, so a call with the fields of a value "
            "may give another one: send a dataclass without that metaclass"
        )
    for method in ("__new__", "__init__"):
        owner = _owner_of(cls, method)
        if owner is not None:
            raise TypeError(
                f"{where}: {owner.__qualname__} defines its own {method}, and a call with the fields of a value need "
                f"not give the same value: remove it, and use __post_init__ or a class method that builds the value"
            )
    for field in () if issubclass(cls, tuple) else dataclasses.fields(cls):
        if not field.init and field.compare and not hasattr(cls, "__post_init__"):
            raise TypeError(
                f"{where}: its {field.name} has init=False, so it is not sent, and no __post_init__ sets it again: let "
                "it be sent, set it in __post_init__, or say compare=False if it does not belong to the value"
            )


def _owner_of(cls: Any, method: str) -> type | None:
    """The class that defines the method by hand; None if it is generated, or Python's own."""
    for owner in cls.__mro__:
        found = owner.__dict__.get(method)
        if owner in (object, tuple, Generic) or (owner.__module__ == "typing" and found is not None):
            return None
        if found is not None:
            code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)
            generated = "_fields" in owner.__dict__ or code is None or code.co_qualname.startswith("__create_fn__")
            return None if generated else owner
    return None
