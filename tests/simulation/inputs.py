# SPDX-License-Identifier: Apache-2.0

"""A user's inputs, one job after another, and what the contract says about them (H174).

In some worlds, each job has an input: the next one, the same one again after it was interrupted or is finished, one of
before, or a batch of a query. Each has some records for every key, and a task puts each of its records into the output.
The output is in the states of the tasks, as that of a sink which commits with the checkpoint.

The checks use only what the user knows: of an input that ended well, each record is in the output exactly once; of any
other, the first ones are; and a run is refused only if its input cannot be told from what was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from actors.coordination.engine.inputs import ActionId, RestoredInput
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.parts import split_states
from tests.simulation.application import PARTS, STAGES, own_state, whole_states
from tests.simulation.checkers import demand

KINDS = ("named", "unnamed", "mixed", "batches")
NOTHING = -1
QUERY = "query"


@dataclass
class Records:
    """One task's records. ``done``: by key, how many of the input of its run; ``output``: by key, of all inputs."""

    keys: list[int]
    input: int
    size: int
    done: dict[int, int] = field(default_factory=dict)
    output: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done = dict.fromkeys(self.keys, 0)
        self.output = {key: [] for key in self.keys}

    def restore(self, states: Iterable[dict[str, Any]], *, begins_again: bool) -> None:
        """Continue after the records that the states count, if they are of this input."""
        states = list(states)
        for state, is_ours in zip(states, self.of_its_input(states), strict=True):
            for name, output in state["output"].items():
                self.output[int(name)] = [(input, number) for input, number in output]
            if begins_again and is_ours:
                self.done.update({int(key): done for key, done in state["done"].items()})

    def of_its_input(self, states: list[dict[str, Any]]) -> list[bool]:
        """Which states are of the input that begins again.

        Of several that meet, some may be of an earlier one: the operator has to tell them apart.
        """
        return [len(states) == 1 or state["input"] == self.input for state in states]

    def state(self) -> dict[str, Any]:
        return {"input": self.input, "done": self.done, "output": self.output}

    def wanting(self) -> list[int]:
        """The keys of which there are more records."""
        return [key for key in self.keys if self.done[key] < self.size]

    def put(self, key: int) -> None:
        """Process the next record of a key."""
        self.output[key].append((self.input, self.done[key]))
        self.done[key] += 1


@dataclass(frozen=True)
class Job:
    """What the user runs. ``action``: the id of its call."""

    input: int
    action: str


