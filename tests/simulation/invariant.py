# SPDX-License-Identifier: Apache-2.0

"""Checks the invariant of the contract on a stored checkpoint: restore it, and compare both ends of each channel.

An event counts as received if and only if it counts as sent, or lies in the checkpoint on its sender's side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.parts import split_states
from protocol.wire.codec import decode_event
from protocol.wire.messages import HeldEvent, SubtaskState
from protocol.wire.state_handles import StateHandle
from tests.simulation.application import (
    GROUPS,
    LOGS,
    PARTS,
    STAGES,
    TEAM,
    Application,
    own_state,
    table_of,
    unpack,
    whole_states,
)
from tests.simulation.checkers import demand

TAIL = 200
"""How many of its last events a subtask writes into its state; a snapshot never holds this many."""


@dataclass
class Log:
    """One end's record of all exchanges for one key since the first start."""

    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def copy(self) -> Log:
        return Log(list(self.sent), list(self.received), list(self.answers))

    def plain(self) -> list[list[str]]:
        return [self.sent, self.received, self.answers]


REQUEST = "?"
"""Prefixes requests, and nothing else."""


def wire_form(sender: int, key: int, event: str) -> str:
    """Encode an upward event as it travels, prefixed with its first sender."""
    return f"{sender}>{key}:{event}"


def split_wire_form(payload: str) -> tuple[int, int, str]:
    sender, _, rest = payload.removeprefix(REQUEST).partition(">")
    key, _, event = rest.partition(":")
    return int(sender), int(key), event


def read_coordinator(state: bytes) -> tuple[dict[int, Log], dict[int, int]]:
    """Return the logs by key, and the number of loss-tolerant events sent, by task."""
    whole = json.loads(own_state(state))
    return {int(key): Log(*log) for key, log in whole["logs"].items()}, {int(t): n for t, n in whole["loose"].items()}


def check_checkpoint(checkpoint: CompletedCheckpoint, application: Application) -> None:
    """Check every subtask of a checkpoint, in both directions."""
    logs, loose = read_coordinator(checkpoint.coordinator_state)
    demand(checkpoint.parallelism == application.parallelism, f"H52: the parallelism of {checkpoint}")
    for subtask in range(application.parallelism):
        snapshot = checkpoint.subtask_states.get(subtask, SubtaskSnapshot())
        name = f"checkpoint {checkpoint.checkpoint_id}, subtask {subtask}"
        whole = whole_states(snapshot.states)
        states = [json.loads(own_state(state.state)) for state in whole]
        whose = [state.subtask for state in whole]
        demand(whose == [state["subtask"] for state in states], f"H52: {name} names the wrong subtasks: {whose}")
        theirs = merge(name, states)
        keys = application.keys_of(subtask)
        held: dict[int, list[str]] = {}
        for event in snapshot.held:
            if event.part:
                continue
            _, key, what = check_sender(name, event)
            held.setdefault(key, []).append(what)
        demand(theirs.keys() | held.keys() <= set(keys), f"H52: {name} has keys {list(theirs)}, held {list(held)}")
        for key in keys:
            check_channel(f"{name}, key {key}", logs.get(key, Log()), theirs.get(key, Log()), held.get(key, []))
        check_positions(name, snapshot, states, application, checkpoint.parts)
        if application.settings.stages:
            check_stages(name, checkpoint.coordinator_state, snapshot, keys, checkpoint.parts)
        for state in states:
            sent = loose.get(state["tid"], state["loose"])
            demand(state["loose"] <= sent, f"invariant, down, {name}: {state['loose']} loss-tolerant ones, sent {sent}")
    if application.settings.tables:
        check_tables(f"checkpoint {checkpoint.checkpoint_id}", checkpoint, application)


