# SPDX-License-Identifier: Apache-2.0

"""The timeline: what is drawn where, what it costs when it is off, its bounds, and what a killed driver leaves."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from actors.coordination import OperatorStatistics
from actors.coordination.user_calls import CallWatch, current_watch
from protocol.attempts import (
    AttemptAccepted,
    FailureKind,
    FailureReason,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import NotifyCheckpointAborted, NotifyCheckpointComplete
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.observability import trace as tracing
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.trace import Trace, TraceFile
from tests.spark_bridge.observability import statuses
from tests.spark_bridge.observability.test_journal import steps
from tests.spark_bridge.observability.trace_reader import events_of, query

LOST = FailureReason(FailureKind.EXECUTOR_LOST, "the executor is lost")


class Bench:
    """A trace of one operator, ``crawl``, at a time that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 10.0
        self.journal = Journal(1000.0)
        self.statistics, self.watch = OperatorStatistics("crawl"), CallWatch()
        self.watch.attach(cast(Any, SimpleNamespace(now=self.clock_now)), None, 60.0, lambda call: None)
        self.watch.close()  # no timers
        current_watch.set(None)
        self.operator = cast(Any, SimpleNamespace(statistics=self.statistics, watch=self.watch))
        self.file = TraceFile(path)
        self.trace = self.begin()

    def begin(self) -> Trace:
        return Trace(self.file, self.journal, self.clock_now, lambda: {"crawl": self.operator})

    def clock_now(self) -> float:
        return self.now

    def see(self, *observed: Any) -> None:
        """One step each second."""
        for one in observed:
            self.now += 1.0
            self.journal.observe("crawl", one, self.now)

    def place(self, *attempts: ExecutionAttempt, host: str = "ten", executor_id: str = "1") -> None:
        """A status says where attempts run."""
        told = tuple(
            statuses.attempt(one.subtask, task_attempt_id=one.task_attempt_id, host=host, executor_id=executor_id)
            for one in attempts
        )
        self.trace.sample(statuses.sidecar(statuses.operator(attempts=told, events_up_per_s=5.0)))

    def close(self) -> list[dict[str, Any]]:
        self.trace.close()
        self.file.close()
        return events_of(self.path)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "job.json")


def attempt(subtask: int, number: int, task: int) -> ExecutionAttempt:
    return ExecutionAttempt("crawl", subtask, number, task)


def accepted(one: ExecutionAttempt) -> AttemptAccepted:
    return AttemptAccepted(one, RestoreMode.BATCH, 7, 1)


def test_a_query_says_how_long_each_phase_of_a_checkpoint_took(bench: Bench) -> None:
    bench.see(*steps(5, NotifyCheckpointComplete(5)), *steps(6, NotifyCheckpointAborted(6, "late")))
    bench.close()
    phases = "select name, dur / 1e6 from slice where category = 'checkpoint' and track = 'crawl/5' and depth = 1"
    assert query(bench.path, f"{phases} order by ts") == [
        (phase, 1.0) for phase in ("waiting", "closing", "snapshotting", "acknowledging", "storing")
    ]
    outcomes = "select name, dur / 1e6, args ->> 'outcome', args ->> 'reason' from slice"
    assert query(bench.path, f"{outcomes} where category = 'checkpoint' and depth = 0") == [
        ("checkpoint 5", 5.0, "completed", ""),
        ("checkpoint 6", 5.0, "aborted", "late"),
    ]


def test_concurrent_checkpoints_have_separate_tracks(bench: Bench) -> None:
    first, second = steps(5, NotifyCheckpointComplete(5)), steps(6, NotifyCheckpointComplete(6))
    for both in zip(first, second, strict=True):
        bench.see(*both)
    bench.close()
    for checkpoint_id in (5, 6):
        (count,) = query(bench.path, f"select count(*) from slice where track = 'crawl/{checkpoint_id}'")
        assert count == (6,)


