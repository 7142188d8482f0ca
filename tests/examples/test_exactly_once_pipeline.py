"""The exactly-once pipeline: its two ends, its faults and its proof each by itself, and the whole on real Spark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import structlog

from examples import exactly_once_pipeline
from examples.exactly_once import trial
from examples.exactly_once.driver import DriverOptions
from examples.exactly_once.faults import (
    COORDINATOR,
    DEAF,
    DRIVER,
    KINDS,
    TASK,
    WHAT,
    CoordinatorFault,
    Fault,
    FaultyCoordinator,
    plan_faults,
)
from examples.exactly_once.pipeline import NumberCoordinator, NumberSubtask
from examples.exactly_once.proof import Proof, judge
from examples.exactly_once.trial import Outcome, Trial, TrialOptions
from protocol.attempts import FailureKind, FailureReason
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.errors import GatewayFull
from protocol.ids import ExecutionAttempt
from protocol.messages import RestoreMode, SubtaskState
from tests.examples.conftest import ROOT

NUMBERS = 10


class Gateway:
    """Takes down what is sent; refuses when it is full."""

    def __init__(self, subtask: int, attempt: int = 0) -> None:
        self.attempt = ExecutionAttempt("numbers", subtask, attempt, 100 * attempt + subtask)
        self.events: list[Any] = []
        self.full = False

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False) -> None:
        if self.full:
            raise GatewayFull("full")
        self.events.append(event)

    @property
    def numbers(self) -> list[int]:
        return [event[1] for event in self.events if event[0] == "number"]


class CoordinatorWorld:
    """A context that keeps what is to be called later, and what the job was failed for."""

    operator_id = "numbers"
    parallelism = 2
    mode = RestoreMode.STREAMING
    log = structlog.get_logger()

    def __init__(self) -> None:
        self.later: list[Callable[[], Awaitable[None]]] = []
        self.failures: list[BaseException] = []

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self.later.append(handler)

    def fail_job(self, cause: BaseException) -> None:
        self.failures.append(cause)

    async def tick(self) -> None:
        handlers, self.later = self.later, []
        for handler in handlers:
            await handler()


class SubtaskWorld:
    """A context of a task: takes down what is sent, and lets a test act in the middle of it."""

    operator_id = "numbers"
    subtask = 1
    attempt = 0
    checkpoint_id = -1

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.before_send: list[Callable[[], None]] = []

    def send_event(self, event: Any) -> None:
        while self.before_send:
            self.before_send.pop()()
        self.events.append(event)

    def wait_for_event(self, timeout_s: float) -> int:
        return 0

    @property
    def numbers(self) -> list[Any]:
        return [event for event in self.events if event[0] in ("number", "wrong")]


async def a_coordinator(sink: Path, **changed: Any) -> tuple[NumberCoordinator, CoordinatorWorld, list[str]]:
    wrong: list[str] = []
    coordinator = NumberCoordinator(NUMBERS, str(sink), changed.get("on_wrong", wrong.append))
    return coordinator, await a_start_of(coordinator), wrong


async def a_start_of(coordinator: NumberCoordinator) -> CoordinatorWorld:
    world: Any = CoordinatorWorld()
    await coordinator.start(world)
    assert isinstance(world, CoordinatorWorld)
    return world


async def ready(coordinator: NumberCoordinator, subtask: int, attempt: int = 0) -> Gateway:
    gateway: Any = Gateway(subtask, attempt)
    await coordinator.subtask_ready(subtask, gateway)
    assert isinstance(gateway, Gateway)
    return gateway


A_STATE = b'{"0": [9, 9], "1": [0, 0]}\n'
FAILED = FailureReason(FailureKind.FAILED, "it crashed")


# --- the coordinator ----------------------------------------------------------------------------------------------


async def test_one_subtask_goes_back_to_the_cut_and_the_coordinator_with_it(tmp_path: Path) -> None:
    """H13, H18: what was sent to it after the cut is sent again, what it sent will come again; the other goes on."""
    coordinator, world, wrong = await a_coordinator(tmp_path)
    gateways = [await ready(coordinator, subtask) for subtask in range(2)]
    await world.tick()
    await coordinator.handle_event_from_operator(0, 0, ["number", 1])
    await coordinator.checkpoint_coordinator(5)
    await world.tick()
    await coordinator.notify_checkpoint_complete(5)
    await coordinator.handle_event_from_operator(0, 0, ["number", 2])
    await world.tick()

    await coordinator.subtask_failed(0, 0, FAILED)
    await coordinator.subtask_reset(0, 5)
    again = await ready(coordinator, 0, attempt=1)
    await coordinator.handle_event_from_operator(0, 1, ["number", 2])
    await world.tick()

    assert gateways[0].numbers == [1, 2, 3]
    assert again.numbers == [2]
    assert gateways[1].numbers == [1, 2, 3, 4]
    assert wrong == []


async def test_an_aborted_cut_is_forgotten_and_an_older_one_kept_until_a_newer_is_complete(tmp_path: Path) -> None:
    """H18, H45: 5 is complete, 6 was given up; before any of them the way back leads to the beginning."""
    coordinator, world, _ = await a_coordinator(tmp_path)
    await ready(coordinator, 0)
    positions = []
    for checkpoint_id in (5, 6, 7):
        await world.tick()
        await coordinator.checkpoint_coordinator(checkpoint_id)
        if checkpoint_id == 5:
            await coordinator.notify_checkpoint_complete(5)
        if checkpoint_id == 6:
            await coordinator.notify_checkpoint_aborted(6)
    for back_to in (5, -1):
        await coordinator.subtask_failed(0, 0, FAILED)
        await coordinator.subtask_reset(0, back_to)
        gateway = await ready(coordinator, 0, attempt=1)
        await world.tick()
        positions.append(gateway.numbers)

    assert positions == [[2], [1]]


async def test_a_new_coordinator_goes_on_from_the_bytes_of_the_old_one(tmp_path: Path) -> None:
    """H52: restored before start."""
    first, world, _ = await a_coordinator(tmp_path)
    await ready(first, 1)
    await world.tick()
    await first.handle_event_from_operator(1, 0, ["number", 1])
    state = await first.checkpoint_coordinator(8)
    wrong: list[str] = []
    second = NumberCoordinator(NUMBERS, str(tmp_path), wrong.append)

    await second.reset_to_checkpoint(8, state)
    world = await a_start_of(second)
    gateway = await ready(second, 1)
    await world.tick()
    await second.handle_event_from_operator(1, 0, ["number", 2])

    assert (gateway.numbers, wrong) == ([2], [])


async def test_a_number_that_is_not_the_next_one_is_told(tmp_path: Path) -> None:
    """H30: doubled, lost, and what a subtask has found."""
    coordinator, _, wrong = await a_coordinator(tmp_path)
    await ready(coordinator, 0)

    for event in (["number", 1], ["number", 1], ["number", 3], ["wrong", "took 5 from the coordinator after 3"]):
        await coordinator.handle_event_from_operator(0, 0, event)

    assert wrong == [
        "the coordinator took 1 from subtask 0 after 1",
        "the coordinator took 3 from subtask 0 after 1",
        "subtask 0 took 5 from the coordinator after 3",
    ]


async def test_a_full_gateway_gets_its_number_later_and_holds_up_nobody(tmp_path: Path) -> None:
    """H27."""
    coordinator, world, _ = await a_coordinator(tmp_path)
    slow, quick = [await ready(coordinator, subtask) for subtask in range(2)]
    slow.full = True
    await world.tick()
    slow.full = False
    for _ in range(NUMBERS + 3):
        await world.tick()

    assert slow.numbers == quick.numbers == list(range(1, NUMBERS + 1))


# --- the subtask --------------------------------------------------------------------------------------------------


def a_subtask(sink: Path, state: bytes | None = None, numbers: int = 1) -> tuple[NumberSubtask, SubtaskWorld]:
    operator = NumberSubtask(numbers, str(sink))
    world: Any = SubtaskWorld()
    operator.open(world, state)
    assert isinstance(world, SubtaskWorld)
    return operator, world


def test_a_snapshot_in_the_middle_of_a_send_has_neither_the_event_nor_its_count(tmp_path: Path) -> None:
    """H31: the event leaves after the snapshot, and after a restore it is sent as the next one."""
    operator, world = a_subtask(tmp_path)
    operator.handle_event(["number", 1])
    states: list[bytes] = []
    world.before_send.append(lambda: states.append(operator.snapshot_state(3)))

    operator.process(iter(()))
    states.append(operator.final_state())
    operator.close()

    assert [json.loads(state) for state in states] == [[0, 1], [1, 1]]
    assert world.numbers == [["number", 1]]
    restored, its_world = a_subtask(tmp_path, states[0])
    restored.process(iter(()))
    restored.close()
    assert its_world.numbers == [["number", 1]]


def test_a_subtask_that_had_ended_sends_nothing_again(tmp_path: Path) -> None:
    """H47."""
    operator, world = a_subtask(tmp_path, json.dumps([1, 1]).encode())

    operator.process(iter(()))
    operator.close()

    assert world.numbers == []


def test_a_subtask_tells_of_a_number_that_is_not_the_next_one(tmp_path: Path) -> None:
    """H22."""
    operator, world = a_subtask(tmp_path)

    for number in (1, 2, 2):
        operator.handle_event(["number", number])
    operator.close()

    assert world.numbers == [["wrong", "took 2 from the coordinator after 2"]]


# --- the faults ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_faults_in_the_order_in_which_they_are_due() -> None:
    plans = [plan_faults(seed, KINDS, 4) for seed in range(200)]

    assert plans == [plan_faults(seed, KINDS, 4) for seed in range(200)]
    assert {tuple(fault.kind for fault in plan) for plan in plans} == set(permutations(KINDS))
    assert all(first.at <= second.at for plan in plans for first, second in pairwise(plan))


def a_fault(kind: str, at: float, *, by_exception: bool = True) -> Fault:
    return Fault(kind, at, 0.0, 0, by_exception)


async def a_faulty(sink: Path, *faults: Fault) -> tuple[FaultyCoordinator, CoordinatorWorld, list[str]]:
    struck: list[str] = []
    coordinator = FaultyCoordinator(NUMBERS, str(sink), faults, on_wrong=pytest.fail, on_fault=struck.append)
    return coordinator, await a_start_of(coordinator), struck


async def test_a_fault_is_due_when_its_part_of_the_numbers_has_passed(tmp_path: Path) -> None:
    coordinator, world, struck = await a_faulty(tmp_path, a_fault(COORDINATOR, 0.1), a_fault(COORDINATOR, 0.15))
    for subtask in range(2):
        await ready(coordinator, subtask)
    await world.tick()
    assert coordinator.progress == 0.05

    with pytest.raises(CoordinatorFault):
        await world.tick()
    assert struck == [COORDINATOR]
    with pytest.raises(CoordinatorFault):
        await world.tick()

    assert len(world.later) == 1  # it goes on after the failure


async def test_the_coordinator_may_also_fail_the_job_without_an_exception(tmp_path: Path) -> None:
    """H8."""
    coordinator, world, struck = await a_faulty(tmp_path, a_fault(COORDINATOR, 0.0, by_exception=False))

    await world.tick()

    assert struck == [COORDINATOR]
    assert isinstance(world.failures[0], CoordinatorFault)
    assert coordinator.gateways == {}


@pytest.mark.parametrize(("kind", "way"), [(TASK, FailureKind.FAILED), (DEAF, FailureKind.CONFIRMATION_TIMEOUT)])
async def test_an_attempt_that_fails_for_something_else_leaves_its_fault_to_the_next(
    tmp_path: Path, kind: str, way: FailureKind
) -> None:
    coordinator, world, struck = await a_faulty(tmp_path, a_fault(kind, 0.0))
    await world.tick()  # nobody is there yet
    first = await ready(coordinator, 0)
    await world.tick()
    await coordinator.subtask_failed(0, 0, FailureReason(FailureKind.GLOBAL_FAILURE, "all of them"))
    await coordinator.reset_to_checkpoint(-1, None)
    second = await ready(coordinator, 0, attempt=1)
    await world.tick()
    assert struck == []

    await coordinator.subtask_failed(0, 1, FailureReason(way, "at last"))

    assert struck == [kind]
    for gateway in (first, second):
        assert ["fault", kind, 0.0] in gateway.events


async def test_one_that_has_almost_ended_is_spared_for_the_last_one(tmp_path: Path) -> None:
    """Or it would end before it could fail."""
    coordinator, world, _ = await a_faulty(tmp_path, a_fault(TASK, 0.4))
    await coordinator.reset_to_checkpoint(3, A_STATE)
    gateways = [await ready(coordinator, subtask) for subtask in range(2)]

    await world.tick()

    assert ["fault", TASK, 0.0] in gateways[1].events
    assert gateways[0].numbers == [10]


# --- the proof ----------------------------------------------------------------------------------------------------


def a_checkpoint(**changed: Any) -> CompletedCheckpoint:
    """Two subtasks with three numbers each way, all of them done."""
    state = json.dumps({"0": changed.get("position", [3, 3]), "1": [3, 3]}).encode() + b"\n"
    return CompletedCheckpoint(
        9,
        2,
        state,
        {
            0: SubtaskSnapshot((SubtaskState(0, json.dumps(changed.get("subtask", [3, 3])).encode()),)),
            1: SubtaskSnapshot((SubtaskState(1, b"[3, 3]"),)),
        },
    )


ROWS = [f"{subtask} {direction} {number}" for number in (1, 2, 3) for subtask in (0, 1) for direction in ("up", "down")]


def files_of(*parts: list[str]) -> list[tuple[str, str]]:
    return [(f"part-{index}", "".join(f"{row}\n" for row in rows)) for index, rows in enumerate(parts)]


def test_the_proof_holds_if_every_number_is_once_everywhere() -> None:
    proof = judge(a_checkpoint(), files_of(ROWS[:5], ROWS[5:]), 3, 2)

    assert proof.problems == []
    assert [row[1:] for row in proof.rows] == [(3, 3, 3, 3, 3, 3)] * 2
    assert (proof.files, proof.checkpoint_id) == (2, 9)


@pytest.mark.parametrize(
    ("checkpoint", "rows", "problem"),
    [
        ({"position": [2, 3]}, ROWS, "subtask 0: not all of the two sides and the sink are at 3"),
        ({"subtask": [3, 2]}, ROWS, "subtask 0: not all of the two sides and the sink are at 3"),
        ({}, ROWS[1:], "subtask 0: up: 1 numbers are missing in the sink, 1"),
        ({}, [*ROWS, "1 down 2"], "subtask 1: down: 1 numbers are doubled in the sink, 2"),
        ({}, ROWS[::-1], "subtask 0: down: the numbers in the sink are out of order"),
        ({}, [*ROWS, "2 up 1"], "the sink has rows of subtask 2, up"),
        ({}, [*ROWS, "1 up"], "part-0 has a row that nobody wrote: '1 up'"),
    ],
    ids=["coordinator", "subtask", "missing", "doubled", "order", "stranger", "torn"],
)
def test_the_proof_finds_what_is_wrong(checkpoint: dict[str, Any], rows: list[str], problem: str) -> None:
    assert problem in judge(a_checkpoint(**checkpoint), files_of(rows), 3, 2).problems


def test_a_file_that_ends_within_a_row_is_no_proof() -> None:
    [(name, content)] = files_of(ROWS)

    proof = judge(a_checkpoint(), [(name, content[:-1])], 3, 2)

    assert proof.problems == ["part-0 ends in the middle of a row"]


# --- the trial ----------------------------------------------------------------------------------------------------


def a_trial(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, **changed: Any) -> Trial:
    """A trial whose driver is ``program``: it finds its options in ``options``, and the journal in ``journal``."""
    script = folder / "driver.py"
    head = """
        import json, os, signal, sys, time
        from examples.exactly_once.driver import DriverOptions, Journal
        options = DriverOptions.from_json(sys.argv[1])
        journal = Journal(options.journal)
        kinds = [fault.kind for fault in options.faults]
        """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(program))
    monkeypatch.setattr(trial, "DRIVER_COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(trial, "prove", lambda *_: Proof([], 0, 1, []))
    options = TrialOptions(
        seed=1,
        master="local[1,2]",
        parallelism=1,
        numbers=5,
        faults=changed.get("faults", KINDS),
        timeout_s=changed.get("timeout_s", 60.0),
        folder=folder,
        url=str(folder),
    )
    return Trial(options, say=lambda text: None)


def test_the_next_driver_gets_the_faults_that_have_not_come_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H52: a driver that dies by SIGKILL is followed by one that goes on."""
    program = """
        if "driver" in kinds:
            journal.write(fault="deaf")
            os.kill(os.getpid(), signal.SIGKILL)
        journal.write(wrong=",".join(sorted(kinds)))
        journal.write(statistics={"checkpoints_completed": 4})
        """

    outcome = a_trial(tmp_path, monkeypatch, program).run()

    assert outcome.struck == [DEAF, DRIVER]
    assert outcome.wrong == ["coordinator,task"]
    assert sorted(outcome.missed) == [COORDINATOR, TASK]
    assert (outcome.drivers, outcome.checkpoints) == (2, 4)


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ('sys.exit("no such thing")', ["driver 1 ended with status 1", "no such thing"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["driver 1 ended with status -9"]),
    ],
)
def test_a_driver_that_ends_otherwise_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, wrong: list[str]
) -> None:
    outcome = a_trial(tmp_path, monkeypatch, program, faults=()).run()

    assert (outcome.proof, outcome.wrong) == (None, wrong)


