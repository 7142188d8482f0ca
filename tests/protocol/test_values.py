# SPDX-License-Identifier: Apache-2.0

"""What ``@value`` makes of a class: what ``dataclass`` would, but for less time."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, fields, replace

import pytest

from protocol.values import value
from tests.exploration.freezing import is_value


@value
class Point:
    """Two fields, one with a default."""

    x: int
    y: int = 0


@value
class Marked:
    """Fields that are not shown, or not compared."""

    name: str
    secret: bytes = field(default=b"", repr=False)
    looked_at: int = field(default=0, compare=False)


@value
class Nothing:
    """No fields."""


@value
class Space(Point):
    """A field more than its base has."""

    z: int = 0


def test_values_are_equal_if_class_and_fields_are() -> None:
    assert Point(1, 2) == Point(1, 2)
    assert Point(1, 2) != Point(2, 1)
    assert Point(1, 2) != Space(1, 2)
    assert Space(1, 2, 3) != Space(1, 2, 4)
    assert Nothing() == Nothing()
    assert Marked("a", b"1") != Marked("a", b"2")
    assert Marked("a", looked_at=1) == Marked("a", looked_at=2)


def test_equal_values_are_one_key() -> None:
    assert (
        len({Point(1, 2), Point(1, 2), Point(2, 1), Nothing(), Nothing(), Marked("a"), Marked("a", looked_at=1)}) == 4
    )


def test_a_value_shows_its_fields_as_a_dataclass_does() -> None:
    @dataclass
    class Plain:
        x: int
        y: int

    prefix = "test_a_value_shows_its_fields_as_a_dataclass_does.<locals>."
    assert repr(Plain(1, 2)) == f"{prefix}Plain(x=1, y=2)"
    assert repr(Space(1, 2)) == "Space(x=1, y=2, z=0)"
    assert repr(Nothing()) == "Nothing()"
    assert repr(Marked("a", b"secret")) == "Marked(name='a', looked_at=0)"


def test_a_value_is_a_dataclass_with_slots_for_all_other_purposes() -> None:
    assert [one.name for one in fields(Space)] == ["x", "y", "z"]
    assert (
        replace(Point(1, 2), y=3)
        == Point(1, 3)
        == copy.deepcopy(Point(1, 3))
        == pickle.loads(pickle.dumps(Point(1, 3)))
    )
    assert not hasattr(Point(1), "__dict__")
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_values_and_frozen_dataclasses_never_change() -> None:
    @dataclass(frozen=True)
    class Frozen:
        x: int

    @dataclass
    class Mutable:
        x: int

    assert is_value(Point)
    assert is_value(Frozen)
    assert not is_value(Mutable)
    assert not is_value(int)


@pytest.mark.parametrize("other", [(1, 2), None, "Point(x=1, y=2)"])
def test_a_value_leaves_the_comparison_with_other_kinds_to_them(other: object) -> None:
    assert Point(1, 2).__eq__(other) is NotImplemented