def check_stages(
    name: str, coordinator_state: bytes, snapshot: SubtaskSnapshot, keys: list[int], parts: tuple[str, ...]
) -> None:
    """Check the channel of each stage of a chain, whose states are separate (H80)."""
    of_coordinators = split_states(coordinator_state, PARTS)[1]
    of_subtasks = [split_states(state.state, PARTS)[1] for state in snapshot.states]
    held: dict[str, list[str]] = {}
    for event in snapshot.held:
        part, text = parts[event.part], decode_event(event.payload)
        if part:
            demand(text.startswith(f"{part}/"), f"H80: {name} holds {text} of stage {part}")
            held.setdefault(part, []).append(text.partition("/")[2])
    for stage in STAGES:
        demand(stage in of_coordinators, f"H80: {name} has no state of the coordinator of stage {stage}")
        demand(all(stage in states for states in of_subtasks), f"H80: {name} has no state of stage {stage}")
        logs, _ = read_coordinator(of_coordinators[stage])
        theirs = merge(f"{name}, stage {stage}", [json.loads(states[stage]) for states in of_subtasks])
        for key in keys:
            waiting = [what for _, of, what in map(split_wire_form, held.get(stage, [])) if of == key]
            check_channel(f"{name}, stage {stage}, key {key}", logs.get(key, Log()), theirs.get(key, Log()), waiting)


def merge(name: str, states: list[dict[str, Any]]) -> dict[int, Log]:
    """Merge several states of one subtask, as after a change of parallelism (H52)."""
    merged: dict[int, Log] = {}
    for state in states:
        for key, log in state["logs"].items():
            demand(int(key) not in merged, f"H52: {name} has two states of key {key}")
            merged[int(key)] = Log(*log)
    return merged


def merge_tables(name: str, states: Iterable[SubtaskState], entries: Iterable[str]) -> dict[str, int]:
    """Merge the tables of several states, of which each has its own groups (H52, H195)."""
    merged: dict[str, int] = {}
    for state in states:
        if state.files is not None:
            table = table_of(state)
            demand(not table.keys() & merged.keys(), f"H52: {name} has two states of {table.keys() & merged.keys()}")
            merged |= table
    demand(merged.keys() <= set(entries), f"H52: {name} restores {merged}, and has {list(entries)}")
    return merged


def check_tables(name: str, checkpoint: CompletedCheckpoint, application: Application) -> None:
    """Check that the tables have counted each event that the subtasks have received, wherever it is counted now."""
    counted = received = 0
    for subtask, snapshot in checkpoint.subtask_states.items():
        entries = application.entries_of(subtask)
        counted += sum(merge_tables(f"{name}, subtask {subtask}", snapshot.states, entries).values())
        logs = [json.loads(own_state(state.state))["logs"] for state in whole_states(snapshot.states)]
        received += sum(len(log[1]) for of_state in logs for log in of_state.values())
    demand(counted == received, f"H52: in {name}, {counted} events are counted, and {received} have been received")


def check_sender(name: str, event: HeldEvent) -> tuple[int, int, str]:
    sender, key, what = split_wire_form(unpack(event.payload))
    demand(event.sender == sender, f"H52: {name}: {event.payload!r} is said to be of subtask {event.sender}")
    asked = unpack(event.payload).startswith(REQUEST)
    demand(event.is_request == asked, f"H73: {name}: {event.payload!r} is held as a request: {event.is_request}")
    return sender, key, what


def check_channel(name: str, coordinator: Log, subtask: Log, held: list[str]) -> None:
    demand(
        coordinator.sent == subtask.received,
        f"invariant, down, {name}: sent {coordinator.sent}, received {subtask.received}",
    )
    demand(
        subtask.sent == coordinator.received + held,
        f"invariant, up, {name}: sent {subtask.sent}, received {coordinator.received}, stored {held}",
    )
    demand(
        coordinator.answers == subtask.answers,
        f"invariant, answers, {name}: given {coordinator.answers}, got {subtask.answers}",
    )


def check_positions(
    name: str,
    snapshot: SubtaskSnapshot,
    states: list[dict[str, Any]],
    application: Application,
    parts: tuple[str, ...],
) -> None:
    """Check that each part's own count is the stored one (H32, H150), and that its held events are its last (H31)."""
    if len(states) != 1 or states[0]["generation"] != application.generation:
        demand(not snapshot.events_sent, f"H32: {name} was never restored, and is at {snapshot.events_sent}")
        return
    for index, part in enumerate(parts):
        if part == TEAM:  # outside of checkpoints (H152)
            demand(not any(event.part == index for event in snapshot.held), f"H152: {name} holds an event of {part}")
            demand(not snapshot.events_sent[index : index + 1] or not snapshot.events_sent[index], f"H152: {name}")
            continue
        held = [unpack(event.payload, part) for event in snapshot.held if event.part == index]
        left = states[0]["submitted"].get(part, 0) - len(held)
        stored = snapshot.events_sent[index] if index < len(snapshot.events_sent) else 0
        demand(stored == left, f"H32: {name}: {left} events of part {part!r} have left, {stored} are stored")
        sent = states[0]["tail"].get(part, [])
        tail = sent[len(sent) - len(held) :]
        demand(held == tail, f"H31: {name} holds {held} of part {part!r}, which sent {tail} last")


