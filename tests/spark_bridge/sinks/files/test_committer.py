# SPDX-License-Identifier: Apache-2.0

"""What becomes visible and when: writer and committer step by step."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from spark_bridge.sinks.files.journal import is_journal
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import SinkCommits
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkFileLost, SinkMisused
from tests.spark_bridge.sinks.files.kit import (
    SinkTask,
    a_driver,
    a_host,
    failing,
    new_url,
    on_operation,
    rows_of,
    staged,
    take_visible,
    visible,
)


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"path": str(tmp_path / "out"), "file": f"file://{tmp_path}/out", "memory": f"memory://{tmp_path}/out"}
    return places[request.param]


async def a_committer(url: str, restored: tuple[int, bytes | None] | None = None, context: Any = None) -> SinkCommits:
    committer = SinkCommits(FileSink(url), retry_delays_s=(0, 0))
    if restored is not None:
        await committer.restore(*restored)
    await committer.start(context or a_driver())
    return committer


def a_task(url: str, *, after: int = -1, **fields: Any) -> SinkTask:
    return SinkTask(FileSink(url), checkpoint_id=after, **fields)


async def test_a_task_cannot_list_a_file_that_another_one_wrote(url: str) -> None:
    """H83: neither under its own name, nor with the list of the other one, nor as something that it restored."""
    committer = await a_committer(url)
    honest, thief = a_task(url), a_task(url, subtask=1)
    event = honest.seal("a", 1)
    stolen = event[-1]
    own = thief.seal("b", 1)
    with pytest.raises(SinkMisused, match="which another writer wrote"):
        await committer.prepared(1, 0, [*own[:-1], stolen])
    with pytest.raises(SinkMisused, match=r"attempt 0 of subtask 1 lists part-s00000-.*which another attempt wrote"):
        await committer.prepared(1, 0, event)
    with pytest.raises(SinkMisused, match=r"attempt 7 of subtask 0 lists .*after checkpoint -1"):
        await committer.prepared(0, 7, event)
    assert (visible(url), committer.pending) == ({}, 0)
    assert await committer.prepared(0, 0, event)
    assert await committer.prepared(1, 0, own)
    await committer.complete(1)
    assert rows_of(visible(url)) == ["a", "b"]


async def test_a_list_with_one_foreign_file_changes_nothing(url: str) -> None:  # H83
    committer = await a_committer(url)
    task = a_task(url)
    event = task.seal("a", 1)
    later = task.seal("b", 2)
    later[-1][0][0] = later[-1][0][0].replace("-s00000-", "-s00001-")
    with pytest.raises(SinkMisused):
        await committer.prepared(0, 0, [*event[:-1], [*event[-1], *later[-1]]])
    assert committer.pending == 0


async def test_published_files_that_a_reader_took_away_are_not_missed_after_a_restore(url: str) -> None:
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a", 1))
    state = committer.snapshot(2)
    held = a_task(url, attempt=0).seal("b", 2)
    await committer.prepared(0, 0, held)
    await committer.complete(2)
    assert sorted(rows_of(take_visible(url))) == ["a", "b"]
    await committer.restore(2, state)
    await committer.prepared(0, 1, held)
    assert visible(url) == {}


async def test_a_sealed_file_that_another_program_deletes_is_an_error(tmp_path: Path) -> None:
    """H7: it was never published, so its rows are lost; that must not count as success."""
    url = str(tmp_path / "out")
    committer = await a_committer(url)
    event = a_task(url).seal("a", 1)
    await committer.prepared(0, 0, event)
    for path in (tmp_path / "out").rglob("part-*"):
        path.unlink()
    with pytest.raises(SinkFileLost, match="never published"):
        await committer.complete(1)


@pytest.mark.parametrize("restored", [False, True], ids=["immediately", "after-a-restore"])
async def test_a_lost_file_is_never_mistaken_for_one_that_a_reader_took(restored: bool, url: str) -> None:
    """H64: not even by a new driver, or after a failed try: the journal does not claim files that never existed."""
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a", 1))
    await committer.prepared(1, 0, a_task(url, subtask=1).seal("b", 1))
    state = committer.snapshot(2)
    lost = staged(url)[0]
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{root}/{lost}")
    if not restored:
        with pytest.raises(SinkFileLost):
            await committer.complete(2)
    assert visible(url) == {}
    for _ in range(2):
        with pytest.raises(SinkFileLost, match="never published"):
            await a_committer(url, (2, state))


async def test_a_move_that_reports_a_failure_after_it_was_done_loses_nothing() -> None:
    """H64: not even if a reader takes the file before the next try."""
    url = new_url()
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a", 1))
    taken: dict[str, bytes] = {}

    def fail(what: str, path: str) -> None:
        if what == "after remove" and not taken:
            taken.update(take_visible(url))
            raise TimeoutError("the answer was lost")

    with on_operation(fail):
        await committer.complete(1)
    assert rows_of(taken) == ["a"]
    assert committer.pending == 0


async def test_a_driver_that_dies_between_the_journal_and_the_move_loses_nothing() -> None:  # H64
    url = new_url()
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a", 1))
    state = committer.snapshot(2)
    with failing(KeyboardInterrupt(), "before copy"), pytest.raises(KeyboardInterrupt):
        await committer.complete(2)
    await a_committer(url, (2, state))
    assert rows_of(take_visible(url)) == ["a"]
    await a_committer(url, (2, state))
    assert visible(url) == {}


@pytest.mark.parametrize("ends", ["discarded", "completed", "restored"])
async def test_nothing_is_deleted_while_a_checkpoint_is_in_doubt(ends: str, url: str) -> None:
    """H64: not by the reset of a subtask, nor of the job, nor by a sweep."""
    host = a_host()
    committer = await a_committer(url, context=host.context)
    await committer.complete(1)
    for subtask in range(2):
        await committer.prepared(subtask, 0, a_task(url, subtask=subtask, after=1).seal("row", 2))
    a_task(url, after=1).write("open")
    state = committer.snapshot(2)
    before = staged(url)
    host.checkpoints_in_doubt = frozenset({2})
    committer.subtask_failed(0, 0)
    await committer.subtask_reset(0, 1)
    committer.subtask_failed(1, 0)
    await committer.restore(1, None)
    await committer.close()
    assert staged(url) == before
    if ends == "discarded":
        host.checkpoints_in_doubt = frozenset()
        await committer.discarded(2)
        assert staged(url) == []
    elif ends == "completed":  # a coordinator that does not pass on the discard
        await committer.complete(3)
        assert staged(url) == []
    else:
        await a_committer(url, (2, state))
        assert rows_of(visible(url)) == ["row", "row"]


async def test_a_checkpoint_in_doubt_above_the_completed_one_keeps_its_files(url: str) -> None:  # H64, H43
    host = a_host()
    host.checkpoints_in_doubt = frozenset({3})
    committer = await a_committer(url, context=host.context)
    await committer.prepared(0, 0, a_task(url).seal("row", 3))
    committer.subtask_failed(0, 0)
    await committer.subtask_reset(0, -1)
    await committer.complete(2)
    assert len(staged(url)) == 1


async def test_a_new_run_forgets_what_the_old_one_listed_after_the_checkpoint(url: str) -> None:
    """H55: attempts that have finished are not reported failed; their rows are written again."""
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a"))
    committer.run_ended(True)
    await committer.restore(-1, None)
    assert staged(url) == []
    committer.snapshot(1)
    await committer.complete(1)
    assert visible(url) == {}


async def test_a_start_deletes_the_parts_of_dead_drivers_that_no_list_can_name(url: str) -> None:
    """Started after the restored checkpoint: dead. Started before it: a subtask may hold the list."""
    a_task(url, after=1).write("dead")
    dead = a_task(url, after=2).seal("dead", 3)
    held = a_task(url, after=1).seal("held", 2)
    context = a_driver()
    await a_committer(url, (2, None), context)
    names = [path.rpartition("/")[2] for path in staged(url)]
    assert held[-1][0][0] in names
    assert dead[-1][0][0] not in names
    a_task(url, after=2).write("of an attempt that begins while the coordinator is recreated")
    await a_committer(url, (2, None), context)
    assert len(staged(url)) == len(names) + 1


async def test_after_a_good_end_and_its_checkpoint_nothing_is_left_but_a_new_runs_parts(url: str) -> None:
    """H57: by then no subtask can hold a list."""
    committer = await a_committer(url)
    a_task(url).seal("sealed by an attempt that was killed", 1)
    await committer.complete(1)
    committer.run_ended(True)
    committer.snapshot(2)
    await committer.complete(1)  # its cut lay before the end: what it covers may be held
    assert len(staged(url)) == 1
    a_task(url, after=2).write("of the next run")
    await committer.complete(2)
    assert [path for path in staged(url) if "-e0000000003-" not in path] == []
    assert len(staged(url)) == 1


async def test_a_run_that_continues_after_all_is_not_cleaned_up_like_an_ended_one(url: str) -> None:
    """H17, H55: a revoked success, or a new run, before the checkpoint completes."""
    for goes_on in ("failed", "restored"):
        committer = await a_committer(url)
        event = a_task(url).seal("a", 1)
        committer.run_ended(True)
        committer.snapshot(2)
        if goes_on == "failed":
            committer.subtask_failed(1, 0)
        else:
            await committer.restore(2, None)
        await committer.complete(2)
        await committer.prepared(0, 0, event)
        assert rows_of(take_visible(url)) == ["a"]


async def test_the_state_of_another_sink_or_directory_is_refused(url: str) -> None:
    state = (await a_committer(url)).snapshot(1)
    for other in (SinkCommits(FileSink(url, name="other")), SinkCommits(FileSink(f"{url}/sub"))):
        await other.restore(1, state)
        with pytest.raises(SinkMisused, match="same name and target"):
            await other.start(a_driver())
    with pytest.raises(ValueError, match="no state of a sink"):
        await a_committer(url, (1, b"{}"))


async def test_two_sinks_in_one_directory_leave_each_other_alone(url: str) -> None:
    """Also if one of them has ended and cleans up."""
    one = await a_committer(url, context=a_driver(operator_id="a/b"))
    event = a_task(url, operator_id="a/b").seal("one", 1)
    two = await a_committer(url, context=a_driver(operator_id="two"))
    two.run_ended(True)
    two.snapshot(1)
    await two.complete(1)
    assert not await two.prepared(0, 0, event)
    assert await one.prepared(0, 0, event)
    await one.complete(1)
    assert rows_of(visible(url)) == ["one"]


async def test_a_filesystem_that_fails_for_a_moment_is_retried() -> None:
    url = new_url()
    committer = await a_committer(url)
    task = a_task(url)
    for row in "ab":
        await committer.prepared(0, 0, task.seal(row, 1))
    troubles = ["before copy", "before remove"]

    def fail(what: str, path: str) -> None:
        if what in troubles:
            troubles.remove(what)
            raise TimeoutError("the store is busy")

    with on_operation(fail):
        await committer.complete(1)
    assert rows_of(visible(url)) == ["a", "b"]
    assert (staged(url), troubles) == ([], [])


async def test_a_filesystem_that_keeps_failing_is_a_clear_error_and_nothing_is_lost() -> None:
    """H7: the coordinator raises the error; the restore that follows publishes."""
    url = new_url()
    committer = await a_committer(url)
    event = a_task(url).seal("a", 1)
    await committer.prepared(0, 0, event)
    said = r"1 prepared parts of sink 'out'.*3 tries.*the store is down"
    with failing(TimeoutError("the store is down")), pytest.raises(SinkCommitFailed, match=said):
        await committer.complete(1)
    assert visible(url) == {}
    await committer.restore(1, None)
    await committer.prepared(0, 1, event)
    assert rows_of(visible(url)) == ["a"]


async def test_leftovers_that_cannot_be_deleted_stop_nothing() -> None:
    url = new_url()
    committer = await a_committer(url)
    a_task(url).write("open")
    with failing(PermissionError("not yours")):
        committer.subtask_failed(0, 0)
        await committer.subtask_reset(0, -1)
    assert len(staged(url)) == 1


async def test_a_reader_that_looks_constantly_sees_only_whole_files(tmp_path: Path) -> None:
    """On a local directory each file appears in one step, with all its rows."""
    url = str(tmp_path / "out")
    committer = await a_committer(url)
    task = a_task(url)
    content = [f"{number}-" + "x" * 20_000 for number in range(100)]
    done = threading.Event()
    looks: list[int] = []
    torn: list[str] = []

    def look() -> None:
        while not done.is_set():
            names = [name for name in os.listdir(url) if not name.startswith(".")]
            torn.extend(name for name in names if os.path.getsize(f"{url}/{name}") < 20_000)
            looks.append(len(names))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for checkpoint_id, row in enumerate(content, start=1):
            await committer.prepared(0, 0, task.seal(row, checkpoint_id))
            await committer.complete(checkpoint_id)
    finally:
        done.set()
        reader.join()
    assert torn == []
    assert looks
    assert looks == sorted(looks)
    assert rows_of(visible(url)) == content


async def test_what_is_published_is_on_the_disk_before_the_next_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next state no longer lists it, so a power failure must not move it back to the staging directory."""
    url = str(tmp_path / "out")
    committer = await a_committer(url)
    await committer.prepared(0, 0, a_task(url).seal("a", 1))
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
    )
    await committer.complete(1)
    journal, *others = synced
    assert is_journal(journal.removesuffix(".tmp"))
    assert others == [".headgate-out", "out", ".headgate-out"]


async def test_the_staging_directory_is_deleted_only_when_it_is_empty(tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    committer = await a_committer(url)
    await committer.close()
    assert list((tmp_path / "out").iterdir()) == []
    committer = await a_committer(url)
    event = a_task(url).seal("a", 1)
    await committer.close()
    assert len(staged(url)) == 1
    await committer.prepared(0, 0, event)
    await committer.complete(1)
    await committer.close()
    assert len(visible(url)) == 1
    (journal,) = (tmp_path / "out" / ".headgate-out").iterdir()
    assert is_journal(journal.name)  # a restored checkpoint may list the staged files


async def test_a_file_where_the_directory_should_be_fails_the_start(tmp_path: Path) -> None:
    """H6."""
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(OSError, match="out"):
        await a_committer(str(tmp_path / "out"))
