# SPDX-License-Identifier: Apache-2.0

"""The files that a task writes on a plain path, a file URL and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.files.task import FileWriter
from spark_bridge.sinks.two_phase.errors import SinkBroken, SinkMisused
from spark_bridge.sinks.two_phase.parts import PartName
from spark_bridge.sinks.two_phase.sink import SinkWriterContext
from tests.spark_bridge.sinks.files.kit import SinkTask, failing, files_under, new_url, staged, visible


@pytest.fixture(params=["path", "file", "memory", "breaking"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "path": str(tmp_path / "out"),
        "file": f"file://{tmp_path}/out/",
        "memory": f"memory://{tmp_path}/out",
        "breaking": new_url(),
    }[request.param]


def a_writer(url: str, **settings: Any) -> FileWriter:
    return FileSink(url, **settings).writer(SinkWriterContext("out", 1, 2))


def test_rows_lie_whole_in_one_part_for_each_snapshot_and_no_reader_sees_them(url: str) -> None:
    writer = a_writer(url, suffix=".txt")
    writer.write("a")
    writer.write("ü")
    writer.write(b"raw\n")
    (first,) = writer.prepare()
    writer.write("b")
    (second,) = writer.prepare()

    assert (first.payload, second.payload) == ([3, 9], [1, 2])
    assert files_under(url) == {
        f".headgate-out/{first.name}": "a\nü\nraw\n".encode(),
        f".headgate-out/{second.name}": b"b\n",
    }
    assert visible(url) == {}


def test_the_name_of_a_part_says_after_which_checkpoint_it_was_begun(url: str) -> None:
    task = SinkTask(FileSink(url), subtask=1, attempt=2, checkpoint_id=4)
    parts = []
    for checkpoint_id in (7, -1, 9):
        parts += [PartName.parse(name) for name, _ in task.seal("a", checkpoint_id)[-1]]
    assert [(part.subtask, part.attempt, part.after, part.number) for part in parts if part] == [
        (1, 2, 4, 0),
        (1, 2, 7, 1),
        (1, 2, 7, 2),
    ]


def test_sealing_nothing_makes_no_file(url: str) -> None:
    writer = a_writer(url)
    assert writer.prepare() == []
    writer.write("a")
    assert len(writer.prepare()) == 1
    assert writer.prepare() == writer.prepare() == []


def test_a_part_that_is_large_enough_is_ended_and_the_next_begun(url: str) -> None:
    writer = a_writer(url, roll_bytes=4)
    for row in ("a", "b", "long one", "c"):
        writer.write(row)
    assert [file.payload for file in writer.prepare()] == [[2, 4], [1, 9], [1, 2]]


def test_two_writers_of_the_same_attempt_number_never_share_a_name(url: str) -> None:
    """Attempt numbers start at 0 again in the next application, which may restore nothing."""
    names = []
    for _ in range(2):
        writer = a_writer(url)
        writer.write("a")
        names += [file.name for file in writer.prepare()]
    assert len(set(names)) == 2


def test_what_was_not_sealed_is_deleted_and_what_was_is_kept(url: str) -> None:
    writer = a_writer(url, roll_bytes=4)
    writer.write("sealed")
    (kept,) = writer.prepare()
    writer.write("ended")
    writer.write("b")
    writer.close()
    assert staged(url) == [f".headgate-out/{kept.name}"]
    with pytest.raises(SinkBroken):
        writer.write("more")
    writer.close()


def test_a_line_feed_inside_a_line_would_make_two_rows_of_one(url: str) -> None:
    writer = a_writer(url)
    with pytest.raises(ValueError, match="line feed"):
        writer.write("a\nb")
    writer.write("a")
    assert writer.prepare()[0].payload[0] == 1


def test_a_row_with_a_lone_surrogate_is_named(url: str) -> None:  # H171
    writer = a_writer(url)
    with pytest.raises(
        ValueError, match=r"the row 'a\\ud800' cannot be written: it has a lone surrogate.*: replace it"
    ):
        writer.write("a\ud800")
    writer.write("a")
    assert writer.prepare()[0].payload[0] == 1


def test_what_is_neither_text_nor_bytes_is_refused(url: str) -> None:
    writer: Any = a_writer(url)
    said = r"a dict is not a line of a file: yield text or bytes from the stage before.*, or override encode"
    with pytest.raises(TypeError, match=said):
        writer.write({"id": 1})
    writer.write("a")
    assert writer.prepare()[0].payload[0] == 1


def test_a_writer_whose_write_failed_seals_nothing_more() -> None:
    """Its part may end in the middle of a row; an operator that swallows the error must not publish the part."""
    writer = a_writer(new_url())
    with failing(OSError(28, "No space left on device")), pytest.raises(OSError, match="No space"):
        writer.write("a")
    for use in (lambda: writer.write("b"), writer.prepare):
        with pytest.raises(SinkBroken, match="No space"):
            use()


def test_a_list_is_sent_only_for_what_was_sealed_just_now(url: str) -> None:
    task = SinkTask(FileSink(url, prefix="data"), operator_id="lines", subtask=5, attempt=3, checkpoint_id=11)
    task.operator.snapshot_state(12)
    assert task.context.sent == []

    event = task.seal("a", 13)
    task.operator.snapshot_state(-1)

    assert task.context.sent == []
    ((name, payload),) = event[-1]
    assert (event[1], event[4:6], payload) == ("lines", [13, True], [1, 2])
    part = PartName.parse(name)
    assert part is not None
    assert part == PartName(5, 12, 3, part.token, 0, "data")


@pytest.mark.parametrize("url", ["out", "./out", "~/out"])
def test_a_relative_path_is_refused(url: str) -> None:
    with pytest.raises(SinkMisused, match="absolute"):
        a_writer(url)


@pytest.mark.parametrize("settings", [{"prefix": "_x"}, {"suffix": "x"}, {"roll_bytes": 0}])
def test_invalid_settings_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prefix|suffix|roll_bytes"):
        a_writer(str(tmp_path), **settings)


def test_sealed_rows_are_on_the_disk_before_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure after the durable checkpoint must not lose the parts: sync first the file, then its name."""
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
    )
    writer = a_writer(str(tmp_path))
    writer.write("a")
    (file,) = writer.prepare()
    assert synced == [file.name, ".headgate-out"]
