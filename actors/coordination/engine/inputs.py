# SPDX-License-Identifier: Apache-2.0

"""Which input a checkpoint belongs to, and whether a run that begins has the same one (H174). Pure.

A checkpoint in streaming mode is labelled with the identity of the input that its run had. Positions in the checkpoint
count the records of this input and of no other. There are three kinds of identity:

- a micro-batch of a streaming query (``BatchInput``);
- an input that the user names, with ``run(..., input_id=...)`` (``NamedInput``);
- any other run (``UnnamedInput``). It is known by the call of ``run`` that it belongs to, if there is one, and by its
  place: how many inputs this application had finished before it.

Checkpoints that begin before a run has succeeded are labelled ``begun``. Those that begin later, from the final
checkpoint on, are labelled ``done``. So a restore that finds ``done`` finds all of the work. No restore finds the
output without the label, or the label without the output.

A label also keeps what later runs must not forget: the names of finished inputs, and the last batch of a query, to
which a plain run between two batches says nothing.

``compare`` decides about a run that begins. An application that has died cannot say whether the next one repeats its
job, so an unnamed run continues an interrupted unnamed run in the same place. But if Spark called the job of that run a
success, a plain action has returned, and the user may have gone on to other records, or may repeat the job because the
operator failed: as long as the application lives, no unnamed run continues it.

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
| unnamed, begun | unnamed, in the same place | same, unless its action has returned; otherwise refused |
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
from protocol.barrier_tracker import CompletedCheckpoint

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
    """What the input of a run that begins is to the restored checkpoint. The last six are refused."""

    SAME = "the same input"
    OTHER = "another input"
    UNKNOWN = "the checkpoint does not say"
    INTERRUPTED = "another input was interrupted"
    OTHER_PLACE = "an unnamed run in another place was interrupted"
    RETURNED = "an unnamed run failed, but its action has returned"
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
    if comparison is Comparison.RETURNED:
        return (
            f"{_name(begins)} begins, but the operator failed in the unnamed run before it. Spark called that job a"
            " success, so its action has returned, and this run may have the same records again or others. Say which:"
            f" {say}. With sidecar.run, such an action raises, and input_id=... names its records"
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


NAMES_KEPT = 100
"""How many names of finished inputs a label has, the latest ones."""
CALLS_KEPT = 1024
"""The number of calls of ``run`` whose place is remembered, more than can be in progress at the same time."""


class CheckpointLabels:
    """The labels of one operator in streaming mode. Loop only.

    ``restored`` is the checkpoint that it starts from. ``said`` is what the user says about the first run after it.
    """

    def __init__(self, restored: CompletedCheckpoint | None = None, said: RestoredInput | None = None) -> None:
        self.completed = str(InputPosition(NoInput(), done=True)) if restored is None else restored.label
        """The label of the last completed checkpoint."""
        self.runs = 0
        """How many runs have begun since the last ``announce``."""
        self._restored = restored
        self._said = None if restored is None else said
        self._first: Input | None = None  # of which that was said
        self._now = self.completed
        self._input: Input = NoInput()
        self._batch: BatchInput | None = None
        self._adopted = False
        self._of: dict[int, str] = {}
        self._began_before: set[int] = set()  # checkpoints in progress that began before the first run
        self._has_begun = False
        self._finished = 0  # inputs of this application
        self._finished_before: dict[str, int] = {}  # by call of ``run``
        self._action = ""
        self._runs_of_action = 0
        self._names: tuple[str, ...] = ()  # of the inputs that were finished before the present one
        self._last_batch: InputPosition | None = None
        self._returned = False  # a plain action whose run failed has returned to its caller

    def announce(self, batch: BatchInput, *, adopted: bool) -> None:
        """The next run is this batch, for the first time or again. ``adopted``: whatever the restored checkpoint is."""
        self._batch, self._adopted = batch, adopted
        self.runs = 0

    def withdraw(self) -> None:
        """The next run is not a batch, unless another one is announced."""
        self._batch = None

    def done_without_run(self, batch: BatchInput) -> None:
        """The batch had nothing for the operator: the next checkpoint commits it."""
        self._input, self._names, self._last_batch = batch, _names_before(self._found(), batch), None
        self._now = self._label(done=True)

    def run_begins(self, action: str) -> tuple[bool, str]:
        """Return whether the run has the input of the last completed checkpoint, and why it may not begin, if so.

        ``action`` is the id of the call of an action that it belongs to; empty for none. If the run may begin, or not,
        the checkpoints from here on belong to it.
        """
        self.runs += 1
        begins = self._input = self._batch or self._input_of(action)
        found = self._found()
        is_done = found is not None and found.done and found.input == begins
        if self._batch and is_done:
            return True, f"a second run, although one run has done {begins} and committed its output"
        comparison = Comparison.OTHER if self._has_no_state() else compare(found, begins)
        if self._said is not None:
            comparison = self._as_said(begins, comparison)
        if self._returned and comparison is Comparison.SAME and isinstance(begins, UnnamedInput):
            comparison = Comparison.RETURNED
        if comparison.refused and self._batch and self._adopted:
            comparison = Comparison.OTHER
        if comparison.refused:
            return False, why_refused(comparison, found, begins)
        self._has_begun, self._returned = True, False
        same = comparison is Comparison.SAME
        self._names = _names_before(found, begins)
        self._last_batch = None if found is None or isinstance(begins, BatchInput) else found.batch
        # What is done stays done while a run of the same input skips it.
        self._now = self._label(done=same and is_done)
        return same, ""

    def why_not_counted(self, before: int, now: int) -> str:
        """Why the run must not count the records of a partition: its input was in another number of them before."""
        return why_not_counted(self._input, before, now)

    def _as_said(self, begins: Input, comparison: Comparison) -> Comparison:
        """What the user has said of the first run and its repetitions, until a checkpoint of a run completes."""
        if self._said == "other":
            return Comparison.OTHER
        self._first = self._first or begins
        repeats = compare(InputPosition(self._first, done=False), begins) is Comparison.SAME
        return Comparison.SAME if repeats else comparison

    def _label(self, *, done: bool) -> str:
        return str(InputPosition(self._input, done, self._names, self._last_batch))

    def _found(self) -> InputPosition | None:
        return InputPosition.read(self.completed)

    def _input_of(self, action: str) -> Input:
        self._runs_of_action = self._runs_of_action + 1 if action == self._action else 0
        self._action = action
        its = ActionId.read(action)
        if not its.call:
            return UnnamedInput(finished_before=self._finished)
        if its.input_id is not None:
            return NamedInput(its.input_id, self._runs_of_action)
        if its.call not in self._finished_before:
            while len(self._finished_before) >= CALLS_KEPT:
                del self._finished_before[next(iter(self._finished_before))]
            self._finished_before[its.call] = self._finished
        return UnnamedInput(its.call, self._runs_of_action, self._finished_before[its.call])

    def _has_no_state(self) -> bool:
        """Whether an earlier release wrote the restored checkpoint, and it holds nothing that could be mistaken."""
        point = self._restored
        return (
            point is not None
            and not point.label
            and not point.coordinator_state
            and not any(state.state or part.held for part in point.subtask_states.values() for state in part.states)
        )

    def run_ended(self, succeeded: bool, job_succeeded: bool) -> None:
        """After a success, checkpoints that begin from here on contain everything that the run did.

        ``job_succeeded``: Spark called its job a success. If the run has failed all the same, ``Sidecar.run`` raises,
        but a plain action returns.
        """
        if not succeeded:
            plain = isinstance(self._input, UnnamedInput) and not self._input.call
            self._returned = self._returned or (job_succeeded and plain)
            return
        self._now = self._label(done=True)
        match self._input:
            case UnnamedInput() as unnamed:
                self._finished = max(self._finished, unnamed.place + 1)
            case NamedInput():
                self._finished += 1

    def see(self, pending_ids: tuple[int, ...]) -> None:
        """Note which checkpoints are in progress: new ones have just begun, missing ones are over."""
        if not self._has_begun:
            self._began_before.update(pending_ids)
        self._of = {checkpoint_id: self._of.get(checkpoint_id, self._now) for checkpoint_id in pending_ids}

    def of(self, checkpoint_id: int) -> str:
        """The label of a checkpoint that is in progress."""
        return self._of[checkpoint_id]

    def complete(self, checkpoint_id: int) -> None:
        """The checkpoint is durable."""
        self.completed = self.of(checkpoint_id)
        if checkpoint_id not in self._began_before:  # otherwise it is what was restored, and the first run is to come
            self._restored = self._said = None


def _names_before(found: InputPosition | None, begins: Input) -> tuple[str, ...]:
    """The names of the inputs that were finished before ``begins``."""
    if found is None:
        return ()
    begins_id = begins.input_id if isinstance(begins, NamedInput) else None
    names = found.finished
    if found.done and isinstance(found.input, NamedInput):
        names = (*names, found.input.input_id)
    return tuple(name for name in names if name != begins_id)[-NAMES_KEPT:]
