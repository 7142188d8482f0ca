# SPDX-License-Identifier: Apache-2.0

"""Publishing on filesystems where a move is a rename, a copy, or a copy that another file must not be replaced by."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from spark_bridge.sinks.files.directory import Published, SinkDirectory
from spark_bridge.sinks.files.moves import move_on
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import SinkCommits
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkMisused
from tests.spark_bridge.object_stores import ObjectStore
from tests.spark_bridge.s3 import new_bucket
from tests.spark_bridge.sinks.files.kit import SinkTask, a_driver

CONTENT = b"row\n" * 100_000
TOKEN = "0123456789abcdef" * 2
PART = f"part-s00000-e0000000000-a00000-{TOKEN}-000000"


class Store:
    """A sink's directory in a bucket, and the bucket as a reader sees it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.bucket = new_bucket(options)
        self.url = f"s3://{self.bucket}/out"
        self.options = options
        self.filesystem = fsspec.filesystem("s3", **options)
        self.directory = SinkDirectory(self.url, "out", options)

    def stage(self, content: bytes = CONTENT) -> None:
        file = self.directory.create(PART)
        file.write(content)
        self.directory.finish(file)

    def read(self) -> bytes:
        self.filesystem.invalidate_cache()
        return bytes(self.filesystem.cat_file(f"{self.url}/{PART}"))

    def keep_versions(self) -> None:
        """From now on, the bucket remembers each object that was written."""
        enabled = {"Status": "Enabled"}
        self.filesystem.call_s3("put_bucket_versioning", Bucket=self.bucket, VersioningConfiguration=enabled)

    def times_written(self) -> int:
        """How often the published file was written."""
        return len(self.filesystem.call_s3("list_object_versions", Bucket=self.bucket, Prefix="out/part-")["Versions"])

    def unfinished_uploads(self) -> Any:
        return self.filesystem.call_s3("list_multipart_uploads", Bucket=self.bucket).get("Uploads", [])


@pytest.fixture
def store(s3: dict[str, Any]) -> Store:
    return Store(s3)


@pytest.mark.parametrize("content", [CONTENT, b"", b"x" * (12 * 2**20)], ids=["small", "empty", "in parts"])
def test_on_s3_a_part_is_published_once(content: bytes, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # H83
    monkeypatch.setattr("spark_bridge.sinks.files.moves._PART_BYTES", 5 * 2**20)
    store.stage(content)
    assert store.directory.publish(PART) is Published.MOVED
    assert store.read() == content
    assert store.directory.staged() == []
    assert store.directory.publish(PART) is Published.BEFORE
    assert store.unfinished_uploads() == []


def test_on_s3_a_published_file_is_never_written_again(store: Store) -> None:
    """H83: by a driver that died between the copy and the deletion, or was fenced and goes on: a reader may read it."""
    store.keep_versions()
    store.stage()
    store.directory.publish(PART)
    store.stage()  # as if it had not been deleted
    assert store.directory.publish(PART) is Published.MOVED
    assert store.times_written() == 1
    assert store.directory.staged() == []


@pytest.fixture
def azure(object_stores: Callable[[str], ObjectStore]) -> tuple[SinkDirectory, Any, str]:
    store = object_stores("azure")
    url = f"abfs://{store.new_bucket()}/out"
    return SinkDirectory(url, "out", store.options), store.filesystem, f"{url}/{PART}"


def stage(directory: SinkDirectory, content: bytes = CONTENT) -> None:
    file = directory.create(PART)
    file.write(content)
    directory.finish(file)


@pytest.mark.long
def test_on_azure_a_part_is_published_once(azure: tuple[SinkDirectory, Any, str]) -> None:  # H83
    directory, filesystem, published = azure
    stage(directory)
    assert directory.publish(PART) is Published.MOVED
    assert filesystem.cat_file(published) == CONTENT
    assert directory.staged() == []
    assert directory.publish(PART) is Published.BEFORE
    written = filesystem.info(published)["etag"]
    stage(directory)  # as if it had not been deleted
    assert directory.publish(PART) is Published.MOVED
    assert filesystem.info(published)["etag"] == written, "it was not replaced"
    assert directory.staged() == []


class LateCopies:
    """Azurite completes each copy in its answer. This one's are said to take longer."""

    def __init__(self, filesystem: Any, source: str, *statuses: str) -> None:
        self._filesystem = filesystem
        self._source = filesystem.split_path(source)[1]
        self._statuses = list(statuses)
        self.source_was_there: list[bool] = []
        self.service_client = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filesystem, name)

    def get_blob_client(self, container: str, blob: str) -> Any:
        client = self._filesystem.service_client.get_blob_client(container, blob)
        asked = client.get_blob_properties

        async def get_blob_properties() -> Any:
            properties = await asked()
            if self._statuses:
                properties.copy.status = self._statuses.pop(0)
                staged = self._filesystem.service_client.get_blob_client(container, self._source)
                self.source_was_there.append(await staged.exists())
            return properties

        client.get_blob_properties = get_blob_properties
        return client


