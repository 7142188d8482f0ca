# SPDX-License-Identifier: Apache-2.0

"""The values of a durable cache in a storage (H162, H183)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from spark_bridge.storage import CheckpointStorage, MemoryStorage, StorageError, StorageFenced, StorageSession
from spark_bridge.storage import value_log as module
from spark_bridge.storage.port import ValuePort, ValueUser
from spark_bridge.storage.value_log import FILES_MAX, ValueLog
from tests.spark_bridge.storage import value_writer
from tests.spark_bridge.storage.checkpoints import a_checkpoint, a_prepared_storage

pytestmark = pytest.mark.anyio


def opened(url: str, name: str = "geocode") -> ValueLog:
    log = a_prepared_storage(url).value_log(name)
    log.load()
    return log


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "_caches" / "geocode").iterdir())


def test_entries_come_back_in_their_order_and_beside_checkpoints(near_url: str) -> None:
    storage = a_prepared_storage(near_url)
    (checkpoint_id, *_) = storage.reserve_ids(2)
    storage.store("geocode", a_checkpoint(checkpoint_id))
    log = storage.value_log("geocode")
    assert log.load() == []
    log.append([(b"a", b"1"), (b"b", b"")])
    log.append([(b"a", b"2")])
    storage.value_log("another name/..").append([(b"c", b"3")])
    assert opened(near_url).load() == [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
    assert opened(near_url, "another name/..").load() == [(b"c", b"3")]
    assert [info.operator_id for info in storage.list()] == ["geocode"], "a cache is not an operator"


@pytest.mark.parametrize("seed", range(5))
def test_files_are_merged_and_nothing_that_the_cache_has_is_lost(
    near_url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WASTE_BYTES", 2000)
    monkeypatch.setattr(module, "MERGED_BYTES_MAX", 3000)
    random = Random(seed)
    storage = a_prepared_storage(near_url)
    log = storage.value_log("geocode")
    log.load()
    live: dict[bytes, bytes] = {}
    most = 0
    for step in range(200):
        entries = {b"%d" % random.randrange(100): b"%d" % step * random.randrange(1, 30) for _ in range(3)}
        log.append(entries.items())
        live.update(entries)
        for key in random.sample(list(live), len(live) // 20):
            del live[key]
        log.merge_if_due(live.get, sum(map(len, live.values())))
        most = max(most, len(log._known))
    again = dict(opened(near_url).load())
    assert {key: again.get(key) for key in live} == live
    assert most <= FILES_MAX + 2


def test_a_later_application_has_the_values_and_the_earlier_one_writes_no_more(near_url: str) -> None:
    first = opened(near_url)
    first.append([(b"a", b"1")])
    second = opened(near_url)
    second.append([(b"b", b"2")])
    with pytest.raises(StorageFenced, match="was taken over by a later application"):
        first.append([(b"a", b"late")])
    first._known *= FILES_MAX + 1
    with pytest.raises(StorageFenced):
        first.merge_if_due(lambda key: None, 0)
    assert opened(near_url).load() == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another file"])
def test_a_damaged_file_is_an_error_that_names_it_and_says_what_to_do(tmp_path: Path, damage: str) -> None:
    log = opened(str(tmp_path))
    log.append([(b"a", b"1" * 100)])
    log.append([(b"b", b"2")])
    (file, _) = files_of(tmp_path)
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    changed: dict[str, bytes] = {
        "cut": bytes(data[:-1]),
        "changed": bytes(data),
        "empty": b"",
        "another file": b"PAR1" * 20,
    }
    file.write_bytes(changed[damage])
    with pytest.raises(StorageError, match=rf"{file.name}: it is .*or delete it, and its values are computed again"):
        opened(str(tmp_path))
    file.unlink()
    assert opened(str(tmp_path)).load() == [(b"b", b"2")]


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    log = opened(str(tmp_path))
    log.append([(b"a", b"1")])
    folder = tmp_path / "_caches" / "geocode"
    for name in ("notes.txt", "values-1.hgv", "values-x-00.hgv", "other.tmp"):
        (folder / name).write_text("mine")
    (folder / "values-9-00ff.hgv.tmp").write_text("what a killed writer has left")
    assert opened(str(tmp_path)).load() == [(b"a", b"1")]
    assert {one.name for one in files_of(tmp_path)} >= {"notes.txt", "values-1.hgv", "values-x-00.hgv", "other.tmp"}
    assert not (folder / "values-9-00ff.hgv.tmp").exists()


@pytest.mark.parametrize("seed", range(2))
def test_what_was_shown_survives_a_kill_at_any_moment(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    said: list[int] = []
    for _ in range(3):
        command = [sys.executable, "-m", value_writer.__name__, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = chance.randrange(100, 1000)
            for line in process.stdout:
                said.append(int(line.split()[1]))
                lines -= 1
                if not lines:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            said += [int(line.split()[1]) for line in process.stdout if line.endswith("\n")]
        found = dict(opened(str(tmp_path)).load())
        newest = max(map(int, found))  # it may have written more, and forgotten older ones, than it could say
        assert newest >= said[-1]
        for number in said:
            if number > newest - value_writer.KEPT:
                assert found[b"%d" % number] == value_writer.value_of(number)
        assert len(files_of(tmp_path)) <= FILES_MAX + 2


# --- the port ---------------------------------------------------------------------------------------------------------


class User:
    """A cache that keeps everything."""

    def __init__(self) -> None:
        self.shown: dict[bytes, bytes] = {}
        self.errors: list[Exception] = []
        self.news = anyio.Event()

    def of_port(self) -> ValueUser:
        return ValueUser(self._written, self._failed, self.shown.get, lambda: 10**9)

    def _written(self, entries: Mapping[bytes, bytes]) -> None:
        self.shown.update(entries)
        self._tell()

    def _failed(self, error: Exception) -> None:
        self.errors.append(error)
        self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = anyio.Event()

    async def until(self, ready: Callable[[User], Any]) -> None:
        with anyio.fail_after(60):
            while not ready(self):
                await self.news.wait()


async def use(port: ValuePort) -> User:
    user = User()
    user.shown.update(await port.open(user.of_port()))
    return user


async def test_entries_that_come_together_are_written_together(tmp_path: Path) -> None:
    async with StorageSession(CheckpointStorage(tmp_path)) as session:
        port = session.values("geocode")
        user = await use(port)
        for number in range(1000):
            port.append(b"%d" % number, b"v")
        await user.until(lambda user: len(user.shown) == 1000)
        assert len(files_of(tmp_path)) == 1
        with pytest.raises(
            StorageError, match="another durable part of this kind and name is in use: pass the same one"
        ):
            await use(session.values("geocode"))
        port.close()
        assert len((await use(session.values("geocode"))).shown) == 1000


async def test_what_cannot_be_written_is_told_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_bridge.storage.port._RETRY_S", 0.001)
    async with StorageSession(CheckpointStorage(tmp_path)) as session:
        port = session.values("geocode")
        user = await use(port)
        folder = tmp_path / "_caches" / "geocode"
        folder.parent.mkdir()
        folder.write_text("a file is in the way")
        port.append(b"a", b"1")
        await user.until(lambda user: user.errors)
        assert isinstance(user.errors[0], StorageError)
        assert not user.shown
        folder.unlink()
        await user.until(lambda user: user.shown)
        port.append(b"b", b"2")
        await user.until(lambda user: len(user.shown) == 2)
    assert opened(str(tmp_path)).load() == [(b"a", b"1"), (b"b", b"2")]


async def test_without_a_storage_that_outlives_the_program_it_is_refused() -> None:
    async with StorageSession(MemoryStorage()) as session:
        with pytest.raises(StorageError, match=r"cannot be durable.* set SidecarConfig\(storage=\.\.\.\)"):
            session.values("geocode")
