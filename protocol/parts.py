# SPDX-License-Identifier: Apache-2.0

"""The parts of an operator: their names and order, what each of them has sent, and the state of all as one value.

Theory of operation
-------------------
An operator has several parts in each task: the user's own, the counters that always exist, ready-made ones, and the
stages of a chain (H80). They share one connection, one ordered stream in each direction, and one cut. Everything else
is each part's own: its events and requests, their positions, its window, its state (H150).

*The table* has the parts in a fixed order. On the wire, a part is its index there. Index 0 is the user's own part,
whose name is empty; an operator that consists of stages has nothing there. The driver makes the table, and each task
gets it in ``Registered``.

*Positions* (H32, H150). The events and requests of a part are counted along the history of one subtask. A ``Positions``
has one count for each part, in the order of the table, and ends with the last count that is not 0. So it says the same
in an operator that gets another part. It depends on what the part sent and on nothing else.

*Outside of checkpoints* (H152). What some parts exchange are facts about a living attempt, such as a permit. Their
messages pass both valves, are neither held nor recorded, count in no position of a checkpoint, and end with their
attempt. So a task may wait for one while a checkpoint waits for the task. In all other respects they are like others:
in order, each once, and bounded by the window of their part.

*In a checkpoint* a part has its name, because the table of the operator that restores it may be another one. What was
held for a part that is not there any more is dropped if the part has no state (H154); otherwise the restore is refused.

*The state* of the parts, of their coordinators as of their operators, is one value of bytes. If no named part has a
state, it is the state of the user's own part itself. Otherwise it is ``MAGIC``, and then each part's name and state
with their lengths; the user's own part comes first. A state of it that itself begins with ``MAGIC`` is always written
that way, so no state has two meanings. A ready-made part without a state has no entry. A stage always has one: to the
user's code, an empty state that is restored is something else than none.

*A state in files* (H190). A task has one state in files, so one part at most has them, and the state of all says which:
the entry ``FILES_OF`` is the part's name. Without that entry they are the user's own part's. The bytes that belong to
the files are that part's state.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter
from struct import Struct
from struct import error as StructError

from protocol.errors import LocalProtocolError
from protocol.wire.messages import PARTS_MAX, HeldEvent, OperatorPart, Positions, SubtaskState
from protocol.wire.state import Steps, join_in_steps, run_steps

__all__ = [
    "FILES_OF",
    "ONE_PART",
    "OWN_PART",
    "PartTable",
    "covers",
    "divide_state",
    "fewer",
    "join_states",
    "join_states_in_steps",
    "more",
    "positions",
    "split_states",
    "split_states_in_steps",
    "states_by_part",
]

OWN_PART = 0
"""The index of the user's own part."""
FILES_OF = "headgate.files_of"
"""The entry of a joined state that names the part whose state is in files."""
MAGIC = b"\xc1headgate-chain-1"  # 0xc1 begins no msgpack value
_LENGTHS = Struct(">IQ")


class PartTable:
    """The parts of one operator, in their order. Immutable, and shared by all of its attempts.

    ``count``: how many there are. ``outside``: for each, whether it is outside of checkpoints. ``taken_with``: for
    each, the parts whose items are taken in one order; None if these are all. ``users``: for each, whether
    it is the user's own: what it exchanges are the events of the operator, as people see it. The task needs not know
    this.
    """

    __slots__ = ("_all_inside", "_indices", "count", "names", "outside", "parts", "taken_with", "users")

    def __init__(self, parts: Sequence[OperatorPart] = (OperatorPart(""),), stages: Container[str] = ()) -> None:
        self.parts = tuple(parts)
        self.count = len(self.parts)
        self.names = tuple(part.name for part in self.parts)
        self.outside = tuple(part.outside for part in self.parts)
        self.users = tuple(not name or name in stages for name in self.names)
        self._indices = {name: index for index, name in enumerate(self.names)}
        inside = frozenset(index for index, outside in enumerate(self.outside) if not outside)
        self._all_inside = len(inside) == self.count
        self.taken_with: tuple[frozenset[int] | None, ...] = (None,) * self.count
        if not self._all_inside:
            self.taken_with = tuple(
                frozenset({index}) if outside else inside for index, outside in enumerate(self.outside)
            )
        if not self.count or self.names[OWN_PART] or len(self._indices) < self.count or self.count > PARTS_MAX:
            raise LocalProtocolError(
                f"an operator has its own part and at most {PARTS_MAX - 1} others, each with its own name: {self.names}"
            )

    def __repr__(self) -> str:
        return f"PartTable({', '.join(map(repr, self.names))})"

    def index(self, name: str) -> int | None:
        """The index of a part; None if there is none of this name."""
        return self._indices.get(name)

    def mismatch(self, sent: Positions, held: Iterable[HeldEvent]) -> str:
        """Why what a peer says of a checkpoint is not of these parts; empty if it is (H152)."""
        if len(sent) > self.count:
            return f"positions of {len(sent)} parts, but there are {self.count}"
        for event in held:
            if event.part >= self.count:
                return f"a held event of part {event.part}, but there are {self.count}"
            if self.outside[event.part]:
                return f"a held event of part {event.part}, which is outside of checkpoints"
        return ""

    def inside(self, counts: Sequence[int]) -> Positions:
        """The positions that belong into a checkpoint."""
        if self._all_inside:
            return positions(counts)
        return positions([0 if outside else count for count, outside in zip(counts, self.outside, strict=True)])


ONE_PART = PartTable()
"""The table of an operator that has only its own part."""


