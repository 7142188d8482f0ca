# SPDX-License-Identifier: Apache-2.0

"""What the two halves of a group send to each other, as values that msgpack can encode.

The values of a collective are encoded by the members, and opaque bytes to the driver.
"""

from __future__ import annotations

from typing import Any, ClassVar

from protocol.describing import show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from protocol.group import SAVE
from protocol.values import value

HOST_CHARS_MAX = 255
KIND_CHARS_MAX = 4096
"""The name of a collective, which has the shape of an array."""
ERROR_CHARS_MAX = 2000
"""How much of the text of a member's error the others are told."""


class _Message:
    """What is sent as a list of its tag and its fields."""

    __slots__: tuple[str, ...] = ()
    TAG: ClassVar[str]

    def as_event(self) -> list[Any]:
        return [self.TAG, *(getattr(self, name) for name in self.__slots__)]


@value
class Join(_Message):
    """A request: begin the next generation with me. ``host`` and ``port`` are for a store, if I get rank 0."""

    TAG = "join"
    host: str
    port: int


@value
class Call(_Message):
    """A request: my part of a collective. ``value`` is an encoded event; for a checkpoint it is the step."""

    TAG = "call"
    generation: int
    round: int
    kind: str
    value: bytes | int | None


@value
class Question(_Message):
    """A request: I have met an error. Is it my own?"""

    TAG = "question"
    generation: int


@value
class Fetch(_Message):
    """A request: the next bytes of the checkpoint's blob."""

    TAG = "fetch"
    step: int
    offset: int


@value
class Leave(_Message):
    """An event: I have left the generation, with this error of mine or none."""

    TAG = "leave"
    generation: int
    error: str


@value
class GiveUp(_Message):
    """An event: I am still inside, but no longer wait for my call."""

    TAG = "give up"
    generation: int


@value
class Blob(_Message):
    """An event of rank 0: a piece of the blob that it is about to save, of ``size`` bytes in all."""

    TAG = "blob"
    generation: int
    offset: int
    size: int
    data: bytes


@value
class Admitted(_Message):
    """The answer to ``Join``. Host and port are those of rank 0. ``step`` is -1 if there is no checkpoint."""

    TAG = "admitted"
    generation: int
    rank: int
    world_size: int
    host: str
    port: int
    key: bytes
    step: int
    size: int


@value
class Values(_Message):
    """The answer to ``Call``: the values of all, or that of the root alone; and how many attempts could be let in."""

    TAG = "values"
    values: tuple[Any, ...]
    waiting: int

    def as_event(self) -> list[Any]:
        return [self.TAG, list(self.values), self.waiting]


@value
class Broken(_Message):
    """The answer to a call, and an urgent event: the generation is broken."""

    TAG = "broken"
    generation: int
    reason: str


@value
class Yours(_Message):
    """The answer to ``Question``: nobody was lost, so the error is your own."""

    TAG = "yours"


def parse_request(event: Any) -> Join | Call | Question | Fetch:
    """Raises ``RemoteProtocolError`` for anything else, and for texts that are too long to be kept (H157)."""
    match event:
        case [str("join"), str(host), int(port)] if len(host) <= HOST_CHARS_MAX and 0 <= port < 2**16:
            return Join(host, port)
        case [str("call"), int(generation), int(round_), str(kind), int(value_)] if kind == SAVE:
            return Call(generation, round_, kind, value_)
        case [str("call"), int(generation), int(round_), str(kind), (bytes() | None) as value_] if (
            kind != SAVE and len(kind) <= KIND_CHARS_MAX
        ):
            return Call(generation, round_, kind, value_)
        case [str("question"), int(generation)]:
            return Question(generation)
        case [str("fetch"), int(step), int(offset)]:
            return Fetch(step, offset)
        case _:
            raise RemoteProtocolError(f"not a request of a group: {show(event, 80)}; {SAME_RELEASE}")


def parse_event(event: Any) -> Leave | GiveUp | Blob:
    """Raises ``RemoteProtocolError`` for anything else."""
    match event:
        case [str("leave"), int(generation), str(error)]:
            return Leave(generation, error[:ERROR_CHARS_MAX])
        case [str("give up"), int(generation)]:
            return GiveUp(generation)
        case [str("blob"), int(generation), int(offset), int(size), bytes(data)]:
            return Blob(generation, offset, size, data)
        case _:
            raise RemoteProtocolError(f"not an event of a group: {show(event, 80)}; {SAME_RELEASE}")


def parse_answer(event: Any) -> Admitted | Values | Broken | Yours:
    """Raises ``ValueError`` for anything else."""
    match event:
        case ["admitted", int(), int(), int(), str(), int(), bytes(), int(), int()]:
            return Admitted(*event[1:])
        case ["values", list(values), int(waiting)]:
            return Values(tuple(values), waiting)
        case ["yours"]:
            return Yours()
        case _:
            return parse_broken(event)


def parse_broken(event: Any) -> Broken:
    """Raises ``ValueError`` for anything else."""
    match event:
        case ["broken", int(generation), str(reason)]:
            return Broken(generation, reason)
        case _:
            raise ValueError(f"not an answer of a group: {show(event, 80)}")
