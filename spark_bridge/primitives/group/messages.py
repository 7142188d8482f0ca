# SPDX-License-Identifier: Apache-2.0

"""What the two halves of a group send to each other, as values that msgpack can encode.

The values of a collective are encoded by the members, and opaque bytes to the driver.
"""

from __future__ import annotations

from typing import Any

from protocol.describing import show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from protocol.group import SAVE
from protocol.values import value

HOST_CHARS_MAX = 255
KIND_CHARS_MAX = 4096
"""The name of a collective, which has the shape of an array."""
ERROR_CHARS_MAX = 2000
"""How much of the text of a member's error the others are told."""


@value
class Join:
    """A request: begin the next generation with me. ``host`` and ``port`` are for a store, if I get rank 0."""

    host: str
    port: int

    def as_event(self) -> list[Any]:
        return ["join", self.host, self.port]


@value
class Call:
    """A request: my part of a collective. ``value`` is an encoded event; for a checkpoint it is the step."""

    generation: int
    round: int
    kind: str
    value: bytes | int | None

    def as_event(self) -> list[Any]:
        return ["call", self.generation, self.round, self.kind, self.value]


@value
class Question:
    """A request: I have met an error. Is it my own?"""

    generation: int

    def as_event(self) -> list[Any]:
        return ["question", self.generation]


@value
class Fetch:
    """A request: the next bytes of the checkpoint's blob."""

    step: int
    offset: int

    def as_event(self) -> list[Any]:
        return ["fetch", self.step, self.offset]


@value
class Leave:
    """An event: I have left the generation, with this error of mine or none."""

    generation: int
    error: str

    def as_event(self) -> list[Any]:
        return ["leave", self.generation, self.error]


@value
class GiveUp:
    """An event: I am still inside, but no longer wait for my call."""

    generation: int

    def as_event(self) -> list[Any]:
        return ["give up", self.generation]


@value
class Blob:
    """An event of rank 0: a piece of the blob that it is about to save, of ``size`` bytes in all."""

    generation: int
    offset: int
    size: int
    data: bytes

    def as_event(self) -> list[Any]:
        return ["blob", self.generation, self.offset, self.size, self.data]


@value
class Admitted:
    """The answer to ``Join``. Host and port are those of rank 0. ``step`` is -1 if there is no checkpoint."""

    generation: int
    rank: int
    world_size: int
    host: str
    port: int
    key: bytes
    step: int
    size: int

    def as_event(self) -> list[Any]:
        numbers = [self.generation, self.rank, self.world_size, self.host, self.port]
        return ["admitted", *numbers, self.key, self.step, self.size]


@value
class Values:
    """The answer to ``Call``: the values of all, or that of the root alone; and how many attempts could be let in."""

    values: tuple[Any, ...]
    waiting: int

    def as_event(self) -> list[Any]:
        return ["values", list(self.values), self.waiting]


@value
class Broken:
    """The answer to a call, and an urgent event: the generation is broken."""

    generation: int
    reason: str

    def as_event(self) -> list[Any]:
        return ["broken", self.generation, self.reason]


@value
class Yours:
    """The answer to ``Question``: nobody was lost, so the error is your own."""

    def as_event(self) -> list[Any]:
        return ["yours"]


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
