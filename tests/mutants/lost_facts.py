# SPDX-License-Identifier: Apache-2.0

"""The fourth hunter: seeded histories in which Spark's facts are lost silently, and nothing waits for them (H19).

In the simulation something always waits: a registration, the user of an action, the engine's own report that it has
dropped facts. Here nothing asks. A task ends, its connection stays up, its fact is lost, and only the ledger's regular
look at the status store can find out.
"""

from __future__ import annotations

import random

from protocol.attempts import AttemptAccepted, QueryStatus, RunEnded, SubtaskFailed, SubtaskFinished
from protocol.facts import StatusReported, TaskOutcome, TaskState
from tests.protocol.attempts_kit import Playbook, end, job, job_end, stage
from tests.simulation.checkers import demand

SUBTASKS = 4
ROUNDS = 6
"""The maximum number of launches of each subtask."""
LOOKS = 3
"""The number of regular looks that must find everything: for a task, for its job, one to spare."""


def check_lost_facts(seed: int) -> None:
    """Run one history; raise the violation that it finds."""
    dice = random.Random(seed)
    book = Playbook(SUBTASKS)
    states: dict[int, TaskState] = {}
    running: dict[int, int] = {}  # by subtask
    book.feed(job(), stage(tasks=SUBTASKS))
    for launch in range(ROUNDS):
        for subtask in range(SUBTASKS):
            if subtask not in running and dice.random() < 0.8:
                running[subtask] = task = SUBTASKS * launch + subtask
                book.ready(task, subtask, number=launch)
                states[task] = TaskState.RUNNING
        for subtask, task in list(running.items()):
            if dice.random() < 0.5:
                del running[subtask]
                states[task] = TaskState.ENDED
                if dice.random() < 0.5:
                    book.feed(end(task, subtask, number=task // SUBTASKS))
        _pass_time(book, states, job_active=True)
        alive = _alive(book)
        demand(alive == set(running.values()), f"H19: the ledger takes {alive} for alive, {running} are")
    for subtask, task in running.items():
        states[task] = TaskState.SUCCEEDED
        if dice.random() < 0.5:
            book.feed(end(task, subtask, TaskOutcome.SUCCESS, number=task // SUBTASKS))
    if dice.random() < 0.5:
        book.feed(job_end())
    _pass_time(book, states, job_active=False)
    ends = [effect for effect in book.effects if isinstance(effect, RunEnded)]
    demand(len(ends) == 1, f"H19: the job has ended, and its run has ended {len(ends)} times")


def _pass_time(book: Playbook, states: dict[int, TaskState], *, job_active: bool) -> None:
    """Let enough time pass for ``LOOKS`` regular looks; each finds the truth."""
    until = book.now + LOOKS * book.config.audit_every_s
    while book.now < until:
        before = len(book.effects)
        book.wait(min(1.0, until - book.now))
        for effect in book.effects[before:]:
            if isinstance(effect, QueryStatus):
                jobs = dict.fromkeys(effect.job_ids, job_active)
                book.feed(StatusReported(jobs, {task: states[task] for task in sorted(effect.task_attempt_ids)}))


def _alive(book: Playbook) -> set[int]:
    alive: set[int] = set()
    for effect in book.effects:
        if isinstance(effect, AttemptAccepted):
            alive.add(effect.attempt.task_attempt_id)
        elif isinstance(effect, SubtaskFailed | SubtaskFinished):
            alive.discard(effect.attempt.task_attempt_id)
    return alive