@pytest.mark.long
@pytest.mark.parametrize(
    ("statuses", "fails"), [(("pending", "pending", "success"), ""), (("pending", "failed"), r"its copy \S+ is failed")]
)
def test_on_azure_the_source_stays_until_the_copy_is_complete(
    statuses: tuple[str, ...], fails: str, azure: tuple[SinkDirectory, Any, str]
) -> None:  # H83, H136
    _, filesystem, published = azure
    source, target = published.replace("part-", "staged-"), published
    filesystem.pipe_file(source, CONTENT)
    late = LateCopies(filesystem, source, *statuses)
    with pytest.raises(OSError, match=fails) if fails else nullcontext():
        move_on(late)(source, target)
    assert late.source_was_there == [True] * len(statuses)
    filesystem.invalidate_cache()
    assert filesystem.exists(source) == bool(fails)
    assert filesystem.cat_file(target) == CONTENT


class Interloper:
    """Does something just before one kind of request is sent."""

    def __init__(self, filesystem: Any, request: str, act: Any) -> None:
        self._filesystem, self._request, self._act = filesystem, request, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filesystem, name)

    def call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == self._request:
            self._act()
        return self._filesystem.call_s3(method, *args, **kwargs)


@pytest.mark.parametrize("request_kind", ["complete_multipart_upload", "put_object"])
def test_on_s3_an_object_that_appears_at_the_last_moment_is_not_replaced(request_kind: str, store: Store) -> None:
    """H83: the store itself compares, so no check can come too early."""
    store.stage(CONTENT if request_kind == "complete_multipart_upload" else b"")
    other = b"of somebody else"
    target = f"{store.url}/{PART}"
    between = Interloper(store.filesystem, request_kind, lambda: store.filesystem.pipe_file(target, other))
    with pytest.raises(FileExistsError, match=r"another file of this name, .* Move it away"):
        move_on(between)(f"{store.url}/.headgate-out/{PART}", target)
    assert store.read() == other
    assert store.directory.staged() == [PART]
    assert store.unfinished_uploads() == []


def test_on_s3_a_faster_driver_is_not_an_error(store: Store) -> None:  # H83
    store.stage()
    target = f"{store.url}/{PART}"
    between = Interloper(
        store.filesystem, "complete_multipart_upload", lambda: store.filesystem.pipe_file(target, CONTENT)
    )
    move_on(between)(f"{store.url}/.headgate-out/{PART}", target)
    assert store.read() == CONTENT
    assert store.directory.staged() == []


def test_on_s3_a_failed_copy_leaves_nothing_visible_and_can_be_repeated(store: Store) -> None:  # H83
    store.stage()
    target = f"{store.url}/{PART}"

    def fail() -> None:
        raise TimeoutError("the store is busy")

    broken = Interloper(store.filesystem, "complete_multipart_upload", fail)
    with pytest.raises(TimeoutError):
        move_on(broken)(f"{store.url}/.headgate-out/{PART}", target)
    assert not store.directory.is_published(PART)
    assert store.unfinished_uploads() == []
    assert store.directory.publish(PART) is Published.MOVED
    assert store.read() == CONTENT


async def a_committer(store: Store) -> SinkCommits:
    committer = SinkCommits(FileSink(store.url, options=store.options), retry_delays_s=())
    await committer.start(a_driver())
    return committer


async def seal(store: Store, committer: SinkCommits, row: bytes | str, checkpoint_id: int) -> None:
    """Give the committer the list of a part with this row."""
    task = SinkTask(FileSink(store.url, options=store.options))
    await committer.prepared(0, 0, task.seal(row, checkpoint_id))


async def test_on_s3_a_reader_that_looks_constantly_sees_only_whole_files(store: Store) -> None:  # H83
    committer = await a_committer(store)
    done = threading.Event()
    sizes: set[int] = set()

    def look() -> None:
        reader = fsspec.filesystem("s3", **store.options, use_listings_cache=False)
        while not done.is_set():
            with suppress(FileNotFoundError):  # nothing is there yet
                sizes.update(entry["size"] for entry in reader.ls(store.url, detail=True) if entry["type"] == "file")

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for checkpoint_id in range(1, 6):
            await seal(store, committer, CONTENT, checkpoint_id)
            await committer.complete(checkpoint_id)
    finally:
        done.set()
        reader.join()
    assert sizes <= {len(CONTENT)}
    store.filesystem.invalidate_cache()
    found = store.filesystem.ls(store.url, detail=True)
    assert [entry["size"] for entry in found if entry["type"] == "file"] == [len(CONTENT)] * 5


