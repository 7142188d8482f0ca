# SPDX-License-Identifier: Apache-2.0

"""A large value travels once to an executor: one process fetches it, and the others read its file (H110)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import SparkConf

from spark_bridge.driver.environment import encrypts_files
from spark_bridge.primitives.shared_value import task as task_half
from spark_bridge.primitives.shared_value.encoding import CHUNK_BYTES, digest_of, encode_value
from spark_bridge.primitives.shared_value.files import FOLDER, KEPT_FILES, ValueFiles
from tests.primitives.stand_ins import open_alone

if TYPE_CHECKING:
    pass

VALUE = "a model " * 100_000
PAYLOAD = encode_value(VALUE)
DIGEST = digest_of(PAYLOAD)
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the values of one executor."""
    local = tmp_path / "blockmgr-1"
    local.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{local},{tmp_path / 'blockmgr-2'}")
    monkeypatch.setattr(task_half, "_in_process", {})
    return local / FOLDER


class Task:
    """A task with the value's half, and what it sends. The tests are its driver."""

    def __init__(self, *, local_files: bool = True) -> None:
        self.endpoint = SimpleNamespace(local_files=local_files)
        self.sent: list[Any] = []
        self._changed = threading.Condition()
        self.part = task_half.SharedValuePart("model")
        open_alone(self.part, self)

    def send_event(self, event: Any) -> None:
        with self._changed:
            self.sent.append(event)
            self._changed.notify_all()

    def offer(self, version: int = 1, payload: bytes = PAYLOAD) -> None:
        self.part.handle_urgent(["offer", version, True, digest_of(payload)])

    def until_sent(self, *events: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sent) >= len(events), WAIT_S), f"it has sent {self.sent}"
            assert self.sent == list(events)

    def give(self, version: int = 1, payload: bytes = PAYLOAD, parts: slice = slice(None)) -> None:
        """What the driver sends to a task that wants the value."""
        chunks = [payload[first : first + CHUNK_BYTES] for first in range(0, len(payload), CHUNK_BYTES)]
        for number, chunk in list(enumerate(chunks))[parts]:
            self.part.handle_urgent(["chunk", version, True, number, len(chunks), chunk])


@pytest.fixture
def tasks() -> Iterator[list[Task]]:
    made = [Task(), Task(), Task()]
    yield made
    for task in made:
        task.part.close()


WANT, APPLIED = ["want", 1, True], ["applied", 1]


def test_one_task_fetches_a_value_and_the_others_read_its_file(tasks: list[Task], folder: Path) -> None:
    first, second, third = tasks
    first.offer()
    first.until_sent(WANT)
    second.offer()
    first.give(parts=slice(0, 2))
    third.offer()
    first.give(parts=slice(2, None))
    first.until_sent(WANT, APPLIED)
    for task in (second, third):
        task.until_sent(APPLIED)
        assert task.part.get() == VALUE
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()] == [(DIGEST.hex(), 0o600)]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not task_half._in_process, "the file is there for all processes"


def test_another_task_fetches_the_value_if_the_process_that_fetches_it_is_killed(tasks: list[Task]) -> None:
    fetches = (
        "import sys; from spark_bridge.primitives.shared_value.files import ValueFiles;"
        f"fetch = ValueFiles.of_executor().begin(bytes.fromhex('{DIGEST.hex()}')); fetch.moved();"
        "print('fetches', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", fetches], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetches\n"
        files = ValueFiles.of_executor()
        assert files is not None
        assert files.begin(DIGEST) is None, "the other process fetches it"
        tasks[0].offer()
        process.kill()
    tasks[0].until_sent(WANT)
    tasks[1].offer()
    tasks[0].give()
    tasks[1].until_sent(APPLIED)


def test_a_task_whose_attempt_ends_lets_another_one_fetch(tasks: list[Task]) -> None:
    first, second, _ = tasks
    first.offer()
    first.until_sent(WANT)
    first.give(parts=slice(0, 2))
    second.offer()
    first.part.close()
    second.until_sent(WANT)


def test_a_task_does_not_wait_for_a_process_that_makes_no_progress(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_half, "STALLED_S", 0.0)
    first, second, _ = tasks
    first.offer()
    first.until_sent(WANT)
    second.offer()
    second.until_sent(WANT)
    second.give()
    second.until_sent(WANT, APPLIED)
    assert second.part.get() == VALUE


@pytest.mark.parametrize("content", [b"", PAYLOAD[:-1], PAYLOAD[:-1] + b"!", PAYLOAD + b"!"])
def test_a_file_that_is_not_the_value_is_fetched_again(tasks: list[Task], folder: Path, content: bytes) -> None:
    (folder / DIGEST.hex()).write_bytes(content)
    tasks[0].offer()
    tasks[0].until_sent(WANT)
    tasks[0].give()
    tasks[0].until_sent(WANT, APPLIED)
    assert (folder / DIGEST.hex()).read_bytes() == PAYLOAD
    tasks[1].offer()
    tasks[1].until_sent(APPLIED)


def test_nobody_fetches_what_was_finished_while_it_looked(tasks: list[Task], folder: Path) -> None:
    files = ValueFiles.of_executor()
    assert files is not None
    assert files.read(DIGEST) is None
    fetch = files.begin(DIGEST)
    assert fetch is not None
    assert fetch.finish(PAYLOAD)
    assert files.begin(DIGEST) is None
    assert files.read(DIGEST) == PAYLOAD
    assert [path.name for path in folder.iterdir()] == [DIGEST.hex()]


