# SPDX-License-Identifier: Apache-2.0

"""The word count: correct sums with and without faults, and plain errors if it cannot run."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from examples import word_count
from examples.word_count import JobFailed, Progress, interrupt_quietly
from spark_bridge.driver.interrupts import interrupts_held_back
from tests.examples.conftest import RunExample

PROMISED_KEYS = {
    "exactly_once", "splits", "subtasks", "attempts", "failures", "resets", "splits_given_back", "events",
    "confirm_us", "echo_us", "fact_us", "seconds", "plain_seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def a_summary(**changed: Any) -> dict[str, Any]:
    unmeasured = {"p50": None, "p99": None}
    counts = dict.fromkeys(PROMISED_KEYS | {"words", "distinct_words"}, 1)
    latencies = dict.fromkeys(("confirm_us", "echo_us", "fact_us"), unmeasured)
    return {**counts, **latencies, "failures_by_kind": {}, **changed}


# --- on a real Spark ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.spark
def test_every_word_counts_once_though_two_attempts_are_lost(
    run_example: RunExample, tree: Path, tmp_path: Path
) -> None:
    """H10, H25: one process is killed, one attempt is unresponsive; exactly these two are replaced."""
    file = tmp_path / "summary.json"

    ended = run_example("word_count", "--input", tree, "--parallelism", 2, "--json", file)

    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "exactly once: yes"), ended.stderr
    summary = json.loads(file.read_text())
    assert summary.keys() >= PROMISED_KEYS
    told = {key: summary[key] for key in ("exactly_once", "splits", "subtasks", "attempts", "failures", "resets")}
    assert told == {"exactly_once": True, "splits": 41, "subtasks": 2, "attempts": 4, "failures": 2, "resets": 2}
    assert summary["faults"] == ["kill", "unresponsive"]
    assert summary["failures_by_kind"].keys() >= {"confirmation_timeout"}
    assert summary["splits_given_back"] >= 2
    assert summary["words"] == 3 * 40 + sum(n * n for n in range(40)) + 3
    for latency in ("confirm_us", "echo_us", "fact_us"):
        assert 0 < summary[latency]["p50"] <= summary[latency]["p99"]
    assert "2 subtasks" in ended.stderr
    assert "41/41 splits" in ended.stderr
    assert "1 binary or unreadable" in ended.stderr
    assert "WARN" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
@pytest.mark.spark
def test_more_subtasks_than_files_harm_nobody(run_example: RunExample, tmp_path: Path) -> None:
    """Two files, three subtasks, the other relay; one subtask must die for the requested fault."""
    few = tmp_path / "few"
    few.mkdir()
    (few / "one.txt").write_text("to be or not to be")
    (few / "two.txt").write_text("that is the question")

    ended = run_example("word_count", "--input", few, "--parallelism", 3, "--relay", "py4j", "--faults", "kill")

    assert ended.returncode == 0, ended.stderr
    assert re.search(r"execution attempts +4\n", ended.stdout)
    assert re.search(r"words +10 \(8 different ones\)\n", ended.stdout)


@pytest.mark.long
@pytest.mark.spark
def test_a_job_that_fails_is_reported_in_few_words(run_example: RunExample, tree: Path) -> None:
    """A master that allows no failures: the first lost attempt ends the job."""
    ended = run_example("word_count", "--input", tree, "--master", "local[2,1]", "--parallelism", 2)

    assert ended.returncode == 1
    assert "the Spark job has failed: " in ended.stderr
    assert "failed 1 times" in ended.stderr
    assert "\tat " not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "exactly once" not in ended.stdout


@pytest.mark.long
@pytest.mark.spark
def test_a_port_in_use_is_named(run_example: RunExample, tree: Path) -> None:
    """H63."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_example("word_count", "--input", tree, "--port", port)

    assert ended.returncode == 2
    assert f"the sidecar refuses: cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- where it cannot run ------------------------------------------------------------------------------------------