def test_attempts_are_slices_of_their_executor_with_the_time_until_they_were_ready(bench: Bench) -> None:
    one, again, other = attempt(3, 0, 30), attempt(3, 1, 31), attempt(0, 0, 32)
    bench.see(RunStarted("crawl", 7), accepted(one), accepted(other))
    bench.place(one, other)
    bench.see(
        SubtaskReady(one), SubtaskReady(other), SubtaskFailed(one, LOST), SubtaskReset("crawl", 3), accepted(again)
    )
    bench.place(again, host="eleven", executor_id="2")
    bench.see(SubtaskReady(again), SubtaskFinished(again), RunEnded("crawl", 7, True))
    events = bench.close()
    rows = query(bench.path, "select name, pid, dur / 1e6, args ->> 'outcome' from slice where name like 'crawl[%'")
    assert sorted(rows) == [
        ("crawl[0]#0", 2, 8.0, "run ended"),
        ("crawl[3]#0", 2, 4.0, "executor_lost"),
        ("crawl[3]#1", 3, 2.0, "finished"),
    ]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {1: "driver", 2: "executor 1 on ten", 3: "executor 2 on eleven"}
    opening = query(bench.path, "select track, dur / 1e6 from slice where name = 'restore and open' order by ts")
    assert opening == [("crawl[3]", 2.0), ("crawl[0]", 2.0), ("crawl[3]", 1.0)]
    run = query(bench.path, "select name, dur / 1e6, args ->> 'succeeded' from slice where name like 'run%'")
    assert run == [("run, stage 7", 10.0, 1)]
    instants = {one["name"]: one for one in events if one["ph"] == "i"}
    assert instants["failure: executor_lost"]["pid"] == 2
    assert instants["failure: executor_lost"]["args"]["reason"] == LOST.text
    assert "reset of subtask 3" in instants


def test_copies_of_a_subtask_on_one_executor_do_not_overlap(bench: Bench) -> None:
    one, copy = attempt(3, 0, 30), attempt(3, 1, 31)
    bench.see(accepted(one), accepted(copy))
    bench.place(one, copy)
    bench.see(SubtaskFinished(one), SubtaskFailed(copy, LOST), OperatorReset("crawl", "why"))
    bench.close()
    assert query(bench.path, "select count(*) from slice where name like 'crawl[3]%'") == [(2,)]


def test_methods_of_the_coordinator_are_slices_and_concurrent_ones_are_apart(bench: Bench) -> None:
    outer = bench.watch.begin("handle_request", (1, 0, "payload"), None)
    bench.now += 1.0
    inner = bench.watch.begin("handle_request", (2, 0, "payload"), None)
    bench.now += 1.0
    bench.watch.end(inner)
    bench.now += 1.0
    bench.watch.end(outer)
    later = bench.watch.begin("subtask_reset", (1, -1), None)
    bench.now += 0.5
    bench.watch.end(later)
    bench.close()
    rows = query(bench.path, "select name, track, dur / 1e6, args ->> 'subtask' from slice order by ts")
    assert rows == [
        ("handle_request", "coordinator, concurrent calls 1", 3.0, 1),
        ("handle_request", "coordinator of crawl", 1.0, 2),
        ("subtask_reset", "coordinator of crawl", 0.5, 1),
    ]
    assert "payload" not in bench.path.read_text(), "what users send is not in the file"


def test_what_is_frequent_is_sampled_and_what_is_long_is_always_drawn(bench: Bench) -> None:
    bench.now += 1.0
    for _ in range(3 * tracing.FREQUENT_PER_S):
        bench.watch.end(bench.watch.begin("handle_event_from_operator", (1, 0), None))
        bench.statistics.confirm_us.record(100.0, attempt(1, 0, 10))
    long = bench.watch.begin("handle_event_from_operator", (2, 0), None)
    bench.now += 0.5
    bench.watch.end(long)
    bench.close()
    count = "select count(*) from slice where name = 'handle_event_from_operator'"
    assert query(bench.path, count) == [(tracing.FREQUENT_PER_S + 1,)]
    events = "select count(*), min(dur), max(dur) from slice where category = 'event' and name = 'event to crawl[1]#0'"
    ((drawn, shortest, longest),) = query(bench.path, events)
    assert drawn == tracing.FREQUENT_PER_S
    assert 99 < shortest <= longest < 101
    assert bench.statistics.confirm_us.count == 3 * tracing.FREQUENT_PER_S, "none is lost for the statistics"


def test_hooks_are_there_only_while_something_is_traced(bench: Bench) -> None:
    recorder = bench.statistics.confirm_us
    assert bench.statistics.confirm_us.show is not None
    recorder.record(5.0)
    assert recorder.percentiles()["count"] == 1
    bench.close()
    assert recorder.show is None
    assert bench.watch.on_end is None
    size = bench.path.stat().st_size
    bench.see(RunStarted("crawl", 8))
    assert bench.path.stat().st_size == size


def test_what_is_open_at_the_end_is_closed(bench: Bench) -> None:
    bench.see(RunStarted("crawl", 7), accepted(attempt(0, 0, 1)), *steps(5, None)[:3])
    bench.close()
    rows = query(bench.path, "select name, args ->> 'outcome' from slice where depth = 0 and args ->> 'outcome' <> ''")
    assert sorted(rows) == [("checkpoint 5", "in progress"), ("crawl[0]#0", "still running")]


