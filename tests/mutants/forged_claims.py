# SPDX-License-Identifier: Apache-2.0

"""The sixth hunter: seeded histories in which a hostile task claims to be others, and facts are late or lost (H75).

The forger knows everything that a task knows. It claims task ids that Spark has never given out, and ids of tasks that
compute another partition or another stage. A model of Spark decides what is true and answers each look. Spark's own
tasks register, open, die and succeed meanwhile. Nothing that the forger says may end an attempt of a task that runs, or
keep such a task out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.attempts import (
    AttemptAccepted,
    CancelJobs,
    ConnectionExpired,
    KillTask,
    LedgerEffect,
    LedgerInput,
    OperatorOpened,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    SubtaskFailed,
)
from protocol.facts import EngineFact, StatusReported, TaskOutcome, TaskPlace, TaskState
from protocol.wire.messages import RestoreMode
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, reg, stage, start
from tests.simulation.checkers import demand

SUBTASKS = 2
STEPS = 300
OURS, FOREIGN, MADE_UP = 1, 2, 77
"""The stage of the operator, a stage of the same job without it, and one that nobody has heard of."""
FIRST_MADE_UP = 10_000


@dataclass
class Spark:
    """What is true. ``lost`` of the facts never come, the others come in order, whenever the history takes them."""

    dice: random.Random
    lost: float
    states: dict[int, TaskState] = field(default_factory=dict)
    places: dict[int, TaskPlace] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    bus: list[EngineFact] = field(default_factory=list)
    launched: int = 10

    def post(self, fact: EngineFact) -> None:
        if self.dice.random() >= self.lost:
            self.bus.append(fact)

    def launch(self, partition: int, stage_id: int) -> int:
        task, self.launched = self.launched, self.launched + 1
        same = [other for other, place in self.places.items() if place == TaskPlace(stage_id, partition)]
        self.states[task], self.places[task] = TaskState.RUNNING, TaskPlace(stage_id, partition)
        self.numbers[task] = len(same)
        self.post(start(task, partition, number=len(same), stage=stage_id))
        return task

    def end(self, task: int, outcome: TaskOutcome) -> None:
        well = outcome is TaskOutcome.SUCCESS
        self.states[task] = TaskState.SUCCEEDED if well else TaskState.ENDED
        place = self.places[task]
        self.post(end(task, place.partition, outcome, number=self.numbers[task], stage=place.stage_id))

    def runs(self, task: int) -> bool:
        return self.states.get(task) is TaskState.RUNNING

    def answer(self, query: QueryStatus) -> StatusReported:
        known = [task for task in sorted(query.task_attempt_ids) if task in self.states]
        states = dict.fromkeys(sorted(query.task_attempt_ids), TaskState.UNKNOWN)
        states.update({task: self.states[task] for task in known})
        return StatusReported(dict.fromkeys(query.job_ids, True), states, {task: self.places[task] for task in known})


class History:
    """One history. ``accepted`` holds the connection of each attempt that is accepted and not over, by task id."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.mode = self.dice.choice([RestoreMode.BATCH, RestoreMode.STREAMING])
        self.spark = Spark(self.dice, self.dice.choice([0.0, 0.3]))
        self.book = Playbook(SUBTASKS, attempts_max=1000)
        self.mine: dict[int, int] = {}  # Spark's running task of each partition of our stage
        self.registered: set[int] = set()
        self.honest: set[int] = set()  # connections of tasks that register as themselves
        self.accepted: dict[int, int] = {}
        self.waiting: dict[int, int] = {}  # the same for registrations that are not answered
        self.forged: list[int] = []
        self.seen = 0
        self.book.feed(job(0, (OURS, FOREIGN)), stage(tasks=SUBTASKS), stage(FOREIGN))

    def run(self) -> None:
        for subtask in range(SUBTASKS):
            self.mine[subtask] = self.spark.launch(subtask, OURS)
        for partition in range(3):
            self.spark.launch(partition, FOREIGN)
        for _ in range(self.dice.choice([0, 3])):
            self._forge(self.dice.randrange(SUBTASKS))
        for _ in range(STEPS):
            self.step()
        self._hear_everything()
        self._pass_time(2 * self.book.config.audit_every_s)
        for subtask, task in self.mine.items():
            self._register(subtask)
            demand(task in self.registered, f"H75: task {task} has not registered")
        self._pass_time(3 * self.book.config.give_up_after_s)
        for task in self.mine.values():
            kept_out = f"H75: task {task} runs and has registered, and another one has its place: {self.accepted}"
            demand(self.accepted.get(task) in self.honest, kept_out)

    def step(self) -> None:
        subtask = self.dice.randrange(SUBTASKS)
        match self.dice.randrange(8):
            case 0 | 1:
                self._register(subtask)
            case 2 | 3:
                self._forge(subtask)
            case 4:
                if self.forged:
                    self._speak(self.dice.choice(self.forged))
            case 5:
                if self.spark.bus:
                    self._feed(self.spark.bus.pop(0))
            case 6:
                self._pass_time(self.dice.choice([0.1, 1.0, 6.0]))
            case _:
                if self.dice.random() < 0.4:
                    self._die(subtask)

    # --- Spark's own tasks ----------------------------------------------------------------------------------

    def _register(self, subtask: int) -> None:
        task = self.mine[subtask]
        if task in self.waiting or task in self.accepted:
            return  # of two claims to one id the first counts, until Spark refutes it
        if task not in self.registered:
            self.registered.add(task)
            message = reg(task, subtask, number=self.spark.numbers[task], mode=self.mode)
            self.honest.add(message.connection_id)
            self._feed(message)

    def _die(self, subtask: int) -> None:
        """Let the task fail by itself; Spark starts the next attempt."""
        task = self.mine[subtask]
        self.spark.end(task, TaskOutcome.FAILED)
        self.mine[subtask] = self.spark.launch(subtask, OURS)
        if self.accepted.get(task) in self.honest:
            self._feed(goodbye(task, "ValueError"))

    # --- the forger -----------------------------------------------------------------------------------------

    def _forge(self, subtask: int) -> None:
        elsewhere = [task for task, place in self.spark.places.items() if place != TaskPlace(OURS, subtask)]
        made_up = [FIRST_MADE_UP + len(self.forged), len(self.forged) % 10]
        task = self.dice.choice([*made_up, self.dice.choice(elsewhere), max(elsewhere)])
        run = self.dice.choice([OURS, OURS, FOREIGN, MADE_UP])
        if self.spark.places.get(task) == TaskPlace(run, subtask):
            return  # that is not a lie
        self.forged.append(task)
        self._feed(reg(task, subtask, number=self.dice.choice([0, 1, 99]), run=run, mode=self.mode), forged=True)
        if self.dice.random() < 0.3:
            self._speak(task)

    def _speak(self, task: int) -> None:
        """Say something as a forged attempt that waits or is accepted."""
        if self.accepted.get(task, self.waiting.get(task)) in (None, *self.honest):
            return
        words: list[LedgerInput] = [OperatorOpened("words", task), goodbye(task), ConnectionExpired("words", task)]
        word = self.dice.choice(words)
        self._feed(word, forged=True)

    # --- the ledger -----------------------------------------------------------------------------------------

    def _feed(self, input: LedgerInput, *, forged: bool = False) -> None:
        before = {task for task, connection in self.accepted.items() if connection in self.honest}
        alive = {task for task in before if self.spark.runs(task)}
        if forged and isinstance(input, RegistrationArrived):
            input = RegistrationArrived(10**6 + len(self.forged), input.message)
        if isinstance(input, RegistrationArrived):
            self.waiting.setdefault(input.message.task_attempt_id, input.connection_id)
        self.book.feed(input)
        self._read(self.book.effects[self.seen :], alive)
        self.seen = len(self.book.effects)

    def _read(self, effects: Sequence[LedgerEffect], alive: set[int]) -> None:
        for effect in effects:
            match effect:
                case AttemptAccepted(attempt=attempt, connection_id=connection_id):
                    self.waiting.pop(attempt.task_attempt_id, None)
                    self.accepted[attempt.task_attempt_id] = connection_id
                    if connection_id not in self.honest:
                        beside = [task for task in alive if self.spark.places[task].partition == attempt.subtask]
                        demand(not beside, f"H75: {attempt} is accepted beside {beside}, and Spark never had it there")
                case SubtaskFailed(attempt=attempt, reason=reason):
                    connection_id = self.accepted.pop(attempt.task_attempt_id, 0)
                    killed = connection_id in self.honest and self.spark.runs(attempt.task_attempt_id)
                    demand(not killed, f"H75: {attempt} runs, and is given up: {reason}")
                case KillTask(task_attempt_id=task, place=place):
                    hit = self.spark.runs(task) and place in (None, self.spark.places[task])
                    demand(not hit, f"H75: task {task} runs, and is killed: {effect.reason}")
                case CancelJobs(reason=reason):
                    demand(False, f"H75: the job is cancelled: {reason}")
                case RefuseRegistration(task_attempt_id=task, connection_id=connection_id):
                    if self.waiting.get(task) == connection_id:
                        del self.waiting[task]
                    refused = connection_id in self.honest and self.spark.runs(task)
                    demand(not refused, f"H75: task {task} runs, and is refused: {effect.message}")
                case _:
                    pass

    def _hear_everything(self) -> None:
        while self.spark.bus:
            self._feed(self.spark.bus.pop(0))

    def _pass_time(self, seconds: float) -> None:
        """Let time pass. Each look is answered with the truth, and the facts that were posted come with it."""
        until = self.book.now + seconds
        while self.book.now < until:
            alive = {t for t, connection in self.accepted.items() if connection in self.honest and self.spark.runs(t)}
            self.book.wait(min(0.5, until - self.book.now))
            effects = self.book.effects[self.seen :]
            self._read(effects, alive)
            self.seen = len(self.book.effects)
            for query in effects:
                if isinstance(query, QueryStatus):
                    self._feed(self.spark.answer(query))


def check_forged_claims(seed: int) -> None:
    """Run one history; raise the violation that it finds."""
    History(seed).run()