def test_without_java_it_says_so(run_example: RunExample, tree: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "no-java"
    nowhere.mkdir()
    for tool in ("bash", "dirname", "env", "ps"):  # the command that Spark's launcher calls
        for folder in ("/bin", "/usr/bin"):
            if Path(folder, tool).exists() and not (nowhere / tool).exists():
                (nowhere / tool).symlink_to(Path(folder, tool))

    ended = run_example("word_count", "--input", tree, JAVA_HOME=str(nowhere), PATH=str(nowhere))

    assert ended.returncode == 2
    assert "Spark did not start: " in ended.stderr
    assert f"Spark needs Java 17 or later, and JAVA_HOME is {nowhere}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallelism", "0"], "--parallelism must be at least 1, not 0"),
        (["--parallelism", "many"], "invalid int value: 'many'"),
        (["--port", "65536"], "--port must be between 0 and 65535, not 65536"),
        (["--faults", "kill,maim"], "--faults: 'maim' is none of kill, unresponsive and none"),
        (["--master", "local[2]"], "--master: local[2] retries no task"),
        (["--relay", "pigeon"], "invalid choice: 'pigeon'"),
        (["--json", "/"], "--json: / is a folder"),
        (["--json", "no/such/folder/file.json"], "--json: the folder of no/such/folder/file.json does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused_before_spark_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused_with(arguments, capsys)


def refused_with(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        word_count.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_folder_that_is_missing_empty_or_without_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.txt").write_text("no folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"\0\1")

    assert "is not a folder" in refused_with(["--input", str(tmp_path / "missing")], capsys)
    assert "is not a folder" in refused_with(["--input", str(tmp_path / "file.txt")], capsys)
    assert "holds no text files (0 binary" in refused_with(["--input", str(tmp_path / "empty")], capsys)
    assert "holds no text files (1 binary" in refused_with(["--input", str(tmp_path / "binary")], capsys)


# --- its parts ----------------------------------------------------------------------------------------------------


def test_only_readable_text_whose_name_can_travel_becomes_a_split(tree: Path) -> None:
    os.mkfifo(tree / "pipe.txt")  # reading it would wait forever
    (tree / "gone.txt").symlink_to(tree / "nowhere")
    Path(os.fsdecode(os.fsencode(tree) + b"/caf\xe9.txt")).write_text("a name that is not UTF-8")

    files, left_out = word_count.find_files(tree)

    assert left_out == 4  # with the picture
    assert sorted(files) == sorted(["latin.txt", *(f"part{n % 3}/file{n}.txt" for n in range(40))])


def test_files_that_change_or_vanish_meanwhile_are_noticed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, _ = word_count.find_files(tree)
    assert word_count.changed_since(tree, files) == []
    (tree / "latin.txt").unlink()
    os.utime(tree / "part0" / "file3.txt", ns=(1, 1))

    changed = word_count.changed_since(tree, files)
    word_count.explain({"a": 1, "b": 2}, {"a": 1, "c": 3}, changed)

    assert sorted(changed) == ["latin.txt", "part0/file3.txt"]
    said = capsys.readouterr().err
    assert "'b': 2 here, None by plain Spark" in said
    assert "'c': None here, 3 by plain Spark" in said
    assert "2 files have changed meanwhile" in said


def test_a_failed_job_is_told_without_the_stacks_of_two_languages() -> None:
    said = "\n".join(
        [
            "PythonException: An exception was thrown from the Python worker:",
            "Traceback (most recent call last):",
            '  File "somewhere.py", line 1, in words_of',
            "    raise",
            "FileNotFoundError: no such file: 'a'",
            "",
            "\tat org.apache.spark.Something(Something.scala:1)",
            "\t... 20 more",
            "Driver stacktrace:",
            "all the rest",
        ]
    )

    told = str(JobFailed(RuntimeError(said)))

    assert told.splitlines() == [
        "RuntimeError: PythonException: An exception was thrown from the Python worker:",
        "  FileNotFoundError: no such file: 'a'",
    ]


@pytest.mark.parametrize(("exactly_once", "status", "answer"), [(True, 0, "yes"), (False, 1, "no")])
def test_the_last_line_and_the_exit_status_say_the_same(
    exactly_once: bool,
    status: int,
    answer: str,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(word_count, "run", lambda options, files: a_summary(exactly_once=exactly_once))

    assert word_count.main(["--input", str(tree)]) == status
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"exactly once: {answer}"
    assert re.search(r"send to echo +none measured\n", said)


def test_progress_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(40)

    for _ in range(40):
        progress.split_done(0)

    assert capsys.readouterr().err.splitlines() == [f"{done}/40 splits" for done in range(4, 41, 4)]


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupts_as_before() -> Iterator[None]:
    handler, filters = signal.getsignal(signal.SIGINT), list(logging.getLogger().filters)
    yield
    signal.signal(signal.SIGINT, handler)
    logging.getLogger().filters[:] = filters


@pytest.mark.usefixtures("interrupts_as_before")
def test_only_the_first_ctrl_c_interrupts() -> None:
    # A second one came while Py4J cleaned up after the first: after that it could not stop a session any more.
    interrupt_quietly()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def interrupted_twice_while_held_back() -> None:
    with interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interrupts_as_before")
def test_several_that_were_held_back_are_one() -> None:
    interrupt_quietly()
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice_while_held_back()
    signal.raise_signal(signal.SIGINT)