def check_rescaled(checkpoint: CompletedCheckpoint, cut: CompletedCheckpoint) -> None:
    """Check that part j goes whole to subtask ``j % parallelism``, and held events keep sender and order (H52)."""
    name = f"checkpoint {checkpoint.checkpoint_id} from {checkpoint.parallelism} to {cut.parallelism}"
    check_cut_tables(name, checkpoint, cut)
    for subtask in range(cut.parallelism):
        new = cut.subtask_states.get(subtask, SubtaskSnapshot())
        places = range(subtask, checkpoint.parallelism, cut.parallelism)
        old = [checkpoint.subtask_states.get(place, SubtaskSnapshot()) for place in places]
        theirs = [_without_table(state) for part in old for state in whole_states(part.states)]
        ours = [_without_table(state) for state in whole_states(new.states)]
        demand(sorted(ours, key=repr) == sorted(theirs, key=repr), f"H52: the states of {name}")
        demand(len(new.held) == sum(len(part.held) for part in old), f"H52: the held events of {name}")
        for sender in {event.sender for event in new.held}:
            came = [event for event in new.held if event.sender == sender]
            went = [event for part in old for event in part.held if event.sender == sender]
            demand(came == went, f"H52: {name}: the events of subtask {sender}: {went} became {came}")
    demand(cut.coordinator_state == checkpoint.coordinator_state, f"H52: the coordinator's state of {name}")
    demand(set(cut.subtask_states) <= set(range(cut.parallelism)), f"H52: the subtasks of {name}")


def _without_table(state: SubtaskState) -> tuple[int, bytes, StateHandle | None, dict[str, bytes]]:
    """What goes with the old subtask: all of a state, except for a table."""
    own, of_parts = split_states(state.state, PARTS)
    has_table = LOGS in of_parts
    return state.subtask, b"" if has_table else own, None if has_table else state.files, of_parts


def check_cut_tables(name: str, checkpoint: CompletedCheckpoint, cut: CompletedCheckpoint) -> None:
    """Check that each entry of a table goes to the subtask that has its group now, and keeps its files (H52)."""
    before = _tables(checkpoint)
    after = _tables(cut)
    demand(
        sorted((entry, found) for _, entry, found in before) == sorted((entry, found) for _, entry, found in after),
        f"H52: the tables of {name}",
    )
    if cut is not checkpoint:
        misplaced = [entry for subtask, entry, _ in after if GROUPS.subtask_of(entry, cut.parallelism) != subtask]
        demand(not misplaced, f"H52: {name} has {misplaced} in subtasks of which they are not")


def _tables(checkpoint: CompletedCheckpoint) -> list[tuple[int, str, tuple[int, StateHandle]]]:
    """The entries of all tables: their subtask, name, count, and the files that have it."""
    found = []
    for subtask, snapshot in checkpoint.subtask_states.items():
        for state in snapshot.states:
            if state.files is not None and state.files.key_groups is not None:
                whole = state.groups is None or not split_states(state.state, PARTS)[1]
                demand(whole, f"H52: the states of parts go with a piece of the files of subtask {state.subtask}")
                found += [(subtask, entry, (count, state.files)) for entry, count in table_of(state).items()]
    return found


def never_restored_since_rescale(parts: Iterable[SubtaskSnapshot]) -> bool:
    """Whether any subtask still has several states, or another's: the only reason not to rescale again (H52)."""
    states = [[state.subtask for state in whole_states(part.states)] for part in parts]
    subtasks = [subtask for part in states for subtask in part]
    return any(len(part) > 1 for part in states) or len(set(subtasks)) < len(subtasks)