def test_a_driver_that_hangs_is_killed_and_its_last_words_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H48."""
    program = 'print("waiting for nothing", flush=True); signal.pause()'

    outcome = a_trial(tmp_path, monkeypatch, program, faults=(), timeout_s=3.0).run()

    assert outcome.wrong == ["driver 1 did not end within 3 s", "waiting for nothing"]


def test_what_a_driver_is_told_survives_the_command_line() -> None:
    options = DriverOptions("local[4,8]", 4, 400, "/a b", "memory://x", "/j", plan_faults(1, KINDS, 4))

    assert DriverOptions.from_json(options.to_json()) == options


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallelism", "0"], "--parallelism must be more than 0, not 0"),
        (["--runs", "-1"], "--runs must be more than 0, not -1"),
        (["--faults", "task,flood"], "--faults: 'flood' is none of task, deaf, coordinator, driver and none"),
        (["--master", "local[4]"], "--master: local[4] retries no task"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exactly_once_pipeline.main(arguments)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_storage_that_was_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another run has left would be restored, and prove nothing."""
    (tmp_path / "seed-4" / "sink").mkdir(parents=True)

    with pytest.raises(SystemExit):
        exactly_once_pipeline.main(["--storage", str(tmp_path), "--seed", "3", "--runs", "2"])

    assert "seed-4 has been used" in capsys.readouterr().err


