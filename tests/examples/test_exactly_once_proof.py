# SPDX-License-Identifier: Apache-2.0

"""The proof of the exactly-once pipeline finds every error, and a trial handles every end of a driver."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from examples.exactly_once import trial
from examples.exactly_once.faults import COORDINATOR, DRIVER, KINDS, STORAGE, TASK, UNRESPONSIVE
from examples.exactly_once.pipeline import OPERATOR_ID
from examples.exactly_once.proof import Proof, judge, prove, table
from examples.exactly_once.trial import SparkDidNotStart, Trial, TrialOptions
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import SubtaskState
from spark_bridge.storage import CheckpointStorage

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


def test_a_file_that_ends_within_a_row_is_not_a_proof() -> None:
    [(name, content)] = files_of(ROWS)

    proof = judge(a_checkpoint(), [(name, content[:-1])], 3, 2)

    assert proof.problems == ["part-0 ends in the middle of a row"]


def a_finished_run(folder: Path) -> Path:
    """Create the files of a run that ended with ``a_checkpoint``: storage and sink. Returns the checkpoint's file."""
    storage = CheckpointStorage(folder / "checkpoints")
    storage.prepare()
    file = storage.store(OPERATOR_ID, a_checkpoint())
    (folder / "sink" / ".staging").mkdir(parents=True)
    for name, content in [*files_of(ROWS), (".staging/part-7", "0 up 1\n"), ("_SUCCESS", "")]:
        (folder / "sink" / name).write_text(content)
    return Path(file)


def test_the_proof_reads_the_newest_checkpoint_and_what_a_reader_of_the_sink_sees(tmp_path: Path) -> None:
    a_finished_run(tmp_path)

    proof = prove(str(tmp_path / "checkpoints"), str(tmp_path / "sink"), 3, 2)

    assert (proof.problems, proof.files) == ([], 1)
    assert "3            3            3" in table(proof)


def test_a_damaged_or_missing_checkpoint_is_not_a_proof(tmp_path: Path) -> None:
    """H50."""
    file = a_finished_run(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])

    [damaged] = prove(str(tmp_path / "checkpoints"), str(tmp_path / "sink"), 3, 2).problems
    [missing] = prove(str(tmp_path / "nowhere"), str(tmp_path / "sink"), 3, 2).problems

    assert str(file) in damaged
    assert missing == "there is no checkpoint"


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
    """H52: a driver that dies by SIGKILL is followed by one that continues."""
    program = """
        if "driver" in kinds:
            journal.write(fault="unresponsive")
            os.kill(os.getpid(), signal.SIGKILL)
        journal.write(wrong=",".join(sorted(kinds)))
        journal.write(statistics={"checkpoints_completed": 4})
        """

    outcome = a_trial(tmp_path, monkeypatch, program).run()

    assert outcome.struck == [UNRESPONSIVE, DRIVER]
    assert outcome.wrong == ["coordinator,task"]
    assert sorted(outcome.missed) == [COORDINATOR, TASK]
    assert (outcome.drivers, outcome.checkpoints) == (2, 4)


def test_a_driver_that_dies_beside_its_storage_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H64: the driver's own death is still to come then."""
    program = """
        if "storage" in kinds:
            journal.write(fault="storage", kills=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """

    outcome = a_trial(tmp_path, monkeypatch, program, faults=(STORAGE, DRIVER)).run()

    assert (outcome.struck, outcome.missed, outcome.wrong) == ([STORAGE], [DRIVER], [])
    assert outcome.drivers == 2


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


@pytest.mark.long
def test_a_driver_that_hangs_is_killed_and_its_last_words_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H48."""
    program = 'print("waiting for nothing", flush=True); signal.pause()'

    outcome = a_trial(tmp_path, monkeypatch, program, faults=(), timeout_s=10.0).run()

    assert outcome.wrong == ["driver 1 did not end within 10 s", "waiting for nothing"]


def test_a_driver_without_spark_is_the_environments_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = 'journal.write(no_spark="no Java"); sys.exit(2)'

    with pytest.raises(SparkDidNotStart, match="no Java"):
        a_trial(tmp_path, monkeypatch, program).run()
