# SPDX-License-Identifier: Apache-2.0

"""Which input a checkpoint belongs to, and whether a run that begins has the same one (H174). Pure.

A checkpoint in streaming mode is labelled with the identity of the input that its run had, and with ``done`` if the run
had ended well when the checkpoint began, otherwise ``begun``. Positions in the checkpoint count the records of this
input and of no other. There are three kinds of identity:

- a micro-batch of a streaming query (``BatchInput``);
- an input that the user names, with ``run(..., input_id=...)`` (``NamedInput``);
- any other run (``UnnamedInput``). It is known by the call of ``run`` that it belongs to, if there is one, and by its
  place: how many inputs this application had finished before it.

A label also keeps what later runs must not forget: the names of finished inputs, and the last batch of a query, to
which a plain run between two batches says nothing.

``compare`` decides about a run that begins. An application that has died cannot say whether the next one repeats its
job, so an unnamed run continues an interrupted unnamed run in the same place.

| the restored checkpoint | the run that begins | |
|---|---|---|
| none, or one of before the first run | any | other |
| without a label (of an earlier release) | any | refused, unless there is no state |
| batch, done or begun | the same batch | same |
| batch, done or begun | another batch, which the driver has checked | other |
| batch, done | not a batch | other |
| any run, done | batch | other |
| begun | another kind of input, or another name | refused |
| named, begun | same name, same run of it | same; another run of it: refused |
| named, done | same name, same run of it | same; a later one: other; an earlier one: refused |
| named, done | another name, or unnamed | other |
| any | a name that was finished before the found one | refused |
| unnamed, begun | unnamed, in the same place | same; otherwise refused |
| unnamed, done | same call, same run of it | same; a later one: other; an earlier one: refused |
| unnamed, done | another call, or named | other |
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from protocol.arguments import given

__all__ = [
    "INPUT_ID_CHARS_MAX",
    "ActionId",
    "BatchInput",
    "Comparison",
    "Input",
    "InputPosition",
    "NamedInput",
    "NoInput",
    "RestoredInput",
    "UnnamedInput",
    "check_input_id",
    "compare",
    "why_not_counted",
    "why_refused",
]

INPUT_ID_CHARS_MAX = 200
RestoredInput = Literal["same", "other"]
"""What the user says about the first run after a restore."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A micro-batch of a streaming query."""

    query_id: str
    batch_id: int

    def __str__(self) -> str:
        return f"batch {self.batch_id} of {self.query_id}"


@dataclass(frozen=True, slots=True)
class NamedInput:
    """An input with a name of the user's. ``run``: which of the operator's runs in one call of the action, from 0."""

    input_id: str
    run: int = 0

    def __str__(self) -> str:
        return f"run {self.run + 1} of input {json.dumps(self.input_id)}"


@dataclass(frozen=True, slots=True)
class UnnamedInput:
    """A run whose input has no name.

    ``call``: the call of ``Sidecar.run``, empty for a plain action, which is equal to no other. ``run``: which of the
    operator's runs in one call of the action, from 0. ``finished_before``: how many inputs of the operator this
    application had finished when the call began.
    """

    call: str = ""
    run: int = 0
    finished_before: int = 0

    @property
    def place(self) -> int:
        """Which input of its application it is, from 0."""
        return self.finished_before + self.run

    def __str__(self) -> str:
        return f"run {self.run + 1} of call {self.call or '-'} after {self.finished_before}"


@dataclass(frozen=True, slots=True)
class NoInput:
    """No run has begun yet."""

    def __str__(self) -> str:
        return "no input"


Input = BatchInput | NamedInput | UnnamedInput | NoInput


@dataclass(frozen=True, slots=True)
class ActionId:
    """The id of one call of an action by ``run``. Tasks send it, so that it is known even after a restart.

    ``call``: the call of ``run``, the same for each restart of the action. ``number``: which restart it is, from 0.
    """

    call: str
    number: int = 0
    input_id: str | None = None

    def __str__(self) -> str:
        named = "" if self.input_id is None else f".{self.input_id.encode().hex()}"  # Spark allows no comma in a tag
        return f"{self.call}.{self.number}{named}"

    @classmethod
    def read(cls, text: str) -> ActionId:
        """Parse an id, which a task claims. What is not one is that of no call."""
        match = _ACTION.fullmatch(text)
        if match is None:
            return cls("")
        try:
            input_id = None if match[3] is None else bytes.fromhex(match[3]).decode()
            check_input_id(input_id)
        except ValueError:
            return cls("")
        return cls(match[1], int(match[2] or 0), input_id)


