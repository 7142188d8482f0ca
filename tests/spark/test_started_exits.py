# SPDX-License-Identifier: Apache-2.0

"""A started sidecar is stopped when the interpreter ends, however that comes, and nothing keeps it from ending."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.spark.program import Program, wait_until_nobody_is_left

pytestmark = [pytest.mark.spark, pytest.mark.long]

IN_A_THREAD = "a job in a thread"
CLOSED = "the sidecar was closed while this job was running"


def exiting(job: str, how: str) -> Program:
    return Program("-m", "tests.spark.exit_program", job, how)


@pytest.mark.parametrize(
    ("job", "how", "status"),
    [
        (IN_A_THREAD, "return", 0),
        (IN_A_THREAD, "raise", 1),
        (IN_A_THREAD, "SIGTERM", 5),  # the program has a handler that exits
        ("a job in a pool", "return", 0),
    ],
)
def test_the_end_of_the_interpreter_stops_it_and_its_job(job: str, how: str, status: int) -> None:  # H120
    with exiting(job, how) as program:
        program.read_until("they talk")
        program.ends_with(status)
        wait_until_nobody_is_left(program)
    told = [line for line in program.said.splitlines() if line.startswith("told ")]
    assert told == ["told ('run_ended', False)", "told ('close',)"], program.said
    assert CLOSED in program.said, program.said
    assert ("LookupError: nobody catches this" in program.said) is (how == "raise")
    assert "Exception ignored" not in program.said


def test_it_is_stopped_after_spark_was() -> None:  # H120
    with exiting("a job after the SparkContext", "return") as program:
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert "told ('close',)" in program.said
    assert "another one raised: the SparkContext of this sidecar has stopped, so no action can run" in program.said
    assert "Traceback" not in program.said


def test_one_ctrl_c_ends_the_wait_for_a_coordinator() -> None:  # H120
    with exiting("the end of a run waits", "return") as program:
        program.read_until("it waits")
        program.process.send_signal(signal.SIGINT)
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert "told ('run_ended', True)" in program.said
    assert "told ('close',)" in program.said
    assert "Traceback" not in program.said


@pytest.mark.parametrize("job", ["close blocks the loop", "close waits for a thread"])
def test_code_that_never_returns_does_not_keep_the_interpreter(job: str) -> None:  # H70, H120
    with exiting(job, "return") as program:
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert ("sidecar stopped with an error" in program.said) is (job == "close blocks the loop")
    assert "exit_program.py" in program.said  # the place is named


def test_an_end_without_python_leaves_nothing_either() -> None:  # H120
    with exiting(IN_A_THREAD, "SIGKILL") as program:
        program.read_until("they talk")
        program.ends_with(-signal.SIGKILL)
        wait_until_nobody_is_left(program)
    assert "told ('close',)" not in program.said


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_process_stops_nothing() -> None:  # H120
    with exiting("no job", "fork") as program:
        program.read_until("the program ends")
        assert "told" not in program.said
        program.ends_with(0)
        wait_until_nobody_is_left(program)
    assert "the forked process ended with 0" in program.said
    assert "sidecar stopped with an error" not in program.said  # as if it reached for threads that are not there
    assert "it runs: True, ['op']" in program.said
    assert "told ('close',)" in program.said