def test_a_file_that_is_full_says_so_once_and_stays_valid(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    with capture_logs() as lines:
        file = TraceFile(path, bytes_max=2000)
        for number in range(100):
            file.add({"name": f"n{number}", "ph": "i", "s": "t", "pid": 1, "tid": 0, "ts": float(number)})
        file.close()
        file.add({"name": "late", "ph": "i", "s": "t", "pid": 1, "tid": 0, "ts": 1.0})
    events = json.loads(path.read_text())
    assert path.stat().st_size < 2400
    assert [one["name"] for one in events].count("trace is full") == 1
    written = sum(one["name"].startswith("n") for one in events)
    assert written + events[-1]["args"]["left_out"] == 100
    assert [line["event"] for line in lines] == ["trace full, later events dropped"]


def test_a_file_that_was_full_takes_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.observability.trace.WRITE_EVERY_S", 60.0)  # the test writes
    event = {"name": "n", "ph": "i", "s": "t", "pid": 1, "tid": 0, "ts": 1.0}
    file = TraceFile(tmp_path / "small.json", bytes_max=500)
    for _ in range(10):
        file.add(event)
    file._write_waiting()
    left_out = file.left_out
    assert 0 < left_out < 10
    for _ in range(10):
        file.add(event)
    assert file.left_out == left_out + 10
    file.close()
    names = [one["name"] for one in json.loads((tmp_path / "small.json").read_text())]
    assert names.count("trace is full") == 1
    assert names[-1] == "end of trace"


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else() -> None:
    with capture_logs() as lines:
        file = TraceFile(Path("/dev/full"))
        file.add({"name": "n", "ph": "i", "s": "t", "pid": 1, "tid": 0, "ts": 0.0})
        file.close()
        file.close()
    assert lines[0]["event"] == "trace ended, file not writable"
    assert file.left_out


def test_what_a_killed_driver_leaves_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "killed.json"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom spark_bridge.observability.trace import TraceFile\n"
        f"file = TraceFile(Path({str(path)!r}))\n"
        "for n in range(100):\n"
        "    file.add({'name': f'n{n}', 'ph': 'i', 's': 't', 'pid': 1, 'tid': 0, 'ts': float(n)})\n"
        "while Path(sys.argv[1]).stat().st_size < 3000: time.sleep(0.01)\n"
        "print('written', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    assert [one["name"] for one in events_of(path)] == [f"n{number}" for number in range(100)]


def test_counters_show_rates_and_the_loops_lag(bench: Bench) -> None:
    bench.place()
    counters = {one["name"]: one["args"] for one in bench.close() if one["ph"] == "C"}
    assert counters["crawl: events/s"] == {"up": 5.0, "down": 0.0}
    assert counters["event loop lag p99 (ms)"] == {"lag": 1.0}


def test_an_operator_that_is_coordinated_again_is_hooked_again(bench: Bench) -> None:
    bench.operator = SimpleNamespace(statistics=OperatorStatistics("crawl"), watch=CallWatch())
    bench.see(RunStarted("crawl", 8))
    assert bench.operator.statistics.confirm_us.show is not None
    bench.close()
    assert bench.operator.watch.on_end is None


@pytest.mark.parametrize("content", ["mine", "[\n  1\n]\n", "{}"])
def test_a_file_that_is_not_a_trace_is_not_replaced(content: str, tmp_path: Path) -> None:  # H162
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(FileExistsError, match="there is a file that is not a trace"):
        TraceFile(path)
    assert path.read_text() == content


def test_a_trace_that_another_sidecar_writes_is_not_replaced_and_a_finished_one_is(tmp_path: Path) -> None:  # H162
    path = tmp_path / "trace.json"
    first = TraceFile(path)
    first.add({"name": "of the first", "ph": "i", "pid": 1, "tid": 0, "ts": 0})
    with pytest.raises(FileExistsError, match="another sidecar is writing its trace there"):
        TraceFile(path)
    first.close()
    assert [event["name"] for event in events_of(path)] == ["of the first", "end of trace"]
    TraceFile(path).close()
    assert [event["name"] for event in events_of(path)] == ["end of trace"]


def test_nobody_else_may_read_a_trace_whatever_was_there_before_and_whatever_the_umask_is(tmp_path: Path) -> None:
    # H155
    file, earlier = tmp_path / "job.json", tmp_path / "earlier.json"
    earlier.write_text("[\n")
    earlier.chmod(0o644)
    before = os.umask(0)
    try:
        for one in (file, earlier):
            TraceFile(one).close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (file, earlier)] == [0o600, 0o600]