# --- positions ----------------------------------------------------------------------------------------------------


def positions(counts: Sequence[int]) -> Positions:
    """Return the counts, by part, without the zeros at the end."""
    end = len(counts)
    while end and not counts[end - 1]:
        end -= 1
    return tuple(counts[:end])


def more(sent: Positions, events: Iterable[HeldEvent]) -> Positions:
    """The positions after these events too."""
    return _moved(sent, events, 1)


def fewer(sent: Positions, events: Iterable[HeldEvent]) -> Positions:
    """The positions before these events."""
    return _moved(sent, events, -1)


def _moved(sent: Positions, events: Iterable[HeldEvent], by: int) -> Positions:
    counts = list(sent)
    for event in events:
        counts += [0] * (event.part + 1 - len(counts))
        counts[event.part] += by
    return positions(counts)


def covers(sent: Positions, taken: Positions) -> bool:
    """Whether no part of ``taken`` has a higher position than in ``sent``."""
    return len(taken) <= len(sent) and all(count <= limit for count, limit in zip(taken, sent, strict=False))


# --- the state of all ---------------------------------------------------------------------------------------------


def join_states(main: bytes, parts: Mapping[str, bytes], stages: Container[str] = ()) -> bytes:
    """Return one state. Empty states of named parts are left out, except for ``stages``."""
    state: bytes = run_steps(join_states_in_steps(main, parts, stages))
    return state


def join_states_in_steps(main: bytes, parts: Mapping[str, bytes], stages: Container[str] = ()) -> Steps[bytes]:
    """Like ``join_states``, for an event loop: the states may be large."""
    kept = {name: state for name, state in parts.items() if state or name in stages}
    if not kept and not main.startswith(MAGIC):
        return main
    pieces = [MAGIC]
    for name, state in ("", main), *kept.items():
        encoded = name.encode()
        pieces += (_LENGTHS.pack(len(encoded), len(state)), encoded, state)
    return (yield from join_in_steps(pieces))


def split_states(state: bytes, known: Container[str]) -> tuple[bytes, dict[str, bytes]]:
    """``split_states_in_steps`` without a pause."""
    states: tuple[bytes, dict[str, bytes]] = run_steps(split_states_in_steps(state, known))
    return states


def split_states_in_steps(state: bytes, known: Container[str]) -> Steps[tuple[bytes, dict[str, bytes]]]:
    """Return the main state, and those of the named parts that have one. An empty state of an unknown part is dropped.

    Raises:
        LocalProtocolError: there is the state of a part that is not ``known``, which would be lost; or the bytes are
            damaged.
    """
    if not state.startswith(MAGIC):
        return state, {}
    parts: dict[str, bytes] = {}
    at = len(MAGIC)
    while at < len(state):
        try:
            name_length, length = _LENGTHS.unpack_from(state, at)
            at += _LENGTHS.size
            name = state[at : at + name_length].decode()
        except (StructError, UnicodeDecodeError) as error:
            raise LocalProtocolError(
                f"the state of a chain is damaged: {error}. Restore an earlier checkpoint"
            ) from error
        at += name_length
        parts[name] = yield from join_in_steps((memoryview(state)[at : at + length],))
        at += length
    if at != len(state) or "" not in parts:
        raise LocalProtocolError(
            "the state of a chain is damaged: it does not end where its last part does. Restore an earlier checkpoint"
        )
    main = parts.pop("")
    if unknown := sorted(name for name, kept in parts.items() if kept and name not in known):
        raise LocalProtocolError(
            f"the checkpoint has a state of {', '.join(map(repr, unknown))}, which this operator does not use: pass it "
            "to coordinate(..., uses=[...]) or, if it is a stage, to chain(...) under the same name, or start without "
            'the checkpoint (restore="none")'
        )
    return main, {name: kept for name, kept in parts.items() if name in known}


def states_by_part(
    states: Iterable[SubtaskState], known: Iterable[str]
) -> tuple[dict[str, dict[int, bytes]], dict[str, list[SubtaskState]]]:
    """What a subtask restores, by the names of the parts, in the order of the subtasks that took it (H52).

    First the states of bytes, by the subtask that took them; then those in files, each with the bytes that belong to
    its files alone. The user's own part has the name "". Raises as ``split_states`` does for parts that are not
    ``known``.
    """
    names = {*known, FILES_OF}
    in_bytes: dict[str, dict[int, bytes]] = {}
    in_files: dict[str, list[SubtaskState]] = {}
    for one in sorted(states, key=attrgetter("subtask")):
        own, parts = split_states(one.state, names)
        of_files = parts.pop(FILES_OF, b"").decode()
        parts[""] = own
        if one.files is not None:
            in_files.setdefault(of_files, []).append(one._replace(state=parts.pop(of_files, b"")))
        if one.groups is None:  # a piece has nothing of other parts
            for name, state in parts.items():
                in_bytes.setdefault(name, {})[one.subtask] = state
    return in_bytes, in_files


class _Every:
    def __contains__(self, name: object) -> bool:
        return True


def divide_state(state: bytes) -> tuple[bytes | None, bytes]:
    """Divide the state of all parts, of which one has files, into that of the others and that of this one.

    The first is None if the others have none.
    """
    own, parts = split_states(state, _Every())
    name = parts.pop(FILES_OF, b"").decode()
    if not name:
        return join_states(b"", parts, parts) if parts else None, join_states(own, {})
    data = parts.pop(name, b"")
    others = join_states(own, parts, parts) if own or parts else None
    return others, join_states(b"", {name: data, FILES_OF: name.encode()}, (name,))