class Inputs:
    """See the module. ``number``: the input at which the user is; ``said``: what he says to the next driver."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"inputs {seed}")
        self.kind = self.random.choice(KINDS)
        self.size = self.random.choice([1, 2, 5])
        self.number = 0
        self.said: RestoredInput | None = None
        self.jobs: dict[int, Job] = {}  # by stage
        self.given_up: set[int] = set()
        self.tried: set[int] = set()
        self.empty: set[int] = set()  # batches without a job
        self.adopts = False
        self.calls = 0
        self._truth: dict[int, tuple[int, bool]] = {
            NOTHING: (NOTHING, True)
        }  # by checkpoint: input, whether it is done
        self._output: dict[int, dict[int, list[tuple[int, int]]]] = {NOTHING: {}}
        self._call = ""
        self._tries = 0

    # --- what the user does -------------------------------------------------------------------------------------------

    def name_of(self, input: int) -> str | None:
        is_named = self.kind == "named" or (self.kind == "mixed" and input % 2 == 0)
        return f"day {input}" if is_named else None

    def next_job(self, stage_id: int, *, first: bool) -> Job:
        """Choose the input of the next job: usually the one that is due. ``first``: of a driver."""
        random, input = self.random, self.number
        if self.kind == "batches":
            self.jobs[stage_id] = Job(input, "")
            return self.jobs[stage_id]
        if not self.said and random.random() < 0.2:
            other = max(0, input + random.choice([-1, 1]))
            # What was given up has some records in the output, and nobody claims that they come only once.
            if self.name_of(other) and (first or self.name_of(input)) and other not in self.given_up:
                input = other
        again = not first and self._tries > 0 and random.random() < 0.5
        if not again:  # another call of ``Sidecar.run``, or a plain action
            self.calls, self._tries = self.calls + 1, 0
            self._call = f"{self.calls:016x}"
        action = str(ActionId(self._call, self._tries, self.name_of(input)))
        if self.kind != "named" and self.name_of(input) is None and random.random() < 0.3:
            action = ""
        self._tries += 1
        self.jobs[stage_id] = job = Job(input, action)
        self.tried.add(input)
        return job

    def look(self, checkpoint_id: int) -> None:
        """The user looks at what the newest checkpoint holds, and goes on from there."""
        input, done = self._truth[checkpoint_id]
        if input != NOTHING and self.kind != "batches":  # Spark itself keeps which batch is next
            self.number = input + done
            while self.number in self.given_up:  # the next one has begun, even if none of its tasks was ready
                self.number += 1

    def say(self, checkpoint_id: int) -> RestoredInput | None:
        """Choose what the user says about the first run of a driver that he starts from this checkpoint."""
        input, done = self._truth[checkpoint_id]
        may = input != NOTHING and not done and self.kind != "batches"
        if may and input in self.given_up:
            # The next job has another input. Names say so by themselves.
            return self.random.choice([None, "other"]) if self.kind == "named" else "other"
        return self.random.choice([None, None, "same", "other"]) if may else None

    def restored(self, checkpoint_id: int, said: RestoredInput | None) -> None:
        """A driver has started from this checkpoint."""
        self.look(checkpoint_id)
        self.said = said
        if said == "other" and self.number == self._truth[checkpoint_id][0]:  # otherwise it was given up before
            self.given_up.add(self.number)
            self.number += 1

    def refused(self, job: Job, checkpoint_id: int, why: BaseException) -> None:
        """The newest job was refused: the user looks at what is there."""
        self.check_refused(job, checkpoint_id, why)
        self.look(checkpoint_id)

    def ended(self, job: Job, checkpoint_id: int, keys: int, succeeded: bool, committed: bool) -> bool:
        """The newest job is over; ``checkpoint_id`` is the last complete one. Return whether the input is done."""
        if self.kind == "batches":
            return False
        self.number = job.input
        if not succeeded:
            return False
        if committed:
            self.check_done(job.input, checkpoint_id, keys)
        self._tries, self.said = 0, None
        self.number += committed or self.name_of(job.input) is None or self.random.random() < 0.5
        return committed

    def has_job(self) -> bool:
        """Whether the function of the batch has an action: each time, or never."""
        if Random(f"batch {self.seed} {self.number}").random() < 0.15:
            self.empty.add(self.number)
        return self.number not in self.empty

    def batch_over(self, checkpoint_id: int, keys: int) -> None:
        """The batch is committed, so Spark goes on to the next one."""
        if self.number not in self.empty:
            self.check_done(self.number, checkpoint_id, keys)
        self.number, self.adopts = self.number + 1, False

    def adopt(self) -> None:
        """The batch was refused: the user lets it follow whatever was restored."""
        self.adopts = True
        self.given_up.update(range(self.number))

    # --- checks -------------------------------------------------------------------------------------------------------

    def written(self, checkpoint: CompletedCheckpoint, truth: tuple[int, bool]) -> None:
        """Check the output that a checkpoint holds."""
        output: dict[int, list[tuple[int, int]]] = {}
        for part in checkpoint.subtask_states.values():
            for state in whole_states(part.states):
                output.update(_read_records(state.state))
        for key, records in output.items():
            for input in {input for input, _ in records}:
                numbers = [number for of, number in records if of == input]
                text = f"H174: checkpoint {checkpoint.checkpoint_id}, key {key}: records {numbers} of input {input}"
                demand(numbers == list(range(len(numbers))), text)
        self._truth[checkpoint.checkpoint_id], self._output[checkpoint.checkpoint_id] = truth, output

    def check_done(self, input: int, checkpoint_id: int, keys: int) -> None:
        """Check that an input that ended well is in the output, which this checkpoint has committed."""
        for key in range(keys):
            records = self._output[checkpoint_id].get(key, [])
            numbers = [number for of, number in records if of == input]
            text = f"H174: input {input} is done, and checkpoint {checkpoint_id} has records {numbers} of key {key}"
            demand(numbers == list(range(self.size)), text)

    def check_begins(self, records: Records, name: str) -> None:
        """Check that a run begins only if no other input was interrupted, unless the user has given it up."""
        for key, output in records.output.items():
            for input in {input for input, _ in output} - {records.input} - self.given_up:
                whole = sum(of == input for of, _ in output) == self.size
                text = f"H174: {name} begins with input {records.input}, and input {input} was interrupted in key {key}"
                demand(whole, text)

    def check_refused(self, job: Job, checkpoint_id: int, why: BaseException) -> None:
        """Check that a run with a name is refused only after another input was interrupted, or if it is over itself."""
        input, done = self._truth[checkpoint_id]
        begun = self.tried - {job.input}  # perhaps without a ready subtask
        interrupted = any(other > input for other in begun) or (not done and job.input != input)
        over = job.input != input and (job.input, True) in self._truth.values()  # and others came after it
        rightly = self.name_of(job.input) is None or job.input < input or interrupted or over
        demand(rightly, f"H174: input {job.input} is refused after {input}, done: {done}: {why}")


def _read_records(state: bytes) -> dict[int, list[tuple[int, int]]]:
    of_parts = split_states(state, PARTS)[1]
    whole = json.loads(of_parts.get(STAGES[0]) or own_state(state))
    return {int(key): [(input, number) for input, number in out] for key, out in whole["records"]["output"].items()}
