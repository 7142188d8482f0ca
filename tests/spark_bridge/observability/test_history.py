# SPDX-License-Identifier: Apache-2.0

"""``headgate history`` on event logs that are written here; tests/spark/observability reads real ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from protocol.describing import TEXT_CHARS_MAX
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


def event(**changes: Any) -> bytes:
    return json.dumps({**START, **changes}).encode()


def noted(*several: Any) -> bytes:
    return json.dumps({"Event": NOTES, "notes": json.dumps(several)}).encode()


HOSTILE: dict[str, bytes] = {
    "a note that is a number": noted(3),
    "a note without a time": noted({"operator": "a", "what": "run started", "stage": 1}),
    "a time that is a text": noted({**FAILED, "at": "now"}),
    "a time that is true": noted({**FAILED, "at": True}),
    "a time that is NaN": noted({**FAILED, "at": float("nan")}),
    "a time that is infinite": noted({**FAILED, "at": float("inf")}),
    "a time beyond all calendars": noted({**FAILED, "at": 1e300}),
    "a time of many digits": noted({**FAILED, "at": 10**400}),
    "an operator that is a list": noted({**FAILED, "operator": []}),
    "a checkpoint that is a text": noted(
        {"at": 1.0, "operator": "a", "what": "subtask reset", "subtask": 1, "checkpoint": "x"}
    ),
    "phases that are a list": noted({**COMPLETED, "phases_s": [1]}),
    "a duration that is a text": noted({**COMPLETED, "duration_s": "long"}),
    "notes that are not JSON": json.dumps({"Event": NOTES, "notes": "["}).encode(),
    "notes that are a number": json.dumps({"Event": NOTES, "notes": 3}).encode(),
    "nested notes": json.dumps({"Event": NOTES, "notes": "[" * 100_000}).encode(),
    "a second start at a text": event(Timestamp="now"),
    "a kind that is a number": event(Event=3),
    "a kind that is a list": event(Event=[]),
    "a job that failed with a text": json.dumps({"Event": "SparkListenerJobEnd", "Job Result": "x"}).encode(),
    "an executor that is a list": json.dumps({"Event": "SparkListenerExecutorAdded", "Executor Info": []}).encode(),
    "a number of too many digits": b'{"Event": "x", "n": ' + b"9" * 5000 + b"}",
    "deep nesting": b'{"Event": "x", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a second start after all floats": event(Timestamp=10**400),
    "a job that ended after all floats": json.dumps(
        {"Event": "SparkListenerJobEnd", "Job ID": 1, "Completion Time": 10**400}
    ).encode(),
    "bad UTF-8": b'{"Event": "x", "n": "\xff"}',
    "half an event": b'{"Event": "x", "n',
    "no JSON": b"hello",
    "NUL": b"\0" * 100,
    "a list": b"[1]",
    "no kind": b"{}",
}
NO_LOG: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]\n",
    "a text": b'"x"\n',
    "no JSON": b"hello\n",
    "no UTF-8": b"\xff\xfe\n",
    "NUL": b"\0" * 100 + b"\n",
    "a frame of nothing": b"\x28\xb5\x2f\xfd" + b"\xff" * 100,
    "half a frame": zstandard.compress(json.dumps(START).encode() * 10)[:20],
    "gzip": b"\x1f\x8b\x08" + b"\0" * 100 + b"\n",
}


def printed(capsys: pytest.CaptureFixture[str], log: Path) -> tuple[int, list[str], str]:
    """The exit status, the lines of the problem, and what was printed; neither makes a terminal do anything."""
    status = main(["history", str(log)])
    out, err = capsys.readouterr()
    assert all(one.isprintable() for one in (out + err).split("\n"))
    assert "Traceback" not in err
    return status, err.splitlines(), out


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_an_event_of_another_form_is_skipped_and_counted(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H155
    log = tmp_path / "log"
    log.write_bytes(b"\n".join([json.dumps(START).encode(), line, json.dumps(notes(FAILED)).encode(), b""]))
    status, problem, out = printed(capsys, log)
    assert status == 0
    assert "subtask 3 attempt 0 failed: executor_lost: container killed" in out
    assert problem == [
        f"headgate: skipped lines that are not as Spark writes them: 1, the first of which is line 2 of {log}"
    ]


def test_the_skipped_lines_of_all_files_are_counted_and_the_first_is_named(tmp_path: Path) -> None:  # H155
    folder = tmp_path / "eventlog_v2_local-1"
    folder.mkdir()
    for number in (1, 2, 3):
        lines = [json.dumps(START).encode(), b"", *[b"no JSON"] * (number - 1), b""]
        (folder / f"events_{number}_local-1").write_bytes(b"\n".join(lines))
    timeline = read_timeline(folder)
    assert (timeline.skipped, timeline.first_skipped) == (3, f"line 3 of {folder / 'events_2_local-1'}")


@pytest.mark.parametrize("content", NO_LOG.values(), ids=NO_LOG)
@pytest.mark.parametrize("module", ["zstandard", "the program"])
def test_a_file_that_is_not_an_event_log_ends_the_command_with_one_line(
    module: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "the program":
        monkeypatch.setitem(sys.modules, "zstandard", None)
    log = tmp_path / "log"
    log.write_bytes(content)
    status, problem, out = printed(capsys, log)
    assert (status, len(problem), out) == (2, 1, "")


def test_a_small_file_cannot_fill_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LINE_BYTES_MAX", 2**20)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(2**28))
    assert len(bomb) < 2**16
    log = tmp_path / "log"
    log.write_bytes(bomb)
    sizes: list[int] = []
    whole_lines = history._whole_lines

    def measured(file: Path, parts: Any) -> Any:
        def counted() -> Any:
            for part in parts:
                sizes.append(len(part))
                yield part

        return whole_lines(file, counted())

    monkeypatch.setattr(history, "_whole_lines", measured)
    status, problem, _ = printed(capsys, log)
    assert status == 2
    assert "a line of more than 1048576 bytes" in problem[0]
    assert max(sizes) <= 2**25, "of one step"
    assert sum(sizes) <= 2**26, "it stops as soon as it knows"


def test_more_entries_than_anybody_reads_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ENTRIES_MAX", 10)
    log = written(tmp_path / "log", START, *[notes(FAILED, COMPLETED)] * 20)
    timeline = read_timeline(log)
    assert len(timeline.entries) == 10
    assert timeline.problem.startswith("only the first 10 entries are shown, because the log has more")


def test_a_log_with_long_texts_is_kept_only_in_part_and_never_widens_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H157"""
    monkeypatch.setattr(history, "KEPT_BYTES_MAX", 1 << 20)
    long = FAILED | {"operator": "o" * 200_000, "why": "w" * 300_000}
    log = written(tmp_path / "log", START, *[notes(long, COMPLETED)] * 20, END)
    timeline = read_timeline(log)
    assert len(timeline.entries) < 10
    assert "because the log has more" in timeline.problem
    _, _, out = printed(capsys, log)
    assert all(row.index("checkpoint 4") < 150 for row in out.splitlines() if "checkpoint 4" in row)
    main(["history", str(log), "--json"])
    assert max(map(len, capsys.readouterr().out.splitlines())) < 3 * TEXT_CHARS_MAX


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_event_log_is_read_or_refused_but_never_breaks_the_command(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_ = random.Random(seed)
    log = written(tmp_path / "log", START, notes(FAILED, COMPLETED), END)
    content = bytearray(log.read_bytes())
    for _ in range(random_.randrange(1, 8)):
        place = random_.randrange(len(content))
        match random_.randrange(3):
            case 0:
                content[place] = random_.randrange(256)
            case 1:
                del content[place : place + random_.randrange(20)]
            case 2:
                content[place:place] = random_.choice([b"[", b"{", b'"', b"\\", b"9" * 500, b"\n", b"\x1b[2J", b"null"])
    log.write_bytes(zstandard.compress(bytes(content)) if random_.random() < 0.5 else content)
    status, problem, _ = printed(capsys, log)
    assert status in (0, 1, 2), seed
    assert status == 0 or problem


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(Unreadable, match="log is neither a file nor a directory"):
        read_timeline(tmp_path / "log")
    rolled = tmp_path / "eventlog_v2_x"
    rolled.mkdir()
    os.mkfifo(rolled / "events_1_x")
    with pytest.raises(Unreadable, match="events_1_x: it is not a regular file"):
        read_timeline(rolled)