def test_on_s3_what_other_processes_have_done_since_the_last_look_is_seen(store: Store) -> None:  # H83
    others = fsspec.filesystem("s3", skip_instance_cache=True, **store.options)
    staging, next_part = f"{store.url}/.headgate-out", PART.replace("-000000", "-000001")
    others.pipe_file(f"{staging}/other", b"a row")
    assert store.directory.staged() == ["other"]
    others.pipe_file(f"{staging}/{PART}", CONTENT)
    assert store.directory.publish(PART) is Published.MOVED
    assert store.directory.staged() == ["other"]
    others.pipe_file(f"{staging}/{next_part}", CONTENT)
    assert sorted(store.directory.staged()) == ["other", next_part]
    assert len(store.filesystem.ls(store.url)) == 2
    others.mv(f"{staging}/{next_part}", f"{store.url}/{next_part}")
    assert store.directory.publish(next_part) is Published.BEFORE


async def test_on_s3_another_file_in_the_way_is_a_clear_error(store: Store) -> None:  # H83
    committer = await a_committer(store)
    await seal(store, committer, "row", 1)
    (name,) = store.directory.staged()
    store.filesystem.pipe_file(f"{store.url}/{name}", b"of somebody else")
    with pytest.raises(SinkCommitFailed, match="another file of this name, with 16 bytes instead of 4"):
        await committer.complete(1)


# --- renames ------------------------------------------------------------------------------------------------------

OTHER_DEVICE = Path("/dev/shm")


@pytest.fixture
def two_devices(tmp_path: Path) -> Iterator[SinkDirectory]:
    """A sink whose staging directory is on another device than its readers' directory."""
    if not OTHER_DEVICE.is_dir() or OTHER_DEVICE.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second device to write to")
    elsewhere = OTHER_DEVICE / f"headgate-{os.getpid()}-{tmp_path.name}"
    elsewhere.mkdir()
    (tmp_path / ".headgate-out").symlink_to(elsewhere)
    yield SinkDirectory(str(tmp_path), "out")
    shutil.rmtree(elsewhere)


def test_between_two_devices_a_file_appears_whole(
    two_devices: SinkDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H83
    file = two_devices.create(PART)
    file.write(CONTENT)
    two_devices.finish(file)

    def break_off(source: Any, target: Any) -> None:
        target.write(source.read(1000))
        target.flush()
        raise OSError("the device is full")

    with monkeypatch.context() as broken:
        broken.setattr("shutil.copyfileobj", break_off)
        with pytest.raises(OSError, match="the device is full"):
            two_devices.publish(PART)
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == []
    assert two_devices.publish(PART) is Published.MOVED
    assert (tmp_path / PART).read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == [".headgate-out", PART]
    assert two_devices.staged() == []


def test_between_two_devices_a_link_in_the_way_is_not_followed(two_devices: SinkDirectory, tmp_path: Path) -> None:
    """H83: the hidden name of the copy can be guessed."""
    file = two_devices.create(PART)
    file.write(CONTENT)
    two_devices.finish(file)
    victim = tmp_path / ".victim"
    victim.write_bytes(b"precious")
    (tmp_path / f".{PART}.tmp").symlink_to(victim)
    assert two_devices.publish(PART) is Published.MOVED
    assert (tmp_path / PART).read_bytes() == CONTENT
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("devices", ["one", "two"])
def test_a_link_is_not_published(devices: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:  # H83
    secret = tmp_path / ".secret"
    secret.write_bytes(CONTENT)
    directory = SinkDirectory(str(tmp_path), "out")
    if devices == "two":
        directory = request.getfixturevalue("two_devices")
    directory.prepare()
    (tmp_path / ".headgate-out" / PART).symlink_to(secret)
    with pytest.raises(OSError, match=r"it is a symbolic link, and not the file .* Put that file back"):
        directory.publish(PART)
    assert not os.path.lexists(tmp_path / PART)


class CopyingFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec ships no types
    """A filesystem that inherits a move: it copies into the visible file, and nothing says that this is one step."""

    protocol = "copying"


class RenamingFileSystem(CopyingFileSystem):
    protocol = "renaming"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """One step."""


for one in (CopyingFileSystem, RenamingFileSystem):
    fsspec.register_implementation(one.protocol, one, clobber=True)


def test_a_filesystem_on_which_readers_could_see_half_a_file_is_refused() -> None:  # H83
    with pytest.raises(
        SinkMisused, match="CopyingFileSystem are moved by copying them, so readers could see half a file"
    ):
        SinkDirectory("copying://out", "out")
    with pytest.raises(SinkMisused, match="CopyingFileSystem"):
        SinkDirectory("dir::copying://out", "out")
    SinkDirectory("renaming://out", "out")
    assert move_on(MemoryFileSystem()) == MemoryFileSystem().mv


@pytest.mark.parametrize("path", ["taken", "taken/below"])
def test_a_file_in_place_of_the_directory_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(
        NotADirectoryError, match=rf"but file://.*/{path}, or what is above it, is a file: name another"
    ):
        SinkDirectory(str(tmp_path / path), "out").prepare()


def test_the_hidden_folder_is_made_again_after_it_was_removed(tmp_path: Path) -> None:
    directory = SinkDirectory(str(tmp_path / "out"), "sink")
    directory.finish(directory.create(PART))
    directory.delete(PART)
    directory.remove_if_empty()
    directory.finish(directory.create(PART))
    assert directory.staged() == [PART]
