# SPDX-License-Identifier: Apache-2.0

"""Every input in every state of the attempt ledger: the table of its package, cell by cell (H3, H10-H13, H17, H19)."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from typing import ClassVar

from hypothesis import given as hypothesis_given
from hypothesis import settings

from protocol import attempts as a
from protocol import facts as f
from protocol.attempts.records import AttemptRecord, OperatorRecord, TaskRecord, WaitsFor
from protocol.attempts.table import AttemptState
from protocol.attempts.types import AttemptWord
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import TaskOutcome, TaskState
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import Register, RestoreMode
from tests.protocol.every_input import HUGE, WANDERINGS, Cell, Given, Walk, explore, members, wander

OPERATOR, OTHER, PARALLELISM = "words", "other", 2
WORDS = members(AttemptWord)
SCRATCH = frozenset({"_out", "_now", "out", "now"})  # has no meaning between two calls

LedgerGiven = Given[a.LedgerInput, a.LedgerEffect]

# The table of the package: from which state which input leads where. A missing pair is stale, and changes nothing.
_ALIVE_ROW: dict[str, AttemptState] = {
    "well": AttemptState.ENDING,
    "badly": AttemptState.OVER,
    "ConnectionExpired": AttemptState.OVER,
    "AttemptCondemned": AttemptState.OVER,
}
_SPARK_ROW = {outcome.name: AttemptState.OVER for outcome in TaskOutcome} | {"SUCCESS": AttemptState.FINISHED}
TABLE: dict[AttemptState, dict[str, AttemptState]] = {
    AttemptState.ACCEPTED: {"OperatorOpened": AttemptState.READY, **_ALIVE_ROW, **_SPARK_ROW},
    AttemptState.READY: {**_ALIVE_ROW, **_SPARK_ROW},
    AttemptState.ENDING: _SPARK_ROW,
    AttemptState.FINISHED: {"RESUBMITTED": AttemptState.OVER},
    AttemptState.OVER: {},
}
COLUMNS = ("OperatorOpened", *_ALIVE_ROW, *_SPARK_ROW)


class LedgerWalk(Walk[a.LedgerInput, a.LedgerEffect]):
    kinds = members(a.LedgerInput)
    errors = (LocalProtocolError, RemoteProtocolError)
    remembered: ClassVar = {LocalProtocolError: SCRATCH, RemoteProtocolError: SCRATCH}
    weights: ClassVar = {
        a.OperatorAdded: 0.2,
        a.OperatorRemoved: 0.2,
        f.ApplicationEnded: 0.15,
        a.GlobalFailureRaised: 0.4,
        f.ExecutorLost: 0.2,
        f.JobEnded: 0.4,
        a.RegistrationArrived: 3.0,
        f.TaskStarted: 3.0,
        f.TaskEnded: 2.0,
    }
    machine: a.AttemptLedger

    def build(self) -> a.AttemptLedger:
        self.mode = self.dice.choice(list(RestoreMode))
        self.jobs = self.tasks = 0
        self.connections = 1000
        self.waiting: set[int] = set()  # connections without an answer
        self.said: dict[ExecutionAttempt, str] = {}
        ledger = a.AttemptLedger(a.LedgerConfig(attempts_max=self.dice.choice((1, 2, None))))
        for name in self.dice.choice(((OPERATOR,), (OPERATOR, OTHER), (OTHER, OPERATOR), ())):
            ledger.handle(a.OperatorAdded(name, PARALLELISM), self.now)
        return ledger

    def fork(self) -> LedgerWalk:
        fork = super().fork()
        assert isinstance(fork, LedgerWalk)
        fork.waiting, fork.said = set(self.waiting), dict(self.said)
        return fork

    # --- the present state ---

    @property
    def operator(self) -> OperatorRecord | None:
        return self.operator_of(OPERATOR)

    def operator_of(self, operator_id: str) -> OperatorRecord | None:
        operator = self.machine._operators.get(operator_id)
        return None if operator is None else operator.record

    def entries(self, *states: AttemptState) -> list[AttemptRecord]:
        run = None if self.operator is None else self.operator.run
        return (
            [] if run is None else [entry for entry in run.entries() if entry.state in (states or tuple(AttemptState))]
        )

    def entry(self, task: int, operator_id: str = OPERATOR) -> AttemptRecord | None:
        operator = self.operator_of(operator_id)
        return None if operator is None or operator.run is None else operator.run.by_task.get(task)

    def held(self) -> list[int]:
        return [] if self.operator is None else list(self.operator.held)

    def records(self) -> list[TaskRecord]:
        return [task for stage in self.machine._engine.stages.values() for task in stage.tasks.values()]

    def stages(self) -> list[int]:
        """Return the running jobs, as far as they are known."""
        return sorted({stage for stages in self.machine._engine.job_stages.values() for stage in stages})

    # --- what fits ---

    def draw(self, kind: type, fits: bool) -> a.LedgerInput:
        if kind in WORDS:
            return self.draw_word(kind, fits)
        if kind in (f.TaskStarted, f.TaskEnded, a.RegistrationArrived):
            return self.draw_task(kind, fits)
        dice, books = self.dice, self.machine._engine
        if kind is a.OperatorAdded:
            missing = [name for name in (OPERATOR, OTHER) if name not in self.machine._operators]
            name = self.one_of(missing, list(self.machine._operators), fits)
            return a.OperatorAdded(name, PARALLELISM if self.perhaps(fits) else dice.choice((0, -1)))
        if kind is a.OperatorRemoved:
            return a.OperatorRemoved(OPERATOR if fits else "nobody")
        if kind is a.GlobalFailureRaised:
            return a.GlobalFailureRaised(OPERATOR if fits else "nobody", "it failed")
        if kind is f.JobStarted:
            self.jobs += 1
            stages = dice.choice(((2 * self.jobs,), (2 * self.jobs, 2 * self.jobs + 1)))
            return f.JobStarted(self.one_of((self.jobs,), (*books.job_stages, -1, 0), fits), stages)
        if kind is f.JobEnded:
            job = self.one_of(list(books.job_stages), (self.jobs + 7, -1, HUGE), fits)
            return f.JobEnded(job, dice.random() < 0.6, dice.choice(("", "cancelled")))
        if kind is f.StageSubmitted or kind is f.StageCompleted:
            stage = self.one_of(self.stages(), (99, -1, HUGE), fits)
            attempt = books.stages[stage].latest_attempt if stage in books.stages else 0
            attempt += self.one_of((0, 0, 0, 1), (-1, 5), fits)
            if kind is f.StageCompleted:
                return f.StageCompleted(stage, attempt, dice.choice((None, "fetch failed")))
            return f.StageSubmitted(
                stage,
                attempt,
                dice.choice((0, 2)),
                barrier=stage % 10 == 4,
                partitions=dice.choice((0, PARALLELISM, 1)),
            )
        if kind is f.StatusReported:
            return self.draw_status(fits)
        if kind is TimePassed:
            deadline = self.machine.next_deadline()
            if fits and deadline is not None:
                self.now = max(self.now, deadline)
            return TimePassed()
        if kind is f.ExecutorLost:
            return f.ExecutorLost(dice.choice(("e1", "e2")) if fits else "e9")
        simple: dict[type, a.LedgerInput] = {
            f.FactsDropped: f.FactsDropped(3),
            f.ApplicationEnded: f.ApplicationEnded(),
        }
        return simple[kind]

    def draw_status(self, fits: bool) -> f.StatusReported:
        dice = self.dice
        tasks = [entry.task_attempt_id for entry in self.entries()] + self.held() if fits else [-1, HUGE]
        jobs = list(self.machine._engine.job_stages) if fits else [-1, HUGE]
        return f.StatusReported(
            {job: dice.random() < 0.6 for job in jobs if dice.random() < 0.8},
            {task: dice.choice(list(TaskState)) for task in tasks if dice.random() < 0.5},
        )

    def draw_word(self, kind: type, fits: bool) -> a.LedgerInput:
        states = [AttemptState.ACCEPTED] if kind is a.OperatorOpened else [AttemptState.ACCEPTED, AttemptState.READY]
        fitting = [entry.task_attempt_id for entry in self.entries(*states)]
        others = [entry.task_attempt_id for entry in self.entries()] + self.held() + [-1, HUGE]
        task = self.one_of(fitting, others, fits)
        name = OPERATOR if self.perhaps(fits) else self.dice.choice(("nobody", OTHER))
        if kind is a.OperatorOpened:
            return a.OperatorOpened(name, task)
        if kind is a.OperatorEnded:
            return a.OperatorEnded(name, task, self.dice.choice(("", "", "boom")))
        if kind is a.ConnectionExpired:
            return a.ConnectionExpired(name, task)
        return a.AttemptCondemned(name, task, "not confirmed")

    def draw_task(self, kind: type, fits: bool) -> a.LedgerInput:
        dice = self.dice
        records = self.records()
        taken = {entry.task_attempt_id for entry in self.entries()} | set(self.held())
        if kind is f.TaskEnded:
            fitting = [task for task in records if task.end in (None, TaskOutcome.SUCCESS)]
        elif kind is f.TaskStarted:
            fitting = [task for task in records if not task.started and task.end is None]
        else:
            fitting = [task for task in records if task.task_attempt_id not in taken and task.end is None]
        fitting += [self.new_task()] if not fitting or dice.random() < 0.3 else []
        task = self.one_of(fitting, [*records, self.strange_task()], fits)
        stage = self.machine._engine.stages.get(task.stage_id)
        attempt = task.stage_attempt if task.stage_attempt is not None else stage.latest_attempt if stage else 0
        if kind is f.TaskStarted:
            return f.TaskStarted(*self.place(task, attempt), dice.random() < 0.15, dice.choice(("e1", "e2")))
        if kind is f.TaskEnded:
            outcomes = (
                [TaskOutcome.RESUBMITTED]
                if task.end is TaskOutcome.SUCCESS and dice.random() < 0.5
                else list(TaskOutcome)
            )
            return f.TaskEnded(*self.place(task, attempt), dice.choice(outcomes))
        self.connections += 1
        name = OPERATOR if self.perhaps(fits) else dice.choice(("nobody", OTHER))
        subtask = task.partition if self.perhaps(fits) else dice.choice((-1, PARALLELISM, HUGE))
        mode = self.mode if self.perhaps(fits) else dice.choice((0, 1, 7, -1))
        number = task.attempt_number if self.perhaps(fits) else -1
        message = Register(task.task_attempt_id, name, subtask, task.stage_id, number, mode, 2, "h", "3.11")
        return a.RegistrationArrived(self.connections, message)

    @staticmethod
    def place(task: TaskRecord, stage_attempt: int) -> tuple[int, int, int, int, int]:
        """Draw the common first fields of both facts about a task."""
        return task.task_attempt_id, task.stage_id, stage_attempt, task.partition, task.attempt_number

    def new_task(self) -> TaskRecord:
        """Draw a task of a running stage, mostly of a partition that no task runs."""
        self.tasks += 1
        stage = self.dice.choice([*self.stages()[-2:], *([8] if self.dice.random() < 0.1 else [])] or [2])
        alive = {entry.attempt.subtask for entry in self.entries() if entry.alive}
        idle = [place for place in range(PARALLELISM) if place not in alive]
        partition = self.dice.choice(idle if idle and self.dice.random() < 0.7 else range(PARALLELISM))
        number = sum(task.partition == partition and task.stage_id == stage for task in self.records())
        return TaskRecord(self.tasks, stage, partition, number)

    def strange_task(self) -> TaskRecord:
        dice = self.dice
        return TaskRecord(dice.choice((-1, HUGE)), dice.choice((-1, 2, 99)), dice.choice((0, -1, HUGE)), 0)

    def follow(self) -> a.LedgerInput | None:
        """Draw the next step of a run."""
        if self.operator is None:
            return self.draw(a.OperatorAdded, True)
        if not self.stages():
            return self.draw(f.JobStarted, True)
        steps: list[type] = [f.TaskStarted, a.RegistrationArrived]
        steps += [a.OperatorOpened, a.OperatorOpened] if self.entries(AttemptState.ACCEPTED) else []
        steps += [a.OperatorEnded] if self.entries(AttemptState.READY) else []
        steps += [f.TaskEnded] if self.entries(AttemptState.ENDING, AttemptState.FINISHED) else []
        steps += [f.StatusReported, TimePassed] if self.held() else []
        finished = {entry.attempt.subtask for entry in self.entries(AttemptState.FINISHED)}
        steps += [f.JobEnded] if len(finished) == PARALLELISM else []
        return self.draw(self.dice.choice(steps), True)

    # --- the table ---

    def state(self) -> Hashable:
        operator, ended = self.operator, self.machine._application_ended
        if operator is None or operator.run is None:
            return ended, operator is None, bool(self.machine._operators), operator and operator.reset_due is not None
        run = operator.run
        conflict = any(held.waits_for is WaitsFor.OTHER_RUN for held in operator.held.values())
        flags = (bool(operator.held), conflict, run.failed_cause is not None, run.barrier_failed is not None)
        return frozenset(entry.state for entry in run.entries()), flags, operator.asked_again_at is not None

    def cells(self, input: a.LedgerInput) -> list[Cell]:
        life = "ended" if self.machine._application_ended else self.life()
        cells: list[Cell] = [("life", life, type(input))]
        if isinstance(input, AttemptWord):
            operator = self.operator_of(input.operator_id)
            held = operator is not None and input.task_attempt_id in operator.held
            entry = self.entry(input.task_attempt_id, input.operator_id)
            if held:
                return [*cells, ("held", type(input))]
            column = type(input).__name__
            if isinstance(input, a.OperatorEnded):
                column = "badly" if input.failure else "well"
            return [*cells, ("table", None if entry is None else entry.state, column)]
        if isinstance(input, f.TaskEnded):
            entry = self.entry(input.task_attempt_id)
            run = None if self.operator is None else self.operator.run
            if entry is not None and run is not None and run.run_id == input.stage_id:
                return [*cells, ("table", entry.state, input.outcome.name)]
        return cells

    def life(self) -> str:
        run = None if self.operator is None else self.operator.run
        if run is None:
            return "no operator" if self.operator is None else "no run"
        return "failed" if run.failed_cause is not None else "run"

    def judge(self, cells: list[Cell], given: LedgerGiven) -> None:
        for cell in cells:
            match cell:
                case ("life", "ended", _):
                    allowed = {a.RefuseRegistration, a.ReportStale}
                    assert set(given.kinds) <= allowed, "the application has ended"
                    assert self.machine.next_deadline() is None
                case ("table", state, column):
                    self.judge_cell(state, column, given)
                case ("held", kind):
                    goes = kind in (a.ConnectionExpired, a.AttemptCondemned)
                    assert (a.RefuseRegistration in given.kinds) == goes
                    assert (given.kinds[0] is a.ReportStale) != goes
        self.judge_answers(given)
        for effect in given.effects:
            self.judge_life(effect)
        if isinstance(given.input, a.OperatorRemoved):  # another run of the same name begins with number 0
            name = given.input.operator_id
            self.said = {attempt: said for attempt, said in self.said.items() if attempt.operator_id != name}

    def judge_cell(self, state: AttemptState | None, column: str, given: LedgerGiven) -> None:
        task, name = given.input.task_attempt_id, getattr(given.input, "operator_id", OPERATOR)  # type: ignore[union-attr]
        target = None if state is None else TABLE[state].get(column)
        if target is not None:
            entry = self.entry(task, name)
            assert entry is not None
            assert entry.state is target, f"{state} and {column}"
            assert a.ReportStale not in given.kinds
            killed = [effect.task_attempt_id for effect in given.effects if isinstance(effect, a.KillTask)]
            assert (task in killed) == (column in ("ConnectionExpired", "AttemptCondemned"))
        elif not isinstance(given.input, f.TaskEnded):  # H3
            assert given.kinds[0] is a.ReportStale
            # A due look happens at any input, and may find nothing to ask.
            assert len(given.effects) > 1 or not given.changed(*SCRATCH, "look_at", "asked_again_at")
        elif state is not AttemptState.OVER and a.AttemptAccepted not in given.kinds:
            # If the end's place on the bus shows that a waiting task is a rerun, the task is accepted.
            entry = self.entry(task)
            assert entry is None or entry.attempt not in [getattr(effect, "attempt", None) for effect in given.effects]

    def judge_answers(self, given: LedgerGiven) -> None:
        """Check that each registration is answered once, and that none waits past its deadline (H19)."""
        if isinstance(given.input, a.RegistrationArrived) and given.error is None:
            self.waiting.add(given.input.connection_id)
        for effect in given.effects:
            if isinstance(effect, a.AttemptAccepted | a.RefuseRegistration):
                self.waiting.remove(effect.connection_id)
        held = sum(len(operator.record.held) for operator in self.machine._operators.values())
        assert len(self.waiting) == held

    def judge_life(self, effect: a.LedgerEffect) -> None:
        """Check the order: accepted, ready, finished or failed or revoked; a reset after the last (H10, H13)."""
        said = self.said
        match effect:
            case a.AttemptAccepted(attempt=attempt):
                assert attempt not in said
                said[attempt] = "accepted"
            case a.SubtaskReady(attempt):
                assert said[attempt] == "accepted"
                said[attempt] = "ready"
            case a.SubtaskFinished(attempt):
                assert said[attempt] in ("accepted", "ready")
                said[attempt] = "finished"
            case a.SubtaskFailed(attempt, _):
                assert said.get(attempt) != "failed"
                said[attempt] = "failed"
            case a.SubtaskReset(operator_id, subtask):
                left = [one for one, what in said.items() if one.operator_id == operator_id and what != "failed"]
                assert subtask not in [one.subtask for one in left]
            case a.OperatorReset(operator_id, _) | a.RunEnded(operator_id, _, _, _):
                left = [one for one, what in said.items() if one.operator_id == operator_id and what != "failed"]
                assert all(said[one] == "finished" for one in left)
                for one in left:
                    said[one] = "failed"

    def probe(self, rounds: int = 1) -> None:
        """Also visit all inputs about one attempt in each state."""
        super().probe(rounds)
        by_state = {entry.state: entry.attempt for entry in self.entries()}
        for state, attempt in by_state.items():
            if self.seen.cells["table", state, "RESUBMITTED"] > 5:
                continue
            task = attempt.task_attempt_id
            record = next(task for task in self.records() if task.task_attempt_id == attempt.task_attempt_id)
            place = self.place(record, record.stage_attempt or 0)
            said: list[a.LedgerInput] = [f.TaskEnded(*place, outcome) for outcome in TaskOutcome]
            said += [a.OperatorOpened(OPERATOR, task), a.ConnectionExpired(OPERATOR, task)]
            said += [a.OperatorEnded(OPERATOR, task, ""), a.OperatorEnded(OPERATOR, task, "boom")]
            for input in said:
                self.fork().give(input)

    def wait(self, rounds: int = 80) -> None:
        super().wait(8)
        for _ in range(rounds if self.waiting else 0):
            super().wait(1)
        assert not self.waiting, "a registration waits for ever"


LIVES = ("ended", "no operator", "no run", "run", "failed")
ALL_CELLS: list[Cell] = [
    *(("table", state, column) for state in AttemptState for column in COLUMNS),
    *(("table", None, column) for column in ("OperatorOpened", *_ALIVE_ROW)),
    *(("held", kind) for kind in WORDS),
    *(("life", life, kind) for life in LIVES for kind in members(a.LedgerInput)),
]


def test_every_input_of_a_ledger_has_a_generator() -> None:
    walk = LedgerWalk(Random(1))
    for kind in LedgerWalk.kinds:
        for fits in (True, False):
            assert type(walk.draw(kind, fits)) is kind


def test_no_cell_of_the_ledgers_table_is_left_out() -> None:
    explore(LedgerWalk, ALL_CELLS, members(a.LedgerEffect))


@settings(max_examples=60, print_blob=True)
@hypothesis_given(WANDERINGS)
def test_a_ledger_takes_every_input_or_refuses_it_unchanged(numbers: list[int]) -> None:
    # H3, H10, H13, H19
    wander(LedgerWalk, numbers)