_ACTION = re.compile(r"([0-9a-f]{16})(?:\.(\d{1,9})(?:\.([0-9a-f]*))?)?")
_LABEL = re.compile(
    r"(?:(?P<none>no input)|batch (?P<batch>0|[1-9]\d{0,18}) of (?P<query>\S+)"
    r"|run (?P<run>[1-9]\d{0,9}) of (?:input (?P<input>\"[^\n]*\")|call (?P<call>\S{1,64}) after (?P<after>\d{1,18})))"
    r": (?P<state>begun|done)(?:, after (?P<last>batch \d+ of \S+: (?:begun|done)))?"
    r"(?:, finished before: (?P<finished>\[[^\n]*\]))?"
)


@dataclass(frozen=True, slots=True)
class InputPosition:
    """An input, and whether its run had ended well. ``str`` makes the label, and ``read`` parses one.

    ``finished``: the names of the inputs that were finished before it, the latest last. ``last_batch``: the position in
    the last batch before it, for an input that is not a batch itself.
    """

    input: Input
    done: bool
    finished: tuple[str, ...] = ()
    last_batch: InputPosition | None = None

    def __str__(self) -> str:
        after = f", after {self.last_batch}" if self.last_batch else ""
        before = f", finished before: {json.dumps(self.finished)}" if self.finished else ""
        return f"{self.input}: {'done' if self.done else 'begun'}{after}{before}"

    @property
    def batch(self) -> InputPosition | None:
        """The position in the last batch of a query; None if there was none."""
        return InputPosition(self.input, self.done) if isinstance(self.input, BatchInput) else self.last_batch

    @classmethod
    def read(cls, label: str) -> InputPosition | None:
        """Parse a label; None if it is empty or not a position."""
        match = _LABEL.fullmatch(label)
        if match is None:
            return None
        try:
            input_id, finished = json.loads(match["input"] or '""'), json.loads(match["finished"] or "[]")
        except ValueError:
            return None
        if not all(isinstance(one, str) for one in (input_id, *finished)):
            return None
        last = None if match["last"] is None else cls.read(match["last"])
        return cls(_input_in(match, input_id), match["state"] == "done", tuple(finished), last)


def _input_in(match: re.Match[str], input_id: str) -> Input:
    if match["none"]:
        return NoInput()
    if match["batch"] is not None:
        return BatchInput(match["query"], int(match["batch"]))
    run, call = int(match["run"]) - 1, match["call"]
    if call is None:
        return NamedInput(input_id, run)
    return UnnamedInput("" if call == "-" else call, run, int(match["after"]))


class Comparison(Enum):
    """What the input of a run that begins is to the restored checkpoint. The last five are refused."""

    SAME = "the same input"
    OTHER = "another input"
    UNKNOWN = "the checkpoint does not say"
    INTERRUPTED = "another input was interrupted"
    OTHER_PLACE = "an unnamed run in another place was interrupted"
    EARLIER_RUN = "a later run of this input had begun"
    FINISHED = "this input was finished before another one began"

    @property
    def refused(self) -> bool:
        """Whether the run cannot begin."""
        return self not in (Comparison.SAME, Comparison.OTHER)


def compare(found: InputPosition | None, begins: Input) -> Comparison:
    """Compare the input of a run that begins with the position in a restored checkpoint. None: it has no label.

    If nothing is restored, do not ask: the input is another one. A batch is compared after the driver has checked that
    it may run at all.
    """
    if found is None:
        return Comparison.UNKNOWN
    match found.input, begins:
        case NoInput(), _:
            return Comparison.OTHER
        case BatchInput() as old, BatchInput() as new:
            return Comparison.SAME if old == new else Comparison.OTHER
        case NamedInput() as old, NamedInput() as new if old.input_id == new.input_id:
            return _runs_of_one(old.run, new.run, found.done)
        case _, NamedInput(input_id) if input_id in found.finished:
            return Comparison.FINISHED
        case UnnamedInput() as old, UnnamedInput() as new:
            if new.call and old.call == new.call:
                return _runs_of_one(old.run, new.run, found.done)
            if not found.done:
                return Comparison.SAME if old.place == new.place else Comparison.OTHER_PLACE
    return Comparison.OTHER if found.done else Comparison.INTERRUPTED


