# SPDX-License-Identifier: Apache-2.0

"""Values of registered classes come out of an event as they went in, and no other class is ever built (H97)."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import gc
import pickle
import random
import subprocess
import sys
import types
from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import msgpack
import pytest
from pyspark import cloudpickle

from protocol.errors import EventEncodeError, RemoteProtocolError
from protocol.wire import event_classes, events
from protocol.wire.codec import WireLimits, decode_event, decode_event_in_steps, encode_event, run_steps
from protocol.wire.event_classes import event, registered, registration_of
from protocol.wire.extension_types import ExtensionType
from tests.protocol.test_codec import either_msgpack
from tests.protocol.test_event_values import alike, nested

T = TypeVar("T")

__all__ = ["either_msgpack"]  # a fixture, for the tests that name it


@event("tests.rules")
@dataclass(frozen=True)
class Rules:
    version: int
    banned: frozenset[str] = frozenset()
    parent: Rules | None = None


@event
@dataclass(slots=True, kw_only=True)
class Options:
    name: str
    weights: list[float] = field(default_factory=list)
    total: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.total = sum(self.weights)


@event
@dataclass
class Mixed:
    first: int
    last: int = field(kw_only=True)
    middle: int = 2


@event
@dataclass
class Nothing:
    pass


@event
@dataclass
class One:
    value: Any


@event
class Place(NamedTuple):
    x: int
    y: int = 0


Old = namedtuple("Old", "a b")
event("tests.old")(Old)


@event
class Colour(enum.IntEnum):
    RED = 1
    GREEN = 2
    ROT = 1


@event
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_classes, "_by_name", dict(event_classes._by_name))
    monkeypatch.setattr(event_classes, "_modules", {})


VALUES: list[Any] = [
    Rules(1, frozenset({"a", "b"}), Rules(0)),
    Options(name="x", weights=[1.0, 2.0]),
    Mixed(1, last=3),
    Nothing(),
    One((1, {2})),
    Place(1),
    Old(1, [2]),
    Colour.GREEN,
    Access.READ | Access.WRITE,
    Access(0),
]


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_one_of_its_class(value: Any) -> None:  # H97
    for sent in (value, [value], {"a": {"b": value}}, (1, [value] * 40)):
        data = encode_event(sent)
        assert alike(decode_event(data), sent)
        assert alike(run_steps(decode_event_in_steps(data, step_bytes=7)), sent)


def test_a_frozen_value_can_be_a_key_and_a_member() -> None:
    for sent in ({Rules(1): 1, Place(1, 2): 2, Colour.RED: 3}, {Rules(1), Rules(2)}, {frozenset({Place(1)})}):
        assert alike(decode_event(encode_event(sent)), sent)


def test_the_name_and_the_fields_are_what_travels() -> None:
    mark = msgpack.ExtType(ExtensionType.REGISTERED, b"")
    assert msgpack.unpackb(encode_event(Rules(1, frozenset()))) == [
        mark, "tests.rules", 1, [msgpack.ExtType(ExtensionType.FROZENSET, b"")], None
    ]  # fmt: skip
    assert msgpack.unpackb(encode_event(Colour.ROT)) == [mark, f"{__name__}.Colour", "RED"]


def packed(*values: Any) -> bytes:
    return bytes(msgpack.packb([msgpack.ExtType(ExtensionType.REGISTERED, b""), *values]))


def test_what_a_class_refers_to_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def counted(*values: Any) -> list[Any]:
        nonlocal seen
        found = gc.get_referents(*values)
        seen += len(found)
        return found

    monkeypatch.setattr(events, "get_referents", counted)
    encode_event([[[Rules(number)] for number in range(20)]])
    assert 20 <= seen < 1000  # and not the modules, through the class


def test_appended_fields_get_their_defaults() -> None:  # H97
    assert decode_event(packed("tests.rules", 5)) == Rules(5)
    assert decode_event(packed(f"{__name__}.Options", "x")) == Options(name="x")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            ("tests.rules",),
            r"Rules \('tests.rules'\) was sent with 0 fields and has 3 here, and version has no default",
        ),
        (("tests.rules", 1, [], None, 4), "was sent with 4 fields and has 3 here: use the same release"),
        ((f"{__name__}.Mixed", 1), "Mixed was sent with 1 fields and has 3"),
        ((f"{__name__}.Colour", "BLUE"), "Colour has no member .'BLUE'.: use the same release"),
        ((f"{__name__}.Colour", 1), "has no member"),
        ((f"{__name__}.Colour", "__class__"), "has no member"),
        ((f"{__name__}.Colour",), "has no member"),
        ((f"{__name__}.Access", "READ"), "has no member"),
        ((f"{__name__}.Access", 64), "64"),
        (
            (f"{__name__}.Options", "x", 5),
            r"Options' cannot be built from 2 fields: TypeError: .int. object is not iterable",
        ),
        (("builtins.object",), "no class is registered here as the event 'builtins.object': import the module"),
        (("os.system", "true"), "no class is registered here"),
        ((5,), "no class is registered here"),
        ((), "no class is registered here"),
    ],
)
def test_what_fits_no_class_is_a_remote_error_that_says_why(values: tuple[Any, ...], text: str) -> None:  # H62, H97
    with pytest.raises(RemoteProtocolError, match=text):
        decode_event(packed(*values))


def test_a_class_of_a_driver_is_imported_where_its_event_comes(monkeypatch: pytest.MonkeyPatch) -> None:  # H97
    module = types.ModuleType("tests_rules_of_a_driver")
    imported = []

    class Finder:
        def find_spec(self, name: str, path: object, target: object = None) -> Any:
            if name == module.__name__:
                imported.append(name)
                event("elsewhere.rule")(dataclass(type("Rule", (), {"__annotations__": {"n": "int"}})))
                raise ImportError("half of it") if len(imported) == 1 else StopIteration
            return None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(RemoteProtocolError, match=r"registered here as the event .another\.rule"):
        decode_event(packed("another.rule", 1))
    assert imported == []  # what a peer sends chooses no module
    event_classes.learn_modules({"another.rule": module.__name__, "json.rule": "json"})
    with pytest.raises(RemoteProtocolError, match=r"of_a_driver cannot be imported here .*: send the module"):
        decode_event(packed("another.rule", 1))
    with pytest.raises(RemoteProtocolError, match="although its module json is imported"):
        decode_event(packed("json.rule", 1))


class NotRegistered(Rules):
    pass


@dataclass
class Plain:
    n: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Plain(1), r"the event\['a'\] is of type .*\.Plain, which is not registered: write @headgate.event above"),
        (NotRegistered(1), r"NotRegistered, which is not registered \(only its base 'tests.rules' is\)"),
        (One(Plain(1)), r"the event\['a'\]\[0\] is of type .*\.Plain, which is not registered"),
        (One({"x": object()}), r"the event\['a'\]\[0\]\['x'\] is of type builtins.object"),
    ],
    ids=["plain", "subclass", "field", "deep"],
)
def test_a_class_that_is_not_registered_is_named_with_its_place(value: Any, text: str) -> None:  # H97
    with pytest.raises(EventEncodeError, match=text):
        encode_event({"a": value})


def test_a_value_without_one_of_its_fields_is_refused_where_it_is_sent() -> None:
    value = Mixed(1, last=2)
    del value.first
    with pytest.raises(EventEncodeError, match="the event cannot be encoded: AttributeError"):
        encode_event(value)


def test_nesting_and_counts_hold_inside_registered_values() -> None:  # H62, H97
    limits = WireLimits(event_nesting_max=6, event_containers_max=20, event_items_max=100)
    assert decode_event(encode_event(nested(One, 6, 1), limits), limits) == nested(One, 6, 1)
    with pytest.raises(EventEncodeError, match="nests deeper than 6"):
        encode_event(nested(One, 7, 1), limits)
    with pytest.raises(RemoteProtocolError, match="nests deeper than 6"):
        decode_event(encode_event(nested(One, 7, 1)), limits)
    for count in (19, 20):
        sent = [One(0)] * count
        if count == 19:
            assert decode_event(encode_event(sent, limits), limits) == sent
            continue
        with pytest.raises(EventEncodeError, match="more than 20 lists"):
            encode_event(sent, limits)
        with pytest.raises(RemoteProtocolError, match="more than 20 lists"):
            decode_event(encode_event(sent), limits)


def test_an_event_whose_classes_refer_back_is_decoded_by_what_was_sent() -> None:
    @event("tests.node")
    @dataclass(eq=False)
    class Node:
        children: list[Any]

        def __post_init__(self) -> None:
            for child in self.children:
                child.children.append(self)

    mark = msgpack.ExtType(ExtensionType.REGISTERED, b"")
    root = decode_event(packed("tests.node", [[mark, "tests.node", []]]))
    assert root.children[0].children[0] is root


# --- registering --------------------------------------------------------------------------------------------------


def test_two_classes_with_one_name_are_refused_with_both() -> None:  # H97
    with pytest.raises(ValueError, match=r"as the event 'tests.rules': .*\.Rules and .*\.Plain\. Give one of them"):
        event("tests.rules")(Plain)


def test_a_definition_that_is_run_again_replaces_the_first_one() -> None:  # H97
    def define() -> Any:
        @event
        @dataclass
        class Cell:
            n: int

        return Cell

    first, second = define(), define()
    assert type(decode_event(encode_event(first(1)))) is second
    assert registration_of(first) is not registration_of(second)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 characters"):
        event(name)


def _init_var() -> type:
    @dataclass
    class WithInitVar:
        n: InitVar[int]

    return WithInitVar


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (type("Bare", (), {}), r"Bare cannot be an event: @event takes a dataclass.*write @event above @dataclass"),
        (type("Sub", (Rules,), {}), "Sub cannot be an event: @event takes"),
        (tuple, "builtins.tuple cannot be an event"),
        (dataclasses.make_dataclass("NoInit", ["n"], init=False), "NoInit cannot be an event: .*init=False"),
        (_init_var(), "its n is an InitVar"),
        (5, "5 cannot be an event, because it is neither a class nor the name of one: write @headgate.event"),
    ],
    ids=["bare", "subclass", "tuple", "no-init", "init-var", "number"],
)
def test_what_cannot_be_an_event_is_refused_with_the_reason(cls: Any, text: str) -> None:  # H97
    with pytest.raises(TypeError, match=text):
        event(cls)


# --- what arrives is what was sent ----------------------------------------------------------------------------------


class Counting(type):
    def __call__(cls, *args: Any) -> Any:
        return super().__call__(*args)


class Base(NamedTuple):
    x: int
    y: int = 5


def _shapes() -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
    """Every way to make a class: the class, and the arguments of a value; None if it has to be refused."""

    @dataclass
    class OwnInit:
        x: int

        def __init__(self, text: str) -> None:
            self.x = int(text) * 10

    @dataclass
    class OwnNew:
        x: int

        def __new__(cls, x: int) -> Self:
            return super().__new__(cls)

    @dataclass
    class Inherited(OwnInit):
        y: int = 1

    @dataclass
    class InheritedNew(OwnNew):
        y: int = 1

    @dataclass
    class Doubles:
        x: int

        def __post_init__(self) -> None:
            self.x *= 10

    @dataclass(frozen=True, slots=True)
    class DoublesFrozen:
        x: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "x", self.x + 1)

    @dataclass
    class TextInitVar:
        x: int
        y: InitVar[int]

    @dataclass
    class AliasedInitVar:
        x: int
        y: dataclasses.InitVar[int] = 3

    class InitVarious:
        """Its name begins like that of the type."""

    @dataclass
    class LooksLikeInitVar:
        x: InitVarious | int

    @dataclass
    class ClassVariable:
        x: int
        kind: ClassVar[str] = "k"

    @dataclass
    class LostField:
        x: int
        z: int = field(init=False, default=7)

    @dataclass
    class Cached:
        x: int
        cache: dict[str, int] = field(init=False, compare=False, default_factory=dict)

    @dataclass
    class Derived:
        x: int
        twice: int = field(init=False)

        def __post_init__(self) -> None:
            self.twice = 2 * self.x

    @dataclass(order=True, slots=True, kw_only=True, frozen=True)
    class Keywords:
        b: int = 2
        a: int

    @dataclass
    class Factory:
        x: list[int] = field(default_factory=list)

    @dataclass
    class Abstract(abc.ABC):
        x: int

    @dataclass
    class Generically(Generic[T]):
        x: T

    @dataclass
    class WithMeta(metaclass=Counting):
        x: int

    class OwnTuple(Base):
        def __new__(cls, x: int) -> Self:
            return super().__new__(cls, x, 2 * x)

    class PlainTuple(Base):
        __slots__ = ()

        def total(self) -> int:
            return self.x + self.y

    class Colour(enum.Enum):
        RED = (1, 2)
        GREEN = (1, 3)

        def __init__(self, low: int, high: int) -> None:
            self.low = low

    class Rights(enum.IntFlag):
        READ = 1
        WRITE = 2

    @dataclass
    class Wrapped:
        x: int

    plain = Wrapped.__init__

    @functools.wraps(plain)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)

    Wrapped.__init__ = checked  # type: ignore[method-assign]
    return {
        "own init": (OwnInit, None),
        "own new": (OwnNew, None),
        "inherited init, generated here": (Inherited, (1,)),
        "inherited new": (InheritedNew, None),
        "post_init doubles": (Doubles, (1,)),
        "post_init doubles, frozen": (DoublesFrozen, (1,)),
        "InitVar as a text": (TextInitVar, None),
        "dataclasses.InitVar as a text": (AliasedInitVar, None),
        "a type named like InitVar": (LooksLikeInitVar, (1,)),
        "class variable": (ClassVariable, (1,)),
        "init=False without __post_init__": (LostField, None),
        "init=False that does not compare": (Cached, (1,)),
        "init=False that is derived": (Derived, (4,)),
        "keywords": (lambda: Keywords(a=1), ()),
        "factory": (Factory, ([1],)),
        "abstract": (Abstract, (1,)),
        "generic": (Generically, (1,)),
        "metaclass": (WithMeta, None),
        "tuple with its own new": (OwnTuple, None),
        "tuple": (PlainTuple, (1, 2)),
        "enumeration": (lambda: Colour.GREEN, ()),
        "flag": (lambda: Rights.READ | Rights.WRITE, ()),
        "wrapped init": (Wrapped, (1,)),
    }


@pytest.mark.parametrize("shape", _shapes())
def test_a_value_arrives_as_it_was_or_its_class_is_refused(shape: str) -> None:  # H97
    make, args = _shapes()[shape]
    if args is None:
        with pytest.raises(TypeError, match=r"cannot be an event: .*(: | or |, and use )"):
            event(make)
        return
    value = make(*args)
    event(f"{shape} of the table")(type(value))
    arrived = decode_event(encode_event(value))
    assert type(arrived) is type(value)
    assert arrived == value


# --- a class of a main program ------------------------------------------------------------------------------------


def test_the_registration_travels_with_a_class_that_is_pickled_by_value(  # H97
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @event
    @dataclass(frozen=True)
    class Cell:
        n: int

        def twice(self) -> int:
            return 2 * self.n

    class State(enum.Enum):
        ON = "on"

    class Pair(NamedTuple):
        a: int

    for local in (State, Pair):
        event(local)
    sent = encode_event([Cell(3), State.ON, Pair(1)])
    shipped = cloudpickle.dumps((Cell, State, Pair))  # type: ignore[no-untyped-call]
    assert pickle.loads(shipped) == (Cell, State, Pair)  # the same process keeps its classes
    assert {registration_of(cls) for cls in (Cell, State, Pair)} <= set(registered())

    program = (
        "import pickle, sys\n"
        "from protocol.wire.codec import decode_event\n"
        f"classes = pickle.loads({shipped!r})\n"
        f"cell, state, pair = decode_event({sent!r})\n"
        "assert (type(cell), type(state), type(pair)) == classes\n"
        "print(cell.twice(), state.value, pair.a)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "6 on 1\n"), done.stderr


RAISED: list[BaseException] = []


@event
@dataclass(frozen=True)
class Trap:
    """Each place of a user's code that decoding calls raises what is in ``RAISED``."""

    place: str

    def __post_init__(self) -> None:
        self._spring("post_init")

    def __hash__(self) -> int:
        self._spring("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        self._spring("eq")
        return self is other

    def _spring(self, place: str) -> None:
        if self.place == place and RAISED:
            raise RAISED[0]


@pytest.mark.usefixtures("either_msgpack")
@pytest.mark.parametrize("size", [0, 20_000])
@pytest.mark.parametrize("place", ["post_init", "hash", "eq"])
@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("odd"), RuntimeError("no"), ValueError("no")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_class_raises_while_its_event_is_decoded_is_a_remote_error(
    error: BaseException, place: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # H62, H97
    """Alone, in a list, in a set and as a key; in an event of any size."""
    traps = [Trap(place), Trap(place)]
    values: list[Any] = [set(traps), frozenset(traps), dict.fromkeys(traps, 1)]
    if place == "post_init":
        values += [traps[0], traps, {"a": (traps[0],)}]
    for value in values:
        payload = encode_event([value, "x" * size])
        monkeypatch.setattr(f"{__name__}.RAISED", [error])
        with pytest.raises(RemoteProtocolError, match=rf"Trap.*{type(error).__name__}.*Correct"):
            decode_event(payload)
        monkeypatch.setattr(f"{__name__}.RAISED", [])


def test_an_exit_of_a_module_that_is_imported_for_an_event_is_a_remote_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # H97
    (tmp_path / "exits_when_imported.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    event_classes.learn_modules({"exiting.rule": "exits_when_imported"})
    with pytest.raises(RemoteProtocolError, match=r"cannot be imported here \(SystemExit: 3\): send the module"):
        decode_event(packed("exiting.rule", 1))


# --- flags ------------------------------------------------------------------------------------------------------------

LARGE = [1 << bit for bit in range(62)]


def flag_classes() -> list[Any]:
    """One of each kind, with one member for each bit, named b0 to b61."""
    names = {f"b{bit}": value for bit, value in enumerate(LARGE)}
    bases: list[Any] = [enum.Flag, enum.IntFlag]
    return [
        *(base(base.__name__, names, module=__name__) for base in bases),
        *(
            base(f"{base.__name__}{boundary.name}", names, module=__name__, boundary=boundary)
            for base in bases
            for boundary in enum.FlagBoundary
        ),
    ]


def sent_flags(name: str, values: list[int]) -> bytes:
    """The event of a peer that has such flags, whatever the class here has."""
    mark = msgpack.ExtType(ExtensionType.REGISTERED, b"")
    return bytes(msgpack.packb([[mark, name, value] for value in values]))


@pytest.fixture
def registered_flags(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(event_classes, "_by_name", dict(event_classes._by_name))
    return [event(f"tests.flags.{number}")(cls) for number, cls in enumerate(flag_classes())]


@pytest.mark.parametrize("number", range(len(flag_classes())))
def test_combinations_of_flags_that_arrive_are_equal_to_those_here_and_are_not_kept(  # H157
    registered_flags: list[Any], number: int
) -> None:
    cls, seed = registered_flags[number], random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    values = [rng.getrandbits(62) for _ in range(2000)]
    before = len(cls._value2member_map_)
    held_here = [cls(value) for value in values[:100]]
    arrived = decode_event(sent_flags(f"tests.flags.{number}", values))
    assert [member.value for member in arrived] == values
    assert arrived[:100] == held_here
    assert arrived == [cls(value) for value in values], "those that are made later, too"
    assert all(a == b and hash(a) == hash(b) for a, b in zip(decode_event(encode_event(arrived)), arrived, strict=True))
    if issubclass(cls, int):
        fresh = [value ^ 1 for value in values]  # the program has not made these itself
        before = len(cls._value2member_map_)
        decode_event(sent_flags(f"tests.flags.{number}", fresh))
    del arrived, held_here
    gc.collect()
    assert len(cls._value2member_map_) <= before + 100


@pytest.mark.parametrize("value", [-1, -2, 1 << 62, (1 << 62) + 1])
@pytest.mark.parametrize("number", range(len(flag_classes())))
def test_flags_with_bits_that_the_class_does_not_have_arrive_as_they_are_or_not(  # H157
    registered_flags: list[Any], number: int, value: int
) -> None:
    """``CONFORM`` would drop the bits, ``EJECT`` would make an int, and a negative number would become another."""
    cls = registered_flags[number]
    before = len(cls._value2member_map_)
    data = sent_flags(f"tests.flags.{number}", [value])
    if value > 0 and cls._boundary_ is enum.FlagBoundary.KEEP:
        (arrived,) = decode_event(data)
        assert (type(arrived), arrived.value) == (cls, value)
        del arrived
    else:
        with pytest.raises(RemoteProtocolError, match=r"has no member .*: use the same release of it on both sides"):
            decode_event(data)
    assert len(cls._value2member_map_) == before