def test_many_runs_end_at_the_first_that_is_wrong_and_name_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def try_once(options: Any, seed: int, *, alone: bool) -> Outcome:
        tried.append(seed)
        return Outcome(list(KINDS), [], 2, 30, 9.5, None, ["2 is doubled"] if seed == 12 else [])

    monkeypatch.setattr(exactly_once_pipeline, "try_once", try_once)

    assert exactly_once_pipeline.main(["--seed", "10", "--runs", "5"]) == 1
    said = capsys.readouterr().out
    assert tried == [10, 11, 12]
    assert "3/5  seed 12  WRONG    9.5 s  task, deaf, coordinator, driver" in said
    assert "again: --seed 12" in said
    assert said.splitlines()[-1] == "exactly once: no"

    assert exactly_once_pipeline.main(["--seed", "0", "--runs", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "exactly once: yes"


# --- on a real Spark ----------------------------------------------------------------------------------------------

# Two drivers start one after the other, and a deaf worker takes Spark seconds to kill: more than the other examples.
SPARK_TIMEOUT_S = 300


def started_pipeline(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """The example as a program of its own, whose temporary files lie in ``folder``."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "exactly_once_pipeline.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.spark
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_every_number_goes_exactly_once_though_everything_dies_once(tmp_path: Path) -> None:
    """The invariant: H13, H15, H18, H25, H31, H40 to H45, H50, H52, in one run with every kind of fault."""
    with started_pipeline(tmp_path, "--seed", 1, "--numbers", 300, "--timeout", SPARK_TIMEOUT_S / 2) as process:
        said, happened = process.communicate(timeout=SPARK_TIMEOUT_S)

    assert (process.returncode, said.splitlines()[-1]) == (0, "exactly once: yes"), said + happened
    assert re.findall(r"^ +[0-3] +300 +300 +300 +300 +300 +300$", said, re.MULTILINE) != []
    for what in WHAT.values():
        assert what in happened
    assert "last of 2 drivers" in said
    assert "Traceback" not in happened
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_ctrl_c_ends_the_drivers_and_leaves_no_file(tmp_path: Path) -> None:
    with started_pipeline(tmp_path, "--faults", "none", "--numbers", 10**6, "--seed", 5) as process:
        wait_until(lambda: any(tmp_path.glob("exactly-once-5-*/checkpoints/**/*.hgc")))

        process.send_signal(signal.SIGINT)
        _, happened = process.communicate(timeout=SPARK_TIMEOUT_S)

    assert process.returncode == 130
    assert happened.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SPARK_TIMEOUT_S / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