def test_a_file_with_other_bytes_is_not_read_and_removed(tmp_path: Path) -> None:
    files = ValueFiles(tmp_path)
    files.file_of(DIGEST).write_bytes(PAYLOAD[:-1] + b"!")
    assert files.read(DIGEST) is None
    assert not files.file_of(DIGEST).exists()


def test_others_see_that_the_process_that_fetches_a_value_makes_progress_until_it_gives_up(tmp_path: Path) -> None:
    files = ValueFiles(tmp_path)
    fetch = files.begin(DIGEST)
    assert fetch is not None
    os.utime(files.part_of(DIGEST), (1, 1))
    before = files.progress(DIGEST)
    fetch.moved()
    assert files.progress(DIGEST) > before
    fetch.abandon()
    fetch.moved()
    fetch.abandon()
    assert files.progress(DIGEST) == 0
    assert not fetch.finish(PAYLOAD)
    assert not files.file_of(DIGEST).exists()


@pytest.mark.parametrize("ends", ["it has come", "its task is over"])
def test_a_fetch_that_nobody_needs_any_more_is_left_to_others(tasks: list[Task], folder: Path, ends: str) -> None:
    task, files = tasks[0], ValueFiles(folder)
    fetch = files.begin(DIGEST)
    assert fetch is not None
    if ends == "it has come":
        task.part.handle_urgent(["value", 1, False, encode_value("another way")])
    else:
        task.part.close()
    task.part._ask(1, True, fetch)
    assert task.sent == []
    assert files.begin(DIGEST) is not None


def test_a_fetch_ends_when_its_value_has_come_another_way(tasks: list[Task], folder: Path) -> None:
    task, files = tasks[0], ValueFiles(folder)
    fetch = files.begin(DIGEST)
    assert fetch is not None
    task.part._ask(1, False, fetch)
    assert files.begin(DIGEST) is None
    task.part.handle_urgent(["value", 1, False, PAYLOAD])
    assert files.begin(DIGEST) is not None


def test_one_process_at_a_time_fetches_a_value(tmp_path: Path) -> None:
    files = ValueFiles(tmp_path)
    first = files.begin(DIGEST)
    assert first is not None
    assert files.begin(DIGEST) is None
    first.abandon()
    second = files.begin(DIGEST)
    assert second is not None
    assert second.finish(PAYLOAD)
    assert not second.finish(PAYLOAD), "once"


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_nothing_but_a_file_is_read(tasks: list[Task], folder: Path, tmp_path: Path, kind: str) -> None:
    path = folder / DIGEST.hex()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(PAYLOAD)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    files = ValueFiles.of_executor()
    assert files is not None
    assert files.read(DIGEST) is None


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_may_enter_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    assert ValueFiles.of_executor() is None
    task = Task()
    task.offer()
    task.until_sent(WANT)


def test_a_link_in_place_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    folder.symlink_to(elsewhere)
    assert ValueFiles.of_executor() is None


def test_outside_an_executor_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    assert ValueFiles.of_executor() is None
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert ValueFiles.of_executor() is None


def test_no_file_is_written_where_spark_encrypts_its_own(folder: Path) -> None:
    task = Task(local_files=False)
    task.offer()
    task.until_sent(WANT)
    task.give()
    task.until_sent(WANT, APPLIED)
    assert not folder.exists()


@pytest.mark.parametrize(("setting", "expected"), [(None, False), ("false", False), ("true", True)])
def test_whether_spark_encrypts_its_files_is_read_from_its_settings(setting: str | None, expected: bool) -> None:
    class Context:
        def getConf(self) -> SparkConf:
            conf = SparkConf(loadDefaults=False)
            return conf if setting is None else conf.set("spark.io.encryption.enabled", setting)

    assert encrypts_files(Context()) is expected


def test_only_the_newest_files_stay(tasks: list[Task], folder: Path) -> None:
    for number in range(KEPT_FILES + 3):
        payload = encode_value(f"{number} {VALUE}")
        tasks[0].part.handle_urgent(["offer", number + 1, False, digest_of(payload)])
        while len(tasks[0].sent) <= number:
            threading.Event().wait(0.001)
        tasks[0].give(number + 1, payload)
        tasks[0].sent[number:] = [["want", number + 1, False]]
        os.utime(folder / digest_of(payload).hex(), (number, number))
    assert len(list(folder.iterdir())) <= KEPT_FILES + 1


@pytest.mark.parametrize("is_gone", [True, False], ids=["the folder is gone", "the disk is full"])
def test_a_value_that_cannot_be_written_is_there_all_the_same_and_leaves_no_file(
    tasks: list[Task], folder: Path, is_gone: bool
) -> None:
    tasks[0].offer()
    tasks[0].until_sent(WANT)
    part = folder / f"{DIGEST.hex()}.part"
    if is_gone:
        part.unlink()
    else:
        folder.joinpath(DIGEST.hex()).mkdir()  # so the last step fails
    tasks[0].give()
    tasks[0].until_sent(WANT, APPLIED)
    assert tasks[0].part.get() == VALUE
    assert task_half._in_process["model"] == (DIGEST, PAYLOAD), "at least this process has it"
    assert not part.exists()
