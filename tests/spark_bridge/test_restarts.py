# SPDX-License-Identifier: Apache-2.0

"""H15: which failures restart the action, and when it is given up."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import structlog.testing

from actors.coordination import CheckpointFailed, ResetNotSupported
from protocol.restart import NO_RESTART, FixedDelay
from spark_bridge.common.errors import RestartsExhausted
from spark_bridge.driver.restarts import Restarter, run_blocking
from spark_bridge.storage import StorageFenced


def unmarked(action_id: str) -> AbstractContextManager[None]:
    return nullcontext()


def never(action_id: str, cause: str) -> None:
    raise AssertionError("not interrupted")


class Runs:
    """Stands in for a sidecar: the test sets what has failed and what is not committed."""

    def __init__(self) -> None:
        self.failed = 0
        self.cause: BaseException | None = None
        self.uncommitted = ""
        self.settled = 0
        self.ended = False
        self.fenced: Exception | None = None
        self.rescaled: int | None = None
        self.ran = False

    def begin(self) -> str:
        return "an action"

    def end(self) -> None:
        self.ended = True

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        return self.failed, self.cause

    async def settle(self) -> str:
        self.settled += 1
        return self.uncommitted


async def begun(restart: FixedDelay) -> tuple[Runs, Restarter]:
    runs = Runs()
    restarter = Restarter(runs, restart)
    await restarter.begin()
    return runs, restarter


async def test_a_successful_action_is_done_when_its_output_is_committed() -> None:
    runs, restarter = await begun(FixedDelay())
    assert await restarter.succeeded() is None
    assert runs.settled == 1


async def test_no_restart_is_named_as_the_user_writes_it() -> None:
    runs, restarter = await begun(NO_RESTART)
    runs.failed = 1
    with pytest.raises(RestartsExhausted, match="the action failed, and NO_RESTART allows no restart; "):
        await restarter.failed(RuntimeError("lost"))


async def test_output_that_could_not_be_committed_is_produced_again() -> None:
    # H40, H45: readers do not see rows that no completed checkpoint covers
    runs, restarter = await begun(FixedDelay(restarts_max=1, delay_s=0.25))
    runs.uncommitted = "storage: the disk is full"
    assert await restarter.succeeded() == 0.25
    await restarter.begin()
    with pytest.raises(RestartsExhausted, match="disk is full") as raised:
        await restarter.succeeded()
    assert isinstance(raised.value.__cause__, CheckpointFailed)


async def test_a_coordinator_that_failed_after_a_successful_run_is_a_failure() -> None:
    # H7: for example an exception in notify_checkpoint_complete of the final checkpoint
    runs, restarter = await begun(FixedDelay(restarts_max=0))
    runs.failed, runs.cause = 1, OSError("cannot publish")
    with pytest.raises(RestartsExhausted, match="OSError: cannot publish"):
        await restarter.succeeded()


async def test_a_failure_before_this_start_does_not_count() -> None:
    runs = Runs()
    runs.failed = 3
    restarter = Restarter(runs, FixedDelay())
    await restarter.begin()
    assert await restarter.succeeded() is None
    await restarter.begin()
    with pytest.raises(ValueError, match="mine"):
        await restarter.failed(ValueError("mine"))


async def test_a_failed_run_is_started_again_until_it_is_given_up() -> None:
    runs = Runs()
    restarter = Restarter(runs, FixedDelay(restarts_max=2, delay_s=0.5))
    for delay_s in (0.5, 0.5):
        await restarter.begin()
        runs.failed += 1
        assert await restarter.failed(RuntimeError("job aborted\n  a long trace")) == delay_s
    await restarter.begin()
    runs.failed += 1
    error = RuntimeError("job aborted\n  a long trace")
    with pytest.raises(RestartsExhausted, match=r"again after 2 restarts.*RuntimeError: job aborted\. It") as raised:
        await restarter.failed(error)
    assert raised.value.__cause__ is error


async def given_up(*texts: str) -> str:
    """The text of the error after these failures, one of each start."""
    runs = Runs()
    restarter = Restarter(runs, FixedDelay(restarts_max=len(texts) - 1))
    for text in texts:
        await restarter.begin()
        runs.failed += 1
        try:
            await restarter.failed(RuntimeError(text))
        except RestartsExhausted as error:
            return str(error)
    raise AssertionError("a restart is allowed after the last one")


async def test_failures_that_repeat_are_said_to_at_the_first_repetition_and_at_the_end() -> None:
    with structlog.testing.capture_logs() as logs:
        said = await given_up(
            "lost", "task 7 divides by zero", *["task 9 divides by zero"] * 2, "task 12 divides by zero"
        )
    assert [line["error"] for line in logs if "hint" in line] == ["RuntimeError: task 9 divides by zero"]
    assert "It failed 4 times in the same way" in said
    assert said.endswith("with run(..., restart=NO_RESTART)")
    assert (await given_up("one", "the other")).endswith("RuntimeError: the other")
    assert (await given_up("the only one")).endswith("RuntimeError: the only one")


async def test_a_fenced_application_is_not_restarted() -> None:
    # H50: a later application has taken the storage over; two must not continue from the same checkpoint
    runs, restarter = await begun(FixedDelay(restarts_max=None))
    runs.failed, runs.fenced = 1, StorageFenced("taken over by application number 2")
    with pytest.raises(StorageFenced, match="number 2"):
        await restarter.failed(RuntimeError("job aborted"))


async def test_a_run_that_is_refused_for_its_coordinator_is_not_started_again() -> None:  # H68
    runs, restarter = await begun(FixedDelay(restarts_max=9, delay_s=0.0))
    runs.failed, runs.cause = 1, OSError("the first cause")
    first = ValueError("the job failed")
    assert await restarter.failed(first) == 0.0
    await restarter.begin()
    runs.failed, runs.cause = 2, ResetNotSupported("pass the class")
    with pytest.raises(ResetNotSupported) as raised:
        await restarter.failed(ValueError("the job was cancelled"))
    assert raised.value.__cause__ is first


async def test_the_text_names_what_failed_in_the_jvm_not_the_call_that_raised() -> None:
    # H69: the cause of a failed job is the second line of what Py4J raises
    runs, restarter = await begun(FixedDelay(restarts_max=0))
    runs.failed = 1
    error = RuntimeError(
        "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
        ": org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 0 cancelled operator 'op': too many kills\n"
        "\tat org.apache.spark.errors.SparkCoreErrors$.sparkJobCancelled\n"
    )
    with pytest.raises(RestartsExhausted, match=r"RuntimeError: org\.apache.*operator 'op': too many kills$"):
        await restarter.failed(error)


@pytest.mark.parametrize(
    "text",
    [
        "An exception was thrown from the Python worker:\n{traceback}",
        "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most "
        "recent failure: Lost task 0.3 in stage 0.0 (TID 5): org.apache.spark.api.python.PythonException: {traceback}\n"
        "\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)\n"
        "\nDriver stacktrace:\n"
        "Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n",
    ],
)
async def test_the_text_names_the_exception_of_a_task_not_the_beginning_of_its_traceback(text: str) -> None:
    runs, restarter = await begun(FixedDelay(restarts_max=0))
    runs.failed = 1
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "job.py", line 3, in work\n'
        "    int(text)\n"
        "KeyError: 'first'\n"
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "job.py", line 5, in work\n'
        "    raise\n"
        "    ^^^^^\n"
        "job.NoRows: the table has no rows: fill it\n"
        'CONTEXT:  COPY staged, line 1, column b: "x"\n'
        "  ^\n"
    )
    shown = r'job\.NoRows: the table .* fill it CONTEXT:  COPY staged, line 1, column b: "x"'
    with pytest.raises(RestartsExhausted, match=rf"the last failure was RuntimeError: {shown}$"):
        await restarter.failed(RuntimeError(text.format(traceback=traceback)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("first\nsecond\n\nthird", "first second"),
        ("first\nsecond\n  at third\nfourth", "first second"),
        ("", ""),
        ("\n\n", ""),
        ("x" * 5000, "x" * 997 + "..."),
        ('Traceback (most recent call last):\n  File "a.py", line 1\n    int(text)', "Traceback .*"),
        ("Traceback (most recent call last):\nValueError: no frames", "Traceback .*"),
    ],
)
async def test_the_text_has_the_lines_of_the_exception_up_to_an_empty_or_indented_one(text: str, shown: str) -> None:
    runs, restarter = await begun(FixedDelay(restarts_max=0))
    runs.failed = 1
    with pytest.raises(RestartsExhausted, match=rf"the last failure was RuntimeError: {shown}$"):
        await restarter.failed(RuntimeError(text))


def test_a_blocking_run_calls_the_action_again_on_the_calling_thread() -> None:
    runs = Runs()
    threads = []

    def action() -> str:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            runs.failed += 1
            raise RuntimeError("job aborted")
        return "done"

    assert run_blocking(runs, FixedDelay(restarts_max=1, delay_s=0.0), action, unmarked, never) == "done"
    assert threads == [threading.get_ident()] * 2


def test_a_blocking_run_ends_its_action_and_its_jobs_when_it_is_interrupted() -> None:
    runs = Runs()
    stopped: list[str] = []

    def action() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_blocking(runs, FixedDelay(), action, unmarked, lambda action_id, cause: stopped.append(cause))
    assert runs.ended
    assert stopped == ["the action was interrupted"]
