# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate history`` on event logs that are written here; tests/spark/observability reads real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from spark_bridge.command import main
from spark_bridge.observability import history
from spark_bridge.observability.history import NOTES, Unreadable, read_timeline

START = {
    "Event": "SparkListenerApplicationStart",
    "App Name": "crawler",
    "App ID": "local-1",
    "Timestamp": 1_000_000,
}
END = {"Event": "SparkListenerApplicationEnd", "Timestamp": 1_030_000}
FAILED = {
    "at": 1_002.5,
    "operator": "crawl",
    "what": "attempt failed",
    "subtask": 3,
    "attempt": 0,
    "task": 7,
    "kind": "executor_lost",
    "why": "container killed",
}
COMPLETED = {
    "at": 1_005.0,
    "operator": "crawl",
    "what": "checkpoint completed",
    "checkpoint": 4,
    "savepoint": False,
    "duration_s": 0.25,
    "phases_s": {"closing": 0.05, "storing": 0.2},
}


def notes(*several: dict[str, Any]) -> dict[str, Any]:
    return {"Event": NOTES, "notes": json.dumps(several)}


def written(file: Path, *events: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return file


def test_the_timeline_is_printed_in_order_with_sparks_own_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(
        tmp_path / "local-1",
        {"Event": "SparkListenerLogStart", "Spark Version": "4.3.0"},
        START,
        {"Event": "SparkListenerJobStart", "Job ID": 0, "Submission Time": 1_001_000, "Stage IDs": [0]},
        {
            "Event": "SparkListenerJobEnd",
            "Job ID": 0,
            "Completion Time": 1_029_000,
            "Job Result": {"Result": "JobFailed", "Exception": {"Message": "it failed\nat ..."}},
        },
        {
            "Event": "SparkListenerExecutorAdded",
            "Timestamp": 1_000_500,
            "Executor ID": "1",
            "Executor Info": {"Host": "h"},
        },
        {"Event": "SparkListenerExecutorRemoved", "Timestamp": 1_002_400, "Executor ID": "1", "Removed Reason": "gone"},
        {"Event": "SparkListenerEnvironmentUpdate"},
        {"Event": "org.example.Unknown", "notes": 3},
        notes(
            {"at": 1_001.2, "operator": "crawl", "what": "run started", "stage": 0},
            FAILED,
            {"at": 1_002.6, "operator": "crawl", "what": "subtask reset", "subtask": 3, "checkpoint": 2},
        ),
        notes(
            COMPLETED,
            {"at": 1_006.0, "operator": "crawl", "what": "checkpoint aborted", "checkpoint": 5, "why": "too late"},
            {"at": 1_007.0, "operator": "", "what": "notes left out", "count": 12},
            {"at": 1_008.0, "operator": "w", "what": "operator reset", "checkpoint": -1},
            {"at": 1_009.0, "operator": "w", "what": "run failed", "stage": 0, "why": "because"},
        ),
        END,
    )
    assert main(["history", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "local-1 crawler, Spark 4.3.0, started 1970-01-01 00:16:40 UTC",
        "    +0.000 s         application started",
        "    +0.500 s         executor 1 added on h",
        "    +1.000 s         job 0 started, stages [0]",
        "    +1.200 s  crawl  run started, stage 0",
        "    +2.400 s         executor 1 removed: gone",
        "    +2.500 s  crawl  subtask 3 attempt 0 failed: executor_lost: container killed",
        "    +2.600 s  crawl  subtask 3 reset to checkpoint 2",
        "    +5.000 s  crawl  checkpoint 4 completed after 250 ms (closing 50 ms, storing 200 ms)",
        "    +6.000 s  crawl  checkpoint 5 aborted: too late",
        "    +7.000 s         12 more notes were left out here, because there were too many",
        "    +8.000 s  w      operator reset to the beginning",
        "    +9.000 s  w      run failed, stage 0: because",
        "   +29.000 s         job 0 failed: it failed",
        "   +30.000 s         application ended",
    ]


def test_json_gives_all_that_is_known_of_one_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "log", START, notes(FAILED, {**COMPLETED, "operator": "other"}))
    assert main(["history", str(log), "--operator", "crawl", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [FAILED]


def test_a_rolling_log_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "eventlog_v2_local-1"
    folder.mkdir()
    (folder / "appstatus_local-1").touch()
    for number in range(12, 0, -1):  # all at the same time, so only the order of the files tells
        first = [START] if number == 1 else []
        written(folder / f"events_{number}_local-1", *first, notes({**FAILED, "subtask": number}))
    entries = read_timeline(folder).entries
    assert [entry.fields.get("subtask") for entry in entries] == [None, *range(1, 13)]


def compressed(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.zstd")
    packed.write_bytes(zstandard.compress(file.read_bytes()))
    return packed


PROGRAM = f"""#!{sys.executable}
import sys
import zstandard

whole = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
while part := sys.stdin.buffer.read(1 << 16):
    sys.stdout.buffer.write(whole.decompress(part))
sys.exit(not whole.eof)
"""
"""As the program `zstd` does, which not every machine has: decompresses standard input."""


@pytest.fixture(params=["module", "program"])
def decompressor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decompresses: a module, or the program `zstd` where there is none."""
    if request.param == "program":
        program = tmp_path / "zstd"
        program.write_text(PROGRAM, encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        without_modules(monkeypatch)


def without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("decompressor")
def test_a_compressed_log_is_read_and_a_cut_one_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "log", START, *(notes({**FAILED, "subtask": number}) for number in range(20_000)), END)
    packed = compressed(log)
    assert len(read_timeline(packed).entries) == 20_002
    packed.write_bytes(packed.read_bytes() * 2)  # frames follow one another
    assert len(read_timeline(packed).entries) == 40_004
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2 + 6])  # between two events
    assert len(read_timeline(packed).entries) == 20_002
    assert "ends early" in read_timeline(packed).problem
    packed.write_bytes(whole[: len(whole) * 3 // 4])
    assert 20_002 < len(read_timeline(packed).entries) < 40_004
    assert main(["history", str(packed)]) == 0
    assert "ends early" in capsys.readouterr().err


def test_a_plain_log_that_is_still_written_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    log = written(tmp_path / "log.inprogress", START, notes(FAILED))
    with log.open("a") as more:
        more.write('{"Event":"SparkListenerTaskE')
    timeline = read_timeline(log)
    assert len(timeline.entries) == 2
    assert "the application still runs, or its driver has died" in timeline.problem


def test_what_it_cannot_read_is_said_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.lz4").write_bytes(b"LZ4Block")
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "list").write_text("[1]\n")
    (tmp_path / "empty").touch()
    for name, text in (
        ("log.lz4", "spark.eventLog.compression.codec=zstd"),
        ("text", "not an event log"),
        ("list", "not an event log"),
        ("empty", "no event for the start of an application"),
        ("missing", "spark.eventLog.dir"),
        ("", "eventlog_v2_APPLICATION"),
    ):
        assert main(["history", str(tmp_path / name)]) == 2
        assert text in capsys.readouterr().err
    packed = compressed(written(tmp_path / "log", START))
    monkeypatch.setattr(history, "which", lambda program: None)
    without_modules(monkeypatch)
    with pytest.raises(Unreadable, match="pip install zstandard"):
        read_timeline(packed)


def test_a_log_without_notes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(written(tmp_path / "log", START, END))]) == 1
    captured = capsys.readouterr()
    assert "application ended" in captured.out
    assert "there are no notes of Headgate" in captured.err


def test_a_text_from_the_log_cannot_write_lines_or_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b[2Jb\nc"
    log = written(
        tmp_path / "log", {**START, "App Name": hostile}, notes({**FAILED, "why": hostile, "operator": hostile})
    )
    main(["history", str(log)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3


def test_it_needs_neither_spark_nor_java(tmp_path: Path) -> None:
    log = written(tmp_path / "log", START, notes(FAILED))
    code = (
        "import sys; sys.modules.update(pyspark=None, py4j=None, structlog=None)\n"
        "from spark_bridge.observability import history\n"
        "print(len(history.read_timeline(history.Path(sys.argv[1])).entries))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