def _runs_of_one(old: int, new: int, done: bool) -> Comparison:
    if old == new:
        return Comparison.SAME
    if new < old:
        return Comparison.EARLIER_RUN
    return Comparison.OTHER if done else Comparison.INTERRUPTED


def why_refused(comparison: Comparison, found: InputPosition | None, begins: Input) -> str:
    """The reason for a comparison that is refused, and what the user can do."""
    again = 'to write it once more, coordinate(..., restored_input="other")'
    if found is not None and comparison is Comparison.FINISHED:
        return (
            f"{_name(begins)} is finished, and {_name(found.input)} came after it, so this run would write it again."
            f" Leave this call out, and go on with the input that comes next; or, {again}"
        )
    if found is not None and comparison is Comparison.EARLIER_RUN:
        return (
            f"{_name(begins)} begins again, but the restored checkpoint belongs to a later run of the same action"
            f" ({_name(found.input)}, which {'had ended' if found.done else 'was interrupted'}), so it is no longer"
            " known what this run has written. If the action had ended, leave this call out. Give each job of an action"
            f" a separate operator, so that it can be repeated; or, {again}"
        )
    say = "for_each_batch(..., adopt=True), or " if isinstance(begins, BatchInput) else ""
    say += (
        'coordinate(..., restored_input="other") if the run that begins has other records, which begin at the first'
        ' one, or restored_input="same" if it has the same records again'
    )
    if found is None or comparison is Comparison.UNKNOWN:
        return (
            "the restored checkpoint does not say which input it belongs to, because an earlier release of Headgate"
            f" wrote it. Say it once: {say}"
        )
    finish = {
        NamedInput: f"finish it first, with sidecar.run(..., input_id={_id_of(found.input)})",
        BatchInput: "finish it first: start its query again",
        NoInput: "",
        UnnamedInput: (
            "finish it first: run that job again before others"
            if comparison is Comparison.INTERRUPTED
            else "give inputs a name, with sidecar.run(..., input_id=...), if an application has several"
        ),
    }[type(found.input)]
    return (
        f"{_name(begins)} begins, but the restored checkpoint is from the middle of {_name(found.input)}, which was"
        f" interrupted, and its positions say nothing about other records. Either {finish}; or use {say}"
    )


def why_not_counted(begins: Input, before: int, now: int) -> str:
    """The reason why a run of the same input, in another number of partitions, cannot count records."""
    return (
        f"{_name(begins)} begins again in {_count(now)}, but when the restored checkpoint was taken it was in"
        f" {_count(before)}, so the number of records that a partition has processed says nothing now."
        f" Either run it in {_count(before)}, with parallelism and repartition() as before; or leave this call out if"
        ' that input is finished; or, in a new application, coordinate(..., restored_input="other") writes all of its'
        " records again. If the operator's state says nothing about Spark's records, for example because it reads none,"
        " set counts_records = False in its class"
    )


def _count(partitions: int) -> str:
    return f"{partitions} partition{'s' if partitions > 1 else ''}"


def _id_of(one: Input) -> str:
    return repr(one.input_id) if isinstance(one, NamedInput) else "..."


def _name(one: Input) -> str:
    match one:
        case BatchInput(query_id, batch_id):
            return f"batch {batch_id} of query {query_id}"
        case NamedInput(input_id, run):
            return f"run {run + 1} of input {input_id!r}" if run else f"input {input_id!r}"
        case UnnamedInput():
            return f"unnamed run {one.place + 1} of an application"
        case NoInput():
            return "no run"


def check_input_id(input_id: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless this can name an input."""
    if input_id is None:
        return
    if not isinstance(input_id, str):
        raise TypeError(
            f"input_id must be a str that names the input, such as '2026-11-26', not "
            f"{given('input_id', input_id, None)}"
        )
    if not 0 < len(input_id) <= INPUT_ID_CHARS_MAX:
        raise ValueError(f"input_id must have 1 to {INPUT_ID_CHARS_MAX} characters, not {len(input_id)}")
    if not input_id.isprintable():
        raise ValueError(f"input_id must be printable, but is {given('input_id', input_id)}")
