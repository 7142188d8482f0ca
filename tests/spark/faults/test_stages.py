# SPDX-License-Identifier: Apache-2.0

"""Faults between stages: lost map output, zombies, revoked successes, barriers. docs/spark-faults.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from protocol.facts import StageSubmitted, TaskEnded, TaskOutcome, TaskStarted
from protocol.wire.messages import RestoreMode
from tests.spark.faults.bench import Bench
from tests.spark.faults.directing import Director, Gathering
from tests.spark.faults.executors import kill_the_executor
from tests.spark.faults.file_gates import all_together, close_gates, one_by_one, open_gates, wait_for_files
from tests.spark.faults.heard import Heard
from tests.spark.faults.noting import GatedReader, NotingSource, rows_of
from tests.spark.faults.rows import Rows, number_of, numbered

pytestmark = pytest.mark.spark

SUBTASKS = 4  # one for each slot: two hosts with two cores each
ALL = range(SUBTASKS)
ROWS = range(40)


def shuffled_rows(bench: Bench, folder: Path) -> Rows:
    """``ROWS`` after a shuffle, half of whose map output lies on each host; row n is in partition n modulo 4."""
    rows = bench.numbers(SUBTASKS, ROWS).each(all_together(folder, SUBTASKS))
    return rows.shuffled(SUBTASKS, lambda row: row)


def starts_of(heard: Heard, task_attempt_ids: Iterable[int]) -> dict[int, TaskStarted]:
    """Group by partition."""
    return {start.partition: start for start in map(heard.start_of, task_attempt_ids)}


def check_given_up(end: TaskEnded) -> None:
    """The reason may be a kill, by Headgate or with the rest of the job, or its own end on notice."""
    assert end.outcome is TaskOutcome.KILLED or (end.outcome is TaskOutcome.FAILED and "AttemptOver" in end.reason)


# --- a fetch failure, a resubmitted stage, and zombies (row 4) ------------------------------------------------------


@pytest.mark.parametrize("ends_in", ["the result", "a shuffle"])
def test_zombies_of_a_resubmitted_stage(bench: Bench, tmp_path: Path, ends_in: str) -> None:
    """H1, H2, H10, H11, H13: a success counts if it comes first; else it is superseded. Neither causes a reset.

    The executor that dies has run subtask 0, which had ended, and ``lost``; the zombies run on the other host.
    """
    director = Director()
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(director, SUBTASKS) as handle:
        rows = shuffled_rows(bench, tmp_path).through(handle, Gathering)
        if ends_in == "a shuffle":
            rows = rows.shuffled(2, lambda row: row[0])
        action = bench.start_collecting(rows)
        director.wait_until_ready((subtask, 0) for subtask in ALL)
        first = starts_of(heard, (director.task_of((subtask, 0)) for subtask in ALL))
        director.tell((0, 0), "stop")
        assert heard.end_of(first[0].task_attempt_id).outcome is TaskOutcome.SUCCESS

        zombies = [subtask for subtask in ALL if first[subtask].host != first[0].host]
        [lost] = [subtask for subtask in ALL if subtask and subtask not in zombies]
        director.greet((0, lost), "hello", "stop")
        kill_the_executor(bench, first[0].host)
        director.wait_until_ready((subtask, 1) for subtask in zombies)
        for subtask in zombies:  # each of the two can send events
            director.hear((subtask, 0), "zombie")
            director.hear((subtask, 1), "rival")
        rivals = starts_of(heard, (director.task_of((subtask, 1)) for subtask in zombies))

        wins, loses = zombies
        director.tell((wins, 0), "stop")
        director.tell((loses, 1), "stop")
        outputs = sorted(action.result())
        director.wait_for(lambda story: ("run_ended", True) in story)
        for subtask, winner, loser in ((wins, first, rivals), (loses, rivals, first)):
            assert heard.end_of(winner[subtask].task_attempt_id).outcome is TaskOutcome.SUCCESS
            check_given_up(heard.end_of(loser[subtask].task_attempt_id))

    for subtask in zombies:
        zombie, rival = first[subtask], rivals[subtask]
        assert (rival.stage_id, rival.attempt_number) == (zombie.stage_id, zombie.attempt_number)
        assert (zombie.stage_attempt, rival.stage_attempt) == (0, 1)
    run_again = ALL[1:] if ends_in == "the result" else ALL  # the result of subtask 0 is safe in the driver
    places = bench.places_in_the_task_set(rivals[wins].stage_id, 1)
    assert places == {partition: place for place, partition in enumerate(run_again)}
    received = {subtask: (attempt, events) for subtask, attempt, events, _ in outputs}
    assert received[wins] == (0, ["zombie"])
    assert received[loses] == (1, ["rival"])
    assert [(subtask, rows) for subtask, _, _, rows in outputs] == [(p, list(ROWS[p::SUBTASKS])) for p in ALL]

    for subtask, loser_number in ((wins, 1), (loses, 0)):
        assert director.of_subtask(subtask) == [
            ("ready", subtask, 0),
            ("ready", subtask, 1),
            ("failed", subtask, loser_number, "SUPERSEDED"),
        ]
    for subtask, kind in ((0, "REVOKED"), (lost, "EXECUTOR_LOST")):
        if subtask == 0 and ends_in == "the result":
            assert director.of_subtask(subtask) == [("ready", 0, 0)]
            continue
        assert director.of_subtask(subtask) == [
            ("ready", subtask, 0),
            ("failed", subtask, 0, kind),
            ("reset", subtask, -1),
            ("failed", subtask, 1, "FETCH_FAILED"),  # it died before it could register (H11)
            ("reset", subtask, -1),
            ("ready", subtask, 2),
        ]


def test_zombies_in_streaming_mode(bench: Bench, tmp_path: Path) -> None:
    """H10, H13: two attempts cannot both start from one state, so the rival takes over, after a reset."""
    director = Director()
    bench.wait_for_executors()
    with (
        bench.listening() as heard,
        bench.coordinated(director, SUBTASKS, mode=RestoreMode.STREAMING) as handle,
    ):
        action = bench.start_collecting(shuffled_rows(bench, tmp_path).through(handle, Gathering))
        director.wait_until_ready((subtask, 0) for subtask in ALL)
        first = starts_of(heard, (director.task_of((subtask, 0)) for subtask in ALL))
        director.greet(ALL, "hello", "stop")
        kill_the_executor(bench, first[0].host)
        outputs = sorted(action.result())
        zombies = [subtask for subtask in ALL if first[subtask].host != first[0].host]
        for subtask in zombies:
            check_given_up(heard.end_of(first[subtask].task_attempt_id))
            assert heard.start_of(director.task_of((subtask, 1))).stage_attempt == 1

    assert [(subtask, rows) for subtask, _, _, rows in outputs] == [(p, list(ROWS[p::SUBTASKS])) for p in ALL]
    for subtask in ALL:
        if subtask in zombies:
            assert director.of_subtask(subtask) == [
                ("ready", subtask, 0),
                ("failed", subtask, 0, "SUPERSEDED"),
                ("reset", subtask, -1),
                ("ready", subtask, 1),
            ]
        else:
            assert director.of_subtask(subtask)[1] == ("failed", subtask, 0, "EXECUTOR_LOST")


# --- a revoked success (row 5) --------------------------------------------------------------------------------------


def test_a_success_is_revoked_while_its_stage_runs(bench: Bench, tmp_path: Path) -> None:
    """H17, H56: Resubmitted. It gets the same splits again, in order; splits of a plain failure go to any subtask.

    H86: the coordinator hears of the success, then of its loss, then of the next success.
    """
    splits = range(12)
    source = NotingSource(splits)
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(source, SUBTASKS) as handle:
        read = bench.numbers(SUBTASKS).through(handle, GatedReader, tmp_path)
        action = bench.start_collecting(read.each(numbered).shuffled(2, number_of))
        source.wait_until_read((subtask, 0) for subtask in ALL)
        first = starts_of(heard, (source.tasks[subtask, 0] for subtask in ALL))
        open_gates(tmp_path, [0])
        assert heard.end_of(first[0].task_attempt_id).outcome is TaskOutcome.SUCCESS

        kill_the_executor(bench, first[0].host)
        lost = heard.wait_for(TaskEnded, lambda fact: fact.outcome is TaskOutcome.RESUBMITTED)
        assert lost.task_attempt_id == first[0].task_attempt_id
        open_gates(tmp_path, ALL)
        outputs = sorted(row for _, row in action.result())

    assert outputs == rows_of(splits)
    assert len(source.read_by((0, 0))) == len(splits) - SUBTASKS + 1
    assert source.read_by((0, 1)) == source.read_by((0, 0))
    assert [end for end in source.ends if end[1] == 0 and len(end) > 2] == [
        ("finished", 0, 0),
        ("failed", 0, 0, "REVOKED"),
        ("finished", 0, 1),
    ]
    assert {end[1] for end in source.ends if end[0] == "finished"} == set(ALL)
    assert source.ends[-1] == ("run ended", True)
    for subtask in ALL:
        if subtask == 0:
            check_failed_over(source, subtask, "REVOKED")
        elif first[subtask].host == first[0].host:
            check_failed_over(source, subtask, "EXECUTOR_LOST")
        else:
            assert source.notes.of_subtask(subtask) == [("ready", subtask, 0)]


def check_failed_over(source: NotingSource, subtask: int, kind: str) -> None:
    assert source.notes.of_subtask(subtask) == [
        ("ready", subtask, 0),
        ("failed", subtask, 0, kind),
        ("reset", subtask, -1),
        ("ready", subtask, 1),
    ]


def test_map_output_is_lost_when_half_of_the_reducers_have_read_it(bench: Bench, tmp_path: Path) -> None:
    """H17, H56: Spark reports only that it runs the stage again, and that revokes the success."""
    splits = range(24)
    source = NotingSource(splits)
    maps, reducers = tmp_path / "maps", tmp_path / "reducers"
    maps.mkdir()
    reducers.mkdir()
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(source, SUBTASKS) as handle:
        read = bench.numbers(SUBTASKS).through(handle, GatedReader, maps).each(numbered)
        action = bench.start_collecting(read.shuffled(SUBTASKS, number_of).each(one_by_one(reducers)))
        source.wait_until_read((subtask, 0) for subtask in ALL)
        open_gates(maps, ALL)
        wait_for_files(reducers, "read-*", SUBTASKS)
        mapped = starts_of(heard, (source.tasks[subtask, 0] for subtask in ALL))
        reducing = heard.of(TaskStarted, lambda fact: fact.stage_id != mapped[0].stage_id)
        done = [start for start in reducing if start.host != mapped[0].host]
        open_gates(reducers, (start.partition for start in done))
        for start in done:
            assert heard.end_of(start.task_attempt_id).outcome is TaskOutcome.SUCCESS

        lost = [subtask for subtask in ALL if mapped[subtask].host == mapped[0].host]
        close_gates(maps, lost)
        kill_the_executor(bench, mapped[0].host)
        heard.wait_for(TaskEnded, lambda fact: fact.outcome is TaskOutcome.FETCH_FAILED)
        source.wait_until_read((subtask, 1) for subtask in lost)  # both request splits now
        open_gates(maps, lost)
        open_gates(reducers, ALL)
        outputs = sorted(row for _, row in action.result())
    bench.wait_for_executors()

    assert 0 < len(done) < SUBTASKS
    assert outputs == rows_of(splits)
    assert StageSubmitted(mapped[0].stage_id, 1, len(lost), partitions=SUBTASKS) in heard.facts
    for subtask in ALL:
        if subtask in lost:
            check_failed_over(source, subtask, "REVOKED")
            assert source.read_by((subtask, 1)) == source.read_by((subtask, 0))
        else:
            assert source.notes.of_subtask(subtask) == [("ready", subtask, 0)]


# --- a barrier stage (row 6) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["an exception", "a lost executor"])
def test_one_task_of_a_barrier_stage_fails(bench: Bench, fault: str) -> None:
    """H15, H17: all are reported failed, including succeeded ones; then the coordinator is reset, and no subtask.

    A shuffle follows, because Spark retries a barrier stage only if none of it is committed yet.
    """
    director = Director()
    bench.wait_for_executors()
    with bench.listening() as heard, bench.coordinated(director, SUBTASKS) as handle:
        gathered = bench.numbers(SUBTASKS).through(handle, Gathering, barrier=True)
        action = bench.start_collecting(gathered.shuffled(2, lambda row: row[0]))
        director.wait_until_ready((subtask, 0) for subtask in ALL)
        first = starts_of(heard, (director.task_of((subtask, 0)) for subtask in ALL))
        assert {start.host for start in first.values()} == set(bench.cluster.hosts)
        director.tell((3, 0), "stop")
        assert heard.end_of(first[3].task_attempt_id).outcome is TaskOutcome.SUCCESS
        director.greet(ALL, "hello", "stop")
        if fault == "an exception":
            director.tell((0, 0), "raise")
        else:
            kill_the_executor(bench, first[0].host)
        outputs = sorted(action.result())
    bench.wait_for_executors()

    assert outputs == [(subtask, 1, ["hello"], [subtask]) for subtask in ALL]
    stages = heard.of(StageSubmitted, lambda fact: fact.stage_id == first[0].stage_id)
    assert stages == [StageSubmitted(first[0].stage_id, attempt, SUBTASKS, True, SUBTASKS) for attempt in (0, 1)]
    story = director.named("ready", "failed", "reset", "reset_to_checkpoint")
    at = story.index(("reset_to_checkpoint", -1, None))
    assert {callback[:3] for callback in story[:at] if callback[0] == "failed"} == {("failed", s, 0) for s in ALL}
    # The test's own listener has heard of its success; the sidecar's may hear of it only after the failure.
    assert {("failed", 3, 0, "REVOKED"), ("failed", 3, 0, "GLOBAL_FAILURE")} & set(story[:at])
    kinds = {callback[3] for callback in story[:at] if callback[0] == "failed"}
    assert "GLOBAL_FAILURE" in kinds
    assert kinds <= {"REVOKED", "GLOBAL_FAILURE", "FAILED" if fault == "an exception" else "EXECUTOR_LOST"}
    assert len(story[:at]) == 2 * SUBTASKS
    assert sorted(story[at + 1 :]) == [("ready", subtask, 1) for subtask in ALL]
